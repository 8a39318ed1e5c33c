"""The graph of a sealed segment, read back, so that its rows can be sealed anew in another order.

Linking is what a build spends its time on. Where no row has changed, a merge that only packs pages
by newer heat (or by a newer format) takes the links that there are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.index.hnsw_graph import HnswGraph, UpperLevel
from stoker.index.manifest import FILES, LevelLayout, Manifest
from stoker.index.paged_file import PagedFile, SegmentFileCorrupt
from stoker.index.segment_pages import check_crc

_PAGES_STEP = 4_096


def read_graph(folder: Path) -> HnswGraph:
    """Read and check the links of the segment in ``folder``; nodes are its rows.

    Memory: the level-0 links, 4 bytes for each of ``count`` * m0.

    Raises:
        CorruptError: a page fails its checksum, or the links break an invariant of a graph.
    """
    manifest = Manifest.read(folder)
    file = PagedFile(folder / FILES["links"], kind="links")
    check_crc(file, "links", manifest)
    checksums = file.checksums()
    tables = [_level(file, checksums, level) for level in manifest.levels]
    count = manifest.count
    levels = np.zeros(count, np.uint8)
    for number, level in enumerate(manifest.levels):
        levels[: level.count] = number
    links, counts = tables[0]
    graph = HnswGraph(
        count=count,
        dim=manifest.dim,
        m=manifest.m,
        m0=manifest.levels[0].m,
        entry_point=manifest.entry_row if count else -1,
        max_level=len(manifest.levels) - 1 if count else -1,
        levels=levels,
        level0_counts=counts,
        level0=links,
        upper=[
            UpperLevel(np.arange(len(upper_counts), dtype=np.uint32), upper_counts, upper_links)
            for upper_links, upper_counts in tables[1:]
        ],
        labels=np.arange(count, dtype=np.uint64),
        vectors=None,
        deleted=np.zeros(count, np.bool_),
    )
    graph.check()
    return graph


def _level(
    file: PagedFile, checksums: NDArray[np.uint32], level: LevelLayout
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Neighbor ids, uint32, shape (count, m), and how many of each row are valid."""
    if level.first_page + level.page_count > file.info.page_count:
        raise SegmentFileCorrupt(
            f"{file.path}: has {file.info.page_count} pages, a level is said to end at "
            f"{level.first_page + level.page_count}",
            path=file.path,
        )
    links = np.empty((level.count, level.m), np.uint32)
    counts = np.empty(level.count, np.uint16)
    for first in range(0, level.page_count, _PAGES_STEP):
        pages = min(_PAGES_STEP, level.page_count - first)
        start = first * level.per_page
        rows = min(pages * level.per_page, level.count - start)
        links[start : start + rows], counts[start : start + rows] = _core.unpack_links(
            file.read(level.first_page + first, pages, checksums),
            rows,
            level.m,
            id_bits=level.id_bits,
            record_bytes=level.record_bytes,
            per_page=level.per_page,
        )
    return links, counts
