"""What the arena on live searches costs a server: the same searches with it off, observing, acting.

Three servers over one index run side by side and are asked in turn, in blocks, so that other load
on the machine meets all of them. Compared are the latency as a client sees it, the CPU time of the
server per search, and the thread's own CPU time per passage that it compared. Closed loop, one
client: the servers are never overloaded.

    python tests/bench/bench_service_placement.py --rows 20000 --searches 3000
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from served_process import Served

from stoker.index.collection_build import build_collection

MODES = ("off", "observe", "act")
BLOCK = 100


def run(rows: int, searches: int, rate: float) -> dict[str, dict[str, float]]:
    """Return the figures by mode."""
    random = np.random.default_rng(1)
    vectors = random.standard_normal((rows, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    law = 1.0 / np.arange(1, rows + 1)
    asked = random.choice(rows, size=searches, p=law / law.sum())
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "collection"
        build_collection(index, vectors, [f"c{i}" for i in range(rows)], metric="cosine")
        servers = {
            mode: Served(
                index, Path(folder) / mode, {"SERVICE_PLACEMENT": mode, "SERVICE_WARM": "none"}
            )
            for mode in MODES
        }
        try:
            for server in servers.values():
                for row in asked[:200]:
                    server.client.search(vector=vectors[row], k=5)
            before = {
                mode: server.metric("process_cpu_seconds_total") for mode, server in servers.items()
            }
            for start in range(0, searches, BLOCK):
                for server in servers.values():
                    for i in range(start, min(start + BLOCK, searches)):
                        began = time.perf_counter()
                        server.client.search(
                            vector=vectors[asked[i]], k=5, session=f"s{i // 4}", route="bench"
                        )
                        took = time.perf_counter() - began
                        server.seconds.append(took)
                        if rate:
                            time.sleep(max(0.0, 1.0 / rate - took))
            for mode, server in servers.items():
                cpu = server.metric("process_cpu_seconds_total") - before[mode]
                taken = np.array(server.seconds) * 1e3
                seen = server.metric("stoker_prefetch_placement_accesses_total")
                spent = server.metric("stoker_prefetch_placement_cpu_seconds_total")
                results[mode] = {
                    "p50_ms": float(np.percentile(taken, 50)),
                    "p99_ms": float(np.percentile(taken, 99)),
                    "cpu_ms_per_search": cpu * 1e3 / searches,
                    "accesses": seen,
                    "skipped": server.metric("stoker_prefetch_placement_skipped_requests_total"),
                    "thread_us_per_access": spent * 1e6 / seen if seen else 0.0,
                }
        finally:
            for server in servers.values():
                server.stop()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--searches", type=int, default=3_000)
    parser.add_argument("--rate", type=float, default=0.0, help="searches a second, 0: no pause")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    results = run(args.rows, args.searches, args.rate)
    names: list[str] = list(next(iter(results.values())))
    print(f"| mode | {' | '.join(names)} |")
    print("|---|" + "---:|" * len(names))
    for mode, row in results.items():
        cells: list[Any] = [f"{row[name]:.3f}" for name in names]
        print(f"| {mode} | {' | '.join(cells)} |")
    command = " ".join(["python", *sys.argv])
    print(f"{platform.platform()}, Python {platform.python_version()}; {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
