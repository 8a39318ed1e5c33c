"""Hot keys and snapshots: what a read costs behind a lock, on the fast path, and beside a writer.

``python tests/bench/bench_kvcache_hot_keys.py`` (half a minute). Threads read one key as fast as
they can, in turn through `TenantSlots` alone and through `HotKeys` in front of it; and a table is
read in snapshots with no writer, and with one at full speed, beside a dict behind one lock.
Every read is timed; figures are of all threads together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker.kvcache.hot_keys import HotKeys
from stoker.kvcache.snapshot_table import SnapshotTable
from stoker.kvcache.tenant_slots import TenantQuota, TenantSlots

THREADS = 4


def timed(read: Callable[[], Any], *, seconds: float, beside: Callable[[], Any] | None) -> Any:
    """Read in threads for a while; returns the times of all reads, us, and the writes beside."""
    stop = threading.Event()
    start = threading.Barrier(THREADS + 1 + (beside is not None))
    found: list[np.ndarray] = []
    writes = [0]

    def run() -> None:
        times: list[int] = []
        start.wait()
        while not stop.is_set():
            began = time.perf_counter_ns()
            read()
            times.append(time.perf_counter_ns() - began)
        found.append(np.array(times) / 1e3)

    def write() -> None:
        assert beside is not None
        start.wait()
        while not stop.is_set():
            beside()
            writes[0] += 1

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    threads += [threading.Thread(target=write)] if beside is not None else []
    for thread in threads:
        thread.start()
    start.wait()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return np.concatenate(found), writes[0]


def row(times: np.ndarray, seconds: float, writes: int = 0) -> dict[str, float]:
    figures = {
        "reads_per_s": round(len(times) / seconds),
        "p50_us": round(float(np.percentile(times, 50)), 2),
        "p99_us": round(float(np.percentile(times, 99)), 2),
        "p999_us": round(float(np.percentile(times, 99.9)), 1),
    }
    return figures | ({"writes_per_s": round(writes / seconds)} if writes else {})


def measure(seconds: float) -> dict[str, Any]:
    slots: TenantSlots[str] = TenantSlots(bytes_max=1_000, quota=TenantQuota(1_000))
    slots.put("t", "k", "value", 10)

    def slow(key: str) -> str | None:
        with slots.use("t", key) as held:
            return held

    hot: HotKeys[str] = HotKeys(slow, accesses_min=500, window_s=10.0, p99_us=0.0)
    for _ in range(2_000):
        hot.get("k")
    hot.review()
    assert hot.fast_keys() == {"k"}
    table: SnapshotTable[int] = SnapshotTable()
    table.write({f"k{number}": number for number in range(10_000)})
    plain, lock = dict(table.present().items()), threading.Lock()
    value = iter(range(1 << 60))

    def write_snapshot() -> None:
        table.write({f"k{next(value) % 10_000}": 1})

    def read_locked() -> int | None:
        with lock:
            return plain.get("k77")

    def write_locked() -> None:
        with lock:  # as long a piece of work as a snapshot's copy of one shard
            plain.update({f"k{next(value) % 10_000}": 1 for _ in range(156)})

    def read_snapshot() -> int | None:
        with table.hold() as snapshot:
            return snapshot.get("k77")

    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "hot_key_behind_lock": (lambda: slow("k"), None),
        "hot_key_fast_path": (lambda: hot.get("k"), None),
        "snapshot_alone": (read_snapshot, None),
        "snapshot_beside_writer": (read_snapshot, write_snapshot),
        "locked_dict_alone": (read_locked, None),
        "locked_dict_beside_writer": (read_locked, write_locked),
    }
    times: dict[str, list[np.ndarray]] = {name: [] for name in runs}
    writes = dict.fromkeys(runs, 0)
    rounds = 3
    for _ in range(rounds):  # in turn: what else runs on the machine meets all of them
        for name, (read, beside) in runs.items():
            found, count = timed(read, seconds=seconds / rounds, beside=beside)
            times[name].append(found)
            writes[name] += count
    table.check()
    return {
        name: row(np.concatenate(found), seconds, writes[name]) for name, found in times.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="per way of reading")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.seconds), indent=1))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{THREADS} reading threads; machine {machine}")
