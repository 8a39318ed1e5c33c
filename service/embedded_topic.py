"""One topic of the embedded log: an SQLite file, its appends, retention and compaction.

See `service.embedded_log` for what it is part of and why it is SQLite.
"""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from stoker.errors import ConfigError, CorruptError
from stoker.service.streams import (
    LogFull,
    LogUnavailable,
    Record,
    check_record_sizes,
)
from stoker.service.topic_file import (
    OFFSET_BITS,
    OFFSET_MASK,
    check_format,
    connect,
    read_spec,
    transaction,
    translated,
)

log = structlog.get_logger(__name__)

_RETENTION_ROWS: Final = 4096  # looked at per step, so that one append never pays for a whole day


@dataclasses.dataclass(frozen=True)
class EmbeddedOptions:
    """How an embedded log behaves in this process.

    Attributes:
        bytes_max: Bound on the bytes of records in one topic, refused beyond (`LogFull`); None
            leaves the bound to each topic's retention.
        busy_timeout_s: How long a write may wait for another process's.
        lease_s: A group's member that was not heard of for so long loses its partitions.
        heartbeat_s: How often a consumer renews its lease and looks for a rebalance.
        retention_check_s: How often appending looks for records that are too old.
        clock: Unix seconds, for records' times and their age.
        monotonic: Seconds that only grow, shared by all processes of this machine, for leases, and
            for how far a clock that is put ahead may age records.
    """

    bytes_max: int | None = None
    busy_timeout_s: float = 10.0
    lease_s: float = 15.0
    heartbeat_s: float = 1.0
    retention_check_s: float = 60.0
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.heartbeat_s * 3 > self.lease_s:
            raise ConfigError(
                f"lease_s {self.lease_s} must be at least three times heartbeat_s "
                f"{self.heartbeat_s}, or one late heartbeat costs a member its partitions"
            )


