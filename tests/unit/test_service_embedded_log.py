"""The embedded log: order, offsets, groups with leases, retention, compaction, refusals."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, CorruptError, InputError
from stoker.index.generation import NewerFormat
from stoker.service.embedded_group import EmbeddedConsumer
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions, _Ticket
from stoker.service.streams import (
    LogFull,
    LogUnavailable,
    PartitionLost,
    Record,
    RecordTooLarge,
    TopicSpec,
)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Moves:
    """A listener that notes what came and went."""

    def __init__(self, *, starts: dict[int, int | None] | None = None) -> None:
        self.starts = starts or {}
        self.heard: list[tuple[str, list[int]]] = []
        self.committed: dict[int, int | None] = {}
        self.at: dict[int, int] = {}

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        self.heard.append(("assigned", sorted(committed)))
        self.committed.update(committed)
        return {p: at for p, at in self.starts.items() if p in committed}

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        self.heard.append(("revoked", sorted(partitions)))
        return {p: self.at[p] for p in partitions if p in self.at}

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        self.heard.append(("lost", sorted(partitions)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def event_log(tmp_path: Path, clock: Clock) -> Iterator[EmbeddedLog]:
    log = EmbeddedLog(tmp_path / "log", EmbeddedOptions(clock=clock, monotonic=clock))
    yield log
    log.check()
    log.close()


def drain(consumer: EmbeddedConsumer | object, count: int = 1000) -> list[Record]:
    records: list[Record] = []
    while batch := consumer.poll(count, 0.0):  # type: ignore[attr-defined]
        records += batch
    return records


def test_a_key_keeps_its_order_and_offsets_have_no_gaps(event_log: EmbeddedLog) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=4))
    entries = [(f"k{i % 9}".encode(), b"%d" % i) for i in range(500)]
    for at in range(0, 500, 50):
        event_log.append_batch("t", entries[at : at + 50])
    event_log.append("t", b"k0", [b"", None])
    consumer = event_log.consumer("t", "g")
    records = drain(consumer, 7)
    assert len(records) == 502
    for partition in range(4):
        offsets = [r.offset for r in records if r.partition == partition]
        assert offsets == list(range(len(offsets)))
    for key in {key for key, _ in entries}:
        expected = [value for k, value in entries if k == key] + ([b"", None] * (key == b"k0"))
        assert [r.value for r in records if r.key == key] == expected
        assert len({r.partition for r in records if r.key == key}) == 1
    assert consumer.lag() == dict.fromkeys(range(4), 0)
    consumer.close()


def test_a_member_that_renews_while_another_waits_for_the_file_is_no_relic(tmp_path: Path) -> None:
    """A lease longer than any is one of before a reboot, unless time passed while waiting."""
    clock = Clock()
    consumers: list[EmbeddedConsumer] = []

    def waiting() -> float:
        """The second member's clock: after each look at it, the first one renews, later."""
        seen_s = clock()
        if len(consumers) == 2 and not consumers[1]._connection.in_transaction:
            clock.now_s += 5.0
            consumers[0].poll(1, 0.0)
        return seen_s

    log = EmbeddedLog(tmp_path / "log", EmbeddedOptions(clock=clock, monotonic=clock))
    log.ensure_topic(TopicSpec("t", partition_count=4))
    slow = EmbeddedLog(tmp_path / "log", EmbeddedOptions(clock=clock, monotonic=waiting))
    first, second = Moves(), Moves()
    consumers.append(EmbeddedConsumer(log.topic("t"), "g", listener=first))
    consumers[0].poll(1, 0.0)
    consumers.append(EmbeddedConsumer(slow.topic("t"), "g", listener=second))
    for _ in range(6):
        consumers[1].poll(1, 0.0)
    assert [what for what, _ in first.heard + second.heard if what == "lost"] == []
    assert consumers[0].assignment() | consumers[1].assignment() == {0, 1, 2, 3}
    for consumer in consumers[:]:
        consumers.remove(consumer)
        consumer.close()
    slow.close()
    log.close()


