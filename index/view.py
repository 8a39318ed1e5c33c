"""A view: everything that one search looks at, fixed at one change.

Views are immutable and replaced whole, so that a search never waits for a change and never sees
half of one. The generation's segments come first, the delta covers what changed since.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray
from pyroaring import BitMap

from stoker.errors import CorruptError
from stoker.index.delta import Delta, DeltaView, Key
from stoker.index.document_values import Change
from stoker.index.documents import DocumentStore
from stoker.index.generation import (
    SEGMENTS_NAME,
    Generation,
    SegmentEntry,
    dead_path,
    write_durable,
)
from stoker.index.sealed import SealedSegment, SegmentEngine
from stoker.index.settings import IndexSettings

if TYPE_CHECKING:
    from stoker.index.direct import DirectSearch

_REPLAY_STEP = 1_024

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class SegmentView:
    """A sealed segment with the rows that no longer count.

    Attributes:
        sealed: The open segment.
        dead: Rows whose document changed since; never mutated.
        alive_bits: The other rows as packed bits, little-endian; None while none is dead.
    """

    sealed: SealedSegment
    dead: BitMap
    alive_bits: NDArray[np.uint8] | None

    @property
    def live_count(self) -> int:
        """Rows that still count."""
        return self.sealed.entry.count - len(self.dead)

    def without(self, keys: Sequence[Key]) -> SegmentView:
        """Return the view once ``keys`` have changed elsewhere."""
        rows = self.sealed.rows_of(keys)
        return self.without_rows(rows[rows >= 0])

    def without_rows(self, rows: NDArray[np.int64]) -> SegmentView:
        """Return the view with ``rows`` dead too."""
        if rows.size == 0:
            return self
        count = self.sealed.entry.count
        if self.alive_bits is None:
            bits = np.packbits(np.ones(count, dtype=np.bool_), bitorder="little")
        else:
            bits = self.alive_bits.copy()
        np.bitwise_and.at(bits, rows >> 3, ~(1 << (rows & 7)).astype(np.uint8))
        dead = self.dead | BitMap(array.array("I", rows.astype(np.uint32).tobytes()))
        return SegmentView(self.sealed, dead, bits)


@dataclasses.dataclass(frozen=True)
class View:
    """What a search sees.

    Attributes:
        generation: The sealed part.
        segments: Its open segments, in the generation's order.
        delta: Holds ``rows``, and remembers filters over them.
        rows: The delta's rows at ``change_offset``.
        change_offset: The newest change that shows.
    """

    generation: Generation
    segments: tuple[SegmentView, ...]
    delta: Delta
    rows: DeltaView
    change_offset: int

    @property
    def live_count(self) -> int:
        """Documents."""
        sealed = sum(segment.live_count for segment in self.segments)
        return sealed + self.rows.live_count

    def direct(self) -> DirectSearch | None:
        """Return the short way to answers, where one whole segment is all there is."""
        if len(self.segments) != 1 or self.rows.live_count:
            return None
        only = self.segments[0]
        if only.alive_bits is not None or only.sealed.entry.naming != "plain":
            return None
        return only.sealed.segment.direct()

    def after(self, changes: Sequence[Change]) -> View:
        """Apply ``changes``, which follow this view, to the delta; return the view that shows them.

        The one caller that may is the one that owns the delta.
        """
        keys = [(change.tenant, change.id) for change in changes]
        segments = tuple(segment.without(keys) for segment in self.segments)
        self.delta.apply(changes)
        return dataclasses.replace(
            self,
            segments=segments,
            rows=self.delta.view(),
            change_offset=changes[-1].change_offset,
        )


def open_view(
    folder: Path,
    generation: Generation,
    store: DocumentStore | None,
    *,
    engine: SegmentEngine,
    memory_bytes: int,
    settings: IndexSettings,
    reuse: Mapping[str, SealedSegment],
) -> View:
    """Open a generation's segments and replay the changes that it has not sealed.

    Args:
        folder: The collection.
        generation: From CURRENT.
        store: The change log; None where there never was a change.
        engine: Opens segments.
        memory_bytes: Budget of all segments together; 0 means room for all.
        settings: The room's settings.
        reuse: Open segments by name, taken over (and referenced once more) where they serve on.

    Raises:
        CorruptError: a segment or the log is damaged.
        FileNotFoundError: a segment's folder is gone; CURRENT has moved on.
    """
    opened: list[SealedSegment] = []
    try:
        shares = memory_shares(folder, generation.segments, memory_bytes)
        for entry in generation.segments:
            known = reuse.get(entry.name)
            if known is not None:
                known.acquire()
            else:
                known = SealedSegment.open(
                    folder / SEGMENTS_NAME / entry.name,
                    entry,
                    engine=engine,
                    memory_bytes=shares[entry.name],
                    settings=settings,
                )
            opened.append(known)
        segments = tuple(
            open_segment_view(folder, generation, entry, sealed, store)
            for entry, sealed in zip(generation.segments, opened, strict=True)
        )
        delta = Delta(generation.dim, generation.metric)
        view = View(generation, segments, delta, delta.view(), generation.change_offset)
        if store is not None:
            changes = store.changes(generation.change_offset)
            while part := list(itertools.islice(changes, _REPLAY_STEP)):
                view = view.after(part)
        return view
    except BaseException:
        for sealed in opened:
            sealed.release()
        raise


def memory_shares(
    folder: Path,
    entries: Sequence[SegmentEntry],
    budget: int,
) -> dict[str, int]:
    """Split a budget over segments by their size on disk; 0 stays 0, room for all."""
    if budget == 0:
        return dict.fromkeys((entry.name for entry in entries), 0)
    sizes = {entry.name: folder_bytes(folder / SEGMENTS_NAME / entry.name) for entry in entries}
    total = max(1, sum(sizes.values()))
    return {name: max(1, budget * size // total) for name, size in sizes.items()}


def folder_bytes(path: Path) -> int:
    """Return the size of the files in ``path``; 0 where there is no such folder."""
    try:
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    except OSError:
        return 0


def open_segment_view(
    folder: Path,
    generation: Generation,
    entry: SegmentEntry,
    sealed: SealedSegment,
    store: DocumentStore | None,
) -> SegmentView:
    """Return an open segment with the rows that ``generation`` and the log know to be dead.

    ``entry`` is the generation's own: a segment that serves on was opened by an older one's.
    """
    dead = stored_dead(folder, generation, entry)
    if dead is None:
        dead = _dead_from_log(sealed, store)
    rows = np.frombuffer(dead.to_array(), dtype=np.uint32).astype(np.int64)
    return SegmentView(sealed, BitMap(), None).without_rows(rows)


def stored_dead(folder: Path, generation: Generation, entry: SegmentEntry) -> BitMap | None:
    """Return the rows that the generation knows to be dead, None where its file is damaged."""
    if entry.dead_crc32 is None:
        return BitMap()
    path = dead_path(folder, generation.number, entry.name)
    try:
        data = path.read_bytes()
        if zlib.crc32(data) != entry.dead_crc32:
            raise CorruptError(f"{path}: expected checksum {entry.dead_crc32:08x}")
        dead = BitMap.deserialize(data)
        if len(dead) and dead.max() >= entry.count:
            raise CorruptError(f"{path}: names rows past {entry.count}")
        return dead
    except (OSError, ValueError, IndexError, CorruptError) as error:  # IndexError: an empty file
        log.warning("index.dead_rows_rebuilt", segment=entry.name, reason=str(error))
        return None


def _dead_from_log(sealed: SealedSegment, store: DocumentStore | None) -> BitMap:
    """Work out the dead rows anew: those whose document changed after the segment was sealed."""
    if store is None:
        raise CorruptError(
            f"{sealed.path}: its dead rows are lost, and so is the change log; "
            "`stoker repair` serves what is left"
        )
    dead = BitMap()
    changes = store.changes(sealed.entry.sealed_offset, vectors=False, bodies=False)
    while part := list(itertools.islice(changes, _REPLAY_STEP)):
        rows = sealed.rows_of([(change.tenant, change.id) for change in part])
        dead.update(int(row) for row in rows if row >= 0)
    return dead


def write_dead(folder: Path, generation: int, segment: SegmentView) -> SegmentEntry:
    """Store a segment's dead rows for ``generation``; return the entry that names them."""
    entry = segment.sealed.entry
    if not len(segment.dead):
        return dataclasses.replace(entry, dead_crc32=None)
    data = segment.dead.serialize()
    write_durable(dead_path(folder, generation, entry.name), data)
    return dataclasses.replace(entry, dead_crc32=zlib.crc32(data))
