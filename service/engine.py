"""The engine: everything that a server does, without HTTP.

It wires the index, its documents, the embedding model, lookup reuse, the event log, the heat and
the warm-ups together, for all tenants. The HTTP routes, the demo and tests call it; every call here
blocks, so an event loop calls it from threads.

What is optional (the model, reuse, events) is off when it is not configured or cannot be had, and
every answer says so; nothing is silently narrower.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from stoker.prefetch.coverage_curve import KNOWN, Coverage
from stoker.prefetch.events import Event
from stoker.prefetch.held_back import HeldBack
from stoker.prefetch.protocols import WarmSource
from stoker.prefetch.receipt import Receipt
from stoker.prefetch.warm_set import Accesses
from stoker.service.answers import (
    Readiness,
    SearchAnswer,
    WarmupStatus,
)
from stoker.service.bodies import DocumentRow, SearchRequest, WarmupRequest
from stoker.service.configuration import StokerConfig
from stoker.service.document_writes import DocumentWrites
from stoker.service.engine_events import EngineEvents
from stoker.service.engine_metrics import ShownParts
from stoker.service.engine_parts import Parts
from stoker.service.engine_search import EngineSearch
from stoker.service.index_place import IndexPlace
from stoker.service.metrics import Metrics
from stoker.service.problems import FeatureOff
from stoker.service.reuse_front import ReuseFront
from stoker.service.rounds import Rounds, is_fault
from stoker.service.turns import Callers
from stoker.service.warmup import WarmupRunner

log = structlog.get_logger(__name__)

_STOP_S = 8.0
_MEASURE_S = 5.0
_STOP_S_MIN = 0.2  # a part that others left no time is still asked


class Engine:
    """One server's working parts. Every method is safe from several threads and blocks.

    Invariants:
        * A search sees one tenant's documents (`EngineSearch`).
        * What `upsert`, `delete` and `append_events` return for is durable.
        * Nothing that a search waits for ever waits for the event log or a warm-up.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        config: StokerConfig,
        metrics: Metrics | None = None,
        receipt_path: Path | None = None,
        closed: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Put the parts together; `start` sets them going. The engine owns and closes them.

        What surrounds the engine enters `callers` for each request that somebody waits for.

        Args:
            receipt_path: Where the last warm-up's receipt is kept.
            closed: Called at the end of `close`, when all parts have let go.
        """
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        self.draining = False
        self.callers = Callers()
        self._parts = parts
        self._index = parts.index
        self._text = parts.text_model
        self._reuse = ReuseFront(
            parts.reuse, metric=parts.index.metric, off=parts.off.get("reuse", "off")
        )
        self._monotonic = monotonic
        self._wall = wall
        self._closed = False
        self._refreshing = Rounds(
            self._follow_writer,
            name="refresh",
            every_s=config.service.refresh_s,
            failed=self._not_followed,
        )
        self._place = IndexPlace(parts.index.in_place)
        self._when_closed = closed
        self._lock = threading.Lock()
        self._shown = ShownParts(parts, self.metrics)
        self._events = EngineEvents(parts, metrics=self.metrics, wall=wall)
        self._writes = DocumentWrites(
            parts, reuse=self._reuse, metrics=self.metrics, changed=self._events.offer_change
        )
        self._searching = EngineSearch(
            parts,
            reuse=self._reuse,
            events=self._events,
            metrics=self.metrics,
            verify_s=config.service.deadline_ms_default / 1e3,
            monotonic=monotonic,
            wall=wall,
        )
        self._warmup = WarmupRunner(
            self._warm_sources,
            self._demand_for_warmup,
            settings=config.prefetch,
            receipt_path=receipt_path,
            finished=self._shown.note_receipt,
            coverage=self._coverage,
            held_back=self._held_back,
            accesses_since=self._accesses_since,
            callers=self.callers,
            wall=wall,
        )
        self._measuring = Rounds(
            self._warmup.measure,
            name="warm-up measure",
            every_s=_MEASURE_S,
            failed=self._not_measured,
        )

    @property
    def _writable(self) -> bool:
        return self._index.mode == "rw"

    @property
    def generation(self) -> int:
        """The generation that answers."""
        return self._index.generation

    # -- lifecycle -------------------------------------------------------------------------

    def start(self) -> None:
        """Follow the log, load the model, and warm as `service.warm` says; returns at once."""
        if self._parts.heat is not None:
            self._parts.heat.start()
            self._measuring.start()
        self._text.start()
        if self._parts.placement is not None:
            self._parts.placement.start()
        if self._parts.kv is not None:
            self._parts.kv.start(heat=self.demand, generation=lambda: self._index.generation)
        service = self.config.service
        self._place.start()
        if self._index.mode == "r":
            self._refreshing.start()
        if service.warm != "none":
            self._warmup.start(
                budget_bytes=None,
                deadline_s=service.warm_deadline_s,
                everything=service.warm == "all",
            )

    def close(self, *, idle: bool = True) -> None:
        """Stop warming, write the heat's snapshot and what waits in the event queue, let go.

        All parts share `_STOP_S`, so that with `service.drain_s` before it a server ends within the
        30 s that orchestrators wait. A second call does nothing.

        Args:
            idle: Whether no call of ours still runs. The index waits for those that do: one that
                hangs must not keep the server from ending.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        parts = self._parts
        end_s = self._monotonic() + _STOP_S

        def left_s() -> float:
            return max(_STOP_S_MIN, end_s - self._monotonic())

        idle = self._warmup.stop(left_s()) and idle
        idle = self._place.stop(left_s()) and idle
        idle = self._refreshing.stop(left_s()) and idle
        idle = self._measuring.stop(left_s()) and idle
        if parts.placement is not None:
            idle = parts.placement.stop(left_s()) and idle
        if parts.kv is not None:
            idle = parts.kv.close(left_s()) and idle
        idle = self._reuse.close(left_s()) and idle
        if parts.publisher is not None:
            parts.publisher.close(left_s() / 2)  # the heat's snapshot needs the other half
        if parts.heat is not None:
            idle = parts.heat.stop(left_s()) and idle
        if parts.event_log is not None and idle:
            parts.event_log.close(left_s())
        if idle:
            parts.index.close()
            self._when_closed()
        else:
            # A thread of ours is still inside; the process ends soon and frees all of it.
            log.warning("service.close_incomplete", timeout_s=_STOP_S)

    def _follow_writer(self) -> None:
        """Show what the process that writes to the index has changed."""
        if self._index.refresh() and self._parts.kv is not None:
            self._parts.kv.forget_documents()

    @staticmethod
    def _not_followed(error: Exception, again: bool) -> None:
        # What was there goes on being served; said once, not with each look.
        if not again:
            log.error("service.refresh_failed", reason=str(error), exc_info=is_fault(error))

    @staticmethod
    def _not_measured(error: Exception, again: bool) -> None:
        if not again:
            log.error("service.measure_failed", reason=str(error), exc_info=is_fault(error))

    def readiness(self) -> Readiness:
        """Tell whether traffic should come, and which parts are on."""
        waiting = list(self._place.waits_for)
        service = self.config.service
        if self.draining:
            waiting.append("draining")
        warm_first = service.ready_requires_warm and service.warm != "none"
        if warm_first and not self._warmup.loaded_once:
            waiting.append("warm-up")
        if self._text.loading:
            waiting.append("embedding-model")
        self.metrics.ready.set(0 if waiting else 1)
        return Readiness(ready=not waiting, waiting_for=tuple(waiting), parts=self._part_states())

    def _part_states(self) -> dict[str, str]:
        off = self._parts.off
        return {
            "text": self._text.state,
            "reuse": self._reuse.state,
            "events": "on" if self._parts.event_log is not None else off.get("events", "off"),
            "writes": "on" if self._writable else off.get("writes", "off: opened read-only"),
        }

    # -- searching -------------------------------------------------------------------------

    def search(
        self,
        request: SearchRequest,
        *,
        tenant: str,
        left_s: float,
        request_id: str = "",
        started: float | None = None,
        event_id: str | None = None,
    ) -> SearchAnswer:
        """Find the nearest documents of one tenant.

        Args:
            left_s: Seconds until the deadline.
            started: When the request arrived, `time.monotonic()` seconds; None means now.
            event_id: Identity of its event: the tries of one search share it, and count once.
                None draws a new one.

        Raises:
            InputError: the vector has another dimension than the index, or a filter is malformed.
            FeatureOff, NotReady: a text was given, and there is no model, or not yet.
            DeadlinePassed: there is no time left to search.
            CorruptError, UnavailableError: as the index raises them.
        """
        return self._searching.search(
            request,
            tenant=tenant,
            left_s=left_s,
            request_id=request_id,
            started=started,
            event_id=event_id,
        )

    # -- writing ---------------------------------------------------------------------------

    def upsert(self, tenant: str, documents: Sequence[DocumentRow], *, left_s: float = 30.0) -> int:
        """Write documents; they are durable when this returns. See `DocumentWrites.upsert`."""
        return self._writes.upsert(tenant, documents, left_s=left_s)

    def delete(self, tenant: str, document_id: str) -> int:
        """Delete a document; durable when this returns. See `DocumentWrites.delete`."""
        return self._writes.delete(tenant, document_id)

    # -- events ----------------------------------------------------------------------------

    def append_events(self, events: Sequence[Event]) -> None:
        """Write clients' events; they are durable when this returns.

        Raises:
            EventError: an event is longer than the log takes.
            FeatureOff: this engine has no event log.
            StorageFull: no room; nothing was acknowledged.
            LogUnavailable: the log is away; nothing was acknowledged.
        """
        self._events.append(events)

    # -- placement -------------------------------------------------------------------------

    def explain_placement(self, tenant: str, document_id: str) -> dict[str, Any]:
        """Return why a passage is kept or not; see `LivePlacement.explain`.

        Raises:
            FeatureOff: no placement runs here.
        """
        if self._parts.placement is None:
            raise FeatureOff("no policies are compared here; service.placement is off")
        return self._parts.placement.explain(tenant, document_id)

    # -- warming ---------------------------------------------------------------------------

    def start_warm(self, request: WarmupRequest) -> None:
        """Start a warm-up in the background. Raises WarmupRunning where one runs."""
        deadline_s = request.deadline_s
        self._warmup.start(
            budget_bytes=request.budget_bytes,
            deadline_s=self.config.service.warm_deadline_s if deadline_s is None else deadline_s,
            everything=request.everything,
        )

    def steer_warm(self, action: str) -> None:
        """Pause, resume, re-prioritise or cancel the running warm-up. Raises WarmupIdle."""
        self._warmup.steer(action)

    def wait_warm(self, timeout_s: float) -> None:
        """Wait for the running warm-up. Raises DeadlinePassed."""
        self._warmup.wait(timeout_s)

    def warm_status(self) -> WarmupStatus:
        """Return the state of the warm-up, with the last receipt."""
        return self._warmup.status()

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last warm-up of this engine."""
        return self._warmup.receipt

    def demand(self) -> Mapping[tuple[str, str], float]:
        """Return the decayed access count by (tenant, chunk id); empty where no heat is kept."""
        heat = self._parts.heat
        return {} if heat is None else heat.demand(self._wall())

    def _warm_sources(self) -> Sequence[WarmSource]:
        kv = self._parts.kv
        return [*self._index.warm_sources(), *(kv.warm_sources() if kv is not None else ())]

    def _demand_for_warmup(self) -> Mapping[tuple[str, str], float]:
        heat = self._parts.heat
        if heat is None:
            return {}
        return heat.demand_for_warmup(
            self._wall(), wait_s=self.config.service.heat_wait_s, rest=self._warmup.rest
        )

    def _coverage(self) -> Coverage:
        heat = self._parts.heat
        return KNOWN if heat is None else heat.coverage(self._wall(), rest=self._warmup.rest)

    def _held_back(self) -> list[HeldBack]:
        heat = self._parts.heat
        if heat is None:
            return []
        return heat.sink.held_back(self._wall(), rest=self._warmup.rest)

    def _accesses_since(self, time_s: float) -> Accesses:
        heat = self._parts.heat
        return Accesses() if heat is None else heat.accesses_since(time_s)

    # -- metrics ---------------------------------------------------------------------------

    def metrics_page(self) -> bytes:
        """Return the metrics, with what is only known when asked brought up to date."""
        self.readiness()
        self._shown.update()
        return self.metrics.page()
