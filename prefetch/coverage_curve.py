"""How many of the coming accesses a warm set serves, by where the last ones fell in ranked demand.

A plan covers a share c of all decayed demand. Were the next accesses spread as the demand is, c of
them would hit. They are not: what was just asked for comes back sooner than a slow decay says, and
some go to keys that nobody asked for yet. So the newest accesses are kept, and once a prediction is
wanted, earlier ones are put to the test: the newest span of s accesses is taken back out of the
demand, the keys are ranked by what is left, and each access of the span falls at its key's place on
the axis "share of the demand in hotter keys", or beside it where nothing is left for its key; then
the same with the span before, and so on over `SPANS` of them. With W the sum of all demand in
accesses, s is W / 64 within 1,024 and 16,384: habits last longer where more is asked, and come in
bursts. The newest span counts as 1,024 accesses, each older one half as much. With n accesses that
fell so, n(c) of them below c,

    F(c) = (n(c) + m * (1 - u) * c) / (n + m),    0 <= c <= 1,

where u is the Good-Turing estimate of what will be new (`HeatGraph.unseen_ratio`) and that prior
counts as m = `PRIOR_ACCESSES`: without evidence F is the plain share of demand. F never falls, is 0
at 0 and at most 1 at 1. All ratios are shares of accesses, in [0, 1].

An access costs a copy into a bounded array; ranking is left to whoever asks, as planning sorts all
keys anyway.

Source: Zadrozny & Elkan, "Transforming classifier scores into accurate multiclass probability
estimates", KDD 2002, calibrate scores by the outcomes seen at them; Dawid, "The prequential
approach", JRSS A 147 (1984), judges each forecast by what came after it. Ours bins by cumulative
demand, over the newest accesses alone, and shrinks to Good-Turing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.pieces import Rest, no_rest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CELLS: Final = 200
# The fewest give a standard error of a point and a half; the most bound memory, 1.5 MiB of state.
SPAN_ACCESSES_MIN: Final = 1024
SPAN_ACCESSES_MAX: Final = 16_384
SPANS: Final = 4
KEPT_ACCESSES: Final = SPANS * SPAN_ACCESSES_MAX
_SPANS_IN_DEMAND: Final = 64.0
_OLDER_RATIO: Final = 0.5
PRIOR_ACCESSES: Final = 256.0
# A key's demand less its newest accesses is a difference: what is smaller than this is rounding.
_ROUNDING: Final = 1e-9

_GRID: Final = np.linspace(0.0, 1.0, CELLS + 1)


@dataclass(frozen=True)
class Coverage:
    """F at one moment.

    Attributes:
        unseen_ratio: u, in [0, 1].
        below: n(c) at 0, 1, ... `CELLS` equal steps of c, rising from 0; empty without accesses.
        accesses: n, at least the last of ``below``.
    """

    unseen_ratio: float = 0.0
    below: tuple[float, ...] = ()
    accesses: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.unseen_ratio <= 1.0:
            raise InputError(f"unseen_ratio must be in [0, 1], got {self.unseen_ratio}")

    def at(self, share: float) -> float:
        """Return F, the share of coming accesses that what holds ``share`` of demand will serve."""
        share = min(1.0, max(0.0, share))
        prior = (1.0 - self.unseen_ratio) * share
        if not self.below:
            return prior
        found = float(np.interp(share, _GRID, self.below))
        return (found + PRIOR_ACCESSES * prior) / (self.accesses + PRIOR_ACCESSES)


# All coming accesses go to what has heat, and as it says.
KNOWN: Final = Coverage()


class RecentAccesses:
    """The newest `KEPT_ACCESSES` accesses of a heat graph, the oldest first.

    Invariant: what is kept depends on the accesses and their order alone.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(SPAN_ACCESSES_MIN, dtype=np.int64)
        self._times_s = np.empty(SPAN_ACCESSES_MIN)
        self._amounts = np.empty(SPAN_ACCESSES_MIN)
        self._end = 0

    def __len__(self) -> int:
        return min(self._end, KEPT_ACCESSES)

    @property
    def numbers(self) -> Ints:
        """Of the keys, int64, shape (n,); below 0 for one outside the table."""
        return self._numbers[self._end - len(self) : self._end]

    @property
    def times_s(self) -> Floats:
        """When each counts, in the heat's time (s), float64, shape (n,)."""
        return self._times_s[self._end - len(self) : self._end]

    @property
    def amounts(self) -> Floats:
        """What each counted, float64, shape (n,), >= 0."""
        return self._amounts[self._end - len(self) : self._end]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays, at most twice what is kept."""
        return self._numbers.nbytes + self._times_s.nbytes + self._amounts.nbytes

    def copy(self) -> RecentAccesses:
        """Return the same accesses, which no later `add` changes."""
        other = RecentAccesses()
        other._numbers, other._end = self.numbers.copy(), len(self)
        other._times_s, other._amounts = self.times_s.copy(), self.amounts.copy()
        return other

    def add(self, numbers: Ints, times_s: Floats, amounts: Floats, which: Bools) -> None:
        """Keep the accesses that ``which`` marks, in order; forget the oldest beyond the bound.

        Args:
            numbers: int64, shape (n,); below 0 for a key outside the table.
            times_s: In the heat's time (`heat_clock`), s, float64, shape (n,).
            amounts: float64, shape (n,), >= 0.
            which: bool, shape (n,).
        """
        new = slice(-KEPT_ACCESSES, None) if which.all() else np.flatnonzero(which)[-KEPT_ACCESSES:]
        numbers = numbers[new]
        end = self._end + len(numbers)
        if end > len(self._numbers):
            end = len(self) + len(numbers)
            self._move(min(2 * KEPT_ACCESSES, max(len(self._numbers), 2 * end)))
        self._numbers[self._end : end] = numbers
        self._times_s[self._end : end] = times_s[new]
        self._amounts[self._end : end] = amounts[new]
        self._end = end

    def _move(self, room: int) -> None:
        """Move what is kept to the front of new arrays."""
        kept = len(self)
        for name in ("_numbers", "_times_s", "_amounts"):
            old = getattr(self, name)
            new = np.empty(room, dtype=old.dtype)
            new[:kept] = old[self._end - kept : self._end]
            setattr(self, name, new)
        self._end = kept

    def renumber(self, number: Ints) -> None:
        """Give each key its new number, ``number[old]``; -1 for a dropped one."""
        numbers = self.numbers
        known = numbers >= 0
        numbers[known] = number[numbers[known]]

    def coverage(
        self,
        demand: Floats,
        weights: Floats,
        *,
        unseen_ratio: float,
        asked: Bools,
        deleted_s: Floats,
        rest: Rest = no_rest,
    ) -> Coverage:
        """Return F for a demand and its newest accesses; sorts the keys `SPANS` times.

        Args:
            demand: Decayed counts of all keys by number, float64, shape (keys,).
            weights: What is left of each kept access in that demand, float64, shape (n,).
            unseen_ratio: u, in [0, 1].
            asked: Whether a key belongs to those that are asked about, bool, shape (keys,); of
                keys outside the table that is not known: they count.
            deleted_s: When each key was last deleted: what came before is no access any more.
            rest: Called between steps of the work.
        """
        left = np.where(asked, demand, 0.0)
        rounding = _ROUNDING * np.maximum(1.0, demand)
        span = _span_accesses(float(left.sum()))
        cells = np.zeros(CELLS + 1)
        share, end = SPAN_ACCESSES_MIN / span, len(self)
        for _ in range(SPANS):
            start = max(0, end - span)
            numbers, known = self.numbers[start:end], self.numbers[start:end] >= 0
            outside = int(np.count_nonzero(~known))
            known[known] = self.times_s[start:end][known] > deleted_s[numbers[known]]
            numbers, taken = numbers[known], weights[start:end][known]
            left -= np.bincount(numbers, weights=taken, minlength=len(left))
            rest()
            places = _cells(np.where(asked & (left > rounding), left, 0.0))
            fallen = np.bincount(places[numbers[asked[numbers]]], minlength=CELLS + 1)
            fallen[CELLS] += outside
            cells += share * fallen
            share, end = share * _OLDER_RATIO, start
            rest()
        if not cells.any():
            return Coverage(unseen_ratio)
        below = np.append(0.0, np.cumsum(cells))
        return Coverage(unseen_ratio, tuple(below[:-1].tolist()), float(below[-1]))

    def spans(self, total: float) -> list[tuple[int, int, float]]:
        """Return the newest spans: from, to, and what an access counts; the newest first.

        Args:
            total: All demand, in accesses.
        """
        size = min(_span_accesses(total), len(self) // (2 * SPANS))
        ends = [len(self) - n * size for n in range(SPANS)] if size else []
        return [(end - size, end, _OLDER_RATIO**n) for n, end in enumerate(ends)]

    def check(self) -> None:
        """Raise InputError on the first broken invariant."""
        sizes = {len(self._numbers), len(self._times_s), len(self._amounts)}
        if len(sizes) > 1 or self._end > min(sizes) or min(sizes) > 2 * KEPT_ACCESSES:
            raise InputError(f"{self._end} recent accesses in arrays of {sorted(sizes)}")


def _span_accesses(total: float) -> int:
    return int(min(SPAN_ACCESSES_MAX, max(SPAN_ACCESSES_MIN, total / _SPANS_IN_DEMAND)))


def _cells(demand: Floats) -> Ints:
    """Return the cell that the middle of each key's share of demand lies in; `CELLS` without."""
    order = np.argsort(-demand, kind="stable")
    ranked = demand[order]
    ends = np.cumsum(ranked)
    total = float(ends[-1]) if len(ends) else 0.0
    cells = np.full(len(demand), CELLS, dtype=np.int64)
    if total > 0.0:
        middles = (ends - 0.5 * ranked) / total
        cells[order] = np.minimum(CELLS - 1, (middles * CELLS).astype(np.int64))
        cells[demand <= 0.0] = CELLS
    return cells
