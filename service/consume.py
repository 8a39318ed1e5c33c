"""The one consumer loop: records to events to a sink, and state and offsets saved as one.

The same loop runs live (embedded log or Kafka) and in replay. Per turn: poll, decode the batch,
put out duplicates (`event_ids`), give the events to the sink. Every so many events or seconds:
write the dead letters that wait, then sink, ids and offsets into one snapshot file, then commit the
offsets. The snapshot is what counts; the commit only tells the group where another member would go
on.

After a crash at any point the sink is the last snapshot's, and reading goes on at that snapshot's
offsets, so each event is in the state once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError
from stoker.kernels._core import EventBatch
from stoker.prefetch.event_batch import decode_batch
from stoker.prefetch.events import EVENT_BYTES_MAX, Event, EventError, decode
from stoker.service.dead_letters import DeadLetters
from stoker.service.event_ids import ID_BYTES_MIN, NO_IDS, EventIds, IdsKept
from stoker.service.snapshot_file import read_snapshot, write_snapshot
from stoker.service.streams import (
    Consumer,
    EventLog,
    LogFull,
    LogUnavailable,
    MemberFenced,
    PartitionLost,
    Record,
)

log = structlog.get_logger(__name__)

_BACKOFF_S_MIN: Final = 0.1
_FENCED_S: Final = 300.0  # how often a member that was put out says so
_LAG_S: Final = 2.0  # how often a running loop asks how much is left


class Sink(Protocol):
    """What takes events. Applying the same events in the same order gives the same state."""

    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        """Take a batch, in order; `arrived_s` is when the log took each, Unix seconds."""
        ...

    def to_snapshot(self) -> bytes:
        """Write the whole state."""
        ...


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes events as columns: no object is made per event."""

    def apply_batch(
        self, batch: EventBatch, /, *, arrived_s: NDArray[np.float64] | None = None
    ) -> None:
        """Take a batch's ready rows, in order; `arrived_s` has one time per row."""
        ...


@runtime_checkable
class TextSink(Protocol):
    """A sink that may need the texts of queries, which columns do not have."""

    @property
    def reads_queries(self) -> bool:
        """Whether events must come whole, by `apply`."""
        ...


@dataclasses.dataclass(frozen=True)
class ConsumeOptions:
    """How the loop runs.

    Attributes:
        batch_events_max: Records in one poll.
        poll_s: How long a poll waits for the first record.
        snapshot_events: Events after which a snapshot is written.
        snapshot_s: Seconds after which a snapshot is written, if anything was read.
        dedup_bytes: What remembered event ids may take; 0 remembers none. See `event_ids`.
        dedup_s: Age by the log's time from which on a duplicate may count again.
        dedup_seed: Of a new state's fingerprints of ids; None draws one.
        event_bytes_max: Longest event taken; a longer one becomes a dead letter.
        shared: Whether members share one group's work and their states add up. Then a partition
            that comes to this member starts where the group left it. Otherwise it starts where
            this member's own state ends, or at the oldest record: its state covers all it reads.
        backoff_s_max: Longest wait between two tries while the log is away.
    """

    batch_events_max: int = 2_000
    poll_s: float = 0.5
    snapshot_events: int = 100_000
    snapshot_s: float = 30.0
    dedup_bytes: int = 64 << 20
    dedup_s: float = 86_400.0
    dedup_seed: int | None = None
    event_bytes_max: int = EVENT_BYTES_MAX
    shared: bool = False
    backoff_s_max: float = 5.0

    def __post_init__(self) -> None:
        names = ("batch_events_max", "snapshot_events", "snapshot_s", "event_bytes_max", "dedup_s")
        for key in names:
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key}: expected more than 0, found {getattr(self, key)}")
        if self.dedup_bytes and self.dedup_bytes < ID_BYTES_MIN:
            raise ConfigError(
                f"dedup_bytes: expected 0, or at least {ID_BYTES_MIN}, found {self.dedup_bytes}"
            )


