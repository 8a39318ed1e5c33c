"""What one replica must know of another, over the event log: who keeps what warm in an engine.

Replicas in front of one inference engine should not both ask it for the same passage. Each writes
its leases into a table that all share (`kvcache.version_vector`): a compacted topic carries the
updates, in any order and any number of times, and all tables become the same.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from stoker.errors import InputError, StokerError
from stoker.kvcache.version_vector import (
    Register,
    ReplicatedTable,
    Version,
    VersionVector,
)
from stoker.service.rounds import Rounds, is_fault
from stoker.service.streams import Consumer, EventLog, TopicSpec

log = structlog.get_logger(__name__)

KV_TOPIC = "stoker.kv.v1"
_POLL_S = 0.2
_BATCH = 1_000


def encode_register(register: Register) -> bytes:
    """Write a register as JSON: versions with vector, time, replica and value."""
    versions = [
        {
            "seen": dict(version.vector.counts), "time_s": version.time_s,
            "replica": version.replica, "value": version.value,
        }
        for version in register.versions
    ]  # fmt: skip
    return json.dumps({"versions": versions}, sort_keys=True).encode()


def decode_register(raw: bytes) -> Register:
    """Read what `encode_register` wrote.

    Raises:
        InputError: it is something else.
    """
    try:
        document = json.loads(raw)
        versions = tuple(_version_of(item) for item in document["versions"])
    except (
        ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise InputError(f"expected a register, found {error!r}") from error
    # Merged into nothing, so that the order is ours and no version is under another.
    return Register().merged(Register(versions))


def _version_of(item: Mapping[str, Any]) -> Version:
    value = item["value"]
    if value is not None and not isinstance(value, str):
        raise InputError(f"value: expected a text or none, found {value!r}")
    time_s = float(item["time_s"])
    if math.isnan(time_s):  # neither sooner nor later: replicas would choose unlike winners
        raise InputError("time_s: expected a number, found none")
    return Version(VersionVector.of(item["seen"]), time_s, str(item["replica"]), value)


class ReplicatedMetadata:
    """One replica's copy of the shared table, kept up to date by a thread. Thread-safe.

    A compacted topic keeps each key's newest record alone. A record that knows less than our table
    is therefore answered by a record that knows all: so no update is lost, and the answering ends
    as soon as every table is the same.

    Args:
        event_log: Shared by the replicas.
        replica: This one's name, stable over restarts.
        topic: Where the updates go.
        wall: Seconds since the epoch.
    """

    def __init__(
        self,
        event_log: EventLog,
        *,
        replica: str,
        topic: str = KV_TOPIC,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._event_log = event_log
        self._topic = topic
        self._wall = wall
        self._table = ReplicatedTable(replica)
        self._sent: dict[str, Register] = {}
        self._applied = self._refused = 0
        self._changed = threading.Condition()
        self._consumer: Consumer | None = None
        self._rounds = Rounds(
            self._follow,
            name="kv-replicas",
            every_s=0.0,
            retry_s=1.0,
            failed=self._behind,
            ended=self._leave,
        )
        event_log.ensure_topic(TopicSpec(topic, partition_count=1, compacted=True))

    @property
    def replica(self) -> str:
        """Our name."""
        return self._table.replica

    def start(self) -> None:
        """Begin to follow the others, from the topic's oldest record."""
        self._rounds.start()

    def write(self, key: str, value: str | None) -> None:
        """Write or, with None, delete a key here and, when this returns, in the log.

        Raises:
            LogUnavailable, LogFull: it holds here, and goes out with the key's next write.
        """
        with self._changed:
            _, register = self._table.write(key, value, time_s=self._wall())
            self._sent[key] = register
        self._event_log.append(self._topic, key.encode(), [encode_register(register)])

    def values(self) -> dict[str, str]:
        """Return what readers see."""
        with self._changed:
            return self._table.values()

    def value(self, key: str) -> str | None:
        """Return one key's value."""
        with self._changed:
            return self._table.register(key).value

    def counts(self) -> dict[str, int]:
        """Return keys, conflicts, and records applied and refused so far."""
        with self._changed:
            return {
                "keys": len(self._table.values()), "conflicts": len(self._table.conflicts()),
                "applied": self._applied, "refused": self._refused,
            }  # fmt: skip

    def wait_until(self, condition: Callable[[dict[str, str]], bool], *, timeout_s: float) -> bool:
        """Wait until the values fulfil a condition; tells whether they did."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._table.values()), timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop following; tells whether that was done in time."""
        return self._rounds.stop(timeout_s)

    def _follow(self) -> None:
        if self._consumer is None:
            # A group of our own, always from the oldest record: the table is in memory only.
            group = f"kv-{self.replica}"
            self._consumer = self._event_log.consumer(self._topic, group, listener=_FromTheStart())
        for record in self._consumer.poll(_BATCH, _POLL_S):
            self._take(record.key.decode("utf-8", "replace"), record.value)

    @staticmethod
    def _behind(error: Exception, again: bool) -> None:
        log.warning("service.kv_replicas_behind", reason=str(error), exc_info=is_fault(error))

    def _leave(self) -> None:
        if self._consumer is not None:
            self._consumer.close()

    def _take(self, key: str, raw: bytes | None) -> None:
        answer: Register | None = None
        with self._changed:
            try:
                received = Register() if raw is None else decode_register(raw)
            except InputError as error:
                self._refused += 1
                log.warning("service.kv_update_refused", reason=str(error))
                return
            self._table.apply((key, received))
            self._applied += 1
            merged = self._table.register(key)
            if merged != received and self._sent.get(key) != merged:
                answer = self._sent[key] = merged
            self._changed.notify_all()
        if answer is not None:
            try:
                self._event_log.append(self._topic, key.encode(), [encode_register(answer)])
            except StokerError as error:
                self._behind(error, again=False)


class _FromTheStart:
    """Reads every partition from its oldest record."""

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        return dict.fromkeys(committed)

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        return {}

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        return


class SharedLeases:
    """Which passages another replica keeps warm in the same engine, by the shared table.

    Args:
        table: The shared table.
        lease_s: How long a note holds; notes are renewed with the leases.
        wall: Seconds since the epoch; replicas' clocks may differ by a part of ``lease_s``.
    """

    def __init__(
        self, table: ReplicatedMetadata, *, lease_s: float, wall: Callable[[], float] = time.time
    ) -> None:
        self._table = table
        self._lease_s = lease_s
        self._wall = wall
        self._noted: dict[str, float] = {}

    @staticmethod
    def key_of(content: tuple[str, str]) -> str:
        """Return a passage's key in the table."""
        return json.dumps(["warm", *content])

    def held_elsewhere(self, content: tuple[str, str]) -> bool:
        """Return whether another replica has it under a lease that still runs."""
        raw = self._table.value(self.key_of(content))
        if raw is None:
            return False
        try:
            note = json.loads(raw)
            runs = float(note["until_s"]) > self._wall()
            return runs and note["replica"] != self._table.replica
        except (ValueError, TypeError, KeyError, RecursionError):
            return False

    def note(self, leased: set[tuple[str, str]]) -> None:
        """Tell the others what we hold now, and what no longer."""
        now = self._wall()
        wanted = {self.key_of(content) for content in leased}
        for key in sorted(wanted):
            if self._noted.get(key, 0.0) - now < self._lease_s / 3:
                until_s = now + self._lease_s
                note = {"replica": self._table.replica, "until_s": until_s}
                self._table.write(key, json.dumps(note, sort_keys=True))
                self._noted[key] = until_s
        for key in sorted(set(self._noted) - wanted):
            del self._noted[key]
            self._table.write(key, None)
