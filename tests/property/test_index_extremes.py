"""The ends of what is taken: 2 and 4,096 dimensions, 1,000 neighbors, and what lies beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.segment import Segment

COUNT, ASKED = 1_100, 40
DIRECTIONS = 16


def drawn(rng: np.random.Generator, dim: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Vectors and queries that vary along few directions and a little along all others.

    As embeddings do. Drawn alike along thousands, all would lie equally far from each other: no
    row is near then, and calibration looks for one as widely as it can.
    """
    count = COUNT + ASKED
    if dim <= DIRECTIONS:
        points = rng.standard_normal((count, dim))
    else:
        turn = rng.standard_normal((DIRECTIONS, dim)) / DIRECTIONS**0.5
        points = rng.standard_normal((count, DIRECTIONS)) @ turn
        points += 0.1 * rng.standard_normal((count, dim))
    return points[:COUNT], points[COUNT:]


@pytest.mark.parametrize(
    ("dim", "metric", "dtype"),
    [
        (2, "l2", np.float32),
        (2, "cosine", np.float16),
        (3, "ip", np.float32),
        (4096, "l2", np.float16),
        (4096, "cosine", np.float32),
    ],
)
def test_a_thousand_neighbors_at_either_end(
    dim: int, metric: str, dtype: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(dim)
    points, asked = drawn(rng, dim)
    vectors, queries = points.astype(dtype), asked.astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric=metric, ef_construction=60, m=8, threads=1)
    stored = vectors.astype(np.float64)
    if metric == "cosine":
        stored = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    scores = queries @ stored.T
    if metric == "l2":
        scores = 2 * scores - (stored**2).sum(axis=1)
    best = -np.sort(-scores, axis=1)
    with Segment.open(tmp_path / "s") as segment:
        for k in (1, 10, 1_000):
            hits = segment.search(queries, k, recall_target=0.99)
            found = segment.ids_at(hits.rows)
            assert all(len(set(row)) == k for row in found.tolist())
            # Many lie so near to each other on a circle that halves cannot tell them apart.
            given = np.take_along_axis(scores, found, 1)
            as_good = given >= best[:, k - 1 : k] - 2e-3 * np.abs(best[:, :1])
            assert as_good.mean() >= 0.95
            better = hits.scores[:, :-1] <= hits.scores[:, 1:]
            assert (better if metric == "l2" else ~better | (np.diff(hits.scores) == 0)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_row_that_cannot_be_compared_is_named_everywhere(bad: float, tmp_path: Path) -> None:
    vectors = np.ones((40, 8), np.float32)
    vectors[31, 5] = bad
    with pytest.raises(InputError, match="row 31"):
        build_segment(tmp_path / "s", vectors)
    with pytest.raises(InputError, match="row 31"):
        build_collection(tmp_path / "c", vectors)
    build_collection(tmp_path / "c", np.ones((40, 8), np.float32))
    with Collection(tmp_path / "c", "rw") as collection:
        with pytest.raises(InputError, match="row 31"):
            collection.upsert(range(100, 140), vectors)
        with pytest.raises(InputError, match="row 31"):
            collection.search(vectors, 3)
        assert not collection.contains(range(100, 140)).any()
    with pytest.raises(InputError, match="4097"):
        build_segment(tmp_path / "wide", np.ones((2, 4097), np.float32))


@pytest.mark.parametrize(
    ("dim", "metric"), [(2, "cosine"), (2, "l2"), (3, "cosine"), (3, "ip"), (9, "l2")]
)
def test_few_dimensions_reach_the_target_that_nobody_named(
    dim: int, metric: str, tmp_path: Path
) -> None:
    """Codes of few dimensions tell few places apart, so answers have to be scored by vectors."""
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((4_000, dim)).astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric=metric, ef_construction=60, m=8, threads=1)
    queries = vectors[::50] + 0.3 * rng.standard_normal((80, dim)).astype(np.float32)
    stored = vectors.astype(np.float64)
    if metric == "cosine":
        stored = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    scores = queries @ stored.T
    if metric == "l2":
        scores = 2 * scores - (stored**2).sum(axis=1)
    least = -np.sort(-scores, axis=1)[:, 9:10]
    with Segment.open(tmp_path / "s") as segment:
        hits = segment.search(queries, 10)
        given = np.take_along_axis(scores, segment.ids_at(hits.rows), 1)
    assert (given >= least - 1e-6).mean() >= 0.95
    assert hits.summary.exact_share.mean() >= 0.98


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_vectors_almost_too_long_for_float32_are_sealed(metric: str, tmp_path: Path) -> None:
    # What calibration asks lies beyond some of them: it was refused as not finite.
    rng = np.random.default_rng(4)
    vectors = rng.standard_normal((200, 6))
    vectors = vectors * 1.8e19 / np.linalg.norm(vectors, axis=1, keepdims=True)
    build_segment(tmp_path / "s", vectors.astype(np.float32), metric=metric, m=8, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        assert segment.calibration is not None
        near = rng.choice(200, 5)
        hits = segment.search((vectors[near] * 1e-19).astype(np.float32), 1, ef=200)
        if metric != "l2":
            assert segment.ids_at(hits.rows)[:, 0].tolist() == near.tolist()
