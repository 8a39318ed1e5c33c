"""Topics of a stream: who is led where, what plans see of it, and the same state after a stop."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.errors import InputError, UnavailableError
from stoker.prefetch import heat_parts, query_topics, topics
from stoker.prefetch.events import DOCUMENT_DELETED, RESULT_USED, SEARCH_PERFORMED, Event, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_parts import join_heat, split_heat
from stoker.prefetch.query_topics import QueryTopics
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt, unpack

T0 = 1.7e9
HOUR = 3600.0
SMALL = PrefetchSettings(topics_nodes_max=6, topics_edges_per_node_max=3, topics_share=0.5)
WORDS = ("Kafka", "Redis", "Paris", "Ceph", "Envoy", "Flink", "Nginx", "Oslo")


class Capitals:
    def find(self, text: str, /) -> list[str]:
        return [word for word in text.split() if word[0].isupper()]


def graph(settings: PrefetchSettings = SMALL, data: bytes | None = None) -> HeatGraph:
    found = QueryTopics(settings, finder=Capitals())
    if data is None:
        return HeatGraph(settings, topics=found)
    return HeatGraph.from_snapshot(data, settings, topics=found)


def asked(query: str | None, *chunks: str, at_s: float = 0.0, tenant: str = "t") -> Event:
    return new_event(
        SEARCH_PERFORMED, tenant=tenant, chunk_ids=chunks, time_s=T0 + at_s, query=query
    )


def stream(count: int) -> list[Event]:
    """Events of all kinds: with and without texts, late ones, one from a broken clock."""
    rng = np.random.default_rng(4)
    events = []
    for i in range(count):
        first, second = rng.integers(0, len(WORDS), 2).tolist()
        kind = (SEARCH_PERFORMED, SEARCH_PERFORMED, RESULT_USED, DOCUMENT_DELETED)[i % 50 % 4]
        late = -500.0 if i % 7 == 6 else 0.0
        events.append(
            new_event(
                kind,
                tenant=f"t{i % 2}",
                session=f"s{i % 3}",
                chunk_ids=[f"c{first}", f"c{second}"],
                time_s=T0 + 60.0 * i + late + (1e7 if i == count // 2 else 0.0),
                query=None if i % 5 == 4 else f"how is {WORDS[first]} like {WORDS[second]}",
                event_id=f"e{i}",
            )
        )
    return events


def test_a_query_that_names_an_entity_expects_its_chunks() -> None:
    heat = graph()
    heat.apply(
        [asked("does Kafka compact", "a", "b"), asked("is Kafka fast", "a"), asked("x", "c")]
    )
    found = heat.topics
    assert found is not None
    assert found.expected("Another KAFKA question", "t", T0) == pytest.approx(
        {("t", "a"): 2 / 3, ("t", "b"): 1 / 3}
    )
    assert found.expected("about nothing known", "t", T0) == {}
    assert found.expected("Kafka", "other tenant", T0) == {}
    # The chunks are as likely an hour later, where the entity's own heat has faded.
    later = found.expected("Kafka", "t", T0 + 100 * HOUR)
    assert sum(later.values()) == pytest.approx(1.0)
    assert sum(found.lift(T0 + 100 * HOUR).values()) < 0.1


def test_plans_see_hot_entities_and_only_what_demand_knows() -> None:
    heat, plain = graph(), HeatGraph(SMALL)
    events = [asked("Kafka", "a", "b"), asked(None, "c"), asked("Kafka", "a", at_s=1.0)]
    for taker in (heat, plain):
        taker.apply(events)
    before, mixed = plain.demand(T0), heat.demand(T0)
    assert sum(mixed.values()) == pytest.approx(sum(before.values()))
    assert mixed[("t", "c")] == pytest.approx(before[("t", "c")] / 2)
    assert mixed[("t", "a")] > before[("t", "a")]
    gone = new_event(DOCUMENT_DELETED, tenant="t", chunk_ids=["a"], time_s=T0 + 2.0)
    heat.apply([gone])
    assert ("t", "a") not in heat.demand(T0 + 2.0)
    assert heat.demand(T0 + 2.0, "nobody") == {}
    # The score and the counts themselves are what they are without topics.
    plain.apply([gone])
    assert heat.scores(T0 + 2.0) == plain.scores(T0 + 2.0)


def test_results_and_texts_without_names_leave_no_node() -> None:
    heat = graph()
    used = new_event(RESULT_USED, tenant="t", chunk_ids=["a"], time_s=T0)
    heat.apply([used, asked(None, "a"), asked("no names here", "a"), asked("", "a")])
    assert heat.topics is not None
    assert len(heat.topics) == 0
    assert heat.topics.lift(T0) == {}


def test_the_state_is_the_same_however_events_came() -> None:
    events = stream(200)
    arrived = [event.time_s + 3.0 for event in events]
    whole = graph()
    whole.apply(events, arrived_s=arrived)
    for sizes in ([1] * 200, [7, 60, 133]):
        cut, at = graph(), 0
        for size in sizes:
            cut.apply(events[at : at + size], arrived_s=arrived[at : at + size])
            cut.tick(T0)
            at += size
            assert cut.topics is not None
            cut.topics.check()
            cut = graph(data=cut.to_snapshot())
        cut._rank, whole._rank = np.zeros(0), np.zeros(0)
        assert cut.to_snapshot() == whole.to_snapshot()
        assert cut.demand(T0) == whole.demand(T0)


def test_a_broken_clock_does_not_keep_a_topic_hot() -> None:
    heat = graph()
    heat.apply([asked("Kafka", "a"), asked("Redis", "b", at_s=1e7), asked("Paris", "c", at_s=60.0)])
    assert heat.topics is not None
    assert sum(heat.topics.lift(T0 + 240 * HOUR).values()) < 1e-3


def test_no_event_is_later_than_it_arrived() -> None:
    heat = graph()
    heat.apply([asked("Kafka", "a", at_s=HOUR)], arrived_s=[T0])
    assert heat.topics is not None
    assert heat.topics.lift(T0 + 6 * HOUR) == pytest.approx({("t", "a"): 0.5})


@pytest.mark.parametrize("keys_max", [5, 1000])
def test_parts_hold_the_topics_too(keys_max: int) -> None:
    settings = PrefetchSettings(heat_keys_max=keys_max, heat_tail_buckets=64)
    heat = graph(settings)
    heat.apply(stream(300))
    head, parts = split_heat(heat.to_snapshot(), b"", {})
    snapshot, _ = join_heat(head, parts)
    assert snapshot == heat.to_snapshot()
    # A record of the heat topic has room for the head because nothing large is in it.
    assert "topics" not in unpack(heat_parts._HEAD, head)[1]
    again = graph(settings, snapshot)
    assert again.topics is not None
    assert heat.topics is not None
    assert again.topics.lift(T0) == heat.topics.lift(T0) != {}


def test_snapshots_go_between_settings() -> None:
    heat, plain = graph(), HeatGraph(SMALL)
    heat.apply(stream(100))
    plain.apply(stream(100))
    assert plain.topics is None
    # Without topics here, they are left out; without topics there, they start empty.
    assert HeatGraph.from_snapshot(heat.to_snapshot(), SMALL).to_snapshot() == plain.to_snapshot()
    later = graph(data=plain.to_snapshot())
    assert later.topics is not None
    assert len(later.topics) == 0
    # Under lower bounds the newest stay.
    lower = PrefetchSettings(topics_nodes_max=2, topics_edges_per_node_max=1)
    small = graph(lower, heat.to_snapshot())
    assert small.topics is not None
    assert len(small.topics) == 2
    small.topics.check()


def test_damaged_topics_are_refused() -> None:
    found = QueryTopics(SMALL, finder=Capitals())
    found.observe([asked("Kafka", "a")])
    data = found.to_bytes()
    with pytest.raises(SnapshotCorrupt):
        QueryTopics(SMALL, finder=Capitals()).restore(data[:-1])
    values, arrays = query_topics.unpack(query_topics._KIND, data)
    for broken in (
        {"heads": np.array([9], np.uint32)},
        {"degrees": np.array([2], np.uint32)},
        {"heat": np.zeros((2, 2))},
        {"edges": np.zeros((0, 2))},
    ):
        packed = query_topics.pack(query_topics._KIND, values, arrays | broken)
        with pytest.raises(SnapshotCorrupt, match="do not fit"):
            QueryTopics(SMALL, finder=Capitals()).restore(packed)
    with pytest.raises(InputError, match="finite"):
        found.observe(
            [Event("e", SEARCH_PERFORMED, float("nan"), "t", None, None, "K", ("a",), {})]
        )


def test_terms_lead_to_chunks_as_entities_do() -> None:
    pytest.importorskip("sklearn")
    settings = PrefetchSettings(topics_terms=True, topics_share=0.5)
    heat = HeatGraph(settings)
    heat.apply([asked("log compaction", "a"), asked("rolling restart \ud800", "b")])
    found = heat.topics
    assert found is not None
    before = heat.to_snapshot()
    assert set(found.expected("what is compaction", "t", T0)) == {("t", "a")}
    assert heat.to_snapshot() == before
    again = HeatGraph.from_snapshot(before, settings)
    for taker in (heat, again):
        taker.apply([asked("log compaction", "a", at_s=5.0)])
    assert again.to_snapshot() == heat.to_snapshot()


def test_settings_ask_for_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HeatGraph().topics is None
    assert not HeatGraph().reads_queries

    def missing(module: str) -> None:
        raise UnavailableError(f"no {module}: pip install 'stoker[models]'")

    monkeypatch.setattr(topics, "_sklearn", missing)
    with pytest.raises(UnavailableError, match=r"stoker\[models\]"):
        HeatGraph(PrefetchSettings(topics_terms=True))
