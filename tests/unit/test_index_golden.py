"""The golden segment of each format version is still read, and still gives the same answers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.mark.parametrize(
    ("version", "bits"),
    [(1, 4), (2, 4), (2, 2), (3, 4), (3, 2), (4, 4), (4, 2), (5, 4), (5, 2)],
)
def test_a_segment_of_each_version_is_still_read(
    version: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(GOLDEN), *sys.path])
    maker = importlib.import_module(f"make_segment_v{version}")
    golden_vectors, golden_queries = maker.golden_vectors, maker.golden_queries

    want = json.loads((GOLDEN / f"segment-v{version}.json").read_text())
    folder = GOLDEN / f"segment-v{version}"
    with Segment.open(folder, settings=IndexSettings(navigation_bits=bits)) as segment:
        assert segment.navigation_bits == bits
        assert segment.damaged_pages() == {}
        hits = segment.search(golden_queries(), 5, ef=200, recall_target=1.0)
        assert segment.ids_at(hits.rows).tolist() == want["ids"]
        np.testing.assert_allclose(hits.scores, want["scores"], rtol=1e-5)
        rows = segment.rows_of([f"chunk-{i}" for i in range(segment.count)])
        np.testing.assert_array_equal(segment.vectors(rows), golden_vectors())
        l2 = segment.metric == "l2"
    # What was written is also what is true.
    squared = ((golden_queries()[:, None] - golden_vectors()[None]) ** 2).sum(axis=2)
    truth = squared if l2 else -(golden_queries() @ golden_vectors().T)
    scores = np.sort(truth, axis=1)[:, :5] * (1 if l2 else -1)
    np.testing.assert_allclose(scores, want["scores"], rtol=1e-5)


def test_each_version_keeps_what_it_knew_of_a_basis() -> None:
    settings = IndexSettings(navigation_bits=2)
    for version, directions, fine in ((2, 0, 0), (3, 64, 0), (4, 160, 64), (5, 160, 64)):
        with Segment.open(GOLDEN / f"segment-v{version}", settings=settings) as segment:
            assert segment.manifest.coarse_directions == directions
            assert segment.manifest.coarse_fine == fine


def test_no_version_before_the_fifth_knew_rows_of_one_length() -> None:
    for version in (1, 2, 3, 4, 5):
        with Segment.open(GOLDEN / f"segment-v{version}") as segment:
            assert (segment.manifest.row_length2 > 0) == (version == 5)


def test_version_1_has_no_coarse_codes_to_choose() -> None:
    with Segment.open(GOLDEN / "segment-v1", memory_bytes=1) as segment:
        assert segment.navigation_bits == 4
        assert "coarse" not in {entry.kind for entry in segment.resident().kinds}
