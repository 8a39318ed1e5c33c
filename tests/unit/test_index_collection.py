"""A collection's edges: refusals, concurrency, full disks, damage, warming, merging by itself."""

from __future__ import annotations

import errno
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import CapacityError, CorruptError, InputError, StokerError, UnavailableError
from stoker.index import build as build_module
from stoker.index import build_child as child_module
from stoker.index import delta as delta_module
from stoker.index import generation as generation_module
from stoker.index import merger as merger_module
from stoker.index import sealed as sealed_module
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection, create_collection
from stoker.index.delta import Delta
from stoker.index.document_values import Change
from stoker.index.manifest import Manifest
from stoker.index.settings import IndexSettings

DIM = 4


def _engine_module() -> Any:
    path = Path(__file__).resolve().parents[1] / "brute_force_engine.py"
    spec = importlib.util.spec_from_file_location("brute_force_engine_unit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


brute = _engine_module()
MANUAL = IndexSettings(merge_rows=0)


def opened(path: Path, mode: Any = "rw", engine: Any = None, **settings: Any) -> Collection:
    chosen = IndexSettings(**{"merge_rows": 0, **settings})
    return Collection(path, mode, settings=chosen, engine=engine or brute.BruteForceEngine())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "c"
    create_collection(path, dim=DIM, metric="l2")
    return path


@pytest.fixture
def collection(path: Path) -> Iterator[Collection]:
    with opened(path) as collection:
        yield collection


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": np.zeros(3)}, r"queries: expected shape \(n, 4\), found \(1, 3\)"),
        ({"queries": np.zeros((1, 1, 4))}, "queries: expected shape"),
        ({"queries": [np.nan, 0, 0, 0]}, "queries: row 0 is not finite"),
        ({"queries": [1e300, 0, 0, 0]}, "queries: row 0 is not finite"),
        ({"queries": [1e30, 0, 0, 0]}, "queries: row 0 is too long"),
        ({"queries": ["a", "b", "c", "d"]}, "queries: expected float32"),
        ({"k": 0}, "k: expected 1 to 1000, found 0"),
        ({"k": 1001}, "k: expected 1 to 1000, found 1001"),
        ({"k": 1.5}, "k: expected"),
        ({"deadline_ms": -1}, "deadline_ms: expected 0 or more"),
        ({"deadline_ms": float("nan")}, "deadline_ms: expected a number"),
        ({"filter": {"a": None}}, "filter.a"),
    ],
)
def test_a_search_that_cannot_be_answered_is_refused(
    collection: Collection, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        collection.search(**{"queries": np.zeros(DIM), "k": 1, **arguments})


@pytest.mark.parametrize(
    ("ids", "values", "more", "message"),
    [
        ([1], np.zeros((2, DIM)), {}, "vectors: expected 1, one per id, found 2"),
        ([1, 2], np.array([[0] * 4, [0, np.inf, 0, 0]]), {}, "vectors: row 1 is not finite"),
        ([1, "a"], np.zeros((2, DIM)), {}, r"ids\[1\]: expected int"),
        ([1.5], np.zeros((1, DIM)), {}, r"ids\[0\]: expected int or str"),
        ([1], np.zeros((1, DIM)), {"texts": []}, "texts: expected 1"),
        ([1], np.zeros((1, DIM)), {"texts": [b"x"]}, r"texts\[0\]: expected str"),
        ([1], np.zeros((1, DIM)), {"metadata": [{"tenant": "x"}]}, r"metadata\[0\]"),
        ([1], np.zeros((1, DIM)), {"tenant": ""}, "tenant"),
    ],
)
def test_an_upsert_that_cannot_be_kept_is_refused_whole(
    collection: Collection, ids: Any, values: Any, more: dict[str, Any], message: str
) -> None:
    collection.upsert([7], np.ones((1, DIM)))
    with pytest.raises(InputError, match=message):
        collection.upsert(ids, values, **more)
    assert (collection.count, collection.change_offset) == (1, 1)


def test_the_first_id_settles_the_kind_of_all(path: Path) -> None:
    with opened(path) as collection:
        assert collection.id_kind is None
        with pytest.raises(InputError, match="texts: expected 1"):
            collection.upsert([1], np.zeros((1, DIM)), texts=[])
        collection.upsert(["a"], np.zeros((1, DIM)))
        with pytest.raises(InputError, match="expected str"):
            collection.delete([1])
    with opened(path) as collection, pytest.raises(InputError, match="expected str"):
        collection.upsert([1], np.zeros((1, DIM)))


def test_what_is_no_collection_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        Collection(tmp_path / "none")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("nothing of ours")
    (other / "segments").mkdir()
    for mode in ("r", "rw"):
        with pytest.raises(InputError, match=r"no index is there.*`stoker index`"):
            Collection(other, mode)  # type: ignore[arg-type]
    assert sorted(place.name for place in other.iterdir()) == ["notes.txt", "segments"]
    (other / "segments" / "s00000001").mkdir()
    with pytest.raises(CorruptError, match="CURRENT: missing"):
        Collection(other)
    with pytest.raises(InputError, match="exists already"):
        create_collection(path, dim=DIM)
    with pytest.raises(InputError, match="mode"):
        Collection(path, "w")  # type: ignore[arg-type]


def test_one_process_writes_and_any_number_read(path: Path) -> None:
    with opened(path) as writer:
        with pytest.raises(UnavailableError, match="open for writing"):
            opened(path)
        with opened(path, "r") as reader, opened(path, "r"):
            writer.upsert([1], np.zeros((1, DIM)))
            assert reader.count == 0
            assert reader.refresh()
            assert reader.count == 1
            assert not reader.refresh()
            with pytest.raises(InputError, match="opened for reading"):
                reader.delete([1])
    with opened(path) as writer:
        assert writer.count == 1


def test_a_closed_collection_says_so(path: Path) -> None:
    collection = opened(path)
    collection.close()
    collection.close()
    with pytest.raises(UnavailableError, match="closed"):
        collection.search(np.zeros(DIM))
    with pytest.raises(UnavailableError, match="closed"):
        collection.upsert([1], np.zeros((1, DIM)))


# -- edges -------------------------------------------------------------------------------------


def test_an_empty_collection_answers_nothing(collection: Collection) -> None:
    hits = collection.search(np.zeros((2, DIM)), 3)
    assert hits.ids.shape == (2, 3)
    assert np.isnan(hits.scores).all()
    assert hits.completeness.tolist() == [1.0, 1.0]
    assert collection.search(np.zeros(DIM), 3).ids.shape == (3,)
    assert collection.upsert([], np.zeros((0, DIM))) == 0
    assert not collection.merge().merged


def test_a_zero_vector_has_cosine_zero(tmp_path: Path) -> None:
    create_collection(tmp_path / "cosine", dim=DIM, metric="cosine")
    with opened(tmp_path / "cosine") as collection:
        collection.upsert([1, 2], np.array([[0.0] * 4, [2, 0, 0, 0]]))
        hits = collection.search(np.array([5.0, 0, 0, 0]), 2)
        assert hits.ids.tolist() == [2, 1]
        np.testing.assert_allclose(hits.scores, [1.0, 0.0], atol=1e-6)


def test_reads_of_one_search_add_up_over_segments(collection: Collection) -> None:
    for step in range(3):
        collection.upsert(np.arange(4 + step) + 10 * step, vectors(4 + step, step))
        collection.merge()
    hits = collection.search(np.zeros(DIM), 5)
    assert len(collection.segment_names) >= 1
    assert hits.pages_read == len(collection.segment_names)
    assert hits.bytes_read == 4096 * len(collection.segment_names)


def test_merges_keep_the_number_of_segments_bounded(path: Path) -> None:
    with opened(path, segments_max=3) as collection:
        for step in range(8):
            first = 1000 * step
            count = 64 >> step
            collection.upsert(np.arange(first, first + max(1, count)), vectors(max(1, count)))
            collection.merge()
            assert len(collection.segment_names) <= 3
        collection.check()


def test_a_segment_of_outdated_rows_is_rewritten(path: Path) -> None:
    with opened(path, dead_ratio_max=0.3) as collection:
        collection.upsert(np.arange(100), vectors(100))
        collection.merge()
        collection.delete(np.arange(40))
        assert collection.merge().segments_in == 1
        assert collection.count == 60
        assert len(collection.segment_names) == 1


def test_dead_rows_are_made_anew_after_merges_that_kept_their_segment(path: Path) -> None:
    with opened(path) as collection:
        collection.upsert(range(40), np.eye(40, DIM))
        collection.merge(full=True)
        collection.delete([3, 4])
        collection.merge(full=False)
        assert len(collection.segment_names) == 1
    for file in (path / "dead").iterdir():
        file.unlink()
    with opened(path) as collection:
        assert collection.count == 38
        assert not {3, 4} & set(collection.search(np.ones(DIM), 40).ids.tolist())
        # Once no segment is older than a delete, it is forgotten.
        collection.merge(full=True)
    with opened(path) as collection:
        assert collection.count == 38
        store = collection._serving.store
        assert not [change for change in store.changes(0) if change.deleted]


def test_heat_reaches_the_build_by_the_segments_own_names(path: Path) -> None:
    seen: list[Any] = []

    class Engine(brute.BruteForceEngine):  # type: ignore[misc,name-defined]
        def build(self, *args: Any, **more: Any) -> None:
            seen.append(more["heat"])
            super().build(*args, **more)

    with opened(path, engine=Engine()) as collection:
        collection.upsert([1, 2], vectors(2))
        collection.heat_source = lambda: {("default", "2"): 3.0, ("default", "9"): 1.0}
        collection.merge()
        collection.upsert([1], vectors(1), tenant="a")
        collection.merge(heat={("a", "1"): 2.0, 2: 1.0}, full=True)
    assert seen == [{2: 3.0}, {"a\x1f1": 2.0, "default\x1f2": 1.0}]


def test_units_find_their_segment_and_only_while_it_serves(path: Path) -> None:
    with opened(path) as collection:
        collection.upsert(np.arange(40), vectors(40))
        collection.merge()
        collection.upsert(np.arange(100, 108), vectors(8))
        collection.merge()
        assert len(collection.segment_names) == 2
        # A merge loads what the first searches of its segment will need.
        assert collection.resident().kind("links").resident == 12
    with opened(path) as collection:
        assert collection.resident().kind("links").resident == 0
        (batch,) = collection.unit_batches({("default", "103"): 2.0, ("default", "x"): 1.0})
        assert (batch.source, batch.kind, batch.unit_bytes) == ("index", "links", 4096)
        assert len(set(batch.units.tolist())) == 10 + 2
        assert batch.benefit[0] == 2.0
        assert (np.diff(batch.benefit) <= 0).all()
        counts = collection.load_units("links", batch.units[:5])
        assert (counts.loaded, counts.already, counts.not_reached) == (5, 0, 0)
        assert collection.resident().kind("links").resident == 5
        assert collection.total_bytes() == 4096 * 12
        collection.merge(full=True)
        counts = collection.load_units("links", batch.units)
        assert counts.not_reached == len(batch.units)


# -- while other things go on ------------------------------------------------------------------


def test_a_search_holds_its_segments_through_a_merge(path: Path) -> None:
    with opened(path) as collection:
        collection.upsert([1, 2], vectors(2))
        collection.merge()
        folder = path / "segments" / collection.segment_names[0]
        with collection._serving.taken() as view:
            collection.upsert([3], vectors(1))
            collection.merge(full=True)
            assert folder.is_dir()
            assert view.segments[0].sealed.segment.count == 2
            assert not view.segments[0].sealed.segment.closed  # type: ignore[attr-defined]
        assert not folder.exists()


def test_a_reader_elsewhere_holds_its_segments_through_a_merge(path: Path) -> None:
    with opened(path) as writer:
        writer.upsert([1, 2], vectors(2))
        writer.merge()
        folder = path / "segments" / writer.segment_names[0]
        with opened(path, "r") as reader:
            writer.upsert([3], vectors(1))
            writer.merge(full=True)
            assert folder.is_dir()
            assert reader.count == 2
            assert reader.refresh()
            assert reader.count == 3
        writer.upsert([4], vectors(1))
        writer.merge()
        assert not folder.exists()


def test_changes_and_searches_go_on_while_a_merge_builds(path: Path) -> None:
    building, go_on = threading.Event(), threading.Event()

    class SlowEngine(brute.BruteForceEngine):  # type: ignore[misc,name-defined]
        def build(self, *args: Any, **more: Any) -> None:
            building.set()
            assert go_on.wait(60)
            super().build(*args, **more)

    with opened(path, engine=SlowEngine()) as collection:
        collection.upsert(np.arange(10), vectors(10))
        merge = threading.Thread(target=collection.merge)
        merge.start()
        assert building.wait(60)
        collection.upsert([3, 100], np.zeros((2, DIM)))
        collection.delete([4])
        assert collection.search(np.zeros(DIM), 2).scores.tolist() == [0.0, 0.0]
        go_on.set()
        merge.join()
        collection.check()
        assert collection.generation == 2
        assert collection.count == 10
        hits = collection.search(np.zeros(DIM), 20)
        ids = hits.ids[~np.isnan(hits.scores)]
        assert sorted(ids.tolist()) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 100]
    with opened(path) as collection:
        collection.check()
        assert collection.count == 10


