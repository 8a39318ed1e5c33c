"""The pages of a collection by heat, worked out in pieces with a rest after each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.sealed import SealedSegment
from stoker.index.settings import IndexSettings

ROWS = 1_100


def test_heat_is_translated_in_pieces_to_what_its_keys_one_by_one_give(tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).standard_normal((ROWS, 8)).astype(np.float32)
    build_collection(tmp_path / "index", vectors, [f"c{row}" for row in range(ROWS)], threads=1)
    heat = {f"c{row}": 1.0 + row for row in range(ROWS)} | {"gone": 5.0}
    rests: list[None] = []
    with Collection(tmp_path / "index", "r", settings=IndexSettings(merge_rows=0)) as collection:
        found = collection.unit_batches(heat, rest=lambda: rests.append(None))
        # 1,101 keys, 64 at a time: taken, and looked up; then some for each kind of page.
        assert 2 * 18 < len(rests) < 2 * 18 + 20
        (vectors_found,) = [batch for batch in found if batch.kind == "vectors"]
        assert float(vectors_found.benefit.sum()) > 0
        sums = {batch.kind: np.zeros(int(batch.units.max()) + 1) for batch in found}
        for start in range(0, ROWS, 400):  # benefits add up over heats
            names = [f"c{row}" for row in range(start, min(ROWS, start + 400))]
            for batch in collection.unit_batches({name: heat[name] for name in names}):
                sums[batch.kind][batch.units] += batch.benefit
        for batch in found:
            np.testing.assert_allclose(batch.benefit, sums[batch.kind][batch.units], rtol=1e-4)


def test_keys_asked_for_again_are_not_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction asks for the same keys twice; a merge between them gives them other rows."""
    vectors = np.random.default_rng(2).standard_normal((300, 8)).astype(np.float32)
    names = [f"c{row}" for row in range(300)]
    build_collection(tmp_path / "index", vectors, names, threads=1)
    looked: list[int] = []
    rows_of = SealedSegment.rows_of

    def counted(segment: SealedSegment, keys: Sequence[Any]) -> Any:
        looked.append(len(keys))
        return rows_of(segment, keys)

    monkeypatch.setattr(SealedSegment, "rows_of", counted)
    once = dict.fromkeys(names[:100], 1.0)
    with Collection(tmp_path / "index", "rw", settings=IndexSettings(merge_rows=0)) as collection:
        first = collection.unit_batches(once)
        assert sum(looked) == 100
        again = collection.unit_batches(dict.fromkeys(once, 2.0))
        assert sum(looked) == 100
        for one, two in zip(first, again, strict=True):
            np.testing.assert_array_equal(one.units, two.units)
            np.testing.assert_allclose(2.0 * one.benefit, two.benefit)
        collection.delete(names[:50])
        looked.clear()
        half = collection.unit_batches(once)
        assert not looked
        total = sum(float(batch.benefit.sum()) for batch in half if batch.kind != "upper")
        before = sum(float(batch.benefit.sum()) for batch in first if batch.kind != "upper")
        np.testing.assert_allclose(total, 0.5 * before, rtol=0.1)  # what is dead has no heat
        collection.upsert(["new"], vectors[:1])
        collection.merge()
        looked.clear()
        merged = collection.unit_batches(once)
        assert sum(looked) == 100
        assert {batch.kind for batch in merged} == {batch.kind for batch in first}
