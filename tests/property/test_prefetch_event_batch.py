"""Events as columns, against the slow and obvious: one decoder, dictionaries, NumPy by rows."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prefetch.event_batch import ROW_READY, _scanner, decode_batch
from stoker.prefetch.events import (
    DOCUMENT_DELETED,
    EVENT_TYPES,
    RESULT_USED,
    SEARCH_PERFORMED,
    Event,
    EventError,
    decode,
)
from stoker.prefetch.graph import NO_TARGET, EdgeTable
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_tables import EDGE_BLOCK
from stoker.prefetch.settings import PrefetchSettings

T0 = 1_760_000_000.0
GOOD = (
    '{"specversion":"1.0","id":"e1","source":"/a","type":"stoker.search.performed.v1",'
    '"time":"2026-01-31T12:00:00.25Z","datacontenttype":"application/json",'
    '"traceparent":"00-a-b-01","n":[1,-2.5,{"k":null}],'
    '"data":{"tenant":"acmé","session":"s","route":null,"query":"why \\"é\\u00e9?",'
    '"chunk_ids":["a#0","b#1","c"],"took":{"ms":12.5}}}'
)
# What an edit puts in: pieces of JSON, of times, and what decoders like to disagree about.
PIECES = [
    *('"', "\\", "{", "}", "[", "]", ",", ":", " ", "\t", "\n", "\r", "\x00", "\x1f", "\x7f"),
    *("null", "true", "0", "-0", "-", "01", "1e3", "1E400", ".5", "12345678901234567890", "NaN"),
    *('"id"', '"data":{}', '"tenant":"t"', '"chunk_ids":[]', '"chunk_ids":null', '"session":""'),
    *('"session":null', '"query":7', '"type":"stoker.result.used.v1"', '"specversion":1.0'),
    *("\\u0061", "\\ud83d\\ude00", "\\ud83d", "\\udc00", "\\u00", "\\x", "\\/", "\u2028", "é"),
    *("1970-01-01T00:00:00Z", "2026-02-29T00:00:00Z", "2024-02-29T23:59:59.999999999Z", "Z", "z"),
    *("2300-06-01T00:00:00.000001Z", "+05:30", "-23:59", "+24:00", ".1234567", ".", ":60Z"),
    *("[" * 40 + "]" * 40, "x" * 257, "y" * 512, "y" * 513, '"a",' * 40, "٢", "\ufeff"),
]


def judged(payload: bytes, bytes_max: int) -> tuple[Event | None, str]:
    try:
        return decode(payload, bytes_max=bytes_max), ""
    except EventError as error:
        return None, str(error)


def same_as_decode(payload: bytes, bytes_max: int = 1 << 20) -> bool:
    """Check one payload; tells whether it is an event."""
    batch, refused = decode_batch([payload], bytes_max=bytes_max)
    event, reason = judged(payload, bytes_max)
    if event is None:
        assert [(row, str(error)) for row, error in refused] == [(0, reason)]
        assert batch.ready_count == 0
        return False
    assert refused == []
    assert batch.values(0) == (
        EVENT_TYPES.index(event.type),
        event.time_s,
        event.id,
        event.tenant,
        event.session,
        list(event.chunk_ids),
    )
    return True


def test_the_plain_event_needs_no_second_look() -> None:
    unsure = GOOD.replace("-2.5", "-2.5e0").encode()
    scanned = _scanner(1 << 20).scan([GOOD.encode(), None, unsure])
    assert scanned.states().tolist() == [ROW_READY, 2, 0]
    batch, refused = decode_batch([GOOD.encode(), None, unsure])
    assert (batch.states().tolist(), refused) == ([ROW_READY, 2, ROW_READY], [])
    assert same_as_decode(GOOD.encode())


edits = st.lists(
    st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.sampled_from(PIECES)), max_size=3
)


@settings(max_examples=400, deadline=None)
@given(edits)
def test_edited_envelopes_are_judged_as_the_decoder_does(
    changes: list[tuple[int, int, str]],
) -> None:
    text = GOOD
    for at, length, piece in changes:
        text = text[:at] + piece + text[at + length :]
    same_as_decode(text.encode())


def test_every_piece_at_every_place_is_judged_as_the_decoder_does() -> None:
    places = range(0, len(GOOD), 7)
    taken = 0
    for piece in PIECES:
        for at in places:
            taken += same_as_decode((GOOD[:at] + piece + GOOD[at:]).encode())
            taken += same_as_decode((GOOD[:at] + piece + GOOD[at + len(piece) :]).encode())
    assert taken > 100


def test_damaged_bytes_are_judged_as_the_decoder_does() -> None:
    chance = random.Random(5)
    good = GOOD.encode()
    for _ in range(4000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 3)):
            data[chance.randrange(len(data))] = chance.choice([*range(256), 0xC0, 0xE2, 0xED, 0xF4])
        same_as_decode(bytes(data[: chance.choice([len(data), len(data), len(data) - 1])]))


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {"tenant": st.text(max_size=4), "chunk_ids": st.lists(st.text(max_size=4), max_size=4)},
        optional={
            "session": st.text(max_size=3) | st.none() | st.integers(),
            "query": st.text(max_size=9) | st.none(),
            "route": st.text(max_size=2) | st.none(),
        },
    ),
    st.datetimes().map(lambda t: t.isoformat() + "Z"),
    st.booleans(),
)
def test_any_values_are_judged_as_the_decoder_does(
    data: dict[str, Any], time: str, ascii_only: bool
) -> None:
    envelope = {**orjson.loads(GOOD), "data": data, "time": time}
    if ascii_only:
        import json

        same_as_decode(json.dumps(envelope).encode())
    else:
        try:
            payload = orjson.dumps(envelope)
        except orjson.JSONEncodeError:  # a lone surrogate has no UTF-8
            return
        same_as_decode(payload)


def test_a_long_payload_is_refused_by_length() -> None:
    assert same_as_decode(GOOD.encode(), bytes_max=len(GOOD.encode()))
    assert not same_as_decode(GOOD.encode(), bytes_max=len(GOOD.encode()) - 1)


def event(
    time_s: float,
    *chunks: str,
    kind: str = SEARCH_PERFORMED,
    tenant: str = "t",
    session: str | None = None,
    name: str = "e",
) -> Event:
    return Event(name, kind, time_s, tenant, session, None, None, chunks, {})


def strengthen(table: tuple[np.ndarray, np.ndarray], tails: Any, heads: Any, grown: Any) -> None:
    """Add a block of edges row by row, as `EdgeTable.add` says it does."""
    targets, weights = table
    new: dict[tuple[int, int], float] = {}
    for tail, head, weight in zip(tails, heads, grown, strict=True):
        if tail != head:
            new[tail, head] = new.get((tail, head), 0.0) + weight
    unknown: dict[int, list[tuple[float, int]]] = {}
    for (tail, head), weight in new.items():
        where = np.flatnonzero(targets[tail] == head)
        if len(where):
            weights[tail, where[0]] += weight
        else:
            unknown.setdefault(tail, []).append((-weight, head))
    for tail, edges in unknown.items():
        slots = np.argsort(weights[tail], kind="stable")
        for slot, (weight, head) in zip(slots.tolist(), sorted(edges), strict=False):
            targets[tail, slot], weights[tail, slot] = head, -weight


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(2, 30))
def test_edges_are_added_as_rows_would_be(seed: int, degree: int, keys: int) -> None:
    rng = np.random.default_rng(seed)
    table = EdgeTable(degree_max=degree, half_life_s=1000.0, capacity=keys)
    model = (table.targets.copy(), table.weights.copy())
    for _ in range(4):
        count = int(rng.integers(0, 200))
        tails, heads = rng.integers(0, keys, (2, count))
        times = T0 + rng.integers(0, 3000, count).astype(np.float64)
        landmark = table.landmark
        table.add(tails, heads, times, np.ones(count))
        assert landmark in (table.landmark, -np.inf)
        if count:
            strengthen(model, tails.tolist(), heads.tolist(),
                       table.weight_of(times, np.ones(count)).tolist())  # fmt: skip
        table.check()
        assert (table.targets == model[0]).all()
        assert (table.weights == model[1]).all()


def links(events: list[Event], config: PrefetchSettings) -> list[tuple[str, str, float]]:
    """Return what a stream of searches links, in order, by dictionaries and loops."""
    sessions: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()
    found = []
    for one in events:
        if one.type != SEARCH_PERFORMED:
            continue
        chunks = one.chunk_ids
        for gap in range(1, config.graph_window_chunks + 1):
            for tail, head in zip(chunks, chunks[gap:], strict=False):
                found += [(tail, head, one.time_s), (head, tail, one.time_s)]
        if one.session is None:
            continue
        first = chunks[: config.graph_transition_chunks]
        before = sessions.pop(one.session, None)
        if before is None:
            sessions[one.session] = (one.time_s, first)
            if len(sessions) > config.graph_sessions_max:
                sessions.popitem(last=False)
            continue
        if 0.0 <= one.time_s - before[0] <= config.graph_session_gap_s:
            found += [(tail, head, one.time_s) for tail in before[1] for head in first]
        sessions[one.session] = before if before[0] > one.time_s else (one.time_s, first)
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 3))
def test_the_graph_links_what_loops_would_link(seed: int, width: int, window: int) -> None:
    chance = random.Random(seed)
    config = PrefetchSettings(
        graph_edges_per_key_max=5,
        graph_sessions_max=6,
        graph_session_gap_s=40.0,
        graph_transition_chunks=width,
        graph_window_chunks=window,
    )
    events = [
        event(
            T0 + i * 3.0 - chance.choice([0.0, 0.0, 25.0]),
            *(f"c{chance.randrange(60)}" for _ in range(chance.randrange(1, 8))),
            kind=chance.choice([SEARCH_PERFORMED] * 4 + [RESULT_USED]),
            session=chance.choice([None, *(f"s{n}" for n in range(9))]),
        )
        for i in range(600)
    ]
    graph = HeatGraph(config)
    for at in range(0, len(events), 97):
        graph.apply(events[at : at + 97])
    graph.check()
    found = [
        (graph._table.find("t", tail), graph._table.find("t", head), time_s)
        for tail, head, time_s in links(events, config)
    ]
    whole = len(found) // EDGE_BLOCK * EDGE_BLOCK
    loose = list(zip(*(column.tolist() for column in graph._loose), strict=True))
    assert loose == found[whole:]
    count = graph.key_count
    model = (np.full((count, 5), NO_TARGET), np.zeros((count, 5)))
    for at in range(0, whole, EDGE_BLOCK):
        tails, heads, times = zip(*found[at : at + EDGE_BLOCK], strict=True)
        grown = graph._edges.weight_of(np.array(times), np.ones(EDGE_BLOCK))
        strengthen(model, tails, heads, grown.tolist())
    assert (graph._edges.targets[:count] == model[0]).all()
    assert (graph._edges.weights[:count] == model[1]).all()


@pytest.mark.parametrize("keys_max", [40, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_heat_depends_on_no_batch_and_survives_restarts(seed: int, keys_max: int) -> None:
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(
        PrefetchSettings(graph_edges_per_key_max=4, graph_sessions_max=5, heat_tail_buckets=64),
        heat_keys_max=keys_max,
    )
    events = []
    for i in range(1500):
        chunks = tuple(f"c{int(c)}" for c in rng.zipf(1.4, int(rng.integers(0, 6))) % 400)
        kind = SEARCH_PERFORMED
        if chunks and rng.random() < 0.2:
            kind, chunks = (RESULT_USED, DOCUMENT_DELETED)[int(rng.integers(2))], chunks[:1]
        late = float(rng.exponential(50.0)) if rng.random() < 0.3 else 0.0
        ahead = 1e6 if rng.random() < 0.01 else 0.0
        tenant, session = f"t{int(rng.integers(2))}", f"s{int(rng.integers(9))}"
        events.append(
            event(T0 + i * 30.0 - late + ahead, *chunks, kind=kind, tenant=tenant, session=session)
        )
    whole = HeatGraph(config)
    whole.apply(events)
    whole.check()
    assert whole.events_applied == len(events)
    assert (whole._tail is not None) == (keys_max == 40)
    broken = HeatGraph(config)
    at = 0
    while at < len(events):
        size = int(rng.integers(1, 90))
        broken.apply(events[at : at + size])
        at += size
        if rng.random() < 0.3:
            broken = HeatGraph.from_snapshot(broken.to_snapshot(), config)
    broken.check()
    assert broken.to_snapshot() == whole.to_snapshot()
