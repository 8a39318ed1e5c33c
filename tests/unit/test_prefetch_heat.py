"""The heat graph: what counts, when it counts, and what survives."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch import heat_state
from stoker.prefetch.events import (
    DOCUMENT_DELETED,
    DOCUMENT_UPSERTED,
    RESULT_USED,
    SEARCH_PERFORMED,
    Event,
)
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.pagerank import pagerank
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt, unpack

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
T0 = 1_760_000_000.0
SMALL = PrefetchSettings(graph_edges_per_key_max=4, graph_sessions_max=5)


def event(
    time_s: float,
    *chunks: str,
    kind: str = SEARCH_PERFORMED,
    tenant: str = "t",
    session: str | None = None,
) -> Event:
    return Event(f"{time_s}-{chunks}", kind, time_s, tenant, session, None, None, chunks, {})


def stream(count: int, *, seed: int, step_s: float = 3.0) -> list[Event]:
    rng = np.random.default_rng(seed)
    events = []
    for i in range(count):
        chunks = tuple(f"c{int(c)}" for c in rng.zipf(1.3, 4) % 200)
        late = float(rng.exponential(20.0)) if rng.random() < 0.3 else 0.0
        kind = SEARCH_PERFORMED
        roll = rng.random()
        if roll < 0.1:
            kind, chunks = RESULT_USED, chunks[:1]
        elif roll < 0.12:
            kind, chunks = DOCUMENT_DELETED, chunks[:1]
        events.append(
            event(
                T0 + i * step_s - late,
                *chunks,
                kind=kind,
                tenant=f"t{int(rng.integers(2))}",
                session=f"s{int(rng.integers(9))}",
            )
        )
    return events


def test_demand_follows_the_decay_law() -> None:
    graph = HeatGraph()
    graph.apply([event(T0, "a"), event(T0 + 3600.0, "b")])
    now = T0 + 86400.0
    demand = graph.demand(now)
    assert demand["t", "a"] == pytest.approx(0.5, rel=0.003)
    assert demand["t", "b"] == pytest.approx(1 / (1 + 82800 / 86400), rel=0.003)


def test_used_results_count_double_and_documents_nothing() -> None:
    graph = HeatGraph()
    graph.apply(
        [
            event(T0, "a"),
            event(T0, "b", kind=RESULT_USED),
            event(T0, "c", kind=DOCUMENT_UPSERTED),
        ]
    )
    demand = graph.demand(T0)
    assert demand["t", "b"] == pytest.approx(2 * demand["t", "a"])
    assert ("t", "c") not in demand


def test_scores_are_bounded_and_ranked() -> None:
    graph = HeatGraph()
    graph.apply([event(T0 + i, "hot", "warm") for i in range(50)] + [event(T0, "cold", "hot")])
    graph.tick(T0 + 50)
    scores = graph.scores(T0 + 50)
    assert all(0.0 <= value <= 1.0 for value in scores.values())
    assert scores["t", "hot"] > scores["t", "warm"] > scores["t", "cold"]
    assert scores["t", "hot"] > 0.85
    told = graph.explain(("t", "hot"), T0 + 50)
    assert told is not None
    assert told["leads_to"][0][0] == ("t", "warm")
    assert graph.explain(("t", "nobody"), T0) is None


def test_unseen_ratio_is_the_weight_of_what_was_asked_once() -> None:
    graph = HeatGraph()
    assert graph.unseen_ratio(T0) == 1.0
    graph.apply([event(T0, "once"), *[event(T0, "often") for _ in range(9)]])
    assert graph.unseen_ratio(T0) == pytest.approx(0.1, rel=0.01)
    assert graph.unseen_ratio(T0, "nobody") == 1.0
    graph.apply([event(T0, "once")])
    assert graph.unseen_ratio(T0) == 0.0


def test_tenants_are_apart() -> None:
    graph = HeatGraph()
    graph.apply([event(T0, "a", tenant="x"), event(T0, "a", tenant="y"), event(T0, "b")])
    assert set(graph.scores(T0, "x")) == {("x", "a")}
    assert len(graph.scores(T0)) == 3
    assert graph.scores(T0, "nobody") == {}


def test_late_events_land_in_their_own_time() -> None:
    events = [event(T0 + 100.0 * i, f"c{i % 7}") for i in range(60)]
    in_order, shuffled = HeatGraph(), HeatGraph()
    in_order.apply(events)
    order = np.random.default_rng(3).permutation(len(events))
    shuffled.apply([events[59], *(events[i] for i in order if i != 59)])
    now = T0 + 7000.0
    assert shuffled.demand(now) == pytest.approx(in_order.demand(now), rel=1e-12)
    assert shuffled.scores(now).keys() == in_order.scores(now).keys()


def test_one_clock_that_runs_ahead_does_no_harm() -> None:
    good = [event(T0 + i, f"c{i % 5}") for i in range(100)]
    sane, jumped = HeatGraph(), HeatGraph()
    sane.apply(good)
    jumped.apply([*good[:50], event(T0 + 3e8, "bad"), *good[50:]])
    now = T0 + 100
    expected = sane.scores(now)
    got = jumped.scores(now)
    assert {key: got[key] for key in expected} == pytest.approx(expected, abs=1e-9)
    assert jumped.watermark_s == T0 + 99


def test_a_long_silence_is_believed_after_a_few_events() -> None:
    graph = HeatGraph()
    graph.apply([event(T0, "a")])
    night = T0 + 40_000.0
    graph.apply([event(night + i, "b") for i in range(8)])
    assert graph.watermark_s == night + 7


def test_arrival_bounds_the_event_time() -> None:
    graph = HeatGraph()
    graph.apply([event(T0 + 50.0, "a"), event(T0 + 9e9, "b")], arrived_s=[T0 + 51.0, T0 + 52.0])
    assert graph.watermark_s == T0 + 52.0


def test_a_clock_behind_the_events_is_no_error() -> None:
    graph = HeatGraph()
    graph.apply([event(T0, "a")])
    assert graph.demand(T0 - 1e6) == graph.demand(T0)
    assert graph.scores(0.0)["t", "a"] == graph.scores(T0)["t", "a"]


def test_non_finite_time_is_refused() -> None:
    with pytest.raises(InputError, match="finite"):
        HeatGraph().apply([event(float("nan"), "a")])


def test_deleted_chunk_is_forgotten_and_may_return() -> None:
    graph = HeatGraph()
    graph.apply([event(T0, "a", "b"), event(T0 + 10, "a", kind=DOCUMENT_DELETED)])
    assert set(graph.demand(T0 + 10)) == {("t", "b")}
    graph.apply([event(T0 + 5, "a")])  # late: from before the deletion
    assert set(graph.demand(T0 + 10)) == {("t", "b")}
    graph.apply([event(T0 + 20, "a")])
    assert graph.demand(T0 + 20)["t", "a"] == pytest.approx(1.0, rel=0.003)


def test_restored_graph_continues_as_if_never_stopped() -> None:
    events = stream(3000, seed=5)
    whole = HeatGraph(SMALL)
    whole.apply(events)
    whole.tick(T0)
    rng = np.random.default_rng(6)
    broken = HeatGraph(SMALL)
    start = 0
    while start < len(events):
        size = int(rng.integers(1, 700))
        broken.apply(events[start : start + size])
        start += size
        broken = HeatGraph.from_snapshot(broken.to_snapshot(), SMALL)
    broken.tick(T0)
    broken.check()
    assert broken.to_snapshot() == whole.to_snapshot()


def test_many_keys_are_tracked_exactly_enough_and_restored() -> None:
    events = stream(3000, seed=8)
    tracked = HeatGraph(dataclasses.replace(SMALL, pagerank_exact_keys_max=10))
    for start in range(0, len(events), 500):
        tracked.apply(events[start : start + 500])
        tracked.tick(T0)
        copy = HeatGraph.from_snapshot(tracked.to_snapshot(), tracked.settings)
        assert copy.to_snapshot() == tracked.to_snapshot()
        tracked = copy
    count = tracked.key_count
    exact = pagerank(tracked._edges, count, tolerance=1e-12, steps_max=500)
    assert np.abs(tracked._rank - exact).sum() < 0.01
    assert all(0.0 <= score <= 1.0 for score in tracked.scores(T0 + 9000).values())


def test_a_chunk_that_is_asked_for_again_and_again_leads_to_others_only() -> None:
    """The table takes no loops, so those that wait for it count for nothing either."""
    graph, without = HeatGraph(SMALL), HeatGraph(SMALL)
    for i in range(40):
        graph.apply([event(T0 + i, "a", session="s")])
    for target in (graph, without):
        target.apply([event(T0 + 50.0, "a", "b"), event(T0 + 51.0, "b", "c")])
        target.tick(T0 + 60.0)
    told = graph.explain(("t", "a"), T0 + 60.0)
    assert told is not None
    assert told["leads_to"] == [(("t", "b"), 1.0)]
    np.testing.assert_allclose(graph._rank, without._rank, atol=1e-6)


def test_related_follows_the_edges_from_what_was_just_asked() -> None:
    graph = HeatGraph(SMALL)
    turns = [("a", "b"), ("c", "d")]
    for i in range(1500):
        session = f"s{i // 2}"
        graph.apply([event(T0 + 10.0 * i, *turns[i % 2], session=session)])
    graph.apply([event(T0 + 1e6 + i, "lone") for i in range(9)])
    graph.apply([event(T0 + 1e6 + 3000.0, "a")])
    found = graph.related(T0 + 1e6 + 3000.0, minutes=5.0)
    assert set(found) == {("t", "a"), ("t", "b"), ("t", "c"), ("t", "d")}
    assert 0.9 < sum(found.values()) <= 1.0 + 1e-9
    assert graph.related(T0 + 2e6) == {}


def test_keys_are_bounded_and_the_hot_stay() -> None:
    config = PrefetchSettings(heat_keys_max=100)
    graph = HeatGraph(config)
    events = []
    for i in range(2000):
        events.append(event(T0 + i, "hot", f"once{i}", session="s"))
    graph.apply(events)
    graph.tick(T0)
    graph.check()
    assert graph.key_count <= 100
    assert max(graph.demand(T0 + 2000).items(), key=lambda item: item[1])[0] == ("t", "hot")
    assert HeatGraph.from_snapshot(graph.to_snapshot(), config).scores(T0) == graph.scores(T0)


@pytest.mark.parametrize("tenant", [None, "t1"])
def test_what_was_read_is_answered_whatever_comes_between(tenant: str | None) -> None:
    """The rest of the work asks nothing of the graph: another thread may write it meanwhile."""
    graph = HeatGraph(PrefetchSettings(heat_keys_max=150))
    graph.apply(stream(1_000, seed=5))
    now = graph.watermark_s + 60.0
    demand, coverage = graph.demand(now, tenant), graph.coverage(now, tenant)
    rest = graph.demand_later(now, tenant), graph.coverage_later(now, tenant)
    known = next(iter(demand))
    graph.apply([event(now + 1.0, known[1], tenant=known[0], kind=DOCUMENT_DELETED)])
    # Until keys are dropped and the others are numbered anew.
    graph.apply([event(now + 2.0 + i, f"new{i}", tenant="t1") for i in range(2_000)])
    assert set(graph.demand(now, tenant)) != set(demand)
    assert graph.coverage(now, tenant) != coverage
    assert rest[0]() == demand
    assert rest[1]() == coverage


def test_damaged_or_foreign_snapshot_is_refused() -> None:
    graph = HeatGraph(SMALL)
    graph.apply(stream(50, seed=1))
    data = graph.to_snapshot()
    for bad in (b"", data[:-1], data[:40] + b"\xff" + data[41:], b"X" + data[1:]):
        with pytest.raises(SnapshotCorrupt):
            HeatGraph.from_snapshot(bad, SMALL)
    with pytest.raises(SnapshotCorrupt, match="edges per key"):
        HeatGraph.from_snapshot(data)
    with pytest.raises(SnapshotCorrupt, match="decay"):
        HeatGraph.from_snapshot(data, PrefetchSettings(heat_decay="exponential"))


def spoilt(array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The same array in ways that no graph would write it."""
    filled = {"above": 2**30} if array.dtype.itemsize >= 4 else {"above": 200}
    if array.dtype.kind != "u":
        filled |= {"below": -7, "far below": -(2**30)}
    if array.dtype.kind == "f":
        filled |= {"huge": 1e300, "inf": np.inf, "nan": np.nan}
    found = {name: np.full_like(array, value) for name, value in filled.items()}
    return found | {
        "shorter": array[..., :-1],
        "fewer": array[:-1],
        "none": array[:0],
        "other type": np.ones_like(array, np.float32 if array.dtype.kind != "f" else np.int32),
        "text": np.frombuffer(b"x" * 8, np.uint8),
    }


