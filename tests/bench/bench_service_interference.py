"""Demand p99 with warming on against off, in steady state: `prefetch does no harm`, as one figure.

    python tests/bench/bench_service_interference.py

Three servers over one index are asked in turn, in windows, one client, closed loop:

* "off" neither warms nor compares policies;
* "ahead" runs the arena and the forecast, and reads ahead (`service.placement` "act");
* "warm-ups" does that too, and in each window at least one whole warm-up of everything: planned,
  ordered, loaded or found there, and read back. A deployment does that at a start or a roll only.

The ratio of each one's p99 to that of "off" is given with the interval in which nine of ten draws
of windows (by number, with repeats) put it: the goal is 1.1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray
from served_process import Served

from stoker.errors import StokerError
from stoker.index.collection_build import build_collection

GOAL = 1.1

Milliseconds = NDArray[np.float64]


@contextmanager
def warming(server: Served, counted: list[int], pause_s: float) -> Iterator[None]:
    """Start one warm-up after the other meanwhile; their number is added to the list."""
    stop, done = threading.Event(), 0

    def run() -> None:
        nonlocal done
        body = json.dumps({"everything": True, "wait": True}).encode()
        while not stop.is_set():
            request = urllib.request.Request(
                f"{server.url}/v1/warmup",
                data=body,
                headers={"Content-Type": "application/json"},
                method="POST",
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            done += 1
            stop.wait(pause_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        counted.append(done)
        if not done:
            raise SystemExit("no warm-up ended in a window")


def window(server: Served, vectors: NDArray[np.float32], asked: NDArray[np.int64]) -> Milliseconds:
    taken = []
    for at, row in enumerate(asked.tolist()):
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
    parser.add_argument("--searches", type=int, default=200, help="in a window")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two warm-ups")
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
    warmed: list[int] = []
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
                        with warming(servers[mode], warmed, args.pause):
                            windows[mode].append(window(servers[mode], vectors, asked[number]))
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
        f"goal {GOAL}; {sum(warmed)} warm-ups in {args.windows} windows of {args.searches} searches"
    )
    print(
        f"{platform.platform()}, Python {platform.python_version()}; "
        f"{' '.join(['python', *sys.argv])}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
