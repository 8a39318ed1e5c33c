"""Makes collections: empty ones, and ones around a segment that was just built or imported."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from stoker.errors import InputError
from stoker.index.document_values import check_names
from stoker.index.documents import DocumentStore
from stoker.index.exact import METRICS
from stoker.index.folder_lock import remove_abandoned
from stoker.index.generation import (
    CURRENT_NAME,
    DEAD_NAME,
    DOCUMENTS_NAME,
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    IdKind,
    SegmentEntry,
    VectorDtype,
    fsync_folder,
    storage_error,
    write_current,
    write_durable,
)
from stoker.index.settings import IndexSettings

if TYPE_CHECKING:
    from stoker.index.seal import BuildReport

DIM_MAX: Final = 4_096
M_MIN: Final = 2
M_MAX: Final = 128
MANIFEST_NAME: Final = "manifest.json"
_FIRST_SEGMENT: Final = "s00000000"

Progress = Callable[[str, int, int], None]


def create_collection(
    path: Path | str,
    *,
    dim: int,
    metric: str = "cosine",
    m: int = 16,
    ef_construction: int = 200,
    vector_dtype: VectorDtype = "float32",
) -> None:
    """Make an empty collection at ``path``, which must not exist or be an empty folder.

    Raises:
        InputError: something is there, or an argument is out of range.
    """
    generation = _generation(dim, metric, m, ef_construction, vector_dtype, None, ())
    with _published(Path(path)) as temporary:
        DocumentStore.create(temporary / DOCUMENTS_NAME, dim=dim)
        write_current(temporary, generation)


def build_collection(
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
    documents: Callable[[DocumentStore], None] | None = None,
) -> BuildReport:
    """Build a collection of one sealed segment.

    Args:
        path: Must not exist or be an empty folder; published by one rename.
        vectors: float32 or float16, shape (n, dim); may be a memory map.
        ids: n integers or strings, all different; None means 0 ... n - 1.
        metric: As `stoker.index.build.build_segment`, which takes the arguments up to
            ``progress`` and says what they mean.
        documents: Writes texts and metadata of these ids (default tenant) to the store that it is
            given, in as many `DocumentStore.write` calls as it likes. They count as sealed, so
            their changes need carry no vector.

    Raises:
        InputError: see `build_segment`; or something is at ``path``.
    """
    from stoker.index.build import build_segment

    if ids is not None:
        check_names(ids)

    def build(target: Path) -> BuildReport:
        return build_segment(
            target,
            vectors,
            ids,
            metric=metric,
            m=m,
            ef_construction=ef_construction,
            heat=heat,
            threads=threads,
            progress=progress,
        )

    return collection_around(path, build, ef_construction=ef_construction, documents=documents)


def collection_around(
    path: Path | str,
    build: Callable[[Path], BuildReport],
    *,
    ef_construction: int,
    documents: Callable[[DocumentStore], None] | None = None,
) -> BuildReport:
    """Make a collection around the segment that ``build`` seals at the path it is given.

    Args:
        path: Must not exist or be an empty folder; published by one rename.
        build: Seals a segment of plain ids and returns its report. Later merges link as many
            neighbors as it has.
        ef_construction: Candidates in later merges.
        documents: See `build_collection`.
    """
    with _published(Path(path)) as temporary:
        folder = temporary / SEGMENTS_NAME / _FIRST_SEGMENT
        report = build(folder)
        found = generation_of_segment(folder, name=_FIRST_SEGMENT)
        DocumentStore.create(temporary / DOCUMENTS_NAME, dim=found.dim)
        offset = 0
        entry = found.segments[0]
        # Only a store that was written keeps a log, whose files readers then leave beside it.
        store = DocumentStore.open(
            temporary / DOCUMENTS_NAME, dim=found.dim, writable=documents is not None
        )
        try:
            if documents is not None:
                documents(store)
                offset = store.change_offset
            if entry.count:
                _write_filters(folder, entry, store, found.id_kind or "int")
        finally:
            store.close()
        entry = dataclasses.replace(entry, sealed_offset=offset)
        generation = dataclasses.replace(
            found,
            change_offset=offset,
            ef_construction=ef_construction,
            id_kind=found.id_kind if entry.count else None,
            segments=(entry,) if entry.count else (),
        )
        write_current(temporary, generation)
    return dataclasses.replace(report, path=str(path))


def _write_filters(folder: Path, entry: SegmentEntry, store: DocumentStore, kind: IdKind) -> None:
    """Build the segment's filter index now, or the first filtered search would have to."""
    from stoker.index.sealed import NativeEngine, SealedSegment, build_filters

    sealed = SealedSegment.open(
        folder, entry, engine=NativeEngine(), memory_bytes=1, settings=IndexSettings()
    )
    try:
        data = build_filters(sealed, store, kind).to_bytes()
    finally:
        sealed.release()
    write_durable(folder.parent.parent / FILTERS_NAME / entry.name, data)