def test_closing_gives_up_a_merge_and_loses_nothing(path: Path) -> None:
    building = threading.Event()
    errors: list[StokerError] = []

    class EndlessEngine(brute.BruteForceEngine):  # type: ignore[misc,name-defined]
        def build(self, *args: Any, **more: Any) -> None:
            building.set()
            while True:
                more["progress"]("link", 0, 1)

    collection = opened(path, engine=EndlessEngine())
    collection.upsert([1], vectors(1))

    def merge() -> None:
        try:
            collection.merge()
        except StokerError as error:
            errors.append(error)

    thread = threading.Thread(target=merge)
    thread.start()
    assert building.wait(60)
    collection.close()
    thread.join()
    assert "closed while merging" in str(errors[0])
    with opened(path) as again:
        assert again.count == 1
        assert list((path / "segments").iterdir()) == []


def test_enough_changes_start_a_merge_by_themselves(path: Path) -> None:
    merged = threading.Event()

    class Engine(brute.BruteForceEngine):  # type: ignore[misc,name-defined]
        def open(self, *args: Any, **more: Any) -> Any:
            segment = super().open(*args, **more)
            merged.set()
            return segment

    with opened(path, engine=Engine(), merge_rows=8) as collection:
        collection.upsert(np.arange(7), vectors(7))
        assert not merged.is_set()
        collection.upsert([7], vectors(1))
        assert merged.wait(60)
    with opened(path) as collection:
        collection.check()
        assert collection.count == 8


