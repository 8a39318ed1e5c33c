"""The golden segment of each format version is still read, and still gives the same answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.index.segment import Segment

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def test_a_segment_of_version_1_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(GOLDEN), *sys.path])
    from make_segment_v1 import golden_queries, golden_vectors

    want = json.loads((GOLDEN / "segment-v1.json").read_text())
    with Segment.open(GOLDEN / "segment-v1") as segment:
        assert segment.damaged_pages() == {}
        hits = segment.search(golden_queries(), 5, ef=200, recall_target=1.0)
        assert segment.ids_at(hits.rows).tolist() == want["ids"]
        np.testing.assert_allclose(hits.scores, want["scores"], rtol=1e-5)
        rows = segment.rows_of([f"chunk-{i}" for i in range(200)])
        np.testing.assert_array_equal(segment.vectors(rows), golden_vectors())
    # What was written is also what is true.
    squared = ((golden_queries()[:, None] - golden_vectors()[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(np.sort(squared, axis=1)[:, :5], want["scores"], rtol=1e-5)
