"""Exact nearest neighbors by scanning: the mutable delta, small filtered sets, and the reference.

Scores as everywhere in this room: inner product and cosine (higher is better), squared L2 distance
(lower is better). A zero vector has cosine 0 with everything.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import InputError

Metric = Literal["ip", "cosine", "l2"]
METRICS: Final[tuple[Metric, ...]] = ("ip", "cosine", "l2")

_CELLS_MAX: Final = 1 << 22  # Query-row pairs scored in one step: 16 MiB of scratch.
_SLACK: Final = 16
# Up to so many dimensions, products and distances are taken in doubles: the neighbors of a query
# among many rows have cosines that floats round to one, and so few numbers cost nothing.
FEW_DIMS: Final = 9
# Lengths whose square a float holds to its full precision, with room for small coordinates.
_SQUARE_MIN: Final = 1e-12
_SQUARE_MAX: Final = 1e18


def refuse_unusable(
    vectors: NDArray[np.float32], first_row: int = 0, what: str = "vectors"
) -> None:
    """Refuse a row that is not finite, or whose squared length no float holds.

    Args:
        vectors: float32, shape (n, dim), row-major.
        first_row: The caller's number of the first one.
        what: What the caller calls them.

    Raises:
        InputError: names the row.
    """
    row = _core.first_unusable_row(vectors)
    if row >= 0:
        long = bool(np.isfinite(vectors[row]).all())
        raise InputError(
            f"{what}: row {first_row + row} is "
            f"{'too long for float32 distances' if long else 'not finite'}"
        )


def inverse_norms(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 1 / |v| of each row, 0 for a zero vector; float32, shape (n,).

    The largest float where there is none so large: cosines of rows shorter than 1e-38 then come out
    too small. Bring such rows to unit length first (`unit_rows`).
    """
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(1.0 / norms, np.finfo(np.float32).max)
    return np.where(norms > 0, inverse, 0.0).astype(np.float32)


def unit_rows(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows at unit length, float32; a zero vector stays zero.

    Exact to rounding for every finite row: where a float cannot hold the square of the length, it
    is found in doubles.
    """
    with np.errstate(over="ignore", under="ignore"):
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        odd = np.flatnonzero(~((lengths > _SQUARE_MIN) & (lengths < _SQUARE_MAX)))
        units = (vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32, copy=False)
    if odd.size:
        wide = vectors[odd].astype(np.float64)
        wide_lengths = np.linalg.norm(wide, axis=1, keepdims=True)
        units[odd] = wide / np.where(wide_lengths > 0, wide_lengths, 1.0)
    return units


def squared_norms(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return |v| ** 2 of each row; float32, shape (n,)."""
    norms: NDArray[np.float32] = np.einsum("ij,ij->i", vectors, vectors)
    return norms


def row_terms(vectors: NDArray[np.float32], metric: Metric) -> NDArray[np.float32]:
    """Return what a scan needs of each row beside the vector: a norm, or nothing (ones)."""
    if metric == "cosine":
        return inverse_norms(vectors)
    if metric == "l2":
        return squared_norms(vectors)
    return np.ones(vectors.shape[0], dtype=np.float32)


def score_pairs(
    vectors: NDArray[np.float32], query: NDArray[np.float32], metric: Metric
) -> NDArray[np.float32]:
    """Score each row against one query, from the vectors themselves and without cancellation."""
    if metric == "l2":
        difference = vectors - query
        return squared_norms(difference)
    if metric == "cosine":
        query = unit_rows(query[None])[0]
    products: NDArray[np.float32] = vectors @ query
    return products * inverse_norms(vectors) if metric == "cosine" else products


def top(ranks: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Return the positions of the ``k`` highest ranks, best first, ties by position."""
    if k < ranks.size:
        chosen = np.sort(np.argpartition(-ranks, k - 1)[:k])
    else:
        chosen = np.arange(ranks.size)
    return chosen[np.argsort(-ranks[chosen], kind="stable")]


def wide_ranks(
    queries: NDArray[np.float32], vectors: NDArray[np.float32], metric: str
) -> NDArray[np.float64]:
    """Rank every row for every query in doubles; for few dimensions.

    Args:
        queries: float32, shape (nq, dim).
        vectors: float32, shape (n, dim).
        metric: One of `METRICS`.

    Returns:
        float64, shape (nq, n), higher is better: inner products, cosines, or squared distances
        with their sign turned.
    """
    asked, rows = queries.astype(np.float64), vectors.astype(np.float64)
    if metric == "cosine":
        for side in (asked, rows):
            lengths = np.linalg.norm(side, axis=1, keepdims=True)
            side /= np.where(lengths > 0, lengths, 1.0)
    ranks: NDArray[np.float64] = asked @ rows.T
    if metric == "l2":
        ranks *= 2
        ranks -= np.einsum("ij,ij->i", rows, rows)
        ranks -= np.einsum("ij,ij->i", asked, asked)[:, None]
    return ranks


def search_exact(
    vectors: NDArray[np.float32],
    terms: NDArray[np.float32],
    queries: NDArray[np.float32],
    k: int,
    *,
    metric: Metric,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find each query's ``k`` best rows by scanning all of them.

    Args:
        vectors: float32, shape (n, dim).
        terms: float32, shape (n,), from `row_terms`.
        queries: float32, shape (nq, dim).
        k: At least 1.
        metric: One of `METRICS`.

    Returns:
        Rows, int64, and scores, float32, both of shape (nq, min(k, n)), best first.
    """
    count = vectors.shape[0]
    width = min(k, count)
    rows = np.empty((queries.shape[0], width), dtype=np.int64)
    scores = np.empty((queries.shape[0], width), dtype=np.float32)
    step = max(1, _CELLS_MAX // max(1, count))
    for start in range(0, queries.shape[0], step):
        part = queries[start : start + step]
        if vectors.shape[1] <= FEW_DIMS:
            for i, wide in enumerate(wide_ranks(part, vectors, metric), start):
                rows[i] = best = top(wide, width)
                scores[i] = np.maximum(-wide[best], 0) if metric == "l2" else wide[best]
            continue
        if metric == "cosine":
            part = unit_rows(part)
        ranks = part @ vectors.T
        if metric == "cosine":
            ranks *= terms
        elif metric == "l2":
            ranks *= 2
            ranks -= terms
        for i in range(part.shape[0]):
            if metric != "l2":
                rows[start + i] = best = top(ranks[i], width)
                scores[start + i] = ranks[i][best]
                continue
            # The expanded form rounds where distances are small: what is near is scored again.
            near = top(ranks[i], width + _SLACK)
            exact = score_pairs(vectors[near], part[i], metric)
            best = top(-exact, width)
            rows[start + i] = near[best]
            scores[start + i] = exact[best]
    return rows, scores
