"""What changes cost: searches while a merge runs, merge speed, write amplification, upserts.

    python tests/bench/bench_index_merge.py
    python tests/bench/bench_index_merge.py --vectors 100000 --dim 384 --rounds 5

Builds a collection of clustered vectors, then repeats: write a share of changes, search while
nothing else goes on, search while a merge seals the changes, search again. Merging is compared with
the stretch just before it: the same segments, the same changes in memory, the same minute of the
machine, and about as long. The stretch after it has other segments, whose vectors are not resident
yet, so it is reported apart. What noise alone does to the ratio is measured too: the stretch before
is cut into slices that alternate between two piles, and one pile's p99 is divided by the other's.
How many cores others used meanwhile is said; where that is not near zero, the p99 is the
scheduler's.

The floor is measured too: the same searches while an unrelated process is busy, at a merge's
priority, once computing and once copying memory. What it does to p99 no merge can undercut that
works on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.merger import NICENESS as MERGE_NICENESS
from stoker.index.settings import IndexSettings

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_proc import Busy

K = 10
IDLE_QUERIES_MIN = 1_000
_SLICE_QUERIES = 100
_CONTROL_S = 3.0
# What an unrelated process does: a merge shares the processors with searches, whatever it does.
CONTROLS = {
    "computing": "while True: sum(range(10_000))",
    "copying": (
        "import numpy\n"
        "a, b = (numpy.ones(32 << 20, numpy.uint8) for _ in range(2))\n"
        "while True: numpy.copyto(a, b)"
    ),
}


def clustered(count: int, dim: int, seed: int) -> NDArray[np.float32]:
    """Return vectors around a few hundred centres, so that neighbors are near and graphs real."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(8, count // 200), dim))
    near = centres[rng.integers(0, len(centres), count)]
    return (near + 0.5 * rng.standard_normal((count, dim))).astype(np.float32)


def timed_searches(
    collection: Collection,
    queries: NDArray[np.float32],
    go_on: Callable[[int], bool],
    began: list[float] | None = None,
) -> list[float]:
    """Search one query after the other while ``go_on``; return milliseconds.

    ``began`` gets the moment at which each began.
    """
    taken: list[float] = []
    while go_on(len(taken)):
        query = queries[len(taken) % len(queries)]
        started = time.perf_counter()
        collection.search(query, K)
        taken.append(1_000 * (time.perf_counter() - started))
        if began is not None:
            began.append(started)
    return taken


