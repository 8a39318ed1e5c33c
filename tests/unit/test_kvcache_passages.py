"""The passage store: round trips, budgets, damage, tenants, and its offer to a warm plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache.kv_file import KvCorrupt, read_header, read_kv, write_kv
from stoker.kvcache.language_model import Kv
from stoker.kvcache.passages import KIND, KvUnitBatch, PassageStore, PassageTooLarge
from stoker.kvcache.settings import STORAGES
from stoker.prefetch.protocols import LoadOutcome, UnitBatch

pytest.importorskip("safetensors")
pytestmark = pytest.mark.models

MODEL = "a1b2"
LAYERS, HEADS, DIM = 3, 2, 32
TOKEN_BYTES = 2 * 4 * LAYERS * HEADS * DIM + 4


def kv_of(tokens: int, seed: int = 0) -> Kv:
    rng = np.random.default_rng((3, seed, tokens))
    shape = (LAYERS, HEADS, tokens, DIM)
    return Kv(
        rng.integers(0, 50_000, tokens).astype(np.int32),
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )


def assert_equal(found: Kv | None, expected: Kv) -> None:
    assert found is not None
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.values, expected.values)


def store_in(folder: Path, *, memory: int = 1 << 20, disk: int = 1 << 20) -> PassageStore:
    return PassageStore(folder, model_id=MODEL, memory_bytes_max=memory, disk_bytes_max=disk)


def test_what_was_put_is_there_after_reopening(tmp_path: Path) -> None:
    kv = kv_of(5)
    store = store_in(tmp_path)
    header = store.put("acme", "doc/1", kv)
    assert (header.tokens, header.error_ratio, header.memory_bytes) == (5, 0.0, kv.nbytes)
    assert_equal(store.get("acme", "doc/1", kv.token_ids.tolist()), kv)
    again = store_in(tmp_path)
    assert again.counts().resident == 0
    assert_equal(again.get("acme", "doc/1", kv.token_ids.tolist()), kv)
    assert (again.counts().resident, again.counts().loads) == (1, 1)
    again.check()


def test_other_tenants_chunks_models_and_tokens_find_nothing(tmp_path: Path) -> None:
    kv = kv_of(4)
    store = store_in(tmp_path)
    store.put("acme", "doc", kv)
    ids = kv.token_ids.tolist()
    assert store.get("rival", "doc", ids) is None
    assert store.get("acme", "doc2", ids) is None
    # Lengths are part of the name: ("ac", "medoc") is another key than ("acme", "doc").
    assert store.get("ac", "medoc", ids) is None
    other = PassageStore(
        tmp_path, model_id="ffff", memory_bytes_max=1 << 20, disk_bytes_max=1 << 20
    )
    assert other.get("acme", "doc", ids) is None
    assert store.get("acme", "doc", [*ids[:-1], 1]) is None
    assert store.get("acme", "doc", ids) is None, "an entry of an older text is removed"
    store.check()


@pytest.mark.parametrize("storage", STORAGES)
def test_storage_error_is_what_the_header_says(tmp_path: Path, storage: str) -> None:
    kv = kv_of(64)
    path = tmp_path / "x.safetensors"
    header = write_kv(path, kv, tenant="t", chunk_id="c", model_id=MODEL, storage=storage)
    back = read_kv(path)
    wrong = sum(
        float(np.sum((a - b) ** 2)) for a, b in ((kv.keys, back.keys), (kv.values, back.values))
    )
    total = sum(float(np.sum(a**2)) for a in (kv.keys, kv.values))
    assert header.error_ratio == pytest.approx((wrong / total) ** 0.5, rel=1e-4, abs=1e-12)
    bound, size = {
        "float32": (0.0, 1.0), "float16": (4e-4, 0.55), "int8": (0.01, 0.32), "int4": (0.12, 0.22)
    }[storage]  # fmt: skip
    assert header.error_ratio <= bound
    assert header.file_bytes <= size * kv.nbytes + 2_000
    assert read_header(path) == header


def test_flipped_truncated_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    kv = kv_of(3)
    path = tmp_path / "x.safetensors"
    write_kv(path, kv, tenant="t", chunk_id="c", model_id=MODEL)
    whole = path.read_bytes()
    damaged = 0
    for offset in range(0, len(whole), 37):
        for bytes_now in (
            whole[:offset],
            whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :],
        ):
            path.write_bytes(bytes_now)
            try:
                found = read_kv(path)
            except KvCorrupt:
                damaged += 1
            else:
                # Only a name in the header may change unnoticed: the numbers never do.
                assert_equal(found, kv)
    assert damaged > 0.9 * 2 * len(range(0, len(whole), 37))
    for junk in (b"", b"\x80\x04N.", b"\xff" * 64, b"\x08" + bytes(7) + b"[1,2,3] "):
        path.write_bytes(junk)
        with pytest.raises(KvCorrupt, match=r"x\.safetensors"):
            read_kv(path)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("number", [0.0, 1e-41, 1e5, 3e38])
def test_extreme_numbers_are_kept_as_near_as_the_header_says(
    tmp_path: Path, storage: str, number: float
) -> None:
    kv = kv_of(4)
    kv.keys[:, :, 1] = number
    header = write_kv(tmp_path / "x", kv, tenant="t", chunk_id="c", model_id=MODEL, storage=storage)
    back = read_kv(tmp_path / "x")
    assert np.isfinite(back.keys).all()
    gap = [(a.astype(np.float64) - b) for a, b in ((kv.keys, back.keys), (kv.values, back.values))]
    wrong = np.sqrt(sum(np.sum(part**2) for part in gap))
    total = np.sqrt(sum(np.sum(part.astype(np.float64) ** 2) for part in (kv.keys, kv.values)))
    assert header.error_ratio == pytest.approx(wrong / total, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused(tmp_path: Path, storage: str, number: float) -> None:
    kv = kv_of(4)
    kv.values[1, 1, 2, 3] = number
    with pytest.raises(InputError, match="values: expected finite numbers"):
        write_kv(tmp_path / "x", kv, tenant="t", chunk_id="c", model_id=MODEL, storage=storage)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("storage", STORAGES)
def test_an_empty_passage_comes_back_empty(tmp_path: Path, storage: str) -> None:
    write_kv(tmp_path / "x", kv_of(0), tenant="t", chunk_id="c", model_id=MODEL, storage=storage)
    assert_equal(read_kv(tmp_path / "x"), kv_of(0))


def hostile(header: dict[str, Any]) -> dict[str, bytes]:
    """Headers that lie or that no reader expects; each whole, with the payload's size kept."""
    meta = header["__metadata__"]

    def lying(**values: object) -> bytes:
        return json.dumps({**header, "__metadata__": {**meta, **values}}).encode()

    def array(**values: object) -> bytes:
        return json.dumps({**header, "keys": {**header["keys"], **values}}).encode()

    start, end = header["keys"]["data_offsets"]
    return {
        "deep list": b"[" * 500_000, "deep object": b'{"a":' * 100_000, "list": b"[]",
        "tenant that is a number": lying(tenant=5), "half a character": lying(tenant="\ud800"),
        "storage": lying(storage="int2"), "tokens": lying(tokens="2"), "none": lying(tokens=[]),
        "digits": lying(tokens="1" * 5_000), "negative": array(shape=[-1, -1, 3, DIM]),
        "huge": array(shape=[10**30, HEADS, 3, DIM]), "offsets": array(data_offsets=[end, start]),
        "endless": array(data_offsets=[0, float("inf")]), "dtype": array(dtype="F128"),
        "fraction": array(shape=[LAYERS, HEADS, 3.0, DIM]), "no shape": array(shape=None),
    }  # fmt: skip