def is_bare_segment(folder: Path) -> bool:
    """Tell whether ``folder`` is a segment itself and no collection."""
    return (folder / MANIFEST_NAME).is_file() and not (folder / CURRENT_NAME).exists()


def generation_of_segment(folder: Path, *, name: str = "bare") -> Generation:
    """Return a generation of one segment only, from that segment's manifest.

    Raises:
        CorruptError: the manifest is damaged.
    """
    from stoker.index.manifest import Manifest

    manifest = Manifest.read(folder)
    return _generation(
        manifest.dim,
        manifest.metric,
        max(2, manifest.m),
        max(4, manifest.ef_construction),
        cast(VectorDtype, manifest.vector_dtype),
        cast(IdKind, manifest.id_kind),
        (SegmentEntry(name, "plain", manifest.count, 0),),
    )


def _generation(
    dim: int,
    metric: str,
    m: int,
    ef_construction: int,
    vector_dtype: VectorDtype,
    id_kind: IdKind | None,
    segments: tuple[SegmentEntry, ...],
) -> Generation:
    if not 1 <= dim <= DIM_MAX:
        raise InputError(f"dim: expected 1 to {DIM_MAX}, found {dim}")
    if metric not in METRICS:
        raise InputError(f"metric: expected one of {', '.join(METRICS)}, found {metric!r}")
    if not M_MIN <= m <= M_MAX:
        raise InputError(f"m: expected {M_MIN} to {M_MAX}, found {m}")
    if not 4 <= ef_construction <= 10_000:
        raise InputError(f"ef_construction: expected 4 to 10000, found {ef_construction}")
    if vector_dtype not in ("float32", "float16"):
        raise InputError(f"vector_dtype: expected float32 or float16, found {vector_dtype!r}")
    return Generation(
        number=1,
        change_offset=0,
        dim=dim,
        metric=metric,
        id_kind=id_kind,
        m=m,
        ef_construction=ef_construction,
        vector_dtype=vector_dtype,
        segments=segments,
    )


@contextlib.contextmanager
def _published(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, and put it at ``folder`` by one rename when the block succeeds."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists already; an index is never overwritten")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    held = -1
    try:
        remove_abandoned(folder.parent, f".{glob.escape(folder.name)}.*.new")
        held = _made_and_held(temporary)
        for name in (SEGMENTS_NAME, FILTERS_NAME, DEAD_NAME):
            (temporary / name).mkdir()
        yield temporary
        fsync_folder(temporary)
        os.rename(temporary, folder)
        fsync_folder(folder.parent)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        if held >= 0:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(held)


def _made_and_held(temporary: Path) -> int:
    """Make a folder and lock it; return what holds the lock. Nobody ever sees it unlocked."""
    apart = temporary.with_suffix(".make")
    apart.mkdir(parents=True, exist_ok=True)
    held = os.open(apart, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.rename(apart, temporary)
    except BaseException:
        os.close(held)
        raise
    return held
