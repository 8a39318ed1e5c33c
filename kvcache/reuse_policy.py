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
from stoker.kvcache.error_bound import DriftAlarm, ErrorBound, errors_expected_max
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

FEATURE_COUNT = 21
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
    return features


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's answer on one candidate.

    Attributes:
        allowed: Reuse it.
        selected: The selector picked it, whether or not the bound allowed the reuse.
        verify: Search as well, and report what came out.
        verify_ratio: The chance at which ``verify`` was drawn; 1 where a search follows anyway.
        error_chance: What the selector expects; NaN while it has learnt nothing.
        bound: The proved bound at the time.
        epoch: Which proof the outcome belongs to.
    """

    allowed: bool
    selected: bool
    verify: bool
    verify_ratio: float
    error_chance: float
    bound: float
    epoch: int


class ReusePolicy:
    """Learns which candidates are safe, and allows them once that is proved.

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
    HISTORY_MAX = 6_000  # outcomes kept: the oldest go first, so the selector follows drift
    DRIFT_KEEP = 300  # outcomes that survive a drift alarm
    CUT_RATIO = 0.9  # a pick's expected error as a share of delta; picks average a third of it
    SETTLING = 1_000.0  # reuses over which the verified share falls to its final value

    def __init__(self, *, delta: float, alpha: float, verify_ratio: float) -> None:
        for name, value in (("delta", delta), ("alpha", alpha), ("verify_ratio", verify_ratio)):
            if not 0.0 < value <= 1.0:
                raise InputError(f"{name}: expected a value in (0, 1], found {value}")
        self._delta = delta
        self._alpha = alpha
        self._verify_ratio = verify_ratio
        self._rows: deque[Features] = deque(maxlen=self.HISTORY_MAX)
        self._wrong: deque[float] = deque(maxlen=self.HISTORY_MAX)
        self._weights: Features | None = None
        self._cut_ratio = self.CUT_RATIO
        self._seen = 0
        self._fitted = 0
        self._epoch = 0
        self._reused = 0
        self._bound = ErrorBound(self._alpha_of(0))
        self._alarm = DriftAlarm(rate=delta)

    def _alpha_of(self, epoch: int) -> float:
        # 1/2, 1/4, 1/8, ... of alpha: however often the proof starts afresh, they sum to alpha.
        return float(self._alpha * 0.5 ** (min(epoch, 60) + 1))

    def bound(self) -> float:
        """Return the proved upper bound on the error chance of what is selected; 1 for none."""
        return self._bound.upper()

    def exposure(self) -> float:
        """Return how many verified selections the present proof rests on."""
        return self._bound.exposure

    def errors(self) -> int:
        """Return how many of them were wrong."""
        return self._bound.errors

    def decide(self, features: Features, coin: float) -> Verdict:
        """Judge one candidate.

        Args:
            features: From `pair_features`.
            coin: Uniform in [0, 1), drawn for this decision alone.

        Returns:
            The verdict. Report its outcome with `learn`, or `skip` where it was not verified.
        """
        bound = self.bound()
        if self._weights is None:
            return Verdict(False, False, True, 1.0, math.nan, bound, self._epoch)
        chance = _logistic(float(features @ self._weights))
        selected = chance <= self._cut_ratio * self._delta
        allowed = selected and bound <= self._delta
        if not allowed:
            return Verdict(False, selected, True, 1.0, chance, bound, self._epoch)
        # A rule that has just begun to act is watched closely, then less.
        ratio = max(self._verify_ratio, 0.5 * math.exp(-self._reused / self.SETTLING))
        self._reused += 1
        return Verdict(True, True, coin < ratio, ratio, chance, bound, self._epoch)

    def refuse(self) -> Verdict:
        """Return the verdict on a candidate that a guard refused: to learn from, not to prove."""
        return Verdict(False, False, True, 1.0, math.nan, self.bound(), self._epoch)

    def skip(self, verdict: Verdict) -> None:
        """Account for a reuse that was not drawn for verification."""
        if verdict.selected and verdict.epoch == self._epoch:
            self._bound.add(verify_ratio=verdict.verify_ratio, wrong=False)

    def learn(self, verdict: Verdict, features: Features, *, same: bool) -> None:
        """Take the outcome of a verified decision: whether reuse gave the right passages."""
        wrong = not same
        self._seen += 1
        self._rows.append(features)
        self._wrong.append(float(wrong))
        if verdict.selected and verdict.epoch == self._epoch:
            self._bound.add(verify_ratio=verdict.verify_ratio, wrong=wrong)
            if self._alarm.add(wrong=wrong):
                self._start_afresh(keep=self.DRIFT_KEEP)
            elif self._hopeless():
                self._start_afresh(keep=None)
        due = max(self.LEARN_MIN, math.ceil(1.05 * self._fitted))
        if self._seen >= due:
            self._fit()

    def _hopeless(self) -> bool:
        # Early mistakes of a selector that has since learnt: a clean proof would be done sooner.
        if self._bound.upper() <= self._delta:
            return False
        missing = errors_expected_max(self._bound.errors, self._bound.alpha) / self._delta
        missing -= self._bound.exposure
        clean = errors_expected_max(0, self._alpha_of(self._epoch + 1)) / self._delta
        return missing > 2.0 * clean

    def _start_afresh(self, *, keep: int | None) -> None:
        self._epoch += 1
        self._bound = ErrorBound(self._alpha_of(self._epoch))
        self._alarm = DriftAlarm(rate=self._delta)
        self._reused = 0
        if keep is not None:  # drift: what was learnt before no longer counts
            self._rows = deque(list(self._rows)[-keep:], maxlen=self.HISTORY_MAX)
            self._wrong = deque(list(self._wrong)[-keep:], maxlen=self.HISTORY_MAX)
            self._cut_ratio = max(0.1, 0.5 * self._cut_ratio)
            self._fit()

    def _fit(self) -> None:
        self._fitted = self._seen
        rows, wrong = np.array(self._rows), np.array(self._wrong)
        self._weights = _fit_logistic(rows, wrong, start=self._weights)

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        self._bound.check()
        assert len(self._rows) == len(self._wrong) <= self.HISTORY_MAX
        spent = sum(self._alpha_of(epoch) for epoch in range(self._epoch + 1))
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
