"""Rows in the middle of all others, which a graph must not be grown around.

HNSW takes a neighbor only if nothing that it took already is nearer to it than the node is. Under
L2, a vector at the centre of the others (a zero vector among embeddings that failed) is nearer to
each of them than they are to each other, once there are many dimensions: whatever is inserted after
it links to it and to nothing else, and it has room for a few dozen. Inserted last, it changes the
links of those few dozen alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BATCH_ROWS: Final = 16_384
# How much nearer to the centre than half of all rows, in squared distance.
_CENTRAL: Final = 0.25


def hubs_last(vectors: NDArray[Any], rows: NDArray[np.int64], *, most: int) -> NDArray[np.int64]:
    """Return ``rows`` with those at the centre of all moved to the end, in their order.

    With more than ``most`` of those the order stays: they are then links enough for all, where they
    came early, and would cut each other's neighbors off, where they came last.

    Args:
        vectors: float32 or float16, shape (n, dim), compared by L2; may be a memory map.
        rows: int64, shape (r,): rows of it, in the order of their insertion.
        most: As many links as a row has on the bottom level.
    """
    if len(rows) == 0:
        return rows
    batches = [rows[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS)]
    total = np.zeros(vectors.shape[1], np.float64)
    for batch in batches:
        total += np.asarray(vectors[batch], np.float64).sum(axis=0)
    centre = (total / len(rows)).astype(np.float32)
    away = np.empty(len(rows), np.float64)
    for number, batch in enumerate(batches):
        apart = np.asarray(vectors[batch], np.float32) - centre
        start = number * _BATCH_ROWS
        away[start : start + len(batch)] = np.einsum("ij,ij->i", apart, apart, dtype=np.float64)
    central = away < _CENTRAL * np.median(away)
    if not 0 < np.count_nonzero(central) <= most:
        return rows
    return np.concatenate([rows[~central], rows[central]])
