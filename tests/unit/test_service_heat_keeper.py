"""The heat keeper: what a warm-up is given on a new replica, and on one that comes back."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from stoker.prefetch.events import SEARCH_PERFORMED, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.event_ids import ids_bytes
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.heat_sink import HeatSink
from stoker.service.heat_topic import HEAT_TOPIC, heat_topic_spec
from stoker.service.publisher import Publisher
from stoker.service.snapshot_file import read_snapshot, write_snapshot
from stoker.service.streams import (
    DEAD_LETTERS_TOPIC,
    EVENTS_TOPIC,
    Consumer,
    LogUnavailable,
    TopicSpec,
)

COUNT = 40


def _log(folder: Path, chunks: range) -> EmbeddedLog:
    log = EmbeddedLog(folder / "events")
    for topic in (EVENTS_TOPIC, DEAD_LETTERS_TOPIC):
        log.ensure_topic(TopicSpec(topic, partition_count=1))
    publisher = Publisher(log, threads=False)
    publisher.publish(
        [
            new_event(SEARCH_PERFORMED, tenant="a", chunk_ids=[str(chunk)], time_s=1.8e9 + chunk)
            for chunk in chunks
        ]
    )
    publisher.close()
    return log


def _keeper(log: EmbeddedLog, folder: Path, **more: Any) -> HeatKeeper:
    return HeatKeeper(
        log,
        topic=EVENTS_TOPIC,
        group="g",
        snapshot_path=folder / "heat.snapshot",
        # One record a poll: a warm-up that does not wait would be given a part of the heat.
        options=ConsumeOptions(batch_events_max=1),
        settings=PrefetchSettings(),
        **more,
    )


def test_a_new_replica_is_given_the_heat_of_the_whole_log(tmp_path: Path) -> None:
    log = _log(tmp_path, range(COUNT))
    keeper = _keeper(log, tmp_path)
    keeper.start()
    assert len(keeper.demand_for_warmup(1.8e9 + COUNT, wait_s=60.0)) == COUNT
    assert keeper.stop(60.0)
    log.close()


def test_a_golden_snapshot_with_the_names_of_ids_is_gone_on_from(tmp_path: Path) -> None:
    golden = Path(__file__).resolve().parents[1] / "golden" / "heat-file-v1.snapshot"
    path = tmp_path / "heat.snapshot"
    path.write_bytes(golden.read_bytes())
    log = _log(tmp_path, range(0))
    keeper = _keeper(log, tmp_path)
    assert path.exists(), "it was put aside"
    assert (keeper.sink.key_count, keeper.stats().ids.count) == (22, 20)
    header, body = read_snapshot(golden) or ({}, b"")
    assert header["offsets"] == [[0, 60]]
    # Saved anew it is of today's version, with the same heat.
    ids = ids_bytes(header["seen"], named_s=header["time_s"])
    write_snapshot(path, {**header, "seen": ids}, body)
    assert read_snapshot(path) == ({**header, "seen": ids}, body)
    assert _keeper(log, tmp_path).stats().ids.count == 20
    log.close()


def test_a_replica_that_comes_back_is_given_its_snapshot_at_once(tmp_path: Path) -> None:
    log = _log(tmp_path, range(COUNT))
    keeper = _keeper(log, tmp_path)
    keeper.start()
    assert keeper.wait_caught_up(60.0)
    assert keeper.stop(60.0)
    log.close()
    log = _log(tmp_path, range(COUNT, COUNT + 1))
    again = _keeper(log, tmp_path)
    # Nobody reads the log: to wait for it would take the whole time given.
    demand = again.demand_for_warmup(1.8e9 + COUNT, wait_s=3600.0)
    assert len(demand) == COUNT
    log.close()


def test_a_replica_that_was_killed_goes_on_at_once(tmp_path: Path) -> None:
    """The dead one's lease stands; by its name the one that comes back takes over."""
    log = EmbeddedLog(tmp_path / "events", EmbeddedOptions(lease_s=1e6))
    _log(tmp_path, range(COUNT)).close()
    killed = log.consumer(EVENTS_TOPIC, "g", member="replica")
    assert killed.poll(1, 0.0)
    keeper = _keeper(log, tmp_path, member="replica")
    keeper.start()
    assert keeper.wait_caught_up(60.0)
    assert len(keeper.demand(1.8e9 + COUNT)) == COUNT
    assert keeper.stop(60.0)
    killed.close()
    log.close()


