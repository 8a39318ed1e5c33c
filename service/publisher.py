"""Publishing without being in the way: a bounded queue between a request and the event log.

Two ways in. `offer` is for events that describe what was answered (searches, used results): it
never blocks, and when the queue is full the oldest event goes, because the newest says most about
what will be asked next. `publish` is for events that a caller is told were taken (`POST
/v1/events`, documents): it returns when they are durable, or raises.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from stoker.prefetch.events import EVENT_BYTES_MAX, Event, EventError, encode, partition_key
from stoker.service.dead_letters import DeadLetters
from stoker.service.streams import EVENTS_TOPIC, EventLog, LogFull, LogUnavailable

log = structlog.get_logger(__name__)

_WAIT_S: Final = 0.5
_BACKOFF_S_MIN: Final = 0.1


@dataclasses.dataclass(frozen=True)
class PublisherStats:
    """Counts since the publisher was made.

    Attributes:
        offered: Events given to `offer`.
        written: Events of `offer` that the log has.
        dropped: Events of `offer` that went because the queue was full, or at closing.
        refused: Events of `offer` that were longer than the bound, and became dead letters.
        published: Events of `publish` that the log has.
        queued: Events of `offer` that wait now.
    """

    offered: int
    written: int
    dropped: int
    refused: int
    published: int
    queued: int


class Publisher:
    """Writes events to one topic, in the background or at once. Safe from several threads.

    Invariant (`check`): offered = written + dropped + refused + queued + in the writer's hands.
    """

    def __init__(
        self,
        event_log: EventLog,
        *,
        topic: str = EVENTS_TOPIC,
        queue_events_max: int = 10_000,
        batch_events_max: int = 1_000,
        event_bytes_max: int = EVENT_BYTES_MAX,
        backoff_s_max: float = 5.0,
        dead_letters: DeadLetters | None = None,
        threads: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Publish to `topic`, which must be there.

        Args:
            queue_events_max: Events that may wait; one more makes the oldest go.
            batch_events_max: Events in one append.
            event_bytes_max: Longest event written; a longer one becomes a dead letter.
            backoff_s_max: Longest wait between two tries while the log is away.
            threads: Whether to write in a background thread; without, call `write_batch`.
        """
        self._log = event_log
        self._topic = topic
        self._queue_events_max = queue_events_max
        self._batch_events_max = batch_events_max
        self._event_bytes_max = event_bytes_max
        self._backoff_s_max = backoff_s_max
        self._dead_letters = dead_letters
        self._monotonic = monotonic
        self._queue: collections.deque[Event] = collections.deque()
        self._batch: list[tuple[bytes, bytes | None]] = []
        self._filled = threading.Condition()
        self._closed = False
        self._close_by_s = float("inf")
        self._offered = self._written = self._dropped = self._refused = self._published = 0
        self._away_since_s: float | None = None
        self._dropped_before = 0
        self._thread: threading.Thread | None = None
        if threads:
            self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
            self._thread.start()

    def offer(self, event: Event) -> bool:
        """Queue an event; never blocks. Returns whether nothing had to go for it."""
        with self._filled:
            self._offered += 1
            if self._closed:
                self._dropped += 1
                return False
            self._queue.append(event)
            full = len(self._queue) > self._queue_events_max
            if full:
                self._queue.popleft()
                self._dropped += 1
            elif len(self._queue) == 1:
                self._filled.notify()
            return not full

    def publish(self, events: Sequence[Event]) -> None:
        """Write events; they are durable when this returns. Blocks for a disk's or broker's time.

        Raises:
            EventError: an event is longer than the bound; none was written.
            LogUnavailable, LogFull: nothing was acknowledged; retry with the same event ids.
        """
        entries: list[tuple[bytes, bytes | None]] = []
        for event in events:
            payload = encode(event)
            if len(payload) > self._event_bytes_max:
                raise EventError(
                    "$",
                    expected=f"at most {self._event_bytes_max} bytes",
                    found=f"{len(payload)} bytes in event {event.id!r}",
                )
            entries.append((partition_key(event), payload))
        if entries:
            self._log.append_batch(self._topic, entries)
            with self._filled:
                self._published += len(entries)

    def write_batch(self) -> int:
        """Write one batch of what waits; returns how many events went.

        Raises:
            LogUnavailable, LogFull: the batch is kept, and is the first of the next call.
        """
        if not self._batch:
            with self._filled:
                count = min(len(self._queue), self._batch_events_max)
                events = [self._queue.popleft() for _ in range(count)]
            self._batch = self._encoded(events)
        if self._dead_letters is not None:
            self._dead_letters.flush()
        if not self._batch:
            return 0
        self._log.append_batch(self._topic, self._batch)
        count = len(self._batch)
        with self._filled:
            self._written += count
            self._batch = []
        return count

    def stats(self) -> PublisherStats:
        """Return the counts now."""
        with self._filled:
            return PublisherStats(
                offered=self._offered,
                written=self._written,
                dropped=self._dropped,
                refused=self._refused,
                published=self._published,
                queued=len(self._queue) + len(self._batch),
            )

    def check(self) -> None:
        """Raise AssertionError where an event is unaccounted for; while nothing is in flight."""
        stats = self.stats()
        known = stats.written + stats.dropped + stats.refused + stats.queued
        assert stats.offered == known, stats

    def close(self, timeout_s: float = 5.0) -> None:
        """Take no more, write what waits within `timeout_s`, count the rest as dropped."""
        with self._filled:
            self._closed = True
            self._close_by_s = self._monotonic() + timeout_s
            self._filled.notify()
        if self._thread is not None:
            self._thread.join(timeout_s + 1.0)
            if self._thread.is_alive():
                # The log holds the writer longer than we were given; what it has may yet arrive.
                log.warning("service.publisher_left", queued=len(self._queue) + len(self._batch))
                return
        with self._filled:
            left = len(self._queue) + len(self._batch)
            self._dropped += left
            self._queue.clear()
            self._batch = []
        if left:
            log.warning("service.events_dropped", count=left, reason="closing")

    def _encoded(self, events: Sequence[Event]) -> list[tuple[bytes, bytes | None]]:
        batch: list[tuple[bytes, bytes | None]] = []
        for event in events:
            payload = encode(event)
            if len(payload) <= self._event_bytes_max:
                batch.append((partition_key(event), payload))
                continue
            with self._filled:
                self._refused += 1
            if self._dead_letters is not None:
                expected = f"at most {self._event_bytes_max} bytes"
                reason = EventError("$", expected=expected, found=f"{len(payload)} bytes")
                self._dead_letters.put(payload, reason)
        return batch

    def _run(self) -> None:
        backoff_s = _BACKOFF_S_MIN
        while True:
            with self._filled:
                if not self._queue and not self._batch:
                    if self._closed:
                        return
                    self._filled.wait(_WAIT_S)
                closed = self._closed
            if closed and self._monotonic() >= self._close_by_s:
                return
            try:
                self.write_batch()
            except (LogUnavailable, LogFull) as error:
                self._note_away(error)
            except Exception:
                # A mistake of ours must not end publishing for good.
                log.exception("service.publish_failed", topic=self._topic)
                with self._filled:
                    self._dropped += len(self._batch)
                    self._batch = []
            else:
                backoff_s = _BACKOFF_S_MIN
                self._note_back()
                continue
            with self._filled:
                if not self._closed:
                    self._filled.wait(backoff_s)
            backoff_s = min(backoff_s * 2, self._backoff_s_max)

    def _note_away(self, error: Exception) -> None:
        if self._away_since_s is None:
            self._away_since_s = self._monotonic()
            self._dropped_before = self._dropped
            log.warning("service.publishing_stopped", topic=self._topic, reason=str(error))

    def _note_back(self) -> None:
        if self._away_since_s is not None:
            away_s = self._monotonic() - self._away_since_s
            self._away_since_s = None
            log.info(
                "service.publishing_resumed",
                topic=self._topic,
                away_s=round(away_s, 3),
                dropped=self._dropped - self._dropped_before,
            )
