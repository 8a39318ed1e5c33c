"""Merging: what changed, and segments worth rewriting, become one new sealed segment.

A merge reads one view, so it runs beside searches and changes. It writes everything new beside the
old and changes nothing that serves; only the collection's switch to the new generation does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.index.delta import Key
from stoker.index.document_values import DEFAULT_TENANT
from stoker.index.documents import DocumentStore
from stoker.index.failed_write import let_go
from stoker.index.failpoint import failpoint
from stoker.index.generation import (
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    IdKind,
    Naming,
    SegmentEntry,
    fsync_folder,
    remove_stray,
    storage_error,
    write_durable,
)
from stoker.index.sealed import SealedSegment, SegmentEngine, build_filters, segment_id
from stoker.index.settings import IndexSettings
from stoker.index.view import SegmentView, View, folder_bytes

_ROWS_STEP: Final = 8_192

Progress = Callable[[str, int, int], None]


class MergeCancelled(UnavailableError):
    """The collection was closed while it merged; nothing changed."""


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What one merge did.

    Attributes:
        generation: The generation that serves after it.
        merged: Whether anything was to do.
        rows: Rows of the new segment.
        rows_from_delta: Those of them that came from memory.
        segments_in: Sealed segments that it replaced.
        bytes_written: Bytes of the new segment.
        seconds: Time from start to switch.
        switch_s: The part of it in which changes had to wait.
        write_amplification: Rows written per row that came from memory.
    """

    generation: int
    merged: bool
    rows: int = 0
    rows_from_delta: int = 0
    segments_in: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    switch_s: float = 0.0

    @property
    def write_amplification(self) -> float:
        """Rows written for each row that came from memory."""
        return self.rows / self.rows_from_delta if self.rows_from_delta else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "write_amplification": self.write_amplification}


def choose(view: View, *, full: bool, settings: IndexSettings) -> list[SegmentView]:
    """Pick the segments that a merge rewrites together with the delta.

    The smallest first, as long as each is no larger than what is gathered so far: each row is then
    rewritten about log2(n) times in its life. Also any with too many dead rows, and the smallest
    ones while there are too many segments.
    """
    if full:
        return list(view.segments)
    gathered = view.rows.live_count
    chosen: list[SegmentView] = []
    left = len(view.segments)
    for segment in sorted(view.segments, key=lambda segment: segment.live_count):
        dead_ratio = len(segment.dead) / max(1, segment.sealed.entry.count)
        if (
            segment.live_count <= gathered
            or dead_ratio > settings.dead_ratio_max
            or left >= settings.segments_max
        ):
            chosen.append(segment)
            gathered += segment.live_count
            left -= 1
    return chosen


def has_work(view: View, chosen: Sequence[SegmentView]) -> bool:
    """Tell whether a merge of ``chosen`` would change anything."""
    if view.change_offset > view.generation.change_offset or len(chosen) > 1:
        return True
    return any(len(segment.dead) for segment in chosen)


def new_segment_name(folder: Path, generation: Generation) -> str:
    """Return a folder name that no segment has."""
    for attempt in range(1_000_000):
        name = f"s{generation.number + 1:08d}" + (f"-{attempt}" if attempt else "")
        if not (folder / SEGMENTS_NAME / name).exists():
            return name
    raise UnavailableError(f"{folder}: no free segment name")


def build_merged(
    folder: Path,
    view: View,
    chosen: Sequence[SegmentView],
    store: DocumentStore,
    *,
    id_kind: IdKind,
    engine: SegmentEngine,
    settings: IndexSettings,
    memory_bytes: int,
    heat: Mapping[Any, float] | None,
    progress: Progress,
) -> tuple[SealedSegment | None, int]:
    """Seal the live rows of ``chosen`` and of the delta; return the segment, open, and its bytes.

    None where no row lives.

    Raises:
        NoRoom: the disk is full; what was written is gone again.
        MergeCancelled: ``progress`` raised it.
    """
    return seal_rows(
        folder,
        dataclasses.replace(view.generation, change_offset=view.change_offset),
        _gather(view, chosen, id_kind, engine, progress),
        store,
        id_kind=id_kind,
        engine=engine,
        settings=settings,
        memory_bytes=memory_bytes,
        heat=heat,
        threads=settings.merge_threads,
        progress=progress,
        graph_of=_unchanged(view, chosen),
    )


def _unchanged(view: View, chosen: Sequence[SegmentView]) -> Path | None:
    """The one segment whose rows are all that is sealed anew, if that is so: links can stay."""
    if len(chosen) != 1 or view.rows.live_count or len(chosen[0].dead):
        return None
    return chosen[0].sealed.path


