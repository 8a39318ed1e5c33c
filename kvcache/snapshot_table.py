"""Metadata in snapshots: a writer copies what it changes, and readers never wait for it.

A snapshot is an immutable set of shards. A write copies one shard and publishes a new snapshot by
one assignment; who reads goes on with the snapshot that it has. Snapshots in use are counted, each
reader in a place of its own, so that counting needs no lock and is exact.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from stoker.errors import InputError

V = TypeVar("V")

Shards = tuple[Mapping[str, V], ...]


class Snapshot(Generic[V]):
    """The table as it was at one version. Reading needs no lock and no reference.

    Attributes:
        version: Rises with every write.
    """

    __slots__ = ("_held", "_shards", "version")

    def __init__(self, shards: Shards[V], version: int) -> None:
        self._shards = shards
        self.version = version
        # Thread -> references that it holds: each key is written by its own thread alone.
        self._held: dict[int, int] = {}

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
        while True:
            try:
                return sum(self._held.values())
            except RuntimeError:  # a reader's first reference came while we summed
                continue


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
        self._present: Snapshot[V] = Snapshot((empty,) * shards, 0)
        self._shards = shards
        self._lock = threading.Lock()  # of writers
        self._past: list[Snapshot[V]] = []  # superseded, perhaps held
        self.retired = 0

    def present(self) -> Snapshot[V]:
        """Return the newest snapshot; it stays as it is for as long as the caller looks at it."""
        return self._present

    @contextlib.contextmanager
    def hold(self) -> Iterator[Snapshot[V]]:
        """Hold the newest snapshot: it is counted, and not retired before it is given back."""
        me = threading.get_ident()
        while True:
            snapshot = self._present
            held = snapshot._held
            held[me] = held.get(me, 0) + 1
            # A writer that retired it between the two lines has not seen us, so we see it.
            if snapshot is self._present:
                break
            held[me] -= 1
        try:
            yield snapshot
        finally:
            held[me] -= 1

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
            self._present = Snapshot(shards, present.version + 1)
            self._past.append(present)
            self._retire()
            return present.version + 1

    def _retire(self) -> None:
        kept = [snapshot for snapshot in self._past if snapshot.references()]
        self.retired += len(self._past) - len(kept)
        self._past = kept

    def held(self) -> int:
        """Return how many references readers hold, over all snapshots."""
        with self._lock:
            return self._present.references() + sum(s.references() for s in self._past)

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        with self._lock:
            self._retire()
            assert self._present.version == self.retired + len(self._past)
            for snapshot in (self._present, *self._past):
                assert all(count >= 0 for count in snapshot._held.values()), snapshot.version
