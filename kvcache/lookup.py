"""Semantic lookup reuse: a question that means the same as an earlier one reuses its passages.

Per tenant and in memory. An exact repeat at an unchanged fence is reused at once; anything else
must pass every guard and a policy that has proved its error bound on real outcomes.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.guards import Conflict, Guard, first_conflict
from stoker.kvcache.nearest import Slot, Vector
from stoker.kvcache.question import Question, encoded, read_question
from stoker.kvcache.reuse_policy import FitTask, ReusePolicy, Verdict
from stoker.kvcache.reuse_selector import NEIGHBORS, Features, pair_features
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.telling_words import Differences, differences_of
from stoker.kvcache.tenant_lookups import Fence, TenantLookups

log = structlog.get_logger(__name__)

_SAME_VECTOR = 0.9999


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What is needed to learn from a decision once the true result is known."""

    policy: ReusePolicy  # that decided
    slot: Slot
    serial: int
    features: Features
    differences: Differences
    result_ids: tuple[str, ...]
    verdict: Verdict
    reused: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """The earlier result may be given again.

    Attributes:
        source_text: The earlier question.
        similarity: Cosine of the two questions.
        bound: Proved upper bound on the chance that such a reuse is wrong; 0 for an exact repeat.
        exact: Same text at the same fence: nothing to prove.
        result_ids: The earlier passages, best first.
        scores: Their scores, float32, same order.
        verify: Chosen for verification: run the real search in the background and hand its result
            to `LookupReuse.store` with ``after=`` this decision, or say `LookupReuse.give_up`.
        trial: Internal; None for an exact repeat.
    """

    source_text: str
    similarity: float
    bound: float
    exact: bool
    result_ids: tuple[str, ...]
    scores: NDArray[np.float32]
    verify: bool
    trial: Trial | None


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Search instead; ``guard`` says who refused.

    Attributes:
        guard: The first guard that spoke.
        similarity: Cosine of the nearest valid earlier question; -1 where there is none.
        bound: The policy's present bound; 1 while nothing is proved.
        conflict: What differed, for the guards that compare two texts.
        trial: Internal; set where the coming search's result also tells whether a reuse would
            have been right. Hand it to `LookupReuse.store` with ``after=`` this decision.
    """

    guard: Guard
    similarity: float = -1.0
    bound: float = 1.0
    conflict: Conflict | None = None
    trial: Trial | None = None


Decision = Reuse | Refusal


def overlap_of(fresh: Sequence[str], earlier: Sequence[str]) -> float:
    """Return the share of ``fresh`` that ``earlier`` holds; two empty results agree fully."""
    if not fresh:
        return 1.0 if not earlier else 0.0
    return len(set(fresh) & set(earlier)) / len(set(fresh))


class LookupReuse:
    """Earlier lookups of all tenants, each seen by its own tenant only.

    Thread-safe: one lock per tenant is held for a lookup (under 1 ms at 100,000 entries) and a
    store. What the policy fits now and then (40 ms) it fits while that lock is free: in the `store`
    that it became due in, or where `fit_beside` says. Nothing is shared between tenants but the
    table that finds a tenant.

    Args:
        settings: The room's settings.
        rng: Draws which reuses are verified; pass a seeded one for a repeatable run.
    """

    def __init__(
        self,
        settings: KvcacheSettings | None = None,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings or KvcacheSettings()
        self._rng = rng or random.Random()
        self._beside: Callable[[Callable[[], None]], None] = lambda fit: fit()
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, TenantLookups] = OrderedDict()

    def lookup(
        self,
        tenant: str,
        text: str,
        vector: NDArray[Any],
        fence: Fence,
        *,
        results: int | None = None,
    ) -> Decision:
        """Decide whether an earlier result answers this question.

        Args:
            tenant: Whose earlier questions to look at.
            text: The question.
            vector: Its embedding, shape (dim,), finite, not zero; any length, any float dtype.
            fence: What the answer must reflect.
            results: How many are wanted: a lookup that found fewer is no candidate, and of one
                that found more only so many are given and, later, judged. None: as many as it has.

        Returns:
            A `Reuse`, or a `Refusal` that names the guard. After a search, hand its result and
            this decision to `store`, so that the policy learns.

        Raises:
            InputError: the vector is not one finite, non-zero vector, or its dim is not the one
                that this tenant's earlier questions have.
        """
        if not self._settings.reuse_enabled:
            return Refusal(Guard.DISABLED)
        if not text.strip() or len(encoded(text)) > self._settings.reuse_text_bytes_max:
            return Refusal(Guard.EMPTY)
        unit = _unit_vector(vector)
        question = read_question(text)
        if not question.normal:
            return Refusal(Guard.EMPTY)
        with self._lock:
            state = self._tenants.get(tenant)
            if state is None:
                return Refusal(Guard.NO_CANDIDATE)
            self._tenants.move_to_end(tenant)
        if len(unit) != state.dim:
            raise InputError(f"vector: expected {state.dim} dimensions, found {len(unit)}")
        with state.lock:
            decision = self._decide(state, question, unit, fence, results)
        return decision

    def _decide(
        self,
        state: TenantLookups,
        question: Question,
        unit: Vector,
        fence: Fence,
        results: int | None,
    ) -> Decision:
        exact = self._exact(state, question, unit, fence, results)
        if exact is not None:
            return exact
        nearest = state.near.nearest(unit, NEIGHBORS)
        if not nearest:
            return Refusal(Guard.NO_CANDIDATE)
        valid = [(slot, value) for slot, value in nearest if state.is_valid(slot, fence)]
        if not valid:
            return Refusal(Guard.FENCE, similarity=nearest[0][1])
        if results is not None:
            enough = [pair for pair in valid if len(state.entries[pair[0]].result_ids) >= results]
            if not enough:
                return Refusal(Guard.FEWER_RESULTS, similarity=valid[0][1])
        else:
            enough = valid
        refusal: Refusal | None = None
        for slot, similarity in enough[: self._settings.reuse_candidates_max]:
            if similarity < self._settings.reuse_similarity_min:
                return refusal or Refusal(
                    Guard.SIMILARITY, similarity=similarity, bound=state.policy.bound()
                )
            entry = state.entries[slot]
            conflict = first_conflict(question, entry.question)
            if conflict is not None and refusal is not None:
                continue
            differences = differences_of(question, entry.question)
            features = pair_features(
                question, entry.question, similarity=similarity,
                around=state.around(valid, candidate=slot),
            )  # fmt: skip
            if conflict is None:
                verdict = state.policy.decide(features, self._rng.random(), differences=differences)
            else:
                verdict = state.policy.refuse()
            trial = Trial(
                policy=state.policy, slot=slot, serial=entry.serial, features=features,
                differences=differences, result_ids=entry.result_ids[:results], verdict=verdict,
                reused=verdict.allowed,
            )  # fmt: skip
            if conflict is not None:
                refusal = Refusal(
                    conflict.guard, similarity=similarity, bound=verdict.bound,
                    conflict=conflict, trial=trial,
                )  # fmt: skip
                continue
            if not verdict.allowed:
                return Refusal(
                    Guard.EVIDENCE, similarity=similarity, bound=verdict.bound, trial=trial
                )
            state.entries.move_to_end(slot)
            if not verdict.verify:
                state.policy.skip(verdict)
            return Reuse(
                source_text=entry.question.text, similarity=similarity, bound=verdict.bound,
                exact=False, result_ids=entry.result_ids[:results], scores=entry.scores[:results],
                verify=verdict.verify, trial=trial,
            )  # fmt: skip
        assert refusal is not None
        return refusal

    def _exact(
        self,
        state: TenantLookups,
        question: Question,
        unit: Vector,
        fence: Fence,
        results: int | None,
    ) -> Reuse | None:
        slot = state.by_text.get(question.normal)
        if slot is None or not state.is_valid(slot, fence):
            return None
        entry = state.entries[slot]
        # The normal form finds the entry; only the very same request needs no proof.
        if entry.question.text.strip() != question.text.strip():
            return None
        if results is not None and len(entry.result_ids) < results:
            return None
        similarity = float(state.near.vectors[slot] @ unit)
        if similarity < _SAME_VECTOR:
            return None
        state.entries.move_to_end(slot)
        return Reuse(
            source_text=entry.question.text, similarity=min(similarity, 1.0), bound=0.0, exact=True,
            result_ids=entry.result_ids[:results], scores=entry.scores[:results], verify=False,
            trial=None,
        )  # fmt: skip

    def store(
        self,
        tenant: str,
        text: str,
        vector: NDArray[Any],
        result_ids: Sequence[str],
        scores: NDArray[Any] | Sequence[float],
        fence: Fence,
        *,
        similarity_floor: float | None = None,
        after: Decision | None = None,
    ) -> None:
        """Keep a real search's result, and learn from it whether ``after`` was right.

        Args:
            tenant: Whose question it was.
            text: The question; empty and over-long ones are not kept.
            vector: Its embedding, shape (dim,), as in `lookup`.
            result_ids: What the search found, best first.
            scores: Same length and order; given back as they are.
            fence: What the result reflects: read *before* the search started.
            similarity_floor: Cosine of the query and the last of a *full* result. A changed
                document under it cannot enter the result, so the entry outlives that change.
                None (fewer results than asked for, filters, another metric): every upsert may.
            after: The decision that `lookup` gave for this question.

        Raises:
            InputError: as for `lookup`, or ids and scores differ in length.
        """
        if not self._settings.reuse_enabled:
            return
        unit = _unit_vector(vector)
        kept_scores = np.asarray(scores, np.float32).reshape(-1).copy()
        if len(kept_scores) != len(result_ids):
            raise InputError(f"expected {len(result_ids)} scores, found {len(kept_scores)}")
        kept_scores.flags.writeable = False
        if len(encoded(text)) > self._settings.reuse_text_bytes_max:
            return
        question = read_question(text)
        if not question.normal:
            return
        state = self._state_for(tenant, len(unit))
        ids = tuple(str(result_id) for result_id in result_ids)
        with state.lock:
            if after is not None and after.trial is not None:
                self._learn(state, after.trial, ids)
            state.put(
                question, unit, result_ids=ids, scores=kept_scores, fence=fence,
                floor=-2.0 if similarity_floor is None else similarity_floor,
            )  # fmt: skip
            task = state.policy.fit_due()
        if task is not None:
            self._beside(lambda: self._fit(state, task))

    def give_up(self, tenant: str, decision: Decision) -> None:
        """Account for a promised check whose search failed or was cut: it teaches nothing.

        The proof then counts that reuse as wrong, for it may have been. So does it count a check
        that is neither stored nor given up while `ReusePolicy.CHECKS_OPEN_MAX` later ones are.
        """
        trial = decision.trial
        with self._lock:
            state = self._tenants.get(tenant)
        if trial is None or state is None or trial.policy is not state.policy:
            return
        with state.lock:
            state.policy.lose(trial.verdict)

    def fit_beside(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Hand fits to somebody else than whoever stores a result.

        Args:
            run: Calls what it is given once, now or later, in any thread.
        """
        self._beside = run

    def _fit(self, state: TenantLookups, task: FitTask) -> None:
        """Fit while the tenant's lookups go on; they judge by the last fit until this one ends."""
        fitted = None
        try:
            fitted = task.run()
        finally:
            with state.lock:
                state.policy.end_fit(task, fitted)

    def _learn(self, state: TenantLookups, trial: Trial, fresh: tuple[str, ...]) -> None:
        if trial.policy is not state.policy:
            return  # the tenant was let go meanwhile: another's pick is no part of this one's proof
        same = overlap_of(fresh, trial.result_ids) >= self._settings.reuse_overlap_min
        state.policy.learn(trial.verdict, trial.features, same=same, differences=trial.differences)
        if not same:
            entry = state.entries.get(trial.slot)
            if trial.reused and entry is not None and entry.serial == trial.serial:
                state.drop(trial.slot)

    def _state_for(self, tenant: str, dim: int) -> TenantLookups:
        with self._lock:
            state = self._tenants.get(tenant)
            if state is None:
                while len(self._tenants) >= self._settings.reuse_tenants_max:
                    self._tenants.popitem(last=False)
                    log.info("kvcache.tenant_dropped", tenants_max=self._settings.reuse_tenants_max)
                policy = ReusePolicy(
                    delta=self._settings.reuse_delta,
                    alpha=self._settings.reuse_alpha,
                    verify_ratio=self._settings.reuse_verify_ratio,
                    fits_apart=True,
                )
                state = TenantLookups(self._settings, dim=dim, policy=policy)
                self._tenants[tenant] = state
            self._tenants.move_to_end(tenant)
        if state.dim != dim:
            raise InputError(f"vector: expected {state.dim} dimensions, found {dim}")
        return state

    def record_change(
        self,
        tenant: str,
        fence: Fence,
        *,
        changed_ids: Sequence[str],
        vectors: NDArray[Any] | None,
        since: int | None = None,
    ) -> int:
        """Account for document changes, dropping the entries that they could alter.

        Call it before the change is acknowledged. An entry survives if it held none of the changed
        ids and no new vector is nearer to its question than its last result. Without this call
        nothing stale is reused either: every entry then ends at its own offset.

        Args:
            tenant: Whose documents changed.
            fence: The state after the change.
            changed_ids: Ids upserted or deleted.
            vectors: The new vectors of upserts, shape (n, dim); (0, dim) where only deletes
                happened; None where they are not known, which drops every entry.
            since: The change offset before these changes; by default one less than the fence's.

        Returns:
            How many entries were dropped.

        Raises:
            InputError: vectors of another dim, or not finite.
        """
        with self._lock:
            state = self._tenants.get(tenant)
        if state is None:
            return 0
        units: NDArray[np.float32] | None = None
        if vectors is not None:
            given = np.asarray(vectors, np.float32).reshape(-1, state.dim)
            if not np.all(np.isfinite(given)):
                raise InputError("vectors: expected finite values")
            lengths = np.linalg.norm(given, axis=1, keepdims=True)
            units = given / np.maximum(lengths, 1e-30)
        start = fence.change_offset - 1 if since is None else since
        with state.lock:
            dropped = state.change(fence, since=start, ids=changed_ids, vectors=units)
        if dropped:
            log.debug("kvcache.lookups_dropped", entries=dropped, offset=fence.change_offset)
        return dropped

    def forget(self, tenant: str) -> None:
        """Drop everything known of one tenant."""
        with self._lock:
            self._tenants.pop(tenant, None)

    def counts(self, tenant: str) -> dict[str, float]:
        """Return entries, bytes, bound, exposure and errors of one tenant; zeros if unknown."""
        with self._lock:
            state = self._tenants.get(tenant)
        if state is None:
            return {"entries": 0, "bytes": 0, "bound": 1.0, "exposure": 0.0, "errors": 0}
        with state.lock:
            return {
                "entries": len(state.entries),
                "bytes": state.bytes(),
                "bound": state.policy.bound(),
                "exposure": state.policy.exposure(),
                "errors": state.policy.errors(),
            }

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant of any tenant."""
        with self._lock:
            states = list(self._tenants.values())
            assert len(states) <= self._settings.reuse_tenants_max
        for state in states:
            with state.lock:
                state.check()
                state.policy.check()


def _unit_vector(vector: NDArray[Any]) -> Vector:
    given = np.asarray(vector, np.float32)
    if given.ndim != 1 or given.size == 0:
        raise InputError(f"vector: expected shape (dim,), found {given.shape}")
    length = float(np.linalg.norm(given))
    if not np.isfinite(length) or length == 0.0:
        raise InputError("vector: expected finite values that are not all zero")
    return given / np.float32(length)
