"""A file of checksummed pages: the one container that every part of a segment is stored in.

Layout, little-endian; FORMAT.md has it field by field:

    header, 4,096 bytes | page 0 | page 1 | ... | checksum table, u32 per page

The header carries a checksum of itself and of the checksum table, so that one small read tells
whether a file is whole, and each page can be checked when it is loaded.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import CorruptError, InputError
from stoker.index.generation import NewerFormat, refuse_replaced, refuse_unread

MAGIC: Final = b"STOKERSG"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
# Up to so many pages are read one by one, without read-ahead.
_FEW_PAGES: Final = 4
PAGE_BYTES_MAX: Final = 1 << 20
KINDS: Final = {
    "links": 1,
    "codes": 2,
    "refine": 3,
    "vectors": 4,
    "ids": 5,
    "transform": 6,
    "coarse": 7,
    "ranges": 8,
}

# magic, version, kind, page_bytes, page_count, record_count, record_bytes, per_page,
# crc of the checksum table, reserved
_FIXED: Final = struct.Struct("<8sHHIQQIIII")
_CRC: Final = struct.Struct("<I")


class SegmentFileCorrupt(CorruptError):
    """A file of a segment is not what was sealed.

    Attributes:
        path: The file.
        page: The damaged page, or -1 when the header, the table or the length is wrong.
    """

    def __init__(self, message: str, *, path: Path, page: int = -1) -> None:
        super().__init__(message)
        self.path = path
        self.page = page


class SegmentVersionUnknown(CorruptError):
    """The file states a version that this Stoker does not know, and is not whole.

    One that is whole is no damage: see `generation.NewerFormat`.
    """


@dataclasses.dataclass(frozen=True)
class PagedFileInfo:
    """A paged file's header.

    Attributes:
        kind: One of `KINDS`.
        page_bytes: Bytes of a page, a multiple of 4,096.
        page_count: Pages.
        record_count: Records; for byte streams, bytes.
        record_bytes: Bytes of a record; 0 where they vary.
        per_page: Records on a page, or 0 when records form a dense stream across pages.
        table_crc: CRC-32C of the checksum table: the file's own checksum.
    """

    kind: str
    page_bytes: int
    page_count: int
    record_count: int
    record_bytes: int
    per_page: int
    table_crc: int

    @property
    def table_offset(self) -> int:
        """Byte at which the checksum table begins."""
        return HEADER_BYTES + self.page_count * self.page_bytes

    @property
    def file_bytes(self) -> int:
        """Exact length of the file."""
        return self.table_offset + self.page_count * 4

    def pack(self) -> bytes:
        """The header's bytes."""
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            KINDS[self.kind],
            self.page_bytes,
            self.page_count,
            self.record_count,
            self.record_bytes,
            self.per_page,
            self.table_crc,
            0,
        )
        body = fixed.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(_core.crc32c(np.frombuffer(body, np.uint8)))


