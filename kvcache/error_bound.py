"""An upper bound on an error rate that holds at every moment, whatever the order of arrivals.

Source: the sub-Poisson case of Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", Annals of Statistics 49 (2021), with the mixture over betting
sizes of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B
86 (2024). Ours is a finite mixture, so it needs no special functions and is exact for what it is.

Why it holds. Let X_i be 1 if lookup i was verified *and* wrong. Given all that came before, its
mean is r_i p_i, with r_i the chance of being verified and p_i that of being wrong. For q in (0, 1],

    E[(1 - q)^X_i | past] = 1 - q r_i p_i <= exp(-q r_i p_i),

so (1 - q)^S exp(q V), with S the errors seen and V = sum r_i p_i, is a supermartingale for *any*
sequence p_i that the past may choose: no independence, no fixed rate, no fixed sample size. The
same goes for a weighted mean over several q. By Ville's inequality it ever reaches 1/alpha with a
chance of at most alpha, and solving for V bounds the expected errors, for all times at once.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError

# 1 - q over the grid. 0 is best while no error was seen; the others are best where errors are that
# share of what is bounded. The weights, a Beta(2, 7) shape, favour proofs with one to five errors:
# with more the user waits too long for one to be of use. A little is spread evenly, for long runs.
_KEEP: NDArray[np.float64] = np.concatenate([[0.0], np.linspace(0.02, 0.98, 49)])
_SHAPE: NDArray[np.float64] = _KEEP[1:] * (1.0 - _KEEP[1:]) ** 6
_WEIGHT: NDArray[np.float64] = np.concatenate(
    [[0.30], 0.67 * _SHAPE / _SHAPE.sum() + 0.03 / len(_SHAPE)]
)


def _log_wealth(errors: int, total: float) -> float:
    with np.errstate(divide="ignore"):
        log_keep = np.where(_KEEP > 0, np.log(np.maximum(_KEEP, 1e-300)), -np.inf)
    power = np.zeros(len(_KEEP)) if errors == 0 else errors * log_keep
    terms = np.log(_WEIGHT) + power + (1.0 - _KEEP) * total
    peak = float(np.max(terms))
    return peak + math.log(float(np.sum(np.exp(terms - peak))))


@functools.lru_cache(maxsize=65_536)
def errors_expected_max(errors: int, alpha: float) -> float:
    """Bound the sum of error chances from the number of errors seen.

    Args:
        errors: Errors seen, at least 0.
        alpha: Chance, in (0, 1), that the bound is ever broken over the whole run.

    Returns:
        The largest sum of conditional error chances that the errors seen do not rule out:
        about 3.4 for none at 5 %, 6.5 for one, and errors + O(sqrt(errors log errors)) for many.

    Raises:
        InputError: ``errors`` is negative or ``alpha`` is outside (0, 1).
    """
    if errors < 0 or not 0.0 < alpha < 1.0:
        raise InputError(f"expected errors >= 0 and alpha in (0, 1), found {errors} and {alpha}")
    goal = -math.log(alpha)
    low, high = 0.0, 10.0 + 2.0 * errors + 40.0 * math.sqrt(errors + 1.0)
    while _log_wealth(errors, high) < goal:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _log_wealth(errors, middle) < goal:
            low = middle
        else:
            high = middle
    return high


@functools.lru_cache(maxsize=16_384)
def exposure_needed(share: float, alpha: float, *, errors: int = 0, held: float = 0.0) -> float:
    """Say how much more exposure proves a delta, in units of 1 / delta.

    Args:
        share: The error rate that is expected, as a share of delta; in [0, 1).
        alpha: As in `errors_expected_max`.
        errors: Errors seen so far.
        held: Exposure so far, in the same units.

    Returns:
        The least E for which E / delta more lookups with E x ``share`` errors prove delta; infinite
        where the rate is too near to delta to be proved in reasonable time.
    """

    def missing(exposure: float) -> float:
        return _expected_at(errors + share * exposure, alpha) - held - exposure

    low, high = 0.0, 400.0
    if missing(high) > 0.0:
        return math.inf
    for _ in range(40):
        middle = 0.5 * (low + high)
        if missing(middle) > 0.0:
            low = middle
        else:
            high = middle
    return high


def errors_planned(total: float, alpha: float, *, miss: float = 0.03) -> float:
    """Say how many errors to plan for in a run, so that its own upper bound stays within delta.

    A run of n reuses with S errors shows a rate of at most delta, at level alpha, where S is so
    few that a rate of delta would give no more only with a chance of alpha. Planning for exactly
    that many would fail every other time.

    Args:
        total: n x delta.
        alpha: Level of the run's bound, as for a Poisson count.
        miss: Chance at which a run whose errors are as planned may still fail.

    Returns:
        The largest mean of a Poisson count that exceeds S with a chance of at most ``miss``;
        0 where the run is too short to show delta with no error at all. Of a total above 128 less
        than a 128th is left out, so that a long run asks for few that differ.
    """
    if total > 128.0:
        step = 2.0 ** (math.floor(math.log2(total)) - 7)
        total = step * math.floor(total / step)
    return _errors_planned(total, alpha, miss)


@functools.lru_cache(maxsize=16_384)
def _errors_planned(total: float, alpha: float, miss: float) -> float:
    allowed, above = -1, 1  # it can be as many as the first, but not the second
    while _poisson_at_most(above, total) <= alpha:
        allowed, above = above, 2 * above
    while above - allowed > 1:
        between = (allowed + above) // 2
        if _poisson_at_most(between, total) <= alpha:
            allowed = between
        else:
            above = between
    if allowed < 0:
        return 0.0
    low, high = 0.0, total
    for _ in range(40):
        middle = 0.5 * (low + high)
        if _poisson_at_most(allowed, middle) >= 1.0 - miss:
            low = middle
        else:
            high = middle
    return low


def _poisson_at_most(count: int, mean: float) -> float:
    """Sum the shorter tail, outwards, until what is left adds nothing."""
    if count < 0 or mean <= 0.0:
        return 0.0 if count < 0 else 1.0
    below = count < mean
    k = count if below else count + 1
    term = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    tail = 0.0
    while term > 1e-17 * tail:
        tail += term
        term *= k / mean if below else mean / (k + 1)
        k += -1 if below else 1
    return tail if below else max(0.0, 1.0 - tail)


def _expected_at(errors: float, alpha: float) -> float:
    below = math.floor(errors)
    part = errors - below
    return (1.0 - part) * errors_expected_max(below, alpha) + part * errors_expected_max(
        below + 1, alpha
    )


class ErrorBound:
    """The running upper bound on the mean error chance of the lookups that a rule selects.

    Every selected lookup is exposed with the chance at which it was to be verified, whether or not
    the coin then said so. The bound is on the exposure-weighted mean of the error chances.

    Invariants: ``exposure`` and ``errors`` never fall; ``upper()`` is in (0, 1].
    """

    def __init__(self, alpha: float) -> None:
        if not 0.0 < alpha < 1.0:
            raise InputError(f"alpha: expected a value in (0, 1), found {alpha}")
        self.alpha = alpha
        self.exposure = 0.0
        self.errors = 0

    def add(self, *, verify_ratio: float, wrong: bool) -> None:
        """Account for one selected lookup.

        Args:
            verify_ratio: Chance, in (0, 1], at which it was to be verified, fixed before the
                outcome was known.
            wrong: It was verified and found wrong. False where it was not verified.
        """
        if not 0.0 < verify_ratio <= 1.0:
            raise InputError(f"verify_ratio: expected a value in (0, 1], found {verify_ratio}")
        self.exposure += verify_ratio
        self.errors += int(wrong)

    def upper(self) -> float:
        """Return the bound; 1.0 while nothing is known."""
        if self.exposure <= 0.0:
            return 1.0
        return min(1.0, errors_expected_max(self.errors, self.alpha) / self.exposure)

    def errors_bearable(self, delta: float, *, most: int) -> int:
        """Return how many errors more it could take now and stay at or below ``delta``.

        Args:
            delta: The level to stay below.
            most: Where to stop counting, at least 0.

        Returns:
            0 to ``most``; -1 where it is above ``delta`` already.
        """
        room = delta * self.exposure
        for more in range(most + 1):
            if errors_expected_max(self.errors + more, self.alpha) > room:
                return more - 1
        return most

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert self.exposure >= 0.0, self.exposure
        assert self.errors >= 0, self.errors
        assert 0.0 < self.upper() <= 1.0, self.upper()


class DriftAlarm:
    """Says when a rate, believed to be at most ``rate``, has become larger.

    A sum over all starting points of likelihood ratios of ``factor`` x ``rate`` against ``rate``:
    it never waits longer for evidence because a long past was good.

    Source: Shin, Ramdas and Rinaldo, "E-detectors", 2023 (the e-SR procedure). While the rate is
    within the bound, the expected time to a false alarm is at least ``patience`` observations.
    """

    def __init__(self, *, rate: float, factor: float = 4.0, patience: float = 20_000.0) -> None:
        if not 0.0 < rate < 1.0 or factor <= 1.0 or patience <= 1.0:
            raise InputError(f"expected rate in (0, 1), found {rate}, {factor}, {patience}")
        high = min(0.5, rate * factor) if rate < 0.5 else (1.0 + rate) / 2.0
        self._ratio_wrong = high / rate
        self._ratio_right = (1.0 - high) / (1.0 - rate)
        self._patience = patience
        self._sum = 0.0

    def add(self, *, wrong: bool) -> bool:
        """Take one verified outcome; return True, and start afresh, when the alarm sounds."""
        self._sum = (self._sum + 1.0) * (self._ratio_wrong if wrong else self._ratio_right)
        if self._sum >= self._patience:
            self._sum = 0.0
            return True
        return False
