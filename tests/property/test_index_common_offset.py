"""Rows that have much in common, or lengths that differ, under inner products: all are found."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import stoker.index.delta as delta_module
from stoker.index.build import build_segment
from stoker.index.delta import Delta
from stoker.index.document_values import Change
from stoker.index.link_shift import link_shift
from stoker.index.segment import Segment

SEED = 20_261_130
DIM = 24
ROWS = 2_000


def drawn(count: int, offset: float, lengths: float) -> NDArray[np.float32]:
    """Rows whose mean is ``offset`` times as long as they differ; their lengths log-normal."""
    rng = np.random.default_rng(SEED)
    rows = rng.standard_normal((count, DIM))
    rows[:, 0] += offset * np.sqrt(DIM)
    return (rows * rng.lognormal(0.0, lengths, (count, 1))).astype(np.float32)


def of_one_length(count: int, dim: int, offset: float) -> NDArray[np.float32]:
    """The same, brought to unit length."""
    rows = np.random.default_rng(SEED).standard_normal((count, dim))
    rows[:, 0] += offset * np.sqrt(dim)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


def recall(
    found: NDArray[np.int64], queries: NDArray[np.float32], rows: NDArray[np.float32]
) -> float:
    """Mean share of the best rows, by products in doubles, that were found."""
    k = found.shape[1]
    best = np.argsort(-(queries.astype(np.float64) @ rows.astype(np.float64).T), axis=1)[:, :k]
    return float((found[:, :, None] == best[:, None, :]).any(1).mean())


@pytest.mark.parametrize("offset", [3.0, 10.0])
def test_walks_reach_what_lies_beside_a_common_direction(tmp_path: Path, offset: float) -> None:
    """Linked as they come, walks found 0.64 to 0.68 of a hundred."""
    rows = drawn(ROWS + 100, offset, 0.0)
    rows, queries = rows[:ROWS], rows[ROWS:]
    build_segment(tmp_path / "s", rows, metric="ip", ef_construction=60, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        for k in (10, 100):
            hits = segment.search(queries, k, ef=500, recall_target=0.99)
            assert recall(segment.ids_at(hits.rows), queries, rows) > 0.98


@pytest.mark.parametrize(("offset", "lengths"), [(10.0, 0.0), (3.0, 0.3), (0.0, 1.5)])
def test_changes_are_found_for_every_k(
    offset: float, lengths: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk of changes that led to fewer rows than were asked for raised; others lost a fifth."""
    monkeypatch.setattr(delta_module, "BLOCK_ROWS", 1_500)
    rows = drawn(1_500 + delta_module._PROBES, offset, lengths)
    delta = Delta(DIM, "ip")
    delta.apply([Change(i + 1, "default", i, False, None, {}, row) for i, row in enumerate(rows)])
    assert delta.build_block(delta.view())
    view = delta.view()
    queries = rows[-delta_module._PROBES :]
    for k in (1, 10, 11, 50, 100, 128, 129, 1_000):
        found, _ = view.search(queries, k, None)
        assert recall(found, queries, rows) >= view.blocks[0].found_low(k) - 0.02
        assert recall(found, queries, rows) > 0.85


def test_a_graph_that_leads_to_few_rows_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "BLOCK_ROWS", 1_500)
    monkeypatch.setattr(delta_module, "link_shift", lambda *_: None)
    rows = drawn(1_500 + delta_module._PROBES, 10.0, 0.0)
    delta = Delta(DIM, "ip")
    delta.apply([Change(i + 1, "default", i, False, None, {}, row) for i, row in enumerate(rows)])
    assert delta.build_block(delta.view())
    block = delta.view().blocks[0]
    assert not block.is_walked(100)
    assert block.found_low(100) == 1.0
    found, _ = delta.view().search(rows[-20:], 100, None)
    assert recall(found, rows[-20:], rows) > 0.999


@pytest.mark.parametrize("dim", [3, 8, 200])
@pytest.mark.parametrize("offset", [1.0, 3.0, 10.0])
def test_nothing_is_taken_from_rows_of_one_length(dim: int, offset: float) -> None:
    for dtype in (np.float32, np.float16):
        rows = of_one_length(2_000, dim, offset).astype(dtype)
        assert link_shift(rows, np.arange(len(rows))) is None


def test_walks_reach_rows_of_one_length(tmp_path: Path) -> None:
    """Models give such; without a part of their mean walks found 0.9 of ten."""
    rows = of_one_length(1_300, 8, 3.0)
    rows, queries = rows[:1_200], rows[1_200:]
    build_segment(tmp_path / "s", rows, metric="ip", ef_construction=60, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        hits = segment.search(queries, 10, ef=100, recall_target=0.99)
        assert recall(segment.ids_at(hits.rows), queries, rows) > 0.98


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60), dim=st.integers(1, 5), offset=st.floats(0, 1e3),
    scale=st.sampled_from([1e-18, 1.0, 1e15]), one_length=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_half_the_spread_of_the_mean_is_left_where_lengths_then_differ_less(
    count: int, dim: int, offset: float, scale: float, one_length: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((count, dim)) + offset
    if one_length:
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    vectors = (points * scale).astype(np.float32)
    rows = rng.permutation(count)[: max(count // 2, 1)]
    chosen = vectors[rows].astype(np.float64)
    mean = chosen.mean(axis=0)
    spread = np.sqrt(((chosen - mean) ** 2).sum(axis=1).mean())
    shift = link_shift(vectors, rows)
    rounded = 1e-5 * np.abs(chosen).max()

    def differ(points: NDArray[np.float64]) -> float:
        return float((points**2).sum(axis=1).std())

    if shift is not None:
        assert abs(np.linalg.norm(mean - shift) - 0.5 * spread) <= rounded
        assert differ(chosen - shift) < differ(chosen)
    elif np.linalg.norm(mean) > 0.5 * spread + rounded:
        part = 1 - 0.5 * spread / np.linalg.norm(mean)
        assert differ(chosen - part * mean) >= differ(chosen) - rounded**2
    assert link_shift(vectors, rows[:0]) is None


def test_no_row_is_made_longer_than_products_can_be() -> None:
    rows = drawn(500, 3.0, 0.3)
    rows *= np.float32(1.7e19) / np.linalg.norm(rows, axis=1).max()
    rows[::9] *= np.float32(-1)
    assert link_shift(rows * np.float32(0.1), np.arange(500)) is not None
    assert link_shift(rows, np.arange(500)) is None
