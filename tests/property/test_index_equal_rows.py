"""Equal vectors, and many of them: answers, promises and links as if each stood alone."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from stoker.index.build import build_segment
from stoker.index.equal_rows import first_of_equals, row_hashes
from stoker.index.exact import unit_rows
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings
from stoker.index.stored_graph import read_graph

DIM = 24


def with_copies(rows: int, copies: int, groups: int, seed: int) -> NDArray[np.float32]:
    """Rows in clusters, the first ``groups`` of them standing there ``copies`` times more."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(rows // 20, 1), DIM))
    noise = 0.5 * rng.standard_normal((rows, DIM))
    vectors = centres[rng.integers(0, len(centres), rows)] + noise
    vectors = np.concatenate([vectors, np.repeat(vectors[:groups], copies, axis=0)])
    return vectors[rng.permutation(len(vectors))].astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    dim=st.integers(1, 9),
    values=st.integers(1, 3),
    scale=st.sampled_from([1e-40, 1.0, 1e17]),
    group_max=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_the_first_equal_row_is_that_of_a_comparison(
    count: int, dim: int, values: int, scale: float, group_max: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = (rng.integers(-values, values, (count, dim)) * scale).astype(np.float32)
    vectors[rng.random(vectors.shape) < 0.2] *= np.float32(-0.0)
    equal = (vectors[:, None] == vectors[None]).all(axis=2)
    wanted = np.where(equal.sum(axis=1) > group_max, equal.argmax(axis=1), np.arange(count))
    found = first_of_equals(vectors, metric="l2", group_max=group_max)
    if found is None:
        found = np.arange(count)
    assert found.tolist() == wanted.tolist()
    hashes = row_hashes(vectors)
    assert np.array_equal(hashes[:, None] == hashes[None], equal)


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 40),
    exponent=st.integers(-44, 38),
    spread=st.integers(0, 12),
    seed=st.integers(0, 2**16),
)
def test_rows_of_any_length_come_to_unit_length(
    dim: int, exponent: int, spread: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    wide = rng.uniform(-3, 3, (6, dim)) * 10.0 ** (exponent - rng.integers(0, spread + 1, (6, dim)))
    rows = wide.astype(np.float32)
    rows[~np.isfinite(rows)] = 1.0
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    wanted = np.divide(rows, lengths, out=np.zeros(rows.shape), where=lengths > 0)
    np.testing.assert_allclose(unit_rows(rows), wanted, atol=3e-7)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_no_walk_is_caught_among_copies(tmp_path: Path, metric: str) -> None:
    vectors = with_copies(2_000, 400, 3, seed=5)
    build_segment(tmp_path / "s", vectors, metric=metric, threads=1)
    graph = read_graph(tmp_path / "s")
    graph.check()
    used = np.arange(graph.m0) < graph.level0_counts[:, None]
    sources, slots = np.nonzero(used)
    links = csr_array(
        (np.ones(len(sources), np.int8), (sources, graph.level0[sources, slots])),
        shape=(graph.count, graph.count),
    )
    with Segment.open(tmp_path / "s") as segment:
        stored = segment.vectors(np.arange(segment.count))
        rows = np.flatnonzero(first_of_equals(stored, metric="l2", group_max=8) != np.arange(3200))
        assert len(rows) == 3 * 400
        # From any copy, and from any other row, a walk can come to nearly all rows, copies too.
        for start in [*rows[::240], *np.setdiff1d(np.arange(3200), rows)[::500]]:
            met = breadth_first_order(links, start, return_predecessors=False)
            assert len(met) >= 0.99 * graph.count
            assert np.isin(rows, met).all()
        rng = np.random.default_rng(6)
        queries = vectors[rng.integers(0, len(vectors), 200)]
        queries = (queries + 0.5 * rng.standard_normal(queries.shape)).astype(np.float32)
        other = unit_rows(queries) if metric == "cosine" else queries
        distances = ((other[:, None].astype(np.float64) - stored[None]) ** 2).sum(axis=2)
        kth = np.sort(distances, axis=1)[:, 9:10]
        hits = segment.search(queries, 10)
        got = np.take_along_axis(distances, hits.rows, axis=1)
        recall = (got <= kth + 1e-6).mean(axis=1)
        assert recall.mean() >= 0.95
        assert recall.min() >= 0.5
        assert (recall < hits.summary.recall_bound - 1e-6).mean() <= 0.05


def test_copies_that_stand_for_each_other_are_no_loss(tmp_path: Path) -> None:
    vectors = with_copies(600, 60, 40, seed=7)
    build_segment(tmp_path / "s", vectors, metric="l2", threads=1)
    with Segment.open(tmp_path / "s") as segment:
        calibration = segment.calibration
        assert calibration is not None
        assert calibration.recall_mean[-1] >= 0.95
        assert calibration.recall_low[-1] >= 0.8


@pytest.mark.parametrize("count", [1, 9, 33, 500])
@pytest.mark.parametrize("m", [2, 16])
def test_nothing_but_one_vector(tmp_path: Path, count: int, m: int) -> None:
    vectors = np.tile(np.arange(1, DIM + 1, dtype=np.float32), (count, 1))
    build_segment(tmp_path / "s", vectors, metric="cosine", m=m, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        hits = segment.search(vectors[:1], min(count, 1000), ef=count)
        assert sorted(segment.ids_at(hits.rows)[0].tolist()) == list(range(count))


@pytest.mark.parametrize("count", [1, 40, 700])
def test_a_search_as_wide_as_the_segment_meets_every_row(tmp_path: Path, count: int) -> None:
    # A point in the middle of many directions draws all links, and cuts the others off.
    rng = np.random.default_rng(8)
    vectors = rng.standard_normal((count, 72)).astype(np.float32)
    vectors[: count // 10] = 0
    build_segment(tmp_path / "s", vectors, metric="l2", threads=1)
    queries = rng.standard_normal((5, 72)).astype(np.float32)
    for bits in (2, 4):
        with_bits = IndexSettings(navigation_bits=bits)
        with Segment.open(tmp_path / "s", settings=with_bits) as segment:
            hits = segment.search(queries, count, ef=count, recall_target=0.9999)
            for rows in hits.rows:
                assert sorted(rows.tolist()) == list(range(count))
            assert (hits.summary.completeness == 1).all()
            assert (hits.summary.recall_bound >= 0.9).all()
            if count == 40:  # Too few to calibrate: as wide anyway.
                near = segment.search(queries, 3, recall_target=0.9999)
                distances = ((queries[:, None] - vectors[None]) ** 2).sum(axis=2)
                got = np.take_along_axis(distances, segment.ids_at(near.rows), axis=1)
                assert (got <= np.sort(distances, axis=1)[:, 2:3] * 1.001).all()
                assert (near.summary.recall_bound >= 0.9).all()
