"""The pages of an open segment: in a pool, by kind, loaded when told and counted when asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import InputError
from stoker.index.coarse_basis import basis_memory, basis_of, basis_size
from stoker.index.manifest import FILES, Manifest
from stoker.index.paged_file import HEADER_BYTES, PagedFile, SegmentFileCorrupt
from stoker.index.residency import PAGE_KINDS, KindResidency, Residency
from stoker.index.settings import IndexSettings

# Frames that the pool keeps beyond a small budget, so that a query's reads have somewhere to land.
_BUDGET_PAGES_MIN: Final = 64
# What a walk looks at per answer that it gives, about half of it near the answer and half anywhere:
# measured at the widths that targets of 0.95 to 0.99 take.
_CODES_PER_ANSWER: Final = 30.0
_LINKS_PER_ANSWER: Final = 4.0
# A re-rank looks at the answer and at near-misses, nearly all of which lie beside it in the file.
_REFINES_PER_ANSWER: Final = 4.0
# Beside coarse codes, 4-bit ones are what settles most answers, and second codes the rest.
_FINE_CODES_PER_ANSWER: Final = 8.0
# Share of what is looked at that lies anywhere, not near the answer.
_ANYWHERE_WALK: Final = 0.5
_ANYWHERE_RERANK: Final = 0.03
# What full vectors add to second codes, as a share of what second codes add to first ones: twice
# what these leave in doubt of what those leave, within bounds. A page of second codes settles many
# answers and one of vectors few: with a bound of 0.5 in place of 0.05, a fifth of the bytes of an
# index sealed by heat left 4.1 % of the queries reading instead of 1.2 %, at recall 0.970 instead
# of 0.976.
_VECTORS_WORTH_FACTOR: Final = 2.0
_VECTORS_WORTH_MIN: Final = 0.02
_VECTORS_WORTH_MAX: Final = 0.05
# The navigation set is held for good where it is no more of a budget than this: what is left are
# pages that settle answers, and one that a walk misses costs more than many of those spare.
_NAVIGATION_SHARE_MAX: Final = 0.98
# What a walk misses comes in clusters of this size while the pool has room to spare: a cloud volume
# counts reads, up to more than this, not bytes.
_CLUSTER_BYTES: Final = 32 << 10
# Or of this size, where links and codes are so few that such a volume gives all of them in half a
# second: the first few queries want nearly all, and the sooner it is there the fewer wait. The very
# first pays: 100,000 x 384, p99 of 200 queries 5.7 ms by 128 KiB, 1.9 by 1 MiB.
_CLUSTER_BYTES_MAX: Final = 1 << 20
_FEW_BYTES: Final = 64 << 20
# How what falls near an answer spreads over the pages beside its own.
_NEAR: Final = np.array([0.04, 0.06, 0.1, 0.15, 0.3, 0.15, 0.1, 0.06, 0.04])
# What re-ranks competes for what the navigation set leaves, by benefit per byte.
_STAGES: Final = {
    4: {"upper": 0, "links": 1, "codes": 1, "refine": 2, "vectors": 2},
    2: {"upper": 0, "links": 1, "coarse": 1, "codes": 2, "refine": 2, "vectors": 2},
}
# Where walks compare vectors, no search looks at a code.
_VECTOR_STAGES: Final = {"upper": 0, "links": 1, "vectors": 1}
_PARTS: Final = {
    4: ("links", "codes", "refine", "vectors"),
    2: ("links", "coarse", "codes", "refine", "vectors"),
}


@dataclasses.dataclass(frozen=True)
class PageUnits:
    """Pages of one kind, the most useful first; what `prefetch` calls a batch of units.

    Attributes:
        kind: One of `residency.PAGE_KINDS`.
        stage: Lower stages are loaded first.
        units: uint32, shape (n,): page numbers of the kind.
        unit_bytes: Bytes of a page.
        benefit: float32, shape (n,): heat that lies on each page.
    """

    kind: str
    stage: int
    units: NDArray[np.uint32]
    unit_bytes: int
    benefit: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class LoadCounts:
    """What one load did, in pages; the first five add up to the pages asked for."""

    loaded: int
    already: int
    no_room: int
    failed: int
    not_reached: int
    bytes_read: int
    reads: int
    seconds: float


def check_crc(file: PagedFile, part: str, manifest: Manifest) -> None:
    """Refuse a file that is whole, but not the one that the manifest names."""
    if file.info.table_crc != manifest.file_crcs[part]:
        raise SegmentFileCorrupt(
            f"{file.path}: is not the file that the manifest names (checksum "
            f"{file.info.table_crc:08x}, expected {manifest.file_crcs[part]:08x})",
            path=file.path,
        )


def _open_files(folder: Path, manifest: Manifest) -> dict[str, PagedFile]:
    """Open all files but the ids'; part -> file, each the one that the manifest names."""
    files: dict[str, PagedFile] = {}
    for part in manifest.files:
        if part == "ids":
            continue
        file = PagedFile(folder / FILES[part], kind=part)
        check_crc(file, part, manifest)
        if file.info.page_bytes != manifest.page_bytes:
            raise SegmentFileCorrupt(
                f"{file.path}: pages of {file.info.page_bytes} bytes, the manifest says "
                f"{manifest.page_bytes}",
                path=file.path,
            )
        files[part] = file
    return files


