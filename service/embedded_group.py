"""Consumer groups of the embedded log: leases in the topic's file, partitions that move by them.

A member renews its lease whenever it polls. A member whose lease has run out is dropped by
whichever member looks next, and its partitions are free. Partitions move cooperatively: a member
that holds more than its share gives the surplus back (its listener is told first, and the offsets
that the listener returns are stored in the same transaction); one that holds fewer takes free ones.
Nobody stops reading the partitions that it keeps.

Leases are in monotonic time, which all processes of a machine share and no clock jump moves. After
a reboot that time starts again; a lease that reaches further than its own length is then known to
be of another boot, and void.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence

import structlog

from stoker.errors import InputError
from stoker.service.embedded_topic import EmbeddedTopic
from stoker.service.streams import PartitionLost, RebalanceListener, Record
from stoker.service.topic_file import OFFSET_BITS, OFFSET_MASK, transaction, translated

log = structlog.get_logger(__name__)

# How long a waiting poll sleeps before it looks for what other processes appended.
_LOOK_AGAIN_S = 0.02
# Bytes after which one poll returns early: large records must not fill the memory by the thousand.
_POLL_BYTES_MAX = 64 << 20


class EmbeddedConsumer:
    """One member of a group; see `Consumer`. Owned by one thread.

    Invariant (`check`): the partitions it reads are those that the file says it holds.
    """

    def __init__(
        self,
        topic: EmbeddedTopic,
        group: str,
        *,
        listener: RebalanceListener | None = None,
        member: str | None = None,
    ) -> None:
        if not group or len(group) > 200:
            raise InputError(f"consumer group: expected 1 to 200 characters, found {len(group)}")
        self.topic = topic
        self.group = group
        # Host-wide unique, and sorted by age nowhere: the share does not depend on the name.
        self.member = member or f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._listener = listener
        self._connection = topic.open_reader()
        self._lease_s = topic.options.lease_s
        self._heartbeat_s = topic.options.heartbeat_s
        self._monotonic = topic.options.monotonic
        self._heartbeat_due_s = self._monotonic()
        self._positions: dict[int, int] = {}
        self._resets = 0
        self._closed = False

    def poll(self, max_events: int, timeout_s: float) -> list[Record]:
        """Return up to `max_events` records; see `Consumer`."""
        if max_events < 1:
            raise InputError(f"max_events: expected at least 1, found {max_events}")
        deadline_s = self._monotonic() + timeout_s
        while True:
            if self._monotonic() >= self._heartbeat_due_s:
                self._heartbeat()
            records = self._read(max_events)
            left_s = deadline_s - self._monotonic()
            if records or left_s <= 0:
                return records
            with self.topic.appended:
                self.topic.appended.wait(min(left_s, _LOOK_AGAIN_S))

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Store the next offsets to read; see `Consumer`."""
        if not offsets:
            return
        with translated(self.topic.path), transaction(self._connection):
            self._store(offsets)

    def assignment(self) -> frozenset[int]:
        """Return the partitions that this member reads."""
        return frozenset(self._positions)

    def lag(self) -> dict[int, int]:
        """Return per partition the records still to be read, retention's holes included."""
        bounds = self._bounds()
        return {p: max(0, bounds[p][1] - at) for p, at in self._positions.items()}

    @property
    def resets(self) -> int:
        """How often an offset was out of range."""
        return self._resets

    def close(self) -> None:
        """Give the partitions back and leave the group."""
        if self._closed:
            return
        self._closed = True
        try:
            self._release(sorted(self._positions))
            with translated(self.topic.path), transaction(self._connection):
                self._connection.execute(
                    "DELETE FROM members WHERE grp = ? AND member = ?", (self.group, self.member)
                )
        finally:
            self._connection.close()

    def check(self) -> None:
        """Raise AssertionError where this member's idea of its partitions is not the file's."""
        held = set(self._claims())
        assert set(self._positions) <= held, (sorted(self._positions), sorted(held))

    def _read(self, max_events: int) -> list[Record]:
        if not self._positions:
            return []
        # One read transaction: retention must not move the oldest offset between look and read.
        with translated(self.topic.path), _reading(self._connection):
            return self._read_partitions(max_events)

    def _read_partitions(self, max_events: int) -> list[Record]:
        name = self.topic.name
        records: list[Record] = []
        size = 0
        bounds = self._bounds()
        partitions = sorted(self._positions)
        # Each poll starts at another partition: a busy one must not starve the rest. Which one
        # follows from the positions alone, so that reading again after a crash reads in the same
        # order as a reader that was never stopped.
        turn = zlib.crc32(b"%d" % sum(self._positions.values())) % len(partitions)
        for partition in partitions[turn:] + partitions[:turn]:
            first, following = bounds[partition]
            at = self._positions[partition]
            if not first <= at <= following:
                at = self._reset(partition, at, first, following)
            if at == following:
                continue
            low = partition << OFFSET_BITS
            rows = self._connection.execute(
                "SELECT id, key, value, time_s FROM records WHERE id >= ? AND id < ? "
                "ORDER BY id LIMIT ?",
                (low | at, low | following, max_events - len(records)),
            )
            for record_id, key, value, time_s in rows:
                at = record_id & OFFSET_MASK
                records.append(Record(name, partition, at, key, value, time_s))
                size += len(value) if value is not None else 0
                if size > _POLL_BYTES_MAX:
                    rows.close()
                    break
            full = len(records) >= max_events or size > _POLL_BYTES_MAX
            # Compaction may have taken the last records of the range: then nothing is left in it.
            self._positions[partition] = at + 1 if full else following
            if full:
                break
        return records

    def _reset(self, partition: int, at: int, first: int, following: int) -> int:
        self._resets += 1
        self._positions[partition] = first
        log.warning(
            "service.offset_reset",
            topic=self.topic.name,
            group=self.group,
            partition=partition,
            wanted_offset=at,
            oldest_offset=first,
            next_offset=following,
            resets=self._resets,
        )
        return first

    def _bounds(self) -> dict[int, tuple[int, int]]:
        with translated(self.topic.path):
            rows = self._connection.execute("SELECT partition, first, next FROM partitions")
            return {partition: (first, following) for partition, first, following in rows}

    def _claims(self) -> list[int]:
        rows = self._connection.execute(
            "SELECT partition FROM claims WHERE grp = ? AND member = ? ORDER BY partition",
            (self.group, self.member),
        )
        return [partition for (partition,) in rows]

    def _heartbeat(self) -> None:
        with translated(self.topic.path), transaction(self._connection):
            # Read once the file is ours: a member that renewed while this one waited for it must
            # not look as if its lease reached further than any lease given since the boot.
            now_s = self._monotonic()
            held, surplus, dropped = self._renew(now_s)
            committed = dict(
                self._connection.execute(
                    "SELECT partition, next FROM commits WHERE grp = ?", (self.group,)
                ).fetchall()
            )
        self._heartbeat_due_s = now_s + self._heartbeat_s
        # After being dropped, a partition that came back may have been read by others meanwhile.
        lost = sorted(set(self._positions) - (set() if dropped else set(held)))
        if lost:
            for partition in lost:
                del self._positions[partition]
            log.warning(
                "service.partitions_lost",
                topic=self.topic.name,
                group=self.group,
                partitions=lost,
                lease_s=self._lease_s,
            )
            if self._listener is not None:
                self._listener.partitions_lost(lost)
        gained = sorted(set(held) - set(self._positions))
        if gained:
            self._take({partition: committed.get(partition) for partition in gained})
        if surplus:
            self._release(surplus)

    def _renew(self, now_s: float) -> tuple[list[int], list[int], bool]:
        """Renew the lease, drop the dead, claim a fair share.

        Returns:
            What this member holds, which of it to give back, and whether it had been dropped.
        """
        run = self._connection.execute
        group = self.group
        # A lease that ends later than its own length from now was given before a reboot.
        dead = run(
            "DELETE FROM members WHERE grp = ?1 AND member <> ?2 AND "
            "(lease_until_s < ?3 OR lease_until_s > ?3 + lease_s) RETURNING member",
            (group, self.member, now_s),
        ).fetchall()
        own = run(
            "SELECT lease_until_s FROM members WHERE grp = ? AND member = ?", (group, self.member)
        ).fetchone()
        if own is None:  # new, or dropped by another member: what it held may be another's now
            run("DELETE FROM claims WHERE grp = ? AND member = ?", (group, self.member))
        run(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)",
            (group, self.member, now_s + self._lease_s, self._lease_s),
        )
        run(
            "DELETE FROM claims WHERE grp = ?1 AND member NOT IN "
            "(SELECT member FROM members WHERE grp = ?1)",
            (group,),
        )
        if dead:
            log.warning(
                "service.members_expired",
                topic=self.topic.name,
                group=group,
                members=[member for (member,) in dead],
            )
        counts: dict[str, int] = dict(
            run(
                "SELECT m.member, count(c.partition) FROM members m LEFT JOIN claims c "
                "ON c.grp = m.grp AND c.member = m.member WHERE m.grp = ? GROUP BY m.member",
                (group,),
            ).fetchall()
        )
        total = self.topic.spec.partition_count
        share, extra = divmod(total, len(counts))
        # Those who hold most keep the odd partitions: fewest moves.
        ranked = sorted(counts, key=lambda member: (-counts[member], member))
        quota = share + (1 if ranked.index(self.member) < extra else 0)
        held = self._claims()
        free = [
            partition
            for partition in range(total)
            if partition
            not in {p for (p,) in run("SELECT partition FROM claims WHERE grp = ?", (group,))}
        ]
        for partition in itertools.islice(free, max(0, quota - len(held))):
            run("INSERT INTO claims VALUES (?, ?, ?)", (group, partition, self.member))
            held.append(partition)
        return sorted(held), sorted(held)[quota:] if len(held) > quota else [], own is None

    def _take(self, committed: Mapping[int, int | None]) -> None:
        starts: Mapping[int, int | None] = {}
        if self._listener is not None:
            starts = self._listener.partitions_assigned(committed)
        bounds = self._bounds()
        for partition, stored in committed.items():
            start = starts.get(partition, stored)
            self._positions[partition] = bounds[partition][0] if start is None else start
        log.info(
            "service.partitions_assigned",
            topic=self.topic.name,
            group=self.group,
            partitions=sorted(committed),
        )

    def _release(self, partitions: Sequence[int]) -> None:
        if not partitions:
            return
        offsets: Mapping[int, int] = {}
        if self._listener is not None:
            offsets = self._listener.partitions_revoked(partitions)
        for partition in partitions:
            self._positions.pop(partition, None)
        with translated(self.topic.path), transaction(self._connection):
            held = set(self._claims())
            # Where the lease ran out meanwhile, the new owner's offset stands.
            self._store({p: at for p, at in offsets.items() if p in held})
            self._connection.executemany(
                "DELETE FROM claims WHERE grp = ? AND partition = ? AND member = ?",
                [(self.group, partition, self.member) for partition in partitions],
            )
        log.info(
            "service.partitions_released",
            topic=self.topic.name,
            group=self.group,
            partitions=list(partitions),
        )

    def _store(self, offsets: Mapping[int, int]) -> None:
        strangers = sorted(set(offsets) - set(self._claims()))
        if strangers:
            raise PartitionLost(
                f"commit for topic {self.topic.name}, group {self.group}: partitions {strangers} "
                f"belong to another member now; nothing was stored"
            )
        self._connection.executemany(
            "INSERT OR REPLACE INTO commits VALUES (?, ?, ?)",
            [(self.group, partition, at) for partition, at in offsets.items()],
        )


@contextlib.contextmanager
def _reading(connection: sqlite3.Connection) -> Iterator[None]:
    """Let every read of the block see one state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")
