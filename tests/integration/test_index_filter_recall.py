"""Filtered searches over native segments: recall at every selectivity, and never a row outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.index.collection import Collection
from stoker.index.collection_build import create_collection
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
