"""The heat score of a content key, and the tier that a score asks for.

``score = 0.5 * frequency + 0.3 * recency + 0.2 * pagerank``, each term in [0, 1] (the weights are
settings). Source: the project's seed text; the normalisations are ours and stated below.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class TierAdvice(enum.Enum):
    """Where a score says that a key's pages should be."""

    FAST = "load now into the fastest tier"
    QUEUE = "prefetch queue"
    NVME = "stay on NVMe"


def log_share(values: Floats, top: float) -> Floats:
    """Return ``ln(1 + v) / ln(1 + top)`` in [0, 1]: the place between none and the greatest.

    Demand is heavy-tailed: as a plain share of the greatest, all but a handful of keys would be 0.

    Args:
        values: Each in [0, top].
        top: The greatest value; 0 makes every share 0.
    """
    if top <= 0.0:
        return np.zeros_like(values)
    result: Floats = np.minimum(np.log1p(values) / np.log1p(top), 1.0)
    return result


def recency(age_s: Floats, *, tau_s: float) -> Floats:
    """Return ``e^(-age / tau)`` in [0, 1]; age and tau in seconds; negative ages count as 0."""
    result: Floats = np.exp(-np.maximum(age_s, 0.0) / tau_s)
    return result


def heat_score(
    frequency: Floats, recent: Floats, pagerank: Floats, *, weights: tuple[float, float, float]
) -> Floats:
    """Return the weighted sum of the three terms, in [0, 1].

    Args:
        frequency: Normalised decayed frequency, in [0, 1].
        recent: Recency, in [0, 1].
        pagerank: Normalised PageRank, in [0, 1].
        weights: One per term, >= 0, adding up to 1.
    """
    total = weights[0] * frequency + weights[1] * recent + weights[2] * pagerank
    return np.clip(total, 0.0, 1.0)


def tier_advice(score: float, *, fast_threshold: float, queue_threshold: float) -> TierAdvice:
    """Return the tier for a score: above 0.85 fast, 0.6 to 0.85 queue, below NVMe (defaults)."""
    if score > fast_threshold:
        return TierAdvice.FAST
    return TierAdvice.QUEUE if score >= queue_threshold else TierAdvice.NVME