class EmbeddedTopic:
    """One topic's file: appends with group commit, retention and compaction.

    Invariants (`check`): per partition `first <= next`; every record's offset lies in
    [first, next); `bytes` is the sum over the partition's records.
    """

    def __init__(self, name: str, path: Path, options: EmbeddedOptions) -> None:
        self.name = name
        self.path = path
        self.options = options
        with translated(path):
            self._writer = connect(path, options.busy_timeout_s)
            try:
                check_format(self._writer, path)
                self.spec = read_spec(self._writer, path)
            except BaseException:
                self._writer.close()
                raise
        self._write_lock = threading.Lock()
        self._pending_lock = threading.Lock()
        self._pending: list[_Ticket] = []
        self._opened_s = (options.clock(), options.monotonic())
        self._retention_due_s = options.monotonic() + options.retention_check_s
        # Wakes this process's waiting consumers; those of other processes look again by time.
        self.appended = threading.Condition()

    def open_reader(self) -> sqlite3.Connection:
        """Open a connection of the caller's own; a consumer has one."""
        with translated(self.path):
            return connect(self.path, self.options.busy_timeout_s)

    def partition_of(self, key: bytes) -> int:
        """Return the partition that `key` always goes to."""
        return zlib.crc32(key) % self.spec.partition_count

    def append(self, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Append and sync. Callers that arrive while another one syncs share the next sync."""
        if not entries:
            return
        check_record_sizes(
            self.name, (value for _, value in entries), bytes_max=self.spec.record_bytes_max
        )
        ticket = _Ticket(entries)
        with self._pending_lock:
            self._pending.append(ticket)
        with self._write_lock:
            if not ticket.done:
                with self._pending_lock:
                    tickets, self._pending = self._pending, []
                self._write(tickets)
        if ticket.error is not None:
            raise ticket.error
        with self.appended:
            self.appended.notify_all()

    def _write(self, tickets: list[_Ticket]) -> None:
        failure: Exception | None = None
        try:
            with translated(self.path), transaction(self._writer):
                self._insert([entry for ticket in tickets for entry in ticket.entries])
        except (LogUnavailable, LogFull, CorruptError) as error:
            failure = error
        except BaseException as error:
            # Whatever it was, nothing was written: no caller who shares the sync may be told
            # that it was.
            failure = LogUnavailable(f"{self.path}: the shared append failed: {error!r}")
            failure.__cause__ = error
            raise
        finally:
            for ticket in tickets:
                ticket.done = True
                ticket.error = failure

    def _insert(self, entries: list[tuple[bytes, bytes | None]]) -> None:
        state = self._partition_rows(self._writer)
        time_s = self.options.clock()
        rows = []
        for key, value in entries:
            row = state[self.partition_of(key)]
            rows.append(((row[0] << OFFSET_BITS) | row[2], time_s, key, value))
            row[2] += 1
            row[3] += len(key) + (0 if value is None else len(value))
        bytes_max = self.options.bytes_max
        if bytes_max is not None and (total := sum(row[3] for row in state.values())) > bytes_max:
            raise LogFull(f"topic {self.name}: expected at most {bytes_max} bytes, found {total}")
        self._writer.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
        self._writer.executemany(
            "UPDATE partitions SET next = ?, bytes = ? WHERE partition = ?",
            [(row[2], row[3], row[0]) for row in state.values()],
        )
        retention_bytes = self.spec.retention_bytes
        too_big = retention_bytes is not None and any(
            row[3] > retention_bytes for row in state.values()
        )
        now_s = self.options.monotonic()
        if too_big or now_s >= self._retention_due_s:
            self._retention_due_s = now_s + self.options.retention_check_s
            self._retain(self._writer)
            self._compact(self._writer, dirty_ratio_min=0.5)

    def enforce_retention(self) -> None:
        """Remove what is too old or too much now, instead of with a later append."""
        with self._write_lock, translated(self.path), transaction(self._writer):
            self._retain(self._writer)

    def compact(self) -> None:
        """Keep only the newest record of each key now, instead of when half is dirty."""
        with self._write_lock, translated(self.path), transaction(self._writer):
            self._compact(self._writer, dirty_ratio_min=0.0)

    def scan(self, partition: int, *, batch: int = 1_000) -> Iterator[Record]:
        """Yield the partition's records from the oldest on, outside any group."""
        connection = self.open_reader()
        try:
            low = partition << OFFSET_BITS
            at = 0
            while True:
                with translated(self.path):
                    rows = connection.execute(
                        "SELECT id, key, value, time_s FROM records WHERE id >= ? AND id <= ? "
                        "ORDER BY id LIMIT ?",
                        (low | at, low | OFFSET_MASK, batch),
                    ).fetchall()
                if not rows:
                    return
                for record_id, key, value, time_s in rows:
                    offset = record_id & OFFSET_MASK
                    yield Record(self.name, partition, offset, key, value, time_s)
                at = (int(rows[-1][0]) & OFFSET_MASK) + 1
        finally:
            connection.close()

    def trim(self, partition: int, offset: int) -> None:
        """Remove the records below `offset`; for a reader that alone owns the topic."""
        with self._write_lock, translated(self.path), transaction(self._writer):
            self._delete_below(self._writer, partition, offset)

    def offsets(self) -> dict[int, tuple[int, int]]:
        """Return per partition (oldest, next) offset."""
        with self._write_lock, translated(self.path):
            return {p: (row[1], row[2]) for p, row in self._partition_rows(self._writer).items()}

    def bytes_stored(self) -> int:
        """Return the bytes of keys and values in the topic."""
        with self._write_lock, translated(self.path):
            return sum(row[3] for row in self._partition_rows(self._writer).values())

    def committed(self, group: str) -> dict[int, int]:
        """Return the group's committed offsets, by partition."""
        with self._write_lock, translated(self.path):
            rows = self._writer.execute(
                "SELECT partition, next FROM commits WHERE grp = ?", (group,)
            ).fetchall()
        return dict(rows)

    def check(self) -> None:
        """Raise CorruptError on the first broken invariant."""
        with self._write_lock, translated(self.path):
            verdict = self._writer.execute("PRAGMA integrity_check").fetchone()[0]
            if verdict != "ok":
                raise CorruptError(f"{self.path}: {verdict}")
            for partition, row in self._partition_rows(self._writer).items():
                low = partition << OFFSET_BITS
                count, least, most, size = self._writer.execute(
                    "SELECT count(*), min(id), max(id), "
                    "coalesce(sum(length(key) + coalesce(length(value), 0)), 0) "
                    "FROM records WHERE id >= ? AND id <= ?",
                    (low, low | OFFSET_MASK),
                ).fetchone()
                first, following = row[1], row[2]
                if not 0 <= first <= following:
                    raise CorruptError(f"{self.path}: partition {partition}: {first} > {following}")
                if count and not (low | first) <= least <= most < (low | following):
                    raise CorruptError(
                        f"{self.path}: partition {partition}: records {least & OFFSET_MASK} to "
                        f"{most & OFFSET_MASK} outside [{first}, {following})"
                    )
                if size != row[3]:
                    raise CorruptError(
                        f"{self.path}: partition {partition}: counted {row[3]} bytes, found {size}"
                    )

    def close(self) -> None:
        """Close the writing connection."""
        with self._write_lock:
            self._writer.close()

    def _age_from_s(self) -> float:
        """Return the time that records' age is counted from: no later than one that only grows.

        A clock that is a week ahead for a minute would else make all events too old, for good.
        """
        opened_s, since_s = self._opened_s
        return min(self.options.clock(), opened_s + self.options.monotonic() - since_s)

    @staticmethod
    def _partition_rows(connection: sqlite3.Connection) -> dict[int, list[int]]:
        rows = connection.execute("SELECT * FROM partitions").fetchall()
        return {row[0]: list(row) for row in rows}

    def _retain(self, connection: sqlite3.Connection) -> None:
        # Another process may have changed the retention; the partitions never change.
        self.spec = spec = read_spec(connection, self.path)
        if spec.compacted:
            return
        for partition, row in self._partition_rows(connection).items():
            if spec.retention_s is not None:
                oldest_s = self._age_from_s() - spec.retention_s
                self._drop_front(connection, partition, older_than_s=oldest_s)
            if spec.retention_bytes is not None:
                excess = self._partition_rows(connection)[partition][3] - spec.retention_bytes
                self._drop_front(connection, partition, excess_bytes=excess)
            first = self._partition_rows(connection)[partition][1]
            if first > row[1]:
                log.info(
                    "service.log_trimmed",
                    topic=self.name,
                    partition=partition,
                    records=first - row[1],
                )

    def _drop_front(
        self,
        connection: sqlite3.Connection,
        partition: int,
        *,
        older_than_s: float = -math.inf,
        excess_bytes: int = 0,
    ) -> None:
        """Remove records from the oldest on, while too old or until `excess_bytes` are gone."""
        freed = 0
        while True:
            first, following = self._partition_rows(connection)[partition][1:3]
            low = partition << OFFSET_BITS
            rows = connection.execute(
                "SELECT id, time_s, length(key) + coalesce(length(value), 0) FROM records "
                "WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (low | first, low | following, _RETENTION_ROWS),
            ).fetchall()
            cut: int | None = None
            for record_id, time_s, size in rows:
                if time_s >= older_than_s and freed >= excess_bytes:
                    break
                freed += size
                cut = (record_id & OFFSET_MASK) + 1
            if cut is None:
                return
            self._delete_below(connection, partition, cut)
            if cut <= (rows[-1][0] & OFFSET_MASK):
                return

    def _delete_below(self, connection: sqlite3.Connection, partition: int, offset: int) -> None:
        low = partition << OFFSET_BITS
        first, following = self._partition_rows(connection)[partition][1:3]
        offset = min(offset, following)
        if offset <= first:
            return
        (size,) = connection.execute(
            "SELECT coalesce(sum(length(key) + coalesce(length(value), 0)), 0) FROM records "
            "WHERE id >= ? AND id < ?",
            (low | first, low | offset),
        ).fetchone()
        connection.execute(
            "DELETE FROM records WHERE id >= ? AND id < ?", (low | first, low | offset)
        )
        connection.execute(
            "UPDATE partitions SET first = ?, bytes = bytes - ?, "
            "compacted_bytes = min(compacted_bytes, bytes - ?) WHERE partition = ?",
            (offset, size, size, partition),
        )

    def _compact(self, connection: sqlite3.Connection, *, dirty_ratio_min: float) -> None:
        if not self.spec.compacted:
            return
        oldest_s = self._age_from_s() - (self.spec.retention_s or 86_400.0)
        for partition, row in self._partition_rows(connection).items():
            if not row[3] or (row[3] - row[4]) / row[3] < dirty_ratio_min:
                continue
            low = partition << OFFSET_BITS
            span = (low, low | OFFSET_MASK)
            connection.execute(
                "DELETE FROM records WHERE id >= ?1 AND id <= ?2 AND id NOT IN ("
                "SELECT max(id) FROM records WHERE id >= ?1 AND id <= ?2 GROUP BY key)",
                span,
            )
            # A deletion mark stays as long as the retention, so that slow readers see it too.
            connection.execute(
                "DELETE FROM records WHERE id >= ? AND id <= ? AND value IS NULL AND time_s < ?",
                (*span, oldest_s),
            )
            (size,) = connection.execute(
                "SELECT coalesce(sum(length(key) + coalesce(length(value), 0)), 0) FROM records "
                "WHERE id >= ? AND id <= ?",
                span,
            ).fetchone()
            connection.execute(
                "UPDATE partitions SET bytes = ?1, compacted_bytes = ?1 WHERE partition = ?2",
                (size, partition),
            )


class _Ticket:
    """One caller's entries, waiting to be written by whoever holds the write lock."""

    __slots__ = ("done", "entries", "error")

    def __init__(self, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.entries = entries
        self.done = False
        self.error: Exception | None = None
