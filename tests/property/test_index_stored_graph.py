"""A sealed segment's links, read back: the same graph, and sealed anew without linking."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import stoker.index.build as building
import stoker.kernels._core as _core
from stoker.errors import CorruptError, InputError
from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.segment import Segment
from stoker.index.stored_graph import read_graph

SEED = 20_261_201


@settings(max_examples=60)
@given(
    rows=st.integers(1, 300),
    m=st.integers(1, 40),
    bits=st.integers(9, 32),
    seed=st.integers(0, 2**16),
)
def test_unpacked_links_are_those_that_were_packed(rows: int, m: int, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, m + 1, rows).astype(np.uint16)
    ids = rng.integers(0, 1 << bits, (rows, m), dtype=np.uint64).astype(np.uint32)
    record = 2 + (m * bits + 7) // 8
    per_page = (4096 - 8) // record
    shape = {"id_bits": bits, "record_bytes": record, "per_page": per_page}
    pages = _core.pack_links(ids, counts, page_bytes=4096, **shape)
    found, found_counts = _core.unpack_links(pages, rows, m, **shape)
    np.testing.assert_array_equal(found_counts, counts)
    valid = np.arange(m)[None, :] < counts[:, None]
    np.testing.assert_array_equal(np.where(valid, found, 0), np.where(valid, ids, 0))
    assert not found[~valid].any()
    if counts.max() > 1:
        with pytest.raises(CorruptError, match="of at most"):
            _core.unpack_links(pages, rows, int(counts.max()) - 1, **shape)
    with pytest.raises(CorruptError, match="not all in"):
        _core.unpack_links(pages, len(pages) * per_page + 1, m, **shape)


def vectors_of(count: int, dim: int) -> NDArray[np.float32]:
    """Vectors in a hundred clusters; the first of many are those of few."""
    centres = np.random.default_rng(SEED).standard_normal((100, dim))
    rng = np.random.default_rng(SEED + 1)
    noise = rng.standard_normal((2_050, dim))[:count]
    of = rng.integers(0, 100, 2_050)[:count]
    return (centres[of] + 0.5 * noise).astype(np.float32)


def test_a_segment_sealed_anew_by_its_own_links_answers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = vectors_of(2_000, 80)
    build_segment(tmp_path / "a", vectors, metric="l2", m=8, ef_construction=80, threads=1)
    with Segment.open(tmp_path / "a") as segment:
        ids = segment.ids_at(np.arange(2_000))
        stored = segment.vectors(np.arange(2_000))
    monkeypatch.setattr(building, "_link", None)  # whoever links now fails
    heat = {int(i): 5.0 for i in np.random.default_rng(1).choice(2_000, 200, replace=False)}
    build_segment(tmp_path / "b", stored, ids, metric="l2", m=8, heat=heat, graph_of=tmp_path / "a")
    queries = vectors_of(2_050, 80)[2_000:]
    with Segment.open(tmp_path / "a") as old, Segment.open(tmp_path / "b") as new:
        for k in (1, 10):
            # A wide walk over one graph meets the same rows from wherever they lie.
            before = old.search(queries, k, ef=400, recall_target=0.999)
            after = new.search(queries, k, ef=400, recall_target=0.999)
            np.testing.assert_array_equal(old.ids_at(before.rows), new.ids_at(after.rows))
            np.testing.assert_allclose(before.scores, after.scores, rtol=1e-5)
        assert new.manifest.hot_rows == 200
    with pytest.raises(InputError, match="2000 rows of 80"):
        build_segment(
            tmp_path / "c", stored[:-1], ids[:-1], metric="l2", m=8, graph_of=tmp_path / "a"
        )


def test_damaged_links_are_not_taken(tmp_path: Path) -> None:
    build_segment(tmp_path / "a", vectors_of(500, 16), m=8, ef_construction=40)
    path = tmp_path / "a" / "links.stk"
    raw = bytearray(path.read_bytes())
    raw[5_000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptError, match="fails its checksum"):
        read_graph(tmp_path / "a")


def test_a_merge_for_heat_alone_heals_damaged_links(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    vectors = vectors_of(1_000, 24)
    build_collection(folder, vectors, metric="l2", m=8, ef_construction=60, threads=1)
    with Collection(folder, mode="rw") as collection:
        path = next((folder / "segments").iterdir()) / "links.stk"
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CorruptError):
            read_graph(path.parent)
        assert collection.merge(full=True, heat={1: 1.0}).rows == 1_000
        collection.check()
        read_graph(next((folder / "segments").iterdir()))
        hits = collection.search(vectors, 1, ef=200)
        assert np.mean(hits.ids[:, 0] == np.arange(1_000)) > 0.99
        assert (hits.completeness == 1.0).all()


def test_a_merge_for_heat_alone_keeps_the_links(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    vectors = vectors_of(1_000, 24)
    build_collection(folder, vectors, metric="l2", m=8, ef_construction=60, threads=1)
    with Collection(folder, mode="rw") as collection:
        graph = read_graph(next((folder / "segments").iterdir()))
        report = collection.merge(full=True, heat={i: 1.0 for i in range(50)})
        assert report.merged
        assert report.rows == 1_000
        again = read_graph(next((folder / "segments").iterdir()))
        # The same links under other numbers: as many of them on each node.
        assert sorted(graph.level0_counts.tolist()) == sorted(again.level0_counts.tolist())
        assert collection.search(vectors[7], 1).ids.tolist() == [7]
        collection.delete([7])
        assert collection.merge(full=True).rows == 999