@dataclasses.dataclass(frozen=True)
class ConsumeStats:
    """Counts since the loop was made, and where it stands.

    Attributes:
        records: Records read.
        events: Events applied to the sink.
        duplicates: Events dropped because their id had been seen.
        false_duplicates: How many of those were none, as far as is to be expected: see `event_ids`.
        ids: The event ids that are remembered.
        refused: Records that were no events, and became dead letters.
        snapshots: Snapshots written.
        resets: Offsets that retention had taken.
        lag: Records still to be read, in this member's partitions.
        lag_age_s: How old the oldest record still to be read may be: what was written up to so long
            ago has been read. Grows while the log is away, because nobody can say then what it
            holds; 0 while nothing is left.
    """

    records: int
    events: int
    duplicates: int
    refused: int
    snapshots: int
    resets: int
    lag: int
    lag_age_s: float
    false_duplicates: float = 0.0
    ids: IdsKept = NO_IDS


class ConsumeLoop:
    """One consumer of one topic with its sink. Owned by one thread; `stats` may be read by others.

    Invariant: while `_whole`, the sink holds exactly the events below `_offsets`, per partition,
    each id once (within the bounds of `event_ids`). A sink that raised in the middle of a batch is
    not whole, and nothing of it is saved any more: a new loop goes on from the last snapshot.
    """

    def __init__(
        self,
        event_log: EventLog,
        topic: str,
        group: str,
        *,
        open_sink: Callable[[bytes | None], Sink],
        snapshot_path: Path | None,
        dead_letters: DeadLetters | None = None,
        member: str | None = None,
        options: ConsumeOptions | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Restore the sink and its offsets; the group is joined by the first `step`.

        Args:
            open_sink: Makes the sink from a snapshot's bytes, or an empty one from None.
            snapshot_path: Where state and offsets are kept; None keeps them in memory only.
            dead_letters: Takes records that are no events; None only counts them.
            member: A name in the group that outlives the process; see `EventLog.consumer`.

        A damaged snapshot is moved aside, logged, and the state is rebuilt from the log.
        """
        self._log = event_log
        self._topic = topic
        self._group = group
        self._snapshot_path = snapshot_path
        self._dead_letters = dead_letters
        self._member = member
        self._options = ConsumeOptions() if options is None else options
        self._clock = clock
        self._monotonic = monotonic
        self._consumer: Consumer | None = None
        self._offsets: dict[int, int] = {}
        self._held: set[int] = set()
        self._seen = EventIds(
            bytes_max=self._options.dedup_bytes,
            age_s_max=self._options.dedup_s,
            seed=self._options.dedup_seed,
        )
        self._records = self._events = self._duplicates = self._refused = self._snapshots = 0
        self._unsaved = 0
        self._save_failed = False
        self._whole = True
        self._made_s = clock()
        self._last_time_s = 0.0  # when the last record read had been written
        self._level_s = 0.0  # when there was nothing left to read
        self._lag: dict[int, int] = {}
        self._away_since_s: float | None = None
        self._fenced_due_s: float | None = None
        self.sink: Sink = self._restore(open_sink)
        self._snapshot_due_s = monotonic() + self._options.snapshot_s

    def step(self, wait_s: float | None = None) -> int:
        """Do one turn; returns how many records were read.

        Raises:
            LogUnavailable, LogFull: the log is away, or has no room for a member's lease; call
                again later. Nothing is lost.
            MemberFenced: another process has joined the group by this member's name.
        """
        if self._consumer is None:
            self._consumer = self._log.consumer(
                self._topic, self._group, listener=self, member=self._member
            )
        options = self._options
        records = self._consumer.poll(
            options.batch_events_max, options.poll_s if wait_s is None else wait_s
        )
        if records:
            self._apply(records)
        now_s = self._monotonic()
        # After a failure only time brings the next try: a full disk must not cost every turn.
        enough = self._unsaved >= options.snapshot_events and not self._save_failed
        if self._unsaved and (enough or now_s >= self._snapshot_due_s):
            self.save()
        return len(records)

    def run(self, stop: threading.Event) -> None:
        """Turn until `stop` is set, outliving a log that is away or full; then save and leave."""
        backoff_s = _BACKOFF_S_MIN
        lag_due_s = self._monotonic()
        try:
            while not stop.is_set():
                try:
                    self.step()
                    if self._monotonic() >= lag_due_s:
                        lag_due_s = self._monotonic() + _LAG_S
                        self.measure_lag()
                except (LogUnavailable, LogFull) as error:  # a member's lease takes room too
                    first = self._away_since_s is None
                    if first:
                        self._away_since_s = self._monotonic()
                    if isinstance(error, MemberFenced):
                        self._say_fenced(error)
                    elif first:
                        log.warning(
                            "service.consuming_stopped", topic=self._topic, reason=str(error)
                        )
                    stop.wait(backoff_s)
                    backoff_s = min(backoff_s * 2, self._options.backoff_s_max)
                    continue
                backoff_s = _BACKOFF_S_MIN
                if self._away_since_s is not None:
                    away_s = self._monotonic() - self._away_since_s
                    self._away_since_s = None
                    log.info(
                        "service.consuming_resumed", topic=self._topic, away_s=round(away_s, 3)
                    )
        finally:
            self.close()

    def save(self) -> bool:
        """Write state and offsets as one, then commit; returns whether it was written.

        While dead letters wait for their log nothing is written: a refused record must not be
        passed over by an offset before its letter is safe.
        """
        if not self._write_snapshot():
            return False
        held = {p: at for p, at in self._offsets.items() if p in self._held}
        if self._consumer is not None and held:
            try:
                self._consumer.commit(held)
            except MemberFenced as error:
                self._say_fenced(error)
            except (PartitionLost, LogUnavailable, LogFull) as error:
                # The snapshot stands; the next one commits again, or the new owner goes on from
                # what was committed before.
                log.warning("service.commit_failed", topic=self._topic, reason=str(error))
        return True

    def _say_fenced(self, error: MemberFenced) -> None:
        now_s = self._monotonic()
        if self._fenced_due_s is not None and now_s < self._fenced_due_s:
            return
        self._fenced_due_s = now_s + _FENCED_S
        path = self._snapshot_path
        log.error(
            "service.replica_fenced",
            topic=self._topic,
            group=self._group,
            member=self._member,
            state_dir=None if path is None else str(path.parent),
            action="stop this server, delete the file `replica` in its state folder, start it",
            reason=str(error),
        )

    def stats(self) -> ConsumeStats:
        """Return the counts, and the lag as of the last turn."""
        lag = sum(self._lag.values())
        age_s = 0.0
        if lag or self._away_since_s is not None:
            reached_s = max(self._last_time_s, self._level_s) or self._made_s
            age_s = max(0.0, self._clock() - reached_s)
        return ConsumeStats(
            records=self._records,
            events=self._events,
            duplicates=self._duplicates,
            refused=self._refused,
            snapshots=self._snapshots,
            resets=self._consumer.resets if self._consumer is not None else 0,
            lag=lag,
            lag_age_s=age_s,
            false_duplicates=self._seen.false_expected,
            ids=self._seen.kept(),
        )

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions that this member reads now."""
        return frozenset(self._held)

    def measure_lag(self) -> bool:
        """Ask the log how many records are still to be read; owner's thread only.

        Returns:
            Whether the log has said.
        """
        if self._consumer is None:
            return False
        asked_s = self._clock()
        try:
            self._lag = self._consumer.lag()
        except LogUnavailable:
            return False
        if self._lag and not any(self._lag.values()):
            self._level_s = asked_s
        return True

    def close(self) -> None:
        """Save, give the partitions back and leave the group."""
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        # `partitions_revoked` saves and says what to commit.
        with contextlib.suppress(LogUnavailable, LogFull):
            consumer.close()

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        """Say where new partitions start; called by the consumer."""
        starts: dict[int, int | None] = {}
        for partition, stored in committed.items():
            own = self._offsets.get(partition)
            if not self._options.shared:
                starts[partition] = own
            elif own is None or stored is None:
                starts[partition] = stored if own is None else own
            else:
                # Another member may have gone on; what it read is in its state.
                starts[partition] = max(own, stored)
        self._held |= committed.keys()
        return starts

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """Save before partitions go; returns what is committed for them; called by the consumer."""
        saved = self._write_snapshot() if self._unsaved else self._whole
        self._held -= set(partitions)
        if not saved:
            return {}
        return {p: self._offsets[p] for p in partitions if p in self._offsets}

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        """Learn that partitions went without a word; called by the consumer."""
        self._held -= set(partitions)

    def _apply(self, records: Sequence[Record]) -> None:
        self._whole = False
        sink = self.sink
        whole = isinstance(sink, TextSink) and sink.reads_queries
        if isinstance(sink, BatchSink) and not whole:
            self._events += self._apply_columns(records, sink)
        else:
            self._events += self._apply_events(records)
        # Records of a partition come in order, so the last one of each says where it ends.
        for record in records:
            self._offsets[record.partition] = record.offset + 1
        self._whole = True
        self._records += len(records)
        self._unsaved += len(records)
        self._last_time_s = records[-1].time_s
        if self._dead_letters is not None:
            self._dead_letters.flush()

    def _apply_columns(self, records: Sequence[Record], sink: BatchSink) -> int:
        batch, refused = decode_batch(
            [record.value for record in records], bytes_max=self._options.event_bytes_max
        )
        for row, error in refused:
            self._refuse(records[row], error)
        arrived_s = np.fromiter((record.time_s for record in records), np.float64, len(records))
        self._duplicates += self._seen.pass_rows(batch, arrived_s)
        count = batch.ready_count
        if count:
            sink.apply_batch(batch, arrived_s=arrived_s)
        return count

    def _apply_events(self, records: Sequence[Record]) -> int:
        events: list[Event] = []
        arrived_s: list[float] = []
        for record in records:
            if record.value is None:
                continue
            try:
                event = decode(record.value, bytes_max=self._options.event_bytes_max)
            except EventError as error:
                self._refuse(record, error)
                continue
            if not self._seen.add(event.tenant, event.id, record.time_s):
                self._duplicates += 1
                continue
            events.append(event)
            arrived_s.append(record.time_s)
        if events:
            self.sink.apply(events, arrived_s=arrived_s)
        return len(events)

    def _refuse(self, record: Record, error: EventError) -> None:
        self._refused += 1
        if self._dead_letters is not None:
            assert record.value is not None
            self._dead_letters.put(record.value, error, origin=record)

    def _write_snapshot(self) -> bool:
        if not self._whole:
            return False
        if self._dead_letters is not None and not self._dead_letters.flush():
            return False
        if self._snapshot_path is not None:
            header: dict[str, Any] = {
                "topic": self._topic,
                "group": self._group,
                "offsets": [[p, at] for p, at in sorted(self._offsets.items())],
                "seen": self._seen.to_bytes(),
                "time_s": self._clock(),
            }
            try:
                write_snapshot(self._snapshot_path, header, self.sink.to_snapshot())
            except OSError as error:
                if not self._save_failed:
                    log.error(
                        "service.snapshot_failed", file=str(self._snapshot_path), reason=str(error)
                    )
                self._save_failed = True
                self._snapshot_due_s = self._monotonic() + self._options.snapshot_s
                return False
            self._snapshots += 1
        self._unsaved = 0
        self._save_failed = False
        self._snapshot_due_s = self._monotonic() + self._options.snapshot_s
        return True

    def _restore(self, open_sink: Callable[[bytes | None], Sink]) -> Sink:
        path = self._snapshot_path
        if path is None:
            return open_sink(None)
        try:
            found = read_snapshot(path)
            if found is None:
                return open_sink(None)
            header, body = found
            if header.get("topic") != self._topic:
                raise ConfigError(
                    f"{path}: expected a snapshot of topic {self._topic}, found one of "
                    f"{header.get('topic')}; give each topic its own file"
                )
            sink = open_sink(body)
            offsets, time_s = _read_header(path, header)
            self._seen.restore(header.get("seen"), named_s=time_s)
        except CorruptError as error:
            # Damaged, or written under other settings of the sink: the log has it all.
            aside = path.with_name(path.name + ".damaged")
            path.replace(aside)
            log.error("service.snapshot_damaged", reason=str(error), moved_to=str(aside))
            return open_sink(None)
        self._offsets, self._last_time_s = offsets, time_s
        log.info(
            "service.snapshot_restored", file=str(path), bytes=len(body), offsets=self._offsets
        )
        return sink


def _read_header(path: Path, header: Mapping[str, Any]) -> tuple[dict[int, int], float]:
    """Return a snapshot's offsets, and when it was written.

    Raises:
        CorruptError: they are not there; the heat topic may have brought what another wrote.
    """
    try:
        offsets = {int(partition): int(at) for partition, at in header["offsets"]}
        return offsets, float(header.get("time_s", 0.0))
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: header does not fit together: {error!r}") from error
