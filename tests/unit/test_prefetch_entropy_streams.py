"""Entropy per tenant and route: counted apart, bounded, restored exactly."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.prefetch.entropy_streams import EntropyStreams
from stoker.prefetch.events import RESULT_USED, SEARCH_PERFORMED, Event
from stoker.prefetch.regime import Regime
from stoker.prefetch.snapshot import SnapshotCorrupt


def search(
    tenant: str, *chunks: str, route: str | None = None, kind: str = SEARCH_PERFORMED
) -> Event:
    return Event("e", kind, 1.0, tenant, None, route, None, chunks, {})


def test_tenants_and_routes_are_apart() -> None:
    streams = EntropyStreams()
    streams.apply([search("a", "x", route="faq") for _ in range(50)])
    streams.apply([search("a", f"c{i}", route="free") for i in range(600)])
    streams.apply([search("b", "x", kind=RESULT_USED)])
    assert streams.bits("a", "faq") == 0.0
    assert streams.regime("a", "faq") is Regime.PIN
    free, whole = streams.bits("a", "free"), streams.bits("a")
    assert free is not None
    assert whole is not None
    assert 8.0 < whole < free + 1.0
    assert streams.regime("a", "free") is Regime.SHARD
    assert streams.bits("b") is None
    assert streams.regime("b") is None


def test_a_forming_hot_spot_raises_the_alarm_once() -> None:
    streams = EntropyStreams()
    rng = np.random.default_rng(0)
    spread = [search("a", f"c{i}") for i in rng.integers(0, 200, 5001).tolist()]
    narrow = [search("a", f"c{i}") for i in rng.integers(0, 20, 5001).tolist()]
    streams.apply(spread)
    assert streams.close_window() == {}
    streams.apply(narrow)
    assert streams.close_window() == {("a", None): 1.3}
    streams.apply(narrow)
    assert streams.close_window() == {}


def test_streams_are_bounded() -> None:
    streams = EntropyStreams(streams_max=3)
    streams.apply([search(f"t{i}", "x") for i in range(10)])
    assert [streams.bits(f"t{i}") is not None for i in (6, 7, 8, 9)] == [False, True, True, True]


def test_restored_streams_continue_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    events = [search("a", f"c{i % 40}", route="r") for i in rng.zipf(1.3, 400).tolist()]
    whole, broken = EntropyStreams(), EntropyStreams()
    whole.apply(events)
    broken.apply(events[:150])
    broken = EntropyStreams.from_snapshot(broken.to_snapshot())
    broken.apply(events[150:])
    assert broken.to_snapshot() == whole.to_snapshot()
    with pytest.raises(SnapshotCorrupt):
        EntropyStreams.from_snapshot(whole.to_snapshot()[:-1])
