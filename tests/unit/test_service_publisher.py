"""Publishing: never in the way, bounded, every event accounted for; the spool in front of Kafka."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from stoker.prefetch.events import SEARCH_PERFORMED, Event, EventError, new_event
from stoker.service.dead_letters import DeadLetters
from stoker.service.embedded_group import EmbeddedConsumer
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.publisher import Publisher
from stoker.service.spool import SpooledLog
from stoker.service.streams import LogFull, LogUnavailable, RecordTooLarge, TopicSpec


class FakeLog:
    """A log that is there or not, and notes what it took."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes, bytes | None]] = []
        self.topics: list[str] = []
        self.error: Exception | None = None
        self.calls = 0
        self.closed = False
        self.bytes_max = 1 << 30
        self.entered = threading.Event()
        self.gate: threading.Event | None = None

    def ensure_topic(self, spec: TopicSpec) -> None:
        if self.error is not None:
            raise self.error
        self.topics.append(spec.name)

    def append_batch(self, topic: str, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.calls += 1
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None:
            raise self.error
        if any(value is not None and len(value) > self.bytes_max for _, value in entries):
            raise RecordTooLarge("too large for the broker")
        self.entries += [(topic, key, value) for key, value in entries]

    def close(self, timeout_s: float = 0.0) -> None:
        self.closed = True
        self.close_s = timeout_s

    @property
    def ids(self) -> list[str]:
        return [orjson.loads(value or b"")["id"] for _, _, value in self.entries]


def search(number: int, **extra: Any) -> Event:
    return new_event(
        SEARCH_PERFORMED,
        tenant="t",
        session="s",
        chunk_ids=["c"],
        time_s=1.7e9,
        event_id=f"e{number}",
        extra=extra,
    )


def publisher(log: Any, **options: Any) -> Publisher:
    return Publisher(log, topic="t", threads=False, **options)


def test_what_is_offered_is_written_in_order_and_batches() -> None:
    log = FakeLog()
    events = publisher(log, batch_events_max=4)
    assert all(events.offer(search(i)) for i in range(10))
    assert [events.write_batch() for _ in range(4)] == [4, 4, 2, 0]
    assert log.ids == [f"e{i}" for i in range(10)]
    assert {key for _, key, _ in log.entries} == {b"t\0s"}
    events.check()
    events.close()


def test_a_full_queue_lets_the_oldest_go_and_counts_it() -> None:
    log = FakeLog()
    events = publisher(log, queue_events_max=3)
    assert [events.offer(search(i)) for i in range(5)] == [True, True, True, False, False]
    events.write_batch()
    assert log.ids == ["e2", "e3", "e4"]
    stats = events.stats()
    assert (stats.offered, stats.written, stats.dropped, stats.queued) == (5, 3, 2, 0)
    events.check()


def test_a_batch_that_failed_is_kept_and_comes_first() -> None:
    log = FakeLog()
    events = publisher(log)
    events.offer(search(1))
    log.error = LogUnavailable("away")
    with pytest.raises(LogUnavailable):
        events.write_batch()
    events.offer(search(2))
    events.check()
    log.error = None
    events.write_batch()
    events.write_batch()
    assert log.ids == ["e1", "e2"]
    events.check()


def test_an_offer_returns_while_the_log_hangs() -> None:
    log = FakeLog()
    log.gate = threading.Event()
    events = Publisher(log, topic="t", queue_events_max=5)
    events.offer(search(0))
    assert log.entered.wait(30)  # the writer is inside the log, and stays there
    for i in range(1, 20):
        events.offer(search(i))
    stats = events.stats()
    assert stats.dropped == 14
    log.gate.set()
    events.close()
    assert log.ids[0] == "e0"
    assert log.ids[1:] == [f"e{i}" for i in range(15, 20)]
    events.check()
    assert not events.offer(search(99))
    events.check()


def test_an_outage_is_logged_twice_however_long_it_is() -> None:
    log = FakeLog()
    log.error = LogUnavailable("away")
    with structlog.testing.capture_logs() as lines:
        events = Publisher(log, topic="t", backoff_s_max=0.001)
        events.offer(search(0))
        tries = threading.Event()

        def count(topic: str, entries: Sequence[Any]) -> None:
            FakeLog.append_batch(log, topic, entries)

        log.append_batch = _after(20, count, tries)  # type: ignore[method-assign]
        assert tries.wait(30)
        log.error = None
        events.close(30.0)
    names = [line["event"] for line in lines]
    assert names == ["service.publishing_stopped", "service.publishing_resumed"]
    assert log.ids == ["e0"]


def _after(
    count: int, function: Callable[..., None], event: threading.Event
) -> Callable[..., None]:
    left = [count]

    def wrapped(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            event.set()
        function(*args)

    return wrapped


def test_closing_counts_what_could_not_be_written() -> None:
    log = FakeLog()
    log.error = LogUnavailable("away")
    events = Publisher(log, topic="t")
    events.offer(search(0))
    with structlog.testing.capture_logs() as lines:
        events.close(0.0)
    assert events.stats().dropped == 1
    events.check()
    assert "service.events_dropped" in [line["event"] for line in lines]


def test_publish_is_durable_or_raises() -> None:
    log = FakeLog()
    events = publisher(log, event_bytes_max=1000)
    events.publish([search(0), search(1)])
    assert log.ids == ["e0", "e1"]
    with pytest.raises(EventError, match="at most 1000 bytes"):
        events.publish([search(2), search(3, blob="x" * 1000)])
    assert log.ids == ["e0", "e1"]  # none of the refused call
    log.error = LogUnavailable("away")
    with pytest.raises(LogUnavailable):
        events.publish([search(4)])
    assert events.stats().published == 2


def test_an_event_that_is_too_long_becomes_a_dead_letter() -> None:
    log = FakeLog()
    events = publisher(log, event_bytes_max=1000, dead_letters=DeadLetters(log, topic="dead"))
    for event in (search(0), search(1, blob="x" * 5_000_000), search(2)):
        events.offer(event)
    assert events.write_batch() == 2
    events.write_batch()
    assert [t for t, _, _ in log.entries].count("dead") == 1
    letter = next(orjson.loads(v or b"") for t, _, v in log.entries if t == "dead")
    assert letter["data"]["payload_bytes"] > 5_000_000
    assert letter["data"]["payload_complete"] is False
    assert len(orjson.dumps(letter)) < 100_000
    stats = events.stats()
    assert (stats.written, stats.refused) == (2, 1)
    events.check()


def test_a_spool_closes_in_its_time_while_a_forwarding_hangs(tmp_path: Path) -> None:
    """The thread is in the client's hands; the target gets what is left of the time, no more."""
    target = FakeLog()
    target.gate = threading.Event()
    log = SpooledLog(target, EmbeddedLog(tmp_path))
    log.ensure_topic(TopicSpec("t"))
    log.append("t", b"k", [b"v"])
    assert target.entered.wait(60)
    log.close(0.02)
    assert target.closed
    assert target.close_s <= 0.02
    target.gate.set()


@pytest.fixture
def spooled(tmp_path: Path) -> Iterator[tuple[FakeLog, Callable[..., SpooledLog]]]:
    target = FakeLog()
    opened = []

    def open_spool(**options: Any) -> SpooledLog:
        spool = EmbeddedLog(tmp_path, EmbeddedOptions(bytes_max=options.pop("bytes_max", None)))
        log = SpooledLog(target, spool, threads=False, **options)
        log.ensure_topic(TopicSpec("dead"))
        log.ensure_topic(TopicSpec("t", partition_count=5))
        opened.append(log)
        return log

    yield target, open_spool
    for log in opened:
        log.close(0.0)


def test_appends_are_taken_without_a_broker_and_forwarded_in_order(spooled: Any) -> None:
    target, open_spool = spooled
    target.error = LogUnavailable("away")
    log = open_spool(batch_events_max=4)
    for i in range(5):
        log.append("t", b"k%d" % (i % 2), [b"%d" % (2 * i), b"%d" % (2 * i + 1)])
    with pytest.raises(LogUnavailable):
        log.forward("t")
    assert log.waiting("t") == 10
    target.error = None
    assert [log.forward("t") for _ in range(4)] == [4, 4, 2, 0]
    assert [value for _, _, value in target.entries] == [b"%d" % i for i in range(10)]
    assert target.topics == ["t"]
    assert log.waiting("t") == 0


def test_what_waits_survives_a_restart(spooled: Any) -> None:
    target, open_spool = spooled
    first = open_spool()
    target.error = LogUnavailable("away")
    first.append("t", b"k", [b"1", None, b"3"])
    first.close(0.0)
    target.error = None
    second = open_spool()
    assert second.forward("t") == 3
    assert [value for _, _, value in target.entries] == [b"1", None, b"3"]


def test_a_full_spool_refuses_and_drops_nothing(spooled: Any) -> None:
    target, open_spool = spooled
    log = open_spool(bytes_max=100)
    log.append("t", b"", [b"x" * 90])
    with pytest.raises(LogFull):
        log.append("t", b"", [b"x" * 90])
    assert log.forward("t") == 1
    log.append("t", b"", [b"y" * 90])  # there is room again
    assert log.forward("t") == 1
    assert len(target.entries) == 2


def test_a_record_too_large_for_the_broker_does_not_stop_the_rest(spooled: Any) -> None:
    target, open_spool = spooled
    log = open_spool(dead_letters_topic="dead")
    target.bytes_max = 100
    log.append("t", b"k", [b"a", b"x" * 101, b"c"])
    with structlog.testing.capture_logs() as lines:
        assert log.forward("t") == 3
    assert [value for _, _, value in target.entries] == [b"a", b"c"]
    assert "service.record_refused" in [line["event"] for line in lines]
    target.bytes_max = 1 << 30
    assert log.forward("dead") == 1
    letter = orjson.loads(target.entries[-1][2])
    assert letter["data"]["payload_bytes"] == 101
    assert "broker" in letter["data"]["reason"]


def test_a_full_disk_does_not_keep_the_spool_from_closing(
    spooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One topic's lease that finds no room must not leave the others, and the target, open."""
    target, open_spool = spooled
    log = open_spool()

    def full(*_: Any) -> None:
        raise LogFull("the disk is full")

    monkeypatch.setattr(EmbeddedConsumer, "_release", full)
    log.close(0.0)
    assert target.closed
    with pytest.raises(LogUnavailable):
        log.append("t", b"k", [b"v"])


def test_threads_forward_and_log_an_outage_once(tmp_path: Path) -> None:
    target = FakeLog()
    target.error = LogUnavailable("away")
    log = SpooledLog(target, EmbeddedLog(tmp_path), backoff_s_max=0.001)
    tries = threading.Event()
    taken = threading.Event()
    plain = target.ensure_topic
    target.ensure_topic = _after(20, plain, tries)  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as lines:
        log.ensure_topic(TopicSpec("t"))
        log.append("t", b"k", [b"v"])
        assert tries.wait(30)
        target.append_batch = _after(1, target.append_batch, taken)  # type: ignore[method-assign]
        target.error = None
        assert taken.wait(30)
        log.close(30.0)
    names = [line["event"] for line in lines if "broker" in line["event"]]
    assert names == ["service.broker_lost", "service.broker_back"]
    assert [value for _, _, value in target.entries] == [b"v"]
