"""One tenant's earlier questions: their vectors, their results, and how long those hold."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.nearest import NearestVectors, Slot, Vector
from stoker.kvcache.question import Question
from stoker.kvcache.reuse_policy import ReusePolicy
from stoker.kvcache.reuse_selector import Neighborhood
from stoker.kvcache.settings import KvcacheSettings

# Float32 sums in another order differ by about 1e-6; a changed document closer to a result's
# edge than this counts as inside.
_FLOOR_MARGIN = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """The state of the documents that an answer was taken from.

    Attributes:
        generation: The set of sealed segments; another number never matches.
        change_offset: Every document change up to and including this one is in the answer.
    """

    generation: int
    change_offset: int


@dataclasses.dataclass(slots=True)
class Entry:
    """An earlier question and what it found."""

    question: Question
    result_ids: tuple[str, ...]
    id_set: frozenset[str]
    scores: NDArray[np.float32]
    serial: int


class TenantLookups:
    """One tenant's earlier questions.

    Invariants (`check`): every live slot has one entry; ``by_text`` and ``holders`` point at live
    slots only; never more entries than the bound.
    """

    def __init__(self, settings: KvcacheSettings, *, dim: int, policy: ReusePolicy) -> None:
        self.settings = settings
        self.lock = threading.Lock()
        self.policy = policy
        self.dim = dim
        self.entries: OrderedDict[Slot, Entry] = OrderedDict()  # least recently used first
        self.by_text: dict[str, Slot] = {}
        self.holders: dict[str, set[Slot]] = {}
        self.serial = 0
        self.near = NearestVectors(
            dim=dim,
            rows_max=settings.reuse_entries_max,
            exact_max=settings.reuse_exact_entries_max,
        )
        rows = len(self.near.live)
        self.generation: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.valid_to: NDArray[np.int64] = np.full(rows, -1, np.int64)
        self.floor: NDArray[np.float32] = np.full(rows, -2.0, np.float32)

    def _grow(self) -> None:
        more = len(self.near.live) - len(self.generation)
        self.generation = np.concatenate([self.generation, np.zeros(more, np.int64)])
        self.valid_to = np.concatenate([self.valid_to, np.full(more, -1, np.int64)])
        self.floor = np.concatenate([self.floor, np.full(more, -2.0, np.float32)])

    def drop(self, slot: Slot) -> None:
        """Forget an entry."""
        entry = self.entries.pop(slot)
        if self.by_text.get(entry.question.normal) == slot:
            del self.by_text[entry.question.normal]
        for result_id in entry.result_ids:
            held = self.holders.get(result_id)
            if held is not None:
                held.discard(slot)
                if not held:
                    del self.holders[result_id]
        self.valid_to[slot] = -1
        self.near.drop(slot)

    def put(
        self,
        question: Question,
        vector: Vector,
        *,
        result_ids: tuple[str, ...],
        scores: NDArray[np.float32],
        fence: Fence,
        floor: float,
    ) -> None:
        """Keep an entry in place of its normal form's last; the longest unused makes room."""
        previous = self.by_text.get(question.normal)
        if previous is not None:
            self.drop(previous)
        while len(self.entries) >= self.settings.reuse_entries_max:
            self.drop(next(iter(self.entries)))
        slot = self.near.put(vector)
        if slot >= len(self.generation):
            self._grow()
        self.serial += 1
        self.generation[slot] = fence.generation
        self.valid_to[slot] = fence.change_offset
        self.floor[slot] = floor
        self.entries[slot] = Entry(question, result_ids, frozenset(result_ids), scores, self.serial)
        self.by_text[question.normal] = slot
        for result_id in result_ids:
            self.holders.setdefault(result_id, set()).add(slot)

    def is_valid(self, slot: Slot, fence: Fence) -> bool:
        """Return whether an entry holds for a fence."""
        return bool(
            self.generation[slot] == fence.generation and self.valid_to[slot] >= fence.change_offset
        )

    def around(self, nearest: Sequence[tuple[Slot, float]], *, candidate: Slot) -> Neighborhood:
        """Ask the questions around whether their passages are the candidate's."""
        wanted = self.entries[candidate].id_set
        share = self.settings.reuse_overlap_min
        states = np.fromiter(
            (1 if self._holds(slot, wanted, share) else -1 for slot, _ in nearest),
            np.int8,
            len(nearest),
        )
        similarities = np.fromiter((value for _, value in nearest), np.float32, len(nearest))
        return Neighborhood(similarities, states)

    def _holds(self, slot: Slot, wanted: frozenset[str], share: float) -> bool:
        found = self.entries[slot].id_set
        return len(found & wanted) >= share * max(len(found), len(wanted))

    def change(
        self, fence: Fence, *, since: int, ids: Sequence[str], vectors: NDArray[np.float32] | None
    ) -> int:
        """Carry entries over a change, or drop those that it could alter; returns how many."""
        live, vectors_held = self.near.live, self.near.vectors
        open_rows = live & (self.generation == fence.generation)
        open_rows &= self.valid_to < fence.change_offset
        hit: NDArray[np.bool_] = self.valid_to < since  # changes in between were never seen
        for changed in ids:
            for slot in self.holders.get(changed, ()):
                hit[slot] = True
        if vectors is None:
            hit |= True
        elif len(vectors):
            nearest = np.max(vectors_held @ vectors.T, axis=1)
            hit |= nearest >= self.floor - _FLOOR_MARGIN
        lost = np.flatnonzero(open_rows & hit)
        for row in lost:
            self.drop(Slot(int(row)))
        self.valid_to[open_rows & ~hit] = fence.change_offset
        return len(lost)

    def bytes(self) -> int:
        """Return about how much memory this takes."""
        arrays = (self.generation, self.valid_to, self.floor)
        total = sum(array.nbytes for array in arrays) + self.near.bytes()
        return total + self.policy.bytes() + 1500 * len(self.entries)

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        live = {Slot(int(slot)) for slot in np.flatnonzero(self.near.live)}
        assert live == set(self.entries), (live, set(self.entries))
        assert len(self.entries) <= self.settings.reuse_entries_max
        assert set(self.by_text.values()) <= live
        for result_id, slots in self.holders.items():
            assert slots, result_id
            assert all(result_id in self.entries[slot].result_ids for slot in slots)
        self.near.check()
