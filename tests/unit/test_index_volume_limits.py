"""An index told what its volume gives: the same answers, and none waits for what cannot come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.index.build import build_segment
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings
from stoker.service.configuration import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vectors = np.random.default_rng(4).standard_normal((3_000, 64)).astype(np.float32)
    place = tmp_path_factory.mktemp("volume") / "segment"
    build_segment(place, vectors, metric="l2", threads=1)
    return place


def _queries(count: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, 64)).astype(np.float32)


def test_answers_under_limits_are_those_without(folder: Path) -> None:
    queries = _queries(40)
    told = IndexSettings(volume_iops=20_000, volume_bytes_s=1_000_000_000)
    with Segment.open(folder) as plain, Segment.open(folder, settings=told) as limited:
        for query in queries:
            expected = plain.search(query[None], 10, ef=64)
            found = limited.search(query[None], 10, ef=64)
            np.testing.assert_array_equal(found.rows, expected.rows)
        assert limited.pool_stats()["demand_reads"] > 0


def test_who_has_no_time_answers_from_what_is_there(folder: Path) -> None:
    """One read in hours: the first query takes it, and the others read nothing more."""
    with Segment.open(folder, settings=IndexSettings(volume_bytes_s=1)) as segment:
        for query in _queries(5):
            found = segment.search(query[None], 10, deadline_s=60.0)
            assert found.summary.completeness[0] < 1
        after_one = segment.pool_stats()["demand_reads"]
        segment.search(_queries(6)[-1:], 10, deadline_s=60.0)
        assert segment.pool_stats()["demand_reads"] == after_one


def test_limits_below_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"index\.volume_iops: expected 0 or more, found -1"):
        IndexSettings(volume_iops=-1)
    with pytest.raises(ConfigError, match=r"index\.volume_bytes_s: expected 0 or more, found -1"):
        IndexSettings(volume_bytes_s=-1)


def test_limits_are_written_with_units() -> None:
    config = load_config(environment={"STOKER_INDEX_VOLUME_BYTES_S": "125MB"})
    assert config.config.index.volume_bytes_s == 125_000_000
