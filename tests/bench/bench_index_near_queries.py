"""What a narrow walk for near queries is worth: searches by a recall target, with it and without.

    python tests/bench/bench_index_near_queries.py --count 100000 --work WORK

Seals the benchmark's `local` vectors and asks five sorts of questions one by one, by the default
recall target: vectors with little and with much noise, far from all and between two, and the
engine benchmark's own. Each is asked of the segment as it is, and of the same one without what
calibration says of near queries, which is how segments were searched that know nothing of them; in
turns, everything resident and within a tenth of the bytes. Prints a row each: median microseconds
and recall@10.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.calibration import recall_of
from stoker.index.manifest import Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_data import REAL_DIM, corpus

K = 10
SEED = 11
Vectors = NDArray[np.float32]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--questions", type=int, default=400, help="of each sort")
    parser.add_argument("--work", type=Path, required=True, help="folder for vectors and index")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    vectors = np.asarray(corpus(args.count, REAL_DIM, args.work, "local").vectors)
    path = args.work / f"near-{args.count}"
    if not path.exists():
        build_segment(path, vectors, metric="ip")
    whole = Manifest.read(path)
    assert whole.calibration is not None
    blank = dataclasses.replace(
        whole.calibration, near_mean=(), near_low=(), coarse_near_mean=(), coarse_near_low=()
    )
    manifests = {"now": whole, "all alike": dataclasses.replace(whole, calibration=blank)}
    print(
        "| memory | questions | " + " | ".join(f"{name}, us; recall" for name in manifests) + " |"
    )
    print("| --- | --- |" + " ---: |" * len(manifests))
    for share in (1.0, 0.1):
        budget = 0 if share == 1.0 else int(share * whole.total_bytes)
        opened = {
            name: Segment(path, manifest, budget, IndexSettings())
            for name, manifest in manifests.items()
        }
        for segment in opened.values():
            for batch in segment.unit_batches():
                segment.load_units(batch.kind, batch.units)
        for sort, queries in questions(vectors, args.questions).items():
            truth = np.argsort(-(queries @ vectors.T), axis=1)[:, :K]
            row = measure(opened, queries, truth)
            print(f"| {share:.0%} | {sort} | " + " | ".join(row) + " |", flush=True)
        for segment in opened.values():
            segment.close()


def questions(vectors: Vectors, count: int) -> dict[str, Vectors]:
    """Return questions by sort; float32, shape (count, dim) each."""
    rng = np.random.default_rng(SEED)
    base, other = (vectors[rng.integers(0, len(vectors), count)] for _ in range(2))
    noise = rng.standard_normal(base.shape) / np.sqrt(base.shape[1])
    reach = rng.uniform(0.0, 1.0, (count, 1))
    made = {
        "noise 0.25 to 0.5": base + (0.25 + 0.25 * reach) * noise,
        "noise 0.5 (as the engine benchmark's)": base + 0.5 * noise,
        "noise 0.5 to 0.7": base + (0.5 + 0.2 * reach) * noise,
        "far": base + (0.9 + 0.8 * reach) * noise,
        "between two": 0.6 * base + 0.4 * other + 0.3 * noise,
    }
    return {name: queries.astype(np.float32) for name, queries in made.items()}


def measure(opened: dict[str, Segment], queries: Vectors, truth: NDArray[np.int64]) -> list[str]:
    """Ask each segment one by one, in turns; a cell each."""
    times: dict[str, list[float]] = {name: [] for name in opened}
    found: dict[str, list[NDArray[np.int64]]] = {name: [] for name in opened}
    for query in queries:
        for name, segment in opened.items():
            began = time.perf_counter()
            hits = segment.search(query[None], K)
            times[name].append(time.perf_counter() - began)
            found[name].append(segment.ids_at(hits.rows)[0])
    return [
        f"{1e6 * np.median(times[name]):.1f}; {recall_of(np.array(found[name]), truth).mean():.4f}"
        for name in opened
    ]


if __name__ == "__main__":
    main()
