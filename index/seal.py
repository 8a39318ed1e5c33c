"""Seal a graph and its vectors into a segment: order, quantise, page, calibrate, publish.

Vectors stream through in sealed order, one batch at a time; only the level-0 links are held whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import InputError
from stoker.index.blas_threads import one_blas_thread
from stoker.index.calibration import calibrate
from stoker.index.coarse_basis import basis_bytes, choose_basis, coarse_record_bytes
from stoker.index.exact import unit_rows
from stoker.index.held_out import Probe
from stoker.index.hnsw_graph import HnswGraph
from stoker.index.ids import write_ids
from stoker.index.manifest import FILES, LINK_PADDING, LevelLayout, Manifest
from stoker.index.paged_file import PagedFileInfo, PagedFileWriter, write_blob
from stoker.index.range_table import GroupMeans, Ranges, ranges_of, write_ranges
from stoker.index.row_groups import group_rows
from stoker.index.row_length import common_length2
from stoker.index.row_order import HEAT_LOCALITY, row_order

METRICS: Final = ("ip", "cosine", "l2")
_SEED: Final = 0x53544F4B45523031
_BATCH_ROWS: Final = 16_384
_CENTRE_ROWS: Final = 100_000
_BASIS_ROWS: Final = 20_000
_PAGE_WASTE_MAX: Final = 0.16
# Coarse codes are kept where they take at most this share of the navigation codes' bytes.
_COARSE_SHARE_MAX: Final = 0.75

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while work goes on."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What a build made.

    Attributes:
        path: The segment's folder.
        count: Vectors.
        dim: Dimensions.
        metric: "ip", "cosine" or "l2".
        total_bytes: Bytes of all files.
        bytes_by_kind: Bytes of each file.
        navigation_bytes: Bytes of links and codes: what a walk needs in memory.
        graph_s: Seconds spent on the graph; 0 when it was given.
        seal_s: Seconds spent ordering, quantising and writing.
        calibrate_s: Seconds spent measuring recall.
        recall: Mean recall@10 on held-out queries at the largest width measured, or None.
    """

    path: str
    count: int
    dim: int
    metric: str
    total_bytes: int
    bytes_by_kind: dict[str, int]
    navigation_bytes: int
    graph_s: float
    seal_s: float
    calibrate_s: float
    recall: float | None


def seal_graph(
    path: Path | str,
    graph: HnswGraph,
    vectors: NDArray[Any],
    ids: NDArray[Any],
    *,
    metric: str,
    heat: NDArray[np.float32] | None = None,
    source_rows: NDArray[np.int64] | None = None,
    ef_construction: int = 0,
    builder: str = "hnswlib",
    ordering: str = HEAT_LOCALITY,
    threads: int | None = None,
    progress: Progress | None = None,
    graph_s: float = 0.0,
) -> BuildReport:
    """Write a segment's folder at ``path``, published by one rename.

    Args:
        path: Must not exist; its parent must.
        graph: Links of ``count`` nodes.
        vectors: float32 or float16, shape (n, dim); may be a memory map. Finite.
        ids: External ids of the rows of ``vectors``, as `ids.normalize_ids` returns them.
        metric: "ip", "cosine" (vectors are stored at unit length) or "l2".
        heat: float32, shape (n,), >= 0: expected demand of each row of ``vectors``. Hot rows are
            sealed side by side, so that a small warm set is a small number of pages.
        source_rows: int64, shape (count,): the row of ``vectors`` that each node stands for;
            None means the node's own number.
        ordering: One of `row_order.ORDERINGS`.

    Raises:
        InputError: ``path`` exists, shapes disagree, or there is no such ordering.
    """
    target = Path(path)
    if target.exists():
        raise InputError(f"{target}: exists already; a segment is never overwritten")
    if metric not in METRICS:
        raise InputError(f"metric: expected one of {', '.join(METRICS)}, found {metric!r}")
    count = graph.count
    rows = np.arange(count, dtype=np.int64) if source_rows is None else source_rows
    if rows.shape != (count,) or vectors.ndim != 2 or len(ids) != len(vectors):
        raise InputError(
            f"graph of {count} nodes, {len(rows)} source rows, vectors {vectors.shape}, "
            f"{len(ids)} ids: they disagree"
        )
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    temporary.mkdir(parents=True)
    try:
        sealer = _Sealer(temporary, graph, vectors, ids, metric, rows, threads, progress)
        report = sealer.run(heat, ef_construction, builder, ordering)
        _fsync_folder(temporary)
        os.rename(temporary, target)
        _fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    log.info(
        "index.segment_sealed",
        path=str(target),
        rows=count,
        bytes=report.total_bytes,
        seal_s=round(report.seal_s, 3),
    )
    return dataclasses.replace(report, path=str(target), graph_s=graph_s)