def to_pages(records: NDArray[np.uint8], per_page: int, page_bytes: int) -> NDArray[np.uint8]:
    """Lay out records that do not cross pages, uint8, shape (pages, page_bytes), padded with zeros.

    Args:
        records: uint8, shape (n, record_bytes).
        per_page: Records on a page.
        page_bytes: Bytes of a page.
    """
    used = per_page * records.shape[1]
    pages = np.zeros((-(-len(records) // per_page), page_bytes), np.uint8)
    full = len(records) // per_page
    pages[:full, :used] = records[: full * per_page].reshape(full, used)
    rest = records[full * per_page :].reshape(-1)
    if len(rest):
        pages[full, : len(rest)] = rest
    return pages


class PagedFileWriter:
    """Writes pages in order; nothing is valid until `close` has put the header in place."""

    def __init__(
        self, path: Path, *, kind: str, page_bytes: int, record_bytes: int, per_page: int
    ) -> None:
        """Create ``path``; it must not exist."""
        self._info = PagedFileInfo(kind, page_bytes, 0, 0, record_bytes, per_page, 0)
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - closed by close() and __exit__
        self._file.write(b"\0" * HEADER_BYTES)
        self._checksums: list[NDArray[np.uint32]] = []
        self._pending = np.empty(0, np.uint8)
        self._records = 0
        self._pages = 0

    def write_pages(self, pages: NDArray[np.uint8], record_count: int) -> None:
        """Append whole pages, uint8, shape (n, page_bytes), that hold ``record_count`` records."""
        pages = np.ascontiguousarray(pages)
        self._checksums.append(_core.crc32c_pages(pages))
        self._file.write(pages.data)
        self._pages += len(pages)
        self._records += record_count

    def write_records(self, records: NDArray[np.uint8]) -> None:
        """Append records, uint8, shape (n, record_bytes), filling pages as they come.

        With ``per_page`` 0 the records form one dense stream of bytes.
        """
        info = self._info
        if info.per_page == 0:
            flat = np.ascontiguousarray(records).reshape(-1)
            if len(self._pending):
                # What is pending becomes a page; the rest is written from where it lies.
                missing = info.page_bytes - len(self._pending)
                self._pending = np.concatenate([self._pending, flat[:missing]])
                flat = flat[missing:]
                if len(self._pending) == info.page_bytes:
                    self.write_pages(self._pending.reshape(1, -1), 0)
                    self._pending = np.empty(0, np.uint8)
            cut = len(flat) // info.page_bytes * info.page_bytes
            if cut:
                self.write_pages(flat[:cut].reshape(-1, info.page_bytes), 0)
            if cut < len(flat):
                self._pending = flat[cut:].copy()
        else:
            rest = records
            if len(self._pending):
                held = self._pending.reshape(-1, info.record_bytes)
                missing = info.per_page - len(held)
                page = np.concatenate([held, rest[:missing]])
                rest = rest[missing:]
                self._pending = page.reshape(-1)
                if len(page) == info.per_page:
                    self.write_pages(to_pages(page, info.per_page, info.page_bytes), 0)
                    self._pending = np.empty(0, np.uint8)
            cut = len(rest) // info.per_page * info.per_page
            if cut:
                self.write_pages(to_pages(rest[:cut], info.per_page, info.page_bytes), 0)
            if cut < len(rest):
                self._pending = rest[cut:].reshape(-1).copy()
        self._records += len(records)

    def sync(self) -> None:
        """Have the disk take what was written so far; any thread may, while others write.

        Raises:
            OSError: the disk refused it, and `close` may not hear of it again.
        """
        os.fdatasync(self._file.fileno())

    def close(self) -> PagedFileInfo:
        """Write what is pending, the table and the header, and fsync. Returns the header."""
        if len(self._pending):
            last = np.zeros((1, self._info.page_bytes), np.uint8)
            last[0, : len(self._pending)] = self._pending
            self._pending = np.empty(0, np.uint8)
            self.write_pages(last, 0)
        table = np.concatenate([np.empty(0, np.uint32), *self._checksums]).astype("<u4")
        raw = table.view(np.uint8)
        self._file.write(raw.data)
        info = dataclasses.replace(
            self._info,
            page_count=self._pages,
            record_count=self._records,
            table_crc=_core.crc32c(raw),
        )
        self._file.seek(0)
        self._file.write(info.pack())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return info

    def __enter__(self) -> PagedFileWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if not self._file.closed:
            self._file.close()


class PagedFile:
    """Reads a paged file's header and checksum table, and pages one range at a time."""

    def __init__(self, path: Path, *, kind: str) -> None:
        """Read and check the header.

        Raises:
            SegmentFileCorrupt: missing, truncated, of another kind, or damaged.
            NewerFormat: written by a newer Stoker.
            UnavailableError: the process may not read it, or is out of files.
        """
        self.path = path
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                header = os.pread(file, HEADER_BYTES, 0)
                found = os.fstat(file)
            finally:
                os.close(file)
        except OSError as error:
            refuse_unread(path, error)
            raise SegmentFileCorrupt(f"{path}: cannot be read: {error}", path=path) from error
        self._file = found.st_dev, found.st_ino
        self.info = _parse_header(path, header, found.st_size, kind)

    def checksums(self) -> NDArray[np.uint32]:
        """The CRC-32C of each page, uint32, shape (page_count,), itself checked.

        Raises:
            SegmentFileCorrupt: the table is damaged.
        """
        info = self.info
        offset = info.table_offset
        length = info.page_count * 4
        few = length <= _FEW_PAGES * info.page_bytes
        raw = (self._read_few if few else self._read_many)(offset, length)
        if len(raw) != info.page_count * 4 or _core.crc32c(raw) != info.table_crc:
            refuse_replaced(self.path, self._file)
            raise SegmentFileCorrupt(
                f"{self.path}: the checksum table at offset {offset} is damaged; "
                "run `stoker verify`, then `stoker repair`",
                path=self.path,
            )
        return raw.view("<u4").astype(np.uint32, copy=False)

    def read(self, first: int, count: int, checksums: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Pages ``first`` to ``first + count``, checked: uint8, shape (count, page_bytes).

        Raises:
            SegmentFileCorrupt: names the first damaged page and its offset.
        """
        info = self.info
        if first + count > info.page_count:
            raise SegmentFileCorrupt(
                f"{self.path}: pages {first} to {first + count} are wanted of {info.page_count}",
                path=self.path,
            )
        offset = HEADER_BYTES + first * info.page_bytes
        if count <= _FEW_PAGES:
            raw = self._read_few(offset, count * info.page_bytes)
        else:
            raw = self._read_many(offset, count * info.page_bytes)
        return self._checked(raw, np.arange(first, first + count), checksums)

    def read_scattered(
        self, pages: Sequence[int], checksums: NDArray[np.uint32]
    ) -> NDArray[np.uint8]:
        """A few pages from anywhere, checked: uint8, shape (len(pages), page_bytes).

        The device gets all of them to read before the first is waited for.

        Raises:
            SegmentFileCorrupt: as `read`.
        """
        info = self.info
        numbers = np.asarray(pages, np.int64)
        if len(numbers) and int(numbers.max()) >= info.page_count:
            raise SegmentFileCorrupt(
                f"{self.path}: page {int(numbers.max())} is wanted of {info.page_count}",
                path=self.path,
            )
        offsets = (HEADER_BYTES + numbers * info.page_bytes).tolist()
        return self._checked(self._read_at(offsets, info.page_bytes), numbers, checksums)

    def _checked(
        self, raw: NDArray[np.uint8], numbers: NDArray[np.int64], checksums: NDArray[np.uint32]
    ) -> NDArray[np.uint8]:
        """The bytes read of pages ``numbers`` as an array of pages, each by its checksum."""
        info = self.info
        if len(raw) != len(numbers) * info.page_bytes:
            refuse_replaced(self.path, self._file)
            raise SegmentFileCorrupt(
                f"{self.path}: {len(raw)} bytes of {len(numbers)} pages from page "
                f"{int(numbers[0])} on, expected {len(numbers) * info.page_bytes}: truncated",
                path=self.path,
            )
        pages = raw.reshape(len(numbers), info.page_bytes)
        bad = np.flatnonzero(_core.crc32c_pages(pages) != checksums[numbers])
        if len(bad):
            refuse_replaced(self.path, self._file)
            page = int(numbers[bad[0]])
            raise SegmentFileCorrupt(
                f"{self.path}: page {page} at offset {HEADER_BYTES + page * info.page_bytes} "
                f"fails its checksum ({len(bad)} of {len(numbers)} pages read)",
                path=self.path,
                page=page,
            )
        return pages

    def _read_few(self, offset: int, length: int) -> NDArray[np.uint8]:
        return self._read_at([offset], length)

    def _read_at(self, offsets: Sequence[int], length: int) -> NDArray[np.uint8]:
        """Read without the read-ahead that would make each of a few scattered pages cost 32."""
        at = offsets[0] if offsets else 0
        parts = []
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
                for offset in offsets[1:]:
                    os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)
                for at in offsets:
                    parts.append(os.pread(file, length, at))
            finally:
                os.close(file)
        except OSError as error:
            raise self._unreadable(at, error) from error
        return np.frombuffer(b"".join(parts), np.uint8)

    def _read_many(self, offset: int, length: int) -> NDArray[np.uint8]:
        try:
            return np.fromfile(self.path, np.uint8, count=length, offset=offset)
        except OSError as error:
            raise self._unreadable(offset, error) from error

    def _unreadable(self, offset: int, error: OSError) -> SegmentFileCorrupt:
        refuse_unread(self.path, error)
        return SegmentFileCorrupt(
            f"{self.path}: cannot be read at offset {offset}: {error}", path=self.path
        )

    def read_bytes(self) -> NDArray[np.uint8]:
        """A dense stream's bytes, all of them, checked: uint8, shape (record_count bytes,)."""
        info = self.info
        length = info.record_count * max(info.record_bytes, 1)
        if length > info.page_count * info.page_bytes:
            raise SegmentFileCorrupt(
                f"{self.path}: {length} bytes said to be in {info.page_count} pages",
                path=self.path,
            )
        return self.read(0, info.page_count, self.checksums()).reshape(-1)[:length]

    def damaged_pages(self, *, batch_pages: int = 4096) -> list[int]:
        """Numbers of all pages that fail their checksum, reading the whole file."""
        checksums = self.checksums()
        damaged: list[int] = []
        for first in range(0, self.info.page_count, batch_pages):
            count = min(batch_pages, self.info.page_count - first)
            raw = self._read_many(
                HEADER_BYTES + first * self.info.page_bytes, count * self.info.page_bytes
            )
            pages = raw[: len(raw) // self.info.page_bytes * self.info.page_bytes]
            pages = pages.reshape(-1, self.info.page_bytes)
            bad = np.flatnonzero(_core.crc32c_pages(pages) != checksums[first : first + len(pages)])
            damaged.extend(first + int(i) for i in bad)
            damaged.extend(range(first + len(pages), first + count))
        return damaged


def _parse_header(path: Path, header: bytes, size: int, kind: str) -> PagedFileInfo:
    def bad(what: str) -> SegmentFileCorrupt:
        return SegmentFileCorrupt(f"{path}: {what}", path=path)

    if len(header) < HEADER_BYTES:
        raise bad(f"{size} bytes long, too short for the header of {HEADER_BYTES}")
    magic, version, kind_code, page_bytes, page_count, records, record_bytes, per_page, crc, _ = (
        _FIXED.unpack_from(header)
    )
    if magic != MAGIC:
        raise bad(
            f"not a Stoker segment file: expected magic {MAGIC!r} at offset 0, found {magic!r}"
        )
    body = np.frombuffer(header, np.uint8)[: HEADER_BYTES - _CRC.size]
    (stated,) = _CRC.unpack_from(header, HEADER_BYTES - _CRC.size)
    whole = _core.crc32c(body) == stated
    if version > VERSION and whole:
        raise NewerFormat(path, version, f"version {VERSION}")
    if version != VERSION:
        raise SegmentVersionUnknown(
            f"{path}: format version {version} at offset 8, this Stoker reads {VERSION}, and "
            f"{'older ones never were' if whole else 'the header fails its checksum'}"
        )
    if not whole:
        raise bad("the header (offset 0 to 4096) fails its checksum")
    if kind_code != KINDS[kind]:
        raise bad(f"holds kind {kind_code}, expected {KINDS[kind]} ({kind}): files were swapped")
    if page_bytes % 4096 or not 4096 <= page_bytes <= PAGE_BYTES_MAX:
        raise bad(f"page size {page_bytes} at offset 12 is not a multiple of 4096 up to 1 MiB")
    info = PagedFileInfo(kind, page_bytes, page_count, records, record_bytes, per_page, crc)
    if size != info.file_bytes:
        raise bad(f"{size} bytes long, expected {info.file_bytes}: truncated or extended")
    return info


def write_blob(path: Path, data: NDArray[Any], *, kind: str, page_bytes: int) -> PagedFileInfo:
    """Write an array's bytes as a dense stream of single-byte records."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if not raw.dtype.isnative:
        raise InputError("expected native byte order")
    with PagedFileWriter(
        path, kind=kind, page_bytes=page_bytes, record_bytes=1, per_page=0
    ) as writer:
        writer.write_records(raw.reshape(-1, 1))
        return writer.close()
