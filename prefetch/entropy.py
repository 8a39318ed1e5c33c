"""Access entropy of a stream of keys, in O(1) per access, with exponential decay per access.

``H = -sum(p_i log2 p_i)`` in bits, where ``p_i`` is key i's share of the decayed access weight. It
says how predictable the next access is: 0 when one key has everything, log2(n) when n keys share
equally.

An access adds a weight that grows by 1/decay each time, instead of shrinking all others. With
``W = sum(s_i)`` and ``S = sum(s_i log2 s_i)`` over the grown weights, ``H = log2 W - S / W``
whatever the common scale. Both sums are compensated, and old rounding errors shrink with the
weights that made them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

from stoker.errors import InputError

# Weights are scaled down, exactly, when the newest one exceeds this.
_SCALE_BITS = 64
# A key whose weight fell below 2^-80 of an access cannot move H by 1e-12, and is dropped.
_DROP_BELOW = 2.0**-80


class CompensatedSum:
    """A running sum that keeps what each addition rounds away.

    Source: Neumaier, ZAMM 54 (1974), an improvement of Kahan's summation.
    """

    __slots__ = ("carry", "total")

    def __init__(self, total: float = 0.0, carry: float = 0.0) -> None:
        self.total = total
        self.carry = carry

    def add(self, value: float) -> None:
        """Add ``value``."""
        total = self.total + value
        if abs(self.total) >= abs(value):
            self.carry += (self.total - total) + value
        else:
            self.carry += (value - total) + self.total
        self.total = total

    @property
    def value(self) -> float:
        """The sum."""
        return self.total + self.carry


def shannon_entropy(weights: Iterable[float]) -> float:
    """Return the entropy in bits of weights >= 0, summed exactly; 0 for none. The slow truth."""
    positive = [w for w in weights if w > 0.0]
    total = math.fsum(positive)
    if total <= 0.0:
        return 0.0
    return max(0.0, -math.fsum(w / total * math.log2(w / total) for w in positive))


def normalised_entropy(entropy_bits: float, keys: int) -> float:
    """Return ``H / log2(keys)`` in [0, 1]: 1 when all keys are equally likely; 0 below two keys."""
    if keys < 2:
        return 0.0
    return min(1.0, max(0.0, entropy_bits / math.log2(keys)))


class AccessEntropy:
    """Running entropy of one stream (one tenant, or one route of it).

    Invariants: every weight is > 0; ``W`` and ``S`` are their sums up to rounding.

    Source: the project's seed text for O(1) updates, decay 0.9992 and compensation; the
    scale-free form and its exactness (1e-9 against `exact`) are ours.
    """

    def __init__(self, *, decay: float = 0.9992) -> None:
        if not 0.0 < decay <= 1.0:
            raise InputError(f"decay must be in (0, 1], got {decay}")
        self.decay = decay
        self._growth = 1.0 / decay
        self._next = 1.0
        self._weights: dict[Hashable, float] = {}
        self._sum = CompensatedSum()
        self._sum_log = CompensatedSum()
        self.accesses = 0

    def add(self, key: Hashable) -> None:
        """Count one access to ``key``."""
        step = self._next
        old = self._weights.get(key, 0.0)
        new = old + step
        self._weights[key] = new
        self._sum.add(step)
        self._sum_log.add(new * math.log2(new))
        if old > 0.0:
            self._sum_log.add(-old * math.log2(old))
        self._next = step * self._growth
        self.accesses += 1
        if self._next > 2.0**_SCALE_BITS:
            self._rescale()

    def _rescale(self) -> None:
        scale = 2.0**-_SCALE_BITS
        self._next *= scale
        floor = _DROP_BELOW * self._next
        kept = {key: w * scale for key, w in self._weights.items() if w * scale > floor}
        self._weights = kept
        # Taken anew from the weights: the one place where the running sums are made exact.
        self._sum = CompensatedSum(math.fsum(kept.values()))
        self._sum_log = CompensatedSum(math.fsum(w * math.log2(w) for w in kept.values()))

    @property
    def bits(self) -> float:
        """The entropy in bits, in [0, log2(key_count)]."""
        total = self._sum.value
        if total <= 0.0 or len(self._weights) < 2:
            return 0.0
        return max(0.0, math.log2(total) - self._sum_log.value / total)

    @property
    def normalised(self) -> float:
        """The entropy as a share of its greatest value for this many keys, in [0, 1]."""
        return normalised_entropy(self.bits, len(self._weights))

    def share(self, key: Hashable) -> float:
        """Return the key's part of all decayed accesses, in [0, 1]; 0 for one without weight."""
        total = self._sum.value
        return min(1.0, self._weights.get(key, 0.0) / total) if total > 0.0 else 0.0

    @property
    def key_count(self) -> int:
        """How many keys still have weight."""
        return len(self._weights)

    def exact(self) -> float:
        """Return the entropy computed from all weights, in O(keys). For checks."""
        return shannon_entropy(self._weights.values())

    def to_state(self) -> dict[str, Any]:
        """Return plain data; keys must be strings for it to survive JSON."""
        return {
            "decay": self.decay,
            "next": self._next,
            "weights": dict(self._weights),
            "sums": [
                self._sum.total,
                self._sum.carry,
                self._sum_log.total,
                self._sum_log.carry,
            ],
            "accesses": self.accesses,
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> AccessEntropy:
        """Return what `to_state` saved; continues bit for bit."""
        entropy = AccessEntropy(decay=state["decay"])
        entropy._next = state["next"]
        entropy._weights = dict(state["weights"])
        sums = state["sums"]
        entropy._sum = CompensatedSum(sums[0], sums[1])
        entropy._sum_log = CompensatedSum(sums[2], sums[3])
        entropy.accesses = state["accesses"]
        return entropy