def test_changes_past_the_bound_are_refused_and_start_a_merge(path: Path) -> None:
    with opened(path, delta_rows_max=4) as collection:
        collection.upsert(np.arange(4), vectors(4))
        with pytest.raises(CapacityError, match="4 changed rows wait for a merge"):
            collection.upsert([9], vectors(1))
        assert CapacityError.retriable
        collection.delete([0])
        collection.merge()
        collection.upsert([9], vectors(1))
        assert collection.count == 4


def test_a_failing_background_merge_is_counted_and_tried_again(path: Path) -> None:
    class BrokenOnce(brute.BruteForceEngine):  # type: ignore[misc,name-defined]
        tries = 0
        done = threading.Event()

        def build(self, *args: Any, **more: Any) -> None:
            BrokenOnce.tries += 1
            if BrokenOnce.tries == 1:
                raise OSError(errno.EIO, "input/output error")
            super().build(*args, **more)
            BrokenOnce.done.set()

    with opened(path, engine=BrokenOnce(), merge_rows=4) as collection:
        step = 0
        while not BrokenOnce.done.is_set():
            collection.upsert([step], vectors(1, step))
            step += 1
        assert collection.merges_failed == 1
        collection.check()
        assert collection.count == step


# -- full disks and damage ---------------------------------------------------------------------


