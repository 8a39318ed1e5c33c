"""Drops files from the operating system's cache, and checks that they are really gone.

A cold start that is measured on files still in memory measures nothing. `posix_fadvise` asks the
kernel to let a file's pages go; pages that someone has mapped stay, so the result is read back
page by page (`mincore`). Where pages stay and the process is root, the whole page cache is
dropped, which slows other programs for a moment and changes none of their data.

What lies below (the host of a virtual machine, the disk's own memory) cannot be dropped from here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stoker.errors import UnavailableError

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGE_BYTES = mmap.PAGESIZE


@dataclasses.dataclass(frozen=True)
class CacheDrop:
    """What was done to the operating system's cache before a cold start.

    Attributes:
        file_count: Files dropped.
        bytes: Their size.
        resident_bytes_before: In the cache before.
        resident_bytes_after: Still there afterwards; 0 for a really cold start. -1: unknown.
        method: ``fadvise``, or ``drop_caches`` where that alone was not enough.
    """

    file_count: int
    bytes: int
    resident_bytes_before: int
    resident_bytes_after: int
    method: str

    @property
    def cold(self) -> bool:
        """Whether nothing of the files is known to be left in the cache."""
        return self.resident_bytes_after == 0

    def sentence(self) -> str:
        """Say plainly what the state was."""
        size = f"{self.bytes / 2**20:.0f} MiB in {self.file_count} files"
        if self.resident_bytes_after < 0:
            return f"{size}: asked to be dropped from the OS cache, but that could not be checked"
        if self.cold:
            return f"{size}: dropped from the OS cache ({self.method}), checked page by page"
        left = self.resident_bytes_after / 2**20
        return f"{size}: {left:.1f} MiB could NOT be dropped from the OS cache, so not fully cold"


def files_of(root: Path) -> list[Path]:
    """Return the regular files at or below ``root``, in name order."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def drop_files(paths: Sequence[Path]) -> CacheDrop:
    """Drop files from the cache and read back what is left.

    Blocks on writing their dirty pages to the device first.

    Raises:
        UnavailableError: a file cannot be opened.
    """
    before = resident_bytes(paths)
    size = 0
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UnavailableError(f"{path}: {error.strerror or error}") from error
        try:
            size += os.fstat(descriptor).st_size
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    after = resident_bytes(paths)
    method = "fadvise"
    if after > 0 and _drop_everything():
        method = "drop_caches"
        after = resident_bytes(paths)
    return CacheDrop(len(paths), size, before, after, method)


def resident_bytes(paths: Sequence[Path]) -> int:
    """Return how many bytes of the files are in the cache, or -1 where that cannot be read.

    Since Linux 5.2 `mincore` answers truly only for files that the caller may write.
    """
    total = 0
    for path in paths:
        pages = _resident_pages(path)
        if pages < 0:
            return -1
        total += pages * _PAGE_BYTES
    return total


def _resident_pages(path: Path) -> int:
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None or not os.access(path, os.W_OK):
        return -1
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
            data = np.frombuffer(view, dtype=np.uint8)
            count = -(-size // _PAGE_BYTES)
            marks = np.zeros(count, dtype=np.uint8)
            failed = mincore(
                ctypes.c_void_p(data.ctypes.data),
                ctypes.c_size_t(size),
                ctypes.c_void_p(marks.ctypes.data),
            )
            del data
        return -1 if failed else int((marks & 1).sum())


def _drop_everything() -> bool:
    try:
        os.sync()
        _DROP_CACHES.write_text("1\n")
    except OSError:
        return False
    return True
