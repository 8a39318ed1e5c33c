"""The Kafka log against a real broker, with each client: the same tests for both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from kafka import KafkaAdminClient
from slow_broker import SYNC_GROUP

from stoker.errors import ConfigError
from stoker.prefetch.events import RESULT_USED, SEARCH_PERFORMED, Event, encode, new_event
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.dead_letters import DeadLetters
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.publisher import Publisher
from stoker.service.spool import SpooledLog
from stoker.service.streams import (
    LogUnavailable,
    MemberFenced,
    PartitionLost,
    RecordTooLarge,
    TopicSpec,
)

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

WAIT_S = 30.0

# A test's consumer group is called as its topic: a member that an earlier test left behind would
# hold up the joining of another for as long as a member may be without a poll.


class Keep:
    """A sink that keeps event ids in order."""

    def __init__(self, body: bytes | None = None) -> None:
        self.ids: list[str] = [] if body is None else orjson.loads(body)

    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        assert arrived_s is not None
        assert len(arrived_s) == len(events)
        self.ids += [event.id for event in events]

    def to_snapshot(self) -> bytes:
        return orjson.dumps(self.ids)


class Moves:
    """A listener that notes what came and went, and commits what it is told to."""

    def __init__(self) -> None:
        self.assigned: set[int] = set()
        self.revoked: list[int] = []
        self.lost: list[int] = []
        self.at: dict[int, int] = {}

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        self.assigned |= committed.keys()
        return {}

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        self.revoked += partitions
        self.assigned -= set(partitions)
        return {p: self.at[p] for p in partitions if p in self.at}

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        self.lost += partitions
        self.assigned -= set(partitions)


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    """Closes what a test opened, also where it fails: what runs on would disturb the next."""
    with contextlib.ExitStack() as stack:
        yield stack


def used(number: int, session: str = "s") -> Event:
    return new_event(
        RESULT_USED,
        tenant="acme",
        session=session,
        chunk_ids=[f"c{number}"],
        time_s=1.7e9 + number,
        event_id=f"e{number:06d}",
    )


def read(consumer: Any, count: int, *, wait_s: float = WAIT_S, poll_s: float = 0.5) -> list[Any]:
    """Poll until `count` records came."""
    end_s = time.monotonic() + wait_s
    records: list[Any] = []
    while len(records) < count and time.monotonic() < end_s:
        records += consumer.poll(1000, poll_s)
    return records


def test_records_come_back_in_order_with_key_value_and_time(open_log: Any, topic_name: str) -> None:
    log = open_log()
    log.check_health()
    log.ensure_topic(TopicSpec(topic_name, partition_count=3))
    log.append(topic_name, b"a", [b"a0", b"a1", b"a2"])
    log.append_batch(topic_name, [(b"b", b"b0"), (b"a", b"a3"), (b"b", None)])
    consumer = log.consumer(topic_name, topic_name)
    records = read(consumer, 6)
    by_key: dict[bytes, list[bytes | None]] = {b"a": [], b"b": []}
    for record in records:
        by_key[record.key].append(record.value)
        assert record.topic == topic_name
        assert abs(record.time_s - time.time()) < 60
    assert by_key == {b"a": [b"a0", b"a1", b"a2", b"a3"], b"b": [b"b0", None]}
    assert consumer.assignment() == {0, 1, 2}
    assert sum(consumer.lag().values()) == 0
    assert sum(end - first for first, end in log.offsets(topic_name).values()) == 6
    consumer.close()


def test_a_member_that_comes_back_by_its_name_need_not_wait_for_its_own_death(
    open_log: Any, topic_name: str
) -> None:
    """As after `kill -9`. The one before is still in the group, and never says that it leaves."""
    log = open_log(session_timeout_s=60.0)
    log.ensure_topic(TopicSpec(topic_name, partition_count=2))
    log.append(topic_name, b"k", [b"%d" % i for i in range(10)])
    before = log.consumer(topic_name, topic_name, member="replica")
    assert len(read(before, 10)) == 10
    after = log.consumer(topic_name, topic_name, member="replica")
    assert len(read(after, 10)) == 10
    assert after.assignment() == {0, 1}
    after.close()
    with contextlib.suppress(LogUnavailable):  # it has been put out of the group
        before.close()


def test_a_member_whose_name_another_took_learns_it_for_good(
    open_log: Any, topic_name: str
) -> None:
    """As by a copied state folder: no outage, and never silence. By a poll or by a commit."""
    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=1))
    log.append(topic_name, b"k", [b"%d" % i for i in range(10)])
    before = log.consumer(topic_name, topic_name, member="replica")
    assert len(read(before, 10)) == 10
    after = log.consumer(topic_name, topic_name, member="replica")
    assert len(read(after, 10)) == 10
    told = []
    for _ in range(40):
        try:
            before.poll(10, 0.1)
            told.append(False)
        except MemberFenced:
            told.append(True)
    assert told == sorted(told)
    with pytest.raises(MemberFenced):
        before.commit({0: 10})
    after.commit({0: 10})
    after.close()
    with contextlib.suppress(LogUnavailable):
        before.close()


@pytest.mark.apache_kafka
def test_a_join_that_outlasts_many_polls_ends_all_the_same(
    slow_broker: Any,
    open_log: Any,
    topic_name: str,
    closing: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new member's first join, and the one by which it comes to a partition that was added."""
    monkeypatch.setattr("stoker.service.kafka_options._METADATA_AGE_MS", 300)
    log = open_log(bootstrap=slow_broker.bootstrap)
    log.ensure_topic(TopicSpec(topic_name, partition_count=1))
    log.append(topic_name, b"k", [b"first"])
    slow_broker.delay_s[SYNC_GROUP] = 0.5
    consumer = log.consumer(topic_name, topic_name)
    closing.callback(consumer.close)
    assert [record.value for record in read(consumer, 1, poll_s=0.05)] == [b"first"]
    admin = KafkaAdminClient(bootstrap_servers=slow_broker.bootstrap)
    closing.callback(admin.close)
    admin.create_partitions({topic_name: 2})
    wait_until(lambda: consumer.poll(1, 0.0) == [] and consumer.assignment() == {0, 1})


