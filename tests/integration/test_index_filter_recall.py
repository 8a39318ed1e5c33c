"""Filtered searches over native segments: recall at every selectivity, and never a row outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import create_collection
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

COUNT, DIM = 4_000, 24


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """Two sealed segments and a delta; each document's metadata say its place in a random order."""
    path = tmp_path_factory.mktemp("filtered") / "c"
    rng = np.random.default_rng(11)
    centres = rng.standard_normal((40, DIM))
    points = centres[rng.integers(0, 40, COUNT)] + 0.6 * rng.standard_normal((COUNT, DIM))
    points = points.astype(np.float32)
    place = rng.permutation(COUNT)
    create_collection(path, dim=DIM, metric="cosine", ef_construction=100)
    with Collection(path, "rw", settings=IndexSettings(merge_rows=0)) as collection:
        for start, stop in ((0, 3_000), (3_000, 3_800), (3_800, COUNT)):
            ids = np.arange(start, stop)
            metadata = [{"place": int(place[i])} for i in ids]
            collection.upsert(ids, points[start:stop], metadata=metadata)
            if stop < COUNT:
                collection.merge()
        assert len(collection.segment_names) == 2
    return path, points, place


@pytest.mark.parametrize("selectivity", [0.5, 0.1, 0.01, 0.001])
def test_recall_holds_at_every_selectivity(
    filtered: tuple[Path, np.ndarray, np.ndarray], selectivity: float
) -> None:
    path, points, place = filtered
    limit = int(COUNT * selectivity)
    allowed = place < limit
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    queries = points[:100] + 0.1 * np.random.default_rng(3).standard_normal((100, DIM))
    same = wanted = 0
    with Collection(path) as collection:
        hits = collection.search(queries, 10, filter={"place": {"lt": limit}})
        for row, query in enumerate(queries):
            similar = np.where(allowed, unit @ query, -np.inf)
            exact = set(np.argsort(-similar)[: min(10, limit)].tolist())
            found = [i for i in hits.ids[row].tolist() if i >= 0]
            assert allowed[found].all()
            assert len(found) == min(10, limit)
            same += len(exact & set(found))
            wanted += len(exact)
    assert same >= 0.95 * wanted


def test_walks_under_a_filter_hold_the_target(tmp_path: Path) -> None:
    """Of 40,000 rows a half costs more to scan than to walk to."""
    rng = np.random.default_rng(12)
    centres = rng.standard_normal((200, DIM))
    points = centres[rng.integers(0, 200, 40_000)] + 0.6 * rng.standard_normal((40_000, DIM))
    points = points.astype(np.float32)
    build_segment(tmp_path / "s", points, metric="l2", m=12, ef_construction=80)
    allowed = rng.random(len(points)) < 0.5
    queries = points[:100] + np.float32(0.3) * rng.standard_normal((100, DIM)).astype(np.float32)
    with Segment.open(tmp_path / "s") as segment:
        by_row = np.zeros(len(points), np.bool_)
        by_row[segment.rows_of(np.arange(len(points)))] = allowed
        found = segment.search(queries, 10, allow=np.packbits(by_row, bitorder="little"))
        ids = segment.ids_at(found.rows)
        assert not found.summary.scanned.any()
    left = points[allowed]
    near = np.argsort((left**2).sum(axis=1) - 2 * queries @ left.T, axis=1)[:, :10]
    true = np.flatnonzero(allowed)[near]
    assert allowed[ids].all()
    assert (ids[:, :, None] == true[:, None, :]).any(axis=1).mean() >= 0.95