def _log_held_by_another(folder: Path) -> tuple[EmbeddedLog, Consumer]:
    """A log of `COUNT` events, and the member of the group that holds all its partitions."""
    log = EmbeddedLog(folder / "events", EmbeddedOptions(lease_s=1e6))
    _log(folder, range(COUNT)).close()
    other = log.consumer(EVENTS_TOPIC, "g")
    assert other.poll(1, 0.0)
    return log, other


def test_nothing_to_read_from_is_not_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member holds the partitions: a warm-up would be given an empty heat."""
    log, other = _log_held_by_another(tmp_path)
    seconds = itertools.count()
    keeper = _keeper(log, tmp_path, monotonic=lambda: float(next(seconds)))
    step, turns = ConsumeLoop.step, itertools.count(1)

    def counted(self: ConsumeLoop, wait_s: float | None = None) -> int:
        if next(turns) == 3:
            keeper._stop.set()
        return step(self, 0.0)

    monkeypatch.setattr(ConsumeLoop, "step", counted)
    keeper._catch_up()
    assert next(turns) == 4
    assert not keeper.wait_caught_up(0.0)
    keeper._loop.close()
    other.close()
    log.close()


def test_a_member_without_partitions_does_not_hold_up_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with one `service.event_group` for more replicas than the topic has partitions."""
    log, other = _log_held_by_another(tmp_path)
    keeper = _keeper(log, tmp_path)
    monkeypatch.setattr("stoker.service.heat_keeper._JOIN_S", 0.0)
    asked: list[ConsumeLoop] = []
    measure = ConsumeLoop.measure_lag

    def counted(self: ConsumeLoop) -> bool:
        asked.append(self)
        return measure(self)

    monkeypatch.setattr(ConsumeLoop, "measure_lag", counted)
    with structlog.testing.capture_logs() as lines:
        keeper._catch_up()
        # Nobody reads the log by now: to wait for it would take the whole time given.
        assert keeper.demand_for_warmup(1.8e9 + COUNT, wait_s=3600.0) == {}
    assert not keeper.wait_caught_up(3600.0)
    assert [line["event"] for line in lines].count("service.heat_unassigned") == 1
    assert not asked, "the lag of no partitions"
    keeper._loop.close()
    other.close()
    log.close()


def _away_for(log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, *, tries: int | None) -> Any:
    """Let nobody join in so many tries, or, with None, until the event returned is set."""
    join, back, left = log.consumer, threading.Event(), itertools.count()

    def away(*args: Any, **named: Any) -> Consumer:
        if not back.is_set() and (tries is None or next(left) < tries):
            raise LogUnavailable("away")
        return join(*args, **named)

    monkeypatch.setattr(log, "consumer", away)
    monkeypatch.setattr("stoker.service.heat_keeper._RETRY_S", 0.0)
    return back


