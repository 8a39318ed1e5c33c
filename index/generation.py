"""CURRENT: the one small file that says which sealed segments serve now.

It is replaced by write, fsync, rename, fsync of the folder, so that a reader finds the old
generation or the new one, whole, whatever dies in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, Final, Literal, cast

import orjson

from stoker.errors import CapacityError, CorruptError, InputError, StokerError, UnavailableError
from stoker.index.exact import METRICS, Metric
from stoker.index.failpoint import failpoint

CURRENT_NAME: Final = "CURRENT"
SEGMENTS_NAME: Final = "segments"
DOCUMENTS_NAME: Final = "documents.db"
FILTERS_NAME: Final = "filters"
DEAD_NAME: Final = "dead"

_FORMAT: Final = 1
_BYTES_MAX: Final = 1 << 20
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

IdKind = Literal["int", "str"]
VectorDtype = Literal["float32", "float16"]
Naming = Literal["plain", "tenant"]
"""How a segment names its rows: the id alone (all rows of the default tenant), or with tenant."""


class GenerationCorrupt(CorruptError):
    """CURRENT is missing or damaged; `stoker repair` writes it anew from the segments."""


class NewerFormat(InputError):
    """A whole file that a newer Stoker wrote. No damage: nothing here may rewrite it."""

    def __init__(self, path: Path, found: int, known: str) -> None:
        super().__init__(
            f"{path}: format version {found}, this Stoker reads {known}: a newer one wrote it; "
            "upgrade this one"
        )


class NoRoom(CapacityError):
    """The disk is full: nothing changed, the old generation goes on serving."""


@dataclasses.dataclass(frozen=True)
class SegmentEntry:
    """One sealed segment of a generation.

    Attributes:
        name: Folder below ``segments/``.
        naming: How its rows are named.
        count: Rows.
        sealed_offset: The change up to which it was sealed; a document that changed later is dead
            in it. 0 for one built before there was a change log.
        dead_crc32: Checksum of ``dead/<generation>-<name>``, the rows known to be dead; None when
            there were none.
    """

    name: str
    naming: Naming
    count: int
    sealed_offset: int
    dead_crc32: int | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """The set of segments that serves, and what every later one inherits.

    Attributes:
        number: Rises by one with every switch.
        change_offset: Changes up to here are sealed; later ones are replayed on open.
        dim: Dimensions.
        metric: How vectors are compared.
        id_kind: Type of all ids, None while there was never one.
        m: HNSW neighbors of the segments that merges build.
        ef_construction: HNSW candidates of those builds.
        vector_dtype: How they store vectors.
        segments: Every live document is in exactly one of them, or in the delta.
    """

    number: int
    change_offset: int
    dim: int
    metric: Metric
    id_kind: IdKind | None
    m: int
    ef_construction: int
    vector_dtype: VectorDtype
    segments: tuple[SegmentEntry, ...]


def dead_path(folder: Path, generation: int, name: str) -> Path:
    """Return the file of rows known to be dead in one segment of one generation."""
    return folder / DEAD_NAME / f"{generation}-{name}"


def require_index(folder: Path) -> None:
    """Refuse a folder in which there never was an index.

    Raises:
        InputError: it has neither CURRENT nor anything that `stoker repair` could make one from.
    """
    segments = folder / SEGMENTS_NAME
    parts = (folder / CURRENT_NAME, folder / DOCUMENTS_NAME)
    if any(part.exists() for part in parts) or (segments.is_dir() and any(segments.iterdir())):
        return
    raise InputError(
        f"{folder}: no index is there: expected {CURRENT_NAME}, or a segment's files; `stoker "
        "index`, `stoker import` and `build_collection` make one"
    )


def read_current(folder: Path) -> Generation:
    """Read and check CURRENT.

    Raises:
        GenerationCorrupt: missing, damaged, or of a version that never was.
        NewerFormat: a newer Stoker wrote it.
    """
    path = folder / CURRENT_NAME
    try:
        # As much as there is: to make room for the most that may be takes longer than to read it.
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, _BYTES_MAX) + 1)
    except FileNotFoundError as error:
        raise GenerationCorrupt(f"{path}: missing") from error
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error
    if len(data) > _BYTES_MAX:
        raise GenerationCorrupt(f"{path}: expected at most {_BYTES_MAX} bytes")
    body, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % zlib.crc32(body):
        raise GenerationCorrupt(
            f"{path}: at byte {len(body) + 1}: expected the checksum {zlib.crc32(body):08x}, "
            f"found {rest[:9]!r}"
        )
    try:
        value = orjson.loads(body)
        version = value["format"]
        if not isinstance(version, int) or version <= _FORMAT:
            return _decode(value)
    except (ValueError, TypeError, KeyError) as error:
        raise GenerationCorrupt(f"{path}: {error!r}") from error
    raise NewerFormat(path, version, f"version {_FORMAT}")


def _decode(value: dict[str, Any]) -> Generation:
    if value["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, found {value['format']}")
    if value["metric"] not in METRICS or value["id_kind"] not in ("int", "str", None):
        raise ValueError("unknown metric or kind of id")
    if value["vector_dtype"] not in ("float32", "float16"):
        raise ValueError(f"unknown vector type {value['vector_dtype']!r}")
    entries = tuple(
        SegmentEntry(
            name=str(entry["name"]),
            naming=cast(Naming, entry["naming"]),
            count=int(entry["count"]),
            sealed_offset=int(entry["sealed_offset"]),
            dead_crc32=None if entry["dead_crc32"] is None else int(entry["dead_crc32"]),
        )
        for entry in value["segments"]
    )
    for entry in entries:
        if not _NAME.fullmatch(entry.name) or entry.naming not in ("plain", "tenant"):
            raise ValueError(f"impossible segment {entry}")
    return Generation(
        number=int(value["number"]),
        change_offset=int(value["change_offset"]),
        dim=int(value["dim"]),
        metric=value["metric"],
        id_kind=value["id_kind"],
        m=int(value["m"]),
        ef_construction=int(value["ef_construction"]),
        vector_dtype=value["vector_dtype"],
        segments=entries,
    )


def write_current(folder: Path, generation: Generation) -> None:
    """Publish ``generation``: when this returns it is what every later open finds.

    Raises:
        NoRoom: the disk is full; the old generation stands.
        UnavailableError: the device failed.
    """
    body = orjson.dumps({"format": _FORMAT, **dataclasses.asdict(generation)})
    write_durable(folder / CURRENT_NAME, body + b"\n%08x\n" % zlib.crc32(body), named=True)


def write_durable(path: Path, data: bytes, *, named: bool = False) -> None:
    """Replace ``path`` by ``data``, durably and as one step.

    Args:
        path: The file; its folder exists.
        data: All of its bytes.
        named: Whether this is the step that publishes, where crash tests stop.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if named:
            failpoint("generation.before_rename")
        os.rename(temporary, path)
        fsync_folder(path.parent)
        if named:
            failpoint("generation.after_rename")
    except OSError as error:
        with contextlib.suppress(OSError):  # A full disk gets its space back at once.
            temporary.unlink()
        raise storage_error(path, error) from error