def seal_rows(
    folder: Path,
    generation: Generation,
    rows: Iterable[tuple[Sequence[Key], NDArray[np.float32]]],
    store: DocumentStore | None,
    *,
    id_kind: IdKind,
    engine: SegmentEngine,
    settings: IndexSettings,
    memory_bytes: int,
    heat: Mapping[Any, float] | None,
    threads: int | None = None,
    progress: Progress,
    graph_of: Path | None = None,
) -> tuple[SealedSegment | None, int]:
    """Seal documents into a new segment of the collection, which no generation names yet.

    Vectors pass through a file, so that this needs memory for the graph that is built and not for
    a second copy of the vectors.

    Args:
        folder: The collection.
        generation: The one before; says how to build, and up to which change ``rows`` are current.
        rows: Documents and their vectors, part by part; each document once.
        store: Their metadata, for filters.
        id_kind: Type of the ids.
        engine: Builds the segment.
        settings: The room's settings.
        memory_bytes: Budget of the new segment's pages.
        heat: Weight by (tenant, chunk id) or by id.
        threads: Threads that link; None means one per processor.
        progress: Called with (what, done, total).
        graph_of: A segment whose rows ``rows`` are, all of them and in order; it lends its links.

    Returns:
        The segment, open, and its bytes; (None, 0) without rows.

    Raises:
        NoRoom: the disk is full; what was written is gone again.
    """
    name = new_segment_name(folder, generation)
    target = folder / SEGMENTS_NAME / name
    spool = folder / SEGMENTS_NAME / f".{name}.vectors"
    keys: list[Key] = []
    vectors: NDArray[Any] | None = None
    sealed: SealedSegment | None = None
    try:
        with spool.open("wb") as file:
            for part, part_vectors in rows:
                file.write(part_vectors.astype(generation.vector_dtype).tobytes())
                keys += part
        if not keys:
            return None, 0
        naming: Naming = (
            "plain" if all(tenant == DEFAULT_TENANT for tenant, _ in keys) else "tenant"
        )
        vectors = np.memmap(
            spool, dtype=generation.vector_dtype, mode="r", shape=(len(keys), generation.dim)
        )
        names = _names(keys, naming, id_kind)
        failpoint("merge.before_build")
        engine.build(
            target,
            vectors,
            names,
            metric=generation.metric,
            m=generation.m,
            ef_construction=generation.ef_construction,
            heat=segment_heat(heat, keys, naming),
            threads=threads,
            progress=progress,
            graph_of=graph_of,
        )
        entry = SegmentEntry(name, naming, len(keys), generation.change_offset)
        failpoint("merge.before_filters")
        sealed = SealedSegment.open(
            target, entry, engine=engine, memory_bytes=memory_bytes, settings=settings
        )
        filters = build_filters(sealed, store, id_kind)
        write_durable(folder / FILTERS_NAME / name, filters.to_bytes())
        fsync_folder(folder / SEGMENTS_NAME)
        return sealed, folder_bytes(target)
    except BaseException as error:
        if sealed is not None:
            sealed.release()
        rows, vectors, sealed = (), None, None
        let_go(error)
        for leftover in (target, *target.parent.glob(f".{name}.*")):
            shutil.rmtree(leftover, ignore_errors=True)
        remove_stray(folder / FILTERS_NAME / name)
        if isinstance(error, OSError):
            raise storage_error(target, error) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            spool.unlink()


def _gather(
    view: View,
    chosen: Sequence[SegmentView],
    id_kind: IdKind,
    engine: SegmentEngine,
    progress: Progress,
) -> Iterator[tuple[Sequence[Key], NDArray[np.float32]]]:
    """Yield all live rows: documents and vectors, part by part."""
    total = sum(segment.live_count for segment in chosen) + view.rows.live_count
    done = 0
    for segment in chosen:
        alive = np.ones(segment.sealed.entry.count, dtype=np.bool_)
        alive[np.frombuffer(segment.dead.to_array(), dtype=np.uint32)] = False
        rows = np.flatnonzero(alive)
        vectors = engine.stored_vectors(segment.sealed.path, segment.sealed.segment)
        for start in range(0, rows.size, _ROWS_STEP):
            part = rows[start : start + _ROWS_STEP]
            progress("gather", done, total)
            yield segment.sealed.keys_at(part, id_kind), vectors[part]
            done += part.size
    rows = np.flatnonzero(view.rows.alive)
    for start in range(0, rows.size, _ROWS_STEP):
        part = rows[start : start + _ROWS_STEP]
        progress("gather", done, total)
        yield [view.rows.keys[row] for row in part.tolist()], view.rows.vectors[part]
        done += part.size
    progress("gather", total, total)


def _names(keys: Sequence[Key], naming: Naming, id_kind: IdKind) -> NDArray[Any]:
    names = [segment_id(key, naming) for key in keys]
    if naming == "plain" and id_kind == "int":
        return np.array(names, dtype=np.int64)
    found = np.empty(len(names), dtype=object)
    found[:] = names
    return found


def segment_heat(
    heat: Mapping[Any, float] | None, keys: Sequence[Key], naming: Naming
) -> dict[Any, float] | None:
    """Return heat by a segment's own ids, of the documents in ``keys`` only.

    Args:
        heat: Weight by (tenant, chunk id) or by id alone, which means the default tenant.
        keys: Documents of the segment.
        naming: How the segment names them.
    """
    if not heat:
        return None
    found = {}
    for key in keys:
        weight = heat_of(heat, key)
        if weight > 0:
            found[segment_id(key, naming)] = weight
    return found or None


def heat_of(heat: Mapping[Any, float], key: Key) -> float:
    """Return one document's weight; heat knows ids as text, an index perhaps as integers."""
    tenant, document_id = key
    weight = heat.get((tenant, str(document_id)))
    if weight is None and tenant == DEFAULT_TENANT:
        weight = heat.get(document_id)
    return float(weight) if weight is not None else 0.0
