"""The heat topic on a broker: published, compacted by key, taken over by a new replica."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.prefetch.events import RESULT_USED, SEARCH_PERFORMED, encode, new_event, partition_key
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.heat_topic import HeatPublisher, read_heat
from stoker.service.streams import DEAD_LETTERS_TOPIC, TopicSpec

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

WAIT_S = 30.0
T0 = 1.7e9
SETTINGS = PrefetchSettings()


def add(log: Any, topic: str, numbers: range) -> None:
    rng = np.random.default_rng(numbers.start)
    entries = []
    for at in numbers:
        event = new_event(
            RESULT_USED if at % 5 == 4 else SEARCH_PERFORMED,
            tenant="acme",
            session=f"s{at // 5}",
            chunk_ids=[f"c{int(c)}" for c in rng.zipf(1.3, 4) % 500],
            time_s=T0 + at,
            event_id=f"e{at - at % 50 // 49}",  # one in fifty is sent twice
        )
        entries.append((partition_key(event), encode(event)))
    log.append_batch(topic, entries)


def consume(log: Any, topic: str, path: Path, name: str, upto: int) -> HeatGraph:
    loop = ConsumeLoop(
        log,
        topic,
        f"{topic}.{name}",
        open_sink=lambda body: (
            HeatGraph(SETTINGS) if body is None else HeatGraph.from_snapshot(body, SETTINGS)
        ),
        snapshot_path=path,
        options=ConsumeOptions(),
    )
    end_s = time.monotonic() + WAIT_S
    while loop.stats().records < upto and time.monotonic() < end_s:
        loop.step(0.5)
    assert loop.stats().records == upto
    loop.close()
    sink = loop.sink
    assert isinstance(sink, HeatGraph)
    return sink


def publish(publisher: HeatPublisher) -> bool:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if publisher.step(0.5):
            return True
    return False


@pytest.mark.apache_kafka
def test_a_new_replica_takes_the_published_heat_over(
    open_log: Any, topic_name: str, tmp_path: Path
) -> None:
    log = open_log()
    heat_topic = f"{topic_name}.heat"
    for name in (topic_name, DEAD_LETTERS_TOPIC):
        log.ensure_topic(TopicSpec(name, partition_count=1))
    assert read_heat(log, heat_topic, event_topic=topic_name) is None
    add(log, topic_name, range(549))
    consume(log, topic_name, tmp_path / "old", "old", 549)
    publisher = HeatPublisher(
        log, topic=heat_topic, publisher="old", snapshot_path=tmp_path / "old", every_s=0.0
    )
    assert publish(publisher)
    add(log, topic_name, range(549, 700))
    whole = consume(log, topic_name, tmp_path / "old", "old", 700 - 549)
    assert publish(publisher)  # a second one, beside the first
    add(log, topic_name, range(700, 800))
    publisher.close()

    keeper = HeatKeeper(
        log,
        topic=topic_name,
        group=f"{topic_name}.new",
        snapshot_path=tmp_path / "new",
        options=ConsumeOptions(),
        settings=SETTINGS,
        heat_topic=(log, heat_topic),
    )
    keeper.start()
    assert keeper.wait_caught_up(WAIT_S)
    assert keeper.stop(WAIT_S)
    assert keeper.stats().records == 100  # what came after the publication, and no more
    whole = consume(log, topic_name, tmp_path / "old", "old", 100)
    assert keeper.sink.to_snapshot() == whole.to_snapshot()
    assert whole.events_applied == 800 - 16
