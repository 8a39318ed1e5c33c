"""A cache whose content is what the forecast expects most of, changed once per request.

The keys of a request are admitted if they are expected more than the least of what is there. Then
keys outside are brought in for the least expected inside, while one is worth ``swap_gain`` times
the other and the area for prefetched, not yet used keys has room.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.forecast import Ints, Rates, SessionForecast

_SWAPS_MAX = 64


def _least(rows: Ints, values: Rates, count: int) -> Ints:
    """Return the rows of the ``count`` least values, rising; of equals the lower row comes first.

    Args:
        rows: int64, shape (n,), rising.
        values: float32, shape (n,).
        count: At least 0; above n, all rows are returned.
    """
    if count <= 0:
        return rows[:0]
    if count < len(rows):
        near = values <= np.partition(values, count - 1)[count - 1]
        rows, values = rows[near], values[near]
    return rows[np.argsort(values, kind="stable")[:count]]


class ForecastCache:
    """Virtual content of ``capacity`` keys chosen by a `SessionForecast`.

    Invariants: at most ``capacity`` keys inside, all of them known to the forecast.
    """

    name = "forecast"

    def __init__(
        self,
        capacity: int,
        forecast: SessionForecast,
        *,
        swap_gain: float = 1.1,
        area_ratio: float = 0.5,
    ) -> None:
        self.capacity = capacity
        self.forecast = forecast
        self.swap_gain = swap_gain
        self._area_max = int(capacity * area_ratio)
        self.area_scale = 1.0  # in [0, 1]; set by what prefetching has been worth
        self._inside = np.zeros(1024, dtype=bool)
        self._flags = self._inside.data  # the same memory, for one row at a time
        self._size = 0
        self._fresh: set[Hashable] = set()  # brought in ahead and not asked for yet
        self._asked: dict[Hashable, None] = {}  # since the content was renewed
        self._lost: list[Hashable] = []  # were inside when the forecast forgot them

    def __contains__(self, key: Hashable) -> bool:
        row = self.forecast.number(key)
        return row is not None and bool(self._flags[row])

    def __len__(self) -> int:
        return self._size

    def access(self, key: Hashable) -> bool:
        """Return whether the key is inside; what a request changes comes with `renew`."""
        self._fresh.discard(key)
        row = self.forecast.number(key)
        return row is not None and bool(self._flags[row])

    def observe(self, keys: Sequence[Hashable], session: Hashable | None, time_s: float) -> None:
        """Learn from a request.

        Args:
            keys: What it asked for, best first, without repeats.
            session: Whose request it was, or None.
            time_s: Unix seconds.
        """
        names = self.forecast.keys
        kept = self.forecast.observe(keys, session, time_s)
        if kept is not None:
            self._renumber(names, kept)
        count = len(self.forecast.keys)
        if count > len(self._inside):
            grown = np.zeros(2 * count, dtype=bool)
            grown[: len(self._inside)] = self._inside
            self._inside, self._flags = grown, grown.data
        self._asked.update(dict.fromkeys(keys))

    def renew(self, *, swap: bool) -> tuple[list[Hashable], list[Hashable]]:
        """Renew the content after one or more requests; takes time with the number of keys known.

        Args:
            swap: Whether keys may be brought in that nobody has just asked for.

        Returns:
            The keys that left and the keys that came.
        """
        forecast, flags, asked = self.forecast, self._flags, self._asked
        known = [row for row in map(forecast.number, asked) if row is not None]
        came = [row for row in known if not flags[row]]
        for row in came:
            flags[row] = True
        inside = self._inside[: len(forecast.keys)]
        rates = forecast.rates()
        there = np.flatnonzero(inside)
        over = max(0, len(there) - self.capacity)
        free = max(0, self.capacity - len(there))
        room = int(self._area_max * self.area_scale) - len(self._fresh) if swap else 0
        swaps = max(0, min(_SWAPS_MAX, room))
        least = _least(there, rates[there], over + swaps)
        inside[least[:over]] = False
        left: list[int] = least[:over].tolist()
        entered: list[int] = []
        if swaps:
            swapped, entered = self._swap(inside, rates, least[over:], free=free, count=swaps)
            left += swapped
        self._size = len(there) - len(left) + len(entered)
        names, newcomers = forecast.keys, set(came)
        gone = [names[row] for row in sorted(row for row in left if row not in newcomers)]
        newcomers.difference_update(left)
        arrived = [names[row] for row in sorted([*newcomers, *entered])]
        self._fresh.difference_update(gone)
        self._fresh.update(key for key in arrived if key not in asked)
        if self._lost:
            gone += self._lost
            self._fresh.difference_update(self._lost)
            self._lost = []
        self._asked = {}
        return gone, arrived

    def _swap(
        self, inside: NDArray[np.bool_], rates: Rates, least: Ints, *, free: int, count: int
    ) -> tuple[list[int], list[int]]:
        """Bring in up to ``count`` of the best outside; return the rows that left and that came."""
        if free:
            away = np.flatnonzero(~inside)
        elif len(least):
            away = np.flatnonzero((rates > self.swap_gain * rates[least[0]]) & ~inside)
        else:
            return [], []
        best = _least(away, -rates[away], count)
        filled, best = best[:free], best[free:]
        pairs = min(len(best), len(least))
        best, least = best[:pairs], least[:pairs]
        worth = rates[best] > self.swap_gain * rates[least]
        best, least = best[worth], least[worth]
        inside[filled] = True
        inside[best] = True
        inside[least] = False
        return least.tolist(), [*filled.tolist(), *best.tolist()]

    def _renumber(self, names: list[Hashable], kept: Ints) -> None:
        moved = np.zeros_like(self._inside)
        moved[: len(kept)] = self._inside[kept]
        self._inside[kept] = False
        self._lost += [names[row] for row in np.flatnonzero(self._inside).tolist()]
        self._inside, self._flags = moved, moved.data
