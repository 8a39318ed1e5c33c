"""The tail's estimates, and that what earned a place in the heat table gets one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.kernels._core import content_hash
from stoker.prefetch.coverage_curve import KEPT_ACCESSES
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt
from stoker.prefetch.tail_sketch import TailSketch

T0 = 1_760_000_000.0
HALF_LIFE_S = 3600.0

accesses = st.lists(
    st.tuples(st.integers(0, 40), st.floats(0.0, 20 * HALF_LIFE_S), st.sampled_from([1.0, 2.0])),
    min_size=1,
    max_size=120,
)


@settings(max_examples=100, deadline=None)
@given(accesses, st.sampled_from([16, 64, 4096]))
def test_an_estimate_is_never_too_low_and_seldom_much_too_high(
    found: list[tuple[int, float, float]], buckets: int
) -> None:
    tail = TailSketch(half_life_s=HALF_LIFE_S, buckets=buckets)
    now_s = T0 + 20 * HALF_LIFE_S
    truth: dict[int, float] = {}
    for number, at_s, amount in found:
        tail.count(content_hash("t", f"c{number}"), amount * tail.growth(T0 + at_s))
        decayed = amount * math.exp2((T0 + at_s - now_s) / HALF_LIFE_S)
        truth[number] = truth.get(number, 0.0) + decayed
    total = sum(truth.values())
    wrong = 0
    for number, demand in truth.items():
        estimate = tail.estimate(content_hash("t", f"c{number}"), now_s)
        assert estimate >= demand * (1 - 1e-9)
        assert estimate <= total * (1 + 1e-9)
        wrong += estimate > demand + tail.relative_error * total + 1e-9
    # Each is wrong with probability e^-4; hashes are fixed, so this is no chance of the run's.
    assert wrong <= max(2, 0.2 * len(truth))
    assert tail.estimate(content_hash("u", "c0"), now_s) <= total * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(accesses)
def test_raising_counts_only_what_lacks(found: list[tuple[int, float, float]]) -> None:
    tail = TailSketch(half_life_s=HALF_LIFE_S, buckets=4096)
    for number, at_s, amount in found:
        key = content_hash("t", f"c{number}")
        before = tail.estimate(key, T0 + 20 * HALF_LIFE_S)
        tail.raise_to(key, T0 + at_s, amount)
        assert tail.estimate(key, T0 + at_s) >= amount * (1 - 1e-9)
        assert tail.estimate(key, T0 + 20 * HALF_LIFE_S) >= before
    values, data = tail.to_state()
    again = TailSketch.from_state(values, data, half_life_s=HALF_LIFE_S, buckets=4096)
    assert again.to_state()[0] == values
    assert (again.to_state()[1] == data).all()
    with pytest.raises(SnapshotCorrupt, match="4096 buckets, settings say 16"):
        TailSketch.from_state(values, data, half_life_s=HALF_LIFE_S, buckets=16)


def test_the_floor_fades_like_everything_else() -> None:
    tail = TailSketch(half_life_s=HALF_LIFE_S, buckets=64)
    tail.set_floor(T0, 8.0)

    def bar(time_s: float) -> float:
        growth = tail.growth(time_s)
        return tail.bar(growth) / growth

    assert bar(T0) == pytest.approx(8.5)
    assert bar(T0 + HALF_LIFE_S) == pytest.approx(4.5)
    late_s = T0 + 600 * HALF_LIFE_S
    tail.count(content_hash("t", "a"), tail.growth(late_s))  # the landmark moves: all is forgotten
    assert tail.estimate(content_hash("t", "a"), late_s) == 1.0
    assert bar(late_s) == 0.5


def test_a_key_has_the_same_number_in_every_process() -> None:
    # Stored in snapshots: a change of the hash would lose the tail of those that are there.
    assert content_hash("t", "a") == -5579839193218323747
    assert content_hash("ten", "anta chunk of some length") == 6600325587807347286
    assert content_hash("tenant", "a chunk of some length") == -1309420376006559960


def searches(chunks: list[str], *, step_s: float = 1.0, start: int = 0) -> list[Event]:
    return [
        Event(f"e{i}", SEARCH_PERFORMED, T0 + i * step_s, "t", None, None, None, (chunk,), {})
        for i, chunk in enumerate(chunks, start)
    ]


def test_one_hit_wonders_do_not_push_out_what_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drops: list[str] = []
    drop = HeatGraph._drop_coldest

    def counted(graph: HeatGraph, count: int) -> None:
        drops.append("x")
        drop(graph, count)

    monkeypatch.setattr(HeatGraph, "_drop_coldest", counted)
    rng = np.random.default_rng(1)
    hot = [f"hot{int(i)}" for i in rng.integers(0, 80, 20_000)]
    once = [f"once{i}" for i in range(20_000)]
    stream = [chunk for pair in zip(hot, once, strict=True) for chunk in pair]
    config = PrefetchSettings(heat_keys_max=100, heat_tail_buckets=1 << 14)
    graph = HeatGraph(config)
    graph.apply(searches(stream, step_s=0.1))
    graph.check()
    assert graph.key_count <= 100
    # They turned the table over once, when nothing was known, and then only as hashes met.
    assert len(drops) < 30, len(drops)
    kept = {chunk for _, chunk in graph.demand(T0 + 4_000.0)}
    assert kept >= {f"hot{i}" for i in range(80)}


def test_a_key_outside_the_table_enters_once_it_has_earned_it() -> None:
    config = PrefetchSettings(heat_keys_max=50, heat_tail_buckets=1 << 12)
    graph = HeatGraph(config)
    # Each of 50 is asked for six times; one more pushes the coldest out, and sets the floor.
    graph.apply(searches([f"c{i % 50}" for i in range(300)] + ["extra"]))
    assert graph._tail is not None
    start = 301
    entered = None
    for times in range(1, 12):
        graph.apply(searches(["late"], start=start))
        start += 1
        if ("t", "late") in graph.demand(T0):
            entered = times
            break
    assert entered == 7  # once more than those that were dropped
    # It brings what it had been asked for before.
    assert graph.demand(T0)["t", "late"] == pytest.approx(7.0, rel=0.02)
    assert graph.demand_of(("t", "late"), T0) == graph.demand(T0)["t", "late"]
    assert graph.demand_of(("t", "nobody"), T0) <= 1.0
    gone = next(f"c{i}" for i in range(50) if ("t", f"c{i}") not in graph.demand(T0))
    assert graph.demand_of(("t", gone), T0) == pytest.approx(6.0, rel=0.02)


@pytest.mark.parametrize("distinct", [2_000, 20_000])
def test_memory_is_bounded_whatever_the_number_of_keys(distinct: int) -> None:
    config = PrefetchSettings(heat_keys_max=500, heat_tail_buckets=1 << 12)
    graph = HeatGraph(config)
    graph.apply(searches([f"c{i}" for i in range(distinct)], step_s=0.01))
    graph.check()
    assert graph.key_count <= 500
    # The newest accesses are kept one by one, up to a bound of their own.
    newest = 24 * min(distinct, KEPT_ACCESSES)
    assert graph.memory_bytes < 1_000_000 + 2 * newest
    assert len(graph.to_snapshot()) < 500_000 + newest
