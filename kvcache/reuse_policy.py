"""Which candidates may be reused: a learned chance of error, and a proof that it is small enough.

Two parts, kept apart on purpose. A *selector* predicts from a pair of questions and their
neighbourhood the chance that reuse is wrong; it may be as clever or as mistaken as it likes. A
*bound* (`error_bound`) watches what the selector picks, and nothing is reused while that bound is
above the user's delta. Until then the picks are refused, and the real search that follows each
refusal is a free piece of the proof.

The threshold on cosine is thereby a different one in every neighbourhood: how near a candidate
must be depends on whether the questions around it agreed with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.error_bound import (
    DriftAlarm,
    ErrorBound,
    exposure_needed,
)
from stoker.kvcache.guards import differing_words
from stoker.kvcache.question import Question

NEIGHBORS = 20
"""Questions around a lookup that are asked whether they agree with the candidate."""

Features = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Neighborhood:
    """The earlier questions around the new one, nearest first, the candidate among them or not.

    Attributes:
        similarities: float32, shape (n,), falling.
        states: int8, shape (n,): 1 where that question is known to need the candidate's
            passages, -1 where it is known to need others, 0 where it is not known.
    """

    similarities: NDArray[np.float32]
    states: NDArray[np.int8]


NO_NEIGHBORHOOD = Neighborhood(np.zeros(0, np.float32), np.zeros(0, np.int8))

FEATURE_COUNT = 26
_NEAR = 0.08  # cosine distance over which a neighbour's word loses two thirds of its weight


def pair_features(
    asked: Question, earlier: Question, *, similarity: float, around: Neighborhood
) -> Features:
    """Describe one candidate: how near, how differently worded, and what its surroundings say.

    Args:
        asked: The new question.
        earlier: The candidate.
        similarity: Their cosine.
        around: What is known near the new question.

    Returns:
        float64, shape (FEATURE_COUNT,), finite; the first is the constant 1.
    """
    distance = min(max(0.0, 1.0 - similarity), 2.0)
    count = len(around.states)
    features = np.zeros(FEATURE_COUNT)
    features[0] = 1.0
    features[1] = distance
    features[2] = math.sqrt(distance)
    features[3] = math.log(distance + 0.01)
    gap_against = gap_other = 1.0
    if count:
        weights = np.exp((around.similarities - around.similarities[0]) / _NEAR)
        for index, size in enumerate((5, 10, NEIGHBORS)):
            states, weight = around.states[:size], weights[:size]
            total = float(weight.sum())
            features[4 + 2 * index] = float(weight[states == 1].sum()) / total
            features[5 + 2 * index] = float(weight[states == -1].sum()) / total
        against = np.flatnonzero(around.states == -1)
        other = np.flatnonzero(around.states != 1)
        if len(against):
            gap_against = 1.0 - float(around.similarities[against[0]])
        if len(other):
            gap_other = 1.0 - float(around.similarities[other[0]])
        features[16] = float(np.all(around.states[:10] != -1))
        features[17] = float(np.all(around.states[:10] == 1) and count >= 10)
        features[18] = float(np.all(around.states == 1) and count >= NEIGHBORS)
    features[10] = gap_against
    features[11] = gap_other
    features[12] = gap_against - distance
    features[13] = gap_other - distance
    features[14] = features[3] - math.log(max(gap_against, 0.0) + 0.01)
    features[15] = features[3] - math.log(max(gap_other, 0.0) + 0.01)
    only_asked, only_earlier = differing_words(asked, earlier)
    words = max(1, len(set(asked.words) | set(earlier.words)))
    features[19] = (len(only_asked) + len(only_earlier)) / words
    features[20] = float(len(only_asked) == 1 and len(only_earlier) == 1)
    features[21] = _letters_gap(asked.normal, earlier.normal)
    features[22] = abs(len(asked.words) - len(earlier.words)) / words
    features[23] = float(bool(asked.asks) and bool(earlier.asks) and asked.asks != earlier.asks)
    features[24] = features[19] * features[21]
    features[25] = float(len(asked.negations) != len(earlier.negations))
    return features


def _letters_gap(one: str, other: str) -> float:
    """Return the share of three-letter pieces that only one of two texts has."""
    pieces = [{text[i : i + 3] for i in range(len(text) - 2)} or {text} for text in (one, other)]
    return 1.0 - len(pieces[0] & pieces[1]) / len(pieces[0] | pieces[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's answer on one candidate.

    Attributes:
        allowed: Reuse it.
        verify: Search as well, and report what came out.
        verify_ratio: The chance at which ``verify`` was drawn; 1 where a search follows anyway.
        error_chance: What the selector expects; NaN while it has learnt nothing.
        bound: The proved bound at the time.
        proofs: Serial numbers of the proofs that its outcome belongs to.
    """

    allowed: bool
    verify: bool
    verify_ratio: float
    error_chance: float
    bound: float
    proofs: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _Proof:
    """One attempt to prove a cut: all candidates whose expected error is at most ``cut``."""

    serial: int
    cut: float
    bound: ErrorBound


