"""Pages of all segments of a collection as one numbered set, for warm-up plans."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.index.delta import Key
from stoker.index.document_values import DEFAULT_TENANT
from stoker.index.generation import IdKind
from stoker.index.residency import PAGE_KINDS, KindResidency, Residency
from stoker.index.sealed import SealedSegment
from stoker.index.view import View

if TYPE_CHECKING:
    from stoker.index.segment_pages import LoadCounts

_UNITS_MAX: Final = 1 << 32
_PAGE_BYTES_MIN: Final = 4_096
# Keys that are looked up between two rests: some 100 µs.
_STEP_KEYS: Final = 64


@dataclasses.dataclass(frozen=True)
class IndexUnits:
    """Pages of one kind, the most useful first; field for field what plans call a batch of units.

    Attributes:
        source: Always "index".
        kind: One of `residency.PAGE_KINDS`.
        stage: Lower stages are loaded first.
        units: uint32, shape (n,): numbers that `UnitNumbers.load` understands.
        unit_bytes: Bytes of a page.
        benefit: float32, shape (n,): heat that lies on each page, falling.
    """

    source: str
    kind: str
    stage: int
    units: NDArray[np.uint32]
    unit_bytes: int
    benefit: NDArray[np.float32]


class UnitNumbers:
    """Gives each segment a range of numbers of its own, and finds the segment of a number.

    Invariant: ranges of segments that serve together do not overlap. A plan that was made before
    a merge then never loads wrong pages: numbers of a replaced segment find nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, tuple[int, int]] = {}
        self._next = 0
        # Of each segment, the keys that were looked up last and their rows there, which never
        # change: a prediction asks for the same keys twice, by two weights.
        self._found: dict[str, tuple[list[Key], NDArray[np.int64]]] = {}

    def _range(self, view: View, sealed: SealedSegment) -> tuple[int, int]:
        with self._lock:
            name = sealed.entry.name
            if name not in self._ranges:
                # No kind has more pages than the whole segment has of the smallest size.
                width = sealed.segment.total_bytes // _PAGE_BYTES_MIN + 16
                if self._next + width > _UNITS_MAX:
                    serving = {segment.sealed.entry.name for segment in view.segments}
                    self._ranges = {n: r for n, r in self._ranges.items() if n in serving}
                    self._next = 0
                taken = sorted(self._ranges.values())
                for start, stop in taken:
                    if start < self._next + width and self._next < stop:
                        self._next = stop
                self._ranges[name] = (self._next, self._next + width)
                self._next += width
            return self._ranges[name]

    def batches(
        self,
        view: View,
        heat: Mapping[Any, float],
        id_kind: IdKind,
        *,
        rest: Callable[[], None] = lambda: None,
    ) -> list[IndexUnits]:
        """Return all pages of ``view`` by kind, as `Collection.unit_batches` says."""
        keys, weights = _heat_keys(heat, id_kind, rest)
        found: dict[tuple[int, str, int], list[tuple[NDArray[Any], NDArray[Any]]]] = {}
        for segment in view.segments:
            by_row = None
            if keys:
                rows = self._rows_of(view, segment.sealed, keys, rest)
                here = rows >= 0
                by_row = np.zeros(segment.sealed.entry.count, dtype=np.float32)
                by_row[rows[here]] = weights[here]
                by_row[np.frombuffer(segment.dead.to_array(), dtype=np.uint32)] = 0
                rest()
            base, _ = self._range(view, segment.sealed)
            for batch in segment.sealed.segment.unit_batches(by_row, rest=rest):
                found.setdefault((batch.stage, batch.kind, batch.unit_bytes), []).append(
                    (batch.units.astype(np.int64) + base, batch.benefit)
                )
            rest()
        batches = []
        for (stage, kind, unit_bytes), parts in sorted(found.items(), key=lambda item: item[0]):
            benefit = np.concatenate([benefit for _, benefit in parts])
            units = np.concatenate([units for units, _ in parts])
            order = np.argsort(-benefit, kind="stable")
            batches.append(
                IndexUnits(
                    "index",
                    kind,
                    stage,
                    units[order].astype(np.uint32),
                    unit_bytes,
                    benefit[order].astype(np.float32),
                )
            )
            rest()
        return batches

    def _rows_of(
        self, view: View, sealed: SealedSegment, keys: list[Key], rest: Callable[[], None]
    ) -> NDArray[np.int64]:
        """Return the row of each key in a segment, -1 where it has none."""
        name = sealed.entry.name
        known = self._found.get(name)
        if known is not None and known[0] == keys:
            return known[1]
        rows = np.empty(len(keys), dtype=np.int64)
        for start in range(0, len(keys), _STEP_KEYS):
            step = slice(start, start + _STEP_KEYS)
            rows[step] = sealed.rows_of(keys[step])
            rest()
        serving = {segment.sealed.entry.name for segment in view.segments}
        with self._lock:
            self._found = {n: found for n, found in self._found.items() if n in serving}
            self._found[name] = keys, rows
        return rows

    def split(
        self, view: View, units: NDArray[np.uint32]
    ) -> list[tuple[SealedSegment, NDArray[np.uint32]]]:
        """Return which pages of which segment ``units`` are; numbers of nobody are left out."""
        wanted = np.asarray(units, dtype=np.int64)
        found = []
        for segment in view.segments:
            start, stop = self._range(view, segment.sealed)
            here = wanted[(wanted >= start) & (wanted < stop)] - start
            if here.size:
                found.append((segment.sealed, here.astype(np.uint32)))
        return found

    def load(
        self,
        view: View,
        kind: str,
        units: NDArray[np.uint32],
        *,
        sticky: bool,
        deadline_s: float | None,
    ) -> LoadCounts:
        """Load pages; see `Collection.load_units`."""
        from stoker.index.segment_pages import LoadCounts

        started = time.monotonic()
        names = [f.name for f in dataclasses.fields(LoadCounts) if f.name != "seconds"]
        totals = dict.fromkeys(names, 0)
        asked = 0
        for sealed, pages in self.split(view, units):
            left = None
            if deadline_s is not None:
                left = max(0.0, deadline_s - (time.monotonic() - started))
            counts = sealed.segment.load_units(kind, pages, sticky=sticky, deadline_s=left)
            asked += pages.size
            for name in names:
                totals[name] += getattr(counts, name)
        totals["not_reached"] += int(np.asarray(units).size) - asked
        return LoadCounts(**totals, seconds=time.monotonic() - started)

    def expected_recall(self, view: View, coverage: Mapping[str, float]) -> float | None:
        """Mean over the rows of all segments; None where one of them does not know it."""
        rows = total = 0.0
        for segment in view.segments:
            recall = segment.sealed.segment.expected_recall(coverage)
            if recall is None:
                return None
            rows += segment.sealed.entry.count
            total += segment.sealed.entry.count * recall
        return total / rows if rows else None

    def resident_count(self, view: View, kind: str, units: NDArray[np.uint32]) -> int:
        """Return how many of these pages are in memory now."""
        return sum(
            sealed.segment.resident_count(kind, pages) for sealed, pages in self.split(view, units)
        )


