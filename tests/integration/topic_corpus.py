"""Passages in topics, and questions of which a few topics get most: one law for several tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS, DIM, TOPICS = 4_000, 64, 200

Vectors = NDArray[np.float32]


def corpus() -> Vectors:
    """Return the passages, float32, shape (ROWS, DIM); row r is of topic r % TOPICS."""
    rng = np.random.default_rng(11)
    centres = rng.standard_normal((TOPICS, DIM))
    rows = centres[np.arange(ROWS) % TOPICS] + 0.5 * rng.standard_normal((ROWS, DIM))
    return rows.astype(np.float32)


def questions(vectors: Vectors, count: int, *, seed: int, turned: bool = False) -> Vectors:
    """Questions near passages by a Zipf law over topics; turned, the coldest are the hottest."""
    rng = np.random.default_rng(seed)
    law = 1.0 / np.arange(1, TOPICS + 1) ** 1.5
    topic = rng.choice(TOPICS, size=count, p=law / law.sum())
    row = (TOPICS - 1 - topic if turned else topic) + TOPICS * rng.integers(
        0, ROWS // TOPICS, size=count
    )
    return np.asarray(vectors[row] + 0.1 * rng.standard_normal((count, DIM)), dtype=np.float32)
