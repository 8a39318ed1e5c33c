"""Rebuilds a collection whose CURRENT or document store is damaged, out of all that can be read.

The result is one segment of what only segments had, and a new document store whose documents with
vectors of their own follow it as changes; the caller's next merge seals those too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from stoker.errors import CorruptError, InputError, StokerError
from stoker.index.collection_build import generation_of_segment
from stoker.index.delta import Key
from stoker.index.document_values import SEPARATOR, Change
from stoker.index.documents import DocumentStore
from stoker.index.exact import METRICS
from stoker.index.generation import (
    DEAD_NAME,
    DOCUMENTS_NAME,
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    IdKind,
    NewerFormat,
    SegmentEntry,
    fsync_folder,
    read_current,
    write_current,
)
from stoker.index.merge import Progress, seal_rows
from stoker.index.salvage import RepairReport, batches, salvage_segment, salvaged_rows
from stoker.index.sealed import NativeEngine, SealedSegment, document_key
from stoker.index.settings import IndexSettings
from stoker.index.verify import stored_dim
from stoker.index.view import stored_dead

_SEGMENT_NUMBER: Final = re.compile(r"s(\d{8})")
_DEAD_NUMBER: Final = re.compile(r"(\d+)-")
_DAMAGED_NAME: Final = f"{DOCUMENTS_NAME}.damaged"
_FRESH_NAME: Final = f"{DOCUMENTS_NAME}.repaired"


def rebuild_all(folder: Path, metric: str | None, report: RepairReport, progress: Progress) -> None:
    """Put together a new generation: one segment, and the documents with vectors of their own.

    Which of several versions of a document is the newest is decided by the document store where it
    has one, then by the youngest segment.
    """
    generation, known, dead = _generation_again(folder, metric)
    documents, deleted = _documents_again(folder, generation, report, progress)
    try:
        own = {(c.tenant, c.id) for c in documents.changes(0, bodies=False) if c.vector is not None}
        kind: IdKind = generation.id_kind or ("str" if documents.id_kind() is str else "int")
        base = dataclasses.replace(generation, change_offset=0, id_kind=generation.id_kind or kind)
        settled = own | deleted
        unnamed = _Unnamed(set(settled))
        rows = _all_rows(base, known, dead, settled, kind, unnamed, report)
        sealed, _ = seal_rows(
            folder,
            base,
            rows,
            documents,
            id_kind=kind,
            engine=NativeEngine(),
            settings=IndexSettings(),
            memory_bytes=0,
            heat=None,
            progress=progress,
        )
        bodies_only = _first_with_vector(documents)
        report.rows_from_documents += len(own)
        entries: tuple[SegmentEntry, ...] = ()
        unnamed.rows -= _note_unsealed(documents, bodies_only, sealed, report)
        report.rows_lost += max(0, unnamed.rows - len(unnamed.elsewhere))
        if sealed is not None:
            entries = (dataclasses.replace(sealed.entry, sealed_offset=bodies_only),)
            sealed.release()
        next_generation = dataclasses.replace(base, change_offset=bodies_only, segments=entries)
    finally:
        documents.close()
    _put_documents(folder)
    for name in (FILTERS_NAME, DEAD_NAME):
        (folder / name).mkdir(exist_ok=True)
    write_current(folder, next_generation)
    report.actions.append(
        f"published generation {next_generation.number}: one segment of "
        f"{entries[0].count if entries else 0} rows, {len(own)} documents with their own vectors"
    )


def _generation_again(
    folder: Path, metric: str | None
) -> tuple[Generation, list[tuple[Path, SegmentEntry]], dict[str, BitMap]]:
    """Return the generation to publish, still empty, and the segments found, youngest first."""
    try:
        current = read_current(folder)
        entries = sorted(current.segments, key=lambda entry: entry.name, reverse=True)
        places = [(folder / SEGMENTS_NAME / entry.name, entry) for entry in entries]
        dead = {entry.name: stored_dead(folder, current, entry) or BitMap() for entry in entries}
        return dataclasses.replace(current, number=current.number + 1, segments=()), places, dead
    except CorruptError:
        pass
    places = []
    first: Generation | None = None
    for place in sorted((folder / SEGMENTS_NAME).glob("s*"), reverse=True):
        try:
            alone = generation_of_segment(place, name=place.name)
        except NewerFormat:
            raise  # What is left out here is lost with its segment.
        except StokerError:
            continue
        first = first or alone
        places.append((place, _naming_of(place, alone)))
    numbers = [0]
    for name in itertools.chain(
        (place.name for place in (folder / SEGMENTS_NAME).glob("s*")),
        (place.name for place in (folder / DEAD_NAME).glob("*")),
    ):
        match = _SEGMENT_NUMBER.match(name) or _DEAD_NUMBER.match(name)
        numbers.append(int(match.group(1)) if match else 0)
    if first is None:
        if metric not in METRICS:
            raise InputError(
                f"{folder}: neither CURRENT nor any segment says how vectors are compared; pass "
                f"--metric ({', '.join(METRICS)})"
            )
        dim = stored_dim(folder / DOCUMENTS_NAME)
        first = Generation(0, 0, dim, metric, None, 16, 200, "float32", ())
    named = any(entry.naming == "tenant" for _, entry in places)
    kind = None if named else first.id_kind
    number = max(numbers) + 2  # One may have been published whose files are gone.
    return dataclasses.replace(first, number=number, id_kind=kind, segments=()), places, {}


def _naming_of(place: Path, alone: Generation) -> SegmentEntry:
    """Tell from a segment's ids how it names documents."""
    entry = alone.segments[0]
    salvaged = salvage_segment(
        place,
        count=entry.count,
        dim=alone.dim,
        vector_dtype=alone.vector_dtype,
        name_kind=alone.id_kind or "int",
    )
    names = salvaged.names
    if names is not None and names.dtype == object and all(SEPARATOR in name for name in names):
        return dataclasses.replace(entry, naming="tenant")
    return entry


