"""Make the golden segment of format version 4: ``python tests/golden/make_segment_v4.py FOLDER``.

As `make_segment_v3`, of vectors long enough for coarse records that end with their two numbers, and
of so few that the basis has to be chosen from less than it otherwise would be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
from make_segment_v1 import make
from numpy.typing import NDArray

SEED = 20_261_130
DIM = 200
SPREAD = np.where(np.arange(DIM) < 24, 16, np.where(np.arange(DIM) < 80, 4, 1))


def golden_vectors() -> NDArray[np.float32]:
    """Made of small integers, so that every machine makes the same ones."""
    rng = np.random.default_rng(SEED)
    return (rng.integers(-8, 9, (240, DIM)) * SPREAD).astype(np.float32)


def golden_queries() -> NDArray[np.float32]:
    """Five queries, made likewise."""
    return (np.random.default_rng(SEED + 1).integers(-8, 9, (5, DIM)) * SPREAD).astype(np.float32)


if __name__ == "__main__":
    from stoker.index import coarse_basis

    with mock.patch.object(coarse_basis, "_SAMPLE_FACTOR", 1):
        make(Path(sys.argv[1]), golden_vectors(), golden_queries())
