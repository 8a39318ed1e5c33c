"""Metadata in snapshots: a writer copies what it changes, and readers never wait for it.

A snapshot is an immutable set of shards. A write copies one shard and publishes a new snapshot by
one assignment; who reads goes on with the snapshot that it has. Snapshots in use are counted by
`SnapshotCounts` of the native core: without a lock, exact, and watched there by ThreadSanitizer.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

from stoker.errors import InputError
from stoker.kernels._core import SnapshotCounts

V = TypeVar("V")

Shards = tuple[Mapping[str, V], ...]


class Snapshot(Generic[V]):
    """The table as it was at one version. Reading needs no lock and no reference.

    Attributes:
        version: Rises with every write.
    """

    __slots__ = ("_counts", "_shards", "_slot", "version")

    def __init__(
        self, shards: Shards[V], version: int, counts: SnapshotCounts | None, slot: int
    ) -> None:
        self._shards = shards
        self.version = version
        self._counts = counts  # None once it is retired: the slot is another snapshot's then
        self._slot = slot

    def get(self, key: str) -> V | None:
        """Return a key's value, or None."""
        return self._shards[_shard_of(key, len(self._shards))].get(key)

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def items(self) -> Iterator[tuple[str, V]]:
        """Yield all keys with their values, as of this version."""
        for shard in self._shards:
            yield from shard.items()

    def references(self) -> int:
        """Return how many readers hold it now."""
        counts = self._counts
        return 0 if counts is None else counts.references(self._slot)


def _shard_of(key: str, count: int) -> int:
    # Not hash(): that differs from process to process, and so would the work of a write.
    return zlib.crc32(key.encode()) % count


class SnapshotTable(Generic[V]):
    """A table of few writes and many reads. Readers hold no lock; writers hold one, among them.

    Invariants (`check`): versions rise by one; a snapshot that is held is not retired; at rest no
    snapshot but the present one is kept, and no reference is counted.

    Args:
        shards: Parts that are copied one at a time: a write copies 1 / shards of the table.
    """

    def __init__(self, *, shards: int = 64) -> None:
        if shards < 1:
            raise InputError(f"shards: expected at least 1, found {shards}")
        empty: Mapping[str, V] = MappingProxyType({})
        self._counts = SnapshotCounts()
        self._present: Snapshot[V] = Snapshot((empty,) * shards, 0, self._counts, 0)
        # Slot -> snapshot, the present one and those that are superseded and perhaps held. A reader
        # looks only at a slot that it has counted itself in, and that one is not taken away.
        self._at: dict[int, Snapshot[V]] = {0: self._present}
        self._shards = shards
        self._lock = threading.Lock()  # of writers
        self.retired = 0

    def present(self) -> Snapshot[V]:
        """Return the newest snapshot; it stays as it is for as long as the caller looks at it.

        While a write is at its end, `hold` may already give the next.
        """
        return self._present

    @contextlib.contextmanager
    def hold(self) -> Iterator[Snapshot[V]]:
        """Hold the newest snapshot: it is counted, and not retired before it is given back."""
        counts = self._counts
        slot = counts.acquire()
        try:
            yield self._at[slot]
        finally:
            counts.release(slot)

    def write(self, changes: Mapping[str, V | None]) -> int:
        """Write or, with None, delete keys, all at once; returns the new version."""
        with self._lock:
            present = self._present
            copies: dict[int, dict[str, V]] = {}
            for key, value in changes.items():
                place = _shard_of(key, self._shards)
                shard = copies.get(place)
                if shard is None:
                    shard = copies[place] = dict(present._shards[place])
                if value is None:
                    shard.pop(key, None)
                else:
                    shard[key] = value
            shards = tuple(
                MappingProxyType(copies[place]) if place in copies else shard
                for place, shard in enumerate(present._shards)
            )
            slot = self._counts.vacant()
            snapshot = Snapshot(shards, present.version + 1, self._counts, slot)
            self._at[slot] = snapshot
            gone = self._counts.publish(slot)
            self._present = snapshot
            self._retire(gone)
            return snapshot.version

    def _retire(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._at.pop(slot)._counts = None
        self.retired += len(slots)

    def held(self) -> int:
        """Return how many references readers hold, over all snapshots."""
        with self._lock:
            return sum(snapshot.references() for snapshot in self._at.values())

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        with self._lock:
            self._retire(self._counts.reclaim())
            assert self._present.version == self.retired + len(self._at) - 1
            assert self._at[self._present._slot] is self._present
            for slot, snapshot in self._at.items():
                assert (snapshot._slot, snapshot._counts) == (slot, self._counts), snapshot.version
