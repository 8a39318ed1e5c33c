"""Closing beside everything that can be under way: calls end or are refused, and nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.merge import MergeCancelled
from stoker.index.segment import Segment, SegmentClosed
from stoker.index.serving import CollectionClosed
from stoker.index.settings import IndexSettings

DIM = 24
ROWS = 800
SEGMENT_ROUNDS = 200
COLLECTION_ROUNDS = 40
SHORT_WAY_ROUNDS = 20
Call = Callable[[], object]


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture(autouse=True)
def interpreter_in_turns() -> Iterator[None]:
    """Have the interpreter change threads often, so that a close comes between any two lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Callers:
    """Threads that repeat a call each until it is refused; what they raise else is kept."""

    def __init__(self, calls: list[Call], refusals: tuple[type[Exception], ...]) -> None:
        self.faults: list[BaseException] = []
        self._refusals = refusals
        self._begin = threading.Barrier(len(calls) + 1)
        self._threads = [
            threading.Thread(target=self._repeat, args=(call,), daemon=True) for call in calls
        ]
        for thread in self._threads:
            thread.start()
        self._begin.wait()

    def _repeat(self, call: Call) -> None:
        self._begin.wait()
        try:
            while True:
                call()
        except self._refusals:
            pass
        except BaseException as error:
            self.faults.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for fault in self.faults:
            raise fault


def test_a_segment_closes_beside_its_users(tmp_path: Path, vectors: NDArray[np.float32]) -> None:
    path = tmp_path / "s"
    build_segment(path, vectors, metric="l2")
    rng = np.random.default_rng(3)
    rows = np.arange(0, ROWS, 7)
    for round_index in range(SEGMENT_ROUNDS):
        # About a third of the pages: whoever reads evicts what others use.
        segment = Segment.open(path, memory_bytes=70_000)
        links = np.arange(4, dtype=np.uint32)

        def load(segment: Segment = segment, links: NDArray[np.uint32] = links) -> None:
            segment.load_units("upper", links[:1])
            segment.load_units("vectors", links, evict=True)
            segment.evict_units("vectors", links)

        def look(segment: Segment = segment) -> None:
            segment.resident()
            segment.page_counts()
            segment.pool_stats()

        def search(segment: Segment = segment, start: int = round_index % 700) -> None:
            segment.search(vectors[start : start + 3], 5, recall_target=0.99)

        callers = Callers(
            [search, search, load, look, lambda s=segment: s.vectors(rows)],  # type: ignore[misc]
            (SegmentClosed,),
        )
        try:
            for _ in range(int(rng.integers(0, 4))):
                search()
        finally:
            segment.close()
        del segment, load, look, search
        callers.join()


def test_a_collection_closes_beside_its_users(tmp_path: Path, vectors: NDArray[np.float32]) -> None:
    path = tmp_path / "c"
    build_collection(path, vectors[:100], metric="l2")
    rng = np.random.default_rng(5)
    settings = IndexSettings(merge_rows=30)
    for _ in range(COLLECTION_ROUNDS):
        collection = Collection(path, "rw", settings=settings, memory_bytes=70_000)
        writes = iter(range(1_000_000))

        def write(collection: Collection = collection, writes: object = writes) -> None:
            at = next(writes) % 20  # type: ignore[call-overload]
            collection.upsert(range(at * 5, at * 5 + 10), vectors[at * 5 : at * 5 + 10])
            collection.delete([at])

        def search(collection: Collection = collection) -> None:
            found = collection.search(vectors[200:203], 5)
            assert np.all(found.completeness == 1.0)

        callers = Callers(
            [search, search, write, lambda c=collection: c.merge(full=True)],  # type: ignore[misc]
            (CollectionClosed, MergeCancelled),
        )
        try:
            for _ in range(int(rng.integers(0, 10))):
                search()
        finally:
            collection.close()
        callers.join()
    with Collection(path, "rw", settings=settings) as collection:
        collection.check()


def test_the_short_way_is_whole_beside_changes_merges_and_the_close(
    tmp_path: Path, vectors: NDArray[np.float32]
) -> None:
    path = tmp_path / "c"
    # One document stands apart, and moves about there: a search that missed it, or met it twice,
    # has seen half of a change or of a merge.
    far = np.full((1, DIM), 30, np.float32)
    build_collection(path, np.concatenate([far, vectors[:300]]), metric="l2", threads=1)
    settings = IndexSettings(merge_rows=0)
    for _ in range(SHORT_WAY_ROUNDS):
        collection = Collection(path, "rw", settings=settings)
        collection.merge(full=True)  # What the round before has left unmerged.
        for batch in collection.unit_batches({}):
            collection.load_units(batch.kind, batch.units)
        collection.search(far, 5)
        before = collection._serving.direct
        assert before is not None
        assert before.search(far, 5, None, None) is not None

        def change(collection: Collection = collection) -> None:
            for _ in range(2):
                collection.upsert([0], far + np.float32(0.01) * vectors[:1])
            collection.merge(full=True)

        def search(collection: Collection = collection) -> None:
            direct = collection._serving.direct
            if direct is not None and (short := direct.search(far, 5, None, None)) is not None:
                assert short.ids[0, 0] == 0
            found = collection.search(far, 5)
            assert found.ids[0, 0] == 0
            assert len(set(found.ids[0].tolist())) == 5
            assert found.completeness == 1.0

        callers = Callers([search, search, change], (CollectionClosed, MergeCancelled))
        try:
            for _ in range(5):
                search()
        finally:
            collection.close()
        callers.join()
        assert before.search(far, 5, None, None) is None
