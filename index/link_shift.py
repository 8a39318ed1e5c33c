"""What all vectors have in common, and inner products must not be linked by.

Under the inner product the rows that are nearest to a row are those that are nearest to the mean of
all, where that mean is longer than rows differ: each row links to the same few dozen, and to
nothing else, and what is in none of their lists is never found. A part of the mean that is taken
from every row takes the same number from all of a query's products, so it changes no order: links
are made without it, and walks and scores know nothing of it. All of it would be too much. Queries
that share the mean ask for rows that lie far along it; with a part of it left, those are at hand.

Nothing is taken where that would make lengths differ more. Of rows that are all as long, as models
give them, those with the largest products are the nearest ones; without a part of the mean they
were of many lengths, and the longest of them would be everybody's neighbors.

Measured of hnswlib, 20,000 x 64 in 200 clusters, mean three times as long as the spread, recall@10
of stored vectors with noise at widths 50, 200 and 1,000, and recall@100 at 1,000: nothing taken
0.920, 0.937, 0.945, 0.778; all of it 0.720, 0.976, 1.000, 0.998; all but half of the spread 0.976,
1.000, 1.000, 1.000. Of 4,000 x 256 normal rows at unit length, mean three times as long as the
spread, recall@10 at widths 50 and 200, and recall@100 at 800: nothing taken 0.839, 0.980, 0.997;
all but half of the spread 0.561, 0.918, 0.999.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BATCH_ROWS: Final = 16_384
# As much of the mean is left, in spreads (root mean square distances from it).
_LEFT: Final = 0.5
# Whose lengths are looked at with and without it.
_SAMPLE_ROWS: Final = 16_384
_LARGEST: Final = float(np.finfo(np.float32).max)


def link_shift(vectors: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return what to take from rows before they are linked by inner product.

    Args:
        vectors: float32 or float16, shape (n, dim); may be a memory map.
        rows: int64, shape (r,): which of them are linked.

    Returns:
        float32, shape (dim,); None where they have too little in common for it to matter, or lie
        better as they are. No row without it is too long for float32 products.
    """
    if len(rows) == 0:
        return None
    total = np.zeros(vectors.shape[1], np.float64)
    squares = longest = 0.0
    for start in range(0, len(rows), _BATCH_ROWS):
        batch = np.asarray(vectors[rows[start : start + _BATCH_ROWS]], np.float32)
        total += batch.sum(axis=0, dtype=np.float64)
        lengths2 = _lengths2(batch)
        squares += float(lengths2.sum())
        longest = max(longest, float(lengths2.max()) ** 0.5)
    mean = total / len(rows)
    length2 = float(mean @ mean)
    # Of rows that are all the same it may round below nothing.
    spread = max(squares / len(rows) - length2, 0.0) ** 0.5
    length = length2**0.5
    if length <= _LEFT * spread or length == 0.0:
        return None
    if (longest + length) ** 2 > _LARGEST:
        return None
    shift: NDArray[np.float32] = ((1.0 - _LEFT * spread / length) * mean).astype(np.float32)
    few = np.asarray(vectors[rows[:: -(-len(rows) // _SAMPLE_ROWS)]], np.float32)
    return shift if _lengths2(few - shift).std() < _lengths2(few).std() else None


def _lengths2(batch: NDArray[np.float32]) -> NDArray[np.float64]:
    """The squared length of each row."""
    found: NDArray[np.float64] = np.einsum("ij,ij->i", batch, batch, dtype=np.float64)
    return found