def test_a_snapshot_of_no_graph_is_refused_or_harmless() -> None:
    """A checksum does not say who wrote it: what no graph can be must not break a later event."""
    graph = HeatGraph(SMALL)
    graph.apply(stream(400, seed=1))
    graph.tick(T0)
    kind, values, arrays = heat_state.read_snapshot(graph.to_snapshot())
    cases: dict[str, tuple[dict[str, Any], dict[str, NDArray[Any]]]] = {}
    for name, array in arrays.items():
        rest = {other: arrays[other] for other in arrays if other != name}
        cases[f"{name} gone"] = (values, rest)
        for way, other in spoilt(array).items():
            cases[f"{name} {way}"] = (values, {**arrays, name: other})
    odd: tuple[Any, ...] = (None, "x", -1, 1e300, [], [None], [["t", "c"]] * 2, {"t": 1})
    for name in values:
        cases[f"{name} gone"] = ({n: v for n, v in values.items() if n != name}, arrays)
        for value in (*odd, [["t", "s", T0, [2**31, -5]]], [["t", "s", "x", ["y"]]]):
            cases[f"{name} {value}"] = ({**values, name: value}, arrays)
    more = stream(60, seed=2)
    refused = 0
    for name, (plain, columns) in cases.items():
        with np.errstate(all="ignore"):
            data = heat_state.write_snapshot(kind, plain, columns)
        try:
            again = HeatGraph.from_snapshot(data, SMALL)
        except SnapshotCorrupt:
            refused += 1
            continue
        try:
            again.apply(more)
            again.tick(T0)
            assert all(np.isfinite(list(again.demand(T0).values())))
            assert all(0.0 <= score <= 1.0 for score in again.scores(T0).values())
            again.coverage(T0)
            again.related(T0)
            again.to_snapshot()
        except Exception as error:
            raise AssertionError(f"{name}: restored, and failed later") from error
    assert refused > len(cases) / 2, (refused, len(cases))


