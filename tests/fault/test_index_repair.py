"""Damage of every file: `verify` names it, `repair` brings back all that is still somewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import CorruptError, InputError, StokerError, UnavailableError
from stoker.index import build
from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection, create_collection
from stoker.index.manifest import FILES
from stoker.index.paged_file import HEADER_BYTES
from stoker.index.repair import repair
from stoker.index.settings import IndexSettings
from stoker.index.verify import verify

DIM = 72  # long enough for coarse codes, so that segments have every file
SETTINGS = IndexSettings(merge_rows=0)
SEGMENT_FILES = [*FILES.values(), "manifest.json"]


def points(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, small_groups: None
) -> tuple[Path, dict[Any, np.ndarray]]:
    """Two segments, dead rows in the older one, two tenants, and changes that are not sealed."""
    path = tmp_path_factory.mktemp("repair") / "c"
    create_collection(path, dim=DIM, metric="l2")
    model: dict[Any, np.ndarray] = {}

    def put(collection: Collection, ids: list[int], seed: int, tenant: str = "default") -> None:
        vectors = points(len(ids), seed)
        metadata = [{"n": i % 5} for i in ids]
        collection.upsert(ids, vectors, metadata=metadata, tenant=tenant)
        model.update({(tenant, i): v for i, v in zip(ids, vectors, strict=True)})

    with Collection(path, "rw", settings=SETTINGS) as collection:
        put(collection, list(range(200)), 1)
        put(collection, list(range(40)), 2, "a")
        collection.merge()
        put(collection, list(range(180, 250)), 3)
        collection.delete(list(range(10)))
        for i in range(10):
            model.pop(("default", i))
        collection.merge()
        assert len(collection.segment_names) == 2
        put(collection, list(range(240, 260)), 4)
        collection.delete([20])
        model.pop(("default", 20))
    return path, model


@pytest.fixture
def damaged(
    made: tuple[Path, dict[Any, np.ndarray]], tmp_path: Path
) -> tuple[Path, dict[Any, np.ndarray]]:
    shutil.copytree(made[0], tmp_path / "c")
    return tmp_path / "c", made[1]


def contents(path: Path) -> dict[Any, np.ndarray]:
    """Return what the collection holds, by reading ids and vectors of all its live rows."""
    found: dict[Any, np.ndarray] = {}
    with Collection(path, "rw", settings=SETTINGS) as collection:
        collection.check()
        collection.merge(full=True)
        with collection._serving.taken() as view:
            for segment in view.segments:
                rows = np.arange(segment.sealed.entry.count)
                keys = segment.sealed.keys_at(rows, "int")
                vectors = segment.sealed.segment.vectors(rows)
                found.update(zip(keys, vectors, strict=True))
    return found


def assert_same(found: dict[Any, np.ndarray], model: dict[Any, np.ndarray]) -> None:
    assert found.keys() == model.keys()
    for key, vector in model.items():
        np.testing.assert_array_equal(found[key], vector)


def hurt(path: Path, how: str, seed: int = 0) -> None:
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    if how == "delete":
        path.unlink()
        return
    if how == "cut":
        del data[len(data) // 2 :]
    elif how == "flip":
        data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
    elif how == "page":
        start = 4096 * int(rng.integers(1, max(2, len(data) // 4096)))
        data[start : start + 4096] = bytes(4096)
    path.write_bytes(bytes(data))


def segment_folders(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in SEGMENT_FILES for how in ("delete", "page")]
    + [("vectors.stk", "cut"), ("ids.stk", "cut"), ("manifest.json", "cut")],
)
def test_a_damaged_segment_file_is_named_and_nothing_is_lost(
    damaged: tuple[Path, dict[Any, np.ndarray]], name: str, how: str
) -> None:
    path, model = damaged
    hurt(segment_folders(path)[0] / name, how)
    found = verify(path)
    if name == "manifest.json" and how == "page":  # Shorter than a page: not touched.
        assert len(found.damage) <= 1
        return
    assert {d.file for d in found.damage} == {f"segments/s00000002/{name}"}
    report = repair(path)
    assert report.repaired
    assert report.whole
    assert report.rows_lost == 0
    assert_same(contents(path), model)


@pytest.mark.parametrize("seed", range(8))
def test_any_flipped_bit_in_a_segment_is_found(
    damaged: tuple[Path, dict[Any, np.ndarray]], seed: int
) -> None:
    path, model = damaged
    folder = segment_folders(path)[seed % 2]
    hurt(folder / SEGMENT_FILES[seed % len(SEGMENT_FILES)], "flip", seed)
    assert not verify(path).whole
    assert repair(path).rows_lost == 0
    assert_same(contents(path), model)


def test_both_segments_gone_come_back_from_the_documents(
    damaged: tuple[Path, dict[Any, np.ndarray]],
) -> None:
    path, model = damaged
    for folder in segment_folders(path):
        for name in SEGMENT_FILES:
            (folder / name).unlink()
    report = repair(path)
    assert (report.rows_from_segments, report.whole) == (0, True)
    assert_same(contents(path), model)


def test_swapped_files_are_found(damaged: tuple[Path, dict[Any, np.ndarray]]) -> None:
    path, model = damaged
    first, second = segment_folders(path)
    shutil.copy(second / "vectors.stk", first / "vectors.stk")
    (damage,) = verify(path).damage
    assert "another segment's" in damage.what
    assert repair(path).rows_lost == 0
    assert_same(contents(path), model)


@pytest.mark.parametrize("folder", ["filters", "dead"])
def test_what_is_derived_is_made_anew(
    damaged: tuple[Path, dict[Any, np.ndarray]], folder: str
) -> None:
    path, model = damaged
    for file in (path / folder).iterdir():
        file.write_bytes(b"junk")
    found = verify(path)
    assert found.damage
    assert all(d.derived for d in found.damage)
    with Collection(path) as collection:  # Searches are right before any repair.
        assert collection.count == len(model)
    report = repair(path)
    assert report.whole
    assert verify(path).whole
    assert_same(contents(path), model)


@pytest.mark.parametrize("how", ["delete", "cut", "flip"])
def test_a_damaged_current_is_put_together_again(
    damaged: tuple[Path, dict[Any, np.ndarray]], how: str
) -> None:
    path, model = damaged
    hurt(path / "CURRENT", how)
    with pytest.raises(CorruptError):
        Collection(path)
    report = repair(path)
    assert report.whole
    assert report.rows_lost == 0
    assert_same(contents(path), model)


def test_current_and_segments_gone_leaves_the_documents(
    damaged: tuple[Path, dict[Any, np.ndarray]],
) -> None:
    path, model = damaged
    (path / "CURRENT").unlink()
    shutil.rmtree(path / "segments")
    (path / "segments").mkdir()
    with pytest.raises(InputError, match="--metric"):
        repair(path)
    report = repair(path, metric="l2")
    assert report.whole
    assert_same(contents(path), model)


@pytest.mark.parametrize("how", ["delete", "cut", "page"])
@pytest.mark.parametrize("seed", range(3))
def test_damaged_documents_keep_what_segments_hold(
    damaged: tuple[Path, dict[Any, np.ndarray]], how: str, seed: int
) -> None:
    path, model = damaged
    for name in ("documents.db-wal", "documents.db-shm"):
        (path / name).unlink(missing_ok=True)
    hurt(path / "documents.db", how, seed)
    if verify(path).whole:
        return  # A page that SQLite does not use.
    report = repair(path)
    assert report.whole
    found = contents(path)
    # The segments hold all but what was changed since they were sealed (20 upserts, 1 delete).
    sealed = {key for key in model if key[0] == "a" or key[1] < 240}
    assert sealed <= found.keys()
    assert found.keys() <= model.keys() | {("default", 20)}
    for key in sealed:
        np.testing.assert_array_equal(found[key], model[key])


def test_a_lost_vector_is_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c"
    vectors = points(200, 1)
    build_collection(path, vectors, metric="l2")  # No documents that could have it too.
    (folder,) = segment_folders(path)
    hurt(folder / "vectors.stk", "page", 3)
    report = repair(path)
    assert report.whole
    assert 0 < report.rows_lost <= 66
    assert len(report.lost) == report.rows_lost
    found = contents(path)
    assert len(found) == 200 - report.rows_lost
    for tenant, i in found:
        np.testing.assert_array_equal(found[tenant, i], vectors[i])


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("documents", [0, 50, 200])
def test_rows_without_ids_are_counted_as_lost(
    current: bool, documents: int, tmp_path: Path
) -> None:
    """Whether or not CURRENT is lost too; what the documents have of them comes back."""
    path = tmp_path / "c"
    build_collection(path, points(200, 1), metric="l2")
    with Collection(path, "rw", settings=SETTINGS) as collection:
        if documents:
            collection.upsert(list(range(documents)), points(documents, 2))
        collection.merge(full=True)
        collection.upsert([500, 501], points(2, 3))
        collection.merge()
    first, _ = segment_folders(path)
    (first / "ids.stk").unlink()
    if current:
        (path / "CURRENT").unlink()
    report = repair(path)
    assert report.whole
    # Where CURRENT does not say what is dead, the other segment's two may have been among them.
    assert max(0, 200 - documents - 2 * current) <= report.rows_lost <= 200 - documents
    assert len(contents(path)) == documents + 2


@pytest.mark.parametrize("segment", [0, 1])
def test_dead_rows_without_ids_are_not_lost(
    damaged: tuple[Path, dict[Any, np.ndarray]], segment: int
) -> None:
    """Without CURRENT nothing says that they are dead, but all that lives is somewhere else."""
    path, model = damaged
    (path / "CURRENT").unlink()
    (segment_folders(path)[segment] / "ids.stk").unlink()
    report = repair(path)
    assert (report.whole, report.rows_lost) == (True, 0)
    assert_same(contents(path), model)


@pytest.mark.parametrize("segment", [0, 1])
def test_live_rows_without_ids_and_documents_are_all_lost(
    damaged: tuple[Path, dict[Any, np.ndarray]], segment: int
) -> None:
    path, _ = damaged
    for file in [*path.glob("documents.db*"), segment_folders(path)[segment] / "ids.stk"]:
        file.unlink()
    report = repair(path)
    assert report.whole
    # 240 and 70 rows were sealed, of which 20 were replaced and 10 deleted.
    assert (report.rows_lost, len(contents(path))) == ((210, 70) if segment == 0 else (70, 210))


def test_a_bare_segment_is_linked_anew(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    vectors = points(100, 1)
    build_segment(path, vectors, [f"d{i}" for i in range(100)], metric="ip")
    assert verify(path).whole
    hurt(path / "links.stk", "page")
    assert [d.file for d in verify(path).damage] == ["links.stk"]
    report = repair(path)
    assert (report.whole, report.rows_lost) == (True, 0)
    assert (tmp_path / "segment.damaged").is_dir()
    with Collection(path) as collection:
        assert collection.count == 100
        assert collection.contains(["d7"]).all()


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("how", ["delete", "page"])
@pytest.mark.parametrize("name", ["codes", "refine", "coarse", "transform", "ranges"])
def test_what_follows_from_whole_vectors_and_links_is_made_without_linking(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_groups: None,
    name: str,
    how: str,
    bare: bool,
) -> None:
    path = tmp_path / "index"
    vectors = points(300, 1)
    if bare:
        build_segment(path, vectors, metric="l2")
    else:
        build_collection(path, vectors, metric="l2")
    folder = path if bare else segment_folders(path)[0]
    hurt(folder / FILES[name], how)
    if verify(path).whole:
        return  # A page that is zero anyway.

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("linked anew")

    monkeypatch.setattr(build, "_link", refuse)
    report = repair(path)
    assert (report.whole, report.rows_lost) == (True, 0)
    assert "sealed anew with its links" in report.actions[0]
    with Collection(path) as collection:
        found = collection.search(vectors, 1, ef=100)
    assert (np.asarray(found.ids)[:, 0] == np.arange(300)).mean() > 0.99


@pytest.mark.parametrize("other", ["links", "vectors", "ids"])
def test_links_do_not_stay_where_what_they_are_of_is_damaged_too(
    tmp_path: Path, other: str
) -> None:
    path = tmp_path / "index"
    vectors = points(300, 1)
    build_collection(path, vectors, metric="l2")
    with Collection(path, "rw", settings=SETTINGS) as collection:
        collection.upsert(list(range(300)), vectors)
        collection.merge(full=True)
    (folder,) = segment_folders(path)
    for name in ("codes", other):
        hurt(folder / FILES[name], "page")
    report = repair(path)
    assert (report.whole, report.rows_lost) == (True, 0)
    assert "linked anew" in report.actions[0]


def test_an_index_in_use_is_not_repaired(damaged: tuple[Path, dict[Any, np.ndarray]]) -> None:
    path, _ = damaged
    for file in (path / "filters").iterdir():
        file.write_bytes(b"junk")
    with (
        Collection(path, "rw", settings=SETTINGS),
        pytest.raises(UnavailableError, match="open for writing"),
    ):
        repair(path)


def test_a_whole_index_is_left_alone(damaged: tuple[Path, dict[Any, np.ndarray]]) -> None:
    path, _ = damaged
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.suffix != ".db-shm"}
    assert not repair(path).repaired
    after = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.suffix != ".db-shm"}
    assert {p.name for p in before} <= {p.name for p in after}
    assert all(after[p] == t for p, t in before.items() if p.is_file())


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StokerError):
            verify(path)


@pytest.mark.parametrize("sealed", [False, True])
def test_an_answer_promises_nothing_of_pages_that_are_hurt(
    damaged: tuple[Path, dict[Any, np.ndarray]], sealed: bool
) -> None:
    path, model = damaged
    if sealed:  # Else what changed since the last merge is whole, and fills the answer.
        with Collection(path, "rw", settings=SETTINGS) as collection:
            collection.merge()
    folders = segment_folders(path)
    assert len(folders) > 1  # One part alone and several are summed up in different places.
    for folder in folders:
        for name in ("links", "codes", "refine", "coarse", "vectors"):
            file = folder / f"{name}.stk"
            if file.exists():
                with file.open("r+b") as pages:
                    pages.seek(HEADER_BYTES)
                    pages.write(b"\xff" * (file.stat().st_size - HEADER_BYTES))
    queries = np.stack(list(model.values())[:3]).astype(np.float32)
    with Collection(path) as collection:
        hits = collection.search(queries, 5)
    assert np.isnan(hits.scores).all() if sealed else np.isfinite(hits.scores).all()
    assert (hits.completeness < 1).all()
    assert (hits.recall_bound == 0).all()
    assert (hits.expected_recall <= (0.0 if sealed else 0.1)).all()


def test_what_replaced_an_outdated_row_comes_back_from_the_documents(
    damaged: tuple[Path, dict[Any, np.ndarray]],
) -> None:
    """The other segment still has a row under the same id, which does not count any more."""
    path, model = damaged
    (segment_folders(path)[-1] / "ids.stk").write_bytes(b"")
    report = repair(path)
    assert report.whole
    assert report.rows_lost == 0
    assert_same(contents(path), model)
