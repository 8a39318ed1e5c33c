"""Rebuilds a damaged index from what is still there.

A segment whose vectors and ids are whole is linked anew from them; where its links are whole too,
and no row is outdated, it is sealed anew with those: codes and tables follow from the rest. A
vector that is lost comes from the documents, where they kept it; what neither has is lost and
reported. The new files are written beside the old and published like a merge's, so a repair that
dies can be run again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray
from pyroaring import BitMap

from stoker.errors import CorruptError, InputError
from stoker.index.collection import Collection
from stoker.index.collection_build import generation_of_segment, is_bare_segment
from stoker.index.delta import Key
from stoker.index.documents import DocumentStore
from stoker.index.generation import (
    DOCUMENTS_NAME,
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    IdKind,
    SegmentEntry,
    fsync_folder,
    read_current,
    remove_stray,
    write_current,
    write_durable,
)
from stoker.index.manifest import FILES
from stoker.index.merge import Progress, seal_rows
from stoker.index.rebuild import rebuild_all
from stoker.index.salvage import (
    RepairReport,
    Salvaged,
    batches,
    salvage_segment,
    salvaged_rows,
    stacked,
)
from stoker.index.sealed import (
    NativeEngine,
    SealedSegment,
    build_filters,
    document_key,
    segment_id,
)
from stoker.index.serving import LOCK_NAME, WriterBusy
from stoker.index.settings import IndexSettings
from stoker.index.verify import VerifyReport, verify
from stoker.index.view import open_segment_view, stored_dead, write_dead

log = structlog.get_logger(__name__)

# Parts of a segment that sealing makes from its vectors, its ids and its links.
_MADE_WHEN_SEALED: Final = ("codes", "refine", "coarse", "transform", "ranges")


def repair(
    path: Path | str, *, metric: str | None = None, progress: Progress | None = None
) -> RepairReport:
    """Verify an index and rebuild whatever is damaged.

    Args:
        path: A collection's folder, or a bare segment's. No process may have it open for writing.
        metric: Needed only when CURRENT and every segment's manifest are gone.
        progress: Called with (what, done, total).

    Raises:
        InputError: no such index, or the metric is needed.
        WriterBusy: a process has it open for writing.
        NoRoom: the disk is full; nothing was replaced.
        CorruptError: nothing is left to rebuild from.
    """
    folder = Path(path)
    step = progress or (lambda what, done, total: None)
    found = verify(folder, progress=step)
    report = RepairReport(str(folder))
    if found.whole:
        return report
    report.repaired = True
    if is_bare_segment(folder):
        _repair_bare(folder, found, report, step)
    else:
        lock = _locked(folder)
        try:
            own = {d.file for d in found.damage if d.segment is None}
            if own:
                rebuild_all(folder, metric, report, step)
            else:
                _rebuild_segments(folder, found, report, step)
        finally:
            os.close(lock)
        if own:
            # The documents' own vectors were put behind the new segment; seal them too.
            with Collection(folder, "rw", settings=IndexSettings(merge_rows=0)) as collection:
                collection.merge(full=True, progress=progress)
    report.whole = verify(folder, progress=step).whole
    log.info(
        "index.damage_repaired",
        path=str(folder),
        rows_from_segments=report.rows_from_segments,
        rows_from_documents=report.rows_from_documents,
        rows_lost=report.rows_lost,
    )
    return report


def _locked(folder: Path) -> int:
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise WriterBusy(f"{folder}: a process has it open for writing; stop it first") from error
    return lock


# -- a collection whose CURRENT and documents are whole --------------------------------------------


def _rebuild_segments(
    folder: Path, found: VerifyReport, report: RepairReport, progress: Progress
) -> None:
    """Replace each damaged segment by a new one, and write anew what is derived."""
    generation = read_current(folder)
    damaged = {d.segment for d in found.damage if not d.derived}
    store = DocumentStore.open(folder / DOCUMENTS_NAME, dim=generation.dim, writable=False)
    healthy: list[SealedSegment] = []
    placed: list[SealedSegment] = []
    try:
        kind = _id_kind(generation, store)
        for entry in generation.segments:
            if entry.name not in damaged:
                healthy.append(_opened(folder, entry))
        placed += healthy
        views = [
            open_segment_view(folder, generation, sealed.entry, sealed, store) for sealed in healthy
        ]
        # Segments whose ids are whole go first: what they hold needs no guessing, and the others
        # then take from the documents only what is nowhere else.
        salvaged = [
            (entry, _salvaged(folder, generation, entry, kind))
            for entry in generation.segments
            if entry.name in damaged
        ]
        replaced: list[SegmentEntry] = []
        for entry, rest in sorted(salvaged, key=lambda pair: pair[1].names is None):
            graph_of = None
            if rest.names is not None:
                keys, alive = _live_keys(entry, rest.names, store, kind)
                rows = _rows_again(entry, rest, keys, alive, store, report)
                if _links_hold(found, entry.name) and (alive & rest.whole).all():
                    graph_of = folder / SEGMENTS_NAME / entry.name
            else:
                dead = stored_dead(folder, generation, entry) or BitMap()
                rows = _rows_by_documents(generation, entry, len(dead), placed, store, report)
            sealed, _ = seal_rows(
                folder,
                generation,
                rows,
                store,
                id_kind=kind,
                engine=NativeEngine(),
                settings=IndexSettings(),
                memory_bytes=0,
                heat=None,
                progress=progress,
                graph_of=graph_of,
            )
            if sealed is not None:
                replaced.append(sealed.entry)
                placed.append(sealed)
            how = "linked anew" if graph_of is None else "sealed anew with its links"
            report.actions.append(
                f"segment {entry.name}: {how} as {replaced[-1].name}"
                if sealed is not None
                else f"segment {entry.name}: nothing of it was left"
            )
        for sealed in healthy:
            if any(d.segment == sealed.entry.name and FILTERS_NAME in d.file for d in found.damage):
                size = _write_filters(folder, sealed, store, kind)
                report.actions.append(f"filters of {sealed.entry.name}: built anew, {size} bytes")
        number = generation.number + 1
        entries = [write_dead(folder, number, view) for view in views] + replaced
        write_current(
            folder, dataclasses.replace(generation, number=number, segments=tuple(entries))
        )
        for name in damaged:
            shutil.rmtree(folder / SEGMENTS_NAME / str(name), ignore_errors=True)
            remove_stray(folder / FILTERS_NAME / str(name))
        report.actions.append(f"published generation {number}")
    finally:
        for sealed in placed or healthy:
            sealed.release()
        store.close()


def _write_filters(folder: Path, sealed: SealedSegment, store: DocumentStore, kind: IdKind) -> int:
    """Write a segment's filter index from the documents; return its bytes."""
    data = build_filters(sealed, store, kind).to_bytes()
    write_durable(folder / FILTERS_NAME / sealed.entry.name, data)
    return len(data)


