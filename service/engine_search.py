"""One search's way: embedding, reuse or the index, the documents, the event that tells of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.index.filters import FilterError
from stoker.index.hits import Hits
from stoker.kvcache.lookup import Decision, Reuse
from stoker.kvcache.tenant_lookups import Fence
from stoker.service.answers import (
    Completeness,
    ReuseDecision,
    SearchAnswer,
    SearchResult,
    Timings,
)
from stoker.service.bodies import SearchRequest
from stoker.service.document_writes import index_id
from stoker.service.engine_events import EngineEvents
from stoker.service.engine_parts import Parts
from stoker.service.kv_groups import is_grouped
from stoker.service.metrics import Metrics
from stoker.service.problems import DeadlinePassed, RequestError
from stoker.service.reuse_front import ReuseFront, is_whole

Vector = NDArray[np.float32]


class _Found(NamedTuple):
    """What answers a search.

    Attributes:
        hits: (document id, score), nearest first.
        completeness: What was promised of them.
        pages_read: Pages read from storage for them; 0 where they were reused.
        bytes_read: Bytes of those.
    """

    hits: list[tuple[str, float]]
    completeness: Completeness
    pages_read: int = 0
    bytes_read: int = 0


class EngineSearch:
    """The engine's read half. Safe from several threads; every call blocks.

    Invariant: a search sees one tenant's documents: the filter that says so is set here, around
    whatever filter the request brought.

    Args:
        verify_s: Time that the true search behind a reused answer may take.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        reuse: ReuseFront,
        events: EngineEvents,
        metrics: Metrics,
        verify_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._index = parts.index
        self._text = parts.text_model
        self._kv = parts.kv
        self._reuse = reuse
        self._events = events
        self._metrics = metrics
        self._verify_s = verify_s
        self._monotonic = monotonic
        self._wall = wall

    def search(
        self,
        request: SearchRequest,
        *,
        tenant: str,
        left_s: float,
        request_id: str,
        started: float | None,
        event_id: str | None,
    ) -> SearchAnswer:
        """Find the nearest documents of one tenant; see `Engine.search`."""
        begin = self._monotonic()
        started = begin if started is None else started
        end = begin + left_s
        vector, embed_s = self._vector_of(request, left_s)
        fence = Fence(self._index.generation, self._index.change_offset)
        mark = self._monotonic()
        decision, reuse = self._reuse.consult(request, tenant, vector, fence)
        reuse = self._grouped(request, tenant, vector, reuse)
        reuse_s = self._monotonic() - mark
        mark = self._monotonic()
        if isinstance(decision, Reuse) and reuse.decision == "reused":
            found = self._reused(request, tenant, vector, fence, decision)
        else:
            found = self._searched(request, tenant, vector, fence, end, after=decision)
        search_s = self._monotonic() - mark
        mark = self._monotonic()
        results = self._results(request, tenant, found.hits)
        documents_s = self._monotonic() - mark
        self._metrics.reuse.labels(reuse.decision).inc()
        self._events.offer_search(
            request,
            tenant,
            found.hits,
            request_id=request_id,
            group_key=reuse.group_key,
            event_id=event_id,
        )
        return SearchAnswer(
            results=results,
            completeness=found.completeness,
            reuse=reuse,
            pages_read=found.pages_read,
            bytes_read=found.bytes_read,
            timings=Timings(
                total_ms=_ms(self._monotonic() - started),
                queue_ms=_ms(begin - started),
                embed_ms=_ms(embed_s),
                reuse_ms=_ms(reuse_s),
                search_ms=_ms(search_s),
                documents_ms=_ms(documents_s),
            ),
            generation=fence.generation,
            tenant=tenant,
            request_id=request_id,
            prompt_order=self._prompt_order(tenant, found.hits),
        )

    def _vector_of(self, request: SearchRequest, left_s: float) -> tuple[Vector, float]:
        """Return what to search for, and the seconds that embedding took; 0 where none did."""
        vector = request.vector
        embed_s = 0.0
        if vector is None:
            assert request.text is not None
            begin = self._monotonic()
            vector = self._text.embed_query(request.text, left_s=left_s)
            embed_s = self._monotonic() - begin
            self._metrics.embed_seconds.observe(embed_s)
        if vector.shape != (self._index.dim,):
            raise RequestError(
                f"vector: expected {self._index.dim} numbers, found {vector.shape[0]}",
                where="/vector",
            )
        return vector, embed_s

    def _reused(
        self, request: SearchRequest, tenant: str, vector: Vector, fence: Fence, decision: Reuse
    ) -> _Found:
        """Answer as an earlier search was; of some the true search is done later, to learn."""
        hits = list(zip(decision.result_ids, decision.scores.tolist(), strict=True))
        completeness = self._reuse.completeness_of(tenant, decision.source_text)
        if decision.verify:
            check = partial(self._verify, request, tenant, vector, fence, decision)
            self._reuse.verify(check, hurried=partial(check, tries=1))
        return _Found(hits[: request.k], completeness)

    def _searched(
        self,
        request: SearchRequest,
        tenant: str,
        vector: Vector,
        fence: Fence,
        end: float,
        *,
        after: Decision | None,
    ) -> _Found:
        """Ask the index, and keep the answer for reuse."""
        hits = self._search_index(request, tenant, vector, end)
        found = _Found(
            _named(hits), _completeness(hits), int(hits.pages_read), int(hits.bytes_read)
        )
        self._reuse.keep(
            request, tenant, vector, fence, found.hits, found.completeness, after=after
        )
        return found

    def _grouped(
        self, request: SearchRequest, tenant: str, vector: Vector, reuse: ReuseDecision
    ) -> ReuseDecision:
        """Say which searches of the last seconds ask for the same, where that is on."""
        kv = self._kv
        key = "" if kv is None else kv.group_key(tenant, request.text, vector, self._wall())
        if is_grouped(key):
            self._metrics.grouped.labels(reuse.decision).inc()
        return dataclasses.replace(reuse, group_key=key) if key else reuse

    def _prompt_order(self, tenant: str, found: Sequence[tuple[str, float]]) -> tuple[str, ...]:
        kv = self._kv
        return () if kv is None else kv.prompt_order(tenant, [name for name, _ in found])

    def _search_index(
        self, request: SearchRequest, tenant: str, vector: Vector, end: float
    ) -> Hits:
        left_s = end - self._monotonic()
        if left_s <= 0:
            raise DeadlinePassed("no time was left to search", where="deadline_ms")
        only: dict[str, Any] = {"tenant": tenant}
        # The request's filter stands beside the tenant's, never in its place.
        allowed = {"and": [request.filters, only]} if request.filters else only
        mark = self._monotonic()
        try:
            hits = self._index.search(
                vector,
                request.k,
                recall_target=request.recall_target,
                deadline_ms=left_s * 1e3,
                filter=allowed,
            )
        except FilterError as error:
            # In the caller's words: of what stands around it nothing can be wrong.
            reason = str(error).replace("filter.and[0]", "filters", 1)
            raise RequestError(reason, where="/filters") from error
        self._metrics.search_seconds.observe(self._monotonic() - mark)
        self._metrics.search_pages.observe(int(hits.pages_read))
        self._metrics.read_bytes.inc(int(hits.bytes_read))
        if hits.completeness < 1.0:
            self._metrics.incomplete.inc()
        return hits

    def _verify(
        self,
        request: SearchRequest,
        tenant: str,
        vector: Vector,
        fence: Fence,
        reused: Reuse,
        *,
        tries: int = 2,
    ) -> None:
        """Do the real search of a reused answer, so that the reuse policy learns from it.

        One that time cut short is tried again with four times the time: the first has read pages
        that the second needs. Not where other checks have no place or all ends: a request would
        wait for it. Where none is complete, the proof counts the reuse as wrong.

        Raises:
            UnavailableError: none was complete.
        """
        patience_s, told = self._verify_s, False
        try:
            for _ in range(tries):
                end = self._monotonic() + patience_s
                found = self._searched(request, tenant, vector, fence, end, after=reused)
                told = is_whole(found.completeness)
                if told or not found.completeness.deadline_hit or self._reuse.hurried:
                    break
                patience_s *= 4.0
        finally:
            if not told:
                self._reuse.give_up(tenant, reused)
        if not told:
            raise UnavailableError("the true search was incomplete: the reuse counts as wrong")

    def _results(
        self, request: SearchRequest, tenant: str, found: Sequence[tuple[str, float]]
    ) -> tuple[SearchResult, ...]:
        if not found or not (request.include_text or request.include_metadata):
            return tuple(SearchResult(result_id, score) for result_id, score in found)
        ids = [index_id(self._index, result_id) for result_id, _ in found]
        kv = self._kv
        read = self._index.documents if kv is None else kv.read_documents
        documents = read(ids, tenant)
        return tuple(
            SearchResult(
                result_id,
                score,
                text=document.text if document and request.include_text else None,
                metadata=dict(document.metadata) if document and request.include_metadata else None,
            )
            for (result_id, score), document in zip(found, documents, strict=True)
        )


def _named(hits: Hits) -> list[tuple[str, float]]:
    """Return (id, score) of the hits that are there, nearest first."""
    scores = hits.scores.tolist()
    return [
        (str(hit_id), score)
        for hit_id, score in zip(hits.ids.tolist(), scores, strict=True)
        if score == score  # the tail of missing hits is not-a-number
    ]


def _completeness(hits: Hits) -> Completeness:
    return Completeness(
        work_ratio=float(hits.completeness),
        recall_bound=float(hits.recall_bound),
        expected_recall=float(hits.expected_recall),
        exact_share=float(hits.exact_share),
        deadline_hit=bool(hits.deadline_hit),
        scanned=bool(hits.scanned),
    )


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
