"""Topics behind the live consumer: texts reach them, entities are found while nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.prefetch.events import SEARCH_PERFORMED, Event, encode, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.query_topics import QueryTopics
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.heat_sink import HeatSink
from stoker.service.streams import TopicSpec

T0 = 1.7e9
SETTINGS = PrefetchSettings(topics_share=0.5)


class Capitals:
    def find(self, text: str, /) -> list[str]:
        return [word for word in text.split() if word[0].isupper()]


def open_sink(body: bytes | None) -> HeatSink:
    topics = QueryTopics(SETTINGS, finder=Capitals())
    if body is None:
        return HeatSink(HeatGraph(SETTINGS, topics=topics))
    return HeatSink(HeatGraph.from_snapshot(body, SETTINGS, topics=topics))


def searches(count: int) -> list[Event]:
    names = ("Kafka", "Redis", "Paris")
    return [
        new_event(
            SEARCH_PERFORMED,
            tenant="t",
            chunk_ids=[f"c{i % 5}"],
            time_s=T0 + i,
            query=f"about {names[i % 3]} and {names[i % 2]}",
            event_id=f"e{i - i % 10 // 9}",  # every tenth comes twice
        )
        for i in range(count)
    ]


def consume(folder: Path, events: Sequence[Event], *, stop_every: int) -> bytes:
    log = EmbeddedLog(folder / "log")
    log.ensure_topic(TopicSpec("events", partition_count=1, retention_s=None))
    log.append("events", b"k", [*map(encode, events[:50]), b"no event", None])
    log.append("events", b"k", list(map(encode, events[50:])))

    def loop() -> ConsumeLoop:
        return ConsumeLoop(
            log,
            "events",
            "g",
            open_sink=open_sink,
            snapshot_path=folder / "heat",
            options=ConsumeOptions(batch_events_max=stop_every, snapshot_events=1),
            clock=lambda: T0,
        )

    read, state = 1, b""
    while read:
        running = loop()
        read = running.step(0.0)
        state = running.sink.to_snapshot()
        running.close()
    log.close()
    return state


def test_the_consumer_brings_texts_and_goes_on_to_the_byte_after_a_stop(tmp_path: Path) -> None:
    events = searches(200)
    # Kept once each, as a heat that never stopped would hold them.
    known: dict[str, Event] = {}
    for event in events:
        known.setdefault(event.id, event)
    straight = open_sink(None)
    straight.apply(list(known.values()))
    states = [consume(tmp_path / str(size), events, stop_every=size) for size in (7, 60, 1000)]
    assert states == [straight.to_snapshot()] * 3
    assert open_sink(states[0])._graph.topics is not None
    lifted = open_sink(states[0])._graph.topics.lift(T0 + 200)  # type: ignore[union-attr]
    assert {chunk for _, chunk in lifted} == {f"c{i}" for i in range(5)}


def test_entities_are_found_while_nobody_waits_for_the_heat() -> None:
    class Asking(Capitals):
        """Asks for the heat from another thread while it finds entities."""

        def find(self, text: str, /) -> list[str]:
            answered: list[Any] = []
            asker = threading.Thread(target=lambda: answered.append(sink.demand(T0)), daemon=True)
            asker.start()
            asker.join(10.0)
            assert answered, "the heat was locked"
            return super().find(text)

    topics = QueryTopics(SETTINGS, finder=Asking())
    sink = HeatSink(HeatGraph(SETTINGS, topics=topics))
    sink.apply(searches(3))
    assert len(topics) == 3
    # A question of a search is read by another thread than the log's events, just so.
    assert sink.expected("about Oslo and Paris", "t", T0 + 3.0) == {("t", "c2"): 1.0}
    assert sink.expected("about Paris", "another", T0 + 3.0) == {}


def test_without_topics_columns_are_taken() -> None:
    assert not HeatSink(HeatGraph()).reads_queries
    assert open_sink(None).reads_queries
    assert HeatSink(HeatGraph()).expected("about Kafka", "t", T0) == {}
