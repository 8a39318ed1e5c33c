"""Walks compare vectors of few dimensions themselves, and tell apart what floats hardly do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.exact import row_terms, search_exact
from stoker.index.segment import Segment

K = 10
Metrics = pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])


def best_rows(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], metric: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows and scores by doubles, best first; distances from differences, so that none cancels."""
    rows, asked = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        asked = asked / np.linalg.norm(asked, axis=1, keepdims=True)
    if metric == "ip":
        ranks = asked @ rows.T
        scores = ranks
    else:
        squares = ((asked[:, None, :] - rows[None, :, :]) ** 2).sum(axis=2)
        ranks, scores = -squares, squares if metric == "l2" else 1 - squares / 2
    best = np.argsort(-ranks, axis=1, kind="stable")[:, :K]
    return best, np.take_along_axis(scores, best, 1)


def recall(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return float((found[:, :, None] == truth[:, None, :]).any(axis=1).mean())


def arc(count: int) -> NDArray[np.float32]:
    """Rows on a circle, as near to each other as 100,000 on all of it, of unlike lengths.

    Cosines of neighbors differ from one by 2e-9; floats next to one lie 6e-8 apart.
    """
    rng = np.random.default_rng(3)
    angles = rng.uniform(0, 2 * np.pi * count / 100_000, count) + 0.7
    lengths = rng.uniform(0.5, 2.0, (count, 1))
    return (lengths * np.stack([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)


@Metrics
@pytest.mark.parametrize("dim", range(2, 10))
@pytest.mark.parametrize("count", [40, 700, 3000])
def test_the_target_is_met(tmp_path: Path, metric: str, dim: int, count: int) -> None:
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((count, dim)).astype(np.float32)
    if metric == "ip":
        # Inner product of unlike lengths is no metric; graphs of it promise nothing.
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = rng.standard_normal((60, dim)).astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric=metric, ef_construction=80, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        assert segment.navigation_bits == 32
        # Nothing is loaded: vectors come by the page, and some lie on two.
        hits = segment.search(queries, K)
        truth, scores = best_rows(vectors, queries, metric)
        found = segment.ids_at(hits.rows)
        assert recall(found, truth) >= 0.95
        assert (hits.summary.completeness == 1).all()
        assert (hits.summary.exact_share == 1).all()
        right = found == truth
        np.testing.assert_allclose(hits.scores[right], scores[right], rtol=1e-5, atol=1e-5)


def test_neighbors_whose_cosines_round_to_one_are_told_apart(tmp_path: Path) -> None:
    vectors = arc(4000)
    # Within the arc: what lies beyond its ends has all its neighbors at one of them.
    queries = vectors[np.random.default_rng(4).choice(4000, 200, replace=False)] * np.float32(1.7)
    truth, scores = best_rows(vectors, queries, "cosine")
    assert (scores.astype(np.float32) == 1).mean() > 0.5  # no score tells these apart
    build_segment(tmp_path / "s", vectors, metric="cosine", ef_construction=80, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        hits = segment.search(queries, K)
        reached = (segment.ids_at(hits.rows)[:, :, None] == truth[:, None, :]).any(axis=1).mean(1)
        # Lengths that floats round turn a row by up to a thousandth of the way to the next.
        assert reached.mean() >= 0.98
        assert hits.summary.recall_bound.min() >= 0.5
        assert (reached < hits.summary.recall_bound - 1e-6).mean() <= 0.05


def test_rounded_scores_cost_no_promise(tmp_path: Path) -> None:
    """All queries lie as near to rows as those of calibration, but for what a float rounds."""
    rng = np.random.default_rng(6)
    vectors = rng.standard_normal((20_000, 2)).astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric="cosine", m=8, ef_construction=20, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        angles = np.arctan2(vectors[:200, 1], vectors[:200, 0]) + np.float32(1e-5)
        queries = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.float32(3.1)
        assert (segment.search(queries, K).summary.recall_bound > 0).all()


@Metrics
def test_a_scan_tells_them_apart_too(metric: str) -> None:
    vectors = arc(1000)
    if metric == "ip":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[::20] * np.float32(1.01)
    truth, scores = best_rows(vectors, queries, metric)
    found, scored = search_exact(vectors, row_terms(vectors, "l2"), queries, K, metric=metric)  # type: ignore[arg-type]
    assert recall(found, truth) >= 0.99
    np.testing.assert_allclose(scored, scores, rtol=1e-5, atol=1e-6)


def test_answers_from_memory_promise_what_is_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((3000, 3)).astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric="l2", ef_construction=80, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        assert [batch.kind for batch in segment.unit_batches()] == ["upper", "links", "vectors"]
        coverage = {"upper": 1.0, "links": 1.0, "vectors": 1.0}
        whole = segment.expected_recall(coverage)
        half = segment.expected_recall(coverage | {"vectors": 0.5})
        assert whole is not None
        assert half is not None
        assert 0 < half < whole <= 1
        assert segment.expected_recall(coverage | {"upper": 0.5}) is None
        queries = rng.standard_normal((40, 3)).astype(np.float32)
        none = segment.search(queries, K, resident_only=True)
        assert (none.summary.completeness < 1).all()
        for batch in segment.unit_batches():
            segment.load_units(batch.kind, batch.units)
        hits = segment.search(queries, K, resident_only=True)
        assert (hits.summary.completeness == 1).all()
        assert recall(segment.ids_at(hits.rows), best_rows(vectors, queries, "l2")[0]) >= 0.95
