"""Replaying recorded traffic against a running server, at the times at which it was recorded.

An open loop: requests leave when they are due, whether or not earlier ones were answered, because
real users do not wait for each other. In-flight requests are bounded; what the bound delays is
counted as late, and its latency is measured from when it was due.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable

import structlog

from stoker.errors import StokerError
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.service.client import Client
from stoker.service.replay import VirtualClock
from stoker.service.replay_source import Occurrence, Refusals

log = structlog.get_logger(__name__)

# A request that leaves more than this after it was due is late.
_LATE_S = 0.005


@dataclasses.dataclass(frozen=True)
class TrafficReport:
    """What sending did.

    Attributes:
        searches: Searches sent, one per recorded search that has its question's text.
        events: Recorded events sent as they are: used results, changes, searches without a text.
        refused: Recorded lines that were no events; not sent.
        refused_why: How many of them by reason.
        failed: Requests without a good answer, by the class of the error.
        late: Requests that left more than 5 ms after they were due.
        latency_ms: Percentiles of good searches (p50, p90, p99, max), from when each was due.
        wall_s: Seconds that it took.
    """

    searches: int
    events: int
    refused: int
    refused_why: dict[str, int]
    failed: dict[str, int]
    late: int
    latency_ms: dict[str, float]
    wall_s: float


def replay_http(
    occurrences: Iterable[Occurrence],
    *,
    open_client: Callable[[str], Client],
    clock: VirtualClock,
    in_flight_max: int = 32,
    monotonic: Callable[[], float] = time.monotonic,
    progress: Callable[[int], None] | None = None,
) -> TrafficReport:
    """Send a recording to a server.

    Args:
        open_client: Makes the client for a tenant; closed here.
        clock: Paces; at maximum speed requests follow each other as fast as `in_flight_max` allows.
        in_flight_max: Requests that may wait for an answer at once.
        progress: Called with the number of occurrences sent so far.
    """
    sender = _Sender(open_client, monotonic)
    room = threading.Semaphore(in_flight_max)
    started_s = monotonic()
    searches = events = late = 0
    refusals = Refusals()
    with (
        contextlib.closing(sender),
        concurrent.futures.ThreadPoolExecutor(in_flight_max, "replay") as pool,
    ):
        for count, occurrence in enumerate(occurrences, 1):
            event = occurrence.event
            if event is None or occurrence.time_s is None:
                refusals.note(occurrence)
                continue
            clock.advance(occurrence.time_s)
            due_s = monotonic()
            room.acquire()
            if monotonic() - due_s > _LATE_S:
                late += 1
            is_search = event.type == SEARCH_PERFORMED and bool(event.query)
            searches += is_search
            events += not is_search
            future = pool.submit(sender.send, event, due_s)
            future.add_done_callback(lambda _: room.release())
            if progress is not None:
                progress(count)
    return TrafficReport(
        searches=searches,
        events=events,
        refused=refusals.count,
        refused_why=refusals.by_reason,
        failed=dict(sender.failed),
        late=late,
        latency_ms=_percentiles(sender.latencies_s),
        wall_s=monotonic() - started_s,
    )


class _Sender:
    """Sends single events with one client per tenant; safe from several threads."""

    def __init__(
        self, open_client: Callable[[str], Client], monotonic: Callable[[], float]
    ) -> None:
        self._open_client = open_client
        self._monotonic = monotonic
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()
        self.failed: collections.Counter[str] = collections.Counter()
        self.latencies_s: list[float] = []

    def send(self, event: Event, due_s: float) -> None:
        try:
            client = self._client(event.tenant)
            if event.type == SEARCH_PERFORMED and event.query:
                client.search(
                    event.query,
                    k=max(1, len(event.chunk_ids)),
                    session=event.session,
                    route=event.route,
                    include_text=False,
                    include_metadata=False,
                )
                with self._lock:
                    self.latencies_s.append(self._monotonic() - due_s)
            else:
                client.send_events([event.raw])
        except Exception as error:
            # A fault of ours too: nobody looks at what the pool's thread raised.
            name = type(error).__name__
            with self._lock:
                self.failed[name] += 1
                first = self.failed[name] == 1
            if first:
                log.warning(
                    "service.replay_request_failed",
                    error=name,
                    reason=str(error),
                    exc_info=not isinstance(error, StokerError),
                )

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _client(self, tenant: str) -> Client:
        with self._lock:
            client = self._clients.get(tenant)
            if client is None:
                client = self._clients[tenant] = self._open_client(tenant)
            return client


def _percentiles(latencies_s: list[float]) -> dict[str, float]:
    """Return nearest-rank percentiles in milliseconds; empty without latencies."""
    ordered = sorted(latencies_s)
    count = len(ordered)
    if not count:
        return {}
    ranks = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[math.ceil(share * count) - 1] * 1e3, 3) for name, share in ranks.items()
    }