@pytest.mark.parametrize(
    "header",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"kind": "k"}',
        b'{"kind": "k", "values": [], "arrays": []}',
        b'{"kind": "k", "values": {}, "arrays": [["a", "<f8", [-1]]]}',
        b'{"kind": "k", "values": {}, "arrays": [["a", "|O", [1]]]}',
        b'{"kind": "k", "values": {}, "arrays": [["a", "<f8", [9223372036854775807, 9]]]}',
        b'{"kind": "k", "values": {}, "arrays": [["a", "nothing", [1]]]}',
        b'{"kind": "k", "values": {}, "arrays": [["a", "<f8", ["x"]]]}',
        b'{"kind": "k", "values": {}, "arrays": [7]}',
    ],
)
def test_a_header_that_says_nothing_of_use_is_refused(header: bytes) -> None:
    body = struct.pack("<8sII", b"STKRSNAP", 1, len(header)) + header + bytes(8)
    with pytest.raises(SnapshotCorrupt):
        unpack("k", body + hashlib.blake2b(body, digest_size=16).digest())


def test_empty_graph_has_a_snapshot() -> None:
    graph = HeatGraph.from_snapshot(HeatGraph().to_snapshot())
    graph.tick(T0)
    assert graph.scores(T0) == {}


def test_golden_snapshot_of_version_3_still_reads() -> None:
    config = PrefetchSettings(heat_keys_max=15, heat_tail_buckets=16, graph_edges_per_key_max=4)
    data = (GOLDEN / "heat-v3.snapshot").read_bytes()
    graph = HeatGraph.from_snapshot(data, config)
    graph.check()
    assert graph.to_snapshot() == data
    assert graph.events_applied == 60
    assert graph.coverage(T0).below == ()  # it kept no accesses
    graph.apply([event(T0 + 7200.0, "c0", "c1")])
    assert graph.coverage(T0).accesses == 2.0
    again = HeatGraph.from_snapshot(graph.to_snapshot(), config)
    assert again.to_snapshot() == graph.to_snapshot()


def test_golden_snapshot_of_version_2_still_reads() -> None:
    data = (GOLDEN / "heat-v2.snapshot").read_bytes()
    graph = HeatGraph.from_snapshot(data)
    graph.check()
    assert graph.to_snapshot() == data
    assert graph.events_applied == 60
    assert graph.key_count == 22
    demand = graph.demand(T0 + 1770.0)
    assert demand["t0", "c0"] == pytest.approx(8.8712084, rel=1e-6)
    assert demand["t1", "c1"] == pytest.approx(11.8750716, rel=1e-6)
