"""What the access entropy asks for: the caching regime, the sampling rate, the drift alarm.

Source: the project's seed text for all thresholds. H is in bits.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass


class Regime(enum.Enum):
    """How to cache a stream of a given entropy."""

    PIN = "few keys have almost everything: pin them"
    EVICT = "LRU-K with entropy-aware eviction"
    SHARD = "no key stands out: shard by feature hash, cache no single key"


def regime_for(entropy_bits: float, *, pin_below: float = 1.0, shard_from: float = 8.0) -> Regime:
    """Return PIN for H < 1, EVICT for 1 <= H < 8, SHARD for H >= 8 (defaults)."""
    if entropy_bits < pin_below:
        return Regime.PIN
    return Regime.EVICT if entropy_bits < shard_from else Regime.SHARD


def sampling_rate(entropy_bits: float, *, low_below: float = 4.2, low_rate: float = 0.25) -> float:
    """Return the share of events to take into statistics: 25 % where H < 4.2, else all.

    A repetitive stream says the same with a quarter of its events.
    """
    return low_rate if entropy_bits < low_below else 1.0


def sampled(event_id: str, rate: float) -> bool:
    """Say whether an event is in a sample of ``rate``; the same for the same id, everywhere.

    Samples nest: an event in a small sample is in every larger one.
    """
    digest = hashlib.blake2b(event_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < rate * 2.0**64


def cross_tier_open(
    gpu_miss_ratio: float,
    nvme_idle_ratio: float,
    *,
    miss_over: float = 0.12,
    idle_over: float = 0.65,
) -> bool:
    """Say whether to prefetch across tiers: the GPU misses enough and NVMe has time for it."""
    return gpu_miss_ratio > miss_over and nvme_idle_ratio > idle_over


@dataclass
class DriftAlarm:
    """Watches for a hot spot forming: the entropy falling within a window of requests.

    Call `observe` at the end of each window. A fall of 0.3 to 0.5 bit raises weights by 15 %, a
    deeper one by 30 %; a window of 5,000 requests or fewer says nothing.

    Attributes:
        requests_over: Windows need more requests than this.
        fall_bits: The least fall that counts.
        deep_bits: From here on the fall counts as deep.
    """

    requests_over: int = 5000
    fall_bits: float = 0.3
    deep_bits: float = 0.5
    _before: float | None = None

    def observe(self, entropy_bits: float, requests: int) -> float:
        """Return the factor for the weights of what is hot now: 1.0, 1.15 or 1.3.

        Args:
            entropy_bits: Entropy at the end of the window.
            requests: Requests in the window.
        """
        before, self._before = self._before, entropy_bits
        if before is None or requests <= self.requests_over:
            return 1.0
        fall = before - entropy_bits
        if fall <= self.fall_bits:
            return 1.0
        return 1.15 if fall <= self.deep_bits else 1.3
