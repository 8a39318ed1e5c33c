"""What a cached entry is worth: how recently it was used, plus a credit for how often.

Least recently used alone loses everything to a stream of contexts that never come again; how often
alone never forgets. Here each doubling of an entry's uses is worth a number of other uses' time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

from stoker.errors import InputError


class Worth:
    """Recency and frequency of keys, resident or not; the least worthy goes first.

    Bounded: the keys used longest ago are forgotten beyond ``remembered_max``.

    Args:
        credit: Uses of other keys that a doubling of a key's own uses outweighs.
        remembered_max: Keys whose uses are remembered, at least those that are cached.
    """

    def __init__(self, *, credit: float = 4_000.0, remembered_max: int = 65_536) -> None:
        if credit < 0 or remembered_max < 1:
            raise InputError(
                f"expected a credit >= 0 and a bound, found {credit}, {remembered_max}"
            )
        self._credit = credit
        self._remembered_max = remembered_max
        self._clock = 0
        self._uses: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # uses, last use

    def use(self, key: Hashable) -> None:
        """Note that a key was used, or asked for in vain."""
        self._clock += 1
        uses, _ = self._uses.pop(key, (0, 0))
        self._uses[key] = (uses + 1, self._clock)
        while len(self._uses) > self._remembered_max:
            self._uses.popitem(last=False)

    def of(self, key: Hashable) -> float:
        """Return a key's worth; 0 for one that was never used or is forgotten."""
        uses, last = self._uses.get(key, (0, 0))
        return last + self._credit * math.log2(uses) if uses else 0.0
