"""What a cached entry is worth: how recently it was used, plus credits for how often, past and to
come.

Least recently used alone loses everything to a stream of contexts that never come again; how often
alone never forgets. Here each doubling of an entry's uses is worth a number of other uses' time.
What was used once has no count to go by, but its kind has: of the pieces of prompts, a passage
often comes again and a turn of a conversation seldom. So what was used once has credit for how
much likelier a second use is among its kind than among all, as seen so far (after the idea of
classes in Beckmann et al., "LHD", NSDI 2018; theirs has ages too).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping

from stoker.errors import InputError

KINDS_MAX = 64  # more are counted as one: kinds are few, or they are names
_HALVE_AT = 65_536.0  # first uses of a kind after which its counts are halved, to follow drift


class Worth:
    """Recency, frequency and kind of keys, resident or not; the least worthy goes first.

    Bounded: the keys used longest ago are forgotten beyond ``remembered_max``. Where all keys are
    of one kind, kinds change nothing.

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
        self._uses: OrderedDict[Hashable, tuple[int, int, str]] = OrderedDict()  # uses, last, kind
        self._kinds: dict[str, list[float]] = {}  # first uses, and second ones
        self._all = [0.0, 0.0]
        self._predicted: Mapping[Hashable, float] = {}

    def use(self, key: Hashable, *, kind: str = "") -> None:
        """Note that a key was used, or asked for in vain.

        Args:
            kind: Of what it is; a key keeps the kind of its first use.
        """
        self._clock += 1
        uses, _, known = self._uses.pop(key, (0, 0, self._kind_of(kind)))
        self._uses[key] = (uses + 1, self._clock, known)
        if uses < 2:
            self._count(known, second=uses == 1)
        while len(self._uses) > self._remembered_max:
            self._uses.popitem(last=False)

    def meet(self, key: Hashable, *, kind: str = "") -> None:
        """Note that a key is here. Its first use, unless it was asked for before: that counted."""
        if key not in self._uses:
            self.use(key, kind=kind)

    def _kind_of(self, kind: str) -> str:
        return kind if kind in self._kinds or len(self._kinds) < KINDS_MAX else ""

    def _count(self, kind: str, *, second: bool) -> None:
        for counts in (self._kinds.setdefault(kind, [0.0, 0.0]), self._all):
            counts[second] += 1.0
            if counts[0] > _HALVE_AT:
                counts[0], counts[1] = counts[0] / 2, counts[1] / 2

    def predict(self, weights: Mapping[Hashable, float]) -> None:
        """Take the heat plan's view: uses expected per key, soon. It replaces the last."""
        self._predicted = weights

    def of(self, key: Hashable) -> float:
        """Return a key's worth; 0 for one never used, or forgotten, and not expected either."""
        uses, last, kind = self._uses.get(key, (0, 0, ""))
        doublings = math.log2(1.0 + max(0.0, self._predicted.get(key, 0.0)))
        if uses == 1:
            doublings += math.log2(_again(self._kinds[kind]) / _again(self._all))
        elif uses:
            doublings += math.log2(uses)
        return last + self._credit * doublings


def _again(counts: list[float]) -> float:
    """Return the share of first uses that a second followed; Laplace's rule while few are seen."""
    return (counts[1] + 1.0) / (counts[0] + 2.0)
