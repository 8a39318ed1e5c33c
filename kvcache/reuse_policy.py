"""Which candidates may be reused: a learned choice, and a proof that it errs seldom enough.

Two parts, kept apart on purpose. A *selector* (`reuse_selector`) ranks candidates by their chance
of error, and a *cut* on its rank picks some. A *bound* (`error_bound`) watches what is picked, and
nothing is reused while that bound is above the user's delta. Until then the picks are refused, and
the real search that follows each refusal is a free piece of the proof.

The selector and the cut may change at any moment: the bound holds for whatever the past chooses
next. So a proof begins as soon as there is something to pick and is never begun again only because
more was learnt; the threshold on cosine is a different one in every neighbourhood and at any time.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import OrderedDict

import numpy as np

from stoker.errors import InputError
from stoker.kvcache.error_bound import (
    DriftAlarm,
    ErrorBound,
    errors_planned,
    exposure_needed,
)
from stoker.kvcache.reuse_selector import Features, Fitted, Outcomes, ReuseSelector
from stoker.kvcache.telling_words import NO_DIFFERENCES, Differences


class Reason(enum.StrEnum):
    """What a verdict rests on; the values are names in reports."""

    REUSED = "reused"
    GUARD = "guard"
    LEARNING = "learning"  # too few outcomes to rank by
    UNSURE_PROVING = "unsure_proving"  # not picked, while a proof was under way
    PROVING = "proving"  # picked, and spent on the first proof
    PROVING_AGAIN = "proving_again"  # picked, and spent on a proof that an error had undone
    UNSURE = "unsure"  # not picked, while a proof stood


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's answer on one candidate.

    Attributes:
        allowed: Reuse it.
        verify: Search as well, and report what came out.
        verify_ratio: The chance at which ``verify`` was drawn; 1 where a search follows anyway.
        error_chance: What the selector expects; NaN while it has learnt nothing.
        bound: The proved bound at the time.
        proofs: Serial numbers of the proofs that its outcome belongs to; none where not picked.
        reason: Why it is allowed or not.
        check: Serial number of the check of a reuse that this asks for; 0 where it asks for none.
    """

    allowed: bool
    verify: bool
    verify_ratio: float
    error_chance: float
    bound: float
    proofs: tuple[int, ...]
    reason: Reason
    check: int = 0


@dataclasses.dataclass(slots=True)
class _Proof:
    """A bound on what was picked since the proof began."""

    serial: int
    bound: ErrorBound


@dataclasses.dataclass(frozen=True, slots=True)
class FitTask:
    """A fit that is due; `run` it without holding the policy's lock."""

    outcomes: Outcomes
    drifts: int

    def run(self) -> Fitted:
        """Fit; 40 ms for 6,000 outcomes."""
        return self.outcomes.fit()


