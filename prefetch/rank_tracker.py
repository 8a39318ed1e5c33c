"""Keep PageRank up to date while the graph changes, without recomputing it.

The tracker holds an estimate x of the unnormalised PageRank, ``x = (1 - d) 1 + d P^T x``, and its
residual ``r = (1 - d) 1 + d P^T x - x``. Changing one key's out-edges changes r only at the heads;
pushing moves a residual into x and its share on to the heads. Stopping at any time leaves an
estimate whose error is known: ``|x - x*|_1 <= |r|_1 / (1 - d)``.

Dividing x by its sum gives the PageRank in which the mass of keys without out-edges restarts
anywhere, as in `pagerank`.

Source: Ohsaka, Maehara, Kawarabayashi, "Efficient PageRank Tracking in Evolving Networks", KDD
2015; Zhang, Lofgren, Goel, KDD 2016, for the bounds. Ours pushes whole frontiers as arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.graph import NO_TARGET, EdgeTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class RankTracker:
    """Incremental PageRank over an `EdgeTable`.

    Every change of rows goes through `add_edges` or `clear`, so that the residual stays true.

    Invariant: ``r = (1 - d) + d P^T x - x`` up to rounding, for the first ``count`` keys.
    """

    def __init__(
        self, edges: EdgeTable, count: int, *, damping: float = 0.85, tolerance: float = 1e-3
    ) -> None:
        """Start from x = 1 for every key (exact when nobody links to anybody).

        Args:
            edges: The graph; shared, not copied.
            count: How many keys there are.
            damping: Probability of following an edge.
            tolerance: Residuals below it, per key, are not pushed. The mean of x is about 1.
        """
        self._edges = edges
        self._damping = damping
        self._tolerance = tolerance
        self.count = count
        self.x = np.ones(count)
        self.residual = self.true_residual()

    def true_residual(self) -> Floats:
        """Return the residual computed from scratch, in O(edges)."""
        tails = np.arange(self.count)
        base = np.full(self.count, 1.0 - self._damping)
        heads, flow = self._flow(tails, self.x)
        base += np.bincount(heads, weights=flow, minlength=self.count)[: self.count]
        result: Floats = base - self.x
        return result

    def _flow(self, tails: Ints, amounts: Floats) -> tuple[Ints, Floats]:
        """Return (head, what it gets) when each tail sends ``d * amount`` along its edges."""
        targets = self._edges.targets[tails]
        weights = self._edges.weights[tails]
        total = weights.sum(axis=1)
        scale = np.divide(
            self._damping * amounts, total, out=np.zeros(len(tails)), where=total > 0.0
        )
        there = targets != NO_TARGET
        heads = targets[there].astype(np.int64)
        flow: Floats = (weights * scale[:, None])[there]
        return heads, flow

    def grow(self, count: int) -> None:
        """Take in new keys, which have no edges yet."""
        new = count - self.count
        if new > 0:
            self.x = np.concatenate((self.x, np.zeros(new)))
            self.residual = np.concatenate((self.residual, np.full(new, 1.0 - self._damping)))
            self.count = count

    def add_edges(self, tails: Ints, heads: Ints, times_s: Floats, amounts: Floats) -> None:
        """Strengthen edges of the table (see `EdgeTable.add`) and correct the residual."""
        rows = np.unique(tails)
        self._withdraw(rows, -1.0)
        self._edges.add(tails, heads, times_s, amounts)
        self._withdraw(rows, 1.0)

    def clear(self, rows: Ints) -> None:
        """Drop the out-edges of some keys and correct the residual."""
        rows = np.unique(rows)
        self._withdraw(rows, -1.0)
        self._edges.clear(rows)

    def _withdraw(self, rows: Ints, sign: float) -> None:
        heads, flow = self._flow(rows, sign * self.x[rows])
        np.add.at(self.residual, heads, flow)

    def push(self, *, edges_max: int = 2_000_000) -> bool:
        """Push residuals until all are below the tolerance or so many edges were walked.

        Returns:
            Whether it settled; if not, the next call goes on from here.
        """
        walked = 0
        degree = self._edges.targets.shape[1]
        while True:
            front = np.flatnonzero(np.abs(self.residual) > self._tolerance)
            if not len(front):
                return True
            room = (edges_max - walked) // degree
            if room <= 0:
                if walked:
                    return False
                room = 1  # whatever the bound: a push that does nothing would never settle
            if len(front) > room:
                size = np.abs(self.residual[front])
                front = front[np.argpartition(-size, room - 1)[:room]]
            amounts = self.residual[front].copy()
            self.x[front] += amounts
            self.residual[front] = 0.0
            heads, flow = self._flow(front, amounts)
            if len(heads) * 8 > self.count:
                self.residual += np.bincount(heads, weights=flow, minlength=self.count)
            else:
                np.add.at(self.residual, heads, flow)
            walked += len(front) * degree

    def rank(self) -> Floats:
        """Return PageRank, adding up to 1, shape (count,)."""
        total = float(self.x.sum())
        result: Floats = self.x / total if total > 0.0 else self.x
        return result

    @property
    def error_bound(self) -> float:
        """Upper bound of the L1 error of ``x / count``, from the residual."""
        total = float(np.abs(self.residual).sum())
        return total / ((1.0 - self._damping) * max(1, self.count))


def personalised_pagerank(
    edges: EdgeTable,
    seeds: dict[int, float],
    *,
    damping: float = 0.85,
    tolerance: float = 1e-4,
    pushes_max: int = 10_000,
) -> tuple[dict[int, float], float]:
    """Return the PageRank of a walk that restarts at the seeds, near the seeds only.

    Keys without out-edges end the walk. Work depends on the tolerance, not on the graph's size.

    Args:
        edges: The graph.
        seeds: Key number -> share, >= 0; normalised here.
        damping: Probability of following an edge.
        tolerance: Mass below which a key is not pushed any more.
        pushes_max: Stop after so many pushes.

    Returns:
        Key number -> mass, and the mass not placed yet: the estimate's L1 error is at most that.

    Source: Andersen, Chung, Lang, "Local Graph Partitioning using PageRank Vectors", FOCS 2006.
    """
    total = sum(seeds.values())
    if total <= 0.0:
        return {}, 0.0
    waiting = {key: share / total for key, share in seeds.items() if share > 0.0}
    queue = list(waiting)
    mass: dict[int, float] = {}
    pushes = 0
    while queue and pushes < pushes_max:
        key = queue.pop()
        amount = waiting.get(key, 0.0)
        if amount < tolerance:
            continue
        waiting[key] = 0.0
        pushes += 1
        mass[key] = mass.get(key, 0.0) + (1.0 - damping) * amount
        row = edges.out_edges(key)
        weight = sum(row.values())
        if weight <= 0.0:
            continue
        for head, part in row.items():
            before = waiting.get(head, 0.0)
            waiting[head] = before + damping * amount * part / weight
            if before < tolerance <= waiting[head]:
                queue.append(head)
    return mass, sum(waiting.values())