def test_committed_offsets_are_where_the_next_member_starts(open_log: Any, topic_name: str) -> None:
    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=1))
    log.append(topic_name, b"k", [b"%d" % i for i in range(10)])
    first = log.consumer(topic_name, topic_name)
    assert len(read(first, 10)) == 10
    first.commit({0: 4})
    first.close()
    second = log.consumer(topic_name, topic_name)
    assert [record.offset for record in read(second, 6)] == [4, 5, 6, 7, 8, 9]
    with pytest.raises(PartitionLost, match="partitions \\[7\\]"):
        second.commit({7: 1})
    second.close()


def test_clients_put_a_key_in_the_same_partition(broker: Any, topic_name: str) -> None:
    pytest.importorskip("confluent_kafka", reason="the confluent extra is not installed")
    from stoker.service.confluent_log import ConfluentLog
    from stoker.service.kafka_log import KafkaLog
    from stoker.service.kafka_options import KafkaOptions

    options = KafkaOptions(broker.bootstrap)
    logs = [KafkaLog(options), ConfluentLog(options)]
    logs[0].ensure_topic(TopicSpec(topic_name, partition_count=5))
    keys = [f"tenant\0session-{i}".encode() for i in range(40)]
    for log in logs:
        log.append_batch(topic_name, [(key, b"v") for key in keys])
    consumer = logs[0].consumer(topic_name, topic_name)
    partitions: dict[bytes, set[int]] = {}
    for record in read(consumer, 80):
        partitions.setdefault(record.key, set()).add(record.partition)
    assert len(partitions) == 40
    assert all(len(found) == 1 for found in partitions.values())
    consumer.close()
    for log in logs:
        log.close()