def run(
    *, vectors: int, dim: int, rounds: int, share: float, seed: int, idle_first_s: float = 3.0
) -> dict[str, Any]:
    """Measure; returns plain data."""
    points = clustered(vectors, dim, seed)
    queries = points[:2_000] + np.float32(0.05)
    changed = max(1, int(vectors * share))
    rows: list[dict[str, Any]] = []
    written = sealed = 0
    idle_s = idle_first_s
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as scratch:
        path = Path(scratch) / "c"
        build_collection(path, points, metric="cosine", ef_construction=100)
        settings = IndexSettings(merge_rows=0, delta_rows_max=10**7)
        with Collection(path, "rw", settings=settings) as collection:
            timed_searches(collection, queries, lambda done: done < IDLE_QUERIES_MIN)
            for number in range(rounds):
                fresh = clustered(changed, dim, seed + 1 + number)
                # Half of the changes replace documents, half are new.
                ids = np.arange(changed) + (changed // 2) * number
                ids[changed // 2 :] += vectors
                started = time.perf_counter()
                for start in range(0, changed, 100):
                    collection.upsert(ids[start : start + 100], fresh[start : start + 100])
                upsert_s = time.perf_counter() - started
                busy = Busy()
                idle = _idle_searches(collection, queries, idle_s)
                beside = {
                    name: _beside(collection, queries, code) for name, code in CONTROLS.items()
                }
                merging, report, phases = _while_merging(collection, queries)
                after = _idle_searches(collection, queries, idle_s)
                # The next stretch is as long as this merge was.
                idle_s = report.seconds
                written += report.rows
                sealed += report.rows_from_delta
                rows.append(
                    {
                        "idle_p50_ms": float(np.percentile(idle, 50)),
                        "idle_p99_ms": float(np.percentile(idle, 99)),
                        "noise_p99_ratio": _noise(idle),
                        **{
                            f"{name}_p{percent}_ms": float(np.percentile(taken, percent))
                            for name, taken in beside.items()
                            for percent in (50, 99)
                        },
                        "phases": {
                            name: {
                                "searches": len(values),
                                "p50_ms": float(np.percentile(values, 50)),
                                "p99_ms": float(np.percentile(values, 99)),
                            }
                            for name, values in phases.items()
                        },
                        "after_p50_ms": float(np.percentile(after, 50)),
                        "after_p99_ms": float(np.percentile(after, 99)),
                        "merging_p50_ms": float(np.percentile(merging, 50)),
                        "merging_p99_ms": float(np.percentile(merging, 99)),
                        "searches_while_merging": len(merging),
                        "searches_idle": len(idle),
                        "merge_s": report.seconds,
                        "merge_rows_per_s": report.rows / report.seconds,
                        "merge_mb_per_s": report.bytes_written / 1e6 / report.seconds,
                        "switch_ms": 1_000 * report.switch_s,
                        "upserts_per_s": changed / upsert_s,
                        "segments": len(collection.segment_names),
                        **busy.since(),
                    }
                )
            count, names = collection.count, collection.segment_names
    result = {"count": count, "segments": len(names), "written": written, "sealed": sealed}
    return {
        "vectors": vectors,
        "dim": dim,
        "changed_per_round": changed,
        "rounds": rows,
        "write_amplification": written / sealed,
        "result_hash": hashlib.sha256(json.dumps(result).encode()).hexdigest()[:16],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load_1min": os.getloadavg()[0],
    }


def _idle_searches(
    collection: Collection, queries: NDArray[np.float32], seconds: float
) -> list[float]:
    end = time.perf_counter() + seconds
    return timed_searches(
        collection,
        queries,
        lambda done: done < IDLE_QUERIES_MIN or time.perf_counter() < end,
    )


def _beside(collection: Collection, queries: NDArray[np.float32], code: str) -> list[float]:
    """Search while another process runs ``code``, as far behind searches as a merge is."""
    start = f"import os\nos.setpriority(os.PRIO_PROCESS, 0, {MERGE_NICENESS})\nprint(flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", start + code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            return _idle_searches(collection, queries, _CONTROL_S)
        finally:
            other.kill()


def _noise(taken: list[float]) -> float:
    """p99 of every other slice over that of the slices between."""
    slice_of = np.arange(len(taken)) // _SLICE_QUERIES
    values = np.array(taken)
    piles = [float(np.percentile(values[slice_of % 2 == side], 99)) for side in (0, 1)]
    return max(piles) / min(piles)


def _while_merging(
    collection: Collection, queries: NDArray[np.float32]
) -> tuple[list[float], Any, dict[str, list[float]]]:
    """Return milliseconds, the merge's report, and the milliseconds by what the merge was at."""
    reports: list[Any] = []
    steps: list[tuple[float, str]] = [(time.perf_counter(), "start")]

    def step(what: str, done: int, total: int) -> None:
        # What comes after the last of a kind has no name of its own.
        name = what if done < total else f"after {what}"
        if steps[-1][1] != name:
            steps.append((time.perf_counter(), name))

    merge = threading.Thread(target=lambda: reports.append(collection.merge(progress=step)))
    began: list[float] = []
    merge.start()
    taken = timed_searches(collection, queries, lambda done: done == 0 or merge.is_alive(), began)
    merge.join()
    phase_of = np.searchsorted([moment for moment, _ in steps], began, "right") - 1
    phases: dict[str, list[float]] = {}
    for phase, value in zip(phase_of.tolist(), taken, strict=True):
        phases.setdefault(steps[max(phase, 0)][1], []).append(value)
    return taken, reports[0], phases


def render(report: dict[str, Any]) -> str:
    """Return the report as text: medians over the rounds, and their spread."""
    rounds = report["rounds"]

    def line(name: str, key: str, unit: str) -> str:
        values = [row[key] for row in rounds]
        return (
            f"  {name:<28} {np.median(values):>10,.2f} {unit:<8} "
            f"({min(values):,.2f} to {max(values):,.2f})"
        )

    def ratio_line(name: str, above: str, below: str) -> str:
        values = [row[above] / row[below] for row in rounds]
        return (
            f"  {name:<28} {np.median(values):>10,.2f} {'':<8} "
            f"({min(values):,.2f} to {max(values):,.2f})"
        )

    others = max(row["others_cores"] for row in rounds)
    return "\n".join(
        [
            f"{report['vectors']:,} x {report['dim']}, {report['changed_per_round']:,} changes in "
            f"each of {len(rounds)} rounds; {report['machine']}, load {report['load_1min']:.1f}",
            line("search, idle, p50", "idle_p50_ms", "ms"),
            line("search, idle, p99", "idle_p99_ms", "ms"),
            line("search, merging, p50", "merging_p50_ms", "ms"),
            line("search, merging, p99", "merging_p99_ms", "ms"),
            ratio_line("p99 merging / idle", "merging_p99_ms", "idle_p99_ms"),
            *(
                ratio_line(f"p99 beside {name} / idle", f"{name}_p99_ms", "idle_p99_ms")
                for name in CONTROLS
            ),
            *(
                ratio_line(f"p99 merging / {name}", "merging_p99_ms", f"{name}_p99_ms")
                for name in CONTROLS
            ),
            line("the same, by noise alone", "noise_p99_ratio", ""),
            *(
                f"    while it was at {name:<18} p50 {phase['p50_ms']:.2f}, p99 "
                f"{phase['p99_ms']:.2f} ms of {phase['searches']:,} searches"
                for name, phase in rounds[-1]["phases"].items()
            ),
            line("search, after it, p50", "after_p50_ms", "ms"),
            line("search, after it, p99", "after_p99_ms", "ms"),
            line("merge", "merge_rows_per_s", "rows/s"),
            line("merge", "merge_mb_per_s", "MB/s"),
            line("changes wait for a switch", "switch_ms", "ms"),
            line("upserts, 100 a call", "upserts_per_s", "rows/s"),
            f"  {'write amplification':<28} {report['write_amplification']:>10,.2f} rows written "
            "per row changed",
            f"  others used up to {others:.2f} cores meanwhile"
            + (": p99 is the scheduler's, not ours" if others > 0.15 else ""),
            f"  result {report['result_hash']}; command: {' '.join(sys.argv)}",
        ]
    )


def main(show: Callable[[str], None] = print) -> None:
    """Parse the flags, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vectors", type=int, default=20_000, help="default: 20000")
    parser.add_argument("--dim", type=int, default=384, help="default: 384")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--share", type=float, default=0.05, help="changed a round; default: 0.05")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    report = run(
        vectors=args.vectors, dim=args.dim, rounds=args.rounds, share=args.share, seed=args.seed
    )
    show(json.dumps(report, indent=2) if args.json else render(report))


if __name__ == "__main__":
    main()
