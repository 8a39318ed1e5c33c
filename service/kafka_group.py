"""Consumer groups on Kafka, by `kafka-python`: one member, and how its two threads keep apart.

The client's input and output run in a thread of its own, and so do rebalance listeners, possibly
while the owner works on what `poll` returned. A lock is given up only while the owner is inside the
client, so the listener and the owner never run at once; records that came with a revoked partition
are dropped. A listener that waits for the lock holds up the client's thread, so the owner never
calls the client with the lock in hand. Committing in a synchronous listener raises: ours is
asynchronous and awaits the commit.

A join goes on between polls, but the client may forget it: one that it began because the topic's
partitions changed counts as done once the leader has assigned, so that a poll which ends before the
broker has answered leaves the member without partitions for good. We ask for it again, of the
client's coordinator: no public call tells whether a join is under way, or asks for another one.

Where retention has taken an offset, the client would silently jump: the policy is "none", and we
reset to the oldest record ourselves, counted and logged once.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import kafka.errors
from kafka import KafkaConsumer
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.structs import OffsetAndMetadata, TopicPartition

from stoker.errors import ConfigError
from stoker.service.kafka_client import FENCED, made, translated
from stoker.service.kafka_member import KafkaMember
from stoker.service.kafka_options import OTHER_CLIENT, KafkaOptions
from stoker.service.streams import RebalanceListener, Record

_FETCH_BYTES: Final = 8 << 20
# What a poll gives a join at least: an answer that comes between two polls is asked for anew.
_JOIN_POLL_S: Final = 0.1
_JOIN_CALLS: Final = ("stable", "rebalance_in_progress", "request_rejoin")
# By name: type checkers bring stubs of an older client, which lack some of it.
_kafka: Any = importlib.import_module("kafka")
_AsyncListener: Any = _kafka.AsyncConsumerRebalanceListener


class Joins(Protocol):
    """What a client's coordinator knows of the joins of its member."""

    def stable(self) -> bool: ...
    def rebalance_in_progress(self) -> bool: ...
    def request_rejoin(self) -> None: ...


def joins_of(client: Any) -> Joins:
    """Return who knows of a client's joins.

    Raises:
        ConfigError: nobody in this version of the client; without, a member might be left without
            partitions for good, and nobody would see it.
    """
    coordinator: Joins | None = getattr(client, "_coordinator", None)
    missing = [name for name in _JOIN_CALLS if not callable(getattr(coordinator, name, None))]
    if coordinator is None or missing:
        raise ConfigError(
            f"kafka-python {_kafka.__version__} does not tell of its joins "
            f"({', '.join(missing)}): {OTHER_CLIENT}"
        )
    return coordinator


