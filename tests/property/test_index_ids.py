"""A segment's ids, both ways, before and after the whole table is in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

import stoker.index.ids as ids_module
from stoker.errors import CorruptError, InputError
from stoker.index.ids import IdLayout, IdTable, normalize_ids, write_ids
from stoker.index.paged_file import HEADER_BYTES, PagedFile, write_blob

_INTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=300, unique=True)
_TEXTS = st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=300, unique=True).filter(
    lambda texts: all(text.isprintable() for text in texts)
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=_INTS | _TEXTS, seed=st.integers(0, 2**16))
def test_a_few_rows_read_from_their_own_pages_are_those_of_the_table(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Any], seed: int
) -> None:
    path = tmp_path_factory.mktemp("ids") / "ids.stk"
    layout, _ = write_ids(path, normalize_ids(ids, len(ids)), page_bytes=4096)
    table = IdTable(path, layout, len(ids))
    rng = np.random.default_rng(seed)
    for shape in ((3,), (2, 5), (1, 1)):
        rows = rng.integers(-1, len(ids), shape)
        found = table.ids_at(rows)
        assert table.loaded_bytes == 0
        missing = None if isinstance(ids[0], str) else -1
        want = [ids[row] if row >= 0 else missing for row in rows.reshape(-1).tolist()]
        assert found.shape == shape
        assert found.reshape(-1).tolist() == want
    with pytest.raises(InputError, match="row"):
        table.ids_at(np.array([len(ids)]))
    assert table.take_read_bytes() > 0
    table.load()
    assert table.take_read_bytes() >= layout.text_bytes + 4 * len(ids)
    table.load()
    assert table.take_read_bytes() == 0
    everything = np.arange(-1, len(ids))
    assert table.ids_at(everything).tolist()[1:] == ids
    # What memory budgets are told to leave beside them.
    held = {"<u4": 4 * len(ids), "<i8": 8 * len(ids), "<u8": 8 * (len(ids) + 1)}
    assert table.loaded_bytes == held[layout.by_row_dtype] + layout.text_bytes
    np.testing.assert_array_equal(table.rows_of(ids), np.arange(len(ids)))
    assert table.loaded_bytes == held[layout.by_row_dtype] + layout.text_bytes + 12 * len(ids)


@pytest.mark.parametrize("kind", ["int", "text"])
def test_a_few_rows_read_each_of_their_pages_once_and_refuse_damaged_ones(
    tmp_path: Path, kind: str
) -> None:
    rng = np.random.default_rng(11)
    numbers = rng.permutation(20_000).tolist()
    ids = numbers if kind == "int" else [f"row {number}" for number in numbers]
    path = tmp_path / "ids.stk"
    layout, _ = write_ids(path, normalize_ids(ids, len(ids)), page_bytes=4096)
    table = IdTable(path, layout, len(ids))
    rows = np.concatenate([rng.integers(0, len(ids), 6), [7, 7, 8, 9]])
    assert table.ids_at(rows).tolist() == [ids[row] for row in rows]
    if kind == "int":
        assert table.take_read_bytes() == 4096 * len({row // 1024 for row in rows.tolist()})
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 3 * 4096] ^= 1
    path.write_bytes(raw)
    damaged = IdTable(path, layout, len(ids))
    row = 3 * 4096 // (4 if kind == "int" else 8)
    with pytest.raises(CorruptError, match="page 3 at offset 16384"):
        damaged.ids_at(np.array([0, row, len(ids) - 1]))
    assert damaged.ids_at(np.array([0, 1])).tolist() == ids[:2]
    path.write_bytes(raw[: HEADER_BYTES + 4096 + 17])
    with pytest.raises(CorruptError, match="truncated"):
        table.ids_at(np.array([0, row]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=_INTS | _TEXTS,
    asked=st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=40) | st.none(), max_size=40),
    seed=st.integers(0, 2**16),
)
def test_rows_of_ids_are_those_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Any], asked: list[Any], seed: int
) -> None:
    path = tmp_path_factory.mktemp("ids") / "ids.stk"
    layout, _ = write_ids(path, normalize_ids(ids, len(ids)), page_bytes=4096)
    rng = np.random.default_rng(seed)
    known = [ids[place] for place in rng.integers(0, len(ids), rng.integers(0, 60)).tolist()]
    wanted = [*known, *asked, *known[:3]]
    rows = {name: row for row, name in enumerate(ids)}
    # One at a time, and many at once, each on a table that has read nothing yet.
    few = IdTable(path, layout, len(ids))
    many = IdTable(path, layout, len(ids))
    want = [rows.get(name, -1) for name in wanted]
    assert [int(few.rows_of([name])[0]) for name in wanted] == want
    assert many.rows_of(wanted).tolist() == want


def rows_one_by_one(raw: bytes, count: int, text_bytes: int, name: str) -> int:
    """The row of one id in a table of texts, by its bytes alone; UnicodeDecodeError on damage."""
    offsets = np.frombuffer(raw, "<u8", count + 1)
    text = raw[8 * (count + 1) :][:text_bytes]
    keys = np.frombuffer(raw, "<u8", count, 8 * (count + 1) + text_bytes)
    rows = np.frombuffer(raw, "<u4", count, 8 * (2 * count + 1) + text_bytes)
    key = int(ids_module._hashes([name.encode("utf-8")])[0])
    for row in rows[keys == key].tolist():
        if text[int(offsets[row]) : int(offsets[row + 1])].decode("utf-8") == name:
            return int(row)
    return -1


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=_TEXTS,
    asked=st.lists(st.text(max_size=40), max_size=40),
    buckets=st.sampled_from([1, 3, 50, 2**64]),
    damage=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_many_texts_are_found_as_one_by_one_with_equal_hashes_and_damage(
    tmp_path_factory: pytest.TempPathFactory,
    ids: list[str],
    asked: list[str],
    buckets: int,
    damage: list[tuple[int, int]],
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("ids") / "ids.stk"
    rng = np.random.default_rng(seed)
    known = [ids[place] for place in rng.integers(0, len(ids), rng.integers(0, 60)).tolist()]
    wanted = [*known, *asked, *known[:3], "\ud800"]
    hashes = ids_module._hashes

    def few_hashes(names: Sequence[bytes]) -> NDArray[np.uint64]:
        found = hashes(names)
        return found if buckets == 2**64 else found % np.uint64(buckets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_module, "_hashes", few_hashes)
        layout, _ = write_ids(path, normalize_ids(ids, len(ids)), page_bytes=4096)
        text_at = 8 * (len(ids) + 1)
        size = text_at + layout.text_bytes + 12 * len(ids)
        raw = bytearray(path.read_bytes()[HEADER_BYTES:][:size])
        for place, value in damage:  # under checksums that hold
            raw[text_at + place % layout.text_bytes] = value
        path.unlink()
        write_blob(path, np.frombuffer(bytes(raw), np.uint8), kind="ids", page_bytes=4096)
        many = IdTable(path, layout, len(ids))
        loaded = IdTable(path, layout, len(ids))
        loaded.load()
        want: list[int] = []
        hurt = False
        for name in wanted[:-1]:
            try:
                want.append(rows_one_by_one(bytes(raw), len(ids), layout.text_bytes, name))
            except UnicodeDecodeError:
                hurt = True
                for table in (IdTable(path, layout, len(ids)), loaded):
                    with pytest.raises(CorruptError, match="not UTF-8"):
                        table.rows_of([name])
                continue
            for table in (IdTable(path, layout, len(ids)), loaded):
                assert table.rows_of([name]).tolist() == want[-1:]
        for table in (many, loaded):
            if hurt:
                with pytest.raises(CorruptError, match="not UTF-8"):
                    table.rows_of(wanted)
            else:
                assert table.rows_of(wanted).tolist() == [*want, -1]


def test_damage_is_named_whether_few_rows_are_asked_for_or_all(tmp_path: Path) -> None:
    path = tmp_path / "ids.stk"
    layout, _ = write_ids(path, normalize_ids(None, 5_000), page_bytes=4096)
    raw = bytearray(path.read_bytes())
    raw[4096 + 5] ^= 4
    path.write_bytes(raw)
    for rows in (np.array([1]), np.arange(5_000)):
        with pytest.raises(CorruptError, match="page 0"):
            IdTable(path, layout, 5_000).ids_at(rows)
    assert IdTable(path, layout, 5_000).ids_at(np.array([4_999])).tolist() == [4_999]


def refuses_everything(path: Path, layout: IdLayout, count: int) -> None:
    """Each way to ask, of a table that has read nothing yet, ends in our own error."""
    for ask in (
        lambda table: table.ids_at(np.array([count - 1])),
        lambda table: table.ids_at(np.arange(min(count, 100))),
        lambda table: table.rows_of([1, "1"]),
    ):
        with pytest.raises(CorruptError, match=path.name):
            ask(IdTable(path, layout, count))


def test_bytes_that_no_page_holds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.stk"
    layout, _ = write_ids(path, np.arange(2_000), page_bytes=4096)
    # The header's own checksum holds, and its count is of bytes beyond the last page.
    info = dataclasses.replace(PagedFile(path, kind="ids").info, record_count=16 * 100_000)
    raw = path.read_bytes()
    path.write_bytes(info.pack() + raw[HEADER_BYTES:])
    refuses_everything(path, layout, 100_000)


def test_a_file_that_has_gone_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "ids.stk"
    for ask in (
        lambda table: table.ids_at(np.array([7])),
        lambda table: table.load(),
        lambda table: table.rows_of([1]),
        lambda table: table.file.damaged_pages(),
    ):
        layout, _ = write_ids(path, np.arange(2_000), page_bytes=4096)
        table = IdTable(path, layout, 2_000)
        path.unlink()
        with pytest.raises(CorruptError, match=r"ids\.stk: cannot be read"):
            ask(table)


def test_empty_ids_of_a_hostile_file_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "ids.stk"
    # The text, of which there is none, begins with a page.
    count = 511
    stream = np.zeros(8 * (count + 1) + 12 * count, np.uint8)
    write_blob(path, stream, kind="ids", page_bytes=4096)
    layout = IdLayout("str", "<u8", 0)
    few = IdTable(path, layout, count).ids_at(np.array([0, count - 1]))
    table = IdTable(path, layout, count)
    table.load()
    assert few.tolist() == table.ids_at(np.array([0, count - 1])).tolist() == ["", ""]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1.0, 2.0], "entry 0: expected int or str, found float"),
        ([None, 2], "entry 0: expected int or str, found NoneType"),
        ([True, 2], "entry 0: expected int or str, found bool"),
        ([1, "a"], "entry 1: expected int, as the first, found str"),
        (["a", "b", 2], "entry 2: expected str, as the first, found int"),
    ],
)
def test_ids_of_another_kind_are_named_with_what_was_expected(ids: list[object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        normalize_ids(ids, len(ids))