@pytest.mark.apache_kafka
def test_topics_state_retention_and_compaction(open_log: Any, broker: Any, topic_name: str) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    log = open_log()
    log.ensure_topic(
        TopicSpec(topic_name, partition_count=2, retention_s=3600.0, retention_bytes=1 << 20)
    )
    compacted = TopicSpec(f"{topic_name}.heat", partition_count=1, compacted=True)
    log.ensure_topic(compacted)
    log.ensure_topic(compacted)  # again: used as it is
    with pytest.raises(ConfigError, match=r"cleanup\.policy"):
        log.ensure_topic(dataclasses.replace(compacted, compacted=False))
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    found = admin.describe_configs(
        [ConfigResource(ConfigResourceType.TOPIC, n) for n in (topic_name, compacted.name)],
        config_filter="all",
    )["topic"]
    admin.close()
    plain = {name: entry["value"] for name, entry in found[topic_name].items()}
    assert plain["cleanup.policy"] == "delete"
    assert plain["retention.ms"] == "3600000"
    assert plain["retention.bytes"] == str(1 << 20)
    assert plain["message.timestamp.type"] == "LogAppendTime"
    assert int(plain["max.message.bytes"]) > 8 << 20
    heat = {name: entry["value"] for name, entry in found[compacted.name].items()}
    assert heat["cleanup.policy"] == "compact"
    assert heat["delete.retention.ms"] == str(7 * 86_400_000)


def test_five_megabytes_are_carried_or_refused_as_the_setting_says(
    open_log: Any, topic_name: str
) -> None:
    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=1))
    log.ensure_topic(TopicSpec(f"{topic_name}.dead", partition_count=1))
    big = new_event(
        SEARCH_PERFORMED,
        tenant="acme",
        chunk_ids=[],
        time_s=1.7e9,
        event_id="big",
        extra={"blob": os.urandom(2_500_000).hex()},
    )
    log.append(topic_name, b"k", [encode(used(0)), encode(big), encode(used(1))])
    carried, refused = Keep(), Keep()
    for sink, bytes_max in ((carried, 8 << 20), (refused, 1 << 20)):
        loop = ConsumeLoop(
            log,
            topic_name,
            f"g{bytes_max}",
            open_sink=lambda _, sink=sink: sink,
            snapshot_path=None,
            dead_letters=DeadLetters(log, topic=f"{topic_name}.dead", payload_bytes_max=1000),
            options=ConsumeOptions(event_bytes_max=bytes_max),
        )
        end_s = time.monotonic() + WAIT_S
        while loop.stats().records < 3 and time.monotonic() < end_s:
            loop.step(0.5)
        loop.close()
    assert carried.ids == ["e000000", "big", "e000001"]
    assert refused.ids == ["e000000", "e000001"]
    reader = log.consumer(f"{topic_name}.dead", f"{topic_name}.dead")
    (letter,) = read(reader, 1)
    data = orjson.loads(letter.value)["data"]
    assert data["offset"] == 1
    assert data["payload_bytes"] > 5_000_000
    assert data["payload_complete"] is False
    assert "at most 1048576 bytes" in data["reason"]
    reader.close()
    with pytest.raises(RecordTooLarge):
        log.append(topic_name, b"k", [bytes((8 << 20) + 1)])


