"""What a pair of questions looks like, and a selector that learns which pairs are safe to reuse.

The selector is a ridge logistic regression over the pair, its neighbourhood and its differing
words (`telling_words`). It may be as clever or as mistaken as it likes: nothing is reused on its
word alone (`reuse_policy`). It ranks; how many errors lie above a rank is counted out of sample:
each part of the outcomes is judged by a selector that learnt from the other parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.guards import differing_words
from stoker.kvcache.question import Question
from stoker.kvcache.telling_words import (
    NO_DIFFERENCES,
    Differences,
    Places,
    TellingWords,
    places_of,
    row_bytes,
)

PARTS = 5
"""Of the outcomes: each is judged by a selector that learnt from the other four."""

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
_OUTCOME_BYTES = 176  # an array's own object, a float, and places in five lists
_NEAR = 0.08  # cosine distance over which a neighbour's word loses two thirds of its weight


def pair_features(
    asked: Question,
    earlier: Question,
    *,
    similarity: float,
    around: Neighborhood,
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
    if count:  # plain numbers: arrays of twenty cost more to call than to compute
        near, states = around.similarities.tolist(), around.states.tolist()
        weights = [math.exp((value - near[0]) / _NEAR) for value in near]
        for index, size in enumerate((5, 10, NEIGHBORS)):
            total = sum(weights[:size])
            for sign, place in ((1, 4 + 2 * index), (-1, 5 + 2 * index)):
                agreeing = [w for w, s in zip(weights[:size], states, strict=False) if s == sign]
                features[place] = sum(agreeing) / total
        gap_against = 1.0 - next((v for v, s in zip(near, states, strict=True) if s == -1), 0.0)
        gap_other = 1.0 - next((v for v, s in zip(near, states, strict=True) if s != 1), 0.0)
        features[16] = float(-1 not in states[:10])
        features[17] = float(count >= 10 and states[:10] == [1] * 10)
        features[18] = float(count >= NEIGHBORS and states == [1] * count)
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
class Fitted:
    """What a fit found: it changes nothing until `ReuseSelector.take` is given it."""

    words: TellingWords
    weights: Features
    chances: Features
    errors: Features


@dataclasses.dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes kept at one moment, oldest first, and where the last fit ended."""

    rows: list[Features]
    wrong: list[float]
    is_open: list[bool]
    differences: list[Places]
    part: list[int]
    words: TellingWords
    start: Features | None

    def fit(self) -> Fitted:
        """Fit to these outcomes, and rank them out of sample; 40 ms for 6,000. Holds no lock."""
        rows, wrong = np.array(self.rows), np.array(self.wrong)
        is_open, part = np.array(self.is_open), np.array(self.part)
        # What is known of words by now, not what was known when the outcome came.
        words = self.words.copy()
        told = words.fit(self.differences, wrong, part)
        refused = (~is_open).astype(np.float64)
        whole = np.column_stack([rows, told, refused, refused * rows[:, 1]])
        fitted = _fit_logistic(whole, wrong, start=self.start)
        judged = np.zeros(len(rows))
        for number in range(PARTS):
            judging, rest = part == number, part != number
            # The start is only near: the loss is convex, and has one least point.
            weights = _fit_logistic(whole[rest], wrong[rest], start=fitted)
            judged[judging] = whole[judging] @ weights
        order = np.argsort(judged[is_open], kind="stable")
        errors = np.cumsum(wrong[is_open][order])
        logits = np.clip(whole[is_open] @ fitted, -30.0, 30.0)
        return Fitted(words, fitted, np.sort(1.0 / (1.0 + np.exp(-logits))), errors)


