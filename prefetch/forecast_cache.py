"""A cache whose content is what the forecast expects most of, renewed after each request or a few.

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
_SPARE_MAX = 256  # keys that may leave between two renewals


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
        self._open: set[Hashable] = set()  # asked for by the request that is not yet observed
        self._asked: dict[Hashable, None] = {}  # since the content was renewed
        self._lost: list[Hashable] = []  # were inside when the forecast forgot them
        self._rates = np.zeros(0, dtype=np.float32)  # as they were when the content was renewed
        self._spare: list[int] | None = None  # rows that may leave first, the least last

    def __contains__(self, key: Hashable) -> bool:
        row = self.forecast.number(key)
        return row is not None and bool(self._flags[row])

    def __len__(self) -> int:
        return self._size

    def access(self, key: Hashable) -> bool:
        """Return whether the key is inside, or was asked for before in the request that is open.

        What a request changes comes with `renew`; until then its own keys are at hand, as they are
        in every other cache, or a request that names a key twice would count against this one.
        """
        if key in self._open:
            return True
        self._open.add(key)
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
        self._open = set()
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

    def admit(self, keys: Sequence[Hashable]) -> tuple[list[Hashable], list[Hashable]]:
        """Let a request's keys in until `renew` looks at all.

        A key comes if it is expected more than what was expected least when that was last done.

        Returns:
            The keys that left and the keys that came.
        """
        forecast, flags = self.forecast, self._flags
        known = [row for row in map(forecast.number, keys) if row is not None]
        rows = [row for row in known if not flags[row]]
        gone = self._take_lost()
        came: list[Hashable] = []
        rates = forecast.rates(rows).tolist() if rows else []
        for row, rate in zip(rows, rates, strict=True):
            if self._size >= self.capacity:
                victim = self._next_victim(rate)
                if victim is None:
                    continue
                flags[victim] = False
                gone.append(forecast.keys[victim])
                self._size -= 1
            flags[row] = True
            came.append(forecast.keys[row])
            self._size += 1
        self._fresh.difference_update(gone)
        return gone, came

    def _next_victim(self, rate: float) -> int | None:
        """Return a row that was expected less than ``rate``, the least of all; None without one."""
        if self._spare is None:
            rows = np.flatnonzero(self._inside[: len(self._rates)])
            rates = self._rates[rows]
            if len(rows) > _SPARE_MAX:
                near = rates <= np.partition(rates, _SPARE_MAX)[_SPARE_MAX]
                rows, rates = rows[near], rates[near]
            self._spare = rows[np.argsort(rates, kind="stable")][:_SPARE_MAX][::-1].tolist()
        while self._spare and self._rates[self._spare[-1]] < rate:
            row = self._spare.pop()
            if self._flags[row] and self.forecast.keys[row] not in self._asked:
                return row
        return None

    def renew(self, *, swap: bool) -> tuple[list[Hashable], list[Hashable]]:
        """Renew the content after one or more requests; takes time with the number of keys known.

        Args:
            swap: Whether keys may be brought in that nobody has just asked for.

        Returns:
            The keys that left and the keys that came.
        """
        forecast, flags, asked = self.forecast, self._flags, self._asked
        self._rates, self._spare = forecast.rates(), None
        rows = [row for row in map(forecast.number, asked) if row is not None]
        newcomers = {row for row in rows if not flags[row]}
        for row in newcomers:
            flags[row] = True
        room = int(self._area_max * self.area_scale) - len(self._fresh) if swap else 0
        left, entered = renew_rows(
            self._rates,
            self._inside,
            capacity=self.capacity,
            swaps=max(0, min(_SWAPS_MAX, room)),
            gain=self.swap_gain,
        )
        self._size += len(newcomers) - len(left) + len(entered)
        names = forecast.keys
        gone = self._take_lost()
        gone += [names[row] for row in sorted(row for row in left if row not in newcomers)]
        newcomers.difference_update(left)
        came = [names[row] for row in sorted([*newcomers, *entered])]
        fresh = self._fresh
        fresh.difference_update(gone)
        fresh.update(names[row] for row in entered)
        self._asked = {}
        return gone, came

    def _take_lost(self) -> list[Hashable]:
        """Return the keys that left because the forecast forgot them, once."""
        lost, self._lost = self._lost, []
        return lost

    def _renumber(self, names: list[Hashable], kept: Ints) -> None:
        self._spare = []  # the rows have other numbers now
        moved = np.zeros_like(self._inside)
        moved[: len(kept)] = self._inside[kept]
        self._size = int(np.count_nonzero(moved))
        self._inside[kept] = False
        self._lost += [names[row] for row in np.flatnonzero(self._inside).tolist()]
        self._inside, self._flags = moved, moved.data
