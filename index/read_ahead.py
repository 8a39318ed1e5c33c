"""Tells the system which small pieces opening an index will read, before the first is waited for.

Opening reads a dozen headers and tables, each where the one before it says. One after the other
each costs a device's whole latency; announced together they are there when they are asked for. It
is a hint: what is read, and checked, stays with who reads it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stoker.index.manifest import FILES, NAME
from stoker.index.paged_file import HEADER_BYTES

# A header and, of the transform, the page with the centre.
_HEAD_BYTES: Final = 2 * HEADER_BYTES
# A larger file is not read whole to be opened, or not by searches that hurry.
_WHOLE_BYTES_MAX: Final = 256 << 10
# Whose checksum tables, at their ends, are read for the first answer at the latest. Those of what
# the page pool reads go past the system's cache.
_TABLES: Final = ("transform", "ids")
# Least bytes of pages for each four of a checksum table.
_PAGE_BYTES_MIN: Final = 4096


def announce_segments(folders: Iterable[Path]) -> None:
    """Announce what opening these segments reads."""
    for folder in folders:
        announce_whole(folder / NAME)
        for part, name in FILES.items():
            _announce(folder / name, head=_HEAD_BYTES, table=part in _TABLES)


def announce_whole(path: Path) -> None:
    """Announce all of a small file, and the beginning of another."""
    _announce(path, head=_WHOLE_BYTES_MAX, table=False)


def _announce(path: Path, *, head: int, table: bool) -> None:
    # Who opens it next says what is wrong.
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(file, 0, head, os.POSIX_FADV_WILLNEED)
            if table:
                size = os.fstat(file).st_size
                length = 4 * (max(size - HEADER_BYTES, 0) // (_PAGE_BYTES_MIN + 4))
                os.posix_fadvise(file, size - length, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)
