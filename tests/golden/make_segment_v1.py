"""Make the golden segment of format version 1: ``python tests/golden/make_segment_v1.py FOLDER``.

Run once, when the version was new. Later readers must still read what it wrote, so it is run again
only to make the golden segment of a *new* version, under a new name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SEED = 20_261_129


def golden_vectors() -> NDArray[np.float32]:
    """Made of sums of small integers, so that every machine makes the same ones."""
    rng = np.random.default_rng(SEED)
    return rng.integers(-8, 9, (200, 16)).astype(np.float32)


def golden_queries() -> NDArray[np.float32]:
    """Five queries, made likewise."""
    return np.random.default_rng(SEED + 1).integers(-8, 9, (5, 16)).astype(np.float32)


def make(
    folder: Path,
    vectors: NDArray[np.float32],
    queries: NDArray[np.float32],
    metric: str = "l2",
) -> None:
    """Seal ``vectors`` at ``folder``, and write beside it what ``queries`` are answered."""
    from stoker.index.build import build_segment
    from stoker.index.segment import Segment

    ids = [f"chunk-{i}" for i in range(len(vectors))]
    build_segment(folder, vectors, ids, metric=metric, m=8, ef_construction=50, threads=1)
    with Segment.open(folder) as segment:
        hits = segment.search(queries, 5, ef=200, recall_target=1.0)
        answer = {
            "ids": segment.ids_at(hits.rows).tolist(),
            "scores": [[float(v) for v in row] for row in hits.scores],
        }
    folder.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]), golden_vectors(), golden_queries())