def _documents_again(
    folder: Path, generation: Generation, report: RepairReport, progress: Progress
) -> tuple[DocumentStore, set[Key]]:
    """Copy all readable documents to a new store: first those without a vector, then the others.

    Returns:
        The new store, open, beside the old one, and the documents known to be deleted.
    """
    target = folder / _FRESH_NAME
    old: DocumentStore | None = None
    offset = generation.change_offset
    try:
        old = DocumentStore.open(_old_documents(folder), dim=generation.dim, writable=False)
        offset = max(offset, old.change_offset)
    except NewerFormat:
        raise
    except StokerError as error:
        report.actions.append(f"documents: lost ({error})")
    for leftover in folder.glob(f"{target.name}*"):
        leftover.unlink()
    DocumentStore.create(target, dim=generation.dim, change_offset=offset)
    fresh = DocumentStore.open(target, dim=generation.dim, writable=True)
    deleted: set[Key] = set()
    if old is None:
        return fresh, deleted
    try:
        kept = unread = 0
        for with_vector in (False, True):
            readable = _Readable(old)
            for part in batches(iter(readable)):
                progress("documents", kept, max(1, offset))
                deleted.update((c.tenant, c.id) for c in part if c.deleted)
                wanted = [
                    c for c in part if not c.deleted and (c.vector is not None) == with_vector
                ]
                if wanted:
                    fresh.write(wanted)
                    kept += len(wanted)
            unread = readable.unread
        report.actions.append(f"documents: {kept} kept, {unread} rows could not be read")
    except BaseException:
        fresh.close()
        raise
    finally:
        old.close()
    return fresh, deleted