class ReuseSelector:
    """Ranks candidates by their chance of error, from the outcomes that were verified.

    Outcomes of candidates that a guard refused are learnt from as well, behind a feature of their
    own: what is true of them is not said of the others. Not thread-safe.

    Args:
        history_max: Outcomes kept: the oldest go first, so the selector follows drift.
    """

    def __init__(self, *, history_max: int) -> None:
        self._rows: deque[Features] = deque(maxlen=history_max)
        self._wrong: deque[float] = deque(maxlen=history_max)
        self._open: deque[bool] = deque(maxlen=history_max)  # no guard had refused it
        self._differences: deque[Places] = deque(maxlen=history_max)
        self._part: deque[int] = deque(maxlen=history_max)
        self._seen = 0
        self._words = TellingWords(parts=PARTS)
        self._weights: Features | None = None
        self._chances: Features = np.zeros(0)
        self._errors: Features = np.zeros(0)

    @property
    def ready(self) -> bool:
        """Whether it has been fitted."""
        return self._weights is not None

    def chance(self, features: Features, differences: Differences = NO_DIFFERENCES) -> float:
        """Return the expected chance of error of a candidate that no guard refused."""
        assert self._weights is not None
        value = float(features @ self._weights[: len(features)])
        value += float(self._weights[len(features)]) * self._words.score(differences)
        return 1.0 / (1.0 + math.exp(-min(max(value, -30.0), 30.0)))

    def add(
        self,
        features: Features,
        *,
        wrong: bool,
        refused: bool,
        differences: Differences = NO_DIFFERENCES,
    ) -> None:
        """Take one verified outcome."""
        self._rows.append(features)
        self._wrong.append(float(wrong))
        self._open.append(not refused)
        self._differences.append(places_of(differences))
        self._part.append(self._seen % PARTS)
        self._seen += 1

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest outcomes, and what is ranked until they are fitted."""
        self._chances, self._errors = np.zeros(0), np.zeros(0)
        for kept in (self._rows, self._wrong, self._open, self._differences, self._part):
            while len(kept) > count:
                kept.popleft()

    def outcomes(self) -> Outcomes:
        """Return what there is to fit to. What is added from now on is not in it."""
        return Outcomes(
            rows=list(self._rows), wrong=list(self._wrong), is_open=list(self._open),
            differences=list(self._differences), part=list(self._part), words=self._words,
            start=self._weights,
        )  # fmt: skip

    def take(self, fitted: Fitted) -> None:
        """Judge by a fit from now on."""
        self._words, self._weights = fitted.words, fitted.weights
        self._chances, self._errors = fitted.chances, fitted.errors

    def fit(self) -> None:
        """Fit to the outcomes kept and take what that finds."""
        self.take(self.outcomes().fit())

    def ranked(self) -> tuple[Features, Features]:
        """Return what a cut at each rank would have done, safest first.

        Returns:
            The fitted chance at each rank, and the errors up to and including it, counted by
            selectors that had not seen them; both float64, shape (open outcomes,), rising.
        """
        return self._chances, self._errors

    def bytes(self) -> int:
        """Return about how much memory the outcomes kept take, and what is learnt of them."""
        held = 0 if not self._rows else self._rows[0].nbytes + _OUTCOME_BYTES
        words = sum(row_bytes(row) for row in self._differences) + self._words.bytes()
        return held * len(self._rows) + words + self._chances.nbytes + self._errors.nbytes

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._rows) == len(self._wrong) == len(self._open)
        assert len(self._rows) == len(self._differences) == len(self._part)


def _fit_logistic(rows: Features, wrong: Features, *, start: Features | None) -> Features:
    """Fit a ridge logistic regression by Newton steps; a few milliseconds for 6,000 rows.

    A step is halved until it is no step back. From far off, where every chance is near 0 or 1, a
    whole one leads farther away, and whoever starts from there again never returns.
    """
    weights = np.zeros(rows.shape[1]) if start is None else start.copy()
    ridge = np.full(rows.shape[1], 1.0)
    ridge[0] = 1e-3  # the base rate is not a guess to be shrunk

    def loss_at(tried: Features) -> float:
        logits = rows @ tried
        return float(np.logaddexp(0.0, logits).sum() - wrong @ logits + 0.5 * ridge @ tried**2)

    loss = loss_at(weights)
    for _ in range(25):
        chance = 1.0 / (1.0 + np.exp(-np.clip(rows @ weights, -30.0, 30.0)))
        slope = chance * (1.0 - chance) + 1e-6
        curvature = (rows * slope[:, None]).T @ rows + np.diag(ridge)
        step = np.linalg.solve(curvature, rows.T @ (wrong - chance) - ridge * weights)
        better = loss_at(weights + step)
        while better > loss + 1e-9 * abs(loss) and float(np.abs(step).max()) >= 1e-4:
            step = 0.5 * step
            better = loss_at(weights + step)
        weights, loss = weights + step, better
        if float(np.abs(step).max()) < 1e-4:
            break
    return weights