def _opened(folder: Path, entry: SegmentEntry) -> SealedSegment:
    return SealedSegment.open(
        folder / SEGMENTS_NAME / entry.name,
        entry,
        engine=NativeEngine(),
        memory_bytes=1,
        settings=IndexSettings(),
    )


def _id_kind(generation: Generation, store: DocumentStore) -> IdKind:
    stored = store.id_kind()
    return generation.id_kind or ("str" if stored is str else "int")


def _salvaged(folder: Path, generation: Generation, entry: SegmentEntry, kind: IdKind) -> Salvaged:
    return salvage_segment(
        folder / SEGMENTS_NAME / entry.name,
        count=entry.count,
        dim=generation.dim,
        vector_dtype=generation.vector_dtype,
        name_kind="str" if entry.naming == "tenant" else kind,
    )


def _links_hold(found: VerifyReport, name: str | None) -> bool:
    """Whether all that is damaged of a segment (None: of a bare one) follows from the rest."""
    made = {FILES[part] for part in _MADE_WHEN_SEALED}
    hurt = [d for d in found.damage if name is None or (d.segment == name and not d.derived)]
    return all(Path(d.file).name in made for d in hurt)


def _live_keys(
    entry: SegmentEntry, names: NDArray[Any], store: DocumentStore, kind: IdKind
) -> tuple[list[Key], NDArray[np.bool_]]:
    """The document of each row of a segment, and which of the rows are not outdated."""
    changed = {
        (change.tenant, change.id)
        for change in store.changes(entry.sealed_offset, vectors=False, bodies=False)
    }
    keys = [document_key(name, entry.naming, kind) for name in names]
    return keys, np.array([key not in changed for key in keys], dtype=np.bool_)


