"""Another index in the place of one that is open: neither answers for, nor touches, the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import UnavailableError
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.document_values import Change
from stoker.index.settings import IndexSettings

MANUAL = IndexSettings(merge_rows=0)


def vectors(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


def _built_with_texts(path: Path, rows: np.ndarray, word: str) -> None:
    ids = [f"c{i}" for i in range(len(rows))]
    texts = [Change(0, "default", name, False, word, {}, None) for name in ids]
    build_collection(path, rows, ids, metric="l2", documents=lambda store: store.write(texts))


def _replaced(path: Path, rows: np.ndarray) -> Path:
    """Put a rebuilt index of other texts in a collection's place, as a roll-out may."""
    other = path.with_name("other")
    _built_with_texts(other, rows, "new")
    path.rename(path.with_name("gone"))
    return other.rename(path)


def _files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_what_is_open_neither_mixes_with_nor_touches_an_index_put_in_its_place(
    tmp_path: Path, mode: Any
) -> None:
    """A change would be acknowledged and lost, a merge take the new one's place, and texts of
    the new one stand beside ids of the old."""
    path, count = tmp_path / "index", 40
    rows, ids = vectors(count, seed=1), [f"c{i}" for i in range(count)]
    _built_with_texts(path, rows, "old")
    with Collection(path, mode, settings=MANUAL) as collection:
        if mode == "rw":
            collection.upsert(ids[:3], rows[:3], texts=["old"] * 3)
        assert collection.documents(["c1"])[0].text == "old"
        before = _files(_replaced(path, vectors(count, seed=5)))
        if mode == "r":  # ids are read when they are first wanted, by then of the other index
            with pytest.raises(UnavailableError, match="replaced"):
                collection.search(rows[1], 1)
        else:
            assert collection.search(rows[1], 1).ids[0] == "c1"  # what is open goes on
        store = collection._serving.store
        assert store is not None
        assert collection.documents(["c1"])[0].text == "old"
        # Another read at the same time needs a connection of its own, to the file at the path.
        with store._borrowed():
            for _ in range(3):
                with pytest.raises(UnavailableError, match="replaced"):
                    collection.documents(["c1"])
        assert collection.documents(["c1"])[0].text == "old"
        if mode == "r":
            with pytest.raises(UnavailableError, match="replaced"):
                collection.refresh()
        else:
            for change in (
                lambda: collection.upsert(["x"], rows[:1]),
                lambda: collection.delete(["c1"]),
                lambda: collection.merge(full=True),
            ):
                with pytest.raises(UnavailableError, match="replaced"):
                    change()
    assert {name: raw for name, raw in _files(path).items() if name in before} == before
    with Collection(path, settings=MANUAL) as collection:
        assert collection.documents(["c1"])[0].text == "new"
