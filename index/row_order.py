"""In which order a segment's rows lie: what is asked for together shares pages.

Levels come first in every order, since the format wants a level's nodes to be a prefix. Under that,
rows are grouped by heat, rows of like heat by where they lie (`row_groups.py`), and inside of such
a group they are laid out along the graph.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import InputError
from stoker.index.hnsw_graph import HnswGraph

HEAT_LOCALITY: Final = "heat+locality"
# The others show what each part of the first gains alone.
ORDERINGS: Final = (HEAT_LOCALITY, "heat", "locality", "insertion")
_HEAT_BUCKETS: Final = 12
# Of a row's heat, what its neighbors together are taken to have as well.
_NEIGHBOR_SHARE: Final = 0.3
_SPREAD_ROWS: Final = 65_536


def row_order(
    graph: HnswGraph,
    heat: NDArray[np.float32] | None,
    *,
    page_nodes: int,
    ordering: str,
    places: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint32]:
    """Nodes in sealed order, higher levels first; uint32, shape (count,).

    Args:
        heat: float32, shape (count,), >= 0: expected demand of each node; None where nothing is
            known.
        page_nodes: Nodes of a page of second codes, which locality fills one after the other.
        ordering: One of `ORDERINGS`; "heat" is falling heat, then insertion.
        places: uint32, shape (count,): each node's group of near ones, near groups having near
            numbers, which locality keeps together; None where they are not known.

    Raises:
        InputError: no such ordering.
    """
    if ordering not in ORDERINGS:
        raise InputError(f"ordering: expected one of {', '.join(ORDERINGS)}, found {ordering!r}")
    if graph.count == 0:
        return np.empty(0, np.uint32)
    depth = max(graph.max_level, 0) - graph.levels.astype(np.int64)
    if ordering == "insertion" or (ordering == "heat" and heat is None):
        return np.argsort(depth, kind="stable").astype(np.uint32)
    if ordering == "heat":
        assert heat is not None
        return np.lexsort((-heat.astype(np.float64), depth)).astype(np.uint32)
    groups = depth.astype(np.uint32)
    if heat is not None and ordering == HEAT_LOCALITY:
        bottom = graph.levels == 0
        groups[bottom] += _buckets(_spread(graph, heat.astype(np.float64)))[bottom]
    if places is not None and len(places):
        groups = groups * (places.max() + np.uint32(1)) + places
    order: NDArray[np.uint32] = _core.locality_order(
        np.ascontiguousarray(graph.level0, np.uint32),
        np.ascontiguousarray(graph.level0_counts, np.uint16),
        groups,
        page_nodes=page_nodes,
    )
    return order


def _buckets(warm: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Groups of like heat, the hottest 0: a factor of two is one; inside it locality decides."""
    largest = float(warm.max(initial=0.0))
    if largest <= 0:
        return np.zeros(len(warm), np.uint32)
    with np.errstate(divide="ignore"):
        bucket = np.floor(-np.log2(warm / largest))
    bucket = np.where(warm > 0, np.clip(bucket, 0, _HEAT_BUCKETS - 1), _HEAT_BUCKETS)
    return bucket.astype(np.uint32)


def _spread(graph: HnswGraph, warm: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add to each node a share of its hot neighbors' heat.

    What is asked next is near what was asked, and a query settles its answer among the
    neighbors of it: on 100,000 rows with a fifth of the bytes loaded, queries that had to read
    fell from 2.0 % to 0.8 %, and recall@10 rose by 0.003.
    """
    out = warm.copy()
    hot = np.flatnonzero(warm)
    for start in range(0, len(hot), _SPREAD_ROWS):
        part = hot[start : start + _SPREAD_ROWS]
        counts = np.asarray(graph.level0_counts[part], np.int64)
        valid = np.arange(graph.level0.shape[1])[None, :] < counts[:, None]
        share = warm[part] * _NEIGHBOR_SHARE / np.maximum(counts, 1)
        near = np.asarray(graph.level0[part], np.int64)[valid]
        given = np.broadcast_to(share[:, None], valid.shape)[valid]
        out += np.bincount(near, given, minlength=len(out))
    return out