def test_a_busy_partition_does_not_starve_the_others(event_log: EmbeddedLog) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=2))
    topic = event_log.topic("t")
    keys = {topic.partition_of(b"k%d" % i): b"k%d" % i for i in range(10)}
    event_log.append("t", keys[0], [b"busy"] * 1000)
    event_log.append("t", keys[1], [b"quiet"] * 1000)
    consumer = event_log.consumer("t", "g")
    some = [record.value for _ in range(20) for record in consumer.poll(10, 0.0)]
    assert 50 <= some.count(b"quiet") <= 150
    consumer.close()


def test_groups_are_apart_and_commits_survive(event_log: EmbeddedLog, tmp_path: Path) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=1))
    event_log.append("t", b"k", [b"%d" % i for i in range(10)])
    one = event_log.consumer("t", "one")
    assert len(drain(one)) == 10
    one.commit({0: 6})
    one.close()
    other = event_log.consumer("t", "other")
    assert len(drain(other)) == 10
    other.close()
    reopened = EmbeddedLog(tmp_path / "log", event_log.options)
    again = reopened.consumer("t", "one")
    assert [r.offset for r in drain(again)] == [6, 7, 8, 9]
    again.close()
    reopened.close()


def test_members_share_evenly_and_partitions_move_with_their_offsets(
    event_log: EmbeddedLog, clock: Clock
) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=5))
    event_log.append_batch("t", [(b"k%d" % i, b"%d" % i) for i in range(60)])
    moves = [Moves(), Moves(), Moves()]
    first = event_log.consumer("t", "g", listener=moves[0])
    for record in drain(first):
        moves[0].at[record.partition] = record.offset + 1
    assert first.assignment() == {0, 1, 2, 3, 4}

    second = event_log.consumer("t", "g", listener=moves[1])
    assert second.poll(10, 0.0) == []  # nothing is free yet
    clock.now_s += 1
    assert first.poll(10, 0.0) == []  # gives its surplus back, with offsets
    assert len(first.assignment()) == 3
    clock.now_s += 1
    assert second.poll(100, 0.0) == []  # takes it where the first one stopped
    assert len(second.assignment()) == 2
    assert first.assignment() | second.assignment() == {0, 1, 2, 3, 4}
    assert moves[1].committed == {p: moves[0].at[p] for p in second.assignment()}

    third = event_log.consumer("t", "g", listener=moves[2])
    members = [first, second, third]
    for _ in range(4):
        clock.now_s += 1
        for member in members:
            member.poll(10, 0.0)
            member.check()  # type: ignore[attr-defined]
    assert sorted(len(m.assignment()) for m in members) == [1, 2, 2]
    assert frozenset().union(*(m.assignment() for m in members)) == {0, 1, 2, 3, 4}
    # Only what had to move has moved: nobody lost and regained a partition.
    assert [kind for kind, _ in moves[0].heard].count("assigned") == 1

    second.close()
    third.close()
    clock.now_s += 1
    first.poll(10, 0.0)
    assert first.assignment() == {0, 1, 2, 3, 4}
    first.close()


def test_a_member_whose_lease_ran_out_loses_its_partitions(
    event_log: EmbeddedLog, clock: Clock
) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=2))
    event_log.append_batch("t", [(b"k%d" % i, b"%d" % i) for i in range(20)])
    dead_moves, live_moves = Moves(), Moves()
    dead = event_log.consumer("t", "g", listener=dead_moves)
    assert len(drain(dead)) == 20
    dead.commit({0: 1, 1: 1})
    clock.now_s += event_log.options.lease_s + 0.1
    live = event_log.consumer("t", "g", listener=live_moves)
    with structlog.testing.capture_logs() as lines:
        assert len(drain(live)) == 18
    assert [line["event"] for line in lines].count("service.members_expired") == 1
    assert live.assignment() == {0, 1}
    # The dead one comes back: its commit is refused, and it learns what it lost.
    with pytest.raises(PartitionLost, match=r"partitions \[0, 1\]"):
        dead.commit({0: 10, 1: 10})
    dead.poll(1, 0.0)
    assert ("lost", [0, 1]) in dead_moves.heard
    assert event_log.topic("t").committed("g") == {0: 1, 1: 1}
    live.close()
    dead.close()


