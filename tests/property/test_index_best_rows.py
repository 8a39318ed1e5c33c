"""The true best rows of many queries, met batch by batch, against products in full."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import stoker.kernels._core as _core
from stoker.index.held_out import Probe


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("dim", [1, 3, 32, 100, 384, 2100])
def test_best_rows_are_those_of_products_in_full(dim: int, metric: str) -> None:
    rng = np.random.default_rng(dim)
    centres = rng.standard_normal((5, dim))
    rows = centres[rng.integers(0, 5, 900)] + 0.3 * rng.standard_normal((900, dim))
    # Lengths far apart, zero rows, and what rounds to nothing.
    rows[:200] *= 10.0 ** rng.uniform(-6, 6, (200, 1))
    rows[200:205] = 0
    rows[205:210] *= 1e-37
    rows = rng.permutation(rows).astype(np.float32)
    queries = rng.standard_normal((37, dim))
    queries[::2] = centres[rng.integers(0, 5, 19)] + 0.2 * rng.standard_normal((19, dim))
    queries[3] = 0
    queries = queries.astype(np.float32)
    scores = np.full((37, 10), -np.inf, np.float32)
    found = np.full((37, 10), -1, np.int64)
    for start, stop in ((0, 1), (1, 5), (5, 300), (300, 900)):
        _core.meet_rows(
            queries,
            rows[start:stop],
            first_row=start,
            l2=metric == "l2",
            scores=scores,
            rows=found,
        )

    full = queries.astype(np.float64) @ rows.astype(np.float64).T
    if metric == "l2":
        full = 2 * full - (rows.astype(np.float64) ** 2).sum(axis=1)
    best = -np.sort(-full, axis=1)[:, :10]
    reached = np.take_along_axis(full, found, axis=1)
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    longest = np.linalg.norm(rows[found].astype(np.float64), axis=2)
    # Sums of floats are off by so much, of the lengths that meet.
    off = 2e-5 * (lengths * longest + (longest**2 if metric == "l2" else 0)) + 1e-30
    assert (reached >= best - off - off.max(axis=1, keepdims=True) * (best == 0)).all()
    assert (np.abs(scores - reached) <= off).all()
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(of)) == 10 for of in found.tolist())


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_bounds_hold_of_vectors_whose_squares_vanish(metric: str) -> None:
    """The square of what rounding takes off them is no float any more."""
    rng = np.random.default_rng(2)
    rows = (1e-24 * rng.standard_normal((600, 32))).astype(np.float32)
    queries = rng.standard_normal((20, 32)).astype(np.float32)
    # Rounding takes much off what decides: one coordinate is larger, and counts for nothing.
    rows[:, 0] = 1e-22
    queries[:, 0] = 0
    scores = np.full((20, 10), -np.inf, np.float32)
    found = np.full((20, 10), -1, np.int64)
    for start in range(0, 600, 200):
        _core.meet_rows(
            queries,
            rows[start : start + 200],
            first_row=start,
            l2=metric == "l2",
            scores=scores,
            rows=found,
        )
    best = np.argsort(-(queries.astype(np.float64) @ rows.T.astype(np.float64)), axis=1)[:, :10]
    assert np.array_equal(found, best)


def test_equal_rows_stay_in_order() -> None:
    row = np.random.default_rng(0).standard_normal(24).astype(np.float32)
    scores = np.full((1, 4), -np.inf, np.float32)
    found = np.full((1, 4), -1, np.int64)
    for start in (0, 3):
        _core.meet_rows(
            row[None], np.tile(row, (3, 1)), first_row=start, l2=False, scores=scores, rows=found
        )
    assert found.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_parts_find_what_the_whole_does(metric: str) -> None:
    vectors = np.random.default_rng(1).standard_normal((700, 48)).astype(np.float32)
    if metric == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = np.arange(700)
    whole, parts = (Probe.draw(vectors, rows, metric=metric) for _ in range(2))
    assert whole is not None
    assert parts is not None
    with ThreadPoolExecutor(3) as pool:
        for start in range(0, 700, 256):
            whole.take(vectors[start : start + 256], start)()
            parts.take(vectors[start : start + 256], start, parts=3, run=pool.map)()
    assert np.array_equal(whole.scores, parts.scores)
    assert np.array_equal(whole.rows, parts.rows)
    full = whole.queries.astype(np.float64) @ vectors.T.astype(np.float64)
    if metric == "l2":
        full = 2 * full - (vectors.astype(np.float64) ** 2).sum(axis=1)
    best = np.argsort(-full, axis=1)[:, :10]
    assert (np.sort(best, axis=1) == np.sort(whole.rows, axis=1)).mean() > 0.999


@pytest.mark.parametrize("shape", [(2, 9), (3, 8)])
def test_wrong_shapes_are_refused(shape: tuple[int, int]) -> None:
    scores = np.full((2, 4), -np.inf, np.float32)
    queries = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"dimension of the rows|shape of the best"):
        _core.meet_rows(
            queries,
            np.zeros((5, shape[1]), np.float32),
            first_row=0,
            l2=False,
            scores=scores,
            rows=np.zeros((shape[0], 4), np.int64),
        )
