"""A read-only HNSW graph in arrays: what every builder and every foreign reader hands to sealing.

The arrays may be views over a memory-mapped file, so nothing here copies the level-0 links or the
vectors; a graph of a million nodes costs the pages that are looked at.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError

LEVELS_MAX: Final = 255
_CHECK_ROWS: Final = 1 << 16  # Rows looked at in one step: bounds the scratch memory of `check`.


class GraphError(CorruptError):
    """The graph breaks an invariant; nothing may walk it.

    Attributes:
        level: Level at fault, or -1 for the graph as a whole.
        row: Row at fault inside that level's arrays, or -1.
    """

    def __init__(self, message: str, *, level: int = -1, row: int = -1) -> None:
        super().__init__(message)
        self.level = level
        self.row = row


@dataclasses.dataclass(frozen=True)
class UpperLevel:
    """One level above 0: only the nodes that reach it.

    Attributes:
        nodes: uint32, shape (n_l,), rising: node ids present on this level.
        counts: uint16, shape (n_l,): how many neighbors of each row are valid.
        links: uint32, shape (n_l, m): neighbor node ids; beyond ``counts`` undefined.
    """

    nodes: NDArray[np.uint32]
    counts: NDArray[np.uint16]
    links: NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class HnswGraph:
    """Levels, neighbors, labels and (where the file has them) vectors of one HNSW graph.

    Invariants, held by `check`:
        * every neighbor id is below ``count``, and lives on the level that links to it;
        * counts are within ``m0`` on level 0 and ``m`` above;
        * ``upper[l - 1].nodes`` is exactly the rising list of nodes with ``levels >= l``;
        * the entry point is a node on ``max_level``; an empty graph has ``max_level`` -1.

    Attributes:
        count: Nodes.
        dim: Dimensions of a vector.
        m: Neighbors at most on a level above 0.
        m0: Neighbors at most on level 0.
        entry_point: Node where a walk starts; -1 when the graph is empty.
        max_level: The highest level, or -1 when the graph is empty.
        levels: uint8, shape (count,): highest level of each node.
        level0_counts: uint16 or uint32, shape (count,).
        level0: uint32, shape (count, m0), may be a strided view of a file; beyond counts undefined.
        upper: Levels 1 to ``max_level``, in rising order.
        labels: uint64, shape (count,): the caller's name of each node, all different.
        vectors: float32, shape (count, dim), possibly a strided view of a file, or None.
        deleted: bool, shape (count,): nodes that a walk may cross and must not return.
    """

    count: int
    dim: int
    m: int
    m0: int
    entry_point: int
    max_level: int
    levels: NDArray[np.uint8]
    level0_counts: NDArray[np.uint16] | NDArray[np.uint32]
    level0: NDArray[np.uint32]
    upper: list[UpperLevel]
    labels: NDArray[np.uint64]
    vectors: NDArray[np.float32] | None
    deleted: NDArray[np.bool_]

    def check(self) -> None:
        """Raise on the first broken invariant. Reads all links once, in bounded memory.

        Raises:
            GraphError: with the level and the row at fault.
        """
        self._check_shapes()
        if self.count == 0:
            if self.max_level != -1 or self.entry_point != -1 or self.upper:
                raise GraphError("an empty graph must have max_level -1 and no entry point")
            return
        self._check_levels()
        self._check_links(0, self.level0_counts, self.level0, self.m0)
        for number, upper in enumerate(self.upper, start=1):
            self._check_upper(number, upper)
        self._check_labels()

    def _check_shapes(self) -> None:
        expected: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
            ("levels", self.levels.shape, (self.count,)),
            ("level0_counts", self.level0_counts.shape, (self.count,)),
            ("level0", self.level0.shape, (self.count, self.m0)),
            ("labels", self.labels.shape, (self.count,)),
            ("deleted", self.deleted.shape, (self.count,)),
        ]
        if self.vectors is not None:
            expected.append(("vectors", self.vectors.shape, (self.count, self.dim)))
        for name, found, wanted in expected:
            if found != wanted:
                raise GraphError(f"{name}: expected shape {wanted}, found {found}")

    def _check_levels(self) -> None:
        highest = int(self.levels.max())
        if self.max_level != highest or len(self.upper) != highest:
            raise GraphError(
                f"max_level: expected {highest} (the highest node's level), "
                f"found {self.max_level} with {len(self.upper)} upper levels"
            )
        if not 0 <= self.entry_point < self.count:
            raise GraphError(f"entry_point: expected below {self.count}, found {self.entry_point}")
        if int(self.levels[self.entry_point]) != highest:
            raise GraphError(
                f"entry_point: expected a node on level {highest}, found node "
                f"{self.entry_point} on level {int(self.levels[self.entry_point])}",
                level=0,
                row=self.entry_point,
            )

    def _check_upper(self, number: int, upper: UpperLevel) -> None:
        nodes = np.flatnonzero(self.levels >= number).astype(np.uint32)
        if not np.array_equal(nodes, upper.nodes):
            raise GraphError(
                f"level {number}: expected its {nodes.size} nodes in rising order, "
                f"found {upper.nodes.size} others",
                level=number,
            )
        if upper.counts.shape != nodes.shape or upper.links.shape != (nodes.size, self.m):
            raise GraphError(
                f"level {number}: expected counts ({nodes.size},) and links "
                f"({nodes.size}, {self.m}), found {upper.counts.shape} and {upper.links.shape}",
                level=number,
            )
        self._check_links(number, upper.counts, upper.links, self.m)

    def _check_links(
        self,
        level: int,
        counts: NDArray[np.uint16] | NDArray[np.uint32],
        links: NDArray[np.uint32],
        count_max: int,
    ) -> None:
        over = np.flatnonzero(counts > count_max)
        if over.size:
            row = int(over[0])
            raise GraphError(
                f"level {level}, row {row}: expected at most {count_max} neighbors, "
                f"found {int(counts[row])}",
                level=level,
                row=row,
            )
        slots = np.arange(links.shape[1])
        for start in range(0, links.shape[0], _CHECK_ROWS):
            part = np.ascontiguousarray(links[start : start + _CHECK_ROWS])
            used = slots < counts[start : start + _CHECK_ROWS, None]
            bad = used & (part >= self.count)
            if not bad.any():
                if level == 0:
                    continue
                bad = used & (self.levels[np.where(used, part, 0)] < level)
                if not bad.any():
                    continue
            row, slot = (int(i) for i in np.argwhere(bad)[0])
            raise GraphError(
                f"level {level}, row {start + row}, neighbor {slot}: expected a node below "
                f"{self.count} that reaches level {level}, found {int(part[row, slot])}",
                level=level,
                row=start + row,
            )

    def _check_labels(self) -> None:
        order = np.argsort(self.labels, kind="stable")
        ranked = self.labels[order]
        same = np.flatnonzero(ranked[1:] == ranked[:-1])
        if same.size:
            at = int(same[0])
            row = int(order[at + 1])
            raise GraphError(
                f"row {row}: expected a label of its own, found {int(ranked[at])}, "
                f"which row {int(order[at])} has too",
                level=0,
                row=row,
            )
