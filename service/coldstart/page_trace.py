"""Which pages each query needs: recorded on the engine itself, one query at a time.

A query is asked on a segment whose pages have all been let go, and what is resident afterwards is
what it needed. So a recording has no cache of its own in it, and any policy can be run over it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.segment import Segment
from stoker.service.coldstart.load_job import KINDS

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class PageTrace:
    """Pages by query, in the order of the queries.

    Attributes:
        kinds: uint8, shape (n,), numbers into `KINDS`.
        units: uint32, shape (n,), page numbers within their kind.
        queries: int64, shape (n,), rising: the query that each page was needed for.
    """

    kinds: NDArray[np.uint8]
    units: NDArray[np.uint32]
    queries: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.units)

    def keys(self) -> NDArray[np.int64]:
        """Return one number for each page: int64, shape (n,)."""
        return page_keys(self.kinds, self.units)


def page_keys(kinds: NDArray[np.uint8], units: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return one number for each (kind, page): int64."""
    return (kinds.astype(np.int64) << 32) | units.astype(np.int64)


def pages_of(keys: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return kinds and page numbers of what `page_keys` made."""
    return (keys >> 32).astype(np.uint8), (keys & 0xFFFFFFFF).astype(np.uint32)


def segment_folder(index_path: Path) -> Path:
    """Return the folder of a collection's only segment.

    Raises:
        InputError: it has none, or several; page numbers would then not be comparable.
    """
    found = sorted(path for path in (index_path / "segments").iterdir() if path.is_dir())
    if len(found) != 1:
        raise InputError(f"{index_path}: expected one segment, found {len(found)}")
    return found[0]


def record_pages(
    index_path: Path,
    queries: NDArray[np.float32],
    *,
    k: int,
    ef: int,
    recall_target: float,
    progress: Progress | None = None,
) -> PageTrace:
    """Ask each query alone and note the pages that it needed. Blocks; reads each of them."""
    kinds: list[NDArray[np.uint8]] = []
    units: list[NDArray[np.uint32]] = []
    numbers: list[NDArray[np.int64]] = []
    with Segment.open(segment_folder(index_path), memory_bytes=0) as segment:
        for number, query in enumerate(queries):
            segment.search(query[None], k, ef=ef, recall_target=recall_target)
            for code, kind in enumerate(KINDS):
                here = segment.resident_units(kind)
                if len(here):
                    segment.evict_units(kind, here)
                    kinds.append(np.full(len(here), code, np.uint8))
                    units.append(here)
                    numbers.append(np.full(len(here), number, np.int64))
            if progress is not None and (number + 1) % 50 == 0:
                progress(number + 1, len(queries))
    return PageTrace(
        np.concatenate([np.empty(0, np.uint8), *kinds]),
        np.concatenate([np.empty(0, np.uint32), *units]),
        np.concatenate([np.empty(0, np.int64), *numbers]),
    )


def resident_at_stop(
    index_path: Path,
    queries: NDArray[np.float32],
    *,
    memory_bytes: int,
    k: int,
    ef: int,
    recall_target: float,
) -> NDArray[np.int64]:
    """Run queries through a pool of a size and return what is resident at the end.

    Returns:
        Page keys in the order of the files, as a list of blocks that is written at a stop has them.
    """
    with Segment.open(segment_folder(index_path), memory_bytes=memory_bytes) as segment:
        for query in queries:
            segment.search(query[None], k, ef=ef, recall_target=recall_target)
        keys = [
            page_keys(np.full(len(here), code, np.uint8), here)
            for code, kind in enumerate(KINDS)
            if len(here := segment.resident_units(kind))
        ]
    return np.concatenate([np.empty(0, np.int64), *keys])
