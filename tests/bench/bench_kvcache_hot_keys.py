"""Hot keys and snapshots: what a read costs behind a lock, on the fast path, and beside a writer.

``python tests/bench/bench_kvcache_hot_keys.py`` (half a minute). Threads read one key as fast as
they can, in turn through `TenantSlots` alone and through `HotKeys` in front of it; and a table is
read in snapshots with no writer, and with one at full speed, beside a dict behind one lock.
Every read is timed; figures are of all threads together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stoker.kvcache.hot_keys import HotKeys
from stoker.kvcache.snapshot_table import SnapshotTable
from stoker.kvcache.tenant_slots import TenantQuota, TenantSlots

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import machine

THREADS = 4


@dataclasses.dataclass
class Reads:
    """The times of all threads' reads, us; the writes beside them; how long all took."""

    times_us: list[np.ndarray]
    writes: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, float]:
        times = np.concatenate(self.times_us)
        figures = {
            "reads_per_s": round(len(times) / self.seconds),
            "p50_us": round(float(np.percentile(times, 50)), 2),
            "p99_us": round(float(np.percentile(times, 99)), 2),
            "p999_us": round(float(np.percentile(times, 99.9)), 1),
        }
        return figures | (
            {"writes_per_s": round(self.writes / self.seconds)} if self.writes else {}
        )


def timed(
    into: Reads, read: Callable[[], Any], *, reads: int, beside: Callable[[], Any] | None
) -> None:
    """Read so often in each thread, perhaps beside a writer that goes on until they are done."""
    start = threading.Barrier(THREADS + 1 + (beside is not None))
    done = threading.Event()

    def run() -> None:
        times = np.zeros(reads)
        start.wait()
        for place in range(reads):
            began = time.perf_counter_ns()
            read()
            times[place] = time.perf_counter_ns() - began
        into.times_us.append(times / 1e3)

    def write() -> None:
        assert beside is not None
        start.wait()
        while True:
            beside()
            into.writes += 1
            if done.is_set():
                return

    readers = [threading.Thread(target=run) for _ in range(THREADS)]
    writers = [threading.Thread(target=write)] if beside is not None else []
    for thread in (*readers, *writers):
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in readers:
        thread.join()
    into.seconds += time.perf_counter() - began
    done.set()
    for thread in writers:
        thread.join()


def measure(reads: int) -> dict[str, Any]:
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
    found = {name: Reads([]) for name in runs}
    for _ in range(3):  # in turn: what else runs on the machine meets all of them
        for name, (read, beside) in runs.items():
            timed(found[name], read, reads=reads, beside=beside)
    table.check()
    return {name: way.row() for name, way in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=100_000, help="per thread, way and round")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.reads), indent=1))
    print(f"{THREADS} reading threads; machine {machine()}")
