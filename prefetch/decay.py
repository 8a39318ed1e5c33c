"""How much an old access still counts: three decay laws, and counts that decay lazily and exactly.

The laws (t is the age in seconds, all give 1 at t = 0):

* exponential ``e^(-lambda t)``: forgets at a constant rate;
* hyperbolic ``1 / (1 + alpha t)``: the default, its long tail keeps a daily rhythm;
* logarithmic ``ln(1 + t) / ln(1 + horizon)``: *grows* with age; for comparison only.

A hyperbolic sum over events has no state of fixed size, so it is kept as six exponential ones
whose weighted sum is within 0.25 % of the law for ages up to 300 / alpha (beyond, it falls to 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, InputError
from stoker.kernels._core import add_runs

Ages = float | NDArray[np.float64]

# Minimax fit of sum(w * exp(-r x)) to 1 / (1 + x) on 0 <= x <= 300; relative error <= 0.0023.
HYPERBOLIC_RATES = (0.00315645, 0.01961281, 0.06863084, 0.21847451, 0.68656551, 2.17325782)
HYPERBOLIC_WEIGHTS = (0.00835381, 0.02665828, 0.0755025, 0.2014784, 0.39548887, 0.29028228)
HYPERBOLIC_ERROR_MAX = 0.0025

# A rescale multiplies by 2^-256: exact in binary, and rare (256 half-lives of the fastest part).
_RESCALE_BITS = 256.0


def exponential_decay(age_s: Ages, *, lambda_per_s: float) -> Ages:
    """Return ``e^(-lambda * age)`` in (0, 1]; lambda in 1/s; negative ages count as 0.

    Source: the project's seed text, "exponential decay", half-life ``ln 2 / lambda``.
    """
    result: Ages = np.exp(-lambda_per_s * np.maximum(age_s, 0.0))
    return result


def hyperbolic_decay(age_s: Ages, *, alpha_per_s: float) -> Ages:
    """Return ``1 / (1 + alpha * age)`` in (0, 1]; alpha in 1/s; negative ages count as 0.

    Source: the project's seed text, "hyperbolic decay": gentler, long-tailed; the default.
    """
    result: Ages = 1.0 / (1.0 + alpha_per_s * np.maximum(age_s, 0.0))
    return result


def logarithmic_decay(age_s: Ages, *, horizon_s: float) -> Ages:
    """Return ``ln(1 + age) / ln(1 + horizon)`` clipped to [0, 1]: rises with age.

    Kept to be compared with, never used by default: it prefers the old to the new.
    Source: the project's seed text, which dismisses it for that reason.
    """
    value = np.log1p(np.maximum(age_s, 0.0)) / math.log1p(horizon_s)
    result: Ages = np.minimum(value, 1.0)
    return result


def landmark_for(exponent: float) -> float:
    """Return the landmark, a multiple of 256, from which ``exponent`` lies 256 to 512 away."""
    return (math.floor(exponent / _RESCALE_BITS) - 1.0) * _RESCALE_BITS


@dataclass(frozen=True)
class DecayLaw:
    """A decay law as a weighted sum of exponentials: ``sum(weights * 2^(-rates * age))``.

    Attributes:
        rates: Half-lives per second of each part, rising.
        weights: Share of each part; they add up to about 1.
    """

    rates: tuple[float, ...]
    weights: tuple[float, ...]

    @staticmethod
    def named(kind: str, *, half_life_s: float) -> DecayLaw:
        """Return the law under which an access of age ``half_life_s`` counts half.

        Raises:
            ConfigError: the kind has no fixed-size state (logarithmic) or is unknown.
        """
        if kind == "exponential":
            return DecayLaw((1.0 / half_life_s,), (1.0,))
        if kind == "hyperbolic":
            # e^(-r x) with x = age / half_life is 2^(-r log2(e) age / half_life).
            scale = math.log2(math.e) / half_life_s
            return DecayLaw(tuple(r * scale for r in HYPERBOLIC_RATES), HYPERBOLIC_WEIGHTS)
        raise ConfigError(f"decay {kind!r} cannot be kept as a running count")

    def weight(self, age_s: Ages) -> Ages:
        """Return what one access of this age counts now; negative ages count as 0."""
        age = np.maximum(np.asarray(age_s, dtype=np.float64), 0.0)
        parts = np.exp2(-np.multiply.outer(age, np.array(self.rates)))
        result: Ages = parts @ np.array(self.weights)
        return result


class DecayedCounts:
    """Decayed counts of n keys under one law, in O(1) per access and with nothing done per tick.

    Each access adds ``2^((time - landmark) * rate)``, so that age never has to be applied to what
    is stored (forward decay). Late and out-of-order accesses land in their own time, in any order.
    The landmark moves in steps of exactly 2^256 and depends on the newest time alone, so that the
    state does not depend on how the accesses were cut into batches.

    Invariants: ``parts`` is finite and >= 0; the newest time's exponent lies 256 to 512 over its
    landmark.

    Source: Cormode, Shkapenyuk, Srivastava, Xu, "Forward decay", ICDE 2009. Ours keeps a sum of
    exponentials and exact landmark moves.
    """

    def __init__(self, law: DecayLaw, capacity: int = 1024) -> None:
        self.law = law
        self.parts = np.zeros((len(law.rates), capacity), dtype=np.float64)
        # Exponents, multiples of 256; minus infinity before the first access.
        self.landmarks = np.full(len(law.rates), -np.inf, dtype=np.float64)

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` keys; new ones count 0."""
        have = self.parts.shape[1]
        if capacity > have:
            grown = np.zeros((len(self.law.rates), max(capacity, 2 * have)), dtype=np.float64)
            grown[:, :have] = self.parts
            self.parts = grown

    def add(
        self,
        keys: NDArray[np.int64],
        times_s: NDArray[np.float64],
        amounts: NDArray[np.float64],
    ) -> None:
        """Count accesses. Keys may repeat; the sum is taken in the order given.

        Args:
            keys: int64, shape (n,), each below the capacity.
            times_s: float64, shape (n,), Unix seconds, finite.
            amounts: float64, shape (n,), finite, >= 0.
        """
        self.add_runs(keys, np.ones(len(keys), dtype=np.int64), times_s, amounts)

    def add_runs(
        self,
        keys: NDArray[np.int64],
        sizes: NDArray[np.int64],
        times_s: NDArray[np.float64],
        amounts: NDArray[np.float64],
    ) -> None:
        """Count accesses that come in runs of one time each; see `add`.

        Args:
            keys: int64, shape (n,).
            sizes: int64, shape (runs,), adding up to n; a run may be empty.
            times_s: float64, shape (runs,).
            amounts: float64, shape (n,).
        """
        if not len(keys):
            return
        newest = float(times_s[sizes > 0].max())
        for part, rate in enumerate(self.law.rates):
            self._advance(part, newest * rate)
        exponents = np.multiply.outer(np.array(self.law.rates), times_s)
        whole = np.floor(exponents)
        fraction = np.exp2(exponents - whole)
        shift = np.clip(whole - self.landmarks[:, None], -2000.0, 1000.0).astype(np.int32)
        add_runs(self.parts, keys, sizes, np.ldexp(fraction, shift), amounts)

    def _advance(self, part: int, exponent: float) -> None:
        """Move the landmark so that the newest exponent lies within 512 of it."""
        landmark = float(self.landmarks[part])
        target = landmark_for(exponent)
        if target > landmark:
            if math.isfinite(landmark):
                shift = max(int(landmark - target), -4000)
                self.parts[part] = np.ldexp(self.parts[part], shift)
            self.landmarks[part] = target

    def values(self, now_s: float, keys: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """Return the decayed counts at ``now_s`` (at or after the newest access), shape (n,)."""
        first = self.parts[:, keys]
        total = np.zeros(first.shape[1], dtype=np.float64)
        for part, (rate, weight) in enumerate(zip(self.law.rates, self.law.weights, strict=True)):
            landmark = float(self.landmarks[part])
            if not math.isfinite(landmark):
                continue
            scale = math.exp2(max(-1060.0, min(1000.0, landmark - now_s * rate)))
            total += first[part] * (scale * weight)
        return total

    def clear(self, keys: NDArray[np.int64]) -> None:
        """Forget the counts of some keys."""
        self.parts[:, keys] = 0.0

    def keep(self, keys: NDArray[np.int64]) -> None:
        """Keep only ``keys``, which become 0, 1, 2, ... in that order."""
        kept = np.zeros_like(self.parts)
        kept[:, : len(keys)] = self.parts[:, keys]
        self.parts = kept

    def check(self) -> None:
        """Raise InputError on the first broken invariant."""
        if not np.isfinite(self.parts).all() or float(self.parts.min(initial=0.0)) < 0.0:
            raise InputError("decayed counts must be finite and >= 0")