def _heat_keys(
    heat: Mapping[Any, float], id_kind: IdKind, rest: Callable[[], None]
) -> tuple[list[Key], NDArray[np.float32]]:
    """Return documents and weights; heat may know them by (tenant, chunk id) or by id alone."""
    keys: list[Key] = []
    weights: list[float] = []
    entries = iter(heat.items())
    while step := list(itertools.islice(entries, _STEP_KEYS)):
        for name, weight in step:
            # The same object where it is one: thousands of new ones would set off the collector.
            key = name if isinstance(name, tuple) else (DEFAULT_TENANT, name)
            if id_kind != "int":
                if not isinstance(key[1], str):
                    key = key[0], str(key[1])
            elif not isinstance(key[1], int):
                try:
                    key = key[0], int(key[1])
                except ValueError:
                    continue  # Heat outlives what it is about; this is no document of ours.
            keys.append(key)
            weights.append(weight)
        rest()
    return keys, np.array(weights, dtype=np.float32)


def merged_residency(view: View) -> Residency:
    """Return the residency of all segments of ``view`` together.

    Pages of segments with different page sizes are counted in the smallest of them.
    """
    parts = [segment.sealed.segment.resident() for segment in view.segments]
    if len(parts) == 1:
        return parts[0]
    kinds = []
    for name in PAGE_KINDS:
        entries = [entry for part in parts for entry in part.kinds if entry.kind == name]
        if not entries:
            continue
        unit = min((entry.page_bytes for entry in entries), default=_PAGE_BYTES_MIN)
        kinds.append(
            KindResidency(
                kind=name,
                pages=sum(entry.pages * entry.page_bytes // unit for entry in entries),
                resident=sum(entry.resident * entry.page_bytes // unit for entry in entries),
                sticky=sum(entry.sticky * entry.page_bytes // unit for entry in entries),
                quarantined=sum(entry.quarantined * entry.page_bytes // unit for entry in entries),
                page_bytes=unit,
            )
        )
    height = max((len(part.levels) for part in parts), default=0)
    counts = [segment.sealed.entry.count for segment in view.segments]
    levels = []
    for level in range(height):
        having = [
            (p.levels[level], n)
            for p, n in zip(parts, counts, strict=True)
            if level < len(p.levels)
        ]
        levels.append(sum(r * n for r, n in having) / max(1, sum(n for _, n in having)))
    return Residency(
        kinds=tuple(kinds),
        levels=tuple(levels),
        total_bytes=sum(part.total_bytes for part in parts),
        resident_bytes=sum(part.resident_bytes for part in parts),
        budget_bytes=sum(part.budget_bytes for part in parts),
        navigation_bits=min((part.navigation_bits for part in parts if part.kinds), default=0),
    )