class ReusePolicy:
    """Learns which candidates are safe, and allows them once that is proved.

    What is picked counts for every proof under way; proofs differ in when they began. A later one
    is begun, with a smaller share of alpha, where errors of the past make that the shorter way.

    While proving, the cut is the one that proves delta soonest. Once proved, it is chosen by the
    run itself: reuses so far, the errors found or expected among them, and how many errors the
    run's own upper bound would bear. A young run takes only the safest; errors make it stricter.
    How many of the reuses are verified follows the proof: all of them while one error more would
    end it, half where it could bear one, and so on down to ``verify_ratio``.

    A check that was asked for and found nothing (`lose`) counts as an error in every proof, and so
    does one that is not told of while CHECKS_OPEN_MAX later ones begin. Else the reuses between
    checks would add to a proof that no check can end.

    Deterministic: the same decisions, outcomes and coins in the same order give the same answers.
    Not thread-safe: its owner holds a lock. A fit takes long for a lock that lookups wait for, so
    an owner with ``fits_apart`` asks for `fit_due` after `learn`, runs the task where nobody waits,
    and hands what it found to `end_fit`. Until then the last fit judges, which costs no proof.

    Invariants (`check`): nothing is allowed while ``bound()`` is above delta; every proof spends a
    share of alpha, and all shares together never more than alpha; at most CHECKS_OPEN_MAX checks
    are under way.

    Args:
        delta: The user's largest share of wrong reuses.
        alpha: Chance that any proof of this policy is ever wrong.
        verify_ratio: Least share of reuses to verify: once the proof could bear several errors.
        fits_apart: Leave fits to the owner; otherwise `learn` fits when one is due.
    """

    LEARN_MIN = 60  # outcomes before the selector says anything
    HISTORY_MAX = 6_000  # outcomes kept: the oldest go first, so the selector follows drift
    DRIFT_KEEP = 300  # outcomes that survive a drift alarm
    BEARABLE_MAX = 6  # errors more that are asked after; the verified share halves with each
    UNSEEN = 0.5  # errors taken to lie above any cut beside those counted: none seen is not none
    SHARE_MAX = 0.5  # of delta; dirtier picks than this prove too slowly to be worth their errors
    # Of delta: the chance of error at which one more pick neither helps nor hinders a proof that
    # bets q = 1/2: it adds q delta, and costs ln(1 / (1 - q)) times its chance.
    EVEN = 0.5 / math.log(2.0)
    # Of delta: the largest chance of error that is reused, however much room the run has. Errors
    # are counted where the same words may have come before; what is new errs more than they say.
    REUSE_MAX = 5.0
    FORECAST = 0.7  # of the mean of two forecasts that are each too high in their own way
    PROOFS_MAX = 4  # under way at once; the newest is replaced first
    CHECKS_OPEN_MAX = 128  # a server has fewer: 16 that wait, and one for each thread of searches

    def __init__(
        self, *, delta: float, alpha: float, verify_ratio: float, fits_apart: bool = False
    ) -> None:
        for name, value in (("delta", delta), ("alpha", alpha), ("verify_ratio", verify_ratio)):
            if not 0.0 < value <= 1.0:
                raise InputError(f"{name}: expected a value in (0, 1], found {value}")
        self._delta = delta
        self._alpha = alpha
        self._verify_ratio = verify_ratio
        self._selector = ReuseSelector(history_max=self.HISTORY_MAX)
        self._fits_apart = fits_apart
        self._fit_is_due = self._fit_is_running = False
        self._drifts = 0
        self._seen = 0
        self._fitted = 0
        self._proofs_begun = 0
        self._proofs: list[_Proof] = []
        self._proved_once = False
        self._checks_begun = 0
        self._checks: OrderedDict[int, Verdict] = OrderedDict()  # asked for, not told yet
        self._cut = -1.0  # nothing is picked
        self._cut_share = 0.0  # errors expected among the picks
        self._reused = self._reused_seen = self._reused_wrong = 0
        self._forecast = 0.0  # errors expected among the reuses when they were made
        self._alarm = DriftAlarm(rate=min(delta, 0.5))

    def _alpha_of(self, serial: int) -> float:
        # 0.9, 0.09, 0.009, ... of alpha: however often a proof is begun, they sum to alpha.
        return self._alpha * 0.9 * 0.1**serial

    def _leading(self) -> _Proof | None:
        return min(self._proofs, key=lambda proof: proof.bound.upper(), default=None)

    def bound(self) -> float:
        """Return the proved upper bound on the error chance of what is picked; 1 for none."""
        proof = self._leading()
        return 1.0 if proof is None else proof.bound.upper()

    def exposure(self) -> float:
        """Return how many verified picks the present proof rests on."""
        proof = self._leading()
        return 0.0 if proof is None else proof.bound.exposure

    def errors(self) -> int:
        """Return how many of them were wrong."""
        proof = self._leading()
        return 0 if proof is None else proof.bound.errors

    def decide(
        self, features: Features, coin: float, *, differences: Differences = NO_DIFFERENCES
    ) -> Verdict:
        """Judge one candidate.

        Args:
            features: From `pair_features`.
            coin: Uniform in [0, 1), drawn for this decision alone.
            differences: The words in which the two questions differ.

        Returns:
            The verdict. Report its outcome with `learn`, or `skip` where it was not verified, or
            `lose` where a reuse was to be verified and could not be.
        """
        bound = self.bound()
        if not self._selector.ready:
            return Verdict(False, True, 1.0, math.nan, bound, (), Reason.LEARNING)
        chance = self._selector.chance(features, differences)
        if chance > self._cut:
            unsure = Reason.UNSURE if bound <= self._delta else Reason.UNSURE_PROVING
            return Verdict(False, True, 1.0, chance, bound, (), unsure)
        proofs = tuple(proof.serial for proof in self._proofs)
        if bound > self._delta:
            proving = Reason.PROVING_AGAIN if self._proved_once else Reason.PROVING
            return Verdict(False, True, 1.0, chance, bound, proofs, proving)
        leading = self._leading()
        assert leading is not None, "a bound below 1 is some proof's"
        # Watched most closely where one error more would end it: what is seen then carries the
        # proof past that error, so that reuse need not stop for it.
        bearable = leading.bound.errors_bearable(self._delta, most=self.BEARABLE_MAX)
        ratio = max(self._verify_ratio, 0.5**bearable)
        self._proved_once = True
        self._reused += 1
        self._forecast += self._cut_share
        if coin >= ratio:
            return Verdict(True, False, ratio, chance, bound, proofs, Reason.REUSED)
        self._checks_begun += 1
        check = self._checks_begun
        verdict = Verdict(True, True, ratio, chance, bound, proofs, Reason.REUSED, check)
        self._checks[check] = verdict
        oldest = next(iter(self._checks))
        if oldest <= check - self.CHECKS_OPEN_MAX:
            self.lose(self._checks[oldest])
        return verdict

    def refuse(self) -> Verdict:
        """Return the verdict on a candidate that a guard refused: to learn from, not to prove."""
        return Verdict(False, True, 1.0, math.nan, self.bound(), (), Reason.GUARD)

    def skip(self, verdict: Verdict) -> None:
        """Account for a reuse that was not drawn for verification."""
        self._count(verdict, wrong=False)

    def lose(self, verdict: Verdict) -> None:
        """Account for a check of a reuse that found nothing: it may have been wrong.

        A second call for the same verdict, or one for a verdict without a check, changes nothing.
        """
        if self._checks.pop(verdict.check, None) is not None:
            self._count(verdict, wrong=True)

    def learn(
        self,
        verdict: Verdict,
        features: Features,
        *,
        same: bool,
        differences: Differences = NO_DIFFERENCES,
    ) -> None:
        """Take the outcome of a verified decision: whether reuse gave the right passages.

        Args:
            verdict: From `decide` or `refuse`.
            features: The same that were judged.
            same: Whether the earlier passages were those of the fresh search.
            differences: As in `decide`.
        """
        wrong = not same
        self._seen += 1
        refused = verdict.reason is Reason.GUARD
        self._selector.add(features, wrong=wrong, refused=refused, differences=differences)
        if not verdict.check or self._checks.pop(verdict.check, None) is not None:
            self._count(verdict, wrong=wrong)  # else it was given up, and counted as wrong
        if verdict.allowed:
            self._reused_seen += 1
            self._reused_wrong += wrong
        if verdict.proofs and self._alarm.add(wrong=wrong):
            self._take_drift()
        elif self._seen >= max(self.LEARN_MIN, math.ceil(1.1 * self._fitted)):
            self._ask_for_fit()
        elif verdict.proofs and wrong:
            self._choose()

    def _count(self, verdict: Verdict, *, wrong: bool) -> None:
        before = self.bound()
        for proof in self._proofs:
            if proof.serial in verdict.proofs:
                proof.bound.add(verify_ratio=verdict.verify_ratio, wrong=wrong)
        if (before <= self._delta) != (self.bound() <= self._delta):
            self._choose()

    def _take_drift(self) -> None:
        """Forget what was learnt before the world changed; what stood is proved no longer."""
        self._proofs = []
        self._reused = self._reused_seen = self._reused_wrong = 0
        self._forecast = 0.0
        self._cut = -1.0
        self._drifts += 1
        self._selector.keep_newest(self.DRIFT_KEEP)
        self._alarm = DriftAlarm(rate=min(self._delta, 0.5))
        self._ask_for_fit()

    def _ask_for_fit(self) -> None:
        self._fitted = self._seen
        self._fit_is_due = True
        if not self._fits_apart:
            task = self.fit_due()
            assert task is not None, "no other fit runs where `learn` waits for each"
            self.end_fit(task, task.run())

    def fit_due(self) -> FitTask | None:
        """Return the fit to run now, if any; hand each to `end_fit`, whatever becomes of it."""
        if not self._fit_is_due or self._fit_is_running:
            return None
        self._fit_is_due, self._fit_is_running = False, True
        return FitTask(self._selector.outcomes(), self._drifts)

    def end_fit(self, task: FitTask, fitted: Fitted | None) -> None:
        """Take what a task found; None where it found nothing, and the next fit will do."""
        self._fit_is_running = False
        # What was learnt before a drift says nothing of what came after: the fit due then will.
        if fitted is not None and task.drifts == self._drifts:
            self._selector.take(fitted)
            self._choose()

    def _choose(self) -> None:
        """Choose the cut, and begin a proof where that is the shorter way."""
        chances, errors = self._selector.ranked()
        self._cut, self._cut_share = -1.0, 0.0
        if len(chances) < self.LEARN_MIN // 2:
            return
        ranks = np.arange(1, len(errors) + 1)
        counted = (errors + self.UNSEEN) / ranks
        if self.bound() <= self._delta:
            shares = counted  # too high where neighbourhoods were thinner: the safe side
            likely = int(np.searchsorted(chances, self.REUSE_MAX * self._delta, side="right"))
            rank: int | None = self._rank_to_reuse(shares[: max(1, likely)])
        else:
            # Errors cost nothing but time here. Two forecasts, each too high in its own case: those
            # counted are from when less was known, and the fitted ones smear few errors. Where
            # guards refuse most of what is wrong, the fit lends those errors to what they pass: all
            # in all its chances must come to no more than was counted there.
            fitted = np.cumsum(chances)
            lent = min(1.0, float((errors[-1] + self.UNSEEN) / fitted[-1]))
            shares = self.FORECAST * np.sqrt(counted * lent * fitted / ranks)
            even = int(np.searchsorted(lent * chances, self.EVEN * self._delta, side="right"))
            rank = self._rank_to_prove(shares[:even])
        if rank is None:
            return
        self._cut, self._cut_share = float(chances[rank]), float(shares[rank])
        if self.bound() > self._delta:
            self._begin_proof(self._cut_share / self._delta)

    def _rank_to_prove(self, shares: Features) -> int | None:
        """Return the rank whose picks prove delta soonest: clean enough, and many."""
        alpha = self._alpha_of(self._proofs_begun)
        quickest, best = 0.0, None
        if len(shares) < 10:
            return None
        for count in np.unique(np.geomspace(10, len(shares), 60).astype(int)):
            share = float(shares[count - 1]) / self._delta
            if share >= self.SHARE_MAX:
                continue
            # Shares are rounded up: fewer distinct values to solve for.
            speed = count / exposure_needed(math.ceil(40.0 * share) / 40.0, alpha)
            if speed > quickest:
                quickest, best = speed, int(count) - 1
        return best

    def _rank_to_reuse(self, shares: Features) -> int:
        """Return the loosest rank that the run can bear; the safest where it bears no more."""
        more = max(3.0 / self._delta, 0.5 * self._reused)
        planned = errors_planned((self._reused + more) * self._delta, self._alpha)
        bearable = (planned - self._errors_in_run()) / more
        within = np.flatnonzero(shares <= bearable)
        return int(within[-1]) if len(within) else int(np.argmin(shares))

    def _errors_in_run(self) -> float:
        """Return the errors found among the reuses, and those expected where nobody looked.

        The forecast stands for one error until what was found says more.
        """
        if not self._reused:
            return 0.0
        rate = (self._reused_wrong + 1.0) / (self._reused_seen + self._reused / self._forecast)
        return self._reused_wrong + rate * (self._reused - self._reused_seen)

    def _begin_proof(self, share: float) -> None:
        """Begin a proof if none is under way, or if a new one would be done well before them."""
        alpha = self._alpha_of(self._proofs_begun)
        share = math.ceil(40.0 * share) / 40.0
        fresh = exposure_needed(share, alpha)
        for proof in self._proofs:
            held = round(proof.bound.exposure * self._delta, 1)
            left = exposure_needed(share, proof.bound.alpha, errors=proof.bound.errors, held=held)
            if fresh >= 0.8 * left:
                return
        del self._proofs[self.PROOFS_MAX - 1 :]
        self._proofs.append(_Proof(self._proofs_begun, ErrorBound(alpha)))
        self._proofs_begun += 1

    def bytes(self) -> int:
        """Return about how much memory this takes: at most 4 MB."""
        return self._selector.bytes()

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        self._selector.check()
        assert len(self._proofs) <= self.PROOFS_MAX
        assert len(self._checks) <= self.CHECKS_OPEN_MAX
        for proof in self._proofs:
            proof.bound.check()
            assert proof.serial < self._proofs_begun
        spent = sum(self._alpha_of(serial) for serial in range(self._proofs_begun))
        assert spent <= self._alpha + 1e-12, spent