@pytest.mark.parametrize("heat_topic", [True, False])
def test_a_log_that_is_away_does_not_hold_up_the_warm_up(
    heat_topic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _log(tmp_path, range(COUNT))
    back = _away_for(log, monkeypatch, tries=None)
    monkeypatch.setattr("stoker.service.heat_keeper._AWAY_S", 0.0)
    known, take = threading.Event(), HeatSink.apply_batch

    def taken(sink: HeatSink, *args: Any, **named: Any) -> None:
        take(sink, *args, **named)
        if sink.key_count == COUNT:
            known.set()

    monkeypatch.setattr(HeatSink, "apply_batch", taken)
    more: dict[str, Any] = {}
    if heat_topic:
        log.ensure_topic(heat_topic_spec(HEAT_TOPIC))
        log.append(HEAT_TOPIC, b"k", [b"no head: all events are read"])
        monkeypatch.setattr("stoker.service.heat_keeper._answers", lambda _: back.is_set())
        more["heat_topic"] = (log, HEAT_TOPIC)
    keeper = _keeper(log, tmp_path, **more)
    with structlog.testing.capture_logs() as lines:
        keeper.start()
        # Only the log's return would end a wait for it.
        assert keeper.demand_for_warmup(1.8e9 + COUNT, wait_s=3600.0) == {}
        back.set()
        assert known.wait(60.0)
        assert keeper.stop(60.0)
    assert [line["event"] for line in lines].count("service.heat_log_away") == 1
    assert len(keeper.demand(1.8e9 + COUNT)) == COUNT
    log.close()


def test_a_log_that_takes_long_to_say_that_it_is_away_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now_s = _log(tmp_path, range(COUNT)), [0.0]
    keeper = _keeper(log, tmp_path, monotonic=lambda: now_s[0])

    def unanswered() -> None:
        now_s[0] += 5.0
        raise LogUnavailable("no answer")

    monkeypatch.setattr(log, "check_health", unanswered)
    monkeypatch.setattr(keeper._stop, "wait", lambda _: keeper._stop.set())
    keeper._start_from_topic(log, HEAT_TOPIC)
    assert now_s == [5.0]
    assert keeper.demand_for_warmup(1.8e9 + COUNT, wait_s=3600.0) == {}
    log.close()


def test_the_time_that_a_heat_topic_takes_is_no_absence_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now_s, healthy = _log(tmp_path, range(COUNT)), [0.0], itertools.count()
    keeper = _keeper(log, tmp_path, monotonic=lambda: now_s[0])

    def late() -> None:
        if next(healthy) == 0:
            now_s[0] += 1.0
            raise LogUnavailable("a broker restarts")

    def read(*_: object, **__: object) -> None:
        now_s[0] += 60.0

    monkeypatch.setattr(log, "check_health", late)
    monkeypatch.setattr("stoker.service.heat_keeper.read_heat", read)
    monkeypatch.setattr("stoker.service.heat_keeper._RETRY_S", 0.0)
    monkeypatch.setattr("stoker.service.heat_keeper._answers", lambda _: False)
    keeper._start_from_topic(log, HEAT_TOPIC)
    assert now_s == [61.0]
    again = LogUnavailable("another broker restarts")
    assert not keeper._note_away(again, now_s[0])
    now_s[0] += 5.0
    assert keeper._note_away(again, now_s[0])
    log.close()


def test_a_log_that_is_away_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _log(tmp_path, range(COUNT))
    _away_for(log, monkeypatch, tries=3)
    keeper = _keeper(log, tmp_path)
    monkeypatch.setattr("stoker.service.heat_keeper._AWAY_S", 3600.0)
    keeper.start()
    assert len(keeper.demand_for_warmup(1.8e9 + COUNT, wait_s=60.0)) == COUNT
    assert keeper.stop(60.0)
    log.close()


def test_the_keeper_survives_a_failure_to_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault, and then a snapshot that cannot be opened for a while: the heat comes back."""
    log = _log(tmp_path, range(COUNT))
    keeper = _keeper(log, tmp_path)
    monkeypatch.setattr("stoker.service.heat_keeper._RESTART_S", 0.0)
    apply_batch, restored = HeatSink.apply_batch, HeatKeeper._restored
    faults, refusals = iter(range(1)), iter(range(2))

    def faulty(sink: HeatSink, *args: Any, **named: Any) -> None:
        if next(faults, None) is not None:
            raise RuntimeError("a fault of the sink")
        apply_batch(sink, *args, **named)

    def refused(self: HeatKeeper) -> ConsumeLoop:
        if next(refusals, None) is not None:
            raise OSError(24, "Too many open files")
        return restored(self)

    monkeypatch.setattr(HeatSink, "apply_batch", faulty)
    monkeypatch.setattr(HeatKeeper, "_restored", refused)
    with structlog.testing.capture_logs():
        keeper.start()
        assert len(keeper.demand_for_warmup(1.8e9 + COUNT, wait_s=60.0)) == COUNT
        assert keeper.stop(60.0)
    assert keeper.restarts == 3
    log.close()


def test_readers_work_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a million keys a prediction takes hundreds of milliseconds, and events come meanwhile."""
    graph = HeatGraph(PrefetchSettings())
    sink = HeatSink(graph)
    sink.apply([new_event(SEARCH_PERFORMED, tenant="a", chunk_ids=["x"], time_s=1.8e9)])
    seen: list[str] = []

    def watched(name: str) -> Any:
        later = getattr(HeatGraph, name)

        def reading(*args: Any) -> Any:
            assert sink._lock.locked(), "two threads would be inside the graph"
            left = later(graph, *args)

            def free(rest: Any) -> Any:
                assert not sink._lock.locked()
                seen.append(name)
                return left(rest)

            return free

        return reading

    names = ["demand_later", "coverage_later", "held_back_later"]
    for name in names:
        monkeypatch.setattr(graph, name, watched(name))
    assert list(sink.demand(1.8e9)) == [("a", "x")]
    assert sink.coverage(1.8e9).accesses > 0.0
    assert sink.held_back(1.8e9) == []
    assert seen == names
    with sink._lock:  # as while a snapshot is written
        assert sink.key_count == 1