class KafkaGroupConsumer(KafkaMember):
    """One member of a consumer group; see `Consumer`. Owned by one thread."""

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
        self._gained: set[int] = set()
        self._revoked_in_poll: set[int] = set()
        # Revoked while the owner was busy for too long to be asked; it learns in its next turn.
        self._lost_unheard: set[int] = set()
        # Held by the owner except inside the client.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._turn_wait_s = options.session_timeout_s / 3
        self._sets_lock = threading.Lock()
        session_ms = round(options.session_timeout_s * 1000)
        self._client = made(
            KafkaConsumer,
            **options.kafka_python(),
            group_id=group,
            group_instance_id=member,
            enable_auto_commit=False,
            auto_offset_reset="none",
            allow_auto_create_topics=False,
            partition_assignment_strategy=[CooperativeStickyAssignor],
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=max(100, session_ms // 5),
            max_poll_interval_ms=round(options.poll_interval_s_max * 1000),
            fetch_max_bytes=max(32 << 20, options.request_bytes_max),
            max_partition_fetch_bytes=max(_FETCH_BYTES, options.request_bytes_max),
            fetch_max_wait_ms=100,
        )
        try:
            self._joins = joins_of(self._client)
            self._client.subscribe([topic], listener=_Listener(self))
        except BaseException:
            self._client.close(autocommit=False, timeout_ms=0)
            raise

    def lag(self) -> dict[int, int]:
        """Return per partition the records still to be read, by the broker's last answer."""
        lags: dict[int, int] = {}
        unknown = []
        for partition, at in self._next.items():
            mark = self._client.highwater(TopicPartition(self._topic, partition))
            if mark is None or at is None:
                unknown.append(TopicPartition(self._topic, partition))
            else:
                lags[partition] = max(0, mark - at)
        if unknown:
            wait_ms = round(self._options.request_timeout_s * 1000)
            with translated("lag", self._options), self._inside_client():
                ends = self._client.end_offsets(unknown, timeout_ms=wait_ms)
                oldest = self._client.beginning_offsets(unknown, timeout_ms=wait_ms)
            for tp in unknown:
                at = self._next.get(tp.partition)
                lags[tp.partition] = max(0, ends[tp] - (oldest[tp] if at is None else at))
        return lags

    def close(self) -> None:
        """Give the partitions back and leave the group."""
        if self._closed:
            return
        self._closed = True
        with self._inside_client():
            self._client.close(
                autocommit=False, timeout_ms=round(self._options.request_timeout_s * 1000)
            )

    def _read(self, max_events: int, timeout_s: float) -> list[Record]:
        with translated("poll", self._options):
            self._note_unheard()
            batches = self._poll_client(max_events, timeout_s)
            self._raise_failure()
            records = self._accept(batches)
            if self._gained:
                self._take_gained()
        return records

    def _commit(self, offsets: Mapping[int, int]) -> None:
        with translated("commit", self._options), self._inside_client():
            self._client.commit(
                self._spelled(offsets), timeout_ms=round(self._options.request_timeout_s * 1000)
            )

    def _fenced(self, cause: BaseException | None) -> str | None:
        return str(cause) if isinstance(cause, FENCED) else None

    def _poll_client(self, max_events: int, timeout_s: float) -> Mapping[Any, Sequence[Any]]:
        self._revoked_in_poll.clear()
        if not self._joins.stable():
            timeout_s = max(timeout_s, _JOIN_POLL_S)
            if self._joins.rebalance_in_progress():  # an earlier poll has left it unfinished
                self._joins.request_rejoin()
        try:
            with self._inside_client():
                polled: Mapping[Any, Sequence[Any]] = self._client.poll(
                    timeout_ms=round(timeout_s * 1000), max_records=max_events
                )
        except kafka.errors.OffsetOutOfRangeError as error:
            self._reset(error.args[0] if error.args else {})
            return {}
        except kafka.errors.NoOffsetForPartitionError:
            # New partitions without a committed offset; the owner's listener says where they start.
            return {}
        return polled

    @contextmanager
    def _inside_client(self) -> Iterator[None]:
        """Let listeners run while the owner waits in the client."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def _accept(self, batches: Mapping[Any, Sequence[Any]]) -> list[Record]:
        topic = self._topic
        records: list[Record] = []
        for tp, batch in batches.items():
            partition = tp.partition
            if partition not in self._next:
                continue
            least = self._next[partition]
            if partition in self._revoked_in_poll:
                # It went and came back within one poll: which of the two the batch belongs to
                # cannot be told, so it is read again.
                self._seek(partition, least)
                continue
            for r in batch:
                if least is None or r.offset >= least:
                    records.append(
                        Record(topic, partition, r.offset, r.key or b"", r.value, r.timestamp / 1e3)
                    )
            if batch:
                self._next[partition] = batch[-1].offset + 1
        return records

    def _take_gained(self) -> None:
        wait_ms = round(self._options.request_timeout_s * 1000)
        with self._sets_lock:
            asked = sorted(self._gained)
        with self._inside_client():
            found = {
                partition: self._client.committed(
                    TopicPartition(self._topic, partition), timeout_ms=wait_ms
                )
                for partition in asked
            }
        with self._sets_lock:  # some may have been revoked while we asked
            committed = {p: offset for p, offset in found.items() if p in self._gained}
            self._gained.difference_update(committed)
        if not committed:
            return
        for partition, start in self._starts(committed).items():
            self._seek(partition, start)
        self._say_assigned(sorted(committed))

    def _seek(self, partition: int, offset: int | None) -> None:
        tp = TopicPartition(self._topic, partition)
        if tp not in self._client.assignment():
            return  # revoked since; the listener has told, or is about to
        if offset is None:
            self._client.seek_to_beginning(tp)
        else:
            self._client.seek(tp, offset)

    def _reset(self, wanted: Mapping[Any, int]) -> None:
        for tp, offset in wanted.items():
            if tp.partition in self._next:
                self._count_reset(tp.partition, offset)
                self._seek(tp.partition, None)

    def _spelled(self, offsets: Mapping[int, int]) -> dict[Any, Any]:
        return {
            TopicPartition(self._topic, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in offsets.items()
        }

    async def _revoke(self, partitions: set[int]) -> None:
        """Run in the client's thread, between the owner's turns."""
        if not self._take_turn(partitions):
            return
        try:
            known = sorted(partitions & self._next.keys())
            offsets: Mapping[int, int] = {}
            try:
                if known and self._listener is not None:
                    offsets = self._listener.partitions_revoked(known)
            except Exception as error:
                self._failure = error
            finally:
                for partition in known:
                    del self._next[partition]
            if offsets:
                await self._client.commit_async(self._spelled(offsets))
            if known:
                self._say_released(known)
        except kafka.errors.KafkaError as error:
            self._say_uncommitted(str(error))
        finally:
            self._turn.release()

    async def _lose(self, partitions: set[int]) -> None:
        """Run in the client's thread, between the owner's turns."""
        if not self._take_turn(partitions):
            return
        try:
            known = sorted(partitions & self._next.keys())
            if known:
                self._forget(known)
        except Exception as error:
            self._failure = error
        finally:
            self._turn.release()

    def _gain(self, partitions: set[int]) -> None:
        """Run in the client's thread; the owner asks for offsets and seeks in its next turn."""
        with self._sets_lock:
            self._gained |= partitions

    def _take_turn(self, gone: set[int]) -> bool:
        """Take the lock in the client's thread; without it, leave word for the owner."""
        taken = self._turn.acquire(timeout=self._turn_wait_s)
        with self._sets_lock:
            self._gained -= gone
            if taken:
                self._revoked_in_poll |= gone
            else:
                self._lost_unheard |= gone
        return taken

    def _note_unheard(self) -> None:
        with self._sets_lock:
            gone, self._lost_unheard = self._lost_unheard, set()
        known = sorted(gone & self._next.keys())
        if known:
            self._forget(known)


class _Listener(_AsyncListener):  # type: ignore[misc]
    """Hands the client's rebalance events to the consumer, for its one topic."""

    def __init__(self, consumer: KafkaGroupConsumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: set[Any]) -> None:
        await self._consumer._revoke({tp.partition for tp in revoked})

    async def on_partitions_assigned(self, assigned: set[Any]) -> None:
        self._consumer._gain({tp.partition for tp in assigned})

    async def on_partitions_lost(self, lost: set[Any]) -> None:
        await self._consumer._lose({tp.partition for tp in lost})
