"""Equal vectors: told apart from others by a hash, and linked so that a walk can leave them.

HNSW keeps a node's nearest neighbors. Where more vectors are equal than a node has links (a
passage that stands on every page), the nearest are all equal ones: the copies link to each other
only, and a walk that comes upon them never leaves. So only one of them is given to the builder; the
others hang on it as a tree, each with the one's own neighbors besides.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.index.exact import unit_rows
from stoker.index.hnsw_graph import HnswGraph

_BATCH_ROWS: Final = 16_384
_BRANCHES: Final = 4
_SEED: Final = 2_654_435_761
# Hashed at a time: all steps find them in a processor's cache.
_HASHED_ROWS: Final = 256


def row_hashes(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each row, shape (n,); rows that compare equal have equal ones.

    Multiply-shift hashing of vectors (Dietzfelbinger, "Universal hashing and k-wise independent
    random variables via integer arithmetic without primes", STACS 1996).
    """
    dim = rows.shape[1]
    draw = np.random.default_rng(_SEED).integers(0, 1 << 64, -(-dim // 2), np.uint64)
    factors = draw | np.uint64(1)
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _HASHED_ROWS):
        part = rows[start : start + _HASHED_ROWS]
        whole = np.zeros((len(part), dim + dim % 2), np.float32)
        np.add(part, np.float32(0), out=whole[:, :dim])  # -0 is equal to 0
        words = whole.view(np.uint64)
        words ^= words >> np.uint64(29)
        words *= factors
        words.sum(axis=1, out=hashes[start : start + len(part)])
    return hashes


def first_of_equals(
    vectors: NDArray[Any], *, metric: str, group_max: int
) -> NDArray[np.int64] | None:
    """Return the first row equal to each row, for rows that more than ``group_max`` are equal to.

    Args:
        vectors: float32 or float16, shape (n, dim); may be a memory map.
        metric: Under "cosine" rows are equal that are so at unit length.
        group_max: Rows of smaller groups stand for themselves.

    Returns:
        int64, shape (n,); None where every row stands for itself.
    """

    def batch(rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        taken = np.ascontiguousarray(vectors[rows], np.float32)
        return unit_rows(taken) if metric == "cosine" else taken

    count = len(vectors)
    hashes = np.empty(count, np.uint64)
    for start in range(0, count, _BATCH_ROWS):
        part = slice(start, min(start + _BATCH_ROWS, count))
        hashes[part] = row_hashes(batch(part))
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    sizes = np.diff(np.append(starts, count))
    first = np.arange(count, dtype=np.int64)
    large = np.flatnonzero(sizes > group_max)
    for start, size in zip(starts[large].tolist(), sizes[large].tolist(), strict=True):
        rows = order[start : start + size]
        # Equal hashes are no proof.
        one = batch(rows[:1])
        for at in range(0, size, _BATCH_ROWS):
            part_rows = rows[at : at + _BATCH_ROWS]
            same = (batch(part_rows) == one).all(axis=1)
            first[part_rows[same]] = rows[0]
    return first if large.size else None


def with_equals(graph: HnswGraph, first: NDArray[np.int64]) -> HnswGraph:
    """Return ``graph`` with the rows that were held back from it.

    Args:
        graph: Of the rows that stand for themselves, labelled by row; needs no vectors.
        first: From `first_of_equals`, of all rows.
    """
    held = np.flatnonzero(first != np.arange(len(first)))
    held = held[np.argsort(first[held], kind="stable")]
    count = graph.count + len(held)
    level0 = np.zeros((count, graph.m0), np.uint32)
    level0[: graph.count] = graph.level0
    counts = np.zeros(count, np.uint16)
    counts[: graph.count] = graph.level0_counts
    node_of = np.full(len(first), -1, np.int64)
    node_of[graph.labels.astype(np.int64)] = np.arange(graph.count)
    branches = max(1, min(_BRANCHES, graph.m0 - 2))
    ones, starts, sizes = np.unique(first[held], return_index=True, return_counts=True)
    groups = zip(node_of[ones].tolist(), starts.tolist(), sizes.tolist(), strict=True)
    for one, start, size in groups:
        _hang(level0, counts, one, graph.count + start, size, branches)
    labels = np.concatenate([graph.labels, held.astype(np.uint64)])
    return dataclasses.replace(
        graph,
        count=count,
        levels=np.concatenate([graph.levels, np.zeros(len(held), np.uint8)]),
        level0_counts=counts,
        level0=level0,
        labels=labels,
        vectors=None,
        deleted=np.concatenate([graph.deleted, np.zeros(len(held), np.bool_)]),
    )


def _hang(
    level0: NDArray[np.uint32],
    counts: NDArray[np.uint16],
    one: int,
    start: int,
    size: int,
    branches: int,
) -> None:
    """Link nodes ``start`` to ``start + size``, which equal node ``one``, as a tree below it.

    The last of the one's links make way for the first copies where it has no room for both; each
    copy has a different share of all of them, so that they stay within reach.
    """
    m0 = level0.shape[1]
    around = level0[one, : counts[one]].copy()
    children = min(branches, size)
    kept = min(len(around), m0 - children)
    level0[one, kept : kept + children] = np.arange(start, start + children)
    counts[one] = kept + children
    for i in range(size):
        # The copies in tree order, the one itself above the first of them.
        low = min((i + 1) * branches, size)
        below = np.arange(low, min(low + branches, size)) + start
        room = m0 - 1 - len(below)
        others = np.roll(around, -i * max(room, 1))[:room]
        links = np.concatenate([[one], below, others]).astype(np.uint32)
        level0[start + i, : len(links)] = links
        counts[start + i] = len(links)
