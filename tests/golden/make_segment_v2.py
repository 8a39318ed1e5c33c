"""Make the golden segment of format version 2: ``python tests/golden/make_segment_v2.py FOLDER``.

As `make_segment_v1`, of vectors long enough for coarse codes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from make_segment_v1 import make
from numpy.typing import NDArray

SEED = 20_261_130


def golden_vectors() -> NDArray[np.float32]:
    """Made of sums of small integers, so that every machine makes the same ones."""
    rng = np.random.default_rng(SEED)
    return rng.integers(-8, 9, (150, 80)).astype(np.float32)


def golden_queries() -> NDArray[np.float32]:
    """Five queries, made likewise."""
    return np.random.default_rng(SEED + 1).integers(-8, 9, (5, 80)).astype(np.float32)


if __name__ == "__main__":
    make(Path(sys.argv[1]), golden_vectors(), golden_queries())