class _Readable:
    """Iterates over the changes of a damaged store, stepping over what cannot be read."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self.unread = 0

    def __iter__(self) -> Iterator[Change]:
        after: int | None = 0
        part = None
        while after is not None:
            try:
                for change in self._store.changes(after, part=part):
                    after = change.change_offset
                    yield change
                return
            except CorruptError as error:
                failed: int | None = getattr(error, "change_offset", None)
                if failed is not None:
                    yield from self._without_vector(failed)
                    after = failed
                elif part is None:
                    part = 1  # The file itself is broken somewhere in the batch: look row by row.
                else:
                    self.unread += 1
                    after = self._store.next_readable(after)

    def _without_vector(self, offset: int) -> Iterator[Change]:
        """Yield the row at ``offset`` if only its vector is damaged."""
        try:
            yield from self._store.changes(offset - 1, offset, vectors=False)
        except CorruptError:
            self.unread += 1


def _first_with_vector(store: DocumentStore) -> int:
    """Return the offset before the first change with a vector: up to it all is sealed."""
    for change in store.changes(0, bodies=False):
        if change.vector is not None:
            return change.change_offset - 1
    return store.change_offset


def _note_unsealed(
    store: DocumentStore, upto: int, sealed: SealedSegment | None, report: RepairReport
) -> int:
    """Count documents whose text is there and whose vector nothing has any more.

    Returns:
        How many.
    """
    known = set(report.lost)
    before = report.rows_lost
    for part in batches(store.changes(0, upto, vectors=False, bodies=False)):
        keys: list[Key] = [(change.tenant, change.id) for change in part]
        rows = sealed.rows_of(keys).tolist() if sealed is not None else [-1] * len(keys)
        report.note_lost(
            [key for key, row in zip(keys, rows, strict=True) if row < 0 and key not in known]
        )
    return report.rows_lost - before


@dataclasses.dataclass
class _Unnamed:
    """Rows of segments whose ids are lost.

    Attributes:
        elsewhere: Documents that are not lost and of which some of these rows may have been: those
            that need no segment. One that has a live row in a segment with ids had none here; where
            nothing says which rows are dead, any document of the others may have had one.
        rows: How many of these rows are not known to be dead.
    """

    elsewhere: set[Key]
    rows: int = 0


def _all_rows(
    generation: Generation,
    places: Sequence[tuple[Path, SegmentEntry]],
    dead: Mapping[str, BitMap],
    settled: set[Key],
    kind: IdKind,
    unnamed: _Unnamed,
    report: RepairReport,
) -> Iterator[tuple[Sequence[Key], NDArray[np.float32]]]:
    """Yield each document that is not ``settled`` from the youngest segment that has it whole."""
    lost: set[Key] = set()
    taken = set(settled)
    for place, entry in places:
        salvaged = salvage_segment(
            place,
            count=entry.count,
            dim=generation.dim,
            vector_dtype=generation.vector_dtype,
            name_kind="str" if entry.naming == "tenant" else kind,
        )
        if salvaged.names is None:
            report.actions.append(f"segment {entry.name}: its ids are lost")
            unnamed.rows += entry.count - len(dead.get(entry.name, ()))
            continue
        keys = [document_key(name, entry.naming, kind) for name in salvaged.names]
        if (gone := dead.get(entry.name)) is None:
            unnamed.elsewhere.update(keys)
        else:
            live = (key for row, key in enumerate(keys) if row not in gone)
            unnamed.elsewhere.difference_update(live)
        wanted = np.array([key not in taken for key in keys], dtype=np.bool_)
        wanted[np.frombuffer(dead.get(entry.name, BitMap()).to_array(), dtype=np.uint32)] = False
        yield from salvaged_rows(salvaged, keys, wanted, report)
        # An older version is no substitute for one that is damaged: it is stale.
        lost |= {keys[row] for row in np.flatnonzero(wanted & ~salvaged.whole)}
        taken.update(keys)
    report.note_lost(sorted(lost, key=str))


def _put_documents(folder: Path) -> None:
    """Put the new store in the old one's place, keeping that one for whoever wants to look.

    A write-ahead log stays with its own file: a new file must never see an old one's. Dying
    between two of the steps leaves what `_old_documents` finds again.
    """
    path = folder / DOCUMENTS_NAME
    Path(f"{path}-shm").unlink(missing_ok=True)
    if path.exists():
        (folder / f"{_DAMAGED_NAME}-wal").unlink(missing_ok=True)
        os.replace(path, folder / _DAMAGED_NAME)
    _keep_log_beside(folder)
    os.replace(folder / _FRESH_NAME, path)
    fsync_folder(folder)


def _keep_log_beside(folder: Path) -> None:
    log_path = folder / f"{DOCUMENTS_NAME}-wal"
    if log_path.exists():
        os.replace(log_path, folder / f"{_DAMAGED_NAME}-wal")


def _old_documents(folder: Path) -> Path:
    """Return the store to read: the one in place, or the one that a repair had moved away."""
    path = folder / DOCUMENTS_NAME
    if path.exists() or not (folder / _DAMAGED_NAME).exists():
        return path
    _keep_log_beside(folder)
    return folder / _DAMAGED_NAME