@pytest.mark.parametrize("place", ["build", "current", "spool"])
def test_a_full_disk_leaves_the_old_generation_whole(
    path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullEngine(brute.BruteForceEngine):  # type: ignore[misc,name-defined]
        armed = False

        def build(self, target: Path, *args: Any, **more: Any) -> None:
            if self.armed and place == "build":
                (target.parent / f".{target.name}.tmp").mkdir()
                raise full
            super().build(target, *args, **more)

    engine = FullEngine()
    with opened(path, engine=engine) as collection:
        collection.upsert([1, 2], vectors(2))
        collection.merge()
        collection.upsert([2, 3], vectors(2, 1))
        engine.armed = True
        with monkeypatch.context() as patch:
            if place == "current":
                engine.armed = False

                def refuse(folder: Path, *args: Any) -> None:
                    raise generation_module.storage_error(folder, full)

                patch.setattr(merger_module, "write_current", refuse)
            if place == "spool":
                real_open = Path.open

                def no_spool(self: Path, *args: Any, **more: Any) -> Any:
                    if self.name.endswith(".vectors"):
                        raise full
                    return real_open(self, *args, **more)

                patch.setattr(Path, "open", no_spool)
            with pytest.raises(CapacityError, match="No space left"):
                collection.merge(full=True)
        assert (collection.generation, collection.count) == (2, 3)
        assert collection.search(np.zeros(DIM), 5).scores[2] >= 0
        engine.armed = False
        assert collection.merge(full=True).merged
        collection.check()
    with opened(path) as again:
        again.check()
        assert again.count == 3
        assert len(list((path / "segments").iterdir())) == 1


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_current_is_refused(path: Path, seed: int) -> None:
    current = path / "CURRENT"
    data = bytearray(current.read_bytes())
    rng = np.random.default_rng(seed)
    if seed % 3:
        data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
    else:
        del data[int(rng.integers(0, len(data))) :]
    current.write_bytes(bytes(data))
    with pytest.raises(CorruptError, match="CURRENT"):
        Collection(path)


def test_a_lost_segment_is_named(path: Path) -> None:
    with opened(path) as collection:
        collection.upsert([1], vectors(1))
        collection.merge()
        folder = path / "segments" / collection.segment_names[0]
    folder.rename(path / "elsewhere")
    with pytest.raises(CorruptError, match=folder.name):
        opened(path, "r")


@pytest.mark.parametrize("named", [True, False], ids=["of now", "of an older generation"])
@pytest.mark.parametrize("kind", ["dead", "filters"])
def test_a_folder_in_the_place_of_a_derived_file_is_replaced(
    path: Path, kind: str, named: bool
) -> None:
    with opened(path) as collection:
        collection.upsert(range(20), vectors(20))
        collection.merge()
        collection.delete([3])
        collection.upsert([20], vectors(1))
        collection.merge()
        collection.check()
    (dead,) = (path / "dead").iterdir()
    name = dead.name if kind == "dead" else dead.name.partition("-")[2]
    place = path / kind / (name if named else f"9-{name}")
    place.unlink(missing_ok=True)
    (place / "inner").mkdir(parents=True)
    with opened(path) as again:
        again.check()
        assert again.count == 20
        assert not again.contains([3]).any()
        again.merge(full=True)
        assert again.count == 20
    assert not place.exists()


def test_a_replaced_segment_that_cannot_be_removed_fails_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, name: str) -> None:
        raise PermissionError(13, "Permission denied", str(folder / name))

    with opened(path) as collection:
        collection.upsert(range(4), vectors(4))
        collection.merge()
        (old,) = collection.segment_names
        with monkeypatch.context() as patch, collection._serving.taken():
            collection.upsert([4], vectors(1))
            collection.merge(full=True)
            patch.setattr("stoker.index.serving.remove_segment", refuse)
            # The last to use it is who leaves this block.
        assert collection.count == 5
    assert (path / "segments" / old).exists()
    with opened(path) as again:
        assert again.count == 5
        assert old not in {place.name for place in (path / "segments").iterdir()}


