"""The edges of the heat graph: a bounded, decayed adjacency that never needs a full pass.

Each key has a row of at most ``degree_max`` out-edges. A weight is kept in forward-decayed form
(see `decay`): within a row only ratios matter to a random walk, so decay costs nothing to read.
A new edge into a full row replaces the weakest one, as in the Space-Saving sketch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kernels._core import add_edges
from stoker.prefetch.decay import landmark_for

NO_TARGET = -1


class EdgeTable:
    """Directed weighted edges between key numbers, a row of slots per key.

    Invariants: a row names a target at most once; a slot without a target weighs 0; weights are
    finite and >= 0.

    Source: Metwally, Agrawal, El Abbadi, "Space-Saving", ICDT 2005, for the replacement; ours
    drops the loser's weight, because a decayed graph should forget.
    """

    def __init__(self, *, degree_max: int, half_life_s: float, capacity: int = 1024) -> None:
        self.rate = 1.0 / half_life_s
        self.targets = np.full((capacity, degree_max), NO_TARGET, dtype=np.int32)
        self.weights = np.zeros((capacity, degree_max), dtype=np.float64)
        self.landmark = -math.inf

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` keys."""
        have, degree = self.targets.shape
        if capacity > have:
            rows = max(capacity, 2 * have)
            targets = np.full((rows, degree), NO_TARGET, dtype=np.int32)
            weights = np.zeros((rows, degree), dtype=np.float64)
            targets[:have] = self.targets
            weights[:have] = self.weights
            self.targets, self.weights = targets, weights

    def add(
        self,
        tails: NDArray[np.int64],
        heads: NDArray[np.int64],
        times_s: NDArray[np.float64],
        amounts: NDArray[np.float64],
    ) -> None:
        """Strengthen edges tail -> head; loops (tail = head) are left out.

        All arrays have shape (n,). The result depends on what one call holds together, so callers
        that need repeatable state cut the stream at fixed places: known edges grow first, then the
        new ones of a row replace its weakest, the strongest new one first.
        """
        real = tails != heads
        if not real.any():
            return
        self._advance(float(times_s[real].max()) * self.rate)
        grown = self.weight_of(times_s, amounts)
        add_edges(self.targets, self.weights, tails, heads, grown)

    def weight_of(
        self, times_s: NDArray[np.float64], amounts: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what amounts at these times weigh in the table's own, forward-decayed form."""
        landmark = self.landmark
        if not math.isfinite(landmark):
            landmark = landmark_for(float(times_s.max(initial=0.0)) * self.rate)
        exponent = np.clip(times_s * self.rate - landmark, -1060.0, 1000.0)
        grown: NDArray[np.float64] = np.exp2(exponent) * amounts
        return grown

    def _advance(self, exponent: float) -> None:
        target = landmark_for(exponent)
        if target > self.landmark:
            if math.isfinite(self.landmark):
                shift = max(int(self.landmark - target), -4000)
                self.weights = np.ldexp(self.weights, shift)
            self.landmark = target

    def clear(self, keys: NDArray[np.int64]) -> None:
        """Drop the out-edges of some keys. Edges that lead to them fade by themselves."""
        self.targets[keys] = NO_TARGET
        self.weights[keys] = 0.0

    def keep(self, keys: NDArray[np.int64]) -> None:
        """Keep only ``keys``, renumbered 0, 1, 2, ... in that order, and edges among them."""
        capacity, _ = self.targets.shape
        number = np.full(capacity + 1, NO_TARGET, dtype=np.int32)
        number[keys] = np.arange(len(keys), dtype=np.int32)
        targets = np.full_like(self.targets, NO_TARGET)
        weights = np.zeros_like(self.weights)
        targets[: len(keys)] = number[self.targets[keys]]  # NO_TARGET picks the last, which is -1
        weights[: len(keys)] = self.weights[keys]
        weights[targets == NO_TARGET] = 0.0
        self.targets, self.weights = targets, weights

    def edge_count(self) -> int:
        """Return how many edges there are."""
        return int(np.count_nonzero(self.targets != NO_TARGET))

    def out_edges(self, key: int) -> dict[int, float]:
        """Return target -> weight (in the table's own form) of one key's edges."""
        there = self.targets[key] != NO_TARGET
        targets, weights = self.targets[key][there], self.weights[key][there]
        return dict(zip(targets.tolist(), weights.tolist(), strict=True))

    def check(self) -> None:
        """Raise InputError on the first broken invariant."""
        if not np.isfinite(self.weights).all() or float(self.weights.min(initial=0.0)) < 0.0:
            raise InputError("edge weights must be finite and >= 0")
        if self.weights[self.targets == NO_TARGET].any():
            raise InputError("an empty slot has a weight")
        ordered = np.sort(self.targets, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_TARGET)).any():
            raise InputError("a row names a target twice")
