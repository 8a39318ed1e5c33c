"""The heat in a compacted topic: a new replica starts from it as if it had read everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from stoker.errors import ConfigError
from stoker.prefetch import heat_state
from stoker.prefetch.events import SEARCH_PERFORMED, encode, new_event, partition_key
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_parts import split_heat
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.event_wiring import heat_topic
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.heat_topic import HEAT_TOPIC, HeatPublisher, heat_topic_spec, read_heat
from stoker.service.settings import ServiceSettings
from stoker.service.snapshot_file import read_snapshot
from stoker.service.streams import DEAD_LETTERS_TOPIC, EVENTS_TOPIC, LogUnavailable, TopicSpec

T0 = 1.75e9
SETTINGS = PrefetchSettings(graph_edges_per_key_max=4)


class Clock:
    def __init__(self) -> None:
        self.now_s = T0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A log, a clock, and replicas that consume and publish by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        options = EmbeddedOptions(clock=self.clock, monotonic=self.clock)
        self.log = EmbeddedLog(folder / "log", options)
        for topic in (EVENTS_TOPIC, DEAD_LETTERS_TOPIC):
            self.log.ensure_topic(TopicSpec(topic, partition_count=3, retention_s=None))
        self.count = 0

    def add(self, count: int) -> None:
        rng = np.random.default_rng(self.count)
        entries = []
        for at in range(self.count, self.count + count):
            event = new_event(
                SEARCH_PERFORMED,
                tenant=f"t{at // 18 % 2}",
                session=f"s{at // 18}",
                chunk_ids=[f"c{int(c)}" for c in rng.zipf(1.3, 5) % 300],
                time_s=T0 - 900.0 + at,
                event_id=f"e{at - at % 9 // 8}",  # one in nine is sent twice
            )
            entries.append((partition_key(event), encode(event)))
        self.log.append_batch(EVENTS_TOPIC, entries)
        self.count += count

    def loop(self, name: str) -> ConsumeLoop:
        return ConsumeLoop(
            self.log,
            EVENTS_TOPIC,
            name,
            open_sink=lambda body: (
                HeatGraph(SETTINGS) if body is None else HeatGraph.from_snapshot(body, SETTINGS)
            ),
            snapshot_path=self.path(name),
            options=ConsumeOptions(batch_events_max=64, dedup_seed=7),
            clock=self.clock,
            monotonic=self.clock,
        )

    def consume(self, name: str) -> ConsumeLoop:
        """Read all there is, save and leave."""
        loop = self.loop(name)
        while loop.step(0.0):
            pass
        loop.close()
        return loop

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.snapshot"

    def publisher(self, name: str, log: Any = None) -> HeatPublisher:
        return HeatPublisher(
            self.log if log is None else log,
            topic=HEAT_TOPIC,
            publisher=name,
            snapshot_path=self.path(name),
            every_s=60.0,
            monotonic=self.clock,
        )

    def read(self) -> Any:
        return read_heat(self.log, HEAT_TOPIC, event_topic=EVENTS_TOPIC)

    def records(self) -> dict[bytes, bytes | None]:
        return {record.key: record.value for record in self.log.topic(HEAT_TOPIC).scan(0)}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.log.close()


def publish(publisher: HeatPublisher) -> bool:
    """Let it look at all there is, then have its turn."""
    for _ in range(1_000):
        if publisher.step(0.0):
            return True
        consumer = publisher._consumer
        assert consumer is not None
        if not any(consumer.lag().values()):
            return publisher.step(0.0)
    raise AssertionError("the topic has no end")


def body(loop: ConsumeLoop) -> bytes:
    return loop.sink.to_snapshot()


def test_a_new_replica_ends_with_the_bytes_of_one_that_read_everything(world: World) -> None:
    world.add(503)  # the last event is sent once more after the publication
    world.consume("old")
    publisher = world.publisher("old")
    assert publish(publisher)
    world.add(200)
    keeper = HeatKeeper(
        world.log,
        topic=EVENTS_TOPIC,
        group="new",
        snapshot_path=world.path("new"),
        options=ConsumeOptions(batch_events_max=64, dedup_seed=7),
        settings=SETTINGS,
        heat_topic=(world.log, HEAT_TOPIC),
        monotonic=world.clock,
    )
    with structlog.testing.capture_logs() as lines:
        keeper._start_from_topic(world.log, HEAT_TOPIC)
    assert [line["event"] for line in lines][-1] == "service.heat_started_from_topic"
    loop = keeper._loop
    while loop.step(0.0):
        pass
    assert loop.stats().records == 200  # and not 703
    assert loop.stats().duplicates > 0
    assert body(loop) == body(world.consume("old"))
    loop.close()
    publisher.close()


def test_from_nothing_at_all_it_starts_too(world: World) -> None:
    world.add(50)
    log = EmbeddedLog(world.folder / "log")  # threads wait by a clock that moves
    assert read_heat(log, HEAT_TOPIC, event_topic=EVENTS_TOPIC) is None
    keeper = HeatKeeper(
        log,
        topic=EVENTS_TOPIC,
        group="new",
        snapshot_path=world.path("new"),
        options=ConsumeOptions(),
        settings=SETTINGS,
        heat_topic=(log, HEAT_TOPIC),
    )
    keeper.start()
    assert keeper.wait_caught_up(60.0)
    assert keeper.stop(60.0)
    assert keeper.stats().records == 50
    log.close()


def test_publications_take_turns_and_only_what_is_new_is_published(world: World) -> None:
    publisher = world.publisher("a")
    assert not publish(publisher)  # there is no snapshot yet
    world.add(300)
    world.consume("a")
    assert publish(publisher)
    world.clock.now_s += 100
    assert not publish(publisher)  # nothing was read since
    first = world.read()
    world.add(10)
    world.consume("a")
    assert publish(publisher)
    second = world.read()
    assert first[0]["offsets"] != second[0]["offsets"]
    assert (second[0]["seen"], second[1]) != (first[0]["seen"], first[1])
    slots = {key.split(b"/")[1] for key in world.records()}
    assert slots == {b"0", b"1", b"head"}
    world.add(10)
    world.consume("a")
    assert not publish(publisher)  # too soon
    publisher.close()


def test_a_snapshot_that_is_published_is_not_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks, so nothing is new: a large snapshot must not be read every second."""
    world.add(90)
    world.consume("one")
    one = world.publisher("one")
    assert publish(one)
    read: list[Path] = []

    def counted(path: Path) -> Any:
        read.append(path)
        return read_snapshot(path)

    monkeypatch.setattr("stoker.service.heat_topic.read_snapshot", counted)
    for _ in range(5):
        world.clock.now_s += 60
        assert not one.step(0.0)
    assert read == []
    world.add(90)
    world.consume("one")
    world.clock.now_s += 60
    assert publish(one)
    assert len(read) == 1
    one.close()