def test_a_poisoned_record_becomes_a_dead_letter_and_reading_goes_on(
    open_log: Any, topic_name: str, tmp_path: Path
) -> None:
    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=1))
    log.ensure_topic(TopicSpec(f"{topic_name}.dead", partition_count=1))
    poison = [b"\xff\xfe not json", b"[]", b'{"specversion":"1.0"}', b"null"]
    values = [encode(used(0)), *poison, encode(used(1)), encode(used(0))]
    log.append(topic_name, b"k", values)
    loop = ConsumeLoop(
        log,
        topic_name,
        topic_name,
        open_sink=Keep,
        snapshot_path=tmp_path / "snapshot",
        dead_letters=DeadLetters(log, topic=f"{topic_name}.dead"),
    )
    end_s = time.monotonic() + WAIT_S
    while loop.stats().records < len(values) and time.monotonic() < end_s:
        loop.step(0.5)
    stats = loop.stats()
    assert (stats.events, stats.duplicates, stats.refused) == (2, 1, 4)
    loop.close()
    reader = log.consumer(f"{topic_name}.dead", f"{topic_name}.dead")
    letters = [orjson.loads(record.value)["data"] for record in read(reader, 4)]
    assert [letter["field"] for letter in letters] == ["$", "$", "id", "$"]
    assert [letter["offset"] for letter in letters] == [1, 2, 3, 4]
    reader.close()
    # A new loop goes on where the snapshot ends, and still knows the ids.
    log.append(topic_name, b"k", [encode(used(1)), encode(used(2))])
    again = ConsumeLoop(
        log, topic_name, topic_name, open_sink=Keep, snapshot_path=tmp_path / "snapshot"
    )
    end_s = time.monotonic() + WAIT_S
    while again.stats().records < 2 and time.monotonic() < end_s:
        again.step(0.5)
    assert again.sink.ids == ["e000000", "e000001", "e000002"]  # type: ignore[attr-defined]
    again.close()


@pytest.mark.apache_kafka
def test_an_offset_that_retention_took_is_reset_once_and_counted(
    open_log: Any, broker: Any, topic_name: str
) -> None:
    from kafka import KafkaAdminClient, TopicPartition

    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=1))
    log.append(topic_name, b"k", [b"%d" % i for i in range(10)])
    consumer = log.consumer(topic_name, topic_name)
    assert len(read(consumer, 10)) == 10
    consumer.commit({0: 2})
    consumer.close()
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    admin.delete_records({TopicPartition(topic_name, 0): 6})
    admin.close()
    consumer = log.consumer(topic_name, topic_name)
    assert [record.offset for record in read(consumer, 4)] == [6, 7, 8, 9]
    assert consumer.resets == 1
    assert consumer.poll(10, 0.5) == []
    assert consumer.resets == 1
    consumer.close()


@pytest.mark.apache_kafka
def test_partitions_move_to_a_second_member_with_their_offsets(
    open_log: Any, topic_name: str
) -> None:
    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=4))
    log.append_batch(topic_name, [(b"k%d" % i, b"%d" % i) for i in range(80)])
    first_moves, second_moves = Moves(), Moves()
    first = log.consumer(topic_name, topic_name, listener=first_moves)
    records = read(first, 80)
    assert len(records) == 80
    for record in records:
        first_moves.at[record.partition] = record.offset + 1
    second = log.consumer(topic_name, topic_name, listener=second_moves)
    end_s = time.monotonic() + WAIT_S
    while len(second_moves.assigned) < 2 and time.monotonic() < end_s:
        assert first.poll(100, 0.05) == []
        assert second.poll(100, 0.05) == []  # committed when they were given up: nothing twice
    assert len(first.assignment()) == len(second.assignment()) == 2
    assert first.assignment() | second.assignment() == {0, 1, 2, 3}
    assert not first_moves.lost
    # A commit of the first member for what it gave away is refused.
    with pytest.raises(PartitionLost):
        first.commit({next(iter(second.assignment())): 1})
    second.close()
    end_s = time.monotonic() + WAIT_S
    while len(first.assignment()) < 4 and time.monotonic() < end_s:
        first.poll(100, 0.05)
    assert len(first.assignment()) == 4
    first.close()


