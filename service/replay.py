"""Replaying recorded events through the same path as live ones, on a clock of its own.

Events are appended to a log and read back by the live consumer loop into a sink. The clock is
virtual: it stands at the time of the event that is published, so decay, retention and snapshots see
the recording's time and not ours. At `speed=None` it jumps; at a number it runs that many times
faster than the wall clock. With one source, one seed and one partition, two replays give the same
bytes of state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from stoker.errors import ConfigError
from stoker.prefetch.events import partition_key
from stoker.service.consume import ConsumeLoop, ConsumeOptions, Sink
from stoker.service.dead_letters import DeadLetters
from stoker.service.replay_source import Occurrence, Refusals
from stoker.service.streams import DEAD_LETTERS_TOPIC, EventLog, TopicSpec


class VirtualClock:
    """Time as the recording has it. It never goes back: a late event does not turn it."""

    def __init__(
        self,
        *,
        speed: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make a clock at 0 that starts with the first `advance`.

        Args:
            speed: Virtual seconds per second; None means that advancing takes no time.
        """
        if speed is not None and not speed > 0:
            raise ConfigError(f"speed: expected more than 0, or max, found {speed}")
        self._speed = speed
        self._monotonic = monotonic
        self._sleep = sleep
        self._now_s = 0.0
        self._origin: tuple[float, float] | None = None  # virtual, real

    def now(self) -> float:
        """Return virtual Unix seconds."""
        return self._now_s

    def advance(self, to_s: float) -> None:
        """Move to `to_s`, waiting as the speed asks for; an earlier time changes nothing."""
        if self._origin is None:
            self._origin = (to_s, self._monotonic())
            self._now_s = to_s
        if to_s <= self._now_s:
            return
        if self._speed is not None:
            virtual_s, real_s = self._origin
            wait_s = real_s + (to_s - virtual_s) / self._speed - self._monotonic()
            if wait_s > 0:
                self._sleep(wait_s)
        self._now_s = to_s

    def due(self, at_s: float) -> bool:
        """Tell whether an event of `at_s` happens without waiting."""
        if self._origin is None or self._speed is None or at_s <= self._now_s:
            return True
        virtual_s, real_s = self._origin
        return virtual_s + (self._monotonic() - real_s) * self._speed >= at_s


class TickingSink(Sink, Protocol):
    """A sink that also does periodic work, as the heat graph does."""

    def tick(self, now_s: float) -> object:
        """Do what is done every so often."""
        ...


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What a replay did.

    Attributes:
        published: Records given to the log.
        events: Events that reached the sink.
        duplicates: Events dropped because their id had been seen.
        refused: Records that were no events.
        refused_why: How many of them by reason, where the recording was read; the rest of many
            reasons is "other".
        sessions: Distinct sessions among the published events.
        chunks: Distinct content keys among them.
        first_s, last_s: Time of the first and last event, Unix seconds; None without events.
        ticks: How often the sink did its periodic work.
        wall_s: Seconds that it took.
        state_sha256: Of the sink's snapshot at the end.
    """

    published: int
    events: int
    duplicates: int
    refused: int
    refused_why: dict[str, int]
    sessions: int
    chunks: int
    first_s: float | None
    last_s: float | None
    ticks: int
    wall_s: float
    state_sha256: str


def replay(
    occurrences: Iterable[Occurrence],
    event_log: EventLog,
    sink: TickingSink,
    *,
    clock: VirtualClock,
    topic: str,
    group: str = "replay",
    until_s: float | None = None,
    sample_ratio: float = 1.0,
    seed: int = 0,
    tick_s: float = 60.0,
    batch_events_max: int = 1_000,
    options: ConsumeOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Publish a recording and feed it to the sink by the live consumer loop.

    Args:
        event_log: Made with `clock.now` as its clock where it has one.
        until_s: Stop before the first event that is replayed later, Unix seconds.
        sample_ratio: Share of the sessions to replay, chosen by `seed`.
        tick_s: Virtual seconds between two ticks of the sink.
        progress: Called with the number of records published so far.

    Raises:
        LogUnavailable: the log went away; what was published so far has been applied.
    """
    started_s = time.monotonic()
    event_log.ensure_topic(TopicSpec(topic, partition_count=1, retention_s=None))
    event_log.ensure_topic(TopicSpec(DEAD_LETTERS_TOPIC, partition_count=1, retention_s=None))
    loop = ConsumeLoop(
        event_log,
        topic,
        group,
        open_sink=lambda _: sink,
        snapshot_path=None,
        dead_letters=DeadLetters(event_log, clock=clock.now),
        options=options,
        clock=clock.now,
    )
    tally = _Tally()
    ticks = 0
    try:
        selected = chosen(occurrences, until_s=until_s, sample_ratio=sample_ratio, seed=seed)
        for batch, ends_tick in _batches(selected, clock, batch_events_max, tick_s):
            for occurrence in batch:
                tally.add(occurrence)
            event_log.append_batch(topic, [_entry(occurrence) for occurrence in batch])
            while loop.stats().records < tally.published:
                loop.step(0.2)
            if ends_tick:
                sink.tick(clock.now())
                ticks += 1
            if progress is not None:
                progress(tally.published)
        if tally.published:
            sink.tick(clock.now())
            ticks += 1
        stats = loop.stats()
    finally:
        loop.close()
    return ReplayReport(
        published=tally.published,
        events=stats.events,
        duplicates=stats.duplicates,
        refused=stats.refused,
        refused_why=tally.refusals.by_reason,
        sessions=len(tally.sessions),
        chunks=len(tally.chunks),
        first_s=tally.first_s,
        last_s=tally.last_s,
        ticks=ticks,
        wall_s=time.monotonic() - started_s,
        state_sha256=hashlib.sha256(sink.to_snapshot()).hexdigest(),
    )


