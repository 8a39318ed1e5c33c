"""The consumer loop and the snapshot file, on a clock that moves when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from stoker.errors import ConfigError, CorruptError
from stoker.prefetch.events import RESULT_USED, Event, EventError, encode, new_event
from stoker.service import whole_file
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.dead_letters import DeadLetters
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.snapshot_file import read_snapshot, write_snapshot
from stoker.service.streams import LogFull, LogUnavailable, MemberFenced, Record, TopicSpec


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Keep:
    """A sink that keeps event ids in order."""

    def __init__(self, body: bytes | None = None) -> None:
        self.ids: list[str] = [] if body is None else orjson.loads(body)
        self.arrived_s: list[float] = []

    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        assert arrived_s is not None
        self.arrived_s += arrived_s
        self.ids += [event.id for event in events]

    def to_snapshot(self) -> bytes:
        return orjson.dumps(self.ids)


def used(event_id: str, tenant: str = "t") -> bytes:
    return encode(
        new_event(RESULT_USED, tenant=tenant, chunk_ids=["c"], time_s=1.7e9, event_id=event_id)
    )


class World:
    """A log with a clock, and loops on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.log = EmbeddedLog(
            folder / "log", EmbeddedOptions(clock=self.clock, monotonic=self.clock)
        )
        self.log.ensure_topic(TopicSpec("t", partition_count=1, retention_s=None))
        self.log.ensure_topic(TopicSpec("dead", partition_count=1, retention_s=None))
        self.letters = DeadLetters(self.log, topic="dead", clock=self.clock)

    def loop(
        self, *, group: str = "g", snapshot: str | None = "heat", **options: Any
    ) -> ConsumeLoop:
        return ConsumeLoop(
            self.log,
            "t",
            group,
            open_sink=Keep,
            snapshot_path=None if snapshot is None else self.folder / snapshot,
            dead_letters=self.letters,
            options=ConsumeOptions(**options),
            clock=self.clock,
            monotonic=self.clock,
        )

    def add(self, *payloads: bytes | None) -> None:
        self.log.append("t", b"k", payloads)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.log.check()
    made.log.close()


def ids(loop: ConsumeLoop) -> list[str]:
    assert isinstance(loop.sink, Keep)
    return loop.sink.ids


def test_events_reach_the_sink_once_with_the_time_they_came(world: World) -> None:
    world.add(used("a"), used("b"), used("a"), None, used("a", "other tenant"))
    loop = world.loop()
    assert loop.step(0.0) == 5
    assert ids(loop) == ["a", "b", "a"]
    assert loop.sink.arrived_s == [1000.0] * 3  # type: ignore[attr-defined]
    stats = loop.stats()
    assert (stats.records, stats.events, stats.duplicates, stats.refused) == (5, 3, 1, 0)
    loop.close()


def test_a_snapshot_comes_by_count_and_by_time_only_if_something_was_read(world: World) -> None:
    loop = world.loop(snapshot_events=3, snapshot_s=10.0)
    world.add(used("a"), used("b"))
    loop.step(0.0)
    assert loop.stats().snapshots == 0
    world.add(used("c"))
    loop.step(0.0)
    assert loop.stats().snapshots == 1
    world.clock.now_s += 11
    loop.step(0.0)
    assert loop.stats().snapshots == 1
    world.add(used("d"))
    loop.step(0.0)
    assert loop.stats().snapshots == 2
    assert world.log.topic("t").committed("g") == {0: 4}
    loop.close()


def test_a_new_loop_goes_on_where_the_snapshot_ends_even_without_a_commit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = world.loop()
    world.add(used("a"), used("b"))
    loop.step(0.0)
    consumer = loop._consumer
    assert consumer is not None
    monkeypatch.setattr(consumer, "commit", _away)
    with structlog.testing.capture_logs() as lines:
        assert loop.save()
    assert [line["event"] for line in lines] == ["service.commit_failed"]
    assert world.log.topic("t").committed("g") == {}
    # The process is gone; its lease runs out.
    world.clock.now_s += 100
    world.add(used("b"), used("c"))
    again = world.loop()
    again.step(0.0)
    assert ids(again) == ["a", "b", "c"]
    assert again.stats().duplicates == 1
    again.close()


