"""The short way of a search answers as the general one does, and leaves to it what it cannot do."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.direct import DirectSearch
from stoker.index.hits import Hits, Summary
from stoker.index.serving import CollectionClosed
from stoker.index.settings import IndexSettings

DIM = 24
ROWS = 900
EVERYBODY = {"tenant": "default"}
MANUAL = IndexSettings(merge_rows=0)


def points(count: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def built(path: Path, ids: Any = None, metric: Literal["ip", "cosine", "l2"] = "l2") -> Path:
    build_collection(path, points(ROWS), ids, metric=metric, threads=1)
    return path


def opened(path: Path, mode: Literal["r", "rw"] = "r") -> Collection:
    """Open with all of it in memory, and searches of the kinds that tests ask for known."""
    collection = Collection(path, mode, settings=MANUAL)
    for batch in collection.unit_batches({}):
        collection.load_units(batch.kind, batch.units)
    for k in (3, 10):
        collection.search(points(8), k)
    return collection


def direct(collection: Collection) -> DirectSearch:
    found = collection._serving.direct
    assert found is not None
    return found


def assert_alike(one: Hits, other: Hits) -> None:
    for name in ("ids", "scores", *(field.name for field in dataclasses.fields(Summary))):
        left, right = getattr(one, name), getattr(other, name)
        assert type(left) is type(right), name
        np.testing.assert_array_equal(left, right, err_msg=name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, left.shape) == (right.dtype, right.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("direct") / "c")


@pytest.fixture
def collection(folder: Path, tmp_path: Path) -> Iterator[Collection]:
    with opened(Path(shutil.copytree(folder, tmp_path / "c")), "rw") as collection:
        yield collection


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("ids", [None, np.arange(ROWS) * -(1 << 40)], ids=["narrow", "wide"])
def test_it_answers_as_the_general_way(
    tmp_path: Path, metric: Literal["ip", "cosine", "l2"], ids: Any
) -> None:
    with opened(built(tmp_path / "c", ids, metric)) as collection:
        queries = points(20, 2)
        for asked in (queries, queries[4], queries[4:5]):
            short = direct(collection).search(asked, 10, None, None)
            assert short is not None
            assert_alike(short, collection.search(asked, 10, filter=EVERYBODY))
            assert_alike(short, collection.search(asked, 10))


def test_arrays_of_any_layout_are_read_right(collection: Collection) -> None:
    queries = points(40, 3)
    wanted = collection.search(queries[::2].copy(), 10, filter=EVERYBODY)
    sideways = np.asfortranarray(queries[::2])
    for asked in (queries[::2], sideways, queries[::2].astype(np.float64), queries[::2].tolist()):
        assert_alike(collection.search(asked, 10), wanted)
    assert direct(collection).search(sideways, 10, None, None) is not None
    swapped = queries[::2].astype(">f4")
    assert direct(collection).search(swapped, 10, None, None) is None
    assert_alike(collection.search(swapped, 10), wanted)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (np.zeros(DIM - 1, np.float32), r"expected shape \(n, 24\)"),
        (np.zeros((2, DIM + 1), np.float32), r"expected shape \(n, 24\)"),
        (np.zeros((1, 1, DIM), np.float32), "expected shape"),
        (np.float32(1) * np.ones((), np.float32), "expected shape"),
        (np.full(DIM, np.nan, np.float32), "row 0 is not finite"),
        (np.full((1, DIM), np.inf, np.float32), "row 0 is not finite"),
        (np.full(DIM, 1e30, np.float32), "row 0 is too long"),
    ],
)
def test_what_cannot_be_searched_is_left_to_the_general_way(
    collection: Collection, queries: NDArray[np.float32], message: str
) -> None:
    assert direct(collection).search(queries, 10, None, None) is None
    with pytest.raises(InputError, match=message):
        collection.search(queries, 10)


def test_one_bad_row_refuses_the_batch_by_its_number(collection: Collection) -> None:
    queries = points(9, 4)
    queries[6, 3] = np.nan
    with pytest.raises(InputError, match="row 6 is not finite"):
        collection.search(queries, 10)


def test_odd_questions_get_their_usual_answers(collection: Collection) -> None:
    for k in (10.0, "10", None):
        with pytest.raises(InputError, match="k: expected"):
            collection.search(points(1), k)  # type: ignore[arg-type]
    none = collection.search(points(0), 10)
    assert none.ids.shape == none.scores.shape == (0, 10)
    # As wide as the segment, a walk is a scan.
    for _ in range(2):
        everything = collection.search(points(2), ROWS + 5)
        assert (everything.ids[:, :ROWS] >= 0).all()
        assert (everything.ids[:, ROWS:] == -1).all()
        assert np.isnan(everything.scores[:, ROWS:]).all()


def test_it_is_for_whole_segments_alone(collection: Collection) -> None:
    stored = points(ROWS)
    assert collection.search(stored[7], 3).ids[0] == 7
    collection.upsert([5_000], stored[7:8] + 1e-3)
    assert collection._serving.direct is None
    assert collection.search(stored[7], 3).ids[:2].tolist() == [7, 5_000]
    collection.delete([7])
    assert collection.search(stored[7], 3).ids[0] == 5_000
    collection.merge(full=True)
    assert collection.search(stored[7], 3).ids[0] == 5_000
    before = direct(collection)
    assert before.search(stored[7], 3, None, None) is not None
    collection.delete([5_000])
    assert collection._serving.direct is None
    assert collection.search(stored[7], 3).ids[0] != 5_000
    # Who had begun before the change still sees the view of that moment.
    found = before.search(stored[7], 3, None, None)
    assert found is not None
    assert found.ids[0] == 5_000


def test_ids_come_from_memory_or_by_the_general_way(folder: Path) -> None:
    queries = points(4, 5)
    with Collection(folder, settings=MANUAL) as collection:
        batches = {batch.kind: batch.units for batch in collection.unit_batches({})}
        upper = batches.pop("upper")
        for kind, units in batches.items():
            collection.load_units(kind, units)
        collection.search(queries, 3)  # Reads the upper levels.
        wanted = collection.search(queries, 3)
        short = direct(collection)
        assert short.search(queries, 3, None, None) is None
        collection.load_units("upper", upper)
        found = short.search(queries, 3, None, None)
        assert found is not None
        assert_alike(found, wanted)


def test_names_and_tenants_go_the_general_way(tmp_path: Path) -> None:
    with Collection(built(tmp_path / "c", [f"d{i}" for i in range(ROWS)])) as collection:
        assert collection._serving.direct is None
        assert collection.search(points(ROWS)[7], 1).ids.tolist() == ["d7"]


def test_after_the_close_it_gives_nothing(folder: Path) -> None:
    collection = opened(folder)
    short, query = direct(collection), points(1)[0]
    assert short.search(query, 3, None, None) is not None
    collection.close()
    assert collection._serving.direct is None
    assert short.search(query, 3, None, None) is None
    with pytest.raises(CollectionClosed):
        collection.search(query, 3)


def test_closing_waits_for_searches_under_way(folder: Path) -> None:
    with opened(folder) as collection:
        short = direct(collection)
        many = np.tile(points(64), (100, 1))
        ended: list[Hits | None] = []
        begun = threading.Event()

        def search() -> None:
            begun.set()
            ended.append(short.search(many, 10, None, None))

        thread = threading.Thread(target=search)
        thread.start()
        begun.wait()
        collection.close()
        # Either it had begun and has filled its arrays, or it was refused.
        thread.join()
        (found,) = ended
        assert found is None or (found.ids >= 0).all()
        assert short.search(many[:1], 10, None, None) is None