def test_a_change_log_from_before_the_generation_is_refused(path: Path, tmp_path: Path) -> None:
    with opened(path) as collection:
        collection.upsert([1], vectors(1))
        collection.merge()
    other = tmp_path / "other"
    create_collection(other, dim=DIM, metric="l2")
    for name in ("documents.db", "documents.db-wal", "documents.db-shm"):
        (path / name).unlink(missing_ok=True)
    (other / "documents.db").rename(path / "documents.db")
    with pytest.raises(CorruptError, match="expected changes up to 1 at least"):
        opened(path)


# -- the delta's graphs ------------------------------------------------------------------------


def test_full_blocks_are_walked_and_find_what_a_scan_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_module, "BLOCK_ROWS", 256)
    delta = Delta(DIM, "l2")
    points = vectors(700)
    changes = [
        Change(i + 1, "default", i, False, None, {"even": i % 2 == 0}, points[i])
        for i in range(700)
    ]
    delta.apply(changes)
    assert delta.block_is_due
    while delta.build_block(delta.view()):
        pass
    view = delta.view()
    assert [(block.start, block.stop) for block in view.blocks] == [(0, 256), (256, 512)]
    assert all(block.recall_low > 0.8 for block in view.blocks)
    delta.apply([Change(701, "default", i, True, None, {}, None) for i in range(0, 600, 3)])
    delta.check()
    view = delta.view()
    alive = np.array([i % 3 != 0 or i >= 600 for i in range(700)])
    same = 0
    for query in vectors(40, 9):
        rows, scores = view.search(query[None], 5, None)
        distances = np.where(alive, ((points - query) ** 2).sum(axis=1), np.inf)
        exact = np.argsort(distances)[:5]
        assert alive[rows[0]].all()
        np.testing.assert_allclose(scores[0], distances[rows[0]], rtol=1e-4)
        same += len(set(exact.tolist()) & set(rows[0].tolist()))
    assert same >= 0.95 * 5 * 40
    few = np.zeros(700, dtype=np.bool_)
    few[[1, 301, 650]] = True
    rows, _ = view.search(points[:1], 5, few)
    assert sorted(rows[0].tolist()) == [-1, -1, 1, 301, 650]