def test_one_hostile_file_neither_stops_a_store_nor_lies_to_a_plan(tmp_path: Path) -> None:
    good, bad = kv_of(2), kv_of(3)
    store = store_in(tmp_path)
    store.put("acme", "good", good)
    store.put("acme", "bad", bad)
    path = store._entries[store._by_key["acme", "bad"]].path
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, text in hostile(header).items():
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(KvCorrupt):
            read_header(path)
        with pytest.raises(KvCorrupt):
            read_kv(path)
        again = store_in(tmp_path)
        assert_equal(again.get("acme", "good", good.token_ids.tolist()), good)
        assert (again.counts().entries, again.counts().corrupt) == (1, 1), name
        again.check()
    # What a file says of the memory that it takes is not believed: its shapes say it.
    header["__metadata__"]["memory_bytes"] = "-99999999"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    (batch,) = store_in(tmp_path).unit_batches({("acme", "bad"): 1.0})
    assert batch.unit_bytes >= bad.nbytes


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    kv = kv_of(2)
    store = store_in(tmp_path)
    store.put("acme", "doc", kv)
    path = store._entries[store._by_key["acme", "doc"]].path
    for name in ("a.safetensors", ".tmp-b", "c.corrupt"):
        (tmp_path / MODEL / name).mkdir()
    again = store_in(tmp_path)
    assert again.counts().entries == 1
    path.unlink()
    path.mkdir()
    assert again.get("acme", "doc", kv.token_ids.tolist()) is None
    again.check()


