"""What all vectors have in common, and inner products must not be linked by.

Under the inner product the rows that are nearest to a row are those that are nearest to the mean of
all, where that mean is longer than rows differ: each row links to the same few dozen, and to
nothing else, and what is in none of their lists is never found. A part of the mean that is taken
from every row takes the same number from all of a query's products, so it changes no order: links
are made without it, and walks and scores know nothing of it. All of it would be too much. Queries
that share the mean ask for rows that lie far along it; with a part of it left, those are at hand.

Measured of hnswlib, 20,000 x 64 in 200 clusters, mean three times as long as the spread, recall@10
of stored vectors with noise at widths 50, 200 and 1,000, and recall@100 at 1,000: nothing taken
0.920, 0.937, 0.945, 0.778; all of it 0.720, 0.976, 1.000, 0.998; all but half of the spread 0.976,
1.000, 1.000, 1.000.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BATCH_ROWS: Final = 16_384
# As much of the mean is left, in spreads (root mean square distances from it).
_LEFT: Final = 0.5


def link_shift(vectors: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return what to take from rows before they are linked by inner product.

    Args:
        vectors: float32 or float16, shape (n, dim); may be a memory map.
        rows: int64, shape (r,): which of them are linked.

    Returns:
        float32, shape (dim,); None where they have too little in common for it to matter.
    """
    if len(rows) == 0:
        return None
    total = np.zeros(vectors.shape[1], np.float64)
    squares = 0.0
    for start in range(0, len(rows), _BATCH_ROWS):
        batch = np.asarray(vectors[rows[start : start + _BATCH_ROWS]], np.float32)
        total += batch.sum(axis=0, dtype=np.float64)
        squares += float(np.einsum("ij,ij->", batch, batch, dtype=np.float64))
    mean = total / len(rows)
    length2 = float(mean @ mean)
    # Of rows that are all the same it may round below nothing.
    spread = max(squares / len(rows) - length2, 0.0) ** 0.5
    length = length2**0.5
    if length <= _LEFT * spread or length == 0.0:
        return None
    shift: NDArray[np.float32] = ((1.0 - _LEFT * spread / length) * mean).astype(np.float32)
    return shift