# -- native segments ---------------------------------------------------------------------------


def test_a_built_collection_serves_and_changes(tmp_path: Path) -> None:
    path = tmp_path / "built"
    points = np.random.default_rng(3).standard_normal((500, 16)).astype(np.float32)
    report = build_collection(
        path, points, [f"d{i}" for i in range(500)], metric="cosine", threads=1
    )
    assert (report.count, report.path) == (500, str(path))
    with Collection(path, "rw", settings=MANUAL) as collection:
        assert collection.search(points[7], 1).ids.tolist() == ["d7"]
        collection.delete(["d7"])
        collection.upsert(["d8", "new"], points[[7, 9]], metadata=[{"n": 1}, {"n": 2}])
        hits = collection.search(points[7], 2)
        assert hits.ids[0] == "d8"
        assert "d7" not in hits.ids
        collection.merge(full=True)
        collection.check()
        assert collection.count == 500
        hits = collection.search(points[9], 3, filter={"n": {"gte": 2}})
        assert hits.ids.tolist() == ["new", None, None]
    with Collection(path / "segments" / collection.segment_names[0]) as bare:
        assert bare.count == 500
        assert bare.search(points[7], 1).ids.tolist() == ["d8"]
        assert not bare.refresh()
    with pytest.raises(InputError, match="bare segment cannot be changed"):
        Collection(path / "segments" / collection.segment_names[0], "rw")


def test_half_precision_stays_half_through_merges(tmp_path: Path) -> None:
    path = tmp_path / "half"
    points = vectors(64).astype(np.float16)
    build_collection(path, points, metric="ip")
    with Collection(path, "rw", settings=MANUAL) as collection:
        collection.upsert([100], vectors(1, 5))
        collection.merge(full=True)
        with collection._serving.taken() as view:
            segment = view.segments[0].sealed.segment
            assert segment.manifest.vector_dtype == "float16"  # type: ignore[attr-defined]
            rows = segment.rows_of([3])
            np.testing.assert_array_equal(segment.vectors(rows)[0], points[3].astype(np.float32))