class SegmentPages:
    """The paged files of one segment under one page pool.

    Attributes:
        navigation_bits: Bits a dimension of what walks compare: codes of 4 or 2, or, where a
            vector is no longer than its code, vectors themselves of 32 or 16. With 2, the
            4-bit codes serve re-ranking alone; with 4, the coarse ones are never read.
        kinds: Kinds of pages in use, in loading order.
        pool: The native page pool.
        stores: The pool's number of each part.
        centre: float32, shape (dim,): what coding subtracts.
        basis: The directions of coarse codes, where walks compare those and they have any.
        holds_all: Whether the budget has room for all pages that searches look at.
        holds_scan: Whether it has room for all that a scan compares.
        soon_there: Whether what walks look at is so little that it is read in large pieces: a few
            queries bring all of it.
        holds_navigation: Whether it has room for all that walks look at, and more. Where it has
            not, walks miss pages for good, and what they read has to be little.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, memory_bytes: int, settings: IndexSettings
    ) -> None:
        """Read headers, checksum tables and the centre; see `Segment.open` for what it raises."""
        m = manifest
        self._manifest = manifest
        self._files = _open_files(folder, manifest)
        self._upper_links = m.levels[0].first_page
        self.navigation_bits = self._choose_bits(memory_bytes, settings)
        transform = self._read_transform(with_basis=self.navigation_bits == 2)
        self._stages = _STAGES.get(self.navigation_bits, _VECTOR_STAGES)
        self.kinds = tuple(kind for kind in PAGE_KINDS if kind in self._stages)
        self._walked, self._upper_codes = self._walked_part()
        parts = _PARTS.get(self.navigation_bits, _PARTS[4])
        if m.has_ranges:
            parts = (*parts, "ranges")
        pages = sum(self._files[part].info.page_count for part in parts)
        # What is held beside the pages counts too.
        beside = basis_memory(m.basis, m.dim) if self.navigation_bits == 2 else 0
        wanted = pages if memory_bytes == 0 else max(memory_bytes - beside, 0) // m.page_bytes
        walked = sum(self._files[part].info.page_count for part in ("links", self._walked))
        self.holds_all = wanted >= pages
        # A scan looks at all codes, and at no links; there is room for what settles. What one of
        # coarse codes finds is not measured.
        self.holds_scan = self.navigation_bits != 2 and (
            self.holds_all or walked <= _NAVIGATION_SHARE_MAX * wanted
        )
        # What is read to re-rank comes and goes; a walk that has lost a page waits for it.
        self.holds_navigation = self.holds_all or walked <= _NAVIGATION_SHARE_MAX * wanted
        self._keeps_navigation = self.holds_navigation and not self.holds_all
        budget = min(max(wanted, _BUDGET_PAGES_MIN), max(pages, _BUDGET_PAGES_MIN)) * m.page_bytes
        self.soon_there = walked * m.page_bytes <= _FEW_BYTES
        cluster_bytes = _CLUSTER_BYTES_MAX if self.soon_there else _CLUSTER_BYTES
        cluster = max(cluster_bytes // m.page_bytes, 1)
        self.stores: dict[str, int] = {}
        self.pool: Any = _core.PagePool(
            page_bytes=m.page_bytes,
            budget_bytes=budget,
            backend=settings.io_backend,
            direct=settings.io_direct,
            prefetch_inflight_bytes_max=settings.prefetch_inflight_bytes_max,
            volume_reads_s=settings.volume_iops,
            volume_bytes_s=settings.volume_bytes_s,
        )
        for part in parts:
            file = self._files[part]
            self.stores[part] = self.pool.add_store(
                path=str(file.path),
                offset_bytes=HEADER_BYTES,
                page_count=file.info.page_count,
                table_offset_bytes=file.info.table_offset,
                table_crc=file.info.table_crc,
                cluster_pages=cluster if part in ("links", self._walked) else 1,
            )
        self.centre = transform[: 4 * m.dim].view("<f4").astype(np.float32)
        self.basis = (
            basis_of(transform[4 * m.dim :], m.basis, m.dim) if self.navigation_bits == 2 else None
        )

    def _read_transform(self, *, with_basis: bool) -> NDArray[np.uint8]:
        """Bytes of the centre, and behind them, where they are asked for, of coarse codes' basis.

        Walks on other codes never use it, and a first answer would wait for it.
        """
        m, file = self._manifest, self._files["transform"]
        centre = 4 * m.dim
        expected = centre + basis_size(m.basis, m.dim)
        found = file.info.record_count * max(file.info.record_bytes, 1)
        if found != expected:
            raise SegmentFileCorrupt(
                f"{file.path}: {found} bytes, expected {expected}", path=file.path
            )
        if with_basis:
            return file.read_bytes()
        pages = file.read(0, -(-centre // m.page_bytes), file.checksums())
        return pages.reshape(-1)[:centre]

    def _walked_part(self) -> tuple[str, int]:
        """Which part walks compare, and how many of its pages hold rows of upper levels."""
        m = self._manifest
        upper_rows = m.levels[1].count if len(m.levels) > 1 else 0
        if m.walks_vectors:
            return "vectors", -(-upper_rows * m.vector_record_bytes // m.page_bytes)
        part, per_page = (
            ("codes", m.code_per_page)
            if self.navigation_bits == 4
            else ("coarse", m.coarse_per_page)
        )
        return part, -(-upper_rows // per_page) if upper_rows else 0

    def _choose_bits(self, memory_bytes: int, settings: IndexSettings) -> int:
        """4 bits where the budget holds all of them, or where there are no others; else 2.

        All the bits of a vector where it is no longer than its code.

        A walk that misses pages waits for several rounds of reads, one after the other; one on
        coarse codes has nothing to miss and reads once, to re-rank.
        """
        if self._manifest.walks_vectors:
            return 8 * self._manifest.vector_record_bytes // self._manifest.dim
        if not self._manifest.has_coarse:
            return 4
        if settings.navigation_bits:
            return settings.navigation_bits
        walked = (self._files.get(part) for part in ("links", "codes", "ranges"))
        navigation = sum(file.info.page_count for file in walked if file is not None)
        fits = memory_bytes == 0 or navigation * self._manifest.page_bytes <= memory_bytes
        return 4 if fits else 2

    def _kind_pages(self, kind: str) -> list[tuple[str, int, int]]:
        """Store, first page and page count of the ranges that make up a kind."""
        if kind not in self.kinds:
            raise InputError(f"kind: expected one of {', '.join(self.kinds)}, found {kind!r}")
        if kind == "upper":
            ranges = [("links", 0, self._upper_links), (self._walked, 0, self._upper_codes)]
            if "ranges" in self.stores:
                ranges.insert(0, ("ranges", 0, self._files["ranges"].info.page_count))
        else:
            first = {"links": self._upper_links, self._walked: self._upper_codes}.get(kind, 0)
            ranges = [(kind, first, self._files[kind].info.page_count - first)]
        return [entry for entry in ranges if entry[2] > 0]

    def unit_batches(
        self,
        heat_by_row: NDArray[np.float32] | None = None,
        *,
        rest: Callable[[], None] = lambda: None,
    ) -> list[PageUnits]:
        """Every page by kind, the most useful first.

        Args:
            heat_by_row: float32, shape (count,), >= 0: demand that each row is expected to meet.
                None (or all zero) means that nothing is known: pages then come in file order,
                which is the order of heat and locality at sealing.
            rest: Called between steps of the work; may wait, and lets others run.

        A page's benefit is the number of times that the expected demand looks at it. The walk
        looks at links and codes, half of them on the answer's own page and those beside it in the
        file, which are its graph neighbors by construction, and half anywhere: so the navigation
        set is worth having whole, hot pages first. The re-rank looks at second codes, nearly all
        of them near. Full vectors count by what second codes leave in doubt.
        """
        m = self._manifest
        heat = np.zeros(m.count, np.float32) if heat_by_row is None else heat_by_row
        if heat.shape != (m.count,):
            raise InputError(f"heat: expected shape ({m.count},), found {heat.shape}")
        known = bool(heat.any())
        batches: list[PageUnits] = []
        for kind in self.kinds:
            count = sum(pages for _, _, pages in self._kind_pages(kind))
            if count == 0:
                continue
            if known:
                benefit = self._page_heat(kind, heat, count)
                rest()
                order = np.argsort(-benefit, kind="stable")
                units, worth = order.astype(np.uint32), benefit[order].astype(np.float32)
            else:
                units, worth = np.arange(count, dtype=np.uint32), np.zeros(count, np.float32)
            batches.append(
                PageUnits(
                    kind=kind,
                    stage=self._stages[kind],
                    units=units,
                    unit_bytes=m.page_bytes,
                    benefit=worth,
                )
            )
            rest()
        return batches

    def _page_heat(self, kind: str, heat: NDArray[np.float32], count: int) -> NDArray[np.float64]:
        m = self._manifest
        total = float(heat.sum())
        if kind == "upper":
            # Every query passes here: each page counts as if all heat lay on it.
            return np.full(count, total)
        rows = np.flatnonzero(heat)
        weights = heat[rows].astype(np.float64)
        if kind == "vectors" and kind != self._walked:
            first = rows * m.vector_record_bytes // m.page_bytes
            last = ((rows + 1) * m.vector_record_bytes - 1) // m.page_bytes
            benefit = np.bincount(first, weights, minlength=count).astype(np.float64)
            crossing = last > first
            benefit += np.bincount(last[crossing], weights[crossing], minlength=count)
            return self._vectors_worth() * benefit[:count]
        per_page, looks = {
            "links": (m.levels[0].per_page, _LINKS_PER_ANSWER),
            "coarse": (m.coarse_per_page, _CODES_PER_ANSWER),
            "codes": (m.code_per_page, _FINE_CODES_PER_ANSWER),
            "refine": (m.refine_per_page, _REFINES_PER_ANSWER),
            "vectors": (max(m.page_bytes // m.vector_record_bytes, 1), _CODES_PER_ANSWER),
        }[kind]
        skipped, anywhere = 0, _ANYWHERE_RERANK
        if kind == self._walked:
            skipped, looks, anywhere = self._upper_codes, _CODES_PER_ANSWER, _ANYWHERE_WALK
        elif kind == "links":
            anywhere = _ANYWHERE_WALK
        own = np.bincount(rows // per_page, weights, minlength=count + skipped).astype(np.float64)
        near = np.convolve(own, _NEAR, mode="same")[: len(own)]
        spread = (1.0 - anywhere) * near + anywhere * total / len(own)
        return (looks * spread)[skipped : skipped + count]

    def _vectors_worth(self) -> float:
        """What a full vector settles beyond second codes, beside what they settle: calibrated.

        Where stored vectors crowd together even second codes leave much in doubt.
        """
        calibration = self._manifest.calibration
        if calibration is None:
            return _VECTORS_WORTH_MIN
        left = (1.0 - calibration.refined_recall) / max(1.0 - calibration.code_recall, 1e-3)
        worth = _VECTORS_WORTH_FACTOR * left
        return min(max(worth, _VECTORS_WORTH_MIN), _VECTORS_WORTH_MAX)

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
        """Load pages of a kind, at a priority under demand; blocks until done.

        Args:
            kind: One of `kinds`.
            units: Page numbers of the kind, in any order; read in file order in large runs.
            sticky: Keep them until the segment closes. What walks need is kept anyway where the
                budget holds all of it and more.
            deadline_s: Seconds from now; what is not reached is counted.
            cancel: A `stoker.kernels._core.CancelFlag` to stop between two reads.
            evict: Whether other, less used pages may be evicted to make room.
        """
        started = time.monotonic()
        sticky = sticky or (self._keeps_navigation and kind in ("upper", "links", self._walked))
        wanted = _distinct(np.ascontiguousarray(units, np.uint32))
        totals = dict.fromkeys(
            ("loaded", "already", "no_room", "failed", "not_reached", "reads", "bytes_read"), 0
        )
        base = 0
        for store, first, count in self._kind_pages(kind):
            part = wanted[(wanted >= base) & (wanted < base + count)]
            base += count
            if len(part) == 0:
                continue
            left = None if deadline_s is None else deadline_s - (time.monotonic() - started)
            report = self.pool.load(
                self.stores[store],
                (part - np.uint32(base - count) + np.uint32(first)).astype(np.uint32),
                sticky=sticky,
                evict=evict,
                deadline_s=left,
                cancel=cancel,
            )
            for key in totals:
                totals[key] += report[key]
        if len(wanted) and int(wanted[-1]) >= base:
            raise InputError(f"units: {kind} has {base} pages, found {int(wanted[-1])}")
        return LoadCounts(**totals, seconds=time.monotonic() - started)

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """How many of the given pages of a kind are in memory now, from the pool's tables."""
        state = self._kind_state(kind)
        wanted = np.asarray(units, np.int64)
        known = state[wanted[wanted < len(state)]]
        return int(np.count_nonzero((known == 1) | (known == 2)))

    def resident_units(self, kind: str) -> NDArray[np.uint32]:
        """Page numbers of a kind that are in memory now, rising; from the pool's tables."""
        state = self._kind_state(kind)
        return np.flatnonzero((state == 1) | (state == 2)).astype(np.uint32)

    def evict_units(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Let pages of a kind go; returns how many went. Sticky and pinned ones stay."""
        wanted = np.asarray(units, np.int64)
        base = gone = 0
        for store, first, count in self._kind_pages(kind):
            part = wanted[(wanted >= base) & (wanted < base + count)] - base + first
            base += count
            if len(part):
                gone += int(self.pool.evict(self.stores[store], part.astype(np.uint32)))
        return gone

    def _kind_state(self, kind: str) -> NDArray[np.uint8]:
        """The pool's byte for each page of a kind: 1 resident, 2 sticky, 3 quarantined."""
        parts = [
            np.asarray(self.pool.residency(self.stores[store]))[first : first + count]
            for store, first, count in self._kind_pages(kind)
        ]
        return np.concatenate([np.empty(0, np.uint8), *parts])

    def resident(self) -> Residency:
        """What is in memory now, from the page pool's tables."""
        m = self._manifest
        kinds = []
        for kind in self.kinds:
            state = self._kind_state(kind)
            kinds.append(
                KindResidency(
                    kind=kind,
                    pages=len(state),
                    resident=int(np.count_nonzero((state == 1) | (state == 2))),
                    sticky=int(np.count_nonzero(state == 2)),
                    quarantined=int(np.count_nonzero(state == 3)),
                    page_bytes=m.page_bytes,
                )
            )
        levels = []
        links = np.asarray(self.pool.residency(self.stores["links"]))
        for level in m.levels:
            state = links[level.first_page : level.first_page + level.page_count]
            levels.append(float(np.mean((state == 1) | (state == 2))) if len(state) else 1.0)
        return Residency(
            kinds=tuple(kinds),
            levels=tuple(levels),
            total_bytes=sum(entry.pages * entry.page_bytes for entry in kinds),
            resident_bytes=sum(entry.resident_bytes for entry in kinds),
            budget_bytes=int(self.pool.stats()["budget_bytes"]),
            navigation_bits=self.navigation_bits,
        )


def _distinct(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Rising, each once. `numpy.unique` would import `numpy.ma`: 25 ms of a cold start."""
    rising = np.sort(units)
    first = np.concatenate([np.ones(min(len(rising), 1), bool), rising[1:] != rising[:-1]])
    distinct: NDArray[np.uint32] = rising[first]
    return distinct
