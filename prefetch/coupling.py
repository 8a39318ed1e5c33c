"""One score out of freshness and predictability, with a gate that shifts between them.

``gate = 1 / (1 + e^(a (H - b)))`` and ``score = gate * freshness + (1 - gate) * (1 - H)``, with H
the normalised entropy. All in [0, 1]. Where accesses are unpredictable (high H) the gate closes:
freshness means little there, and the score falls towards 1 - H.

Source: the project's seed text ("double-factor coupling"), a = 2, b = 0.5.
"""

from __future__ import annotations

import math


def entropy_gate(entropy_norm: float, *, steepness: float = 2.0, midpoint: float = 0.5) -> float:
    """Return the gate in (0, 1), falling in ``entropy_norm``; 0.5 at ``midpoint``.

    Args:
        entropy_norm: Normalised entropy, in [0, 1].
        steepness: a >= 0; 0 keeps the gate at 0.5.
        midpoint: b, in [0, 1].
    """
    return 1.0 / (1.0 + math.exp(steepness * (entropy_norm - midpoint)))


def coupled_score(
    freshness: float, entropy_norm: float, *, steepness: float = 2.0, midpoint: float = 0.5
) -> float:
    """Return the coupled score in [0, 1]; rises with freshness at any entropy.

    Args:
        freshness: In [0, 1], for example ``e^(-age / tau)``.
        entropy_norm: Normalised entropy, in [0, 1].
        steepness: See `entropy_gate`.
        midpoint: See `entropy_gate`.
    """
    gate = entropy_gate(entropy_norm, steepness=steepness, midpoint=midpoint)
    return gate * freshness + (1.0 - gate) * (1.0 - entropy_norm)
