"""The pages of a collection by heat, worked out in pieces with a rest after each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.settings import IndexSettings

ROWS = 1_100


def test_heat_is_translated_in_pieces_to_what_its_keys_one_by_one_give(tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).standard_normal((ROWS, 8)).astype(np.float32)
    build_collection(tmp_path / "index", vectors, [f"c{row}" for row in range(ROWS)], threads=1)
    heat = {f"c{row}": 1.0 + row for row in range(ROWS)} | {"gone": 5.0}
    rests: list[None] = []
    with Collection(tmp_path / "index", "r", settings=IndexSettings(merge_rows=0)) as collection:
        found = collection.unit_batches(heat, rest=lambda: rests.append(None))
        # The keys, three pieces of at most 512 of 1,101, and the segment's pages.
        assert len(rests) == 5
        (vectors_found,) = [batch for batch in found if batch.kind == "vectors"]
        assert float(vectors_found.benefit.sum()) > 0
        sums = {batch.kind: np.zeros(int(batch.units.max()) + 1) for batch in found}
        for start in range(0, ROWS, 400):  # benefits add up over heats
            names = [f"c{row}" for row in range(start, min(ROWS, start + 400))]
            for batch in collection.unit_batches({name: heat[name] for name in names}):
                sums[batch.kind][batch.units] += batch.benefit
        for batch in found:
            np.testing.assert_allclose(batch.benefit, sums[batch.kind][batch.units], rtol=1e-4)
