"""Let the weights of the heat score follow what happened.

After a decision its outcome is known: was the key asked for or not. The weights take a step against
the smoothed gradient of the squared error over the last 64 outcomes, the newest counting most
(0.95 per step back), and are put back onto the simplex (each >= 0, together 1).

Source: the project's seed text (window 64, smoothing 0.95); the projection is that of Duchi et
al., ICML 2008.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def simplex_projection(values: Floats) -> Floats:
    """Return the nearest point (L2) whose entries are >= 0 and add up to 1."""
    order = np.sort(values)[::-1]
    excess = np.cumsum(order) - 1.0
    counts = np.arange(1, len(values) + 1)
    last = int(np.flatnonzero(order - excess / counts > 0.0)[-1])
    result: Floats = np.maximum(values - excess[last] / (last + 1), 0.0)
    result /= result.sum()
    return result


class OnlineWeights:
    """Score weights that learn from outcomes.

    Invariants: weights are >= 0 and add up to 1; at most ``window`` gradients are kept.
    """

    def __init__(
        self,
        weights: tuple[float, ...],
        *,
        window: int = 64,
        smoothing: float = 0.95,
        rate: float = 0.02,
    ) -> None:
        self.weights = simplex_projection(np.array(weights, dtype=np.float64))
        self._gradients: deque[Floats] = deque(maxlen=window)
        self._smoothing = smoothing
        self._rate = rate

    def observe(self, terms: Floats, outcome: float) -> None:
        """Learn from one outcome.

        Args:
            terms: The score's terms at decision time, each in [0, 1], one per weight.
            outcome: 1 when the key was asked for within the horizon, else 0.
        """
        error = float(self.weights @ terms) - outcome
        self._gradients.append(2.0 * error * terms)
        factors = self._smoothing ** np.arange(len(self._gradients) - 1, -1, -1)
        smoothed = (factors[:, None] * np.array(self._gradients)).sum(axis=0) / factors.sum()
        self.weights = simplex_projection(self.weights - self._rate * smoothed)
