"""What an event log is to the rest of Stoker, whether it is a folder on this disk or Apache Kafka.

A topic has partitions; records of one key go to one partition and keep their order there. A group
of consumers shares a topic's partitions, each partition with one member at a time, and stores per
partition the next offset to read. `service.embedded_log` and `service.kafka_log` implement this;
publishing, the consumer loop and replay know only these protocols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

from stoker.errors import CapacityError, ConfigError, InputError, UnavailableError

EVENTS_TOPIC = "stoker.events.v1"
DEAD_LETTERS_TOPIC = "stoker.events.dead.v1"
CLOSE_S: Final = 5.0  # how long a log may take to close, where nobody says


class LogUnavailable(UnavailableError):
    """The log cannot be reached or written now; nothing of this call was acknowledged."""


class MemberFenced(LogUnavailable):
    """Another process joined the group by this member's name; this one does not come back."""

    retriable: ClassVar[bool] = False


class LogFull(CapacityError):
    """The log's bound on bytes is reached; nothing of this call was acknowledged."""


class RecordTooLarge(InputError):
    """A record exceeds what the topic takes; sending it again cannot help."""


class PartitionLost(UnavailableError):
    """A commit came after the partition had gone to another member; it was not stored."""

    retriable: ClassVar[bool] = False


class Record(NamedTuple):
    """One record as a consumer gets it. A value of None deletes its key in a compacted topic."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes | None
    time_s: float


@dataclasses.dataclass(frozen=True)
class TopicSpec:
    """How a topic is made: stated, never left to a broker's defaults.

    Attributes:
        name: Letters, digits, dot, dash and underscore; at most 200.
        partition_count: How many consumers of one group can share the work.
        retention_s: Age after which records go; None keeps them for ever.
        retention_bytes: Bytes per partition above which the oldest go; None sets no bound.
        compacted: Keep at least the newest record of each key instead of going by age alone.
        record_bytes_max: Longest value the topic takes.
    """

    name: str
    partition_count: int = 8
    retention_s: float | None = 7 * 86_400.0
    retention_bytes: int | None = 4 << 30
    compacted: bool = False
    record_bytes_max: int = 8 << 20

    def __post_init__(self) -> None:
        allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in self.name)
        if not self.name or len(self.name) > 200 or not allowed or self.name in (".", ".."):
            raise ConfigError(
                "topic name: expected 1 to 200 of letters, digits, dot, dash and underscore, "
                f"found {self.name!r}"
            )
        if not 1 <= self.partition_count <= 10_000:
            raise ConfigError(
                f"partition_count of {self.name}: expected 1 to 10000, found {self.partition_count}"
            )
        for key in ("retention_s", "retention_bytes", "record_bytes_max"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"{key} of {self.name}: expected more than 0, found {value}")


def check_record_sizes(topic: str, values: Iterable[bytes | None], *, bytes_max: int) -> None:
    """Refuse a batch of which one value is longer than the topic takes.

    Raises:
        RecordTooLarge: names the topic and both sizes.
    """
    for value in values:
        if value is not None and len(value) > bytes_max:
            raise RecordTooLarge(
                f"record for topic {topic}: expected at most {bytes_max} bytes, found {len(value)}"
            )


class RebalanceListener(Protocol):
    """Told when partitions come and go. Called inside `poll` or `close`, never at the same time.

    Each call must end well within the group's session time.
    """

    def partitions_assigned(self, committed: Mapping[int, int | None]) -> Mapping[int, int | None]:
        """Take new partitions.

        Args:
            committed: New partitions, each with the group's committed offset, None where none is.

        Returns:
            Where to start reading: partition to offset, None for the oldest record there is.
            Partitions left out start at the committed offset, or at the oldest.
        """
        ...

    def partitions_revoked(self, partitions: Sequence[int]) -> Mapping[int, int]:
        """Let partitions go in good order; the offsets returned are committed before they move."""
        ...

    def partitions_lost(self, partitions: Sequence[int]) -> None:
        """Learn that partitions are gone already (a lease ran out); nothing can be committed."""
        ...


class Consumer(Protocol):
    """One member of a group. Owned by one thread."""

    def poll(self, max_events: int, timeout_s: float) -> list[Record]:
        """Return up to `max_events` records, waiting at most `timeout_s` for the first.

        A member that has not joined its group yet may wait 0.1 s even where `timeout_s` is less.
        Records of one partition come in offset order. An offset that retention has taken is reset
        to the oldest record, counted in `resets` and logged once.

        Raises:
            LogUnavailable: the log cannot be read now; poll again later.
            LogFull: there is no room to renew the member's lease; poll again later.
            MemberFenced: another process joined by this member's name; so does every poll from
                now on, where the client reads no further.
        """
        ...

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Store, per partition, the next offset to read.

        Raises:
            PartitionLost: a partition belongs to another member now; none was stored.
            MemberFenced: another process joined by this member's name; none was stored.
            LogUnavailable, LogFull: the log cannot be written now.
        """
        ...

    def assignment(self) -> frozenset[int]:
        """Return the partitions that this member reads now."""
        ...

    def lag(self) -> dict[int, int]:
        """Return per assigned partition how many records are still to be read."""
        ...

    @property
    def resets(self) -> int:
        """How often an offset was out of range and reset since this consumer was made."""
        ...

    def close(self) -> None:
        """Give the partitions back (`partitions_revoked` first) and leave the group."""
        ...


class EventLog(Protocol):
    """A durable log of topics. Appending is safe from several threads."""

    def ensure_topic(self, spec: TopicSpec) -> None:
        """Make the topic if it is not there.

        Raises:
            ConfigError: it is there with another number of partitions.
            LogUnavailable: the log cannot be reached.
        """
        ...

    def append(self, topic: str, key: bytes, payloads: Sequence[bytes | None]) -> None:
        """Append records of one key, in order; they are durable when this returns.

        Raises:
            LogUnavailable, LogFull: nothing was acknowledged; some may be there all the same, so a
                retry can write them twice (readers count an event id once).
            RecordTooLarge: a payload is longer than the topic takes; none was written.
        """
        ...

    def append_batch(self, topic: str, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Append (key, payload) pairs as `append` does, one acknowledgement for all."""
        ...

    def consumer(
        self,
        topic: str,
        group: str,
        *,
        listener: RebalanceListener | None = None,
        member: str | None = None,
    ) -> Consumer:
        """Join a group as a new member, or as the one called ``member``, which comes back.

        Args:
            member: A name within the group that outlives the process. Who joins by it takes over
                what it held at once, instead of after the lease of the one that was killed; so
                only one at a time may use it. None makes a new name.
        """
        ...

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return per partition the oldest offset there is and the next one to be written."""
        ...

    def check_health(self) -> None:
        """Return if the log answers.

        Raises:
            LogUnavailable: it does not; the message says what was tried.
        """
        ...

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Release what is held; what was acknowledged stays.

        Args:
            timeout_s: How long that may take, in all, where a broker hangs. What it has not
                acknowledged by then is let go: its caller was told so.
        """
        ...
