"""External ids of a segment's rows: row to id for answers, id to row for heat and changes.

One file, a dense stream of four arrays whose places the manifest states:

    by_row    int ids: the ids in row order. str ids: u64 offsets into `text`, one more than rows
    text      str ids only: UTF-8, in row order
    keys      u64, rising: the id's two's complement bits, or a hash of its UTF-8 bytes
    rows      u32: the row of each key
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import InputError
from stoker.index.paged_file import PagedFile, PagedFileInfo, SegmentFileCorrupt, write_blob

ID_BYTES_MAX = 512
# So many rows at a time are looked up on their own pages while the table is not in memory.
_FEW_ROWS = 16


@dataclasses.dataclass(frozen=True)
class IdLayout:
    """Where the arrays lie in the file, as byte counts in order: by_row, text, keys, rows."""

    kind: str
    by_row_dtype: str
    text_bytes: int


def normalize_ids(ids: Any, count: int) -> NDArray[Any]:
    """Return the caller's ids as int64, or as an object array of str.

    Args:
        ids: None for 0 ... count - 1, or a sequence of ``count`` integers or strings.

    Raises:
        InputError: wrong count, mixed or unusable kinds, or a duplicate (named).
    """
    if ids is None:
        return np.arange(count, dtype=np.int64)
    array = np.asarray(ids, dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    if array.ndim != 1 or len(array) != count:
        raise InputError(f"ids: expected {count}, one for each vector, found shape {array.shape}")
    if count == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind in "iu":
        if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
            raise InputError(f"ids: {int(array.max())} does not fit a signed 64-bit integer")
        result: NDArray[Any] = array.astype(np.int64)
    elif array.dtype.kind in "UO":
        first = array[0]
        if isinstance(first, str):
            wrong = next((i for i, v in enumerate(array) if not isinstance(v, str)), None)
            kind = "str"
        else:
            wrong = next(
                (
                    i
                    for i, v in enumerate(array)
                    if not isinstance(v, int | np.integer) or isinstance(v, bool)
                ),
                None,
            )
            kind = "int"
        if wrong is not None:
            what = type(array[wrong]).__name__
            # The first decides; where it is neither, nobody knows what the others are.
            expected = f"{kind}, as the first" if wrong else "int or str"
            raise InputError(f"ids: entry {wrong}: expected {expected}, found {what}")
        if kind == "int":
            try:
                result = array.astype(np.int64)
            except OverflowError as error:
                raise InputError("ids: one does not fit a signed 64-bit integer") from error
        else:
            result = np.empty(count, object)
            for i, text in enumerate(array):
                length = len(text.encode("utf-8", "surrogatepass"))
                if not 0 < length <= ID_BYTES_MAX or not _is_encodable(text):
                    raise InputError(
                        f"ids: entry {i} must be 1 to {ID_BYTES_MAX} bytes of UTF-8, found {length}"
                    )
                result[i] = str(text)
    else:
        raise InputError(f"ids: expected integers or strings, found {array.dtype}")
    _refuse_duplicates(result)
    return result


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse_duplicates(ids: NDArray[Any]) -> None:
    if ids.dtype == np.int64:
        values, counts = np.unique(ids, return_counts=True)
        if len(values) != len(ids):
            twice = values[counts > 1][0]
            rows = np.flatnonzero(ids == twice)[:2]
            raise InputError(f"ids: {twice} is given twice, at entries {rows[0]} and {rows[1]}")
        return
    seen: dict[str, int] = {}
    for i, text in enumerate(ids):
        if text in seen:
            raise InputError(f"ids: {text!r} is given twice, at entries {seen[text]} and {i}")
        seen[text] = i


def _hashes(names: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the key of each id, given in UTF-8."""
    digests = b"".join([hashlib.blake2b(name, digest_size=8).digest() for name in names])
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def write_ids(path: Path, ids: NDArray[Any], *, page_bytes: int) -> tuple[IdLayout, PagedFileInfo]:
    """Write ids in row order; ``ids`` as `normalize_ids` returns them."""
    count = len(ids)
    if ids.dtype == np.int64:
        small = count == 0 or (int(ids.min()) >= 0 and int(ids.max()) < 1 << 32)
        by_row = ids.astype("<u4" if small else "<i8")
        text = np.empty(0, np.uint8)
        keys = ids.view(np.uint64) if count else np.empty(0, np.uint64)
        kind = "int"
    else:
        encoded = [str(value).encode("utf-8") for value in ids]
        offsets = np.zeros(count + 1, "<u8")
        np.cumsum([len(value) for value in encoded], out=offsets[1:])
        by_row = offsets
        text = np.frombuffer(b"".join(encoded), np.uint8)
        keys = _hashes(encoded)
        kind = "str"
    order = np.argsort(keys, kind="stable").astype("<u4")
    parts = [
        by_row.view(np.uint8).reshape(-1),
        text,
        keys[order].astype("<u8").view(np.uint8),
        order.view(np.uint8),
    ]
    info = write_blob(path, np.concatenate(parts), kind="ids", page_bytes=page_bytes)
    return IdLayout(kind, by_row.dtype.str, len(text)), info


