"""The event log on Apache Kafka, by `confluent-kafka` (librdkafka): an extra, for the rate.

Same protocol and same tests as `service.kafka_log`. What is different in the client: rebalance
callbacks come inside `consume`, in the owner's thread, so no lock is needed; keys are spread by
CRC-32 unless told otherwise, so we ask for Kafka's own murmur2, and one session's events stay in
one partition whichever client wrote them; `consume` waits for a full batch, so we ask for one
record first and then for what is there.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from stoker.errors import InputError
from stoker.service.kafka_member import KafkaMember
from stoker.service.kafka_options import LINGER_S, KafkaOptions, check_cleanup_policy
from stoker.service.streams import (
    CLOSE_S,
    LogUnavailable,
    MemberFenced,
    RebalanceListener,
    Record,
    RecordTooLarge,
    TopicSpec,
    check_record_sizes,
)

log = structlog.get_logger(__name__)

# Its type stubs leave out what this module re-exports.
_admin: Any = importlib.import_module("confluent_kafka.admin")

# librdkafka writes to stderr by itself unless it is given a logger; states are reported by us.
_SILENT: Final = logging.Logger("stoker.librdkafka", level=logging.CRITICAL + 1)
_FULL_WAIT_S: Final = 0.1


class ConfluentLog:
    """A Kafka cluster as an `EventLog`. Connects when first used: a start needs no broker."""

    def __init__(self, options: KafkaOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._producer: Any = None
        self._admin: Any = None

    def ensure_topic(self, spec: TopicSpec) -> None:
        """Make the topic with its retention stated; one that is there is used as it is.

        Raises:
            ConfigError: it is there, but compaction differs from what is asked for.
            LogUnavailable: the cluster cannot be reached.
        """
        configs = self.options.topic_configs(spec_fields=dataclasses.asdict(spec))
        topic = _admin.NewTopic(
            spec.name,
            num_partitions=spec.partition_count,
            replication_factor=self.options.replication_factor,
            config=configs,
        )
        wait_s = self.options.request_timeout_s
        with _translated("ensure_topic", self.options):
            admin = self._admin_client()
            try:
                admin.create_topics([topic], request_timeout=wait_s)[spec.name].result(wait_s)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
                # Perhaps made a moment ago, by another replica or by a try of ours given up.
                self._wait_for_leaders(admin, spec.name, at_least=1)
            else:
                self._wait_for_leaders(admin, spec.name, at_least=spec.partition_count)
                log.info("service.topic_created", topic=spec.name, partitions=spec.partition_count)
                return
            resource = _admin.ConfigResource(_admin.ResourceType.TOPIC, spec.name)
            described = admin.describe_configs([resource], request_timeout=wait_s)
            policy = described[resource].result(wait_s)["cleanup.policy"].value
        check_cleanup_policy(spec, policy)

    def _wait_for_leaders(self, admin: Any, name: str, *, at_least: int) -> None:
        """Wait until the brokers know a topic's partitions: they learn of it after it is made."""
        deadline_s = time.monotonic() + self.options.request_timeout_s
        while time.monotonic() < deadline_s:
            found = admin.list_topics(name, timeout=self.options.request_timeout_s)
            topic = found.topics.get(name)
            partitions = () if topic is None else topic.partitions.values()
            if len(partitions) >= at_least and all(p.leader >= 0 for p in partitions):
                return
            time.sleep(_FULL_WAIT_S)
        raise LogUnavailable(
            f"Kafka at {self.options.bootstrap}: topic {name} is there, but has no leaders yet"
        )

    def append(self, topic: str, key: bytes, payloads: Sequence[bytes | None]) -> None:
        """Append records of one key; all in-sync replicas have them when it returns."""
        self.append_batch(topic, [(key, payload) for payload in payloads])

    def append_batch(self, topic: str, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Append (key, payload) pairs; all in-sync replicas have them when it returns."""
        check_record_sizes(
            topic, (value for _, value in entries), bytes_max=self.options.record_bytes_max
        )
        delivery = _Delivery(len(entries))
        with _translated("append", self.options):
            producer = self._producer_client()
            deadline_s = time.monotonic() + self.options.delivery_timeout_s
            for key, value in entries:
                while True:
                    try:
                        producer.produce(topic, value=value, key=key, on_delivery=delivery.note)
                        break
                    except BufferError:  # the client's own bound; it empties as it delivers
                        producer.poll(_FULL_WAIT_S)
                        if time.monotonic() > deadline_s:
                            raise
            while not delivery.done() and time.monotonic() < deadline_s:
                producer.poll(0.05)
            if delivery.error is not None:
                raise KafkaException(delivery.error)
            if not delivery.done():
                raise LogUnavailable(
                    f"Kafka at {self.options.bootstrap}: append: not acknowledged within "
                    f"{self.options.delivery_timeout_s} s"
                )

    def consumer(
        self,
        topic: str,
        group: str,
        *,
        listener: RebalanceListener | None = None,
        member: str | None = None,
    ) -> ConfluentConsumer:
        """Join `group`; see `EventLog`."""
        if not group:
            raise InputError("consumer group: expected at least 1 character, found none")
        with _translated("consumer", self.options):
            return ConfluentConsumer(self.options, topic, group, listener=listener, member=member)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return per partition (oldest, next) offset."""
        wait_s = self.options.request_timeout_s
        with _translated("offsets", self.options):
            metadata = self._admin_client().list_topics(topic, timeout=wait_s)
            found = metadata.topics[topic]
            if found.error is not None or not found.partitions:
                raise InputError(f"Kafka at {self.options.bootstrap} has no topic {topic!r}")
            reader = Consumer(
                {**self.options.librdkafka(), "group.id": "stoker-offsets"}, logger=_SILENT
            )
            try:
                return {
                    partition: reader.get_watermark_offsets(
                        TopicPartition(topic, partition), timeout=wait_s
                    )
                    for partition in sorted(found.partitions)
                }
            finally:
                reader.close()

    def check_health(self) -> None:
        """List topics; raise LogUnavailable where the cluster does not answer."""
        with _translated("check_health", self.options):
            self._admin_client().list_topics(timeout=self.options.connect_timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver what is in flight, within the time."""
        with self._lock:  # nobody waits for a broker with it in hand
            producer, self._producer, self._admin = self._producer, None, None
        if producer is not None and producer.flush(timeout_s):
            producer.purge()  # else its end would wait for the brokers once more

    def _admin_client(self) -> Any:
        with self._lock:
            if self._admin is None:
                self._admin = _admin.AdminClient(self.options.librdkafka(), logger=_SILENT)
            return self._admin

    def _producer_client(self) -> Any:
        with self._lock:
            if self._producer is None:
                settings = {
                    **self.options.librdkafka(),
                    "acks": "all",
                    "enable.idempotence": True,
                    "compression.type": self.options.compression,
                    "linger.ms": round(LINGER_S * 1000),
                    "message.max.bytes": self.options.request_bytes_max,
                    "queue.buffering.max.kbytes": 128 << 10,
                    "message.timeout.ms": round(self.options.delivery_timeout_s * 1000),
                    "partitioner": "murmur2_random",
                }
                self._producer = Producer(settings, logger=_SILENT)
            return self._producer


class _Delivery:
    """Counts one append's acknowledgements; called by whichever thread polls the producer."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self.error: Any = None

    def note(self, error: Any, _message: Any) -> None:
        with self._lock:
            self._left -= 1
            if error is not None:
                self.error = error

    def done(self) -> bool:
        with self._lock:
            return self._left <= 0


class ConfluentConsumer(KafkaMember):
    """One member of a consumer group; see `streams.Consumer`. Owned by one thread."""

    def __init__(
        self,
        options: KafkaOptions,
        topic: str,
        group: str,
        *,
        listener: RebalanceListener | None = None,
        member: str | None = None,
    ) -> None:
        super().__init__(options, topic, group, listener)
        session_ms = round(options.session_timeout_s * 1000)
        settings = {
            **options.librdkafka(),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": max(100, session_ms // 5),
            "max.poll.interval.ms": max(session_ms, round(options.poll_interval_s_max * 1000)),
            "fetch.wait.max.ms": 100,
            "fetch.message.max.bytes": max(8 << 20, options.request_bytes_max),
            "fetch.max.bytes": max(32 << 20, options.request_bytes_max),
            # What the client holds ahead of us: bounded, or a slow owner would fill the memory.
            "queued.max.messages.kbytes": 64 << 10,
        }
        if member is not None:
            settings["group.instance.id"] = member
        self._fatal: Any = None
        self._client = Consumer(settings, logger=_SILENT)
        self._client.subscribe(
            [topic], on_assign=self._gain, on_revoke=self._revoke, on_lost=self._lose
        )

    def lag(self) -> dict[int, int]:
        """Return per partition the records still to be read."""
        lags = {}
        with _translated("lag", self._options):
            for partition, at in self._next.items():
                first, following = self._client.get_watermark_offsets(
                    TopicPartition(self._topic, partition),
                    timeout=self._options.request_timeout_s,
                )
                lags[partition] = max(0, following - (first if at is None else at))
        return lags

    def close(self) -> None:
        """Give the partitions back and leave the group."""
        if not self._closed:
            self._closed = True
            self._client.close()

    def _read(self, max_events: int, timeout_s: float) -> list[Record]:
        with _translated("poll", self._options, fatal=MemberFenced):
            if self._fatal is not None:  # the client says it once, and then returns nothing
                raise KafkaException(self._fatal)
            messages = self._client.consume(1, timeout_s)
            if messages and max_events > 1:
                messages += self._client.consume(max_events - 1, 0)
            self._raise_failure()
            return self._accept(messages)

    def _commit(self, offsets: Mapping[int, int]) -> None:
        with _translated("commit", self._options, fatal=MemberFenced):
            for tp in self._client.commit(offsets=self._spelled(offsets), asynchronous=False):
                if tp.error is not None:
                    raise KafkaException(tp.error)

    def _fenced(self, cause: BaseException | None) -> str | None:
        if isinstance(cause, KafkaException) and cause.args[0].code() in _FENCED:
            return str(cause.args[0].str())
        return None

    def _accept(self, messages: Sequence[Any]) -> list[Record]:
        records: list[Record] = []
        topic = self._topic
        following = self._next
        for message in messages:
            error = message.error()
            if error is not None:
                self._take_error(message, error)
                continue
            partition = message.partition()
            if partition not in following:
                continue
            offset = message.offset()
            following[partition] = offset + 1
            records.append(
                Record(
                    topic,
                    partition,
                    offset,
                    message.key() or b"",
                    message.value(),
                    message.timestamp()[1] / 1e3,
                )
            )
        return records

    def _take_error(self, message: Any, error: Any) -> None:
        code = error.code()
        if code == KafkaError._AUTO_OFFSET_RESET:
            partition = message.partition()
            if partition in self._next:
                self._count_reset(partition, self._next[partition])
                # Seeking is refused here: the client has stopped reading the partition.
                self._client.incremental_unassign([TopicPartition(self._topic, partition)])
                self._client.incremental_assign(
                    [TopicPartition(self._topic, partition, OFFSET_BEGINNING)]
                )
        elif code not in (KafkaError._PARTITION_EOF, KafkaError._TRANSPORT):
            if code in _FATAL:
                self._fatal = error
            raise KafkaException(error)

    def _gain(self, client: Any, partitions: Sequence[Any]) -> None:
        if not partitions:
            client.incremental_assign([])
            return
        try:
            stored = client.committed(list(partitions), timeout=self._options.request_timeout_s)
            starts = self._starts(
                {tp.partition: tp.offset if tp.offset >= 0 else None for tp in stored}
            )
        except Exception as error:
            self._failure = error
            return
        client.incremental_assign(
            [
                TopicPartition(self._topic, partition, OFFSET_BEGINNING if start is None else start)
                for partition, start in starts.items()
            ]
        )
        self._say_assigned(sorted(starts))

    def _revoke(self, client: Any, partitions: Sequence[Any]) -> None:
        known = sorted(tp.partition for tp in partitions if tp.partition in self._next)
        offsets: Mapping[int, int] = {}
        try:
            if known and self._listener is not None:
                offsets = self._listener.partitions_revoked(known)
            if offsets:
                client.commit(offsets=self._spelled(offsets), asynchronous=False)
        except KafkaException as error:
            self._say_uncommitted(error.args[0].str())
        except Exception as error:
            self._failure = error
        finally:
            for partition in known:
                del self._next[partition]
        client.incremental_unassign(list(partitions))
        self._say_released(known)

    def _lose(self, client: Any, partitions: Sequence[Any]) -> None:
        try:
            self._forget(sorted(tp.partition for tp in partitions if tp.partition in self._next))
        except Exception as error:
            self._failure = error
        client.incremental_unassign(list(partitions))

    def _spelled(self, offsets: Mapping[int, int]) -> list[Any]:
        return [
            TopicPartition(self._topic, partition, offset) for partition, offset in offsets.items()
        ]


_FENCED: Final = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError._STATE,
)
# A consumer in a classic group has one fatal error: another one joined by its instance's name.
_FATAL: Final = (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL)


@contextmanager
def _translated(
    action: str, options: KafkaOptions, *, fatal: type[LogUnavailable] = LogUnavailable
) -> Iterator[None]:
    """Turn the client's errors into ours, in one place; `fatal` is what ends the client."""
    try:
        yield
    except KafkaException as error:
        found = error.args[0]
        if found.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            raise RecordTooLarge(
                f"Kafka at {options.bootstrap}: {action}: {found.str()}"
            ) from error
        kind = fatal if found.code() in _FATAL else LogUnavailable
        raise kind(f"Kafka at {options.bootstrap}: {action}: {found.str()}") from error
    except (BufferError, TimeoutError) as error:
        detail = str(error) or type(error).__name__
        raise LogUnavailable(f"Kafka at {options.bootstrap}: {action}: {detail}") from error
