"""What a server tells: its own searches and writes, and the events that clients send.

Its own are offered to bounded queues, of the event log and of live placement: a search never waits
for them and never fails by them. Clients' events are durable when `append` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog

from stoker.prefetch.events import SEARCH_PERFORMED, Event, EventError, new_event
from stoker.service.bodies import SearchRequest
from stoker.service.document_writes import storing
from stoker.service.engine_parts import Parts
from stoker.service.metrics import Metrics
from stoker.service.problems import FeatureOff

log = structlog.get_logger(__name__)

_EVENT_CHUNKS = 1_000


class EngineEvents:
    """The events of an engine. Safe from several threads."""

    def __init__(self, parts: Parts, *, metrics: Metrics, wall: Callable[[], float]) -> None:
        """Take the parts that keep events; both may be off."""
        self._publisher = parts.publisher
        self._placement = parts.placement
        self._off = parts.off
        self._metrics = metrics
        self._wall = wall

    def append(self, events: Sequence[Event]) -> None:
        """Write clients' events; see `Engine.append_events`."""
        if self._publisher is None:
            raise FeatureOff(
                f"this server keeps no events: {self._off.get('events', 'not configured')}"
            )
        with storing():
            self._publisher.publish(events)
        self._metrics.events_accepted.inc(len(events))

    def offer_search(
        self,
        request: SearchRequest,
        tenant: str,
        found: Sequence[tuple[str, float]],
        *,
        request_id: str,
        group_key: str,
        event_id: str | None = None,
    ) -> None:
        """Tell what a search has found: (id, score), best first; see `Engine.search`."""
        names = [result_id for result_id, _ in found]
        extra = {"request_id": request_id, "group_key": group_key}
        if self._placement is not None:
            self._placement.offer(
                tenant, request.route, request.session, names, self._wall(), query=request.text
            )
        self._offer(
            SEARCH_PERFORMED,
            tenant,
            names,
            session=request.session,
            route=request.route,
            query=request.text,
            event_id=event_id,
            extra={name: value for name, value in extra.items() if value} or None,
        )

    def offer_change(self, event_type: str, tenant: str, names: Sequence[str]) -> None:
        """Tell which documents were written or deleted."""
        for start in range(0, len(names), _EVENT_CHUNKS):
            self._offer(event_type, tenant, names[start : start + _EVENT_CHUNKS])

    def _offer(self, event_type: str, tenant: str, names: Sequence[str], **more: Any) -> None:
        if self._publisher is None:
            return
        try:
            event = new_event(
                event_type, tenant=tenant, chunk_ids=names, time_s=self._wall(), **more
            )
        except EventError as error:
            log.warning("service.event_unfit", type=event_type, reason=str(error))
            return
        self._publisher.offer(event)
