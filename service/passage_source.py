"""The store of passages' KV as a source for warm-ups, so that pages and blocks share one budget.

`kvcache` may not know `prefetch`'s types; this is where its own are said in the planner's words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.passages import PassageStore
from stoker.prefetch.protocols import ContentKey, LoadOutcome, UnitBatch


class PassageSource:
    """A `PassageStore` as a `prefetch.protocols.WarmSource`."""

    def __init__(self, store: PassageStore) -> None:
        self._store = store

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        """Return the stored passages that have heat, grouped by size, hottest first."""
        return [
            UnitBatch(b.source, b.kind, b.stage, b.units, b.unit_bytes, b.benefit)
            for b in self._store.unit_batches(heat)
        ]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        """Bring passages' KV into memory; see `PassageStore.load_units`."""
        outcome = self._store.load_units(kind, units, sticky=sticky, deadline_s=deadline_s)
        return LoadOutcome(**dataclasses.asdict(outcome))

    def total_bytes(self) -> int:
        """Return the bytes of all passages if all were in memory."""
        return self._store.total_bytes()

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Return how many of these passages are in memory now."""
        return self._store.resident_count(kind, units)
