"""The nearest of a bounded set of unit vectors: compared exactly while few, by HNSW beyond."""

from __future__ import annotations

from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

Slot = NewType("Slot", int)
Vector = NDArray[np.float32]

_M, _EF_CONSTRUCTION, _EF_SEARCH = 12, 80, 48


class NearestVectors:
    """Unit vectors in numbered slots, found by cosine. Not thread-safe; single-threaded inside.

    Invariants (`check`): a slot is live or free; the graph, once there, has every live slot.

    Args:
        dim: Values per vector.
        rows_max: Slots, at most.
        exact_max: Live vectors up to which all are compared.
    """

    def __init__(self, *, dim: int, rows_max: int, exact_max: int) -> None:
        self.dim = dim
        self._rows_max = rows_max
        self._exact_max = exact_max
        rows = min(64, rows_max)
        self.vectors: NDArray[np.float32] = np.zeros((rows, dim), np.float32)
        self.live: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.count = 0
        self._free: list[Slot] = []
        self._used = 0
        self._graph: Any = None  # hnswlib.Index once comparing all is too slow

    def put(self, vector: Vector) -> Slot:
        """Add a unit vector; float32, shape (dim,). The caller keeps the count within bounds."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = Slot(self._used)
            assert slot < self._rows_max, slot
            self._used += 1
            if slot >= len(self.live):
                self._grow()
        self.vectors[slot] = vector
        self.live[slot] = True
        self.count += 1
        if self._graph is not None:
            # A slot that was deleted comes to life again with the new vector.
            self._graph.add_items(vector[None, :], np.array([slot]), num_threads=1)
        elif self.count > self._exact_max:
            self._build_graph()
        return slot

    def drop(self, slot: Slot) -> None:
        """Remove a live slot."""
        self.live[slot] = False
        self.count -= 1
        self._free.append(slot)
        if self._graph is not None:
            self._graph.mark_deleted(slot)

    def nearest(self, vector: Vector, count: int) -> list[tuple[Slot, float]]:
        """Return at most ``count`` live slots by falling cosine, ties by slot."""
        count = min(count, self.count)
        if count == 0:
            return []
        slots: NDArray[Any]
        if self._graph is not None:
            try:
                labels, _ = self._graph.knn_query(vector[None, :], k=count, num_threads=1)
                slots = labels[0].astype(np.int64)
            except RuntimeError:  # the graph reached fewer than k: its way of saying so
                slots = np.flatnonzero(self.live)
        else:
            slots = np.flatnonzero(self.live)
        similarities = self.vectors[slots] @ vector
        best = np.argsort(-similarities, kind="stable")[:count]
        return [(Slot(int(slots[i])), float(similarities[i])) for i in best]

    def bytes(self) -> int:
        """Return about how much memory this takes."""
        total = self.vectors.nbytes + self.live.nbytes
        if self._graph is not None:
            total += len(self.live) * (4 * self.dim + 2 * _M * 4 + 64)
        return total

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert self.count == int(self.live.sum()) <= self._rows_max
        assert self.count + len(self._free) == self._used <= len(self.live)
        assert not any(self.live[slot] for slot in self._free)
        if self._graph is not None:
            assert self._graph.get_current_count() == self._used

    def _grow(self) -> None:
        rows = min(2 * len(self.live), self._rows_max)
        more = rows - len(self.live)
        self.vectors = np.concatenate([self.vectors, np.zeros((more, self.dim), np.float32)])
        self.live = np.concatenate([self.live, np.zeros(more, np.bool_)])
        if self._graph is not None:
            self._graph.resize_index(rows)

    def _build_graph(self) -> None:
        import hnswlib

        graph = hnswlib.Index(space="ip", dim=self.dim)
        graph.init_index(
            max_elements=len(self.live), M=_M, ef_construction=_EF_CONSTRUCTION, random_seed=7
        )
        graph.set_num_threads(1)
        graph.set_ef(_EF_SEARCH)
        slots = np.arange(self._used)
        graph.add_items(self.vectors[: self._used], slots, num_threads=1)
        for slot in self._free:
            graph.mark_deleted(slot)
        self._graph = graph
