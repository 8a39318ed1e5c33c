"""Reads what is still whole of a damaged segment: its rows' ids, every vector to be trusted.

Needs no manifest and no graph. A vector counts as whole when each page that it lies on matches the
checksum stored for that page; ids are all there or not at all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError
from stoker.index.delta import Key
from stoker.index.document_values import Change
from stoker.index.generation import IdKind, NewerFormat, VectorDtype, refuse_unread

_HEADER_BYTES: Final = 4_096
_PAGE_BYTES_MAX: Final = 1 << 20
_PAGES_STEP: Final = 1_024
_ROWS_STEP: Final = 4_096
_LOST_LISTED_MAX: Final = 1_000


@dataclasses.dataclass(frozen=True)
class Salvaged:
    """What a damaged segment still gives.

    Attributes:
        count: Its rows.
        names: The segment's own id of each row (int64, or str in an object array); None when lost.
        vectors: shape (count, dim), of the stored type, a view of the file; None when lost.
        whole: bool, shape (count,): rows whose vector can be trusted.
    """

    count: int
    names: NDArray[Any] | None
    vectors: NDArray[Any] | None
    whole: NDArray[np.bool_]


def salvage_segment(
    folder: Path, *, count: int, dim: int, vector_dtype: VectorDtype, name_kind: IdKind
) -> Salvaged:
    """Read what can be trusted; nothing here raises for damage.

    Args:
        folder: The segment.
        count: Its rows, from the generation that names it or from its manifest.
        dim: Dimensions.
        vector_dtype: How vectors are stored.
        name_kind: Type of the segment's own ids.

    Raises:
        NewerFormat: a newer Stoker wrote the ids.
        UnavailableError: a file may not be read now.
    """
    vectors, whole = stored_vectors(folder, count, dim, vector_dtype)
    return Salvaged(count, _names(folder, count, name_kind), vectors, whole)


def _names(folder: Path, count: int, name_kind: IdKind) -> NDArray[Any] | None:
    from stoker.index.ids import IdLayout, IdTable
    from stoker.index.manifest import FILES
    from stoker.index.paged_file import PagedFile

    path = folder / FILES["ids"]
    try:
        stream_bytes = PagedFile(path, kind="ids").info.record_count
        # by_row | text | keys, 8 a row | rows, 4 a row
        rest = stream_bytes - 12 * count
        if name_kind == "str":
            layout = IdLayout("str", "<u8", rest - 8 * (count + 1))
        else:
            layout = IdLayout("int", "<u4" if rest == 4 * count else "<i8", 0)
        if layout.text_bytes < 0:
            return None
        names: NDArray[Any] = IdTable(path, layout, count).ids_at(np.arange(count))
        return names
    except NewerFormat:
        raise  # No damage: its ids are not lost, we cannot read them.
    except (CorruptError, OSError, ValueError) as error:
        refuse_unread(path, error)
        return None


def stored_vectors(
    folder: Path, count: int, dim: int, vector_dtype: VectorDtype
) -> tuple[NDArray[Any] | None, NDArray[np.bool_]]:
    """Map a segment's file of vectors, checking each page against its checksum.

    Returns:
        The vectors, shape (count, dim), of the stored type, a view of the file, or None when it is
        unusable; and which rows can be trusted, bool, shape (count,).
    """
    from stoker.index.manifest import FILES

    none = np.zeros(count, dtype=np.bool_)
    path = folder / FILES["vectors"]
    row_bytes = dim * np.dtype(vector_dtype).itemsize
    try:
        size = path.stat().st_size
        raw: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        refuse_unread(path, error)
        return None, none
    layout = _page_layout(size, count * row_bytes)
    if layout is None or count == 0:
        return None, none
    page_bytes, page_count = layout
    stop = _HEADER_BYTES + page_count * page_bytes
    pages = raw[_HEADER_BYTES:stop].reshape(page_count, page_bytes)
    good = _good_pages(pages, raw[stop:])
    first = np.arange(count) * row_bytes // page_bytes
    last = (np.arange(1, count + 1) * row_bytes - 1) // page_bytes
    # Bad pages up to and including each page: a row is whole if its span adds none.
    bad_before = np.concatenate([[0], np.cumsum(~good)])
    whole = bad_before[last + 1] == bad_before[first]
    stream = raw[_HEADER_BYTES : _HEADER_BYTES + count * row_bytes]
    return stream.view(np.dtype(vector_dtype).newbyteorder("<")).reshape(count, dim), whole


def _page_layout(size: int, stream_bytes: int) -> tuple[int, int] | None:
    """Return page size and count of a file of vectors, from its length alone."""
    page_bytes = 4_096
    while page_bytes <= _PAGE_BYTES_MAX:
        page_count = -(-stream_bytes // page_bytes)
        if size == _HEADER_BYTES + page_count * (page_bytes + 4):
            return page_bytes, page_count
        page_bytes += 4_096
    return None


def _good_pages(pages: NDArray[np.uint8], table: NDArray[np.uint8]) -> NDArray[np.bool_]:
    from stoker.kernels import _core

    stored = np.ascontiguousarray(table).view("<u4")
    good = np.zeros(len(pages), dtype=np.bool_)
    for start in range(0, len(pages), _PAGES_STEP):
        part = np.ascontiguousarray(pages[start : start + _PAGES_STEP])
        good[start : start + _PAGES_STEP] = (
            _core.crc32c_pages(part) == stored[start : start + _PAGES_STEP]
        )
    return good


@dataclasses.dataclass
class RepairReport:
    """What a repair did.

    Attributes:
        path: The index.
        repaired: Whether anything had to be done.
        actions: What was done, one line each.
        rows_from_segments: Vectors taken from damaged segments.
        rows_from_documents: Vectors taken from the document store.
        rows_lost: Rows that nothing had any more; of those that no id names at least so many.
        lost: The first 1,000 of their documents (tenant, id), where those are known.
        whole: Whether the index verifies now.
    """

    path: str
    repaired: bool = False
    actions: list[str] = dataclasses.field(default_factory=list)
    rows_from_segments: int = 0
    rows_from_documents: int = 0
    rows_lost: int = 0
    lost: list[Key] = dataclasses.field(default_factory=list)
    whole: bool = True

    def note_lost(self, keys: Sequence[Key]) -> None:
        """Count documents whose vectors are gone."""
        self.rows_lost += len(keys)
        self.lost += keys[: _LOST_LISTED_MAX - len(self.lost)]

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def salvaged_rows(
    salvaged: Salvaged, keys: Sequence[Key], wanted: NDArray[np.bool_], report: RepairReport
) -> Iterator[tuple[Sequence[Key], NDArray[np.float32]]]:
    """Yield those of the ``wanted`` rows whose vectors are whole, part by part, counting them.

    Args:
        salvaged: What a segment still gives.
        keys: The document of each of its rows.
        wanted: bool, shape (count,).
        report: Counts what was taken.
    """
    if salvaged.vectors is None:
        return
    rows = np.flatnonzero(wanted & salvaged.whole)
    for start in range(0, rows.size, _ROWS_STEP):
        part = rows[start : start + _ROWS_STEP]
        report.rows_from_segments += part.size
        yield [keys[row] for row in part.tolist()], salvaged.vectors[part].astype(np.float32)


def batches(changes: Iterator[Change]) -> Iterator[list[Change]]:
    """Cut a stream of changes into lists that fit memory."""
    while part := list(itertools.islice(changes, _ROWS_STEP)):
        yield part


def stacked(changes: Sequence[Change]) -> NDArray[np.float32]:
    """Return the changes' vectors, shape (n, dim); every one of them must carry its vector."""
    return np.stack([change.vector for change in changes if change.vector is not None])
