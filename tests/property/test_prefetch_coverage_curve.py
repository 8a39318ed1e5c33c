"""How many accesses a share of the demand serves: its bounds and limits, and a plain recount."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.prefetch.coverage_curve import (
    CELLS,
    KEPT_ACCESSES,
    KNOWN,
    SPAN_ACCESSES_MIN,
    Coverage,
    RecentAccesses,
)
from stoker.prefetch.events import DOCUMENT_DELETED, SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_parts import join_heat, split_heat
from stoker.prefetch.plan import predicted_ratio
from stoker.prefetch.settings import PrefetchSettings

T0 = 1_760_000_000.0
SHARES = np.linspace(0.0, 1.0, 2 * CELLS + 1).tolist()


def events_of(keys: list[int], *, start: int = 0, apart_s: float = 20.0) -> list[Event]:
    """Return a search per key; every seventh tenant is another, every 50th event deletes."""
    return [
        Event(
            f"e{at}",
            DOCUMENT_DELETED if at % 50 == 49 else SEARCH_PERFORMED,
            T0 + apart_s * at,
            f"t{at % 7 == 0:d}",
            None,
            None,
            None,
            (f"c{key}",),
            {},
        )
        for at, key in enumerate(keys, start=start)
    ]


def searches_of(keys: list[int], *, apart_s: float) -> list[Event]:
    return [e for e in events_of(keys, apart_s=apart_s) if e.type == SEARCH_PERFORMED]


def skewed(seed: int, count: int, keys: int = 200) -> list[int]:
    chosen: list[int] = (np.random.default_rng(seed).zipf(1.3, count) % keys).tolist()
    return chosen


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 1500), st.sampled_from([60, 10_000]), st.booleans())
def test_the_curve_rises_between_its_bounds(
    seed: int, count: int, keys_max: int, apart: bool
) -> None:
    graph = HeatGraph(PrefetchSettings(heat_keys_max=keys_max, heat_tail_buckets=64))
    graph.apply(events_of(skewed(seed, count)))
    graph.check()
    curve = graph.coverage(T0, "t1" if apart else None)
    values = [curve.at(share) for share in SHARES]
    assert values[0] == 0.0
    assert values == sorted(values)
    assert values[-1] <= 1.0
    assert curve.at(-1.0) == 0.0
    assert curve.at(2.0) == curve.at(1.0)
    assert len(curve.below) in (0, CELLS + 1)
    for share, anywhere in ((0.3, 0.1), (1.0, 1.0)):
        ratio = predicted_ratio(covered=share, total=1.0, coverage=curve, anywhere=anywhere)
        assert curve.at(share) <= ratio <= 1.0
    whole = predicted_ratio(covered=1.0, total=1.0, coverage=curve, anywhere=1.0)
    assert whole == pytest.approx(1.0)


def test_without_evidence_it_is_the_share_of_demand() -> None:
    assert [KNOWN.at(share) for share in SHARES] == SHARES
    assert Coverage(0.25).at(0.5) == 0.375
    assert RecentAccesses().coverage(
        np.ones(3),
        np.empty(0),
        unseen_ratio=0.25,
        asked=np.ones(3, dtype=bool),
        deleted_s=np.full(3, -np.inf),
    ) == Coverage(0.25)
    assert HeatGraph().coverage(T0).at(1.0) == 0.0
    with pytest.raises(InputError, match="unseen_ratio"):
        Coverage(-0.1)


def test_draws_from_the_demand_are_covered_as_the_demand_is() -> None:
    """Keys that are asked for at fixed rates: the curve is the diagonal, within its noise."""
    rng = np.random.default_rng(1)
    rates = 1.0 / np.arange(1, 101)
    keys = rng.choice(100, 40_000, p=rates / rates.sum()).tolist()
    graph = HeatGraph()
    graph.apply(searches_of(keys, apart_s=0.5))
    curve = graph.coverage(T0)
    assert curve.accesses == SPAN_ACCESSES_MIN * (1 + 1 / 2 + 1 / 4 + 1 / 8)
    ends = np.cumsum(np.sort(list(graph.demand(T0).values()))[::-1])
    shares = (ends / ends[-1]).tolist()  # of whole keys
    assert max(abs(curve.at(share) - share) for share in shares) < 0.05


def test_what_was_never_asked_before_falls_beside() -> None:
    graph = HeatGraph()
    graph.apply(events_of(list(range(8 * SPAN_ACCESSES_MIN)), apart_s=1.0))
    assert graph.coverage(T0).at(1.0) == 0.0


def test_what_comes_back_soon_lifts_the_hot_end() -> None:
    """All of the newest accesses go to the hottest tenth of demand: it serves more of them."""
    graph = HeatGraph()
    crowd = [key for key in range(1, 901) for _ in range(2)]
    graph.apply(searches_of([0] * 300 + crowd + [0] * SPAN_ACCESSES_MIN, apart_s=0.01))
    prior = Coverage(graph.unseen_ratio(T0)).at(0.4)
    assert prior < 0.45
    assert graph.coverage(T0).at(0.4) > prior + 0.15


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-1, 12), min_size=1, max_size=60), st.integers(0, 10_000))
def test_it_is_the_plain_recount(numbers: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 4, 13).astype(np.float64)
    amounts = rng.integers(1, 3, len(numbers)).astype(np.float64)
    asked = rng.random(13) < 0.8
    recent = RecentAccesses()
    everything = np.ones(len(numbers), dtype=bool)
    recent.add(np.array(numbers), np.full(len(numbers), T0), amounts, everything)
    demand = before.copy()
    for number, amount in zip(numbers, amounts.tolist(), strict=True):
        demand[number] += amount if number >= 0 else 0.0
    never = np.full(13, -np.inf)
    found = recent.coverage(demand, amounts, unseen_ratio=0.5, asked=asked, deleted_s=never)
    hottest = sorted((k for k in range(13) if asked[k]), key=lambda k: (-before[k], k))
    total = sum(before[k] for k in hottest)
    middles: list[float] = []
    for number in numbers:
        if number >= 0 and asked[number] and before[number] > 0.0:
            hotter = sum(before[k] for k in hottest[: hottest.index(number)])
            middles.append((hotter + before[number] / 2) / total)
    counted = sum(number < 0 or bool(asked[number]) for number in numbers)
    assert found.accesses == counted
    if counted:
        places = np.minimum(CELLS - 1, (np.array(middles) * CELLS).astype(np.int64))
        assert list(found.below) == [int((places < cell).sum()) for cell in range(CELLS + 1)]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([60, 10_000]), st.integers(150, 700))
def test_restarts_batches_and_parts_change_nothing(seed: int, keys_max: int, batch: int) -> None:
    config = PrefetchSettings(heat_keys_max=keys_max, heat_tail_buckets=64)
    events = events_of(skewed(seed, 1400, 700))
    whole, broken = HeatGraph(config), HeatGraph(config)
    whole.apply(events)
    for start in range(0, len(events), batch):
        broken.apply(events[start : start + batch])
        if start % 2 == 0:
            snapshot, _ = join_heat(*split_heat(broken.to_snapshot(), b"", {}))
            broken = HeatGraph.from_snapshot(snapshot, config)
    assert broken.to_snapshot() == whole.to_snapshot()
    assert broken.coverage(T0) == whole.coverage(T0)
    assert len(whole._recent) <= KEPT_ACCESSES


def test_other_tenants_accesses_do_not_count() -> None:
    graph = HeatGraph()
    graph.apply(events_of(skewed(2, 600)))
    alone = HeatGraph()
    mine = [event for event in events_of(skewed(2, 600)) if event.tenant == "t1"]
    alone.apply(mine)
    now_s = T0 + 20.0 * 600
    assert graph.coverage(now_s, "t1").below == alone.coverage(now_s).below


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=8))
def test_the_newest_accesses_are_kept_in_bounded_memory(sizes: list[int]) -> None:
    recent = RecentAccesses()
    total = 0
    for size in sizes:
        numbers = np.arange(total, total + size)
        recent.add(numbers, numbers / 2.0, numbers / 4.0, numbers % 3 > 0)
        recent.check()
        total += size
    expected = [number for number in range(total) if number % 3 > 0][-KEPT_ACCESSES:]
    assert recent.numbers.tolist() == expected
    assert (recent.times_s * 2.0).tolist() == (recent.amounts * 4.0).tolist() == expected
    assert recent.memory_bytes <= 2 * 24 * KEPT_ACCESSES
