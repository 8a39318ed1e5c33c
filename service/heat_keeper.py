"""The thread that keeps the heat: it follows the event log and saves heat and offsets as one.

Events of the past matter most in the first seconds after a start, so the keeper also knows when it
has caught up with the log; a warm-up waits for that where there was no snapshot to start from, but
not for a log that cannot be reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from stoker.errors import StokerError
from stoker.prefetch.coverage_curve import Coverage
from stoker.prefetch.pieces import Rest, no_rest
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt
from stoker.prefetch.warm_set import Accesses
from stoker.service.consume import ConsumeLoop, ConsumeOptions, ConsumeStats
from stoker.service.dead_letters import DeadLetters
from stoker.service.heat_sink import HeatSink
from stoker.service.heat_topic import HeatPublisher, read_heat
from stoker.service.snapshot_file import write_snapshot
from stoker.service.streams import EventLog, LogFull, LogUnavailable, MemberFenced

log = structlog.get_logger(__name__)

_FIRST_POLL_S = 0.2
_JOIN_S = 20.0  # longest wait for partitions; those of a member that died move after 15 s
_RESTART_S = 5.0
_RETRY_S = 1.0
_AWAY_S = 2.0  # how long a warm-up waits for a log that is away: brokers take turns to restart


class HeatKeeper:
    """Owns the consumer thread. Reading heat is safe from any thread."""

    def __init__(
        self,
        event_log: EventLog,
        *,
        topic: str,
        group: str,
        snapshot_path: Path,
        options: ConsumeOptions,
        settings: PrefetchSettings,
        member: str | None = None,
        heat_topic: tuple[EventLog, str] | None = None,
        heat_topic_s: float = 300.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Restore the heat; the log is read once `start` is called.

        Args:
            member: This replica's name in the group, by which it goes on at once after it was
                killed; for the one process that has the state. None makes a new one.
            heat_topic: Log and compacted topic that the heat is published to, and started from
                where there is no snapshot yet; None does neither.
            heat_topic_s: Seconds between publications.

        A snapshot that was written under other settings of the heat cannot be continued: it is
        moved aside, and the heat is rebuilt from the log.
        """
        self._event_log = event_log
        self._topic = topic
        self._group = group
        self._snapshot_path = snapshot_path
        self._options = options
        self._settings = settings
        self._member = member
        self._monotonic = monotonic
        self._heat_topic = heat_topic
        self._topic_publisher = (
            HeatPublisher(
                heat_topic[0],
                topic=heat_topic[1],
                publisher=group,
                snapshot_path=snapshot_path,
                every_s=heat_topic_s,
                monotonic=monotonic,
            )
            if heat_topic
            else None
        )
        self._stop = threading.Event()
        self._caught_up = threading.Event()
        self._waited = threading.Event()  # caught up, or nothing to wait for
        self._thread: threading.Thread | None = None
        self._away_since_s: float | None = None  # until we have caught up
        self._loop = self._restored()
        # Of this start: a snapshot that is written later says nothing about it.
        self._had_snapshot = self.sink.key_count > 0
        self.restarts = 0

    @property
    def sink(self) -> HeatSink:
        """The heat."""
        sink = self._loop.sink
        assert isinstance(sink, HeatSink)
        return sink

    def start(self) -> None:
        """Start to follow the log."""
        self._thread = threading.Thread(target=self._run, name="heat", daemon=True)
        self._thread.start()
        if self._topic_publisher is not None:
            self._topic_publisher.start()

    def demand(self, now_s: float, *, rest: Rest = no_rest) -> dict[ContentKey, float]:
        """Return the decayed access count per content key, of all tenants."""
        return self.sink.demand(now_s, rest=rest)

    def demand_for_warmup(
        self, now_s: float, *, wait_s: float, rest: Rest = no_rest
    ) -> dict[ContentKey, float]:
        """Return the demand; where there was no snapshot, once the log has been read.

        A new replica's log holds what the old one knew, and a part of it is not what a plan needs.

        Args:
            wait_s: Longest that is waited for the log; then the demand is what there is.
            rest: Called between small steps of the work; see `warm.run_warm`.
        """
        if not self._had_snapshot:
            self.wait_caught_up(wait_s)
        return self.demand(now_s, rest=rest)

    def expected(self, query: str, tenant: str, now_s: float) -> dict[ContentKey, float]:
        """Return what a question leads to; see `HeatSink.expected`."""
        return self.sink.expected(query, tenant, now_s)

    def coverage(self, now_s: float, *, rest: Rest = no_rest) -> Coverage:
        """Return how many of the coming accesses the hottest chunks will serve."""
        return self.sink.coverage(now_s, rest=rest)

    def accesses_since(self, time_s: float) -> Accesses:
        """Return the newest accesses later than a time, of all tenants."""
        return self.sink.accesses_since(time_s)

    def wait_caught_up(self, timeout_s: float) -> bool:
        """Wait until the heat holds what the log held when we joined; tells whether it does.

        Ends early where this member gets no partitions to read, where the log is away for longer
        than a moment, and where the keeper stops.
        """
        self._waited.wait(timeout_s)
        return self._caught_up.is_set()

    def stats(self) -> ConsumeStats:
        """Return the consumer's counts."""
        return self._loop.stats()

    def stop(self, timeout_s: float) -> bool:
        """Save heat and offsets and leave the log; tells whether that was done in time."""
        deadline_s = self._monotonic() + timeout_s
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("service.heat_left", timeout_s=timeout_s)
            return False
        if self._topic_publisher is not None:
            self._topic_publisher.stop(max(0.1, deadline_s - self._monotonic()))
        return True

    def _restored(self) -> ConsumeLoop:
        try:
            return self._new_loop()
        except SnapshotCorrupt as error:
            aside = self._snapshot_path.with_name(self._snapshot_path.name + ".unusable")
            self._snapshot_path.replace(aside)
            log.warning("service.heat_rebuilt", reason=str(error), moved_to=str(aside))
            return self._new_loop()

    def _new_loop(self) -> ConsumeLoop:
        return ConsumeLoop(
            self._event_log,
            self._topic,
            self._group,
            open_sink=lambda snapshot: HeatSink.open(snapshot, self._settings),
            snapshot_path=self._snapshot_path,
            dead_letters=DeadLetters(self._event_log),
            member=self._member,
            options=self._options,
        )

    def _run(self) -> None:
        failed = False
        while not self._stop.is_set():
            try:
                if failed:
                    self._loop.close()
                    self._loop = self._restored()
                    failed = False
                if self._heat_topic is not None and not self._snapshot_path.exists():
                    self._start_from_topic(*self._heat_topic)
                self._catch_up()
                self._loop.run(self._stop)
            except Exception:
                # Searches go on without fresh heat; the thread must not die for good, and so it
                # is here that starting anew may fail too.
                failed = True
                self.restarts += 1
                log.exception("service.heat_failed", restarts=self.restarts)
                self._stop.wait(_RESTART_S)
        self._waited.set()

    def _start_from_topic(self, heat_log: EventLog, topic: str) -> None:
        """Make the newest publication this replica's snapshot; without one, read all events."""
        began = self._monotonic()
        waiting = False
        refused: set[str] = set()
        while not self._stop.is_set():
            tried_s, answers = self._monotonic(), False
            try:
                heat_log.check_health()  # a broker that is away may hold up all else for longer
                answers = True
                found = read_heat(heat_log, topic, event_topic=self._topic, besides=refused)
                self._away_since_s = None  # that took its own time
                if found is None:
                    log.info("service.heat_topic_empty", topic=topic)
                    return
                write_snapshot(self._snapshot_path, *found)
                self._loop = self._restored()
                if self._snapshot_path.exists():
                    break
                refused.add(found[0]["group"])  # put aside, and said so
            except LogUnavailable as error:
                if not waiting:
                    log.warning("service.heat_topic_unusable", topic=topic, reason=str(error))
                if answers and _answers(heat_log):
                    return  # only this topic does not answer: the events have it all
                waiting = True  # the events cannot be read either
                self._note_away(error, tried_s)
                self._stop.wait(_RETRY_S)
            except (StokerError, OSError) as error:
                log.warning("service.heat_topic_unusable", topic=topic, reason=str(error))
                return
        else:
            return
        log.info(
            "service.heat_started_from_topic",
            topic=topic,
            keys=self.sink.key_count,
            bytes=len(found[1]),
            seconds=round(self._monotonic() - began, 3),
        )

    def _catch_up(self) -> None:
        """Read until there is nothing left to read.

        The first polls may come back empty because the group is still being joined: that nothing
        is left counts only once there is something to read from. A group with more members than
        partitions has none for some of them, and those would wait for ever.
        """
        began = self._monotonic()
        unassigned = False
        while not (self._stop.is_set() or unassigned or self._caught_up.is_set()):
            tried_s = self._monotonic()
            try:
                self._loop.step(_FIRST_POLL_S)
                if not self._loop.partitions:
                    if self._monotonic() - began >= _JOIN_S:
                        unassigned = True
                        self._waited.set()
                        log.warning("service.heat_unassigned", topic=self._topic, group=self._group)
                    continue
                known = self._loop.measure_lag()
            except (LogUnavailable, LogFull) as error:
                if self._note_away(error, tried_s):
                    return  # `run` says so, and goes on when the log is back
                self._stop.wait(_RETRY_S)
                continue
            self._away_since_s = None
            stats = self._loop.stats()
            if known and stats.lag == 0:
                self._caught_up.set()
                self._waited.set()
                log.info(
                    "service.heat_caught_up",
                    records=stats.records,
                    keys=self.sink.key_count,
                    seconds=round(self._monotonic() - began, 3),
                )

    def _note_away(self, error: LogUnavailable | LogFull, tried_s: float) -> bool:
        """Let the warm-up begin if the log stays away; returns whether it may."""
        if self._away_since_s is None:
            self._away_since_s = tried_s
        away_s = self._monotonic() - self._away_since_s
        for_good = isinstance(error, MemberFenced)
        if (for_good or away_s >= _AWAY_S) and not self._waited.is_set():
            self._waited.set()
            log.warning(
                "service.heat_log_away",
                topic=self._topic,
                away_s=round(away_s, 3),
                keys=self.sink.key_count,
                reason=str(error),
            )
        return self._waited.is_set()


def _answers(event_log: EventLog) -> bool:
    try:
        event_log.check_health()
    except LogUnavailable:
        return False
    return True
