"""A cache whose content is what the forecast expects most of, changed once per request.

The keys of a request are admitted if they are expected more than the least of what is there. Then
keys outside are brought in for the least expected inside, while one is worth ``swap_gain`` times
the other and the area for prefetched, not yet used keys has room.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from stoker.kernels._core import renew_rows
from stoker.prefetch.forecast import Ints, SessionForecast

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
        rows = [row for row in map(forecast.number, asked) if row is not None]
        newcomers = {row for row in rows if not flags[row]}
        for row in newcomers:
            flags[row] = True
        room = int(self._area_max * self.area_scale) - len(self._fresh) if swap else 0
        left, entered = renew_rows(
            forecast.rates(),
            self._inside,
            capacity=self.capacity,
            swaps=max(0, min(_SWAPS_MAX, room)),
            gain=self.swap_gain,
        )
        self._size += len(newcomers) - len(left) + len(entered)
        names = forecast.keys
        gone = [names[row] for row in sorted(row for row in left if row not in newcomers)]
        newcomers.difference_update(left)
        came = [names[row] for row in sorted([*newcomers, *entered])]
        fresh = self._fresh
        fresh.difference_update(gone)
        fresh.update(names[row] for row in entered)
        if self._lost:
            fresh.difference_update(self._lost)
            gone += self._lost
            self._lost = []
        self._asked = {}
        return gone, came

    def _renumber(self, names: list[Hashable], kept: Ints) -> None:
        moved = np.zeros_like(self._inside)
        moved[: len(kept)] = self._inside[kept]
        self._size = int(np.count_nonzero(moved))
        self._inside[kept] = False
        self._lost += [names[row] for row in np.flatnonzero(self._inside).tolist()]
        self._inside, self._flags = moved, moved.data
