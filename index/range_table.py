"""The table of groups of near rows, by which a query that cannot walk yet finds what to read.

Of each group it has the code of its mean and the runs of consecutive rows that it is made of: a
group's rows lie together, but for its nodes of upper levels and its rows of other heat. The native
side of it is kernels/src/range_scan.cpp; bytes are in FORMAT.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.index.manifest import FILES
from stoker.index.paged_file import PagedFileInfo, PagedFileWriter, to_pages
from stoker.index.range_recall import SMALL_SHARE
from stoker.index.row_groups import GROUP_ROWS

# Of fewer rows links and codes are there at once: a cold walk reads a few of their clusters.
RANGE_ROWS_MIN: Final = 16_384
# Groups of more rows, as of rows that are alike, are cut: each is read whole or not at all.
_ROWS_MAX: Final = 2 * GROUP_ROWS


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Which rows make up each group.

    Attributes:
        group_of_row: uint32, shape (count,): the group of each row, in sealed order.
        pieces: uint32, shape (p, 2): first row and rows of each run, group after group.
        first_piece: uint32, shape (groups + 1,): where each group's pieces begin.
    """

    group_of_row: NDArray[np.uint32]
    pieces: NDArray[np.uint32]
    first_piece: NDArray[np.uint32]

    @property
    def groups(self) -> int:
        """How many there are."""
        return len(self.first_piece) - 1

    def in_small_piece(self) -> NDArray[np.bool_]:
        """Which rows scans leave out beyond the nearest groups, bool, shape (count,)."""
        sizes = np.bincount(self.group_of_row, minlength=self.groups)
        group = np.repeat(np.arange(self.groups), np.diff(self.first_piece))
        small = self.pieces[:, 1].astype(np.int64) * SMALL_SHARE < sizes[group]
        by_row = np.argsort(self.pieces[:, 0], kind="stable")
        rows: NDArray[np.bool_] = np.repeat(small[by_row], self.pieces[by_row, 1])
        return rows


def ranges_of(places: NDArray[np.uint32]) -> Ranges | None:
    """Make groups of the rows' places; None of so few rows that nobody would use them.

    Args:
        places: uint32, shape (count,): the group of near ones that each row is of
            (`row_groups.group_rows`), in sealed order.
    """
    count = len(places)
    if count < RANGE_ROWS_MIN:
        return None
    by_place = np.argsort(places, kind="stable")
    sizes = np.bincount(places)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(count, np.int64)
    ranks[by_place] = np.arange(count) - starts[places[by_place]]
    parts = np.maximum(-(-sizes // _ROWS_MAX), 1)
    length = -(-sizes // parts)
    first_part = np.cumsum(parts) - parts
    group = first_part[places] + ranks // np.maximum(length[places], 1)
    # Without the numbers that no row has.
    held = np.zeros(int(parts.sum()), np.bool_)
    held[group] = True
    group_of_row = (np.cumsum(held) - 1)[group].astype(np.uint32)
    edges = np.flatnonzero(np.diff(group_of_row, prepend=group_of_row[0] + 1))
    rows = np.diff(edges, append=count)
    of_group = group_of_row[edges]
    order = np.argsort(of_group, kind="stable")
    pieces = np.stack([edges[order], rows[order]], axis=1).astype(np.uint32)
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(of_group))]).astype(np.uint32)
    return Ranges(group_of_row, pieces, first_piece)


class GroupMeans:
    """Means of the groups' vectors, summed while those stream past in sealed order."""

    def __init__(self, ranges: Ranges, dim: int) -> None:
        self._ranges = ranges
        self._sums = np.zeros((ranges.groups, dim), np.float64)

    def take(self, batch: NDArray[np.float32], start: int) -> None:
        """Take the vectors of the rows from ``start`` on, float32, shape (n, dim)."""
        groups = self._ranges.group_of_row[start : start + len(batch)]
        edges = np.flatnonzero(np.diff(groups, prepend=groups[0] + 1)).tolist()
        # Run by run: `numpy.add.reduceat` takes thirty times as long.
        for first, last in pairwise([*edges, len(groups)]):
            self._sums[groups[first]] += batch[first:last].sum(axis=0)

    def means(self) -> NDArray[np.float32]:
        """Float32, shape (groups, dim), once all were met."""
        sizes = np.bincount(self._ranges.group_of_row, minlength=self._ranges.groups)
        means: NDArray[np.float32] = (self._sums / sizes[:, None]).astype(np.float32)
        return means


def write_ranges(
    folder: Path,
    ranges: Ranges,
    means: NDArray[np.float32],
    *,
    page_bytes: int,
    encode: Callable[[NDArray[np.float32]], Sequence[NDArray[np.uint8]]],
) -> PagedFileInfo:
    """Write ranges.stk: pages of groups, then pages of pieces. Returns its header.

    Args:
        folder: Of the segment.
        ranges: The groups.
        means: Of their vectors, float32, shape (groups, dim).
        page_bytes: Of the segment's files.
        encode: Codes vectors as rows are coded; first codes come first.
    """
    codes = encode(means)[0]
    tails = np.stack([ranges.first_piece[:-1], np.diff(ranges.first_piece)], axis=1)
    records = np.concatenate([codes, _bytes_of(tails)], axis=1)
    with PagedFileWriter(
        folder / FILES["ranges"], kind="ranges", page_bytes=page_bytes, record_bytes=0, per_page=0
    ) as writer:
        for part in (records, _bytes_of(ranges.pieces)):
            per_page = page_bytes // part.shape[1]
            writer.write_pages(to_pages(part, per_page, page_bytes), len(part))
        return writer.close()


def _bytes_of(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Rows of u32, little-endian, as bytes."""
    return np.ascontiguousarray(numbers, "<u4").view(np.uint8)