@pytest.mark.apache_kafka
def test_two_processes_share_the_partitions_and_miss_nothing(
    open_log: Any, broker: Any, topic_name: str, request: pytest.FixtureRequest
) -> None:
    log = open_log()
    log.ensure_topic(TopicSpec(topic_name, partition_count=6))
    total = 3_000
    log.append_batch(topic_name, [(b"k%d" % (i % 50), encode(used(i))) for i in range(total // 2)])
    script = Path(__file__).with_name("kafka_member.py")
    client = request.node.callspec.params["open_log"]
    children = [
        subprocess.Popen(
            [sys.executable, str(script), client, broker.bootstrap, topic_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for child in children:  # both hold partitions before the second half is written
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        log.append_batch(
            topic_name, [(b"k%d" % (i % 50), encode(used(i))) for i in range(total // 2, total)]
        )
        seen: list[str] = []
        shares = []
        for child in children:
            out, _ = child.communicate("stop\n", timeout=60)
            ids = orjson.loads(out)
            shares.append(len(ids))
            seen += ids
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    assert sorted(set(seen)) == [f"e{i:06d}" for i in range(total)]
    assert len(seen) == total, "an event was applied by both members"
    assert min(shares) > 0


# kafka-python leaves the sockets of failed connections to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.apache_kafka  # noida-db can lose the last 0.3 s of writes when it is killed
def test_nothing_acknowledged_is_lost_when_the_broker_dies(
    open_log: Any,
    restartable: Any,
    topic_name: str,
    tmp_path: Path,
    request: Any,
    closing: contextlib.ExitStack,
) -> None:
    """Down at the start, killed in the middle, back again; offers never wait, nor does a reader."""
    target = open_log(connect_timeout_s=1.0, request_timeout_s=2.0, delivery_timeout_s=3.0)
    down_at_start = request.node.callspec.params["open_log"] == "kafka-python"  # once is enough
    if down_at_start:
        restartable.stop()
        with pytest.raises(LogUnavailable):
            target.check_health()
    log = SpooledLog(target, EmbeddedLog(tmp_path / "spool"), backoff_s_max=0.2)
    closing.callback(log.close)
    log.ensure_topic(TopicSpec(topic_name, partition_count=2))
    publisher = Publisher(log, topic=topic_name)
    closing.callback(publisher.close)
    publisher.publish([used(i, f"s{i % 7}") for i in range(100)])  # taken without a broker
    for i in range(100, 200):  # written in the background, so in sessions of their own
        assert publisher.offer(used(i, f"o{i % 7}"))
    with structlog.testing.capture_logs() as lines:
        if down_at_start:
            restartable.start()
        publisher.publish([used(i, f"s{i % 7}") for i in range(200, 300)])
        loop = ConsumeLoop(log, topic_name, topic_name, open_sink=Keep, snapshot_path=None)
        closing.callback(loop.close)
        wait_until(lambda: step(loop) and loop.stats().events == 300)
        restartable.kill()
        publisher.publish([used(i, f"s{i % 7}") for i in range(300, 400)])
        for _ in range(3):
            step(loop)
        restartable.start()
        publisher.publish([used(i, f"s{i % 7}") for i in range(400, 500)])
        wait_until(lambda: step(loop) and loop.stats().events == 500)
    ids = loop.sink.ids  # type: ignore[attr-defined]
    assert sorted(ids) == [f"e{i:06d}" for i in range(500)]
    for session in range(7):  # and in order, session by session
        for offered in (False, True):
            own = [e for e in ids if int(e[1:]) % 7 == session and (e[4] == "1") == offered]
            assert own == sorted(own)
    wait_until(lambda: log.waiting(topic_name) == 0)
    # Once per outage and cause (nobody listens, nobody answers), however many tries there were.
    lost = [line for line in lines if line["event"] == "service.broker_lost"]
    assert len(lost) <= 4, lost


def test_a_topic_made_a_moment_ago_is_waited_for(
    open_log: Any, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another replica, say: a member that joins before the brokers know it reads nothing."""
    open_log().ensure_topic(TopicSpec(topic_name, partition_count=3))
    log = open_log()
    log.check_health()
    admin = log._admin_client()
    name = "describe_topics" if hasattr(admin, "wait_for_topics") else "list_topics"
    look, asked = getattr(admin, name), []

    def knows_it_the_third_time(*args: Any, **options: Any) -> Any:
        asked.append(name)
        if len(asked) < 3:
            nowhere = topic_name + ".unknown"
            return look([nowhere]) if name == "describe_topics" else look(nowhere, **options)
        return look(*args, **options)

    monkeypatch.setattr(admin, name, knows_it_the_third_time)
    log.ensure_topic(TopicSpec(topic_name, partition_count=3))
    assert len(asked) == 3


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.apache_kafka
def test_a_log_lets_go_of_a_broker_that_hangs(
    open_log: Any, restartable: Any, topic_name: str
) -> None:
    """With an append in flight, and requests that may take minutes: closing has seconds."""
    log = open_log(request_timeout_s=300.0, delivery_timeout_s=400.0)
    log.ensure_topic(TopicSpec(topic_name))
    log.append(topic_name, b"k", [b"before"])
    restartable.pause()
    inside = threading.Event()
    client = log._producer_client
    log._producer_client = lambda: (client(), inside.set())[0]

    def append() -> None:
        with contextlib.suppress(LogUnavailable):
            log.append(topic_name, b"k", [b"in flight"])

    appending, closing = threading.Thread(target=append), threading.Thread(target=log.close)
    appending.start()
    assert inside.wait(60)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    restartable.resume()
    appending.join(60)
    assert not appending.is_alive()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.apache_kafka
def test_a_broker_that_hangs_holds_up_nobody(
    open_log: Any, restartable: Any, topic_name: str, tmp_path: Path, closing: contextlib.ExitStack
) -> None:
    target = open_log(connect_timeout_s=1.0, request_timeout_s=2.0, delivery_timeout_s=3.0)
    log = SpooledLog(target, EmbeddedLog(tmp_path / "spool"), backoff_s_max=0.2)
    closing.callback(log.close)
    log.ensure_topic(TopicSpec(topic_name, partition_count=2))
    publisher = Publisher(log, topic=topic_name)
    closing.callback(publisher.close)
    publisher.publish([used(i) for i in range(50)])
    loop = ConsumeLoop(log, topic_name, topic_name, open_sink=Keep, snapshot_path=None)
    closing.callback(loop.close)
    wait_until(lambda: step(loop) and loop.stats().events == 50)
    restartable.pause()
    publisher.publish([used(i) for i in range(50, 100)])
    for i in range(100, 150):
        assert publisher.offer(used(i))
    step(loop)
    with pytest.raises(LogUnavailable):
        target.append(topic_name, b"k", [encode(used(50))])  # twice: counted once
    restartable.resume()
    wait_until(lambda: step(loop) and loop.stats().events == 150)
    assert sorted(loop.sink.ids) == [f"e{i:06d}" for i in range(150)]  # type: ignore[attr-defined]


def test_a_recording_is_replayed_through_kafka(
    broker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stoker.service.cli import main

    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(encode(used(i, f"s{i % 5}")) for i in range(200)))
    reports = []
    for flags in ([], ["--kafka", broker.bootstrap]):
        assert main(["replay", str(path), "--json", *flags]) == 0
        reports.append(orjson.loads(capsys.readouterr().out))
    assert reports[0]["events"] == reports[1]["events"] == 200
    assert reports[0]["state_sha256"] == reports[1]["state_sha256"]


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.apache_kafka
def test_a_login_over_tls_works_and_a_wrong_one_is_told(open_log: Any, secure_broker: Any) -> None:
    harness = sys.modules["kafka_broker"]
    secure = {
        "bootstrap": secure_broker.secure_bootstrap,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_username": harness.SECURE_USER,
        "sasl_password": harness.SECURE_PASSWORD,
        "tls_ca_file": str(secure_broker.ca_file),
    }
    log = open_log(**secure)
    log.check_health()
    with pytest.raises(LogUnavailable):
        open_log(**{**secure, "sasl_password": "wrong"}, connect_timeout_s=2.0).check_health()


def step(loop: ConsumeLoop) -> bool:
    """One turn, the broker being there or not."""
    with contextlib.suppress(LogUnavailable):
        loop.step(0.2)
    return True


def wait_until(condition: Any) -> None:
    """Look until it holds; each look itself waits on the broker or the spool."""
    end_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end_s, "not within 60 s"
        time.sleep(0.01)
