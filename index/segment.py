"""A sealed segment, open: its pages in a pool, searches over them, and what can be loaded.

`Segment` is mechanism: it answers, loads what it is told to load, and says what is resident. What
to load is decided by heat that a caller hands in; see `index/README.md` for a query's whole way.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import InputError, UnavailableError
from stoker.index.calibrated import Calibration
from stoker.index.direct import DirectSearch, KnownSearch
from stoker.index.hits import Summarized, Summary
from stoker.index.ids import IdLayout, IdTable
from stoker.index.manifest import FILES, Manifest
from stoker.index.paged_file import PagedFile, SegmentFileCorrupt
from stoker.index.range_recall import SMALL_SHARE, WHOLE_NEAREST
from stoker.index.recall_bounds import RecallBounds
from stoker.index.residency import Residency
from stoker.index.search_plan import (
    check_question,
    plan_search,
    range_losses,
    sure_of_walk,
    target_of,
    wanted_of_walk,
)
from stoker.index.segment_pages import LoadCounts, PageUnits, SegmentPages, check_crc
from stoker.index.settings import IndexSettings

# Error of each estimate times the root of the dimension, for segments too small to measure: the
# upper end of what was measured between 64 and 768 dimensions.
_COARSE_ERROR: Final = 0.4
# Combinations of k, width and target whose plans are kept.
_PLANS_MAX: Final = 64
# Threads per processor that share a batch whose queries are expected to read.
_WAITING_FACTOR: Final = 2
_CODE_ERROR: Final = 0.12
_REFINE_ERROR: Final = 0.01
log = structlog.get_logger(__name__)


class SegmentClosed(UnavailableError):
    """The segment was closed; open it again."""


class SegmentHits(Summarized):
    """A batch's answer in rows, and its `Summary`.

    Attributes:
        rows: int64, shape (nq, k), -1 where there are fewer.
        scores: float32, shape (nq, k): inner product or cosine (higher is nearer), or squared L2
            distance (lower is nearer). Not-a-number where the row is -1.
    """

    __slots__ = ("rows", "scores")

    def __init__(
        self,
        rows: NDArray[np.int64],
        scores: NDArray[np.float32],
        summary: Summary | Callable[[Any], Summary],
        facts: Any = None,
    ) -> None:
        super().__init__(summary, facts)
        self.rows = rows
        self.scores = scores


class Segment:
    """One sealed segment over its own page pool.

    Invariants:
        * at most ``memory_bytes`` of pages are resident (and at least 64 pages may be);
        * files are immutable: two opens of one folder answer alike;
        * after `close` every call raises `SegmentClosed`.
    """

    def __init__(
        self, path: Path, manifest: Manifest, memory_bytes: int, settings: IndexSettings
    ) -> None:
        """Use `Segment.open`."""
        self.path = path
        self.manifest = manifest
        self._settings = settings
        self._closed = False
        self._lock = threading.Lock()
        # By k, width and recall target as asked for.
        self.known: dict[tuple[int, int | None, float | None], KnownSearch] = {}
        ids = IdLayout(manifest.id_kind, manifest.id_by_row_dtype, manifest.id_text_bytes)
        self.ids = IdTable(path / FILES["ids"], ids, manifest.count)
        check_crc(self.ids.file, "ids", manifest)
        self._pages = (
            SegmentPages(path, manifest, memory_bytes, settings) if manifest.count else None
        )
        self._navigation_bits = self._pages.navigation_bits if self._pages else 0
        centre = self._pages.centre if self._pages else np.zeros(manifest.dim, np.float32)
        self._bounds = RecallBounds(manifest, self._navigation_bits, centre)
        self._native: Any = None if self._pages is None else self._open_native(self._pages)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        memory_bytes: int | None = None,
        settings: IndexSettings | None = None,
    ) -> Segment:
        """Open a segment's folder, reading headers, checksum tables and the centre only.

        Args:
            path: The folder.
            memory_bytes: Budget for pages; None means the setting, and 0 room for all.
            settings: The room's settings; None means the defaults.

        Raises:
            SegmentFileCorrupt: a file is missing, truncated, swapped or damaged; names which.
            NewerFormat: written by a newer Stoker.
        """
        chosen = settings or IndexSettings()
        folder = Path(path)
        manifest = Manifest.read(folder)
        budget = chosen.memory_bytes if memory_bytes is None else memory_bytes
        if budget < 0:
            raise InputError(f"memory_bytes: expected 0 or more, found {budget}")
        return cls(folder, manifest, budget, chosen)

    def _open_native(self, pages: SegmentPages) -> Any:
        m = self.manifest
        calibration = m.calibration
        # The sum of many coordinates' errors is about normal; that of a few has heavier tails.
        tails = max(1.0, (32 / m.dim) ** 0.5)
        code = calibration.code_error if calibration else _CODE_ERROR / m.dim**0.5
        refine = calibration.refine_error if calibration else _REFINE_ERROR / m.dim**0.5
        layout = _core.SegmentLayout(
            dim=m.dim,
            count=m.count,
            l2=m.metric == "l2",
            entry_row=m.entry_row,
            code_error=code * tails,
            refine_error=refine * tails,
        )
        layout.set_links(pages.stores["links"])
        for level in m.levels:
            layout.add_level(
                count=level.count,
                m=level.m,
                id_bits=level.id_bits,
                record_bytes=level.record_bytes,
                per_page=level.per_page,
                first_page=level.first_page,
            )
        layout.set_codes(
            store=pages.stores["codes"],
            record_bytes=m.code_record_bytes,
            per_page=m.code_per_page,
        )
        if pages.navigation_bits == 2:
            coarse = calibration.coarse_error if calibration else _COARSE_ERROR / m.dim**0.5
            layout.set_coarse(
                store=pages.stores["coarse"],
                record_bytes=m.coarse_record_bytes,
                per_page=m.coarse_per_page,
                error=coarse * tails,
            )
        layout.set_refine(
            store=pages.stores["refine"],
            record_bytes=m.refine_record_bytes,
            per_page=m.refine_per_page,
        )
        layout.set_vectors(
            store=pages.stores["vectors"],
            record_bytes=m.vector_record_bytes,
            half=m.vector_dtype == "float16",
        )
        if "ranges" in pages.stores:
            layout.set_ranges(
                store=pages.stores["ranges"],
                groups=m.range_groups,
                record_bytes=m.group_record_bytes,
                per_page=m.page_bytes // m.group_record_bytes,
                pieces=m.range_pieces,
                whole_nearest=WHOLE_NEAREST,
                small_share=SMALL_SHARE,
            )
        if m.walks_vectors:
            layout.set_walk_vectors(unit_rows=m.metric == "cosine")
        return _core.NativeSegment(
            pool=pages.pool,
            layout=layout,
            dim=m.dim,
            seed=m.seed,
            centre=pages.centre,
            basis=pages.basis,
            row_length2=m.row_length2,
        )

    # ---- facts -------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Rows."""
        return self.manifest.count

    @property
    def dim(self) -> int:
        """Dimensions."""
        return self.manifest.dim

    @property
    def metric(self) -> str:
        """ "ip", "cosine" or "l2"."""
        return self.manifest.metric

    @property
    def total_bytes(self) -> int:
        """Bytes of the segment's files."""
        return self.manifest.total_bytes

    @property
    def calibration(self) -> Calibration | None:
        """What sealing measured; None for a segment too small to measure."""
        return self.manifest.calibration

    @property
    def navigation_bits(self) -> int:
        """Bits a dimension of what walks compare; see `SegmentPages`. 0 in an empty segment."""
        return self._navigation_bits

    def _require_open(self) -> SegmentPages | None:
        """The pages; None for an empty segment."""
        pages = self._pages
        if self._closed:
            raise SegmentClosed(f"{self.path}: the segment is closed; open it again")
        return pages

    def _require_native(self) -> Any:
        """The searcher, which its caller holds: `close` may come at any moment."""
        native = self._native
        if native is None:
            raise SegmentClosed(f"{self.path}: the segment is closed; open it again")
        return native

    # ---- search ------------------------------------------------------------------------------

    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        *,
        ef: int | None = None,
        entry_ef: int | None = None,
        recall_target: float | None = None,
        deadline_s: float | None = None,
        allow: NDArray[np.uint8] | None = None,
        resident_only: bool = False,
    ) -> SegmentHits:
        """Find the ``k`` nearest rows of each query.

        Args:
            queries: float32, shape (nq, dim), finite. For cosine they need not be unit length.
            k: 1 to 1,000.
            ef: Width of the walk; None takes the cheapest walk that met the target at calibration,
                of those that enter the bottom level at one place and those that enter it widely.
            entry_ef: Width of the walk on the level above the bottom, which is entered at all that
                it finds; None takes 1 where ``ef`` is given, else what calibration found to pay.
            recall_target: Recall@k aimed at in the mean, 0 to 1; None means the setting. It decides
                the width (unless ``ef`` is given) and how much is read to settle the answer. From
                0.99 on, answers are scored by their full vectors, wherever those are.
            deadline_s: Seconds from now, for the batch as a whole. Past it nothing more is read.
            allow: uint8, shape (ceil(count / 8),): a bit per row, little-endian; None allows all.
            resident_only: Read nothing: answer from memory alone, as completely as that goes.

        Raises:
            InputError: wrong shape, dimension, k, ef, entry_ef or target, or a query that is not
                finite.
            SegmentClosed: after `close`.
        """
        self._require_open()
        m = self.manifest
        if queries.ndim != 2 or queries.shape[1] != m.dim:
            raise InputError(f"queries: expected shape (n, {m.dim}), found {queries.shape}")
        known = self.known.get((k, ef, recall_target)) if entry_ef is None else None
        if known is None:
            check_question(k, ef, recall_target)
            if entry_ef is not None and (ef is None or not 1 <= entry_ef <= ef):
                raise InputError(f"entry_ef: expected 1 to ef, {ef}, found {entry_ef}")
        count = len(queries)
        if m.count == 0 or count == 0:
            return SegmentHits(
                np.full((count, k), -1, np.int64),
                np.full((count, k), np.nan, np.float32),
                Summary.nothing_to_do(count),
            )
        if known is None:
            known = self._plan(k, ef, recall_target, entry_ef)
        if allow is None and (known.scans or known.width >= m.count):
            # As wide as the segment: a scan looks at no more than the walk would, and at all of it.
            allow = np.packbits(np.ones(m.count, np.bool_), bitorder="little")
        rows = np.empty((count, k), np.int64)
        scores = np.empty((count, k), np.float32)
        facts = self._require_native().search(
            np.ascontiguousarray(queries, np.float32),
            rows,
            scores,
            known.options,
            resident_only=resident_only,
            deadline_s=deadline_s,
            allow=allow,
            threads=self.threads(count),
        )
        summarize = known.summarize
        if allow is not None:
            summarize = functools.partial(summarize, allow=allow)
        return SegmentHits(rows, scores, summarize, facts)

    def _plan(
        self, k: int, ef: int | None, recall_target: float | None, entry_ef: int | None = None
    ) -> KnownSearch:
        """Work out how searches that ask for this are done, and keep it for the next one."""
        wanted = wanted_of_walk(self._settings, recall_target)
        holds_all = self._pages is not None and self._pages.holds_all
        sure = sure_of_walk(self._settings, recall_target, holds_all=holds_all)
        scans = self._pages is not None and self._pages.holds_scan
        walk = self._bounds.choose(
            k, ef=ef, entry_ef=entry_ef, wanted=wanted, sure=sure, scans=scans
        )
        if self._pages is not None and self._pages.holds_navigation and ef is None:
            walk = self._bounds.with_ranges(walk, k, target_of(self._settings, recall_target))
        options = plan_search(
            self._settings,
            self.navigation_bits,
            walk=walk,
            k=k,
            ef=ef,
            recall_target=recall_target,
            normalize=self.manifest.metric == "cosine",
            whole_blocks=self.manifest.coarse_blocks > 0,
            holds_all=holds_all,
        )
        known = KnownSearch(
            walk.width,
            _core.SearchOptions(k=k, **options),
            functools.partial(self._bounds.summary, k, walk),
            direct=walk.width < self.count and not walk.scans,
            scans=walk.scans,
        )
        strange = walk.ranges.strange if walk.ranges else (0,) * len(walk.farther)
        for farther, groups in zip(walk.farther, strange, strict=True):
            known.options.add_farther(
                below=farther.below,
                ef=farther.width,
                entry_ef=farther.entry_width,
                range_groups=groups,
            )
        if walk.ranges is not None:
            known.options.set_ranges(
                groups=walk.ranges.groups,
                hurried=self._pages is None or self._pages.soon_there,
                **range_losses(
                    target_of(self._settings, recall_target),
                    walk.ranges,
                    self.navigation_bits,
                    whole_blocks=self.manifest.coarse_blocks > 0,
                ),
            )
        if entry_ef is not None:
            return known
        # Replaced when full, never emptied: searches of other threads may be looking.
        kept = self.known if len(self.known) < _PLANS_MAX else {}
        self.known = {**kept, (k, ef, recall_target): known}
        return known

    def direct(self) -> DirectSearch | None:
        """Return the short way to answers; None where ids are strings, or there is nothing."""
        native = self._native
        return None if native is None or self.ids.kind != "int" else DirectSearch(self, native)

    def threads(self, queries: int) -> int:
        """How many threads answer a batch."""
        if queries < 2:
            return 1
        if self._settings.search_threads:
            return self._settings.search_threads
        # After walks on coarse codes most queries read: while some wait, others compute.
        waiting = _WAITING_FACTOR if self.navigation_bits == 2 else 1
        return waiting * len(os.sched_getaffinity(0))

    def nearness(
        self, best: NDArray[np.floating], queries: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """How near queries lie to the best rows of their answers; see `recall_bounds.nearness`."""
        return self._bounds.nearness(best, queries)

    @property
    def nearness_rounded(self) -> float:
        """How much nearer than it is a float32 score may make a row seem, or farther."""
        return self._bounds.nearness_rounded

    # ---- rows --------------------------------------------------------------------------------

    def ids_at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """External ids of rows of any shape; -1 (or None) where the row is -1."""
        self._require_open()
        return self.ids.ids_at(rows)

    def rows_of(self, ids: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
        """Rows of external ids, int64, -1 where the segment does not hold the id."""
        self._require_open()
        return self.ids.rows_of(ids)

    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Stored vectors of rows, float32, shape (n, dim); unit length under cosine.

        Raises:
            SegmentFileCorrupt: a page of one of them cannot be read.
        """
        self._require_open()
        if len(rows) == 0:
            return np.empty((0, self.dim), np.float32)
        wanted = np.ascontiguousarray(rows, np.uint32)
        vectors, lost = self._require_native().vectors(wanted)
        if lost:
            raise SegmentFileCorrupt(
                f"{self.path / FILES['vectors']}: {lost} of {len(rows)} vectors lie on damaged "
                "pages; run `stoker verify`, then `stoker repair`",
                path=self.path / FILES["vectors"],
            )
        return np.asarray(vectors)

    def vector_pages(self, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Pages of kind "vectors" that hold the vectors of rows of any shape, rising, each once.

        Rows of -1 have none. Not for segments whose walks compare vectors.
        """
        record, page = self.manifest.vector_record_bytes, self.manifest.page_bytes
        wanted = np.unique(rows[rows >= 0])
        first, last = wanted * record // page, ((wanted + 1) * record - 1) // page
        longest = int((last - first).max(initial=0))
        spans = np.minimum(first[:, None] + np.arange(longest + 1), last[:, None])
        pages: NDArray[np.uint32] = np.unique(spans).astype(np.uint32)
        return pages

    def estimate_errors(
        self, query: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Errors of the navigation codes' and of both planes' estimates, over |q||x - centre|.

        For calibration: reads whatever it needs.
        """
        self._require_open()
        code, both = self._require_native().estimate_errors(
            np.ascontiguousarray(query, np.float32), np.ascontiguousarray(rows, np.uint32)
        )
        return np.asarray(code), np.asarray(both)

    def nearest_groups(self, queries: NDArray[np.float32], most: int) -> NDArray[np.uint32]:
        """The groups of near rows that lie nearest to each query, uint32, shape (nq, most).

        For calibration. 2^32 - 1 where there are fewer, or none at all.
        """
        self._require_open()
        found: NDArray[np.uint32] = self._require_native().nearest_groups(
            np.ascontiguousarray(queries, np.float32), most
        )
        return found

    # ---- pages -------------------------------------------------------------------------------

    def unit_batches(
        self,
        heat_by_row: NDArray[np.float32] | None = None,
        *,
        rest: Callable[[], None] = lambda: None,
    ) -> list[PageUnits]:
        """Every page by kind, the most useful first; see `SegmentPages.unit_batches`."""
        pages = self._require_open()
        return pages.unit_batches(heat_by_row, rest=rest) if pages else []

    def load_units(
        self,
        kind: str,
        units: NDArray[np.uint32],
        *,
        sticky: bool = False,
        deadline_s: float | None = None,
        cancel: Any = None,
        evict: bool = False,
    ) -> LoadCounts:
        """Load pages of a kind; see `SegmentPages.load_units`. The upper pages bring the ids."""
        pages = self._require_open()
        if pages is None:
            return LoadCounts(0, 0, 0, 0, len(units), 0, 0, 0.0)
        counts = pages.load_units(
            kind, units, sticky=sticky, deadline_s=deadline_s, cancel=cancel, evict=evict
        )
        if kind != "upper":
            return counts
        self.ids.take_read_bytes()  # by searches until now: not of this load
        self.ids.load()
        return dataclasses.replace(
            counts, bytes_read=counts.bytes_read + self.ids.take_read_bytes()
        )

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """How many of the given pages of a kind are in memory now, from the pool's tables."""
        pages = self._require_open()
        return pages.resident_count(kind, units) if pages else 0

    def resident_units(self, kind: str) -> NDArray[np.uint32]:
        """Pages of a kind that are in memory now; see `SegmentPages.resident_units`."""
        pages = self._require_open()
        return pages.resident_units(kind) if pages else np.empty(0, np.uint32)

    def evict_units(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Let pages of a kind go; see `SegmentPages.evict_units`."""
        pages = self._require_open()
        return pages.evict_units(kind, units) if pages else 0

    def resident(self) -> Residency:
        """What is in memory now, from the page pool's tables."""
        pages = self._require_open()
        return pages.resident() if pages else Residency((), (), 0, 0, 0)

    def expected_recall(self, coverage: Mapping[str, float]) -> float | None:
        """Mean recall of answers from memory alone; see `Calibration.recall_from_memory`."""
        calibration = self.manifest.calibration
        if calibration is None:
            return None
        return calibration.recall_from_memory(self.navigation_bits, coverage)

    def page_counts(self) -> tuple[int, int]:
        """How often searches found the page of a record in memory, and how often not."""
        if self._require_open() is None:
            return 0, 0
        hits, misses = self._require_native().page_counts()
        return int(hits), int(misses)

    def pool_stats(self) -> dict[str, int]:
        """The page pool's counters; empty for an empty segment."""
        pages = self._require_open()
        return dict(pages.pool.stats()) if pages else {}

    def damaged_pages(self) -> dict[str, list[int]]:
        """Every page of every file that fails its checksum, by file name; reads all of them."""
        damaged = {}
        for part, name in self.manifest.files.items():
            pages = PagedFile(self.path / name, kind=part).damaged_pages()
            if pages:
                damaged[name] = pages
        return damaged

    def close(self) -> None:
        """Free the pages and close the files. A second call does nothing.

        Waits for searches of `direct` that are under way.
        """
        with self._lock:
            self._closed = True
            native, self._native = self._native, None
            self._pages = None
        if native is not None:
            native.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
