"""The event log on Apache Kafka, by `kafka-python`.

What the client does, and how it is met here and in `service.kafka_group`, `service.kafka_client`:

* A deserialiser that raises makes `poll` spin for ever: we take raw bytes, and decode ourselves.
* It has no bound on the producer's memory: an append hands over one bounded batch and waits for it.
* After a delivery fails, an idempotent producer may be left unusable: it is made anew. One whose
  deliveries neither succeed nor fail keeps its thread: it is told to let go.
* `describe_cluster` fails on some brokers: listing topics is the health check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import kafka.errors
import structlog
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.structs import TopicPartition

from stoker.errors import InputError
from stoker.service.kafka_client import made, quieten, translated
from stoker.service.kafka_group import KafkaGroupConsumer
from stoker.service.kafka_options import LINGER_S, KafkaOptions, check_cleanup_policy
from stoker.service.streams import (
    CLOSE_S,
    Consumer,
    RebalanceListener,
    TopicSpec,
    check_record_sizes,
)

log = structlog.get_logger(__name__)


class KafkaLog:
    """A Kafka cluster as an `EventLog`. Connects when first used: a start needs no broker."""

    def __init__(self, options: KafkaOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._producer: Any = None
        self._admin: Any = None
        self._offsets_reader: Any = None
        quieten()

    def ensure_topic(self, spec: TopicSpec) -> None:
        """Make the topic with its retention stated; one that is there is used as it is.

        Raises:
            ConfigError: it is there, but compaction differs from what is asked for.
            LogUnavailable: the cluster cannot be reached.
        """
        configs = self.options.topic_configs(spec_fields=dataclasses.asdict(spec))
        wanted = {
            spec.name: {
                "num_partitions": spec.partition_count,
                "replication_factor": self.options.replication_factor,
                "configs": configs,
            }
        }
        with translated("ensure_topic", self.options), self._lock:
            admin = self._admin_client()
            try:
                admin.create_topics(wanted, wait_for_metadata=True)
            except kafka.errors.TopicAlreadyExistsError:
                # Made a moment ago, by another replica or by a try of ours that was given up? A
                # member that joins before the brokers know of it reads nothing for a long while.
                admin.wait_for_topics(
                    [spec.name], timeout_ms=round(self.options.request_timeout_s * 1000)
                )
            else:
                log.info("service.topic_created", topic=spec.name, partitions=spec.partition_count)
                return
            resource = ConfigResource(ConfigResourceType.TOPIC, spec.name)
            described = admin.describe_configs([resource], config_filter="all")
            policy = described["topic"][spec.name]["cleanup.policy"]["value"]
        check_cleanup_policy(spec, policy)

    def append(self, topic: str, key: bytes, payloads: Sequence[bytes | None]) -> None:
        """Append records of one key; all in-sync replicas have them when it returns."""
        self.append_batch(topic, [(key, payload) for payload in payloads])

    def append_batch(self, topic: str, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Append (key, payload) pairs; all in-sync replicas have them when it returns."""
        check_record_sizes(
            topic, (value for _, value in entries), bytes_max=self.options.record_bytes_max
        )
        with translated("append", self.options):
            producer = self._producer_client()
            try:
                sent = [producer.send(topic, value=value, key=key) for key, value in entries]
                # A little longer than the client takes to give up, so that it gives up first.
                producer.flush(
                    timeout=self.options.delivery_timeout_s + self.options.request_timeout_s
                )
                for future in sent:
                    future.get(timeout=0)
            except BaseException:
                self._drop_producer(producer)
                raise

    def consumer(
        self,
        topic: str,
        group: str,
        *,
        listener: RebalanceListener | None = None,
        member: str | None = None,
    ) -> Consumer:
        """Join `group`; see `EventLog`."""
        if not group:
            raise InputError("consumer group: expected at least 1 character, found none")
        with translated("consumer", self.options):
            return KafkaGroupConsumer(self.options, topic, group, listener=listener, member=member)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return per partition (oldest, next) offset."""
        with translated("offsets", self.options), self._lock:
            if self._offsets_reader is None:
                self._offsets_reader = made(
                    KafkaConsumer,
                    **self.options.kafka_python(),
                    group_id=None,
                    enable_auto_commit=False,
                )
            reader = self._offsets_reader
            partitions = reader.partitions_for_topic(topic)
            if not partitions:
                raise InputError(f"Kafka at {self.options.bootstrap} has no topic {topic!r}")
            spans = [TopicPartition(topic, p) for p in sorted(partitions)]
            wait_ms = round(self.options.request_timeout_s * 1000)
            first = reader.beginning_offsets(spans, timeout_ms=wait_ms)
            last = reader.end_offsets(spans, timeout_ms=wait_ms)
        return {tp.partition: (first[tp], last[tp]) for tp in spans}

    def check_health(self) -> None:
        """List topics; raise LogUnavailable where the cluster does not answer."""
        with translated("check_health", self.options), self._lock:
            self._admin_client().list_topics()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver what is in flight and close the clients, all within the time."""
        end_s = time.monotonic() + timeout_s
        # Whoever is inside a client holds the lock: where the broker hangs, for longer than we may.
        ours = self._lock.acquire(timeout=timeout_s / 2)
        producer, self._producer = self._producer, None
        if ours:
            clients, self._admin, self._offsets_reader = (
                [self._admin, self._offsets_reader],
                None,
                None,
            )
            self._lock.release()
            for client in clients:
                if client is not None:
                    client.close()
        if producer is not None:
            left_s = max(0.0, end_s - time.monotonic())
            try:
                producer.close(timeout=left_s / 3)  # it takes that twice, to send and to end
            except kafka.errors.KafkaTimeoutError:
                self._let_go(producer, left_s / 3)

    def _admin_client(self) -> Any:
        if self._admin is None:
            self._admin = made(KafkaAdminClient, **self.options.kafka_python())
        return self._admin

    def _producer_client(self) -> Any:
        with self._lock:
            if self._producer is None:
                compression = self.options.compression
                self._producer = made(
                    KafkaProducer,
                    **self.options.kafka_python(),
                    acks="all",
                    enable_idempotence=True,
                    compression_type=None if compression == "none" else compression,
                    linger_ms=round(LINGER_S * 1000),
                    batch_size=256 << 10,
                    max_request_size=self.options.request_bytes_max,
                    max_block_ms=round(self.options.connect_timeout_s * 1000),
                    delivery_timeout_ms=round(self.options.delivery_timeout_s * 1000),
                    allow_auto_create_topics=False,
                )
            return self._producer

    def _drop_producer(self, producer: Any) -> None:
        with self._lock:
            if self._producer is producer:
                self._producer = None
        # What is still in its buffer was not acknowledged, and its caller will send it again.
        try:
            producer.close(timeout=0)
        except kafka.errors.KafkaTimeoutError:
            self._let_go(producer, self.options.request_timeout_s)

    def _let_go(self, producer: Any, timeout_s: float) -> None:
        """Tell the thread of a producer that neither delivers nor ends to drop what it has."""
        producer._sender.force_close()
        producer._sender.join(timeout_s)
        with contextlib.suppress(kafka.errors.KafkaTimeoutError):
            producer.close(timeout=0)
