"""A log that takes appends while its broker is away: a spool on this disk in front of Kafka.

An append is durable in the spool when it returns; a thread per topic forwards to the broker in the
order of appending, and removes what the broker has acknowledged. So an acknowledged event survives
a broker that is down at the start, lost in the middle or slow, and a crash of ours; the price is a
second write on this disk. After a crash between the broker's acknowledgement and the removal, some
records are forwarded twice: readers count an event id once.

The spool has a bound. Where it is reached, appends are refused (`LogFull`), nothing is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from stoker.prefetch.events import EventError
from stoker.service.dead_letters import DeadLetters, passes_milestone
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.streams import (
    CLOSE_S,
    Consumer,
    EventLog,
    LogFull,
    LogUnavailable,
    PartitionLost,
    RebalanceListener,
    Record,
    RecordTooLarge,
    TopicSpec,
)

log = structlog.get_logger(__name__)

_GROUP: Final = "forward"
_POLL_S: Final = 0.5
_BACKOFF_S_MIN: Final = 0.2


class SpooledLog:
    """An `EventLog` whose appends go by a local spool; everything else goes to the target."""

    def __init__(
        self,
        target: EventLog,
        spool: EmbeddedLog,
        *,
        batch_events_max: int = 1_000,
        backoff_s_max: float = 5.0,
        dead_letters_topic: str | None = None,
        threads: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stand in front of `target`.

        Args:
            spool: A folder of its own; its `bytes_max` bounds each topic's waiting records.
            batch_events_max: Records in one append to the target.
            backoff_s_max: Longest wait between two tries while the target is away.
            dead_letters_topic: Where a record goes that the target refuses by its size; None drops
                it, logged.
            threads: Whether to forward in background threads; without, call `forward`.
        """
        self._target = target
        self._spool = spool
        self._batch_events_max = batch_events_max
        self._backoff_s_max = backoff_s_max
        self._dead_letters_topic = dead_letters_topic
        self._threads = threads
        self._monotonic = monotonic
        self._forwarders: dict[str, _Forwarder] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def target(self) -> EventLog:
        """The log behind the spool, for what need not survive an outage."""
        return self._target

    def ensure_topic(self, spec: TopicSpec) -> None:
        """Make the spool for the topic; the target's topic is made before the first forwarding."""
        # One partition: the spool keeps the order of all appends, the target spreads them by key.
        local = dataclasses.replace(
            spec, partition_count=1, retention_s=None, retention_bytes=None, compacted=False
        )
        self._spool.ensure_topic(local)
        with self._lock:
            if self._closed:
                raise LogUnavailable("the spooled log is closed")
            if spec.name in self._forwarders:
                return
            forwarder = _Forwarder(
                self._target,
                self._spool,
                spec,
                batch_events_max=self._batch_events_max,
                backoff_s_max=self._backoff_s_max,
                dead_letters=self._refused if self._dead_letters_topic else None,
                monotonic=self._monotonic,
            )
            self._forwarders[spec.name] = forwarder
        if self._threads:
            forwarder.start()

    def append(self, topic: str, key: bytes, payloads: Sequence[bytes | None]) -> None:
        """Append to the spool; durable when it returns, forwarded soon."""
        self._spool.append(topic, key, payloads)

    def append_batch(self, topic: str, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Append to the spool; durable when it returns, forwarded soon."""
        self._spool.append_batch(topic, entries)

    def consumer(
        self,
        topic: str,
        group: str,
        *,
        listener: RebalanceListener | None = None,
        member: str | None = None,
    ) -> Consumer:
        """Join a group of the target; see `EventLog`."""
        # A client that subscribes to a topic before it is there looks again only after minutes.
        forwarder = self._forwarders.get(topic)
        if forwarder is not None:
            forwarder.make_topic()
        return self._target.consumer(topic, group, listener=listener, member=member)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the target's offsets."""
        return self._target.offsets(topic)

    def check_health(self) -> None:
        """Raise LogUnavailable where the target is away; appends go on all the same."""
        self._target.check_health()

    def waiting(self, topic: str) -> int:
        """Return how many records the target does not have yet."""
        return sum(following - first for first, following in self._spool.offsets(topic).values())

    def forward(self, topic: str) -> int:
        """Forward one batch now, in the caller's thread; returns how many records went.

        Raises:
            LogUnavailable: the target is away; nothing was removed from the spool.
        """
        return self._forwarders[topic].forward(0.0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Forward what the target takes in half the time, then stop; the rest stays spooled."""
        with self._lock:
            self._closed = True
            forwarders = list(self._forwarders.values())
        began_s = self._monotonic()

        def left_s(share: float) -> float:
            return max(0.0, began_s + share * timeout_s - self._monotonic())

        for forwarder in forwarders:
            forwarder.stop(left_s(0.5), patience_s=left_s(0.75))
        self._spool.close()
        self._target.close(left_s(1.0))

    def _refused(self, record: Record, error: RecordTooLarge) -> None:
        assert self._dead_letters_topic is not None
        letters = DeadLetters(self._spool, topic=self._dead_letters_topic)
        size = len(record.value or b"")
        reason = EventError("$", expected="a size that the broker takes", found=f"{size} bytes")
        reason.__cause__ = error
        letters.put(record.value or b"", reason, origin=record)
        if not letters.flush():
            raise LogUnavailable("a record too large for the broker has no dead letter yet")


class _Forwarder:
    """Moves one topic's records from the spool to the target, in order."""

    def __init__(
        self,
        target: EventLog,
        spool: EmbeddedLog,
        spec: TopicSpec,
        *,
        batch_events_max: int,
        backoff_s_max: float,
        dead_letters: Callable[[Record, RecordTooLarge], None] | None,
        monotonic: Callable[[], float],
    ) -> None:
        self._target = target
        self._topic = spool.topic(spec.name)
        self._consumer = spool.consumer(spec.name, _GROUP)
        self._spec = spec
        self._batch_events_max = batch_events_max
        self._backoff_s_max = backoff_s_max
        self._dead_letters = dead_letters
        self._monotonic = monotonic
        self._made = False
        self._away_since_s: float | None = None
        self._away_kinds: set[type[BaseException]] = set()
        self._unsent: list[Record] = []
        self._refused = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._deadline_s = float("inf")

    def start(self) -> None:
        """Forward in a thread from now on."""
        self._thread = threading.Thread(
            target=self._run, name=f"forward {self._spec.name}", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float, *, patience_s: float) -> None:
        """Stop after what can be forwarded within `timeout_s`; waits at most ``patience_s``."""
        self._deadline_s = self._monotonic() + timeout_s
        self._stop.set()
        if self._thread is not None:
            # A try that is in the client's hands may take longer than we were given.
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return
        # Where there is no room to give the lease back, it runs out by itself.
        with contextlib.suppress(LogUnavailable, LogFull):
            self._consumer.close()

    def make_topic(self) -> None:
        """Make the target's topic, once; safe from several threads."""
        if not self._made:
            self._target.ensure_topic(self._spec)
            self._made = True

    def forward(self, wait_s: float) -> int:
        """Forward one batch, waiting at most `wait_s` for something to do."""
        if not self._unsent:
            self._unsent = self._consumer.poll(self._batch_events_max, wait_s)
        if not self._unsent:
            return 0
        self.make_topic()
        records = self._unsent
        entries = [(record.key, record.value) for record in records]
        try:
            self._target.append_batch(self._spec.name, entries)
        except RecordTooLarge:
            self._forward_singly(records)
        following = records[-1].offset + 1
        self._unsent = []
        try:
            self._consumer.commit({records[-1].partition: following})
        except PartitionLost:
            # Another process took over while the broker was slow; it sends these once more.
            return len(records)
        self._topic.trim(records[-1].partition, following)
        return len(records)

    def _forward_singly(self, records: Sequence[Record]) -> None:
        """Send one by one, so that the one that is too large does not stop the rest."""
        for record in records:
            try:
                self._target.append_batch(self._spec.name, [(record.key, record.value)])
            except RecordTooLarge as error:
                self._refused += 1
                if passes_milestone(self._refused - 1, self._refused):
                    log.error(
                        "service.record_refused",
                        topic=self._spec.name,
                        bytes=len(record.value or b""),
                        reason=str(error),
                        total=self._refused,
                    )
                if self._dead_letters is not None:
                    self._dead_letters(record, error)

    def _run(self) -> None:
        backoff_s = _BACKOFF_S_MIN
        while not self._stop.is_set() or self._monotonic() < self._deadline_s:
            stopping = self._stop.is_set()
            try:
                count = self.forward(0.0 if stopping else _POLL_S)
            except (LogUnavailable, LogFull) as error:
                self._note_away(error)
                if stopping:
                    return
                self._stop.wait(backoff_s)
                backoff_s = min(backoff_s * 2, self._backoff_s_max)
                continue
            except Exception:
                # A mistake of ours must not end forwarding for good; the records stay spooled.
                log.exception("service.forward_failed", topic=self._spec.name)
                if stopping:
                    return
                self._stop.wait(self._backoff_s_max)
                continue
            backoff_s = _BACKOFF_S_MIN
            if count:
                self._note_back(count)
            elif stopping:
                return

    def _note_away(self, error: Exception) -> None:
        # Once per outage, and once more where the cause becomes another one.
        kind = type(error.__cause__ or error)
        if self._away_since_s is None:
            self._away_since_s = self._monotonic()
        elif kind in self._away_kinds:
            return
        self._away_kinds.add(kind)
        log.warning("service.broker_lost", topic=self._spec.name, reason=str(error))

    def _note_back(self, count: int) -> None:
        if self._away_since_s is not None:
            away_s = self._monotonic() - self._away_since_s
            self._away_since_s = None
            self._away_kinds.clear()
            log.info(
                "service.broker_back",
                topic=self._spec.name,
                away_s=round(away_s, 3),
                forwarded=count,
            )