def _rows_again(
    entry: SegmentEntry,
    salvaged: Salvaged,
    keys: Sequence[Key],
    alive: NDArray[np.bool_],
    store: DocumentStore,
    report: RepairReport,
) -> Iterator[tuple[Sequence[Key], NDArray[np.float32]]]:
    """Yield the live rows of a damaged segment whose ids are whole."""
    yield from salvaged_rows(salvaged, keys, alive, report)
    missing = {keys[row] for row in np.flatnonzero(alive & ~salvaged.whole).tolist()}
    yield from _from_documents(store, entry.sealed_offset, missing, report)


def _rows_by_documents(
    generation: Generation,
    entry: SegmentEntry,
    dead_count: int,
    placed: Sequence[SealedSegment],
    store: DocumentStore,
    report: RepairReport,
) -> Iterator[tuple[Sequence[Key], NDArray[np.float32]]]:
    """Yield what a segment whose ids are lost must have held: documents that are nowhere else."""
    found = 0
    for part in batches(store.changes(0, entry.sealed_offset)):
        alive = [change for change in part if not change.deleted]
        keys: list[Key] = [(change.tenant, change.id) for change in alive]
        offsets = np.array([change.change_offset for change in alive], dtype=np.int64)
        held = np.zeros(len(keys), dtype=np.bool_)
        for sealed in placed:
            # A row of a document that changed since is dead; what replaced it was here.
            held |= (sealed.rows_of(keys) >= 0) & (offsets <= sealed.entry.sealed_offset)
        rest = [change for change, known in zip(alive, held, strict=True) if not known]
        found += len(rest)
        report.note_lost([(c.tenant, c.id) for c in rest if c.vector is None])
        have = [change for change in rest if change.vector is not None]
        report.rows_from_documents += len(have)
        if have:
            yield [(change.tenant, change.id) for change in have], stacked(have)
    # Rows that never had a document cannot be named; those that changed since were dead.
    changed = sum(1 for _ in store.changes(generation.change_offset, vectors=False, bodies=False))
    report.rows_lost += max(0, entry.count - dead_count - found - changed)


def _from_documents(
    store: DocumentStore, upto: int, missing: set[Key], report: RepairReport
) -> Iterator[tuple[Sequence[Key], NDArray[np.float32]]]:
    """Yield the vectors of ``missing`` documents that the store has; the rest is lost."""
    if missing:
        for part in batches(store.changes(0, upto)):
            have = [c for c in part if (c.tenant, c.id) in missing and c.vector is not None]
            if have:
                keys = [(c.tenant, c.id) for c in have]
                missing -= set(keys)
                report.rows_from_documents += len(keys)
                yield keys, stacked(have)
    report.note_lost(sorted(missing, key=str))


# -- a bare segment --------------------------------------------------------------------------------


def _repair_bare(
    folder: Path, found: VerifyReport, report: RepairReport, progress: Progress
) -> None:
    """Link a bare segment's vectors anew, or seal them anew; what of them is lost is left out."""
    from stoker.index.build import build_segment

    alone = generation_of_segment(folder)
    entry = alone.segments[0]
    kind: IdKind = alone.id_kind or "int"
    salvaged = salvage_segment(
        folder, count=entry.count, dim=alone.dim, vector_dtype=alone.vector_dtype, name_kind=kind
    )
    if salvaged.names is None or salvaged.vectors is None:
        raise CorruptError(
            f"{folder}: its {'ids' if salvaged.names is None else 'vectors'} are lost, and a bare "
            "segment has no documents to take them from; build it again"
        )
    keys = [document_key(name, "plain", kind) for name in salvaged.names]
    report.rows_from_segments = int(salvaged.whole.sum())
    report.note_lost([keys[row] for row in np.flatnonzero(~salvaged.whole)])
    fresh = folder.with_name(f".{folder.name}.repaired")
    shutil.rmtree(fresh, ignore_errors=True)
    links_stay = _links_hold(found, None) and bool(salvaged.whole.all())
    build_segment(
        fresh,
        salvaged.vectors[salvaged.whole],
        np.array([segment_id(key, "plain") for key in keys], dtype=salvaged.names.dtype)[
            salvaged.whole
        ],
        metric=alone.metric,
        m=alone.m,
        ef_construction=alone.ef_construction,
        progress=progress,
        graph_of=folder if links_stay else None,
    )
    damaged = folder.with_name(f"{folder.name}.damaged")
    if damaged.exists():
        raise InputError(f"{damaged}: is in the way; move it and try again")
    os.replace(folder, damaged)
    os.replace(fresh, folder)
    fsync_folder(folder.parent)
    how = "sealed anew with its links" if links_stay else "linked anew"
    report.actions.append(f"{how}; the damaged segment is kept as {damaged.name}")