@pytest.mark.parametrize("token", [2**31, -(2**40)])
def test_tokens_that_no_file_can_hold_find_nothing(tmp_path: Path, token: int) -> None:
    store = store_in(tmp_path)
    store.put("acme", "doc", kv_of(1))
    assert store.get("acme", "doc", [token]) is None
    assert store.get("acme", "other", [token]) is None


def test_damaged_file_is_a_miss_and_set_aside(tmp_path: Path) -> None:
    kv = kv_of(3)
    store_in(tmp_path).put("acme", "doc", kv)
    (path,) = (tmp_path / MODEL).glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    store = store_in(tmp_path)
    assert store.get("acme", "doc", kv.token_ids.tolist()) is None
    assert (store.counts().corrupt, store.counts().entries) == (1, 0)
    store.put("acme", "doc", kv)
    assert_equal(store.get("acme", "doc", kv.token_ids.tolist()), kv)
    assert not list((store_in(tmp_path)._folder).glob("*.corrupt"))


def test_leftovers_of_a_dead_writer_are_cleared(tmp_path: Path) -> None:
    store_in(tmp_path)
    (tmp_path / MODEL / ".tmp-1234").write_bytes(b"half")
    assert store_in(tmp_path).counts().entries == 0
    assert not list((tmp_path / MODEL).iterdir())


def test_both_budgets_hold_and_the_least_worthy_goes_first(tmp_path: Path) -> None:
    one = kv_of(10).nbytes
    store = store_in(tmp_path, memory=2 * one, disk=4 * one + 4 * 2_000)
    for number in range(4):
        store.put("acme", f"c{number}", kv_of(10, number))
        store.check()
    assert_equal(store.get("acme", "c0", kv_of(10, 0).token_ids.tolist()), kv_of(10, 0))
    store.put("acme", "c4", kv_of(10, 4))
    store.check()
    counts = store.counts()
    assert (counts.entries, counts.resident) == (4, 2)
    assert store.get("acme", "c1", kv_of(10, 1).token_ids.tolist()) is None
    assert_equal(store.get("acme", "c0", kv_of(10, 0).token_ids.tolist()), kv_of(10, 0))
    with pytest.raises(PassageTooLarge):
        store.put("acme", "big", kv_of(100))
    store.check()