class IdTable:
    """Ids of a sealed segment, read and checked on first use and then kept in memory.

    Memory: 4 or 8 bytes a row for integers, 8 bytes and the text a row for strings; the reverse
    table, 12 bytes a row, only once `rows_of` was called.
    """

    def __init__(self, path: Path, layout: IdLayout, count: int) -> None:
        self.file = PagedFile(path, kind="ids")
        self._layout = layout
        self._count = count
        self._by_row: NDArray[Any] | None = None
        self._text = b""
        self._read_bytes = 0
        self._checksums: NDArray[np.uint32] | None = None
        self._reverse: tuple[NDArray[np.uint64], NDArray[np.uint32]] | None = None
        width = np.dtype(layout.by_row_dtype).itemsize
        self._by_row_bytes = width * (count + (1 if layout.kind == "str" else 0))
        expected = self._by_row_bytes + layout.text_bytes + 12 * count
        if self.file.info.record_count != expected:
            raise SegmentFileCorrupt(
                f"{path}: {self.file.info.record_count} bytes of ids, expected {expected}",
                path=path,
            )

    @property
    def kind(self) -> str:
        """ "int" or "str"."""
        return self._layout.kind

    @property
    def loaded_bytes(self) -> int:
        """Bytes held in memory now."""
        held = 0 if self._by_row is None else self._by_row.nbytes + len(self._text)
        return held + (0 if self._reverse is None else 12 * self._count)

    def _range(self, start: int, length: int) -> NDArray[np.uint8]:
        info = self.file.info
        first = start // info.page_bytes
        count = -(-(start + length) // info.page_bytes) - first
        if self._checksums is None:
            self._checksums = self.file.checksums()
        pages = self.file.read(first, count, self._checksums).reshape(-1)
        self._read_bytes += len(pages)
        at = start - first * info.page_bytes
        return pages[at : at + length]

    def take_read_bytes(self) -> int:
        """Bytes read from the file since this was last asked."""
        read, self._read_bytes = self._read_bytes, 0
        return read

    @property
    def numbers(self) -> NDArray[Any] | None:
        """Whole-number ids by row, uint32 or int64; None while they are not in memory."""
        return self._by_row if self._layout.kind == "int" else None

    def load(self) -> None:
        """Bring the row-to-id table into memory now."""
        if self._by_row is not None:
            return
        raw = self._range(0, self._by_row_bytes + self._layout.text_bytes)
        by_row = raw[: self._by_row_bytes].view(self._layout.by_row_dtype)
        if self._layout.kind == "str":
            text = raw[self._by_row_bytes :].tobytes()
            if len(by_row) and (
                int(by_row[0]) != 0
                or int(by_row[-1]) != len(text)
                or bool(np.any(by_row[1:] < by_row[:-1]))
            ):
                raise SegmentFileCorrupt(
                    f"{self.file.path}: text offsets do not rise from 0 to {len(text)}",
                    path=self.file.path,
                )
            self._text = text
        self._by_row = by_row

    def ids_at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Ids of rows of any shape; -1, or None, where the row is -1."""
        if self._by_row is None and 0 < rows.size <= _FEW_ROWS:
            return self._few(rows)
        self.load()
        by_row = self._by_row
        assert by_row is not None
        if self._layout.kind == "int":
            flat_rows = rows if rows.ndim == 2 else rows.reshape(1, -1)
            ids = np.empty(flat_rows.shape, np.int64)
            _core.ids_of_rows(by_row, flat_rows, ids)
            return ids if rows.ndim == 2 else ids.reshape(rows.shape)
        out = np.empty(rows.shape, object)
        flat = out.reshape(-1)
        row = -1
        try:
            for i, row in enumerate(rows.reshape(-1).tolist()):
                if row >= 0:
                    flat[i] = self._text[int(by_row[row]) : int(by_row[row + 1])].decode("utf-8")
        except UnicodeDecodeError as error:
            raise SegmentFileCorrupt(
                f"{self.file.path}: the id of row {row} is not UTF-8", path=self.file.path
            ) from error
        return out

    def _few(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Ids of a few rows, reading their own pages alone.

        The whole table of a million rows takes a cloud volume longer than a first answer may take.
        """
        dtype = np.dtype(self._layout.by_row_dtype)
        is_int = self._layout.kind == "int"
        out: NDArray[Any] = (
            np.full(rows.shape, -1, np.int64) if is_int else np.empty(rows.shape, object)
        )
        flat = out.reshape(-1)
        places = np.flatnonzero(rows.reshape(-1) >= 0).tolist()
        asked = rows.reshape(-1)[places].tolist()
        for row in asked:
            if row >= self._count:
                raise InputError(f"row {row} of {self._count}")
        columns = 1 if is_int else 2
        width = dtype.itemsize
        entries = self._pieces([(row * width, columns * width) for row in asked])
        values = np.frombuffer(b"".join(entries), dtype).reshape(-1, columns).tolist()
        if is_int:
            flat[places] = [value[0] for value in values]
            return out
        for row, (start, stop) in zip(asked, values, strict=True):
            if not 0 <= start <= stop <= min(self._layout.text_bytes, start + ID_BYTES_MAX):
                raise SegmentFileCorrupt(
                    f"{self.file.path}: the id of row {row} lies at {start} to {stop}",
                    path=self.file.path,
                )
        texts = self._pieces([(self._by_row_bytes + start, stop - start) for start, stop in values])
        for place, row, text in zip(places, asked, texts, strict=True):
            try:
                flat[place] = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise SegmentFileCorrupt(
                    f"{self.file.path}: the id of row {row} is not UTF-8", path=self.file.path
                ) from error
        return out

    def _pieces(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at a few places, (start, length) each; pages are read once, and together."""
        page_bytes = self.file.info.page_bytes
        numbers: dict[int, int] = {}
        for start, length in places:
            for page in range(start // page_bytes, -(-(start + length) // page_bytes)):
                numbers.setdefault(page, len(numbers))
        if not numbers:
            return [b""] * len(places)
        if self._checksums is None:
            self._checksums = self.file.checksums()
        pages = self.file.read_scattered(list(numbers), self._checksums)
        self._read_bytes += pages.size
        pieces = []
        for start, length in places:
            span = range(start // page_bytes, -(-(start + length) // page_bytes))
            held = b"".join([pages[numbers[page]].tobytes() for page in span])
            at = start % page_bytes
            pieces.append(held[at : at + length])
        return pieces

    def rows_of(self, ids: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
        """Rows of ids, int64, -1 where the segment has no such id (or no such kind of id)."""
        count = len(ids)
        rows = np.full(count, -1, np.int64)
        if count == 0 or self._count == 0:
            return rows
        if self._reverse is None:
            start = self._by_row_bytes + self._layout.text_bytes
            raw = self._range(start, 12 * self._count)
            keys = raw[: 8 * self._count].view("<u8").astype(np.uint64)
            order = raw[8 * self._count :].view("<u4").astype(np.uint32)
            if bool(np.any(order >= self._count)):
                raise SegmentFileCorrupt(
                    f"{self.file.path}: a row number exceeds {self._count}", path=self.file.path
                )
            self._reverse = (keys, order)
        if self._layout.kind == "int":
            return self._rows_of_numbers(ids, rows)
        return self._rows_of_texts(ids, rows)

    def _rows_of_numbers(
        self, ids: Sequence[Any] | NDArray[Any], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        assert self._reverse is not None
        keys, order = self._reverse
        usable = [
            i for i, v in enumerate(ids) if isinstance(v, int | np.integer) and _is_int64(int(v))
        ]
        wanted = np.fromiter((int(ids[i]) for i in usable), np.int64, len(usable)).view(np.uint64)
        at = np.minimum(np.searchsorted(keys, wanted), self._count - 1)
        # A number is its own key, so equal keys are equal ids.
        rows[usable] = np.where(keys[at] == wanted, order[at].astype(np.int64), -1)
        return rows

    def _rows_of_texts(
        self, ids: Sequence[Any] | NDArray[Any], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        assert self._reverse is not None
        keys, order = self._reverse
        usable: list[int] = []
        names: list[bytes] = []
        for i, value in enumerate(ids):
            name = _encoded(value)
            if name is not None:
                usable.append(i)
                names.append(name)
        wanted = _hashes(names)
        first = np.searchsorted(keys, wanted, "left")
        stop = np.searchsorted(keys, wanted, "right")
        if len(usable) > _FEW_ROWS:
            self.load()  # one long read, in place of two short ones for each
        known = np.flatnonzero(first < stop)
        found = order[first[known]]
        same = self._are_named(found, [names[at] for at in known.tolist()])
        places = np.array(usable, dtype=np.int64)
        rows[places[known[same]]] = found[same]
        # Equal hashes of different strings are told apart by the strings themselves.
        for at in known[~same & (stop[known] - first[known] > 1)].tolist():
            others = order[int(first[at]) + 1 : int(stop[at])]
            for row in others:
                if self._are_named(row.reshape(1), [names[at]])[0]:
                    rows[usable[at]] = row
                    break
        return rows

    def _are_named(self, rows: NDArray[np.uint32], names: Sequence[bytes]) -> NDArray[np.bool_]:
        """Tell which rows have these ids, each given in UTF-8.

        Raises:
            SegmentFileCorrupt: the id of one of the rows is no UTF-8.
        """
        if len(rows) == 0:
            return np.empty(0, bool)
        if self._by_row is None:
            held = [text.encode("utf-8") for text in self.ids_at(rows.astype(np.int64)).tolist()]
            pairs = zip(held, names, strict=True)
            return np.fromiter((ours == name for ours, name in pairs), bool, len(rows))
        text = self._text
        starts, stops = self._by_row[rows].tolist(), self._by_row[rows + 1].tolist()
        same = np.fromiter(
            (
                text[start:stop] == name
                for start, stop, name in zip(starts, stops, names, strict=True)
            ),
            bool,
            len(rows),
        )
        if not same.all():
            self.ids_at(rows[~same].astype(np.int64))  # what differs may be damage: it says so
        return same


def _encoded(value: Any) -> bytes | None:
    """Return the UTF-8 of a text; None for what no id can be."""
    if not isinstance(value, str):
        return None
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        return None


def _is_int64(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 63