def test_a_member_dropped_and_back_at_once_starts_from_what_was_committed(
    event_log: EmbeddedLog, clock: Clock
) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=1))
    event_log.append("t", b"k", [b"%d" % i for i in range(10)])
    moves = Moves()
    slow = event_log.consumer("t", "g", listener=moves)
    assert len(drain(slow)) == 10
    clock.now_s += event_log.options.lease_s + 0.1
    quick = event_log.consumer("t", "g")
    quick.poll(4, 0.0)
    quick.commit({0: 4})
    quick.close()  # the partition is free again before the slow one looks
    records = slow.poll(100, 0.0)
    assert moves.heard == [("assigned", [0]), ("lost", [0]), ("assigned", [0])]
    assert [r.offset for r in records] == [4, 5, 6, 7, 8, 9]
    slow.close()


def test_a_lease_from_before_a_reboot_is_void(event_log: EmbeddedLog, clock: Clock) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=1))
    event_log.append("t", b"k", [b"v"])
    before = event_log.consumer("t", "g")
    assert len(drain(before)) == 1
    clock.now_s = 3.0  # monotonic time starts again
    after = event_log.consumer("t", "g")
    assert len(drain(after)) == 1
    after.close()


def test_a_listener_chooses_where_to_start(event_log: EmbeddedLog) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=1))
    event_log.append("t", b"k", [b"%d" % i for i in range(5)])
    late = event_log.consumer("t", "a", listener=Moves(starts={0: 3}))
    assert [r.offset for r in drain(late)] == [3, 4]
    late.commit({0: 5})
    late.close()
    oldest = event_log.consumer("t", "a", listener=Moves(starts={0: None}))
    assert len(drain(oldest)) == 5
    oldest.close()


def test_retention_by_age_takes_the_oldest_and_resets_a_slow_reader_once(
    event_log: EmbeddedLog, clock: Clock
) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=1, retention_s=100.0))
    reader = event_log.consumer("t", "g")
    for i in range(10):
        event_log.append("t", b"k", [b"%d" % i])
        if i == 0:
            assert len(reader.poll(1, 0.0)) == 1
        clock.now_s += 20
    event_log.topic("t").enforce_retention()
    (first, following) = event_log.offsets("t")[0]
    assert following == 10
    assert first == 5  # those of 100 s ago and younger are kept
    with structlog.testing.capture_logs() as lines:
        assert [r.offset for r in drain(reader)] == [5, 6, 7, 8, 9]
        drain(reader)
    resets = [line for line in lines if line["event"] == "service.offset_reset"]
    assert len(resets) == 1
    assert (resets[0]["wanted_offset"], resets[0]["oldest_offset"]) == (1, 5)
    assert reader.resets == 1
    reader.close()


@settings(max_examples=25, deadline=None)
@given(
    jump_s=st.floats(3_600.0, 7 * 86_400.0),
    passing_s=st.floats(0.0, 90_000.0),
    compacted=st.booleans(),
)
def test_a_clock_that_was_put_ahead_takes_no_record_before_its_time(
    tmp_path_factory: pytest.TempPathFactory, jump_s: float, passing_s: float, compacted: bool
) -> None:
    """For an hour or a week, before it is put back: nothing would bring the events again."""
    wall, steady = Clock(), Clock()
    options = EmbeddedOptions(clock=wall, monotonic=steady)
    log = EmbeddedLog(tmp_path_factory.mktemp("log"), options)
    spec = TopicSpec("t", partition_count=1, retention_s=86_400.0, compacted=compacted)
    log.ensure_topic(spec)
    topic = log.topic("t")
    # Of a compacted topic it is the mark of what was removed that has its time.
    log.append_batch("t", [(b"%d" % i, None if compacted else b"x") for i in range(5)])
    held = len(list(topic.scan(0)))
    wall.now_s += jump_s
    topic.enforce_retention()
    topic.compact()
    log.append_batch("t", [(b"a", b"x")])  # by the wrong clock
    wall.now_s += passing_s
    steady.now_s += passing_s
    topic.enforce_retention()
    topic.compact()
    assert len(list(topic.scan(0))) == (held if passing_s <= 86_400.0 else 0) + 1
    wall.now_s -= jump_s
    topic.enforce_retention()
    assert len(list(topic.scan(0))) == (held if passing_s <= 86_400.0 else 0) + 1
    for clock in (wall, steady):  # what the wrong clock has written goes too, once it is as late
        clock.now_s += jump_s + 86_401.0
    topic.enforce_retention()
    topic.compact()
    assert len(list(topic.scan(0))) == (1 if compacted else 0)
    log.close()


