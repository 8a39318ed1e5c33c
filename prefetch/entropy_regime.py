"""What each entropy regime does with keys: pin, LRU-K with entropy-aware eviction, let nothing in.

`regime` says which one a stream's entropy asks for; here is what it then does. On recorded traces
the eviction alone hits more than LRU-K and less than our own policy, and all three together least,
because there the entropy asks for no cache (`prefetch/BENCHMARKS.md`). So nothing uses it by
default: `stoker simulate --policy entropy-lru-k,entropy-regime` runs it.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Final

from stoker.prefetch.candidates import Candidate
from stoker.prefetch.coupling import entropy_gate
from stoker.prefetch.entropy import AccessEntropy
from stoker.prefetch.regime import Regime, regime_for

_LOOKED_AT: Final = 32  # keys compared for an eviction; with so many, nearly as good as all
_SEED: Final = 7


def keep_value(distance: float, share: float, entropy_norm: float, *, room: int) -> float:
    """Return what keeping a key is worth where 1 <= H < 8, in [0, 1].

    ``g / (1 + d / room) + (1 - g) * share`` with ``g = entropy_gate(entropy_norm)``: where accesses
    can be foreseen recency counts, where they scatter the key's share of them.

    Args:
        distance: d, accesses since the key's last but one (LRU-K's distance, K = 2); infinity for
            a key that was asked for once.
        share: Its decayed count over the greatest of those compared, in [0, 1].
        entropy_norm: Normalised entropy of the stream, in [0, 1].
        room: Keys that the cache holds, >= 1.

    Source: O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm", SIGMOD 1993, for the
    distance; the project's seed text for the gate. Joining them so is ours.
    """
    gate = entropy_gate(entropy_norm)
    return gate / (1.0 + distance / room) + (1.0 - gate) * share


class EntropyRegime(Candidate):
    """A cache that does what the entropy of its own accesses asks for.

    * H < 1, pin: the key with the least share leaves, so the few that have everything stay.
    * 1 <= H < 8: the key of the least `keep_value` among some leaves.
    * H >= 8: nothing is let in, because no key stands out; what is inside may still hit.

    Invariant: `Candidate`'s.
    """

    name = "entropy-regime"

    def __init__(
        self, capacity: int, *, regime: Regime | None = None, decay: float = 0.9992
    ) -> None:
        """Make an empty cache; with a ``regime`` it always does what that one does."""
        super().__init__(capacity)
        self._fixed = regime
        self._entropy = AccessEntropy(decay=decay)
        self._random = random.Random(_SEED)
        self._clock = 0
        self._seen: dict[Hashable, tuple[int, int]] = {}  # of those inside: last but one, last
        self._inside: list[Hashable] = []
        self._place: dict[Hashable, int] = {}

    @property
    def regime(self) -> Regime:
        """What is done now."""
        return regime_for(self._entropy.bits) if self._fixed is None else self._fixed

    def access(self, key: Hashable) -> bool:
        self.gone = None
        self._clock += 1
        self._entropy.add(key)
        hit = key in self._place
        if hit:
            self._seen[key] = (self._seen[key][1], self._clock)
        elif self.regime is not Regime.SHARD:
            if len(self._inside) >= self.capacity:
                self._remove(self._victim())
            self._place[key] = len(self._inside)
            self._inside.append(key)
            self._seen[key] = (-1, self._clock)
        return hit

    def _victim(self) -> Hashable:
        pin = self.regime is Regime.PIN
        norm = self._entropy.normalised
        looked_at = self._inside
        if len(looked_at) > _LOOKED_AT:
            looked_at = self._random.sample(looked_at, _LOOKED_AT)
        shares = [self._entropy.share(key) for key in looked_at]
        top = max(shares)

        def worth(at: int) -> tuple[float, int]:
            before, last = self._seen[looked_at[at]]
            share = shares[at] / top if top > 0.0 else 0.0
            if pin:
                return share, last
            distance = float("inf") if before < 0 else float(self._clock - before)
            return keep_value(distance, share, norm, room=self.capacity), last

        return looked_at[min(range(len(looked_at)), key=worth)]

    def _remove(self, key: Hashable) -> None:
        at = self._place.pop(key)
        last = self._inside.pop()
        if at < len(self._inside):
            self._inside[at] = last
            self._place[last] = at
        del self._seen[key]
        self.gone = key

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._inside) <= self.capacity, (len(self._inside), self.capacity)
        assert {key: at for at, key in enumerate(self._inside)} == self._place
        assert self._seen.keys() == self._place.keys()

    def keys(self) -> list[Hashable]:
        return sorted(self._inside, key=lambda key: self._seen[key][1])

    def __contains__(self, key: Hashable) -> bool:
        return key in self._place

    def __len__(self) -> int:
        return len(self._inside)
