"""One member of a Kafka consumer group, as far as it is the same by either client.

Which partitions the owner reads and from where, what is said when they come and go, and which
commits are refused. `service.kafka_group` and `service.confluent_log` add what their client does.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence

import structlog

from stoker.service.kafka_options import KafkaOptions
from stoker.service.streams import LogUnavailable, PartitionLost, RebalanceListener, Record

log = structlog.get_logger(__name__)


class KafkaMember(abc.ABC):
    """The client-independent half of a `streams.Consumer`. Owned by one thread.

    Invariant: `_next` holds exactly the partitions whose records the owner gets, each with the next
    offset it will get, None where that is the oldest.
    """

    def __init__(
        self, options: KafkaOptions, topic: str, group: str, listener: RebalanceListener | None
    ) -> None:
        self._options = options
        self._topic = topic
        self._group = group
        self._listener = listener
        self._next: dict[int, int | None] = {}
        self._resets = 0
        # What a listener raised inside the client, which would swallow it or break by it.
        self._failure: Exception | None = None
        self._closed = False

    def poll(self, max_events: int, timeout_s: float) -> list[Record]:
        """Return up to `max_events` records; see `Consumer`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            records = self._read(max_events, max(0.0, deadline_s - time.monotonic()))
            if records or time.monotonic() >= deadline_s:
                return records

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Store the next offsets to read; see `Consumer`."""
        if not offsets:
            return
        strangers = sorted(set(offsets) - set(self._next))
        if strangers:
            raise self._partition_lost(
                f"partitions {strangers} belong to another member now; nothing was stored"
            )
        try:
            self._commit(offsets)
        except LogUnavailable as error:
            reason = self._fenced(error.__cause__)
            if reason is None:
                raise
            raise self._partition_lost(reason) from error

    def assignment(self) -> frozenset[int]:
        """Return the partitions that this member reads."""
        return frozenset(self._next)

    @property
    def resets(self) -> int:
        """How often an offset was out of range."""
        return self._resets

    @abc.abstractmethod
    def _read(self, max_events: int, timeout_s: float) -> list[Record]:
        """Look into the client once, waiting at most so long."""

    @abc.abstractmethod
    def _commit(self, offsets: Mapping[int, int]) -> None:
        """Have the client store offsets. Raises LogUnavailable with the client's error as cause."""

    @abc.abstractmethod
    def _fenced(self, cause: BaseException | None) -> str | None:
        """Return why a commit failed where another member has the partition by now, else None."""

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _starts(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        """Ask the listener where new partitions start, and take them into `_next`."""
        starts: Mapping[int, int | None] = {}
        if self._listener is not None:
            starts = self._listener.partitions_assigned(committed)
        taken = {partition: starts.get(partition, at) for partition, at in committed.items()}
        self._next.update(taken)
        return taken

    def _count_reset(self, partition: int, wanted_offset: int | None) -> None:
        """Note that retention has taken an offset; reading goes on at the oldest record."""
        self._resets += 1
        self._next[partition] = None
        log.warning(
            "service.offset_reset",
            topic=self._topic,
            group=self._group,
            partition=partition,
            wanted_offset=wanted_offset,
            resets=self._resets,
        )

    def _forget(self, partitions: Sequence[int]) -> None:
        """Take note of partitions that are gone without a word, and tell the listener."""
        for partition in partitions:
            del self._next[partition]
        log.warning(
            "service.partitions_lost",
            topic=self._topic,
            group=self._group,
            partitions=list(partitions),
            lease_s=self._options.session_timeout_s,
        )
        if self._listener is not None:
            self._listener.partitions_lost(partitions)

    def _say_assigned(self, partitions: Sequence[int]) -> None:
        log.info(
            "service.partitions_assigned",
            topic=self._topic,
            group=self._group,
            partitions=list(partitions),
        )

    def _say_released(self, partitions: Sequence[int]) -> None:
        log.info(
            "service.partitions_released",
            topic=self._topic,
            group=self._group,
            partitions=list(partitions),
        )

    def _say_uncommitted(self, reason: str) -> None:
        log.warning(
            "service.release_uncommitted", topic=self._topic, group=self._group, reason=reason
        )

    def _partition_lost(self, reason: str) -> PartitionLost:
        return PartitionLost(f"commit for topic {self._topic}, group {self._group}: {reason}")
