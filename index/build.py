"""Build a segment from vectors: check them, link them with hnswlib, seal the graph.

hnswlib is the builder because it is the reference implementation of HNSW, well kept and free of
dependencies; its graph is read back from its own file, so that nothing is held twice.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError
from stoker.index.arguments import as_array, checked_heat, checked_threads, said, whole_number
from stoker.index.equal_rows import first_of_equals, with_equals
from stoker.index.exact import refuse_unusable, unit_rows
from stoker.index.failed_write import let_go
from stoker.index.generation import NoRoom
from stoker.index.hnsw_graph import HnswGraph
from stoker.index.hnswlib_file import read_hnswlib
from stoker.index.hub_rows import hubs_last
from stoker.index.ids import normalize_ids
from stoker.index.link_shift import link_shift
from stoker.index.seal import METRICS, BuildReport, Progress, seal_graph
from stoker.index.stored_graph import read_graph

__all__ = ["BuildReport", "build_segment", "check_vectors", "heat_by_row"]

DIM_MAX: Final = 4096
COUNT_MAX: Final = (1 << 32) - 2
_CHECK_ROWS: Final = 16_384
_LINK_ROWS: Final = 2_000
_SEED: Final = 100
_LINKS: Final = 16
# Of more rows than so many. Three million x 128, hnswlib, recall@10 of 0.95: 158 us a query by 16
# links, 98 by 24, for 3 % more linking and a tenth more bytes (index/BENCHMARKS.md).
_FEW_ROWS: Final = 1_000_000
_LINKS_OF_MANY: Final = 24

log = structlog.get_logger(__name__)


def check_vectors(vectors: Any) -> NDArray[Any]:
    """Return vectors as a float32 or float16 array, shape (n, dim), without copying either.

    Raises:
        InputError: wrong shape or kind, a dimension outside 1 to 4,096, or a value that is not
            finite or too long for its squared length to be (the first such row is named).
    """
    array = as_array(vectors, "vectors")
    if array.ndim != 2:
        raise InputError(f"vectors: expected shape (n, dim), found {array.shape}")
    count, dim = array.shape
    if not 1 <= dim <= DIM_MAX:
        raise InputError(f"vectors: expected 1 to {DIM_MAX} dimensions, found {dim}")
    if count > COUNT_MAX:
        raise InputError(f"vectors: expected at most {COUNT_MAX} rows, found {count}")
    if array.dtype not in (np.float32, np.float16):
        if array.dtype.kind not in "fiu":
            raise InputError(f"vectors: expected float32 or float16, found {array.dtype}")
        with np.errstate(over="ignore"):  # What overflows is refused below, with its row.
            array = array.astype(np.float32)
    for start in range(0, count, _CHECK_ROWS):
        refuse_unusable(np.ascontiguousarray(array[start : start + _CHECK_ROWS], np.float32), start)
    return array


def heat_by_row(heat: Mapping[Any, float] | None, ids: NDArray[Any]) -> NDArray[np.float32] | None:
    """Turn a mapping of id to weight into one weight per row; unknown ids are left out.

    Raises:
        InputError: a weight is negative or not finite.
    """
    if heat is None or not checked_heat(heat):
        return None
    rows = {row_id: i for i, row_id in enumerate(ids.tolist())}
    weights = np.zeros(len(ids), np.float32)
    for key, weight in heat.items():
        row = rows.get(key)
        if row is not None:
            weights[row] = weight
    return weights


def build_segment(
    path: Path | str,
    vectors: Any,
    ids: Any = None,
    *,
    metric: str = "cosine",
    m: int | None = None,
    ef_construction: int = 200,
    heat: Mapping[Any, float] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    graph_of: Path | str | None = None,
) -> BuildReport:
    """Build and seal a segment at ``path``.

    Args:
        path: Folder to make; must not exist.
        vectors: float32 or float16, shape (n, dim); may be a memory map. Stored as given, at unit
            length under cosine.
        ids: ``n`` integers or strings, all different; None means 0 ... n - 1.
        metric: "ip", "cosine" or "l2".
        m: Links per node and level (twice that on level 0), 2 to 128; None means 16, or 24 of
            more than a million rows, which take more links to find one another.
        ef_construction: Width of the walk that finds a new node's neighbors.
        heat: Weight per id; hot rows are sealed side by side.
        threads: Threads that link; None means one per processor.
        progress: Called with (what, done, total).
        graph_of: A sealed segment's folder whose rows ``vectors`` are, one for one: its links are
            taken instead of made, unless they are damaged, and only the order of the rows is new.

    Raises:
        InputError: see `check_vectors` and `ids.normalize_ids`; or ``path`` exists.
        NoRoom: the graph did not fit the disk; nothing is left of it.
    """
    if not isinstance(metric, str) or metric not in METRICS:
        raise InputError(f"metric: expected one of {', '.join(METRICS)}, found {said(metric)}")
    ef_construction = whole_number(ef_construction, "ef_construction")
    if m is not None and not 2 <= (m := whole_number(m, "m")) <= 128:
        raise InputError(f"m: expected 2 to 128, found {m}")
    if not 4 <= ef_construction <= 10_000:
        raise InputError(f"ef_construction: expected 4 to 10000, found {ef_construction}")
    threads = checked_threads(threads)
    target = Path(path)
    if target.exists():
        raise InputError(f"{target}: exists already; a segment is never overwritten")
    array = check_vectors(vectors)
    if m is None:
        m = _LINKS if len(array) <= _FEW_ROWS else _LINKS_OF_MANY
    row_ids = normalize_ids(ids, len(array))
    weights = heat_by_row(heat, row_ids)
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if len(array) == 0:
        return seal_graph(target, _empty_graph(array.shape[1], m), array, row_ids, metric=metric)
    graph = _lent_graph(Path(graph_of), array.shape) if graph_of is not None else None
    if graph is not None:
        return seal_graph(
            target,
            graph,
            array,
            row_ids,
            metric=metric,
            heat=weights,
            ef_construction=ef_construction,
            threads=threads,
            progress=progress,
            graph_s=time.monotonic() - started,
        )
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.graph.", dir=target.parent))
    try:
        file = scratch / "graph.hnsw"
        first = first_of_equals(array, metric=metric, group_max=m // 2)
        _link(array, first, file, metric, m, ef_construction, threads, progress)
        try:
            graph = read_hnswlib(file, dim=array.shape[1])
        except CorruptError as error:
            # hnswlib does not notice that a disk is full; its file, just written, is then short.
            raise NoRoom(f"{target}: the graph could not be written whole: {error}") from error
        if first is not None:
            graph = with_equals(graph, first)
        linked_s = time.monotonic() - started
        return seal_graph(
            target,
            graph,
            array,
            row_ids,
            metric=metric,
            heat=weights,
            source_rows=graph.labels.astype(np.int64),
            ef_construction=ef_construction,
            threads=threads,
            progress=progress,
            graph_s=linked_s,
        )
    except BaseException as error:
        graph = None
        let_go(error)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _lent_graph(folder: Path, shape: tuple[int, ...]) -> HnswGraph | None:
    """The graph of the segment in ``folder``; None where it is damaged: links can be made anew."""
    try:
        graph = read_graph(folder)
    except CorruptError as error:
        log.warning("index.links_made_anew", path=str(folder), reason=str(error))
        return None
    if (graph.count, graph.dim) != shape:
        raise InputError(f"{folder}: {graph.count} rows of {graph.dim}, the vectors are {shape}")
    return graph


def _empty_graph(dim: int, m: int) -> HnswGraph:
    return HnswGraph(
        count=0,
        dim=dim,
        m=m,
        m0=2 * m,
        entry_point=-1,
        max_level=-1,
        levels=np.empty(0, np.uint8),
        level0_counts=np.empty(0, np.uint16),
        level0=np.empty((0, 2 * m), np.uint32),
        upper=[],
        labels=np.empty(0, np.uint64),
        vectors=None,
        deleted=np.empty(0, np.bool_),
    )


def _link(
    vectors: NDArray[Any],
    first: NDArray[np.int64] | None,
    file: Path,
    metric: str,
    m: int,
    ef_construction: int,
    threads: int | None,
    progress: Progress | None,
) -> None:
    """Link the vectors with hnswlib and save its index; labels are row numbers.

    Of rows that ``first`` says to be equal, one only. Under the inner product the file's vectors
    lack what all have in common (`link_shift`).
    """
    import hnswlib

    dim = vectors.shape[1]
    rows = np.arange(len(vectors))
    if first is not None:
        rows = rows[first == rows]
    if metric == "l2":
        rows = hubs_last(vectors, rows, most=2 * m)
    shift = link_shift(vectors, rows) if metric == "ip" else None
    count = len(rows)
    index = hnswlib.Index(space="l2" if metric == "l2" else "ip", dim=dim)
    index.init_index(max_elements=count, M=m, ef_construction=ef_construction, random_seed=_SEED)
    workers = threads or len(os.sched_getaffinity(0))
    for start in range(0, count, _LINK_ROWS):
        labels = rows[start : start + _LINK_ROWS]
        batch = np.ascontiguousarray(vectors[labels], np.float32)
        if metric == "cosine":
            batch = unit_rows(batch)
        if shift is not None:
            batch = batch - shift
        index.add_items(batch, labels, num_threads=workers)
        if progress is not None:
            progress("link", min(start + _LINK_ROWS, count), count)
    index.save_index(str(file))