class ReusePolicy:
    """Learns which candidates are safe, and allows them once that is proved.

    At any time one proof may stand, and what it selects is reused; others are on trial. Trials cost
    nothing while their picks are refused: the search that follows is the check. A new one is begun
    whenever twice as much is known, since a better selector makes fewer mistakes to be outweighed.

    Deterministic: the same decisions, outcomes and coins in the same order give the same answers.
    Not thread-safe: its owner holds a lock.

    Invariants (`check`): nothing is allowed while ``bound()`` is above delta; every proof spends a
    share of alpha, and all shares together never more than alpha.

    Args:
        delta: The user's largest share of wrong reuses.
        alpha: Chance that any proof of this policy is ever wrong.
        verify_ratio: Share of reuses to verify once the rule has settled.
    """

    LEARN_MIN = 100  # outcomes before the selector says anything
    # Outcomes, times delta, before a proof is begun (but 300 to 1,000 of them): each proof spends a
    # share of alpha, and one begun by a selector that has seen few errors is mostly spent in vain.
    TRIAL_MIN = 10.0
    HISTORY_MAX = 6_000  # outcomes kept: the oldest go first, so the selector follows drift
    DRIFT_KEEP = 300  # outcomes that survive a drift alarm
    SETTLING = 1_000.0  # reuses over which the verified share falls to its final value
    CAUTION = 1.3  # forecasts made in hindsight are taken to be this much too good
    TRIALS_MAX = 4  # under way at once; the oldest goes first
    WORTH = 1.25  # a looser cut goes on trial if it selects this much more

    def __init__(self, *, delta: float, alpha: float, verify_ratio: float) -> None:
        for name, value in (("delta", delta), ("alpha", alpha), ("verify_ratio", verify_ratio)):
            if not 0.0 < value <= 1.0:
                raise InputError(f"{name}: expected a value in (0, 1], found {value}")
        self._delta = delta
        self._alpha = alpha
        self._verify_ratio = verify_ratio
        self._rows: deque[Features] = deque(maxlen=self.HISTORY_MAX)
        self._wrong: deque[float] = deque(maxlen=self.HISTORY_MAX)
        self._open: deque[bool] = deque(maxlen=self.HISTORY_MAX)  # no guard had refused it
        self._weights: Features | None = None
        self._seen = 0
        self._fitted = 0
        self._proofs_begun = 0
        self._reused = 0
        self._standing: _Proof | None = None
        self._trials: list[_Proof] = []
        self._next_trial = min(max(self.TRIAL_MIN / delta, 300.0), 1_000.0)
        self._alarm = DriftAlarm(rate=min(delta, 0.5))

    def _alpha_of(self, serial: int) -> float:
        # 1/2, 1/6, 1/12, 1/20, ... of alpha: however often a proof is begun, they sum to alpha.
        return self._alpha / ((serial + 1) * (serial + 2))

    def _leading(self) -> _Proof | None:
        """Return the proof that stands, or the trial that is nearest to standing."""
        if self._standing is not None:
            return self._standing
        return min(self._trials, key=lambda proof: proof.bound.upper(), default=None)

    def bound(self) -> float:
        """Return the proved upper bound on the error chance of what is reused; 1 for none."""
        proof = self._leading()
        return 1.0 if proof is None else proof.bound.upper()

    def exposure(self) -> float:
        """Return how many verified selections the present proof rests on."""
        proof = self._leading()
        return 0.0 if proof is None else proof.bound.exposure

    def errors(self) -> int:
        """Return how many of them were wrong."""
        proof = self._leading()
        return 0 if proof is None else proof.bound.errors

    def decide(self, features: Features, coin: float) -> Verdict:
        """Judge one candidate.

        Args:
            features: From `pair_features`.
            coin: Uniform in [0, 1), drawn for this decision alone.

        Returns:
            The verdict. Report its outcome with `learn`, or `skip` where it was not verified.
        """
        if self._weights is None:
            return self.refuse()
        chance = _logistic(float(features @ self._weights))
        chosen = [proof for proof in self._proofs() if chance <= proof.cut]
        proofs = tuple(proof.serial for proof in chosen)
        bound = self.bound()
        standing = self._standing
        if standing is None or standing not in chosen or bound > self._delta:
            return Verdict(False, True, 1.0, chance, bound, proofs)
        # A rule that has just begun to act is watched closely, then less.
        ratio = max(self._verify_ratio, 0.5 * math.exp(-self._reused / self.SETTLING))
        self._reused += 1
        return Verdict(True, coin < ratio, ratio, chance, bound, proofs)

    def _proofs(self) -> list[_Proof]:
        return self._trials if self._standing is None else [self._standing, *self._trials]

    def refuse(self) -> Verdict:
        """Return the verdict on a candidate that a guard refused: to learn from, not to prove."""
        return Verdict(False, True, 1.0, math.nan, self.bound(), ())

    def skip(self, verdict: Verdict) -> None:
        """Account for a reuse that was not drawn for verification."""
        self._count(verdict, wrong=False)

    def learn(self, verdict: Verdict, features: Features, *, same: bool) -> None:
        """Take the outcome of a verified decision: whether reuse gave the right passages."""
        wrong = not same
        self._seen += 1
        self._rows.append(features)
        self._wrong.append(float(wrong))
        self._open.append(self._weights is None or not math.isnan(verdict.error_chance))
        self._count(verdict, wrong=wrong)
        if verdict.proofs and self._alarm.add(wrong=wrong):
            self._take_drift()
        elif self._seen >= max(self.LEARN_MIN, math.ceil(1.05 * self._fitted)):
            self._fit()

    def _count(self, verdict: Verdict, *, wrong: bool) -> None:
        for proof in self._proofs():
            if proof.serial in verdict.proofs:
                proof.bound.add(verify_ratio=verdict.verify_ratio, wrong=wrong)
        for trial in self._trials:
            if trial.bound.upper() <= self._delta:
                self._stand(trial)
                return

    def _stand(self, trial: _Proof) -> None:
        """Let a proved trial act; what is stricter than it has nothing left to prove."""
        self._standing = trial
        self._trials = [other for other in self._trials if other.cut > trial.cut]
        self._next_trial = min(self._next_trial, self._seen)

    def _take_drift(self) -> None:
        """Forget what was learnt before the world changed; what stood is proved no longer."""
        self._standing, self._trials = None, []
        self._next_trial = self._seen + self.DRIFT_KEEP
        self._reused = 0
        for kept in (self._rows, self._wrong, self._open):
            while len(kept) > self.DRIFT_KEEP:
                kept.popleft()
        self._alarm = DriftAlarm(rate=min(self._delta, 0.5))
        self._fit()

    def _fit(self) -> None:
        self._fitted = self._seen
        rows, wrong = np.array(self._rows), np.array(self._wrong)
        self._weights = _fit_logistic(rows, wrong, start=self._weights)
        if self._seen < self._next_trial:
            return
        logits = np.clip(rows[np.array(self._open)] @ self._weights, -30.0, 30.0)
        cut = self._best_cut(np.sort(1.0 / (1.0 + np.exp(-logits))))
        if cut is None:
            return
        serial = self._proofs_begun
        self._proofs_begun += 1
        self._next_trial = 2 * self._seen
        self._trials.append(_Proof(serial, cut, ErrorBound(self._alpha_of(serial))))
        del self._trials[: -self.TRIALS_MAX]

    def _best_cut(self, chances: Features) -> float | None:
        """Choose the cut that is proved soonest: strict enough to prove, loose enough to fill.

        Any choice is sound, since a proof counts only what comes after it was begun; this one is
        quick. None where nothing can be proved, or nothing that selects more than what stands.

        Args:
            chances: Expected errors of past candidates, rising.
        """
        if len(chances) < self.LEARN_MIN // 2:
            return None
        alpha = self._alpha_of(self._proofs_begun)
        means = np.cumsum(chances) / np.arange(1, len(chances) + 1)
        least = 0.0
        if self._standing is not None and self._standing.bound.upper() <= self._delta:
            least = self.WORTH * np.searchsorted(chances, self._standing.cut, side="right")
        quickest, best = 0.0, None
        for count in np.unique(np.geomspace(10, len(chances), 60).astype(int)):
            share = self.CAUTION * float(means[count - 1]) / self._delta
            if share >= 0.8 or count < least:
                continue
            # Shares are rounded up: fewer distinct values to solve for.
            speed = count / exposure_needed(math.ceil(40.0 * share) / 40.0, alpha)
            if speed > quickest:
                quickest, best = speed, float(chances[count - 1])
        return best

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._rows) == len(self._wrong) == len(self._open) <= self.HISTORY_MAX
        assert len(self._trials) <= self.TRIALS_MAX
        for proof in self._proofs():
            proof.bound.check()
            assert proof.serial < self._proofs_begun
        spent = sum(self._alpha_of(serial) for serial in range(self._proofs_begun))
        assert spent <= self._alpha + 1e-12, spent


def _logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(value, -30.0), 30.0)))


def _fit_logistic(rows: Features, wrong: Features, *, start: Features | None) -> Features:
    """Fit a ridge logistic regression by Newton steps; a few milliseconds for 6,000 rows."""
    weights = np.zeros(rows.shape[1]) if start is None else start.copy()
    ridge = np.full(rows.shape[1], 1.0)
    ridge[0] = 1e-3  # the base rate is not a guess to be shrunk
    for _ in range(12):
        chance = 1.0 / (1.0 + np.exp(-np.clip(rows @ weights, -30.0, 30.0)))
        slope = chance * (1.0 - chance) + 1e-6
        curvature = (rows * slope[:, None]).T @ rows + np.diag(ridge)
        step = np.linalg.solve(curvature, rows.T @ (wrong - chance) - ridge * weights)
        weights = weights + step
        if float(np.abs(step).max()) < 1e-4:
            break
    return weights