def choose_page_bytes(dim: int, m0: int, count: int) -> int:
    """Smallest page that wastes at most 16 % on code records and fits a link record.

    Small pages make the unit of residency fine; records do not cross pages, so wide vectors need
    larger ones.
    """
    code = _core.code_record_bytes(dim)
    link = 2 + (m0 * _id_bits(count) + 7) // 8
    page = 4096
    while page < 65536:
        per_page = page // code
        fits = link + LINK_PADDING <= page and per_page >= 1
        if fits and 1.0 - per_page * code / page <= _PAGE_WASTE_MAX:
            return page
        page *= 2
    return page


def _id_bits(count: int) -> int:
    return max(int(max(count - 1, 1)).bit_length(), 1)


def _sync(files: Sequence[PagedFileWriter]) -> None:
    for file in files:
        file.sync()


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sealer:
    """One sealing, from graph to files in ``folder``."""

    def __init__(
        self,
        folder: Path,
        graph: HnswGraph,
        vectors: NDArray[Any],
        ids: NDArray[Any],
        metric: str,
        rows: NDArray[np.int64],
        threads: int | None,
        progress: Progress | None,
    ) -> None:
        self.folder = folder
        self.graph = graph
        self.vectors = vectors
        self.ids = ids
        self.metric = metric
        self.rows = rows
        self.threads = threads or len(os.sched_getaffinity(0))
        self.progress = progress or (lambda what, done, total: None)
        self.dim = int(vectors.shape[1])
        self.half = vectors.dtype == np.float16
        self.page_bytes = choose_page_bytes(self.dim, max(graph.m0, 1), graph.count)
        # Short vectors' coarse codes are mostly padding.
        self.coarse = _core.coarse_record_bytes(self.dim) <= _COARSE_SHARE_MAX * (
            _core.code_record_bytes(self.dim)
        )
        self.vector_bytes = self.dim * (2 if self.half else 4)
        # As `Manifest.walks_vectors`: no code is compared then.
        self.walks_vectors = self.vector_bytes <= _core.refine_record_bytes(self.dim)
        self.infos: dict[str, PagedFileInfo] = {}
        self.row_length2 = 0.0

    def run(
        self,
        heat: NDArray[np.float32] | None,
        ef_construction: int,
        builder: str,
        ordering: str = HEAT_LOCALITY,
    ) -> BuildReport:
        started = time.monotonic()
        with one_blas_thread(), ThreadPoolExecutor(1) as aside:
            # It looks at vectors only; laying out and packing look at links only.
            transform = aside.submit(self._write_transform)
            places = self._places() if "locality" in ordering else None
            order = row_order(
                self.graph,
                None if heat is None else heat[self.rows],
                page_nodes=max(self.page_bytes // _core.refine_record_bytes(self.dim), 1),
                ordering=ordering,
                places=places,
            )
            levels = self._write_links(order)
            centre, basis = transform.result()
        probe = Probe.draw(self.vectors, self.rows, metric=self.metric)
        ranges = None if places is None or self.walks_vectors else ranges_of(places[order])
        self._write_rows(order, centre, basis, probe, ranges)
        id_layout, self.infos["ids"] = write_ids(
            self.folder / FILES["ids"], self.ids[self.rows[order]], page_bytes=self.page_bytes
        )
        g = self.graph
        entry_row = 0
        if g.count:
            entry_row = int(np.flatnonzero(order[: levels[-1].count] == g.entry_point)[0])
        hot = 0 if heat is None else int(np.count_nonzero(heat[self.rows] > 0))
        manifest = Manifest(
            metric=self.metric,
            dim=self.dim,
            count=g.count,
            m=g.m,
            ef_construction=ef_construction,
            vector_dtype="float16" if self.half else "float32",
            page_bytes=self.page_bytes,
            seed=_SEED,
            entry_row=entry_row,
            levels=tuple(levels),
            code_record_bytes=self.infos["codes"].record_bytes,
            code_per_page=self.infos["codes"].per_page,
            refine_record_bytes=self.infos["refine"].record_bytes,
            refine_per_page=self.infos["refine"].per_page,
            vector_record_bytes=self.infos["vectors"].record_bytes,
            id_kind=id_layout.kind,
            id_by_row_dtype=id_layout.by_row_dtype,
            id_text_bytes=id_layout.text_bytes,
            file_crcs={part: info.table_crc for part, info in self.infos.items()},
            total_bytes=sum(info.file_bytes for info in self.infos.values()),
            builder=builder,
            hot_rows=hot,
            calibration=None,
            coarse_record_bytes=self.infos["coarse"].record_bytes if self.coarse else 0,
            coarse_per_page=self.infos["coarse"].per_page if self.coarse else 0,
            coarse_wide_blocks=basis.wide_blocks if basis else 0,
            coarse_directions=basis.directions if basis else 0,
            coarse_fine=basis.fine if basis else 0,
            coarse_blocks=basis.blocks if basis else 0,
            row_length2=self.row_length2,
            range_groups=ranges.groups if ranges else 0,
            range_pieces=len(ranges.pieces) if ranges else 0,
        )
        sealed_at = time.monotonic()
        if probe is not None and g.count:
            self.progress("calibrate", 0, 1)
            manifest = calibrate(self.folder, manifest, probe, ranges)
            self.progress("calibrate", 1, 1)
        manifest.write(self.folder)
        calibration = manifest.calibration
        return BuildReport(
            path=str(self.folder),
            count=g.count,
            dim=self.dim,
            metric=self.metric,
            total_bytes=manifest.total_bytes,
            bytes_by_kind={part: info.file_bytes for part, info in self.infos.items()},
            navigation_bytes=self.infos["links"].file_bytes + self.infos["codes"].file_bytes,
            graph_s=0.0,
            seal_s=sealed_at - started,
            calibrate_s=time.monotonic() - sealed_at,
            recall=calibration.recall_mean[-1] if calibration else None,
        )

    def _places(self) -> NDArray[np.uint32]:
        """The group of near rows that each node is of."""
        with ThreadPoolExecutor(self.threads) as pool:
            return group_rows(
                lambda nodes: self._batch(self.rows[nodes]),
                len(self.rows),
                seed=_SEED,
                run=pool.map,
            )

    # ---- links -------------------------------------------------------------------------------

    def _write_links(self, order: NDArray[np.uint32]) -> list[LevelLayout]:
        g = self.graph
        inverse = np.empty(max(g.count, 1), np.uint32)
        inverse[order] = np.arange(g.count, dtype=np.uint32)
        tables: list[tuple[NDArray[np.uint32], NDArray[np.uint16], int]] = []
        if g.count:
            tables.append((g.level0, np.asarray(g.level0_counts, np.uint16), g.m0))
        for level in g.upper:
            tables.append((level.links, level.counts, g.m))
        layouts: dict[int, LevelLayout] = {}
        first_page = 0
        with PagedFileWriter(
            self.folder / FILES["links"],
            kind="links",
            page_bytes=self.page_bytes,
            record_bytes=0,
            per_page=0,
        ) as writer:
            # Top down, so that opening by layers reads the file front to back.
            for number in range(len(tables) - 1, -1, -1):
                ids, counts, m = tables[number]
                here = len(ids)
                nodes = order[:here]
                at = nodes if number == 0 else np.searchsorted(g.upper[number - 1].nodes, nodes)
                bits = _id_bits(here)
                record = 2 + (m * bits + 7) // 8
                per_page = max((self.page_bytes - LINK_PADDING) // record, 1)
                start_page = first_page
                step = max(_BATCH_ROWS * 4 // per_page, 1) * per_page
                for start in range(0, here, step):
                    part = at[start : start + step]
                    local_counts = np.ascontiguousarray(counts[part])
                    local = np.asarray(ids[part], np.uint32)
                    valid = np.arange(local.shape[1])[None, :] < local_counts[:, None]
                    renamed = np.where(valid, inverse[np.where(valid, local, 0)], 0)
                    pages = _core.pack_links(
                        np.ascontiguousarray(renamed, np.uint32),
                        local_counts,
                        id_bits=bits,
                        record_bytes=record,
                        per_page=per_page,
                        page_bytes=self.page_bytes,
                    )
                    writer.write_pages(pages, len(part))
                    first_page += len(pages)
                    if number == 0:
                        self.progress("links", min(start + step, here), here)
                layouts[number] = LevelLayout(
                    count=here,
                    m=m,
                    id_bits=bits,
                    record_bytes=record,
                    per_page=per_page,
                    first_page=start_page,
                    page_count=first_page - start_page,
                )
            self.infos["links"] = writer.close()
        if not layouts:
            layouts[0] = LevelLayout(0, 0, 1, 2, 1, 0, 0)
        return [layouts[number] for number in range(len(layouts))]

    # ---- rows --------------------------------------------------------------------------------

    def _write_transform(self) -> tuple[NDArray[np.float32], Any | None]:
        """Choose what coding subtracts and the directions it keeps, and write both."""
        centre = self._centre()
        basis = self._basis(centre)
        self.infos["transform"] = write_blob(
            self.folder / FILES["transform"],
            np.frombuffer(centre.astype("<f4").tobytes() + basis_bytes(basis), np.uint8),
            kind="transform",
            page_bytes=self.page_bytes,
        )
        return centre, basis

    def _centre(self) -> NDArray[np.float32]:
        count = len(self.rows)
        if count == 0:
            return np.zeros(self.dim, np.float32)
        step = max(count // _CENTRE_ROWS, 1)
        # One of each stretch, anywhere in it: rows may come in a rhythm, titles and texts by turns.
        starts = np.arange(0, count, step)
        chosen = starts + np.random.default_rng(_SEED).integers(0, step, len(starts))
        chosen = np.minimum(chosen, count - 1)
        total = np.zeros(self.dim, np.float64)
        lengths2: list[NDArray[np.float64]] = []
        for start in range(0, len(chosen), _BATCH_ROWS):
            batch = self._batch(self.rows[chosen[start : start + _BATCH_ROWS]])
            total += batch.sum(axis=0, dtype=np.float64)
            lengths2.append(np.einsum("ij,ij->i", batch, batch, dtype=np.float64))
        met = np.concatenate(lengths2)
        centre = (total / len(met)).astype(np.float32)
        if not self.walks_vectors:
            self.row_length2 = common_length2(self.metric, centre, met)
        return centre

    def _basis(self, centre: NDArray[np.float32]) -> Any | None:
        """The directions that coarse codes keep, from a sample; None where they are plain."""
        if not self.coarse or len(self.rows) == 0:
            return None
        step = max(len(self.rows) // _BASIS_ROWS, 1)
        return choose_basis(self._batch(self.rows[::step][:_BASIS_ROWS]), centre, _SEED)

    def _batch(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        batch = np.ascontiguousarray(self.vectors[rows], np.float32)
        if self.metric == "cosine":
            batch = unit_rows(batch)
        return batch

    def _write_rows(
        self,
        order: NDArray[np.uint32],
        centre: NDArray[np.float32],
        basis: Any | None,
        probe: Probe | None,
        ranges: Ranges | None,
    ) -> None:
        count = len(order)
        means = GroupMeans(ranges, self.dim) if ranges else None
        encode = functools.partial(
            _core.encode,
            seed=_SEED,
            centre=centre,
            basis=basis,
            row_length2=self.row_length2,
        )
        code_bytes = _core.code_record_bytes(self.dim)
        refine_bytes = _core.refine_record_bytes(self.dim)
        coarse_bytes = coarse_record_bytes(basis, self.dim)

        def writer(part: str, record: int, per_page: int) -> PagedFileWriter:
            return PagedFileWriter(
                self.folder / FILES[part],
                kind=part,
                page_bytes=self.page_bytes,
                record_bytes=record,
                per_page=per_page,
            )

        with (
            one_blas_thread(),
            writer("codes", code_bytes, self.page_bytes // code_bytes) as codes,
            writer("refine", refine_bytes, self.page_bytes // refine_bytes) as refines,
            writer("vectors", self.vector_bytes, 0) as vectors,
            contextlib.ExitStack() as optional,
            ThreadPoolExecutor(self.threads) as pool,
            ThreadPoolExecutor(1) as disk,
        ):
            coarse = None
            if self.coarse:
                per_page = self.page_bytes // coarse_bytes
                coarse = optional.enter_context(writer("coarse", coarse_bytes, per_page))
            written = [codes, refines, vectors, *([coarse] if coarse is not None else [])]

            def begin(start: int) -> tuple[NDArray[np.float32], list[Future[Any]]]:
                """Read a batch and have it coded, while the one before it is written."""
                batch = self._batch(self.rows[order[start : start + _BATCH_ROWS]])
                parts = np.array_split(batch, min(self.threads, len(batch)))
                return batch, [pool.submit(encode, part) for part in parts]

            coming = begin(0) if count else None
            synced: list[Future[None]] = []
            for start in range(0, count, _BATCH_ROWS):
                assert coming is not None
                batch, coding = coming
                encoded = [part.result() for part in coding]
                meeting = None
                if probe is not None:
                    # Before the next is read: threads have work while this one reads and writes.
                    meeting = probe.take(batch, start, parts=self.threads, run=pool.map)
                following = start + _BATCH_ROWS
                coming = begin(following) if following < count else None
                for part in encoded:
                    codes.write_records(part[0])
                    refines.write_records(part[1])
                    if coarse is not None:
                        coarse.write_records(part[2])
                stored = batch.astype("<f2") if self.half else batch.astype("<f4", copy=False)
                vectors.write_records(stored.view(np.uint8))
                # The disk works meanwhile, so that `close` has little left to wait for. Where it
                # cannot keep up, there is one sync under way and no queue of them.
                if not synced or synced[-1].done():
                    synced.append(disk.submit(_sync, written))
                if means is not None:
                    means.take(batch, start)
                if meeting is not None:
                    meeting()
                self.progress("seal", min(following, count), count)
            for done in synced:
                done.result()
            infos = list(pool.map(PagedFileWriter.close, written))
            for part, info in zip(("codes", "refine", "vectors", "coarse"), infos, strict=False):
                self.infos[part] = info
        if ranges is not None and means is not None:
            self.infos["ranges"] = write_ranges(
                self.folder,
                ranges,
                means.means(),
                page_bytes=self.page_bytes,
                encode=encode,
            )