def test_a_restarted_publisher_goes_on_beside_its_last_publication(world: World) -> None:
    world.add(300)
    world.consume("a")
    first = world.publisher("a")
    assert publish(first)
    first.close()
    again = world.publisher("a")
    assert not publish(again)  # it is there already
    world.add(20)
    world.consume("a")
    assert publish(again)
    assert {key.split(b"/")[1] for key in world.records()} == {b"0", b"1", b"head"}
    again.close()


def test_one_publishes_and_who_takes_over_removes_what_others_left(world: World) -> None:
    world.add(300)
    world.consume("a")
    world.consume("b")
    one, two = world.publisher("a"), world.publisher("b")
    assert publish(one)
    assert not publish(two)  # not its turn
    one.close()
    world.add(30)
    world.consume("b")
    world.clock.now_s += 2.0
    assert publish(two)
    assert {key.split(b"/")[0] for key, value in world.records().items() if value} == {b"b"}
    assert world.read()[0]["group"] == "b"
    two.close()


def test_compaction_leaves_a_reader_the_same(world: World) -> None:
    publisher = world.publisher("a")
    for _ in range(4):
        world.add(100)
        world.consume("a")
        world.clock.now_s += 100
        assert publish(publisher)
    before, count = world.read(), len(list(world.log.topic(HEAT_TOPIC).scan(0)))
    world.log.topic(HEAT_TOPIC).compact()
    assert len(list(world.log.topic(HEAT_TOPIC).scan(0))) < count
    assert world.read() == before
    world.log.check()
    publisher.close()


class Breaks:
    """A log that goes away at the n-th append, before or after it was written."""

    def __init__(self, log: EmbeddedLog, left: int) -> None:
        self._log = log
        self._left = left

    def __getattr__(self, name: str) -> Any:
        if name not in ("append", "append_batch"):
            return getattr(self._log, name)

        def passing(*args: Any) -> None:
            for write in (False, True):
                self._left -= 1
                if self._left == 0:
                    raise LogUnavailable("away")
                if not write:
                    getattr(self._log, name)(*args)

        return passing


def test_a_publication_that_breaks_anywhere_leaves_a_whole_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.heat_topic._APPEND_BYTES", 20_000)
    world.add(300)
    world.consume("a")
    first = world.publisher("a")
    assert publish(first)
    first.close()
    whole, left, done = world.read(), 1, False
    steps = 0
    while not done:
        world.add(5)
        world.consume("a")
        breaking = world.publisher("a", Breaks(world.log, left))
        try:
            done = publish(breaking)
        except LogUnavailable:
            steps += 1
        breaking.close()
        found = world.read()
        saved = world.loop("a")
        assert found is not None
        assert found == whole or found[1] == body(saved)
        saved.close()
        whole = found
        left += 3
    assert steps > 3


