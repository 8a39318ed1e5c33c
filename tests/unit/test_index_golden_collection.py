"""A collection of format version 1, as it was written then, is still read, searched and changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from stoker.index.collection import Collection
from stoker.index.settings import IndexSettings
from stoker.index.verify import verify

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "collection-v1"
SEED = 20_261_129


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    # Opening makes files of SQLite's beside the store: not in the repository.
    shutil.copytree(GOLDEN, tmp_path / "collection")
    return tmp_path / "collection"


def test_version_1_is_whole(golden: Path) -> None:
    report = verify(golden)
    assert report.whole, report.damage
    assert (report.generation, report.segments) == (3, ("s00000002", "s00000003"))


def test_version_1_answers_as_it_did(golden: Path) -> None:
    vectors = np.random.default_rng(SEED).integers(-8, 9, (30, 8)).astype(np.float32)
    with Collection(golden, "rw", settings=IndexSettings(merge_rows=0)) as collection:
        collection.check()
        assert (collection.generation, collection.change_offset) == (3, 24)
        assert (collection.count, collection.id_kind) == (21, "str")
        hits = collection.search(vectors[[3, 21, 22]], 1)
        assert hits.ids[:, 0].tolist() == ["chunk-3", "chunk-1", "late"]
        found = collection.search(vectors[5], 30, filter={"tenant": "default", "lang": "de"}).ids
        odd = {f"chunk-{i}" for i in range(3, 20, 2)}  # chunk-1 was replaced and has no lang.
        assert {value for value in found if value is not None} == odd
        found = collection.search(vectors[5], 30, filter={"created": {"gte": "2026-11-01"}}).ids
        assert found[0] == "late"
        (document, other) = (
            collection.documents(["chunk-1"])[0],
            collection.documents(["chunk-0"], "other")[0],
        )
        assert document is not None
        assert (document.text, document.metadata) == ("newer", {"n": 1})
        assert other is not None
        assert other.metadata == {"n": 100}
        assert collection.contains(["chunk-2", "chunk-4"]).tolist() == [False, True]
        collection.merge(full=True)
        collection.check()
        assert collection.count == 21
