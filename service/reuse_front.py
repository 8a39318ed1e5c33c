"""Lookup reuse in front of the search: which requests take part, and what is kept of their answers.

`kvcache.lookup` decides whether an earlier result may stand for a new question. Here is what a
server adds: only complete answers are kept, with how complete they were; the checks that the reuse
policy asks for are run beside the answers; and without reuse all of this is off and says why.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.guards import Guard
from stoker.kvcache.lookup import Decision, LookupReuse, Reuse
from stoker.kvcache.tenant_lookups import Fence
from stoker.service.answers import Completeness, ReuseDecision
from stoker.service.bodies import SearchRequest
from stoker.service.rounds import is_fault

log = structlog.get_logger(__name__)

Vector = NDArray[np.float32]
Found = Sequence[tuple[str, float]]
"""(id, score) of results, nearest first."""

_VERIFY_PENDING_MAX = 16
_KNOWN_ANSWERS_MAX = 20_000


class ReuseFront:
    """What stands between a request and the index. Safe from several threads.

    Invariant: what is given again was a complete answer to a request of the same kind: by text,
    without filters and without a recall target of its own.
    """

    def __init__(self, reuse: LookupReuse | None, *, metric: str, off: str) -> None:
        """Stand in front of an index.

        Args:
            reuse: The room's part; None where reuse is off.
            metric: The index's; under cosine an answer outlives changes that are too far away.
            off: Why reuse is off.
        """
        self._reuse = reuse
        self._metric = metric
        self._off = off
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="reuse-verify")
        self._slots = threading.BoundedSemaphore(_VERIFY_PENDING_MAX)
        self._known: OrderedDict[tuple[str, str], Completeness] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: set[Future[None]] = set()
        self._closing = False
        if reuse is not None:
            reuse.fit_beside(self._fit_beside)

    @property
    def state(self) -> str:
        """ "on", or why it is off."""
        return "on" if self._reuse is not None else self._off

    def consult(
        self, request: SearchRequest, tenant: str, vector: Vector, fence: Fence
    ) -> tuple[Decision | None, ReuseDecision]:
        """Look for an earlier answer; returns the room's decision and what a client is told."""
        if self._reuse is None:
            return None, ReuseDecision("off", self._off)
        reason = _unfit(request)
        if reason:
            return None, ReuseDecision("searched", reason)
        assert request.text is not None
        decision = self._reuse.lookup(tenant, request.text, vector, fence, results=request.k)
        if isinstance(decision, Reuse):
            kind = "exact repeat" if decision.exact else f"cosine {decision.similarity:.3f}"
            return decision, ReuseDecision("reused", kind)
        if decision.guard is Guard.DISABLED:
            return None, ReuseDecision("off", "kvcache.reuse_enabled is false")
        return decision, ReuseDecision("searched", str(decision.guard))

    def keep(
        self,
        request: SearchRequest,
        tenant: str,
        vector: Vector,
        fence: Fence,
        found: Found,
        completeness: Completeness,
        *,
        after: Decision | None,
    ) -> None:
        """Keep a search's result for later questions; an incomplete one is worth no repeat.

        Args:
            fence: Read before the search began.
            after: What `consult` decided for this request.
        """
        if self._reuse is None or _unfit(request):
            return
        if not is_whole(completeness):
            return
        assert request.text is not None
        # The floor must hold exactly: a score that was estimated from codes may be above the truth.
        exact = self._metric == "cosine" and completeness.exact_share >= 1.0
        full = exact and len(found) == request.k
        self._reuse.store(
            tenant,
            request.text,
            vector,
            [result_id for result_id, _ in found],
            [score for _, score in found],
            fence,
            similarity_floor=found[-1][1] if full else None,
            after=after,
        )
        with self._lock:
            self._known[tenant, request.text] = completeness
            self._known.move_to_end((tenant, request.text))
            while len(self._known) > _KNOWN_ANSWERS_MAX:
                self._known.popitem(last=False)

    def give_up(self, tenant: str, reused: Reuse) -> None:
        """Say that a promised check found nothing to compare: the proof counts it as wrong."""
        if self._reuse is not None:
            self._reuse.give_up(tenant, reused)

    @property
    def hurried(self) -> bool:
        """Whether a check should end soon: all places are taken, or this closes."""
        if self._closing or not self._slots.acquire(blocking=False):
            return True
        self._slots.release()
        return False

    def completeness_of(self, tenant: str, text: str) -> Completeness:
        """Return how complete the search was that is given again."""
        with self._lock:
            known = self._known.get((tenant, text))
        # Forgotten: only complete results are kept, but the bounds are not known any more.
        return known or Completeness(1.0, 0.0, 0.0, 0.0, deadline_hit=False)

    def verify(
        self, check: Callable[[], None], *, hurried: Callable[[], None] | None = None
    ) -> None:
        """Run a promised check beside the answer.

        A promised check is never dropped, or the error bound would stand on lucky samples: where
        too many wait already, the request does its own.

        Args:
            check: In the background it may take its time.
            hurried: The same for the request itself; ``check`` where there is none.
        """

        def run(check: Callable[[], None]) -> None:
            try:
                check()
            except Exception as error:  # the answer is given: nobody waits for what this raises
                fault = is_fault(error)
                log.warning("service.reuse_unverified", reason=str(error), exc_info=fault)

        if self._slots.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # closing
                # One that is given up when this closes frees its place as well: others wait.
                self._submit(partial(run, check)).add_done_callback(lambda _: self._slots.release())
                return
        else:
            self._slots.acquire()
        try:
            run(hurried or check)
        finally:
            self._slots.release()

    def _fit_beside(self, fit: Callable[[], None]) -> None:
        """Let no request wait for what the policy learns from it."""
        try:
            self._submit(fit).add_done_callback(_say_failed)
        except RuntimeError:  # closing
            fit()

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        with self._lock:
            doing = self._verifier.submit(work)
            self._under_way.add(doing)
        doing.add_done_callback(self._ended)
        return doing

    def _ended(self, done: Future[None]) -> None:
        with self._lock:
            self._under_way.discard(done)

    def record_change(
        self, tenant: str, names: Sequence[str], vectors: Vector, *, generation: int, offset: int
    ) -> None:
        """Drop the earlier answers that a change could alter; call before it is acknowledged.

        Args:
            names: The documents that changed.
            vectors: Of those that were written, shape (n, dim); (0, dim) for a delete.
            offset: Of the last of these changes; one for each name, in a row.
        """
        if self._reuse is None:
            return
        try:
            self._reuse.record_change(
                tenant,
                Fence(generation, offset),
                changed_ids=names,
                vectors=vectors,
                since=offset - len(names),
            )
        except InputError as error:
            log.warning("service.reuse_forgotten", reason=str(error))
            self._reuse.forget(tenant)

    def close(self, timeout_s: float) -> bool:
        """Give up what waits, and let the running check end; tells whether it did in time."""
        self._closing = True
        self._verifier.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            running = {check for check in self._under_way if not check.done()}
        return not wait(running, timeout_s).not_done


def _say_failed(fit: Future[None]) -> None:
    error = None if fit.cancelled() else fit.exception()
    if error is not None:
        log.warning("service.reuse_not_fitted", reason=str(error), exc_info=error)


def is_whole(completeness: Completeness) -> bool:
    """Return whether a search left nothing out: only then is it kept, or does it check another."""
    return completeness.work_ratio >= 1.0 and not completeness.deadline_hit


def _unfit(request: SearchRequest) -> str:
    """Return why a request takes no part in reuse; empty where it does."""
    if request.text is None:
        return "a search by vector has no text to compare"
    if request.filters:
        return "a filtered search is never reused"
    if request.recall_target is not None:
        return "the request states its own recall target"
    return ""
