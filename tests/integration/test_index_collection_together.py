"""Writers, deleters, merges and searches at once: a search sees each call whole, and no ghosts."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stoker.index.collection import Collection
from stoker.index.collection_build import create_collection
from stoker.index.settings import IndexSettings

DIM, DOCUMENTS, VERSIONS = 2, 24, 60


def _engine() -> Any:
    path = Path(__file__).resolve().parents[1] / "brute_force_engine.py"
    spec = importlib.util.spec_from_file_location("brute_force_engine_together", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BruteForceEngine()


class Crew:
    """Threads that run until one fails or the first is done; the failure is the test's."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failures: list[BaseException] = []

    def run(self, first: Callable[[], None], *others: Callable[[], None]) -> None:
        def guard(work: Callable[[], None], *, once: bool) -> None:
            try:
                work()
                while not once and not self.done.is_set():
                    work()
            except BaseException as error:
                self.failures.append(error)
            if once or self.failures:
                self.done.set()

        threads = [threading.Thread(target=guard, args=(first,), kwargs={"once": True})]
        threads += [
            threading.Thread(target=guard, args=(work,), kwargs={"once": False}) for work in others
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def test_a_search_sees_every_call_whole(tmp_path: Path) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=DIM, metric="ip")
    engine, crew = _engine(), Crew()
    settings = IndexSettings(merge_rows=0, segments_max=2)
    with (
        Collection(path, "rw", settings=settings, engine=engine) as collection,
        Collection(path, "r", settings=settings, engine=engine) as reader,
    ):
        ids = np.arange(DOCUMENTS)

        def versions(version: int) -> np.ndarray:
            return np.full((DOCUMENTS, DIM), [version, 0], dtype=np.float32)

        collection.upsert(ids, versions(0))
        written = [0]

        def write() -> None:
            for version in range(1, VERSIONS):
                collection.upsert(ids, versions(version))
                written[0] = version
                extra = [1_000 + version]
                collection.upsert(extra, [[-5.0, 0.0]])
                collection.delete(extra)

        def look(at: Collection, *, least: Callable[[], int]) -> None:
            oldest = least()
            hits = at.search(np.array([1.0, 0.0]), DOCUMENTS + 2)
            found = ~np.isnan(hits.scores)
            near = hits.ids[found & (hits.scores >= 0)].tolist()
            assert sorted(near) == list(range(DOCUMENTS))
            seen = set(hits.scores[found & (hits.scores >= 0)].tolist())
            assert len(seen) == 1, f"half of a call: {seen}"
            assert seen.pop() >= oldest
            assert int(found.sum()) <= DOCUMENTS + 1

        def follow() -> None:
            reader.refresh()
            look(reader, least=lambda: 0)

        crew.run(
            write,
            lambda: look(collection, least=lambda: written[0]),
            lambda: look(collection, least=lambda: written[0]),
            follow,
            lambda: collection.merge(full=collection.generation % 3 == 0) and None,
        )
        collection.check()
        assert collection.count == DOCUMENTS
        assert collection.generation > 2
    with Collection(path, "rw", settings=settings, engine=engine) as collection:
        collection.check()
        assert collection.count == DOCUMENTS
        named = set(collection.segment_names)
    assert {entry.name for entry in (path / "segments").iterdir()} == named


def test_a_reader_sees_the_dead_rows_of_segments_that_serve_on(tmp_path: Path) -> None:
    vectors = np.random.default_rng(5).standard_normal((300, DIM)).astype(np.float32)
    settings = IndexSettings(merge_rows=0)
    create_collection(tmp_path / "c", dim=DIM, metric="l2")
    with Collection(tmp_path / "c", mode="rw", settings=settings, engine=_engine()) as writer:
        writer.upsert(list(range(300)), vectors)
        writer.merge()
    with (
        Collection(tmp_path / "c", mode="rw", settings=settings, engine=_engine()) as writer,
        Collection(tmp_path / "c", mode="r", settings=settings, engine=_engine()) as reader,
    ):
        alive = set(range(300))
        for step in range(6):
            moved, gone = [step, 10 + step, 299], 100 + step
            writer.upsert(moved, vectors[moved] + np.float32(0.5))
            writer.delete([gone])
            alive.discard(gone)
            if step % 3 == 1:
                reader.refresh()  # the change first, the merge after it
            kept = writer.segment_names[0]
            writer.merge()
            assert writer.segment_names[0] == kept
            assert reader.refresh()
            assert reader.generation == writer.generation
            assert reader.count == len(alive)
            found = reader.search(vectors[0], 400).ids
            assert sorted(found[found >= 0].tolist()) == sorted(alive)
            assert not reader.contains([gone]).any()