def _away(_: Any) -> None:
    raise LogUnavailable("away")


def test_without_a_snapshot_the_state_is_rebuilt_from_the_oldest_record(world: World) -> None:
    world.add(used("a"), used("b"))
    loop = world.loop()
    loop.step(0.0)
    loop.close()
    (world.folder / "heat").unlink()
    world.add(used("c"))
    again = world.loop()
    again.step(0.0)
    assert ids(again) == ["a", "b", "c"]
    again.close()
    shared = world.loop(snapshot=None, shared=True)  # adds up with what the group has done
    world.add(used("d"))
    shared.step(0.0)
    assert ids(shared) == ["d"]
    shared.close()


def test_a_damaged_snapshot_is_put_aside_and_rebuilt(world: World) -> None:
    world.add(used("a"))
    loop = world.loop()
    loop.step(0.0)
    loop.close()
    path = world.folder / "heat"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with structlog.testing.capture_logs() as lines:
        again = world.loop()
    assert "service.snapshot_damaged" in [line["event"] for line in lines]
    assert (world.folder / "heat.damaged").exists()
    again.step(0.0)
    assert ids(again) == ["a"]
    again.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": None},
        {"offsets": [[0]]},
        {"offsets": [["x", 1]]},
        {"seen": 5},
        {"seen": [["t"]]},
        {"seen": b"no ids"},
        {"time_s": "x"},
        {"time_s": None},
    ],
)
def test_a_snapshot_whose_header_says_nothing_of_use_is_put_aside(
    world: World, changes: dict[str, Any]
) -> None:
    world.add(used("a"))
    loop = world.loop()
    loop.step(0.0)
    loop.close()
    path = world.folder / "heat"
    header, body = read_snapshot(path) or ({}, b"")
    write_snapshot(path, {**header, **changes}, body)
    again = world.loop()
    assert (world.folder / "heat.damaged").exists()
    again.step(0.0)
    assert ids(again) == ["a"]
    again.close()


def test_a_snapshot_that_the_sink_refuses_is_put_aside_too(world: World) -> None:
    world.add(used("a"))
    loop = world.loop()
    loop.step(0.0)
    loop.close()

    def picky(body: bytes | None) -> Keep:
        if body is not None:
            raise CorruptError("written under another decay")
        return Keep()

    again = ConsumeLoop(
        world.log, "t", "g", open_sink=picky, snapshot_path=world.folder / "heat", clock=world.clock
    )
    again.step(0.0)
    assert ids(again) == ["a"]
    again.close()


def test_a_snapshot_of_another_topic_is_refused(world: World) -> None:
    write_snapshot(world.folder / "heat", {"topic": "u", "offsets": [], "seen": []}, b"[]")
    with pytest.raises(ConfigError, match="expected a snapshot of topic t, found one of u"):
        world.loop()


