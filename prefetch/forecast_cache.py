"""A cache whose content is what the forecast expects most of, changed once per request.

The keys of a request are admitted if they are expected more than the least of what is there. Then
keys outside are brought in for the least expected inside, while one is worth ``swap_gain`` times
the other and the area for prefetched, not yet used keys has room.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from stoker.prefetch.forecast import SessionForecast

_SWAPS_MAX = 64


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
        self._size = 0
        self._fresh: set[Hashable] = set()  # brought in ahead and not asked for yet

    def __contains__(self, key: Hashable) -> bool:
        row = self.forecast.number(key)
        return row is not None and bool(self._inside[row])

    def __len__(self) -> int:
        return self._size

    def access(self, key: Hashable) -> bool:
        """Return whether the key is inside; what a request changes comes with `close`."""
        self._fresh.discard(key)
        return key in self

    def close(
        self, keys: Sequence[Hashable], session: Hashable | None, time_s: float, *, swap: bool
    ) -> tuple[list[Hashable], list[Hashable]]:
        """End a request: learn from it and renew the content.

        Args:
            keys: What it asked for, best first, without repeats.
            session: Whose request it was, or None.
            time_s: Unix seconds.
            swap: Whether keys may be brought in that nobody has just asked for.

        Returns:
            The keys that left and the keys that came.
        """
        forecast = self.forecast
        kept = forecast.observe(keys, session, time_s)
        if kept is not None:
            self._renumber(kept)
        count = len(forecast.keys)
        if count > len(self._inside):
            grown = np.zeros(2 * count, dtype=bool)
            grown[: len(self._inside)] = self._inside
            self._inside = grown
        inside = self._inside[:count]
        before = inside.copy()
        rows = [row for row in map(forecast.number, keys) if row is not None]
        inside[rows] = True
        rates = forecast.rates()
        there = np.flatnonzero(inside)
        over = len(there) - self.capacity
        if over > 0:
            order = np.argpartition(rates[there], over - 1) if over < len(there) else slice(None)
            inside[there[order][:over]] = False
        if swap:
            self._swap(inside, rates)
        self._size = int(np.count_nonzero(inside))
        names = forecast.keys
        gone = [names[i] for i in np.flatnonzero(before & ~inside).tolist()]
        came = [names[i] for i in np.flatnonzero(inside & ~before).tolist()]
        self._fresh.difference_update(gone)
        asked = set(keys)
        self._fresh.update(key for key in came if key not in asked)
        return gone, came

    def _swap(self, inside: np.ndarray, rates: np.ndarray) -> None:
        room = int(self._area_max * self.area_scale) - len(self._fresh)
        there, away = np.flatnonzero(inside), np.flatnonzero(~inside)
        free = self.capacity - len(there)
        count = min(_SWAPS_MAX, room, len(away))
        if count <= 0:
            return
        best = away[np.argpartition(-rates[away], count - 1)[:count]]
        best = best[np.argsort(-rates[best], kind="stable")]
        filled, best = best[:free], best[free:]
        inside[filled] = True
        count = min(len(best), len(there))
        if count <= 0:
            return
        least = there[np.argpartition(rates[there], count - 1)[:count]]
        least = least[np.argsort(rates[least], kind="stable")]
        worth = rates[best[:count]] > self.swap_gain * rates[least]
        inside[least[worth]] = False
        inside[best[:count][worth]] = True

    def _renumber(self, kept: np.ndarray) -> None:
        moved = np.zeros_like(self._inside)
        moved[: len(kept)] = self._inside[kept]
        self._inside = moved
