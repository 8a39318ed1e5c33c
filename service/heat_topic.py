"""The heat in a compacted topic: one replica publishes, a new one starts from it in seconds.

Published is what the snapshot file holds: heat, ids seen and offsets as one, in parts by content
key (`prefetch.heat_parts`). A publication writes its parts beside those of the one before, then one
head that names them by checksum: a reader finds the old one whole or the new one. Keys carry the
publisher's name, so that two who both believe it is their turn never mix their parts.

Whose turn it is says a consumer group of the topic's one partition. Who takes over removes what
others had published, once its own head stands.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from stoker.errors import CorruptError
from stoker.prefetch.heat_parts import join_heat, read_head, split_heat
from stoker.service.event_ids import ids_bytes
from stoker.service.rounds import Rounds, is_fault
from stoker.service.snapshot_file import read_snapshot
from stoker.service.streams import (
    Consumer,
    EventLog,
    LogFull,
    LogUnavailable,
    Record,
    TopicSpec,
)

log = structlog.get_logger(__name__)

HEAT_TOPIC: Final = "stoker.heat.v1"
_RECORD_BYTES_MAX: Final = 8 << 20
_APPEND_BYTES: Final = 4 << 20  # handed to the log at once
_POLL_RECORDS: Final = 64
_WAIT_S: Final = 1.0
_RETRY_S: Final = 30.0


def heat_topic_spec(name: str) -> TopicSpec:
    """Describe the topic: compacted, one partition, so that a head comes after its parts."""
    return TopicSpec(
        name,
        partition_count=1,
        retention_s=86_400.0,  # how long the mark of a removed record stays
        retention_bytes=None,
        compacted=True,
        record_bytes_max=_RECORD_BYTES_MAX,
    )


class HeatPublisher:
    """Publishes this replica's snapshot while it is its turn. One thread, or `step` by the caller.

    Invariant: the parts that the newest head of ours names are whole in the topic.
    """

    def __init__(
        self,
        event_log: EventLog,
        *,
        topic: str,
        publisher: str,
        snapshot_path: Path,
        every_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up; nothing is read or written yet.

        Args:
            publisher: This replica's name; unlike any other's, the same after a restart.
            every_s: Seconds from one publication to the next, if anything was read in between.
        """
        self._log = event_log
        self._topic = topic
        self._publisher = publisher
        self._snapshot_path = snapshot_path
        self._every_s = every_s
        self._monotonic = monotonic
        self._consumer: Consumer | None = None
        self._held: frozenset[int] = frozenset()
        self._others: set[bytes] = set()
        self._slot = 0
        self._offsets: Any = None
        self._looked_at: tuple[int, int, int] | None = None
        self._due_s = monotonic()
        self._rounds = Rounds(
            lambda: self.step(_WAIT_S),
            name="heat topic",
            every_s=0.0,
            retry_s=_RETRY_S,
            failed=self._failed,
            ended=self._leave,
        )

    def start(self) -> None:
        """Publish from now on, in a thread."""
        self._rounds.start()

    def stop(self, timeout_s: float) -> None:
        """Stop, and let another replica take over."""
        self._rounds.stop(timeout_s)

    def step(self, wait_s: float) -> bool:
        """Do one turn, waiting at most `wait_s` for records; returns whether it published.

        Raises:
            LogUnavailable: the log is away; call again later.
            CorruptError: the snapshot file is damaged.
        """
        if self._consumer is None:
            self._log.ensure_topic(heat_topic_spec(self._topic))
            self._consumer = self._log.consumer(
                self._topic, f"{self._topic}.publisher", listener=self
            )
        records = self._consumer.poll(_POLL_RECORDS, wait_s)
        for record in records:
            self._note(record)
        if not self._held or records or any(self._consumer.lag().values()):
            return False  # not our turn, or what is there is not known yet
        if self._monotonic() < self._due_s:
            return False
        stamp = _stamp(self._snapshot_path)
        if stamp is None or stamp == self._looked_at:
            return False  # a snapshot may be large: the same one is not read every second
        found = read_snapshot(self._snapshot_path)
        if found is None:
            return False
        news = bool(found[0]["offsets"] != self._offsets)
        if news:
            self._publish(*found)
            self._due_s = self._monotonic() + self._every_s
        self._looked_at = stamp
        return news

    def close(self) -> None:
        """Leave the group."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        """Begin a turn: look at all there is first; called by the consumer."""
        self._held |= committed.keys()
        self._others.clear()
        self._looked_at = None
        return dict.fromkeys(committed)

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """End the turn; called by the consumer."""
        self._held -= set(partitions)
        return {}

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        """End the turn; called by the consumer."""
        self._held -= set(partitions)

    def _note(self, record: Record) -> None:
        if record.key == _head_key(self._publisher):
            try:
                about = _about(record.value or b"")
            except CorruptError:
                return  # of another version: ours comes beside it
            self._slot, self._offsets = about["slot"], about["offsets"]
        elif not record.key.startswith(f"{self._publisher}/".encode()):
            if record.value is None:
                self._others.discard(record.key)
            else:
                self._others.add(record.key)

    def _publish(self, header: Mapping[str, Any], body: bytes) -> None:
        began_s = self._monotonic()
        slot = 1 - self._slot
        about = {
            "topic": header["topic"],
            "offsets": header["offsets"],
            "time_s": header["time_s"],
            "slot": slot,
        }
        head, parts = split_heat(body, ids_bytes(header["seen"], named_s=header["time_s"]), about)
        entries: list[tuple[bytes, bytes | None]] = []
        size = 0
        for part, data in parts.items():
            entries.append((_part_key(self._publisher, slot, part), data))
            size += len(data)
            if size >= _APPEND_BYTES:
                self._log.append_batch(self._topic, entries)
                entries, size = [], 0
        if entries:
            self._log.append_batch(self._topic, entries)
        self._log.append(self._topic, _head_key(self._publisher), [head])
        self._slot, self._offsets = slot, header["offsets"]
        if self._others:
            self._log.append_batch(self._topic, [(key, None) for key in sorted(self._others)])
            self._others.clear()
        log.info(
            "service.heat_published",
            topic=self._topic,
            parts=len(parts),
            bytes=len(head) + sum(map(len, parts.values())),
            seconds=round(self._monotonic() - began_s, 3),
        )

    def _failed(self, error: Exception, again: bool) -> None:
        # The heat itself goes on; only new replicas start from an older one.
        if not again:
            log.warning(
                "service.heat_publishing_failed",
                topic=self._topic,
                reason=str(error),
                exc_info=is_fault(error),
            )

    def _leave(self) -> None:
        try:
            self.close()
        except (LogUnavailable, LogFull) as error:
            self._failed(error, again=False)


def read_heat(
    event_log: EventLog,
    topic: str,
    *,
    event_topic: str,
    besides: Collection[str] = (),
    timeout_s: float = 60.0,
    monotonic: Callable[[], float] = time.monotonic,
) -> tuple[dict[str, Any], bytes] | None:
    """Read the newest whole publication as a snapshot's header and body; None where there is none.

    Args:
        event_topic: Publications of other topics' heat are passed over.
        besides: Publishers that are passed over; a header names its own as `group`.
        timeout_s: Longest that reading may take.

    Raises:
        LogUnavailable: the log is away, or not read within `timeout_s`.
    """
    event_log.ensure_topic(heat_topic_spec(topic))
    oldest, following = event_log.offsets(topic)[0]
    if oldest == following:
        return None
    records = _read_to(event_log, topic, following, monotonic() + timeout_s, monotonic)
    heads: list[tuple[int, float, bytes, dict[str, Any]]] = []
    for key, value in records.items():
        if not key.endswith(_HEAD_SUFFIX):
            continue
        try:
            about = _about(value)
        except CorruptError as error:
            log.warning("service.heat_topic_unusable", topic=topic, reason=str(error))
            continue
        if about["topic"] == event_topic:
            reached = sum(int(at) for _, at in about["offsets"])
            heads.append((reached, float(about["time_s"]), key, about))
    for _, _, key, about in sorted(heads, key=lambda head: head[:3], reverse=True):
        try:
            publisher = key.removesuffix(_HEAD_SUFFIX).decode()
            if publisher in besides:
                continue
            _, digests = read_head(records[key])
            parts = {
                part: records[name]
                for part in digests
                if (name := _part_key(publisher, about["slot"], part)) in records
            }
            body, seen = join_heat(records[key], parts)
        except (CorruptError, UnicodeDecodeError) as error:
            log.warning("service.heat_topic_unusable", topic=topic, reason=str(error))
            continue
        header = {
            "topic": about["topic"],
            "group": publisher,
            "offsets": about["offsets"],
            "seen": seen,
            "time_s": about["time_s"],
        }
        return header, body
    return None


class _FromOldest:
    """A listener that starts every partition at its oldest record and commits nothing."""

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        return dict.fromkeys(committed)

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return {}

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        return None


def _read_to(
    event_log: EventLog,
    topic: str,
    following: int,
    deadline_s: float,
    monotonic: Callable[[], float],
) -> dict[bytes, bytes]:
    """Return the newest value of each key below the offset; removed keys are left out."""
    found: dict[bytes, bytes] = {}
    # A group of our own, of which nothing stays: readers do not share the work.
    consumer = event_log.consumer(topic, f"stoker-heat-{uuid.uuid4().hex}", listener=_FromOldest())
    try:
        while True:
            records = consumer.poll(_POLL_RECORDS, 0.2)
            for record in records:
                if record.value is None:
                    found.pop(record.key, None)
                else:
                    found[record.key] = record.value
            if records and records[-1].offset + 1 >= following:
                return found
            # Compaction may have taken the last records below the offset.
            if not records and consumer.assignment() and not any(consumer.lag().values()):
                return found
            if monotonic() >= deadline_s:
                raise LogUnavailable(
                    f"heat topic {topic}: not read up to offset {following} in the time given"
                )
    finally:
        consumer.close()


_HEAD_SUFFIX: Final = b"/head"


def _about(head: bytes) -> dict[str, Any]:
    """Return what a head says of its publication.

    Raises:
        CorruptError: it is damaged, of another version, or does not say it.
    """
    about, _ = read_head(head)
    try:
        offsets = [[int(partition), int(at)] for partition, at in about["offsets"]]
        told = {
            "topic": str(about["topic"]),
            "offsets": offsets,
            "time_s": float(about["time_s"]),
            "slot": int(about["slot"]),
        }
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptError(f"heat head does not say what it is of: {error!r}") from error
    if any(partition < 0 or at < 0 for partition, at in offsets) or told["slot"] not in (0, 1):
        raise CorruptError(f"heat head names offsets {offsets} and slot {told['slot']}")
    return told


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what tells one snapshot from the next, which is always a new file; None without."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _head_key(publisher: str) -> bytes:
    return publisher.encode() + _HEAD_SUFFIX


def _part_key(publisher: str, slot: int, part: int) -> bytes:
    return f"{publisher}/{slot}/{part:03d}".encode()