def test_a_refused_record_is_never_passed_over_before_its_letter_is_safe(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = world.loop(snapshot_events=1)
    append = world.log.append_batch
    monkeypatch.setattr(world.log, "append_batch", lambda *_: _away(None))
    world.add(used("a"), b"poison", used("b"))
    with structlog.testing.capture_logs() as lines:
        loop.step(0.0)
        loop.step(0.0)
    assert [line["event"] for line in lines].count("service.dead_letters_waiting") == 1
    assert ids(loop) == ["a", "b"]  # reading goes on
    assert loop.stats().snapshots == 0
    assert world.log.topic("t").committed("g") == {}
    monkeypatch.setattr(world.log, "append_batch", append)
    loop.step(0.0)
    assert loop.stats().snapshots == 1
    (letter,) = [orjson.loads(r.value or b"") for r in world.log.topic("dead").scan(0)]
    assert letter["id"] == "t-0-1"
    assert letter["data"]["offset"] == 1
    loop.close()


def test_a_flood_of_bad_records_makes_a_few_lines(world: World) -> None:
    loop = world.loop(batch_events_max=3)
    world.add(*[b"poison"] * 120)
    with structlog.testing.capture_logs() as lines:
        while loop.step(0.0):
            pass
    totals = [line["total"] for line in lines if line["event"] == "service.events_refused"]
    assert totals == [3, 12, 102]
    loop.close()


def test_a_flood_of_bad_records_does_not_fill_the_memory(world: World) -> None:
    class Away:
        def append_batch(self, *_: Any) -> None:
            raise LogUnavailable("away")

    letters = DeadLetters(Away(), pending_max=10, clock=world.clock)  # type: ignore[arg-type]
    reason = EventError("$", expected="x", found="y")
    with structlog.testing.capture_logs() as lines:
        for i in range(50):
            letters.put(b"bad", reason, origin=Record("t", 0, i, b"k", b"bad", 0.0))
    assert (letters.pending, letters.dropped) == (10, 40)
    assert [line["event"] for line in lines] == ["service.dead_letters_dropped"]
    assert not letters.flush()


def test_the_ids_are_bounded_by_bytes_and_survive_a_restart(world: World) -> None:
    loop = world.loop(dedup_bytes=48)
    world.add(used("a"), used("b"), used("c"))
    loop.step(0.0)
    loop.close()
    again = world.loop(dedup_bytes=48)
    world.add(used("b"), used("c"), used("a"))  # room for two: "a" counts again
    again.step(0.0)
    assert ids(again) == ["a", "b", "c", "a"]
    again.close()


def test_ids_of_a_snapshot_from_before_are_known(world: World) -> None:
    write_snapshot(
        world.folder / "heat",
        {"topic": "t", "offsets": [], "seen": [["t", "a"], ["u", "b"]], "time_s": 1.0},
        b"[]",
    )
    loop = world.loop()
    world.add(used("a"), used("b"), used("b", tenant="u"), used("c"))
    loop.step(0.0)
    assert ids(loop) == ["b", "c"]
    stats = loop.stats()
    assert (stats.duplicates, stats.ids.count) == (2, 4)
    assert 0.0 < stats.false_duplicates < 1e-15
    loop.close()


def test_the_lag_and_its_age_are_told(world: World) -> None:
    loop = world.loop(batch_events_max=2)
    world.add(used("a"), used("b"), used("c"))
    world.clock.now_s += 7
    loop.step(0.0)
    loop.measure_lag()
    assert (loop.stats().lag, loop.stats().lag_age_s) == (1, 7.0)
    loop.step(0.0)
    loop.measure_lag()
    assert (loop.stats().lag, loop.stats().lag_age_s) == (0, 0.0)
    loop.close()


def test_the_age_of_the_lag_is_that_of_what_was_not_read(world: World) -> None:
    loop = world.loop(batch_events_max=1)
    world.add(used("a"))
    loop.step(0.0)
    loop.measure_lag()
    world.clock.now_s += 500
    loop.measure_lag()  # an hour's silence is no lag
    assert (loop.stats().lag, loop.stats().lag_age_s) == (0, 0.0)
    world.clock.now_s += 3
    world.add(used("b"))
    loop.measure_lag()
    assert (loop.stats().lag, loop.stats().lag_age_s) == (1, 3.0)
    world.clock.now_s += 60
    assert loop.stats().lag_age_s == 63.0
    loop.step(0.0)
    loop.measure_lag()
    assert (loop.stats().lag, loop.stats().lag_age_s) == (0, 0.0)
    loop.close()


def test_the_age_of_the_lag_grows_while_the_log_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = world.loop()
    world.add(used("a"))
    loop.step(0.0)
    loop.measure_lag()
    stop = threading.Event()

    def away(*_: Any) -> None:
        world.clock.now_s += 30
        if world.clock.now_s > 1_200:
            stop.set()
        raise LogUnavailable("away")

    ages: list[float] = []
    monkeypatch.setattr(loop._consumer, "poll", away)
    monkeypatch.setattr(stop, "wait", lambda _: ages.append(loop.stats().lag_age_s))
    loop.run(stop)
    assert ages[:3] == [30.0, 60.0, 90.0]


@pytest.mark.parametrize("trouble", [LogUnavailable, LogFull])
def test_a_log_that_is_away_or_full_is_outlived_and_said_once(
    world: World, monkeypatch: pytest.MonkeyPatch, trouble: type[Exception]
) -> None:
    loop = world.loop()
    world.add(used("a"))
    loop.step(0.0)
    consumer = loop._consumer
    assert consumer is not None
    stop = threading.Event()
    poll, left = consumer.poll, iter(range(3))

    def troubled(max_events: int, timeout_s: float) -> list[Record]:
        if next(left, None) is not None:
            raise trouble("no room for the lease")
        stop.set()
        return poll(max_events, timeout_s)

    def refused(*_: Any) -> None:
        raise trouble("no room")

    world.add(used("b"))
    monkeypatch.setattr(consumer, "poll", troubled)
    monkeypatch.setattr(consumer, "commit", refused)
    monkeypatch.setattr(stop, "wait", lambda _: None)
    with structlog.testing.capture_logs() as lines:
        loop.run(stop)
    assert ids(loop) == ["a", "b"]
    events = [line["event"] for line in lines if line["log_level"] != "error"]
    assert events.count("service.consuming_stopped") == 1
    assert events.count("service.consuming_resumed") == 1


def test_a_member_that_was_put_out_says_so_now_and_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No outage of the log: it does not end by itself, and somebody must be told what to do."""
    loop = world.loop(backoff_s_max=5.0)
    loop.step(0.0)
    stop = threading.Event()
    asked_s: list[float] = []

    def fenced(*_: Any) -> list[Record]:
        asked_s.append(world.clock.now_s)
        raise MemberFenced("fenced by another instance")

    def wait(timeout_s: float) -> None:
        world.clock.now_s += timeout_s
        if world.clock.now_s > 1_700.0:
            stop.set()

    monkeypatch.setattr(loop._consumer, "poll", fenced)
    monkeypatch.setattr(stop, "wait", wait)
    with structlog.testing.capture_logs() as lines:
        loop.run(stop)
    assert len(asked_s) > 100
    said = [line for line in lines if line["event"].startswith(("service.re", "service.con"))]
    assert [line["event"] for line in said] == ["service.replica_fenced"] * 3  # in 700 s
    assert said[0]["state_dir"] == str(world.folder)
    assert "`replica`" in said[0]["action"]


def test_a_member_that_was_put_out_may_learn_it_by_a_commit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client goes on reading; its snapshots stand."""
    loop = world.loop()
    world.add(used("a"))
    loop.step(0.0)

    def fenced(*_: Any) -> None:
        raise MemberFenced("fenced by another instance")

    monkeypatch.setattr(loop._consumer, "commit", fenced)
    with structlog.testing.capture_logs() as lines:
        assert loop.save()
        assert loop.save()
    assert [line["event"] for line in lines] == ["service.replica_fenced"]
    assert ids(world.loop(group="h")) == ["a"]


@pytest.mark.parametrize("trouble", [LogUnavailable, LogFull])
def test_a_commit_that_finds_no_room_leaves_the_snapshot_standing(
    world: World, monkeypatch: pytest.MonkeyPatch, trouble: type[Exception]
) -> None:
    loop = world.loop()
    world.add(used("a"))
    loop.step(0.0)

    def refused(*_: Any) -> None:
        raise trouble("no room")

    monkeypatch.setattr(loop._consumer, "commit", refused)
    assert loop.save()
    monkeypatch.setattr(loop._consumer, "close", refused)
    loop.close()
    assert ids(world.loop()) == ["a"]


def test_partitions_that_move_take_their_offsets_along(world: World) -> None:
    world.log.ensure_topic(TopicSpec("m", partition_count=4, retention_s=None))
    world.log.append_batch("m", [(b"k%d" % i, used(f"e{i}")) for i in range(100)])

    def member(name: str) -> ConsumeLoop:
        return ConsumeLoop(
            world.log,
            "m",
            "shared",
            open_sink=Keep,
            snapshot_path=world.folder / name,
            options=ConsumeOptions(shared=True, batch_events_max=10),
            clock=world.clock,
            monotonic=world.clock,
        )

    one, two = member("one"), member("two")
    for _ in range(4):
        one.step(0.0)
    for turn in range(60):
        world.clock.now_s += 1
        one.step(0.0)
        two.step(0.0)
        if turn == 5:
            world.log.append_batch("m", [(b"k%d" % i, used(f"e{i}")) for i in range(100, 200)])
    seen = ids(one) + ids(two)
    assert sorted(seen) == sorted(f"e{i}" for i in range(200)), "twice, or missed"
    assert len(one.partitions) == len(two.partitions) == 2
    assert ids(two)
    one.close()
    two.close()


def test_a_sink_that_breaks_in_a_batch_is_not_saved(world: World) -> None:
    loop = world.loop(batch_events_max=2)
    world.add(*[used(name) for name in "abcdef"])
    loop.step(0.0)
    loop.save()

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake")

    loop.sink.apply = breaks  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        loop.step(0.0)
    loop.close()
    assert world.log.topic("t").committed("g") == {0: 2}
    again = world.loop()
    again.step(0.0)
    assert ids(again) == list("abcdef")
    again.close()


def test_options_that_make_no_sense_are_refused() -> None:
    for key in ("batch_events_max", "snapshot_events", "snapshot_s", "event_bytes_max"):
        with pytest.raises(ConfigError, match=key):
            ConsumeOptions(**{key: 0})
    with pytest.raises(ConfigError, match="dedup_bytes"):
        ConsumeOptions(dedup_bytes=27)
    with pytest.raises(ConfigError, match="dedup_s"):
        ConsumeOptions(dedup_s=0.0)


def damaged(change: Callable[[bytearray], None], data: bytes) -> bytes:
    copy = bytearray(data)
    change(copy)
    return bytes(copy)


def test_a_snapshot_file_is_read_back_or_refused_with_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    assert read_snapshot(path) is None
    write_snapshot(path, {"offsets": [[0, 5]]}, b"body")
    assert read_snapshot(path) == ({"offsets": [[0, 5]]}, b"body")
    write_snapshot(path, {"offsets": [[0, 5]], "seen": b"ids"}, b"body")
    assert read_snapshot(path) == ({"offsets": [[0, 5]], "seen": b"ids"}, b"body")
    good = path.read_bytes()

    def refused(change: Callable[[bytearray], None]) -> str:
        path.write_bytes(damaged(change, good))
        with pytest.raises(CorruptError) as caught:
            read_snapshot(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def cut(data: bytearray) -> None:
        del data[10:]

    assert "offset 10" in refused(cut)
    assert "offset 0: expected magic" in refused(lambda data: data.__setitem__(0, 0))
    assert "offset 8: expected version 1 or 2, found 3" in refused(
        lambda data: data.__setitem__(8, 3)
    )
    assert "bytes in all" in refused(lambda data: data.extend(b"x"))
    for at in range(len(good)):  # every single byte matters

        def flip(data: bytearray, at: int = at) -> None:
            data[at] ^= 0x40

        refused(flip)


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "snapshot"
    write_snapshot(path, {}, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(path, {}, b"new")
    assert read_snapshot(path) == ({}, b"old")
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_stops_snapshots_but_not_reading(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = world.loop(snapshot_events=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stoker.service.consume.write_snapshot", full)
    world.add(used("a"))
    with structlog.testing.capture_logs() as lines:
        for name in "abc":
            world.add(used(name))
            loop.step(0.0)
        world.clock.now_s += 100
        loop.step(0.0)
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [
        "service.snapshot_failed"
    ]
    assert ids(loop) == ["a", "b", "c"]
    assert world.log.topic("t").committed("g") == {}
    monkeypatch.undo()
    loop.close()
    assert world.log.topic("t").committed("g") == {0: 4}
