"""A collection as the engine sees it: the same calls, and its pages as a source for warm-ups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.index.collection import Collection
from stoker.index.document_values import Document
from stoker.index.hits import Hits
from stoker.index.residency import Residency
from stoker.prefetch.protocols import ContentKey, LoadOutcome, UnitBatch, WarmSource


class CollectionIndex:
    """An open collection; `engine_parts.ServingIndex` and a warm source."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._searched_s = -math.inf

    @property
    def dim(self) -> int:
        """Dimensions."""
        return self._collection.dim

    @property
    def metric(self) -> str:
        """ "ip", "cosine" or "l2"."""
        return self._collection.metric

    @property
    def generation(self) -> int:
        """Number of the generation that serves."""
        return self._collection.generation

    @property
    def change_offset(self) -> int:
        """The newest change that searches show."""
        return self._collection.change_offset

    @property
    def id_kind(self) -> str | None:
        """ "int" or "str"; None while there was never a document."""
        return self._collection.id_kind

    @property
    def count(self) -> int:
        """Live documents."""
        return self._collection.count

    @property
    def mode(self) -> str:
        """ "r" or "rw"."""
        return self._collection.mode

    def search(
        self,
        query: NDArray[np.float32],
        k: int = 10,
        *,
        ef: int | None = None,
        recall_target: float | None = None,
        deadline_ms: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> Hits:
        """Find the ``k`` nearest; see `Collection.search`."""
        self._searched_s = time.monotonic()
        return self._collection.search(
            query, k, ef=ef, recall_target=recall_target, deadline_ms=deadline_ms, filter=filter
        )

    def searched_s(self) -> float:
        """Return when a search last began, `time.monotonic()` seconds; minus infinity: never."""
        return self._searched_s

    def documents(self, ids: Sequence[int | str], tenant: str) -> Sequence[Document | None]:
        """Return text and metadata of each id; see `Collection.documents`."""
        return self._collection.documents(ids, tenant)

    def contains(self, ids: Sequence[int | str], tenant: str) -> NDArray[np.bool_]:
        """Return which ids are live; see `Collection.contains`."""
        return self._collection.contains(ids, tenant)

    def upsert(
        self,
        ids: Sequence[int | str],
        vectors: NDArray[np.float32],
        *,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        tenant: str,
    ) -> int:
        """Write documents durably; see `Collection.upsert`."""
        return self._collection.upsert(ids, vectors, texts=texts, metadata=metadata, tenant=tenant)

    def delete(self, ids: Sequence[int | str], tenant: str) -> int:
        """Delete documents durably; see `Collection.delete`."""
        return self._collection.delete(ids, tenant)

    def refresh(self) -> bool:
        """Show what a writing process has changed since; see `Collection.refresh`."""
        return self._collection.refresh()

    def in_place(self) -> bool:
        """Tell whether this index still lies at its path; see `Collection.in_place`."""
        return self._collection.in_place()

    def heat_from(self, demand: Callable[[], Mapping[Any, float]]) -> None:
        """Let merges seal hot rows side by side, by the heat that ``demand`` gives."""
        self._collection.heat_source = demand

    def warm_sources(self) -> Sequence[WarmSource]:
        """Return what a warm-up may load."""
        return [self]

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        """Return the pages of all segments by kind, the most useful first."""
        return self.unit_batches_in_pieces(heat, lambda: None)

    def unit_batches_in_pieces(
        self, heat: Mapping[ContentKey, float], rest: Callable[[], None]
    ) -> Sequence[UnitBatch]:
        """Return the same, with a rest after each piece of the work."""
        return [
            UnitBatch(b.source, b.kind, b.stage, b.units, b.unit_bytes, b.benefit)
            for b in self._collection.unit_batches(heat, rest=rest)
        ]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        """Load pages at a priority under demand; see `Collection.load_units`."""
        counts = self._collection.load_units(kind, units, sticky=sticky, deadline_s=deadline_s)
        return LoadOutcome(
            loaded=counts.loaded,
            already=counts.already,
            no_room=counts.no_room,
            failed=counts.failed,
            not_reached=counts.not_reached,
            bytes_read=counts.bytes_read,
            reads=counts.reads,
            seconds=counts.seconds,
        )

    def expected_recall(self, coverage: Mapping[str, float]) -> float | None:
        """Return what answers from memory alone are worth; see `Collection.expected_recall`."""
        return self._collection.expected_recall(coverage)

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Return how many of these pages are in memory now; see `Collection.resident_count`."""
        return self._collection.resident_count(kind, units)

    def page_counts(self) -> tuple[int, int]:
        """Return (hits, misses) of searches so far; see `Collection.page_counts`."""
        return self._collection.page_counts()

    def demand_wait_us(self) -> int:
        """Return how long searches have waited for reads; see `Collection.demand_wait_us`."""
        return self._collection.demand_wait_us()

    def total_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self._collection.total_bytes()

    def has_room_for_all(self) -> bool:
        """Tell whether the budget holds all pages at once."""
        resident = self._collection.resident()
        return resident.total_bytes <= resident.budget_bytes

    def resident(self) -> Residency:
        """Return what is in memory now."""
        return self._collection.resident()

    def close(self) -> None:
        """Close the collection."""
        self._collection.close()
