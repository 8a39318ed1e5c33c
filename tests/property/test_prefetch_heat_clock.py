"""Wrong clocks, of any size, length and share: the heat goes on, however the events were cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_clock import CLOCKS_MAX, EventClock
from stoker.prefetch.settings import PrefetchSettings

T0 = 1.76e9
DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S
CONFIG = PrefetchSettings()
SILENCE_S = CONFIG.heat_silence_s_max
STEP_S = 80.0  # between events
COUNT = 1_500  # 33 hours
ROOM = 60  # of 400 keys

Floats = NDArray[np.float64]
Keys = NDArray[np.int64]


def clock() -> EventClock:
    return EventClock(
        jump_s_max=CONFIG.heat_jump_s_max,
        jump_events=CONFIG.heat_jump_events,
        silence_s_max=SILENCE_S,
    )


def asked(count: int, *, seed: int) -> Keys:
    """Keys of a power law whose hot ones change: int64, shape (count, 3)."""
    rng = np.random.default_rng(seed)
    drift = np.arange(count)[:, None] // 300
    return (rng.zipf(1.4, (count, 3)) + 7 * drift) % 400


def heat_of(
    keys: Keys, times_s: Floats, *, arrived_s: Floats | None = None, batch: int = 97
) -> HeatGraph:
    graph = HeatGraph()
    for at in range(0, len(keys), batch):
        events = [
            Event("e", SEARCH_PERFORMED, float(time_s), "t", None, None, None,
                  tuple(f"c{key}" for key in row), {})
            for time_s, row in zip(times_s[at : at + batch], keys[at : at + batch], strict=True)
        ]  # fmt: skip
        graph.apply(events, arrived_s=None if arrived_s is None else arrived_s[at : at + batch])
    graph.check()
    return graph


def served(graph: HeatGraph, now_s: float, following: Keys) -> float:
    """The share of what follows that the warmest keys serve."""
    demand = graph.demand(now_s)
    warm = sorted(demand, key=lambda key: (-demand[key], key))[:ROOM]
    names = {int(chunk[1:]) for _, chunk in warm}
    return float(np.isin(following, list(names)).mean())


def wrong_of(offset_s: float, start: int, length: int, share: float, *, seed: int) -> Floats:
    """What the clocks are off by, per event: in a stretch, of a share of the producers."""
    rng = np.random.default_rng(seed)
    off = np.zeros(COUNT)
    stretch = slice(start, start + length)
    broken = rng.random(COUNT) < share
    off[stretch] = np.where(broken[stretch], offset_s, 0.0)
    return off


@pytest.fixture(scope="module")
def undisturbed() -> HeatGraph:
    """The heat of the same events with right clocks."""
    return heat_of(asked(COUNT, seed=1), T0 + STEP_S * np.arange(COUNT))


offsets = st.builds(
    lambda sign, days: sign * days * DAY_S, st.sampled_from([-1.0, 1.0]), st.floats(7.1, 20_000.0)
)


@settings(max_examples=25, deadline=None)
@given(
    offset_s=offsets,
    start=st.integers(0, COUNT - 400),
    length=st.integers(1, COUNT - 200),
    share=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    by_log=st.booleans(),
)
def test_after_a_wrong_clock_of_any_length_the_warm_set_is_as_good(
    undisturbed: HeatGraph, offset_s: float, start: int, length: int, share: float, by_log: bool
) -> None:
    """Of one producer (a burst), of some among others, of all: then, and while it lasts."""
    length = min(length, COUNT - 200 - start)
    keys = np.concatenate([asked(COUNT, seed=1), asked(COUNT + 300, seed=9)[COUNT:]])
    times = T0 + STEP_S * np.arange(COUNT)
    now_s, following = float(times[-1]), keys[COUNT:]
    off = wrong_of(offset_s, start, length, share, seed=2)
    # By the log: its host's clock is wrong, and so is what it says of all.
    arrived = times + off + 0.5 if by_log else None
    graph = heat_of(keys[:COUNT], times + off, arrived_s=arrived)
    assert served(graph, now_s, following) >= served(undisturbed, now_s, following) - 0.03
    # Time goes on: what comes next is the newest, and an hour ages the heat by an hour.
    total = sum(graph.demand(now_s).values())
    hour_later = sum(graph.demand(now_s + 3600.0).values())
    expected = [sum(undisturbed.demand(now_s + later).values()) for later in (0.0, 3600.0)]
    # The first ones that are behind count as late as they say they are.
    assert 0.98 <= total / expected[0] <= 1.02
    assert hour_later / total == pytest.approx(expected[1] / expected[0], rel=0.01)
    assert graph.watermark_s == pytest.approx(now_s, abs=1.0)
    recent = graph.accesses_since(now_s - 100 * STEP_S + 1.0)
    assert recent.total == pytest.approx(300, abs=6)


@settings(max_examples=15, deadline=None)
@given(
    hours=st.floats(1.1, 7 * 24 - 1.0),
    start=st.integers(200, COUNT - 500),
    length=st.integers(1, 300),
)
def test_a_clock_that_is_off_by_less_than_a_silence_costs_a_few_points(
    undisturbed: HeatGraph, hours: float, start: int, length: int
) -> None:
    keys = np.concatenate([asked(COUNT, seed=1), asked(COUNT + 300, seed=9)[COUNT:]])
    times = T0 + STEP_S * np.arange(COUNT)
    off = wrong_of(hours * 3600.0, start, length, 1.0, seed=2)
    graph = heat_of(keys[:COUNT], times + off)
    now_s, following = float(times[-1]), keys[COUNT:]
    assert served(graph, now_s, following) >= served(undisturbed, now_s, following) - 0.08


def test_a_stream_that_begins_with_a_wrong_clock_goes_on_too() -> None:
    keys = asked(COUNT + 300, seed=3)
    times = T0 + STEP_S * np.arange(COUNT)
    off = np.where(np.arange(COUNT) < 500, -56 * YEAR_S, 0.0)  # a board without a battery: 1970
    graph = heat_of(keys[:COUNT], times + off)
    assert graph.watermark_s == times[-1]
    undisturbed = heat_of(keys[:COUNT], times)
    expected = undisturbed.demand(times[-1])
    found = graph.demand(times[-1])
    warm = sorted(expected, key=lambda key: -expected[key])[:20]
    assert [found[key] for key in warm] == pytest.approx([expected[key] for key in warm], rel=0.05)


def test_clocks_that_take_turns_open_no_more_than_one_offset_each() -> None:
    """One producer is years ahead for good, in bursts longer than what is believed."""
    keys = asked(COUNT, seed=4)
    times = T0 + STEP_S * np.arange(COUNT)
    off = np.where(np.arange(COUNT) // 20 % 2 == 1, 3 * YEAR_S, 0.0)
    graph = heat_of(keys, times + off)
    assert len(graph._clock.to_values()["clock"]["offsets_s"]) == 2
    expected = heat_of(keys, times).demand(times[-1])
    found = graph.demand(times[-1])
    assert [found[key] for key in expected] == pytest.approx(list(expected.values()), rel=0.02)


def test_times_at_random_are_never_believed() -> None:
    keys = asked(COUNT, seed=5)
    times = T0 + STEP_S * np.arange(COUNT)
    rng = np.random.default_rng(6)
    wild = np.where(rng.random(COUNT) < 0.3, rng.uniform(10, 9_000, COUNT) * DAY_S, 0.0)
    graph = heat_of(keys, times + wild)
    assert graph.watermark_s == pytest.approx(times[-1], abs=STEP_S * 20)
    assert graph._clock.is_plain


def test_what_was_believed_long_ago_is_forgotten_first() -> None:
    one = clock()
    for turn in range(20):
        times = T0 + turn * 30 * DAY_S + np.arange(10.0)
        one.take(one.believe(times), 10)
    assert len(one.to_values()["clock"]["offsets_s"]) == CLOCKS_MAX
    assert one.newest_s < T0 + 20 * 10  # nothing has aged
    assert one.watermark_s == T0 + 19 * 30 * DAY_S + 9.0


streams = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 2 * 3600.0, 3 * DAY_S, 30 * DAY_S, -30 * DAY_S, 9 * YEAR_S]),
        st.integers(1, 12),
        st.floats(0.0, 1800.0),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(streams, st.lists(st.integers(1, 30), min_size=1, max_size=20), st.booleans())
def test_what_is_believed_depends_on_the_order_of_events_alone(
    pieces: list[tuple[float, int, float]], cuts: list[int], by_log: bool
) -> None:
    """Whole, event by event, in parts of which only some were taken, and restored in between."""
    times: list[float] = []
    for offset_s, count, gap_s in pieces:
        times += [T0 + offset_s + gap_s * i + 10.0 * len(times) for i in range(count)]
    claimed = np.array(times)
    late = np.random.default_rng(len(times)).exponential(900.0, len(times))
    arrived = claimed + 1.0 if by_log else None
    claimed = claimed - late if by_log else claimed
    whole = clock()
    expected = whole.take(whole.believe(claimed, arrived), len(times))
    assert np.isfinite(expected).all()
    broken = clock()
    at, turn, found = 0, 0, []
    newest = -np.inf
    while at < len(times):
        size = cuts[turn % len(cuts)]
        run = slice(at, at + size)
        believed = broken.believe(claimed[run], None if arrived is None else arrived[run])
        taken = min(len(believed.times_s), 1 + turn % size)
        found += broken.take(believed, taken).tolist()
        assert broken.newest_s >= newest
        newest = broken.newest_s
        assert max(found) == newest
        at, turn = at + taken, turn + 1
        again = clock()
        again.load_values(broken.to_values())
        assert again.to_values() == broken.to_values()
        broken = again
    assert found == expected.tolist()
    assert broken.to_values() == whole.to_values()


def test_a_heat_with_clocks_is_restored_and_refused_by_what_cannot_be_one() -> None:
    keys = asked(900, seed=7)
    times = T0 + STEP_S * np.arange(900)
    times[300:600] += 5 * YEAR_S
    whole = heat_of(keys, times)
    assert not whole._clock.is_plain
    half = heat_of(keys[:450], times[:450])
    half = HeatGraph.from_snapshot(half.to_snapshot())
    assert half.to_snapshot() == heat_of(keys[:450], times[:450]).to_snapshot()
    values = whole._clock.to_values()
    one = clock()
    one.load_values(values)
    good = values["clock"]
    for odd in (
        5,
        {},
        {**good, "offsets_s": []},
        {**good, "offsets_s": [0.0] * (CLOCKS_MAX + 1)},
        {**good, "offsets_s": [float("nan")]},
        {**good, "candidates": [[float("inf"), 1]]},
        {**good, "candidates": [[T0, 0]]},
        {**good, "candidates": [[T0, float("inf")]]},
        {**good, "candidates": [[T0, 1]] * 5},
    ):
        with pytest.raises(InputError):
            one.load_values({**values, "clock": odd})
    with pytest.raises(InputError):
        one.load_values({**values, "ahead": float("inf")})
    assert one.to_values() == values


def test_late_events_of_a_log_are_no_clock_however_old() -> None:
    """Someone sends a year-old hour: the log took it now, so it counts a year ago."""
    keys = asked(900, seed=8)
    times = T0 + STEP_S * np.arange(900)
    arrived = times + 1.0
    times[300:600] -= YEAR_S
    graph = heat_of(keys, times, arrived_s=arrived)
    assert graph._clock.is_plain
    rest = np.r_[0:300, 600:900]
    expected = heat_of(keys[rest], times[rest]).demand(times[-1])
    found = graph.demand(times[-1])
    assert [found[key] for key in expected] == pytest.approx(list(expected.values()), abs=1.0)


def test_a_log_that_is_ahead_of_right_events_changes_nothing() -> None:
    keys = asked(600, seed=8)
    times = T0 + STEP_S * np.arange(600)
    arrived = times + np.where(np.arange(600) % 100 < 50, 4 * YEAR_S, 1.0)
    assert (
        heat_of(keys, times, arrived_s=arrived).to_snapshot() == heat_of(keys, times).to_snapshot()
    )


def test_a_night_and_a_week_are_silences_and_a_month_is_not() -> None:
    for silence_s, aged in ((12 * 3600.0, True), (6.9 * DAY_S, True), (30 * DAY_S, False)):
        graph = HeatGraph(dataclasses.replace(CONFIG))
        before = np.zeros((50, 1), dtype=np.int64)
        for at, key in ((T0, 0), (T0 + silence_s, 1)):
            graph.apply(
                [
                    Event("e", SEARCH_PERFORMED, at + i, "t", None, None, None, (f"c{key}",), {})
                    for i in range(len(before))
                ]
            )
        demand = graph.demand(T0 + silence_s + 50.0)
        ratio = demand["t", "c0"] / demand["t", "c1"]
        assert (ratio < 0.75) == aged, silence_s
        assert ratio <= 1.01
