"""What queries read where nothing is loaded: few rounds, few requests, and the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import stoker.index.segment_pages as segment_pages
from stoker.index.build import build_segment
from stoker.index.held_out import recall_of
from stoker.index.segment import Segment, SegmentHits
from stoker.index.settings import IndexSettings

SEED = 20_260_711
COUNT, DIM, K = 8_000, 64, 10
QUERIES = 12


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.float32]]:
    """A segment whose links and codes are 20 clusters and more, and queries near its vectors."""
    rng = np.random.default_rng(SEED)
    centres = rng.standard_normal((COUNT // 20, DIM))
    drawn = centres[rng.integers(0, len(centres), COUNT)] + 0.5 * rng.standard_normal((COUNT, DIM))
    vectors = drawn.astype(np.float32)
    path = tmp_path_factory.mktemp("cold") / "s"
    # On one thread, as builds on several are never alike.
    build_segment(path, vectors, metric="ip", threads=1)
    noise = 0.3 * rng.standard_normal((QUERIES, DIM))
    return path, (vectors[rng.choice(COUNT, QUERIES)] + noise).astype(np.float32)


def first_of(path: Path, query: NDArray[np.float32], width: int) -> tuple[SegmentHits, int, int]:
    """Ask one query of a segment that was just opened: the answer, rounds, and requests."""
    with Segment.open(path, settings=IndexSettings(beam=1)) as segment:
        hits = segment.search(query[None, :], K, ef=width, recall_target=1.0)
        return hits, int(hits.summary.rounds[0]), segment.pool_stats()["demand_reads"]


def test_wide_walks_with_nothing_loaded_take_few_rounds_and_answer_as_resident_ones(
    sealed: tuple[Path, NDArray[np.float32]],
    opened: Callable[..., Segment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a large segment, whose clusters are a small part of it.

    A walk that goes no further than its beam while misses are gathered takes 29 to 40 rounds and
    78 to 97 requests here, and it found the same.
    """
    path, queries = sealed
    monkeypatch.setattr(segment_pages, "_FEW_BYTES", 0)
    monkeypatch.setattr(segment_pages, "_CLUSTER_BYTES", 8 << 10)
    with opened(path) as segment:
        want = segment.search(queries, K, ef=256, recall_target=1.0)
        assert want.summary.rounds.max() == 0
    first = [first_of(path, query, 256) for query in queries]
    rows = np.concatenate([hits.rows for hits, _, _ in first])
    assert recall_of(rows, want.rows).mean() >= 0.99
    assert all(hits.summary.completeness[0] == 1.0 for hits, _, _ in first)
    assert max(rounds for _, rounds, _ in first) <= 20
    assert np.mean([requests for _, _, requests in first]) <= 75


def test_few_links_and_codes_come_in_few_reads(
    sealed: tuple[Path, NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, queries = sealed

    def requests() -> int:
        with Segment.open(path) as segment:
            segment.search(queries, K, ef=64, recall_target=0.5)
            kinds = {entry.kind: entry for entry in segment.resident().kinds}
            assert kinds["links"].ratio == kinds["codes"].ratio == 1.0
            return segment.pool_stats()["demand_reads"]

    few = requests()
    monkeypatch.setattr(segment_pages, "_FEW_BYTES", 0)
    assert few < requests()
