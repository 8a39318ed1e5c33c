"""Finds what is damaged in an index: every checksum of every file, every row of the documents."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stoker.errors import CorruptError, InputError, StokerError
from stoker.index.collection_build import MANIFEST_NAME, is_bare_segment
from stoker.index.documents import DocumentStore, check_version
from stoker.index.filter_index import FilterIndex
from stoker.index.generation import (
    CURRENT_NAME,
    DOCUMENTS_NAME,
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    NewerFormat,
    SegmentEntry,
    dead_path,
    read_current,
    refuse_unread,
)

Progress = Callable[[str, int, int], None]
_LISTED_MAX: Final = 10_000


@dataclasses.dataclass(frozen=True)
class Damage:
    """One thing that is not as it was written.

    Attributes:
        file: The file, relative to the index.
        page: The page of that file, None where the whole file is meant.
        what: What was expected and found.
        derived: Whether the file only repeats what others say: searches are right without it,
            after a slower open.
        segment: The segment that it belongs to, None for the collection's own files.
    """

    file: str
    page: int | None
    what: str
    derived: bool = False
    segment: str | None = None


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` read and found.

    Attributes:
        path: The index.
        kind: "collection" or "segment".
        generation: Number of the generation that was checked, None where CURRENT is damaged.
        segments: Segments checked.
        bytes_checked: Bytes of all files read.
        damage: Everything found, at most 10,000 entries.
    """

    path: str
    kind: str
    generation: int | None
    segments: tuple[str, ...]
    bytes_checked: int
    damage: tuple[Damage, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing was found."""
        return not self.damage

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "whole": self.whole}


def verify(path: Path | str, *, progress: Progress | None = None) -> VerifyReport:
    """Read all of an index and check everything that has a checksum. Changes nothing.

    Args:
        path: A collection's folder, or a bare segment's.
        progress: Called with (file, done, total) before each file.

    Raises:
        InputError: no such folder, or nothing in it that could be an index.
        NewerFormat: a newer Stoker wrote a part of it.
        UnavailableError: a part may not be read now, or not by us.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    step = progress or (lambda what, done, total: None)
    damage: list[Damage] = []
    if is_bare_segment(folder):
        damage += segment_damage(folder, None, prefix="", progress=step)
        return _report(folder, "segment", None, (folder.name,), damage)
    if not (folder / SEGMENTS_NAME).is_dir() and not (folder / CURRENT_NAME).exists():
        raise InputError(f"{folder}: expected an index, found neither CURRENT nor {MANIFEST_NAME}")
    generation: Generation | None = None
    try:
        generation = read_current(folder)
    except CorruptError as error:
        refuse_unread(folder, error)
        damage.append(Damage(CURRENT_NAME, None, str(error)))
    if generation is not None:
        for entry in generation.segments:
            place = folder / SEGMENTS_NAME / entry.name
            prefix = f"{SEGMENTS_NAME}/{entry.name}/"
            damage += segment_damage(place, entry, prefix=prefix, progress=step)
            damage += _derived_damage(folder, generation, entry)
    step(DOCUMENTS_NAME, 0, 1)
    damage += documents_damage(folder, generation)
    names = tuple(entry.name for entry in generation.segments) if generation is not None else ()
    number = generation.number if generation is not None else None
    return _report(folder, "collection", number, names, damage)


def _report(
    folder: Path, kind: str, number: int | None, names: tuple[str, ...], damage: list[Damage]
) -> VerifyReport:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return VerifyReport(str(folder), kind, number, names, size, tuple(damage[:_LISTED_MAX]))


def segment_damage(
    folder: Path, entry: SegmentEntry | None, *, prefix: str, progress: Progress
) -> list[Damage]:
    """Check every file and page of one segment."""
    from stoker.index.manifest import FILES, OPTIONAL, Manifest
    from stoker.index.paged_file import PagedFile, SegmentFileCorrupt

    name = folder.name
    manifest = None
    damage: list[Damage] = []
    try:
        manifest = Manifest.read(folder)
        if entry is not None and manifest.count != entry.count:
            damage.append(
                Damage(
                    prefix + MANIFEST_NAME,
                    None,
                    f"expected {entry.count} rows, found {manifest.count}: another segment",
                    segment=name,
                )
            )
    except CorruptError as error:
        refuse_unread(folder, error)
        damage.append(Damage(prefix + MANIFEST_NAME, None, str(error), segment=name))
    files = dict(FILES) if manifest is None else manifest.files
    if manifest is None:
        files = {
            part: file
            for part, file in files.items()
            if part not in OPTIONAL or (folder / file).exists()
        }
    for number, (part, file_name) in enumerate(files.items()):
        progress(prefix + file_name, number, len(files))
        if manifest is not None and manifest.count == 0 and not (folder / file_name).exists():
            continue
        try:
            file = PagedFile(folder / file_name, kind=part)
            if manifest is not None and file.info.table_crc != manifest.file_crcs[part]:
                raise SegmentFileCorrupt(
                    f"expected the file with checksum {manifest.file_crcs[part]:08x}, found "
                    f"{file.info.table_crc:08x}: it is another segment's",
                    path=folder / file_name,
                )
            for page in file.damaged_pages():
                damage.append(
                    Damage(prefix + file_name, page, "the page fails its checksum", segment=name)
                )
        except CorruptError as error:
            refuse_unread(folder / file_name, error)
            damage.append(Damage(prefix + file_name, None, str(error), segment=name))
    return damage


def _derived_damage(folder: Path, generation: Generation, entry: SegmentEntry) -> list[Damage]:
    """Check what could be made anew: a segment's filter index and its dead rows."""
    found = []
    path = folder / FILTERS_NAME / entry.name
    if path.exists():
        try:
            index = FilterIndex.from_bytes(path.read_bytes(), str(path))
            if index.count != entry.count:
                raise CorruptError(f"{path}: expected {entry.count} rows, found {index.count}")
        except (CorruptError, OSError) as error:
            refuse_unread(path, error)
            name = f"{FILTERS_NAME}/{entry.name}"
            found.append(Damage(name, None, str(error), derived=True, segment=entry.name))
    if entry.dead_crc32 is not None:
        path = dead_path(folder, generation.number, entry.name)
        name = str(path.relative_to(folder))
        try:
            crc = zlib.crc32(path.read_bytes())
        except OSError as error:
            refuse_unread(path, error)
            what = f"missing or unreadable: {error.strerror}"
            found.append(Damage(name, None, what, derived=True, segment=entry.name))
        else:
            if crc != entry.dead_crc32:
                what = f"expected checksum {entry.dead_crc32:08x}, found {crc:08x}"
                found.append(Damage(name, None, what, derived=True, segment=entry.name))
    return found


def documents_damage(folder: Path, generation: Generation | None) -> list[Damage]:
    """Check the document store's structure and every row's checksum.

    Raises:
        NewerFormat: a newer Stoker wrote it: no damage.
        UnavailableError: it may not be read now, or not by us: no damage either.
    """
    path = folder / DOCUMENTS_NAME
    try:  # SQLite says of every reason that it could not open the file.
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        refuse_unread(path, error)
    if generation is None:
        # Without CURRENT nothing says how long the vectors are; the file itself does.
        try:
            dim = stored_dim(path)
        except NewerFormat:
            raise
        except StokerError as error:
            return [Damage(DOCUMENTS_NAME, None, str(error))]
    else:
        dim = generation.dim
    try:
        store = DocumentStore.open(path, dim=dim, writable=False)
    except NewerFormat:
        raise
    except StokerError as error:
        return [Damage(DOCUMENTS_NAME, None, str(error))]
    try:
        lines = store.damage()
        sealed = generation.change_offset if generation is not None else 0
        if store.change_offset < sealed:
            lines.append(
                f"{path}: expected changes up to {sealed} at least, found {store.change_offset}"
            )
        return [Damage(DOCUMENTS_NAME, None, line) for line in lines]
    finally:
        store.close()


def stored_dim(path: Path) -> int:
    """Return the vectors' dimensions as documents.db states them.

    Raises:
        CorruptError: it cannot be read.
        NewerFormat: a newer Stoker wrote it.
    """
    import sqlite3

    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as connection:
            check_version(path, connection)
            row = connection.execute("SELECT value FROM meta WHERE key = 'dim'").fetchone()
            if row is not None and isinstance(row[0], int) and 1 <= row[0] <= 4_096:
                return row[0]
    except sqlite3.Error as error:
        raise CorruptError(f"{path}: {error}") from error
    raise CorruptError(f"{path}: it does not state the vectors' dimensions")
