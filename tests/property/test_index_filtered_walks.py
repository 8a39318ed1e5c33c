"""Filters whose rows lie elsewhere than the query: another tenant's, or another topic's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.exact import unit_rows
from stoker.index.held_out import recall_of
from stoker.index.segment import Segment

COUNT, DIM, TOPICS, EF = 6_000, 24, 30, 24


class Scene:
    """A segment, its vectors and topics by row, and queries near 200 of its rows."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(20_261_205)
        centres = rng.standard_normal((TOPICS, DIM))
        topics = rng.integers(0, TOPICS, COUNT)
        vectors = centres[topics] + 0.4 * rng.standard_normal((COUNT, DIM))
        build_segment(path, vectors.astype(np.float32), ef_construction=80, threads=1)
        self.segment = Segment.open(path)
        ids = self.segment.ids_at(np.arange(COUNT))
        self.vectors, self.topics = unit_rows(vectors[ids].astype(np.float32)), topics[ids]
        self.asked = np.sort(rng.choice(COUNT, 200, replace=False))
        queries = self.vectors[self.asked] + 0.02 * rng.standard_normal((200, DIM))
        self.queries = unit_rows(queries.astype(np.float32))

    def search(self, allowed: NDArray[np.bool_], k: int) -> tuple[NDArray[np.float64], float]:
        """Recall of each query, and the share of queries whose bound it broke."""
        hits = self.segment.search(
            self.queries, k, ef=EF, allow=np.packbits(allowed, bitorder="little")
        )
        assert allowed[hits.rows[hits.rows >= 0]].all()
        assert ((hits.rows >= 0).sum(axis=1) == min(k, allowed.sum())).all()
        similar = np.where(allowed, self.queries @ self.vectors.T, -np.inf)
        recall = recall_of(hits.rows, np.argsort(-similar, axis=1)[:, :k])
        assert (hits.summary.completeness == 1).all()
        return recall, float(np.mean(recall < hits.summary.recall_bound - 1e-6))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("filtered") / "s")


@pytest.mark.parametrize("topics", [15, 24, 29])
def test_rows_of_other_topics_are_found(scene: Scene, topics: int) -> None:
    """Too many for a scan, and none near the query: a walk of the usual width came back empty."""
    allowed = scene.topics < topics
    recall, broken = scene.search(allowed, 10)
    elsewhere = ~allowed[scene.asked]
    assert elsewhere.any()
    assert recall[elsewhere].mean() >= 0.95
    assert recall[~elsewhere].mean() >= 0.85  # what a walk of this width finds without a filter
    assert broken <= 0.05


@pytest.mark.parametrize("selectivity", [0.9, 0.5])
def test_rows_spread_evenly_are_walked_to(scene: Scene, selectivity: float) -> None:
    allowed = np.random.default_rng(3).random(COUNT) < selectivity
    recall, broken = scene.search(allowed, 10)
    assert recall.mean() >= 0.85
    assert broken <= 0.05


@pytest.mark.parametrize(("allowed_count", "k"), [(1, 10), (7, 10), (120, 10), (1_500, 1_000)])
def test_a_scan_settles_more_than_a_narrow_walk_would_keep(
    scene: Scene, allowed_count: int, k: int
) -> None:
    allowed = np.zeros(COUNT, np.bool_)
    allowed[np.random.default_rng(4).choice(COUNT, allowed_count, replace=False)] = True
    recall, broken = scene.search(allowed, k)
    if allowed_count >= k:
        assert recall.mean() >= 0.97
        assert broken <= 0.05