class _Tally:
    """Counts what was published."""

    def __init__(self) -> None:
        self.published = 0
        self.refusals = Refusals()
        self.sessions: set[tuple[str, str]] = set()
        self.chunks: set[tuple[str, str]] = set()
        self.first_s: float | None = None
        self.last_s: float | None = None

    def add(self, occurrence: Occurrence) -> None:
        self.published += 1
        event = occurrence.event
        if event is None:
            self.refusals.note(occurrence)
            return
        if event.session is not None:
            self.sessions.add((event.tenant, event.session))
        self.chunks.update((event.tenant, chunk_id) for chunk_id in event.chunk_ids)
        self.first_s = event.time_s if self.first_s is None else min(self.first_s, event.time_s)
        self.last_s = event.time_s if self.last_s is None else max(self.last_s, event.time_s)


def chosen(
    occurrences: Iterable[Occurrence], *, until_s: float | None, sample_ratio: float, seed: int
) -> Iterator[Occurrence]:
    """Yield what happened until `until_s`, in a share of the sessions that `seed` chooses.

    Raises:
        ConfigError: `sample_ratio` is not in (0, 1].
    """
    if not 0 < sample_ratio <= 1:
        raise ConfigError(f"sample: expected more than 0 and at most 1, found {sample_ratio}")
    for occurrence in occurrences:
        event = occurrence.event
        if event is not None:
            assert occurrence.time_s is not None
            if until_s is not None and occurrence.time_s > until_s:
                return
            if sample_ratio < 1:
                # By session and not by event: half of a session is no session.
                name = f"{seed}\0{event.tenant}\0{event.session or event.id}".encode()
                if zlib.crc32(name) >= sample_ratio * 2**32:
                    continue
        yield occurrence


def _batches(
    occurrences: Iterable[Occurrence], clock: VirtualClock, batch_events_max: int, tick_s: float
) -> Iterator[tuple[list[Occurrence], bool]]:
    """Cut into batches that happen at once, and stand the clock at each batch's last event.

    A batch never reaches over a tick, so that ticks come between the same events at every speed
    and size of batches; the flag tells that a tick is due after the batch. An event that claims a
    later time than it is replayed at has a batch of its own: it arrives then, whatever their size.
    """
    batch: list[Occurrence] = []
    ahead = False
    for occurrence in occurrences:
        time_s = occurrence.time_s
        if time_s is not None:
            assert occurrence.event is not None
            cut = ahead or len(batch) >= batch_events_max
            ahead = occurrence.event.time_s > time_s
            ticks = time_s > clock.now() and time_s // tick_s != clock.now() // tick_s
            if batch and (cut or ahead or ticks or not clock.due(time_s)):
                yield batch, ticks
                batch = []
            clock.advance(time_s)
        batch.append(occurrence)
    if batch:
        yield batch, False


def _entry(occurrence: Occurrence) -> tuple[bytes, bytes]:
    event = occurrence.event
    return (b"" if event is None else partition_key(event), occurrence.payload)
