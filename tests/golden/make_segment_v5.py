"""Make the golden segment of format version 5: ``python tests/golden/make_segment_v5.py FOLDER``.

As `make_segment_v4`, under inner products, and of vectors that are all as long and have much in
common, so that its records state what each has along their mean; with a table of groups of near
rows, for which there are otherwise too few.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
from make_segment_v1 import make
from make_segment_v4 import SPREAD
from numpy.typing import NDArray

SEED = 20_261_131


def _drawn(seed: int, count: int) -> NDArray[np.float32]:
    """Of sizes that depend on the dimension alone; seven signs of eight are alike."""
    signs = np.where(np.random.default_rng(seed).integers(0, 8, (count, len(SPREAD))) > 0, 1, -1)
    return (signs * SPREAD).astype(np.float32)


def golden_vectors() -> NDArray[np.float32]:
    """Made of small integers, so that every machine makes the same ones."""
    return _drawn(SEED, 240)


def golden_queries() -> NDArray[np.float32]:
    """Five queries: four made likewise, and 64 times the vectors' mean, rounded."""
    mean = np.rint(64 * golden_vectors().mean(axis=0))
    return np.concatenate([_drawn(SEED + 1, 4) + np.float32(0.5), mean[None]])


if __name__ == "__main__":
    from stoker.index import coarse_basis, range_table, row_groups

    with (
        mock.patch.object(coarse_basis, "_SAMPLE_FACTOR", 1),
        mock.patch.object(range_table, "RANGE_ROWS_MIN", 64),
        mock.patch.object(row_groups, "GROUP_ROWS", 16),
    ):
        make(Path(sys.argv[1]), golden_vectors(), golden_queries(), metric="ip")
