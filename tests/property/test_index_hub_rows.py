"""Vectors in the middle of all others, and copies: nothing is lost behind them."""

from __future__ import annotations

from pathlib import Path

import hnswlib
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import stoker.index.delta as delta_module
from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.delta import Delta
from stoker.index.document_values import Change
from stoker.index.foreign import import_foreign, read_foreign
from stoker.index.hub_rows import hubs_last
from stoker.index.segment import Segment

SEED = 20_261_204
DIM = 64


def clusters(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    centres = rng.standard_normal((60, DIM))
    drawn = centres[rng.integers(0, 60, count)] + 0.3 * rng.standard_normal((count, DIM))
    return drawn.astype(np.float32)


def others_found(
    vectors: NDArray[np.float32], hubs: NDArray[np.int64], found: NDArray[np.int64], asked: int
) -> float:
    """Recall@10 of the first ``asked`` rows after the hubs, which stand at the front."""
    rest = vectors[len(hubs) :]
    queries = rest[:asked]
    near = ((queries**2).sum(1)[:, None] - 2 * queries @ rest.T) + (rest**2).sum(1)
    truth = np.argsort(near, axis=1)[:, :10] + len(hubs)
    return float((found[:, :, None] == truth[:, None, :]).any(1).mean())


@pytest.mark.parametrize("zeros", [1, 8, 300])
def test_zero_vectors_hide_nobody_under_l2(tmp_path: Path, zeros: int) -> None:
    """Linked in the order in which they came, 0.7 to 0.8 of the others' neighbors were found."""
    vectors = clusters(np.random.default_rng(SEED), 1500)
    vectors[:zeros] = 0
    build_segment(tmp_path / "s", vectors, metric="l2", ef_construction=60, threads=1)
    with Segment.open(tmp_path / "s") as segment:
        hits = segment.search(vectors[zeros : zeros + 300], 10, ef=100, recall_target=0.99)
        found = segment.ids_at(hits.rows)
        assert others_found(vectors, np.arange(zeros), found, 300) > 0.97
        # They themselves are found too.
        at_zero = segment.search(np.zeros((1, DIM), np.float32), 10, ef=100).rows
        nearest = segment.ids_at(at_zero)[0]
        assert np.count_nonzero(nearest < zeros) == min(zeros, 10)


@pytest.mark.parametrize("zeros", [4, 300])
def test_zero_vectors_among_changes_hide_nobody(
    zeros: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_module, "BLOCK_ROWS", 1500)
    vectors = clusters(np.random.default_rng(SEED + 1), 1500 + delta_module._PROBES)
    vectors[:zeros] = 0
    delta = Delta(DIM, "l2")
    delta.apply(
        [Change(i + 1, "default", i, False, None, {}, vector) for i, vector in enumerate(vectors)]
    )
    assert delta.build_block(delta.view())
    view = delta.view()
    assert (view.blocks[0].graph is None) == (zeros > 2 * delta_module._M)
    found, _ = view.search(vectors[zeros : zeros + 200], 10, None)
    assert others_found(vectors, np.arange(zeros), found, 200) > 0.97
    assert not delta.build_block(delta.view())


def test_a_graph_that_finds_too_little_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "BLOCK_ROWS", 256)
    monkeypatch.setattr(Delta, "_recall_low", lambda *_: (0.4, 0.4))
    vectors = clusters(np.random.default_rng(SEED + 3), 400)
    delta = Delta(DIM, "cosine")
    delta.apply([Change(i + 1, "default", i, False, None, {}, v) for i, v in enumerate(vectors)])
    assert delta.build_block(delta.view())
    view = delta.view()
    assert view.blocks[0].graph is None
    assert view.blocks[0].recall_low == 1.0
    assert view.search(vectors[:50], 1, None)[0][:, 0].tolist() == list(range(50))


@pytest.mark.parametrize(("copies", "graph"), [(8, "taken"), (200, "built")])
def test_a_taken_graph_has_no_islands_of_copies(tmp_path: Path, copies: int, graph: str) -> None:
    vectors = clusters(np.random.default_rng(SEED + 2), 2000)
    vectors[:copies] = vectors[1000]
    index = hnswlib.Index("l2", DIM)
    index.init_index(len(vectors), M=8, ef_construction=60, random_seed=3)
    index.add_items(vectors, num_threads=1)
    index.save_index(str(tmp_path / "theirs.bin"))
    report = import_foreign(
        tmp_path / "c", read_foreign(tmp_path / "theirs.bin"), metric="l2", threads=1
    )
    assert report.graph == graph
    assert any("200 times" in note or "201 times" in note for note in report.notes) == (
        graph == "built"
    )
    with Collection(tmp_path / "c") as collection:
        found = collection.search(vectors[copies : copies + 200], 10, ef=100).ids
    assert others_found(vectors, np.arange(copies), found, 200) > 0.9


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 60), dim=st.integers(1, 5), most=st.integers(0, 8),
    central=st.integers(0, 10), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_no_row_is_lost_and_the_order_of_the_rest_stays(
    count: int, dim: int, most: int, central: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, dim)).astype(np.float32)
    vectors[rng.permutation(count)[:central]] *= 1e-3
    rows = rng.permutation(count).astype(np.int64)
    ordered = hubs_last(vectors, rows, most=most)
    assert sorted(ordered.tolist()) == sorted(rows.tolist())
    if count == 0:
        return
    away = ((vectors[rows] - vectors.mean(axis=0)) ** 2).sum(axis=1)
    moved = [row for row, far in zip(rows, away, strict=True) if far < 0.25 * np.median(away)]
    if len(moved) > most:
        assert ordered.tolist() == rows.tolist()
    else:
        kept = [row for row in rows.tolist() if row not in moved]
        assert ordered.tolist() == [*kept, *moved]
