"""PageRank over the edge table, by power iteration from the last result.

``p = (1 - d) * s + d * (P^T p + dangling mass * s)``, where P has the row-normalised edge weights,
s the restart distribution and d the damping. All of p is >= 0 and adds up to 1.

Source: Page, Brin, Motwani, Winograd, 1999.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.graph import NO_TARGET, EdgeTable

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LooseEdges:
    """Edges that are not in the table yet, as arrays of shape (n,); weights in the table's form."""

    tails: NDArray[np.int64]
    heads: NDArray[np.int64]
    weights: Floats


def row_shares(
    edges: EdgeTable, count: int, loose: LooseEdges | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return the edges of the first ``count`` keys as (tail, head, share of the tail's weight)."""
    targets = edges.targets[:count]
    weights = edges.weights[:count]
    tail, slot = np.nonzero((targets != NO_TARGET) & (weights > 0.0))
    head = targets[tail, slot].astype(np.int64)
    weight = weights[tail, slot]
    if loose is not None and len(loose.tails):
        tail = np.concatenate([tail, loose.tails])
        head = np.concatenate([head, loose.heads])
        weight = np.concatenate([weight, loose.weights])
    total = np.bincount(tail, weights=weight, minlength=count)
    # A row may have decayed below what a float holds: it then counts as one without edges.
    alive = total[tail] > 0.0
    tail, head, weight = tail[alive], head[alive], weight[alive]
    return tail, head, weight / total[tail]


def pagerank(
    edges: EdgeTable,
    count: int,
    *,
    restart: Floats | None = None,
    start: Floats | None = None,
    damping: float = 0.85,
    tolerance: float = 1e-6,
    steps_max: int = 100,
    loose: LooseEdges | None = None,
) -> Floats:
    """Return the PageRank of the first ``count`` keys, float64, shape (count,).

    Args:
        edges: The graph.
        count: How many keys there are.
        restart: Shape (count,), >= 0, adds up to 1; None means uniform.
        start: Where to start from, e.g. the last result; a near one saves steps.
        damping: Probability of following an edge, in (0, 1).
        tolerance: Stop when the L1 change of a step falls below it.
        steps_max: Stop anyway after so many steps.
        loose: Edges that count as well but are not in the table yet.
    """
    if count == 0:
        return np.empty(0, dtype=np.float64)
    if restart is None:
        restart = np.full(count, 1.0 / count)
    tail, head, share = row_shares(edges, count, loose)
    dangling = np.ones(count, dtype=bool)
    dangling[tail] = False
    rank = restart if start is None else start / start.sum()
    for _ in range(steps_max):
        flow = np.bincount(head, weights=rank[tail] * share, minlength=count)
        lost = float(rank[dangling].sum())
        new = damping * flow + (1.0 - damping + damping * lost) * restart
        change = float(np.abs(new - rank).sum())
        rank = new
        if change < tolerance:
            break
    result: Floats = rank / rank.sum()
    return result
