"""What callers hand to `stoker.build`, `stoker.open` and `Index`: taken, or refused by its name.

Each argument of each call is given each of a heap of strange values. Whatever comes, it is an
answer or an `InputError` that begins with the argument's name, and what is refused changed nothing.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.errors import InputError

DIM = 4
COUNT = 40
NUMBERS = itertools.count()

STRANGE: dict[str, Any] = {
    "None": None,
    "True": True,
    "zero": 0,
    "below": -1,
    "part": 2.5,
    "huge": 10**400,
    "endless": 10**5000,  # more digits than Python writes out
    "nan": float("nan"),
    "inf": float("inf"),
    "numpy nan": np.float32("nan"),
    "decimal": decimal.Decimal("0.5"),
    "complex": 1j,
    "text": "12",
    "no text": "",
    "bytes": b"12",
    "date": datetime.date(2026, 1, 1),
    "list": [1, 2],
    "no list": [],
    "ragged": [[1.0, 2.0], [3.0]],
    "strings": ["a", "b"],
    "of None": [None],
    "tuple": (1, 2),
    "set": {1, 2},
    "dict": {1: 2},
    "nested": {"a": {"b": object()}},
    "array": np.arange(3),
    "no array": np.empty((0, DIM), np.float32),
    "scalar array": np.array(3),
    "objects": np.array([object()]),
    "masked": np.ma.masked_less(np.ones((2, DIM), np.float32) * [[1], [-1]], 0),
    "object": object(),
    "class": int,
}


def vectors(count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stoker.Index]:
    path = tmp_path_factory.mktemp("arguments") / "index"
    stoker.build(path, vectors(), threads=1)
    with stoker.open(path, mode="rw") as opened:
        yield opened


def call(index: stoker.Index, name: str, arguments: dict[str, Any], path: Path) -> Any:
    if name == "build":
        return stoker.build(path, **arguments)
    if name == "open":
        with stoker.open(arguments.pop("path"), **arguments) as opened:
            return opened.search(np.ones(DIM), 1)
    return getattr(index, name)(**arguments)


CALLS: dict[str, dict[str, Any]] = {
    "search": {"query": np.ones(DIM, np.float32), "k": 3, "ef": None, "recall_target": None,
               "deadline_ms": None, "filter": None},
    "warm": {"heat": None, "budget_bytes": None, "deadline_s": None, "unseen_ratio": 0.0},
    "upsert": {"ids": [1], "vectors": np.ones((1, DIM)), "texts": None, "metadata": None,
               "tenant": "default"},
    "delete": {"ids": [9_999], "tenant": "default"},
    "merge": {"heat": None},
    "documents": {"ids": [1], "tenant": "default"},
    "warm_served": {"accesses": {1: 1.0}},
    "build": {"vectors": vectors(), "ids": None, "metric": "l2", "m": 8, "ef_construction": 20,
              "heat": None, "threads": 1},
    "open": {"memory_bytes": None, "mode": "r"},
}  # fmt: skip
# What the message calls an argument, where the name alone would not say it.
SAID_AS = {
    ("search", "query"): "queries",
    ("warm_served", "accesses"): "heat",
    ("search", "filter"): "filter",
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, given in CALLS.items() for one in given]
)
def test_an_argument_of_any_kind_is_taken_or_refused_by_name(
    index: stoker.Index, tmp_path: Path, name: str, argument: str
) -> None:
    said = SAID_AS.get((name, argument), argument)
    refused = []
    for what, value in STRANGE.items():
        arguments = CALLS[name] | {argument: copy.copy(value)}
        if name == "open":
            arguments["path"] = index._collection.path
        before = (index.count, index._collection.change_offset)
        message = ""
        try:
            call(index, name, arguments, tmp_path / str(next(NUMBERS)))
        except InputError as error:
            message = str(error)
        except Exception as error:
            pytest.fail(f"{name}({argument}={what}): {type(error).__name__}: {error}")
        if message:
            # What one argument has too many or few of may be told of its partner.
            assert message.startswith(("vectors", "ids", said)), f"{argument}={what}: {message}"
            assert (index.count, index._collection.change_offset) == before, what
            refused.append(what)
    assert "object" in refused


def test_what_is_refused_is_refused_too_once_its_equal_was_answered(tmp_path: Path) -> None:
    """Searches asked for before take a short way, which knows them by their numbers."""
    stoker.build(tmp_path / "i", vectors(2_000), threads=1)
    with stoker.open(tmp_path / "i") as index:
        index.warm()
        query: dict[str, Any] = {"query": np.ones(DIM, np.float32)}
        for _ in range(3):
            index.search(**query, k=1, ef=20)
            index.search(**query, k=1, recall_target=1)
        assert index._collection._serving.direct is not None
        for wrong in ({"k": 1.0}, {"k": True}, {"ef": 20.0}, {"recall_target": True}):
            with pytest.raises(InputError, match=next(iter(wrong))):
                index.search(**query, **{"k": 1, **wrong})


@pytest.mark.parametrize("name", ["upsert", "delete", "documents"])
def test_one_text_is_no_list_of_its_letters(tmp_path: Path, name: str) -> None:
    stoker.build(tmp_path / "i", vectors(3), ["1", "2", "12"], threads=1)
    with stoker.open(tmp_path / "i", mode="rw") as index:
        more = {"vectors": np.ones((2, DIM))} if name == "upsert" else {}
        with pytest.raises(InputError, match="ids: expected a list, found one str"):
            getattr(index, name)("12", **more)
        assert index.count == 3


def test_a_set_names_no_vector_and_deletes_as_well_as_a_list(index: stoker.Index) -> None:
    index.upsert([500, 501], np.ones((2, DIM)))
    count = index.count
    both: Any = {500, 501}
    with pytest.raises(InputError, match="ids: expected a list, found one set"):
        index.upsert(both, np.zeros((2, DIM)))
    index.delete(both)
    assert index.count == count - 2


def test_a_reader_sees_what_was_written_when_it_looks(tmp_path: Path) -> None:
    stoker.build(tmp_path / "i", vectors(), threads=1)
    with stoker.open(tmp_path / "i", mode="rw") as writer, stoker.open(tmp_path / "i") as reader:
        writer.upsert([77], np.full((1, DIM), 9.0))
        assert (writer.count, reader.count) == (COUNT + 1, COUNT)
        assert reader.refresh()
        assert reader.search(np.ones(DIM), 1).ids.tolist() == [77]
        writer.merge(full=True, heat={77: 1.0, ("default", 3): 2.0})
        assert reader.refresh()
        assert (reader.generation, reader.count) == (2, COUNT + 1)
        assert not reader.refresh()


@pytest.mark.parametrize("key", [(1, 2), (None, "a"), (b"t", "a"), ("t", True), ("t", "a", "b")])
def test_heat_of_no_tenant_is_refused_and_not_left_unheeded(index: stoker.Index, key: Any) -> None:
    with pytest.raises(InputError, match="heat: expected an id, or "):
        index.warm({key: 1.0})


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16])
def test_numbers_of_numpy_are_numbers(index: stoker.Index, number: Any) -> None:
    short: Any = {"k": np.int16(3), "recall_target": number(0.9), "deadline_ms": number(1e4)}
    wide: Any = {"k": np.uint8(3), "ef": np.int64(30)}
    for arguments in (short, wide):
        assert len(index.search(np.ones(DIM), **arguments)) == 3


def test_a_size_may_be_written_as_a_float(index: stoker.Index) -> None:
    sizes: dict[str, Any] = {"memory_bytes": 8e6}
    budgets: dict[str, Any] = {"budget_bytes": np.float64(4e6)}
    with stoker.open(index._collection.path, **sizes) as opened:
        assert opened.warm(**budgets).budget_bytes == 4_000_000


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_an_answer_travels_between_processes(
    index: stoker.Index, filtered: bool, single: bool
) -> None:
    query = vectors(3)[0] if single else vectors(3)
    hits = index.search(query, 2, filter={"tenant": "default"} if filtered else None)
    for again in (pickle.loads(pickle.dumps(hits)), copy.deepcopy(hits)):
        assert repr(again) == repr(hits)


def test_an_open_index_says_what_it_is(index: stoker.Index) -> None:
    assert "4 dimensions" in repr(index)
    assert str(index._collection.path) in repr(index)


@pytest.mark.parametrize("kind", ["int", "str"])
def test_a_built_index_has_its_filters(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ids = range(COUNT) if kind == "int" else [f"d{i}" for i in range(COUNT)]
    stoker.build(tmp_path / "i", vectors(), ids, threads=1)
    with stoker.open(tmp_path / "i") as index:
        assert index.search(np.ones(DIM), 2, filter={"a": 1}).scores.tolist() != [0.0, 0.0]
    assert "filters_rebuilt" not in "".join(capfd.readouterr())