def test_warm_plan_loads_the_hottest_and_evicts_nothing(tmp_path: Path) -> None:
    one = kv_of(10).nbytes
    filler = store_in(tmp_path)
    for number in range(6):
        filler.put("acme", f"c{number}", kv_of(10, number))
    store = store_in(tmp_path, memory=3 * one)
    heat = {("acme", f"c{number}"): float(number) for number in range(6)} | {("rival", "c5"): 9.0}
    (batch,) = store.unit_batches(heat)
    assert batch.benefit.tolist() == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert batch.unit_bytes >= one
    assert store.total_bytes() == 6 * one
    outcome = store.load_units(KIND, batch.units[:2], sticky=True, deadline_s=None)
    assert (outcome.loaded, outcome.already, outcome.no_room) == (2, 0, 0)
    outcome = store.load_units(KIND, batch.units, sticky=False, deadline_s=None)
    assert (outcome.loaded, outcome.already, outcome.no_room) == (1, 2, 2)
    assert store.resident_count(KIND, batch.units) == 3
    assert store.resident_count("links", batch.units) == 0
    for number in range(6):  # demand may evict what is not sticky, never what is
        store.get("acme", f"c{number}", kv_of(10, number).token_ids.tolist())
        store.check()
    assert store.resident_count(KIND, batch.units[:2]) == 2
    late = store.load_units(KIND, batch.units, sticky=False, deadline_s=-1.0)
    assert late.not_reached == len(batch.units)
    with pytest.raises(InputError):
        store.load_units("links", batch.units, sticky=False, deadline_s=None)


def test_offer_has_the_fields_that_prefetch_asks_for(tmp_path: Path) -> None:
    """The rooms may not import each other; the shapes are held together here."""
    assert [field.name for field in dataclasses.fields(UnitBatch)] == [
        field.name for field in dataclasses.fields(KvUnitBatch)
    ]
    outcome = store_in(tmp_path).load_units(
        KIND, np.zeros(0, np.uint32), sticky=False, deadline_s=None
    )
    assert [field.name for field in dataclasses.fields(LoadOutcome)] == [
        field.name for field in dataclasses.fields(outcome)
    ]


def test_novel_contexts_do_not_displace_what_is_used_again(tmp_path: Path) -> None:
    """A burst of 4 passages, then 60 that never come again with the 4 in between."""
    one = kv_of(10).nbytes
    store = store_in(tmp_path, memory=6 * one, disk=12 * one + 24_000)
    hot = [kv_of(10, number) for number in range(4)]

    def ask_hot() -> int:
        before = store.counts().hits
        for number, kv in enumerate(hot):
            if store.get("acme", f"hot{number}", kv.token_ids.tolist()) is None:
                store.put("acme", f"hot{number}", kv)
        return store.counts().hits - before

    ask_hot()
    burst = ask_hot()
    assert burst == 4
    served = 0
    for number in range(60):
        kv = kv_of(10, 100 + number)
        if store.get("acme", f"novel{number}", kv.token_ids.tolist()) is None:
            store.put("acme", f"novel{number}", kv)
        if number % 10 == 9:  # 10 novel ones are more than memory holds
            served += ask_hot()
        store.check()
    assert served >= 0.8 * 6 * burst


def test_memory_keeps_what_the_heat_expects(tmp_path: Path) -> None:
    """The plan's view decides between two that are equal but for what is to come."""
    for expected in ("a", "b"):
        folder = tmp_path / expected
        size = kv_of(10).nbytes
        store = PassageStore(folder, model_id="m", memory_bytes_max=2 * size, disk_bytes_max=10**7)
        for number, name in enumerate("abc"):
            if name == "c":
                store.predict({("acme", expected): 5.0, ("acme", "elsewhere"): 9.0})
            store.put("acme", name, kv_of(10, number))
        store.check()
        held = {entry.key[1] for unit, entry in store._entries.items() if unit in store._memory}
        assert held == {expected, "c"}


def test_a_passage_asked_for_in_vain_and_then_kept_was_needed_once(tmp_path: Path) -> None:
    store = PassageStore(tmp_path, model_id="m", memory_bytes_max=10**6, disk_bytes_max=10**7)
    for number in range(3):
        name = f"p{number}"
        assert store.get("acme", name, range(10), kind="passage") is None
        store.put("acme", name, kv_of(10, number), kind="passage")
    worths = [store._worth.of(("acme", f"p{number}")) for number in range(3)]
    assert worths == [1.0, 2.0, 3.0], "no credit yet: none was needed twice"