def test_what_is_damaged_or_of_another_topic_is_passed_over(world: World) -> None:
    world.add(200)
    world.consume("a")
    publisher = world.publisher("a")
    assert publish(publisher)
    assert read_heat(world.log, HEAT_TOPIC, event_topic="other") is None
    key, value = next(
        (key, value) for key, value in world.records().items() if not key.endswith(b"head")
    )
    assert value is not None
    world.log.append(HEAT_TOPIC, key, [value[:-1] + bytes([value[-1] ^ 1])])
    world.log.append(HEAT_TOPIC, b"z/head", [b"not a head"])
    with structlog.testing.capture_logs() as lines:
        assert world.read() is None
    assert {line["event"] for line in lines if line["log_level"] == "warning"} == {
        "service.heat_topic_unusable"
    }
    publisher.close()


def test_a_heat_that_no_graph_can_be_is_passed_over_for_the_next_publication(
    world: World,
) -> None:
    """Whole by its checksums, ahead of all others, and of no use: the next one is taken."""
    world.add(200)
    old = world.consume("old")
    publisher = world.publisher("old")
    assert publish(publisher)
    header, snapshot = read_snapshot(world.path("old")) or ({}, b"")
    kind, values, arrays = heat_state.read_snapshot(snapshot)
    arrays["edge_targets"] = np.full_like(arrays["edge_targets"], 1 << 30)
    about = {
        "topic": EVENTS_TOPIC,
        "offsets": [[0, 1 << 40]],
        "time_s": header["time_s"],
        "slot": 1,
    }
    head, parts = split_heat(heat_state.write_snapshot(kind, values, arrays), b"", about)
    for part, data in parts.items():
        world.log.append(HEAT_TOPIC, b"odd/1/%03d" % part, [data])
    world.log.append(HEAT_TOPIC, b"odd/head", [head])
    for name, slot in ((b"\xff/head", 1), (b"none/head", 7)):
        world.log.append(HEAT_TOPIC, name, [split_heat(snapshot, b"", {**about, "slot": slot})[0]])
    world.log.append(HEAT_TOPIC, b"bare/head", [split_heat(snapshot, b"", {})[0]])
    keeper = HeatKeeper(
        world.log,
        topic=EVENTS_TOPIC,
        group="new",
        snapshot_path=world.path("new"),
        options=ConsumeOptions(),
        settings=SETTINGS,
        heat_topic=(world.log, HEAT_TOPIC),
    )
    with structlog.testing.capture_logs() as lines:
        keeper._start_from_topic(world.log, HEAT_TOPIC)
    assert "service.snapshot_damaged" in [line["event"] for line in lines]
    assert lines[-1]["event"] == "service.heat_started_from_topic"
    assert keeper.sink.to_snapshot() == body(old)
    publisher.close()


def test_the_setting_says_where_the_heat_is_published(world: World) -> None:
    def chosen(**changes: Any) -> Any:
        return heat_topic(ServiceSettings(**changes), world.log)

    kafka: dict[str, Any] = {"event_log": "kafka", "kafka_bootstrap": "h:1"}
    assert chosen() is None
    assert chosen(**kafka) == (world.log, HEAT_TOPIC)
    assert chosen(heat_topic="off", **kafka) is None
    assert chosen(heat_topic="mine") == (world.log, "mine")
    with pytest.raises(ConfigError, match="topic name"):
        chosen(heat_topic="no spaces")
    with pytest.raises(ConfigError, match="a topic of its own"):
        chosen(heat_topic=EVENTS_TOPIC)
    assert heat_topic_spec("mine").compacted


def test_a_broker_that_is_away_at_the_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EmbeddedLog(tmp_path / "log")
    for topic in (EVENTS_TOPIC, DEAD_LETTERS_TOPIC):
        log.ensure_topic(TopicSpec(topic, partition_count=1))
    tries: list[str] = []
    ensure = log.ensure_topic

    def away(spec: TopicSpec) -> None:
        tries.append(spec.name)
        if len(tries) < 4:
            raise LogUnavailable("away")
        ensure(spec)

    keeper = HeatKeeper(
        log,
        topic=EVENTS_TOPIC,
        group="new",
        snapshot_path=tmp_path / "heat",
        options=ConsumeOptions(),
        settings=SETTINGS,
        heat_topic=(log, HEAT_TOPIC),
    )
    monkeypatch.setattr(log, "ensure_topic", away)
    monkeypatch.setattr("stoker.service.heat_keeper._answers", lambda _: False)
    monkeypatch.setattr(keeper._stop, "wait", lambda _: False)
    with structlog.testing.capture_logs() as lines:
        keeper._start_from_topic(log, HEAT_TOPIC)
    assert [line["event"] for line in lines] == [
        "service.heat_topic_unusable",
        "service.heat_topic_empty",
    ]
    # A topic that cannot be read while the log answers is done without.
    tries.clear()
    monkeypatch.setattr("stoker.service.heat_keeper._answers", lambda _: True)
    with structlog.testing.capture_logs() as lines:
        keeper._start_from_topic(log, HEAT_TOPIC)
    assert [line["event"] for line in lines] == ["service.heat_topic_unusable"]
    log.close()
