"""Segments that scan: the slow, obvious stand-in for the native ones in tests of collections."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError
from stoker.index.exact import Metric, score_pairs, top
from stoker.index.hits import Summary
from stoker.index.residency import KindResidency, Residency
from stoker.index.segment import SegmentHits
from stoker.index.segment_pages import LoadCounts, PageUnits
from stoker.index.settings import IndexSettings

ROWS_PER_PAGE = 4


class BruteForceSegment:
    """An open folder of a .npy and a .json."""

    def __init__(self, path: Path) -> None:
        try:
            facts = json.loads((path / "facts.json").read_text())
            self._vectors: NDArray[np.float32] = np.load(path / "vectors.npy")
        except (OSError, ValueError) as error:
            raise CorruptError(f"{path}: {error}") from error
        self._metric: Metric = facts["metric"]
        self._ids: list[Any] = facts["ids"]
        self._row_of = {value: row for row, value in enumerate(self._ids)}
        self._loaded: set[int] = set()
        self.closed = False

    @property
    def count(self) -> int:
        return len(self._ids)

    @property
    def total_bytes(self) -> int:
        return 4096 * self._pages()

    def _pages(self) -> int:
        return -(-self.count // ROWS_PER_PAGE)

    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        *,
        ef: int | None,
        recall_target: float | None,
        deadline_s: float | None,
        allow: NDArray[np.uint8] | None,
    ) -> SegmentHits:
        assert not self.closed
        usable = np.ones(self.count, dtype=np.bool_)
        if allow is not None:
            usable = np.unpackbits(allow, bitorder="little", count=self.count).astype(np.bool_)
        candidates = np.flatnonzero(usable)
        rows = np.full((len(queries), k), -1, dtype=np.int64)
        scores = np.full((len(queries), k), np.nan, dtype=np.float32)
        for i, query in enumerate(queries):
            found = score_pairs(self._vectors[candidates], query, self._metric)
            best = top(-found if self._metric == "l2" else found, k)
            rows[i, : best.size] = candidates[best]
            scores[i, : best.size] = found[best]
        ones, zeros = np.ones(len(queries), np.float32), np.zeros(len(queries), np.int64)
        summary = Summary(
            ones, ones, ones, ones, zeros + 1, zeros + 4096, zeros, zeros > 0, zeros == 0
        )
        return SegmentHits(rows, scores, summary)

    def direct(self) -> None:
        return None

    def ids_at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        whole = bool(self._ids) and isinstance(self._ids[0], int)
        found = np.full(rows.shape, -1 if whole else None, dtype=np.int64 if whole else object)
        for at in np.ndindex(rows.shape):
            if rows[at] >= 0:
                found[at] = self._ids[rows[at]]
        return found

    def rows_of(self, ids: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
        return np.array([self._row_of.get(value, -1) for value in ids], dtype=np.int64)

    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        assert not self.closed
        return self._vectors[rows]

    def unit_batches(
        self, heat_by_row: NDArray[np.float32] | None, *, rest: Callable[[], None] = lambda: None
    ) -> list[PageUnits]:
        heat = np.zeros(self.count, np.float32) if heat_by_row is None else heat_by_row
        benefit = np.bincount(
            np.arange(self.count) // ROWS_PER_PAGE, heat, minlength=self._pages()
        ).astype(np.float32)
        order = np.argsort(-benefit, kind="stable")
        return [PageUnits("links", 1, order.astype(np.uint32), 4096, benefit[order])]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadCounts:
        assert all(unit < self._pages() for unit in units.tolist())
        fresh = set(units.tolist()) - self._loaded
        self._loaded |= fresh
        return LoadCounts(
            len(fresh), len(units) - len(fresh), 0, 0, 0, 4096 * len(fresh), len(fresh), 0.0
        )

    def resident(self) -> Residency:
        kind = KindResidency("links", self._pages(), len(self._loaded), 0, 0, 4096)
        return Residency((kind,), (1.0,), self.total_bytes, 4096 * len(self._loaded), 0)

    def close(self) -> None:
        self.closed = True


class BruteForceEngine:
    """Builds and opens `BruteForceSegment`s; rows come in another order than the vectors."""

    def open(
        self, path: Path, *, memory_bytes: int | None, settings: IndexSettings
    ) -> BruteForceSegment:
        return BruteForceSegment(path)

    def build(
        self,
        path: Path,
        vectors: NDArray[Any],
        ids: NDArray[Any],
        *,
        metric: Metric,
        m: int,
        ef_construction: int,
        heat: Mapping[Any, float] | None,
        threads: int | None,
        progress: Any,
        graph_of: Path | None = None,
    ) -> None:
        order = np.random.default_rng(len(ids)).permutation(len(ids))
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.mkdir()
        np.save(temporary / "vectors.npy", np.asarray(vectors, dtype=np.float32)[order])
        facts = {"metric": metric, "ids": [ids.tolist()[row] for row in order]}
        (temporary / "facts.json").write_text(json.dumps(facts))
        progress("link", 1, 1)
        os.rename(temporary, path)

    def stored_vectors(self, path: Path, segment: Any) -> NDArray[np.float32]:
        assert not segment.closed
        stored: NDArray[np.float32] = np.load(path / "vectors.npy")
        return stored
