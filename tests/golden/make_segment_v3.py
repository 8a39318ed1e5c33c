"""Make the golden segment of format version 3: ``python tests/golden/make_segment_v3.py FOLDER``.

As `make_segment_v1`, of vectors that vary in some directions much more than in others, so that
coarse codes keep those alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from make_segment_v1 import make
from numpy.typing import NDArray

SEED = 20_261_201
DIM = 72
SPREAD = np.where(np.arange(DIM) < 24, 16, 1)


def golden_vectors() -> NDArray[np.float32]:
    """Made of small integers, so that every machine makes the same ones."""
    rng = np.random.default_rng(SEED)
    return (rng.integers(-8, 9, (300, DIM)) * SPREAD).astype(np.float32)


def golden_queries() -> NDArray[np.float32]:
    """Five queries, made likewise."""
    return (np.random.default_rng(SEED + 1).integers(-8, 9, (5, DIM)) * SPREAD).astype(np.float32)


if __name__ == "__main__":
    make(Path(sys.argv[1]), golden_vectors(), golden_queries())