def remove_stray(path: Path) -> None:
    """Remove what no generation names, if it is there: a file, or a folder in a file's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# The system's own, or the caller's rights: none says anything of what a file holds.
_NO_DAMAGE: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EAGAIN,
        errno.EACCES,
        errno.EPERM,
        errno.ETIMEDOUT,
    }
)


def refuse_unread(path: Path, error: BaseException) -> None:
    """Raise UnavailableError where ``error`` comes of a file that could not be read just now.

    A process out of files, or one that may not read them, would else call a whole index damaged,
    and a repair would give up what it cannot see.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_DAMAGE:
            what = Path(cause.filename) if isinstance(cause.filename, str) else path
            raise UnavailableError(f"{what}: {cause.strerror}") from error
        cause = cause.__cause__


REPLACED = (
    "not the file that was opened; was the index replaced? Open it again, or restart the server"
)


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from all others, whatever its path; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def refuse_replaced(path: Path, opened: tuple[int, int] | None) -> None:
    """Raise UnavailableError where another file lies at ``path`` than the one that was opened.

    Whoever puts a rebuilt index into the place of one that is served leaves us on the old files.
    What is read by its path is then no damage, and no answer either.
    """
    if (found := file_identity(path)) is not None and found != opened:
        raise UnavailableError(f"{path}: {REPLACED}")


def storage_error(path: Path, error: OSError) -> StokerError:
    """Return the error of ours that says what ``error`` means to the caller."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoRoom(f"{path}: {error.strerror}; free space and try again")
    return UnavailableError(f"{path}: {error.strerror or error}")