# -- building apart ----------------------------------------------------------------------------


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collection]:
    """A collection whose every merge builds in a process of its own, with 50 changes to merge."""
    monkeypatch.setattr(sealed_module, "APART_ROWS_MIN", 1)
    path = tmp_path / "apart"
    create_collection(path, dim=DIM, metric="l2")
    with Collection(path, "rw", settings=MANUAL) as collection:
        collection.upsert([f"d{i}" for i in range(50)], vectors(50), tenant="a")
        yield collection


def test_a_merge_builds_in_a_process_of_its_own(
    apart: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = child_module.subprocess.Popen

    def noted(*args: Any, **more: Any) -> Any:
        started.append(popen(*args, **more))
        return started[-1]

    monkeypatch.setattr(child_module.subprocess, "Popen", noted)
    steps: set[str] = set()
    report = apart.merge(
        heat={("a", "d3"): 2.0}, progress=lambda what, done, total: steps.add(what)
    )
    assert report.rows == 50
    assert len(started) == 1
    assert started[0].returncode is not None
    assert {"gather", "link"} <= steps
    apart.check()
    assert apart.search(vectors(50)[7], 1, ef=50).ids.tolist() == ["d7"]
    names = {entry.name for entry in (apart.path / "segments").iterdir()}
    assert names == set(apart.segment_names)


def test_a_few_hundred_rows_are_built_apart_and_a_few_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def unavailable(path: Path, rows: Any, *args: Any, **more: Any) -> None:
        asked.append(len(rows))
        raise OSError("no process here")

    monkeypatch.setattr(child_module, "build_apart", unavailable)
    create_collection(tmp_path / "c", dim=DIM, metric="l2")
    with Collection(tmp_path / "c", "rw", settings=MANUAL) as collection:
        collection.upsert(list(range(20)), vectors(20))
        collection.merge()
        assert asked == []
        collection.upsert(list(range(20, 320)), vectors(300))
        collection.merge()
        assert asked == [320]
        collection.check()


def test_where_no_process_can_be_started_the_merge_builds_here(
    apart: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module.sys, "executable", "/nowhere/python")
    assert apart.merge().rows == 50
    apart.check()


@pytest.mark.parametrize("how", ["dies", "fails", "is stopped"])
def test_a_building_process_that_ends_early_changes_nothing(
    apart: Collection, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "dies":
        popen = child_module.subprocess.Popen

        def dead(*args: Any, **more: Any) -> Any:
            process = popen(*args, **more)
            process.kill()
            return process

        monkeypatch.setattr(child_module.subprocess, "Popen", dead)
    progress = None
    if how == "fails":
        real = child_module.build_apart

        def elsewhere(path: Path, given: Any, *args: Any, **more: Any) -> None:
            class Lost:
                filename, dtype, shape = "/nowhere/vectors", given.dtype, given.shape

            real(path, Lost(), *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(child_module, "build_apart", elsewhere)
    if how == "is stopped":

        def progress(what: str, done: int, total: int) -> None:
            if what == "link":
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError if how == "is stopped" else UnavailableError):
        apart.merge(progress=progress)
    assert (apart.generation, apart.count) == (1, 50)
    assert list((apart.path / "segments").iterdir()) == []
    monkeypatch.undo()
    assert apart.merge().rows == 50


@pytest.mark.parametrize(("asked", "links"), [(None, 24), (5, 5)])
def test_many_rows_take_more_links_and_merges_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, links: int
) -> None:
    monkeypatch.setattr(build_module, "_FEW_ROWS", 99)
    vectors = np.random.default_rng(7).standard_normal((100, 8)).astype(np.float32)
    build_collection(tmp_path / "few", vectors[:99], m=asked)
    assert generation_module.read_current(tmp_path / "few").m == (asked or 16)
    build_collection(tmp_path / "many", vectors, m=asked)
    with Collection(tmp_path / "many", "rw", settings=IndexSettings(merge_rows=0)) as collection:
        collection.upsert([100], vectors[:1] + 1)
        collection.merge(full=True)
        (name,) = collection.segment_names
    assert Manifest.read(tmp_path / "many" / "segments" / name).m == links