def test_retention_by_bytes_happens_with_the_appends(event_log: EmbeddedLog) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=1, retention_bytes=1000))
    for i in range(100):
        event_log.append("t", b"k", [b"%099d" % i])
    topic = event_log.topic("t")
    assert topic.bytes_stored() <= 1000
    first, following = event_log.offsets("t")[0]
    assert (first, following) == (90, 100)
    topic.trim(0, 95)
    assert event_log.offsets("t")[0] == (95, 100)
    topic.trim(0, 1000)
    assert event_log.offsets("t")[0] == (100, 100)
    assert topic.bytes_stored() == 0


def test_a_compacted_topic_keeps_the_newest_of_each_key(
    event_log: EmbeddedLog, clock: Clock
) -> None:
    event_log.ensure_topic(
        TopicSpec("heat", partition_count=2, compacted=True, retention_s=50, retention_bytes=1)
    )
    for i in range(40):
        event_log.append("heat", b"k%d" % (i % 4), [b"%d" % i])
    event_log.append("heat", b"k0", [None])
    clock.now_s += 10
    topic = event_log.topic("heat")
    topic.compact()
    reader = event_log.consumer("heat", "g")
    records = drain(reader)
    assert {r.key: r.value for r in records} == {
        b"k0": None,
        b"k1": b"37",
        b"k2": b"38",
        b"k3": b"39",
    }
    assert len(records) == 4
    assert reader.lag() == {0: 0, 1: 0}
    assert reader.resets == 0
    reader.close()
    clock.now_s += 60  # the deletion mark was there for as long as the retention says
    topic.compact()
    late = event_log.consumer("heat", "new")
    assert sorted(r.key for r in drain(late)) == [b"k1", b"k2", b"k3"]
    late.close()


def test_compaction_comes_by_itself(event_log: EmbeddedLog, clock: Clock) -> None:
    event_log.ensure_topic(TopicSpec("heat", partition_count=1, compacted=True))
    for i in range(100):
        event_log.append("heat", b"k%d" % (i % 4), [b"%0100d" % i])
        clock.now_s += 30
    assert event_log.topic("heat").bytes_stored() < 20 * 102
    assert event_log.offsets("heat")[0][1] == 100


