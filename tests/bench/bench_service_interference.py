"""Demand p99 with warming on against off, in steady state: `prefetch does no harm`, as one figure.

    python tests/bench/bench_service_interference.py

Three servers over one index are asked in turn, in windows, one client, closed loop:

* "off" neither warms nor compares policies;
* "ahead" runs the arena and the forecast, and reads ahead (`service.placement` "act");
* "warm-ups" does that too, and its window is a whole warm-up of everything: planned, ordered,
  loaded or found there, and read back. Only the searches that began while it ran count. A
  deployment does that at a start or a roll only.

The ratio of each one's p99 to that of "off" is given with the interval in which nine of ten draws
of windows (by number, with repeats) put it: the goal is 1.1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray
from served_process import Served

from stoker.errors import StokerError
from stoker.index.collection_build import build_collection

GOAL = 1.1

Milliseconds = NDArray[np.float64]


class WarmUp:
    """A warm-up of everything, begun; what ends it is its receipt."""

    def __init__(self, server: Served) -> None:
        self._url = f"{server.url}/v1/warmup"
        self._began = time.perf_counter()
        self._error: OSError | None = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            request = urllib.request.Request(
                self._url,
                data=json.dumps({"everything": True, "wait": True}).encode(),
                headers={"Content-Type": "application/json"},
                method="POST",
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except OSError as error:
            self._error = error
        finally:
            self.seconds = time.perf_counter() - self._began
            self.ended.set()

    def join(self) -> float:
        """Wait for it, and return how many seconds it took."""
        self._thread.join()
        if self._error is not None:
            raise SystemExit(f"a warm-up failed: {self._error}")
        return self.seconds


def window(
    server: Served,
    vectors: NDArray[np.float32],
    asked: NDArray[np.int64],
    ended: threading.Event | None = None,
) -> Milliseconds:
    """Return how long each search took; with ``ended``, of those that began before it."""
    taken: list[float] = []
    rows = asked.tolist() if ended is None else itertools.cycle(asked.tolist())
    for at, row in enumerate(rows):
        if ended is not None and ended.is_set():
            break
        began = time.perf_counter()
        server.client.search(vector=vectors[row], k=10, session=f"s{at // 3}")
        taken.append(1e3 * (time.perf_counter() - began))
    return np.array(taken)


def ratio_of(windows: dict[str, list[Milliseconds]], mode: str, which: Sequence[int]) -> float:
    """Return the ratio of p99s, a mode's by that of off, over some of the windows."""
    ours, off = (
        float(np.percentile(np.concatenate([windows[name][n] for n in which]), 99))
        for name in (mode, "off")
    )
    return ours / off


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--searches", type=int, default=300, help="in a window without a warm-up")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((args.rows, 64)).astype(np.float32)
    law = 1.0 / np.arange(1, args.rows + 1)
    asked = rng.choice(args.rows, size=(args.windows + 1, args.searches), p=law / law.sum())
    modes = {
        mode: {"SERVICE_WARM": "none", "SERVICE_PLACEMENT": "off" if mode == "off" else "act"}
        for mode in ("off", "ahead", "warm-ups")
    }
    windows: dict[str, list[Milliseconds]] = {mode: [] for mode in modes}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "collection"
        build_collection(index, vectors, [f"c{row}" for row in range(args.rows)])
        servers: dict[str, Served] = {}
        try:
            for mode, settings in modes.items():
                servers[mode] = Served(index, Path(folder) / mode, settings)
                window(servers[mode], vectors, asked[-1])
            for number in range(args.windows):
                for mode in modes if number % 2 else reversed(modes):
                    if mode == "warm-ups":
                        warm = WarmUp(servers[mode])
                        windows[mode].append(
                            window(servers[mode], vectors, asked[number], warm.ended)
                        )
                        seconds.append(warm.join())
                    else:
                        windows[mode].append(window(servers[mode], vectors, asked[number]))
        except StokerError as error:
            raise SystemExit(f"a server failed: {error}") from error
        finally:
            for server in servers.values():
                server.stop()
    print("| warming | p50 ms | p99 ms | p99 of a window, quartiles | p99 to off | nine of ten |")
    print("|---|---:|---:|---:|---:|---:|")
    draws = [rng.integers(0, args.windows, args.windows).tolist() for _ in range(500)]
    for mode, found in windows.items():
        each = [float(np.percentile(taken, 99)) for taken in found]
        low, high = np.percentile(each, [25, 75])
        p50, p99 = np.percentile(np.concatenate(found), [50, 99])
        ratio = ratio_of(windows, mode, range(args.windows))
        least, most = np.percentile([ratio_of(windows, mode, draw) for draw in draws], [5, 95])
        print(
            f"| {mode} | {p50:.2f} | {p99:.2f} | {low:.2f}, {high:.2f} | {ratio:.3f} | "
            f"{least:.3f} to {most:.3f} |"
        )
    print(
        f"goal {GOAL}; {args.windows} windows of {args.searches} searches, or of a warm-up: "
        f"{np.mean([len(taken) for taken in windows['warm-ups']]):.0f} searches, "
        f"{1e3 * np.median(seconds):.0f} ms in the median"
    )
    print(
        f"{platform.platform()}, Python {platform.python_version()}; "
        f"{' '.join(['python', *sys.argv])}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
