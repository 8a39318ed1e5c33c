"""Groups of rows that lie near each other, some hundreds to a group, for the order of rows.

Found by k-means on a few directions in which the rows vary. Of more groups than a million rows have
it has two levels: cells, and groups inside of them. Each row then joins the nearest group of the
cells that are nearest to it, so that a border between cells is no border between groups. That costs
as many products a row as two levels have centres, not as there are groups; but such groups hold
fewer of what lies near a query (index/BENCHMARKS.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Rows of a group in the mean: its coarse codes fill 32 KiB, which is what a walk that misses a page
# reads of a large segment.
GROUP_ROWS: Final = 256
_DIRECTIONS: Final = 64
# What directions are found on, and how often the sample is turned back on them.
_BASIS_ROWS: Final = 16_384
_BASIS_TURNS: Final = 2
# Up to so many groups each row is compared with all of them.
_FLAT_MAX: Final = 4_096
# Rows of the sample for each group, and of it in all, of one level.
_FLAT_SAMPLE_ROWS: Final = 96
_FLAT_SAMPLE_MAX: Final = 200_000
_FLAT_ROUNDS: Final = 8
# Products that are compared at a time, by each thread: 4 MiB of them, which a cache holds.
_COMPARED: Final = 1 << 20
# Rows of the sample for each group, of two levels.
_SAMPLE_ROWS: Final = 24
_CELL_ROUNDS: Final = 6
_GROUP_ROUNDS: Final = 4
_LAST_ROUNDS: Final = 2
# Cells whose groups a row is compared with.
_NEAR_CELLS: Final = 4
_BATCH_ROWS: Final = 16_384
# Of which so many are read at once: every thread of ``run`` holds as many vectors.
_READ_ROWS: Final = 2_048
# Rows of no greater number than this are all zero, as far as groups go.
_SMALLEST: Final = 1e-30


def group_rows(
    read: Callable[[NDArray[np.int64]], Floats],
    count: int,
    *,
    seed: int,
    run: Callable[..., Any] = map,
) -> NDArray[np.uint32]:
    """Return the group of each row, near groups having near numbers; uint32, shape (count,).

    All rows are of one group where that is all that they would fill. Groups differ in size.

    Args:
        read: Given rising row numbers, returns their vectors, float32, shape (n, dim). Called from
            the threads of ``run``.
        count: Rows.
        seed: Of the sample and the first centres.
        run: Maps a function over batches, as `map` does; with a pool of threads, on all of them.
    """
    groups = -(-count // GROUP_ROWS)
    if groups < 2:
        return np.zeros(count, np.uint32)
    rng = np.random.default_rng(seed)
    drawn = groups * _SAMPLE_ROWS
    if groups <= _FLAT_MAX:
        drawn = max(min(groups * _FLAT_SAMPLE_ROWS, _FLAT_SAMPLE_MAX), drawn)
    chosen = np.sort(rng.choice(count, min(count, drawn), replace=False))
    axes, middle = _directions(read(chosen[:: -(-len(chosen) // _BASIS_ROWS)]), rng)

    def points(rows: NDArray[np.int64]) -> Floats:
        parts = (rows[at : at + _READ_ROWS] for at in range(0, len(rows), _READ_ROWS))
        return np.concatenate([read(part) @ axes - middle for part in parts])

    batches = [chosen[at : at + _BATCH_ROWS] for at in range(0, len(chosen), _BATCH_ROWS)]
    sample = np.concatenate(list(run(points, batches)))
    finder: _Flat | _Groups
    if groups <= _FLAT_MAX:
        finder = _Flat(sample, groups, rng, run)
    else:
        finder = _Groups(sample, groups, rng)

    def label(start: int) -> NDArray[np.uint32]:
        return finder.nearest(points(np.arange(start, min(start + _BATCH_ROWS, count))))

    return np.concatenate(list(run(label, range(0, count, _BATCH_ROWS))))


def _directions(sample: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """The directions in which a sample varies most, nearly, and its middle along them.

    They are of such a length that the largest number of the sample comes to one, so that squares of
    what they give neither overflow nor vanish. By a random subspace that is turned towards them
    (Halko, Martinsson and Tropp, SIAM Review 53, 2011, algorithm 4.4).

    Returns:
        float32, shapes (dim, few) and (few,). Squares of distances from the middle tell rows apart
        that have far more in common.
    """
    dim = sample.shape[1]
    unit = np.float32(1.0 / max(float(np.abs(sample).max()), _SMALLEST))
    sample = sample * unit
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    if dim <= _DIRECTIONS:
        return np.diag(np.full(dim, unit, np.float32)), mean
    sample -= mean
    axes = np.linalg.qr(rng.normal(size=(dim, _DIRECTIONS)).astype(np.float32))[0]
    for _ in range(_BASIS_TURNS):
        axes = np.linalg.qr(sample.T @ (sample @ axes))[0]
    return np.ascontiguousarray(axes * unit, np.float32), mean @ axes


class _Flat:
    """Centres of groups, found on a sample of rows, near ones one after the other."""

    def __init__(
        self, sample: Floats, groups: int, rng: np.random.Generator, run: Callable[..., Any]
    ) -> None:
        centres, _ = _k_means(sample, groups, _FLAT_ROUNDS, rng, run)
        cells, cell_of = _k_means(centres, max(round(groups**0.5), 1), _CELL_ROUNDS, rng)
        order = [
            members[_chain(centres[members])]
            for members in (np.flatnonzero(cell_of == cell) for cell in _chain(cells))
            if len(members)
        ]
        self._centres = centres[np.concatenate(order)]

    # See `_Groups.nearest`.
    @np.errstate(over="ignore", invalid="ignore")
    def nearest(self, points: Floats) -> NDArray[np.uint32]:
        """The nearest group of each point."""
        return _nearest(points, self._centres, map).astype(np.uint32)


class _Groups:
    """Centres of cells and of the groups in them, found on a sample of rows."""

    def __init__(self, sample: Floats, groups: int, rng: np.random.Generator) -> None:
        cells = max(round(groups**0.5), 1)
        self._cells, cell_of = _k_means(sample, cells, _CELL_ROUNDS, rng)
        order = _chain(self._cells)
        self._cells = self._cells[order]
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        cell_of = rank[cell_of]
        sizes = np.bincount(cell_of, minlength=len(order))
        shares = np.maximum(np.round(sizes * (groups / len(sample))).astype(np.int64), 1)
        found = []
        for cell, share in enumerate(shares):
            members = sample[cell_of == cell]
            if len(members):
                found.append(_k_means(members, int(share), _GROUP_ROUNDS, rng)[0])
            else:
                found.append(self._cells[cell : cell + 1])
        self._first = np.concatenate([[0], np.cumsum([len(centres) for centres in found])])
        self._centres = np.concatenate(found)
        for _ in range(_LAST_ROUNDS):
            labels = np.concatenate(
                [
                    self.nearest(sample[at : at + _BATCH_ROWS])
                    for at in range(0, len(sample), _BATCH_ROWS)
                ]
            )
            self._centres = _means(sample, labels, self._centres)

    # A row may be so much longer than the sample's that its squares overflow: it joins any group.
    @np.errstate(over="ignore", invalid="ignore")
    def nearest(self, points: Floats) -> NDArray[np.uint32]:
        """The nearest group of those in the nearest cells, of each point."""
        near = min(_NEAR_CELLS, len(self._cells))
        closeness = points @ self._cells.T - (self._cells**2).sum(axis=1) / 2
        cells = np.argpartition(closeness, -near, axis=1)[:, -near:].ravel()
        owner = np.repeat(np.arange(len(points)), near)
        by_cell = np.argsort(cells, kind="stable")
        edges = np.searchsorted(cells[by_cell], np.arange(len(self._cells) + 1))
        best = np.full(len(points), -np.inf, np.float32)
        label = np.zeros(len(points), np.uint32)
        half = (self._centres**2).sum(axis=1) / 2
        for cell in range(len(self._cells)):
            who = owner[by_cell[edges[cell] : edges[cell + 1]]]
            if len(who) == 0:
                continue
            low, high = self._first[cell], self._first[cell + 1]
            here = points[who] @ self._centres[low:high].T - half[low:high]
            top = here.argmax(axis=1)
            value = here[np.arange(len(who)), top]
            better = value > best[who]
            best[who[better]] = value[better]
            label[who[better]] = low + top[better]
        return label


def _k_means(
    points: Floats,
    wanted: int,
    rounds: int,
    rng: np.random.Generator,
    run: Callable[..., Any] = map,
) -> tuple[Floats, NDArray[np.int64]]:
    """Lloyd's rounds from points drawn at random; centres, and each point's."""
    wanted = min(wanted, len(points))
    centres = points[rng.choice(len(points), wanted, replace=False)]
    labels = np.zeros(len(points), np.int64)
    for _ in range(rounds):
        labels = _nearest(points, centres, run)
        centres = _means(points, labels, centres)
    return centres, labels


def _nearest(points: Floats, centres: Floats, run: Callable[..., Any]) -> NDArray[np.int64]:
    """The nearest centre of each point."""
    half = (centres**2).sum(axis=1) / 2
    rows = max(_COMPARED // max(len(centres), 1), 1)

    def label(start: int) -> NDArray[np.int64]:
        closest: NDArray[np.int64] = (points[start : start + rows] @ centres.T - half).argmax(
            axis=1
        )
        return closest

    return np.concatenate([np.empty(0, np.int64), *run(label, range(0, len(points), rows))])


def _means(points: Floats, labels: NDArray[Any], centres: Floats) -> Floats:
    """The mean of each label's points; a label without any keeps its centre."""
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=len(centres))
    held = np.flatnonzero(sizes)
    starts = np.cumsum(sizes)[held] - sizes[held]
    moved = centres.copy()
    if len(held):
        # A loop of sums: `numpy.add.reduceat` takes many times as long along the first axis.
        placed = points[order]
        for label, start, size in zip(held, starts, sizes[held], strict=True):
            moved[label] = placed[start : start + size].sum(axis=0) / np.float32(size)
    return moved


def _chain(points: Floats) -> NDArray[np.int64]:
    """An order in which each point is followed by the nearest that is left."""
    left = np.ones(len(points), np.bool_)
    order = np.empty(len(points), np.int64)
    at = 0
    for place in range(len(points)):
        order[place] = at
        left[at] = False
        distance = ((points - points[at]) ** 2).sum(axis=1)
        distance[~left] = np.inf
        at = int(distance.argmin())
    return order