def test_a_long_poll_ends_when_another_thread_appends(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.ensure_topic(TopicSpec("t", partition_count=1))
    consumer = log.consumer("t", "g")
    got: list[Record] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        got.extend(consumer.poll(10, 30.0))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(10)
    log.append("t", b"k", [b"v"])
    thread.join(20)
    assert [r.value for r in got] == [b"v"]
    consumer.close()
    log.close()


def test_threads_that_append_at_once_share_syncs_and_lose_nothing(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.ensure_topic(TopicSpec("t", partition_count=3))

    def append(name: int) -> None:
        for i in range(25):
            log.append("t", b"k%d" % name, [b"%d" % i])

    threads = [threading.Thread(target=append, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    consumer = log.consumer("t", "g")
    records = drain(consumer)
    for name in range(8):
        own = [r.value for r in records if r.key == b"k%d" % name]
        assert own == [b"%d" % i for i in range(25)]
    consumer.close()
    log.check()
    log.close()


def test_an_append_that_fails_in_any_way_is_acknowledged_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers who share another one's sync must not take its silence for success."""
    log = EmbeddedLog(tmp_path)
    log.ensure_topic(TopicSpec("t", partition_count=1))
    topic = log.topic("t")
    queued = threading.Semaphore(0)
    insert = topic._insert

    class Pending(list[_Ticket]):
        def append(self, ticket: _Ticket) -> None:
            super().append(ticket)
            queued.release()

    topic._pending = Pending()

    def broken(entries: list[tuple[bytes, bytes | None]]) -> None:
        insert(entries)
        raise MemoryError("a fault of any other kind")

    failures: list[BaseException] = []

    def append(name: bytes) -> None:
        try:
            log.append("t", b"k", [name])
        except (MemoryError, LogUnavailable) as error:
            failures.append(error)

    monkeypatch.setattr(topic, "_insert", broken)
    threads = [threading.Thread(target=append, args=(name,)) for name in (b"one", b"two")]
    with topic._write_lock:  # both have queued before either of them writes
        for thread in threads:
            thread.start()
        assert all(queued.acquire(timeout=20) for _ in threads)
    for thread in threads:
        thread.join(20)
    assert sorted(type(error).__name__ for error in failures) == ["LogUnavailable", "MemoryError"]
    monkeypatch.undo()
    assert log.offsets("t") == {0: (0, 0)}
    log.append("t", b"k", [b"three"])
    log.check()
    log.close()


def test_refusals_say_why(event_log: EmbeddedLog, tmp_path: Path) -> None:
    event_log.ensure_topic(TopicSpec("t", partition_count=2, record_bytes_max=10))
    with pytest.raises(RecordTooLarge, match="at most 10 bytes, found 11"):
        event_log.append("t", b"k", [b"fine", b"x" * 11])
    assert event_log.offsets("t") == {0: (0, 0), 1: (0, 0)}
    with pytest.raises(ConfigError, match="has 2 partitions, 3 were asked for"):
        event_log.ensure_topic(TopicSpec("t", partition_count=3))
    with pytest.raises(InputError, match="no topic 'u'; there are: t"):
        event_log.append("u", b"k", [b"v"])
    with pytest.raises(InputError, match="max_events"):
        event_log.consumer("t", "g").poll(0, 0.0)
    with pytest.raises(InputError, match="consumer group"):
        event_log.consumer("t", "")
    for name in ("", "a/b", "..", "x" * 201, "ä"):
        with pytest.raises(ConfigError, match="topic name"):
            TopicSpec(name)
    with pytest.raises(ConfigError, match="three times"):
        EmbeddedOptions(lease_s=2, heartbeat_s=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(LogUnavailable):
        EmbeddedLog(tmp_path / "file" / "log")


def test_a_full_log_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path, EmbeddedOptions(bytes_max=100))
    log.ensure_topic(TopicSpec("t", partition_count=1))
    log.append("t", b"", [b"x" * 60])
    with pytest.raises(LogFull, match="at most 100 bytes, found 120"):
        log.append("t", b"", [b"x" * 60])
    log.append("t", b"", [b"x" * 40])
    assert log.offsets("t") == {0: (0, 2)}
    log.check()
    log.close()


def test_foreign_newer_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "foreign.sqlite").write_bytes(b"not a database, but long enough to be read" * 50)
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    log = EmbeddedLog(tmp_path)
    log.ensure_topic(TopicSpec("newer", partition_count=1))
    with sqlite3.connect(tmp_path / "newer.sqlite") as newer:
        newer.execute("PRAGMA user_version=2")
    newer.close()
    with pytest.raises(CorruptError, match=r"foreign\.sqlite"):
        log.topic("foreign")
    with pytest.raises(
        CorruptError, match=r"other\.sqlite: offset 68: expected a Stoker event log"
    ):
        log.ensure_topic(TopicSpec("other"))
    with pytest.raises(NewerFormat, match=r"newer\.sqlite: format version 2, .* upgrade"):
        log.topic("newer")
    with pytest.raises(NewerFormat):
        log.ensure_topic(TopicSpec("newer", partition_count=1))
    log.close()
    with pytest.raises(LogUnavailable, match="closed"):
        log.append("t", b"", [b""])


def test_an_overlong_answer_is_cut_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.embedded_group._POLL_BYTES_MAX", 1000)
    log = EmbeddedLog(tmp_path)
    log.ensure_topic(TopicSpec("t", partition_count=2))
    log.append_batch("t", [(b"k%d" % i, b"x" * 400) for i in range(20)])
    consumer = log.consumer("t", "g")
    assert len(consumer.poll(100, 0.0)) == 3
    assert len(drain(consumer, 100)) == 17
    consumer.close()
    log.close()
