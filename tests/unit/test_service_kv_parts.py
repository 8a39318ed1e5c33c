"""The KV parts of a server, one by one: documents in slots, shared tables, rounds of warming."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import Counter

from stoker.errors import ConfigError, InputError, UnavailableError
from stoker.index.document_values import Document
from stoker.kvcache.chunk_gate import GateReport
from stoker.kvcache.chunk_reuse import DEFAULT_CHOICE
from stoker.kvcache.engine_view import AllBlocksCleared, BlockRemoved, BlockStored, EngineView
from stoker.kvcache.engine_warm import EngineWarmer, Ticket
from stoker.kvcache.language_model import Kv
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tiers import open_gate
from stoker.kvcache.version_vector import Register
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.kv_documents import DocumentSlots
from stoker.service.kv_groups import LookupGroups, is_grouped
from stoker.service.kv_parts import KvParts, open_tokenizer
from stoker.service.kv_replicas import (
    ReplicatedMetadata,
    SharedLeases,
    decode_register,
    encode_register,
)
from stoker.service.kv_warm import EngineWarmLoop, PromptTokens
from stoker.service.metrics import Metrics


class Index:
    """Documents of two tenants, and what was read."""

    def __init__(self) -> None:
        self.texts = {("a", "1"): "one", ("a", "2"): "two", ("b", "1"): "other"}
        self.read: list[str] = []
        self.before_return = lambda: None

    def documents(self, ids: Sequence[int | str], tenant: str) -> list[Document | None]:
        self.read += [str(name) for name in ids]
        found = [self.texts.get((tenant, str(name))) for name in ids]
        self.before_return()
        return [
            None if text is None else Document(tenant, str(name), text, {}, 1)
            for name, text in zip(ids, found, strict=True)
        ]


def slots_of(index: Index, bytes_max: int, tenant_ratio: float) -> DocumentSlots:
    settings = KvcacheSettings(
        documents_bytes_max=bytes_max, documents_tenant_ratio=tenant_ratio, hot_p99_us=0.0,
        hot_accesses_min=20,
    )  # fmt: skip
    return DocumentSlots(index.documents, settings)


def texts(found: Sequence[Document | None]) -> list[str | None]:
    return [None if document is None else document.text for document in found]


def test_documents_are_read_once_per_tenant_and_forgotten_on_change() -> None:
    index = Index()
    slots = slots_of(index, 10_000, 0.5)
    assert texts(slots.get(["1", "2", "9"], "a")) == ["one", "two", None]
    assert texts(slots.get(["2", "1"], "a")) == ["two", "one"]
    assert texts(slots.get(["1"], "b")) == ["other"]
    assert index.read == ["1", "2", "9", "1"], "what is not there is asked for again"
    index.texts["a", "1"] = "changed"
    slots.forget("a", ["1"])
    assert texts(slots.get(["1", "2"], "a")) == ["changed", "two"]
    assert index.read[4:] == ["1"]
    index.texts["a", "2"] = "written elsewhere"
    slots.forget_all()
    assert texts(slots.get(["2"], "a")) == ["written elsewhere"]
    slots.check()
    assert slots.counts("a").hits > 0


def test_what_changes_while_it_is_read_is_not_kept() -> None:
    index = Index()
    slots = slots_of(index, 10_000, 1.0)

    def change() -> None:
        index.before_return = lambda: None
        index.texts["a", "1"] = "new"
        slots.forget("a", ["1"])

    index.before_return = change
    assert texts(slots.get(["1"], "a")) == ["one"], "the search began before the change"
    assert texts(slots.get(["1"], "a")) == ["new"]


def test_a_document_larger_than_the_quota_is_read_each_time() -> None:
    index = Index()
    index.texts["a", "1"] = "x" * 1_000
    slots = slots_of(index, 1_000, 0.9)
    assert slots.get(["1"], "a") == slots.get(["1"], "a")
    assert index.read == ["1", "1"]


def test_readers_and_a_writer_together() -> None:
    index = Index()
    slots = slots_of(index, 2_000, 1.0)
    acknowledged = [0]
    old: list[str] = []

    def read() -> None:
        for _ in range(400):
            least = acknowledged[0]
            (document,) = slots.get(["1"], "a")
            assert document is not None
            if int(document.text or "0") < least:
                old.append(document.text or "")

    index.texts["a", "1"] = "0"
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 300):
        index.texts["a", "1"] = str(number)
        slots.forget("a", ["1"])
        acknowledged[0] = number
    for reader in readers:
        reader.join()
    assert old == []


def test_a_server_shows_what_was_measured_of_its_model(tmp_path: Path) -> None:
    """Another process measures; the server reads its record at each look at the metrics."""
    settings = KvcacheSettings(passages_dir=str(tmp_path), passages_model_id="abc")
    parts = KvParts(settings, read=Index().documents, index_id=str, event_log=None, replica="one")
    metrics = Metrics()
    totals: dict[str, float] = {}

    def advance(counter: Counter, name: str, total: float) -> None:
        counter.inc(total - totals.get(name, 0.0))
        totals[name] = total

    def shown(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"stoker_kvcache_gate_{name}", {"model": "abc", **labels}
        )

    parts.show(metrics, advance, time_s=0.0)
    assert (shown("open_state"), shown("measured_timestamp_seconds")) == (0.0, 0.0)
    assert shown("divergence_nats") is None, "nothing was measured, so no number is shown"
    report = GateReport(
        model_id="abc", prompts=2, positions=40, kl_mean=0.02, agreement=0.95, loss_full=2.0,
        loss_reused=2.01, recompute_ratio=settings.kv_recompute_ratio, choice=DEFAULT_CHOICE,
        allowed=True,
    )  # fmt: skip
    elsewhere = open_gate(tmp_path, settings=settings)
    elsewhere.keep(report)
    parts.show(metrics, advance, time_s=0.0)
    assert (shown("open_state"), shown("divergence_nats")) == (1.0, 0.02)
    assert shown("agreement_ratio") == 0.95
    assert shown("loss_gain_ratio") == pytest.approx(0.005)
    elsewhere.keep(dataclasses.replace(report, kl_mean=0.7, allowed=False))
    parts.show(metrics, advance, time_s=0.0)
    assert (shown("open_state"), shown("divergence_nats")) == (0.0, 0.7)
    for outcome, count in (("allowed", 1.0), ("refused", 1.0), ("failed", 0.0)):
        assert shown("measurements_total", outcome=outcome) == count


def test_registers_survive_the_wire() -> None:
    register = Register().written("1", replica="a", time_s=1.5)
    beside = Register().written("2", replica="b", time_s=1.0).merged(register)
    assert beside.conflicting
    assert decode_register(encode_register(beside)) == beside
    version = '{"seen": %s, "time_s": 0, "replica": "a", "value": %s}'
    for text in (
        "",
        "[]",
        '{"versions": [{}]}',
        '{"versions": 3}',
        '{"versions": [' + version % ('{"a": -1}', '"x"') + "]}",
        '{"versions": [' + version % ("{}", "3") + "]}",
        '{"versions": [' + (version % ("{}", '"x"')).replace(": 0", ": NaN") + "]}",
        '{"versions": [' + (version % ("{}", '"x"')).replace(": 0", ": 1" + "0" * 400) + "]}",
        '{"versions": ' + "[" * 100_000,
    ):
        with pytest.raises(InputError):
            decode_register(text.encode())


def test_replicas_become_the_same_and_lose_nothing(tmp_path: Path) -> None:
    with_log = EmbeddedLog(tmp_path)
    one = ReplicatedMetadata(with_log, replica="one", wall=lambda: 10.0)
    two = ReplicatedMetadata(with_log, replica="two", wall=lambda: 20.0)
    # Both write before either has heard of the other: a conflict.
    one.write("k", "from one")
    two.write("k", "from two")
    one.write("only one", "1")
    one.start()
    two.start()
    try:
        wanted = {"k": "from two", "only one": "1"}
        assert one.wait_until(lambda values: values == wanted, timeout_s=30)
        assert two.wait_until(lambda values: values == wanted, timeout_s=30)
        assert one.counts()["conflicts"] == 1
        one.write("k", None)
        assert two.wait_until(lambda values: values == {"only one": "1"}, timeout_s=30)
        assert two.counts()["conflicts"] == 0
        late = ReplicatedMetadata(with_log, replica="late")
        late.start()
        assert late.wait_until(lambda values: values == {"only one": "1"}, timeout_s=30)
        assert late.close()
    finally:
        assert one.close()
        assert two.close()
        with_log.close()


def test_leases_of_others_are_left_to_them(tmp_path: Path) -> None:
    now = [100.0]
    with_log = EmbeddedLog(tmp_path)
    tables = [
        ReplicatedMetadata(with_log, replica=name, wall=lambda: now[0]) for name in ("one", "two")
    ]
    mine, theirs = (SharedLeases(t, lease_s=30.0, wall=lambda: now[0]) for t in tables)
    tables[1].start()
    content = ("acme", "p1")
    mine.note({content})
    assert tables[1].wait_until(lambda values: len(values) == 1, timeout_s=30)
    assert theirs.held_elsewhere(content)
    assert not mine.held_elsewhere(content)
    now[0] = 131.0
    assert not theirs.held_elsewhere(content), "its replica may be gone"
    mine.note(set())
    assert tables[1].wait_until(lambda values: not values, timeout_s=30)
    assert tables[1].close()
    with_log.close()


class Engine:
    """Takes every call."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.released: list[str] = []

    def prefetch(self, token_ids: Sequence[int], *, lease_s: float, generation: int) -> Ticket:
        self.asked.append(tuple(token_ids))
        return Ticket(str(len(self.asked)))

    def release(self, ticket: Ticket) -> None:
        self.released.append(ticket)


def test_rounds_warm_what_is_hot_and_not_there_and_closing_gives_it_back() -> None:
    engine = Engine()
    heat: Mapping[tuple[str, str], float] = {("a", "1"): 2.0, ("a", "2"): 1.0, ("a", "9"): 3.0}
    stored = {("a", "1"): "alpha", ("a", "2"): "be"}
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(letter) for letter in text]

    tokens = PromptTokens(stored.get, encode, before=">")
    loop = EngineWarmLoop(
        EngineWarmer(engine),
        heat=lambda: heat,
        tokens_of=tokens,
        generation=lambda: 1,
        held=lambda token_ids: len(token_ids) if len(token_ids) == 3 else 0,
        every_s=0.01,
    )
    loop.start()
    outcome = loop.wait_for(3, timeout_s=30)
    assert outcome is not None
    assert outcome.held == 1
    assert outcome.unknown == 2, "one passage is gone, one the engine holds already"
    assert loop.close()
    assert engine.asked == [tuple(map(ord, ">alpha"))]
    assert engine.released == ["1"]
    assert encoded.count(">alpha") == 1, "a text that stays is encoded once"


def test_the_view_of_an_engine() -> None:
    view = EngineView(blocks_max=3)
    stored = BlockStored((1, 2), None, (1, 2, 3, 4), 2, medium="GPU")
    view.apply(stored)
    view.apply(stored)
    assert view.matched([1, 2, 3, 4, 5]) == 4
    view.apply(BlockStored((1,), None, (1, 2), 2, medium="CPU"))
    view.apply(BlockRemoved((1,), "GPU"))
    assert view.matched([1, 2]) == 2, "it is still in host memory"
    view.apply(BlockRemoved((1, 77), "CPU"))
    assert view.matched([1, 2]) == 0
    view.apply(BlockStored((5, 6, 7, 8), None, tuple(range(8)), 2))
    view.check()
    assert len(view) == 3
    view.apply(BlockStored((9,), None, (1, 2), 2, lora_name="x"))
    assert view.matched([1, 2], lora_name="x") == 2
    assert view.matched([1, 2]) == 0
    view.apply(AllBlocksCleared())
    view.check()
    assert len(view) == 0


def test_settings_that_cannot_go_together_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="passages_model_id"):
        KvcacheSettings(passages_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="engine_url"):
        KvcacheSettings(engine_url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="engine_blocks_dir"):
        KvcacheSettings(engine_blocks_dir=str(tmp_path), engine_blocks_model_id="m")
    with pytest.raises(ConfigError, match="predict_every_s"):
        KvcacheSettings(predict_every_s=0.0)
    with pytest.raises(ConfigError, match="documents_bytes_max"):
        KvcacheSettings(documents_bytes_max=-1)
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="engine_tokenizer"):
        open_tokenizer(str(tmp_path))


def test_without_settings_nothing_runs() -> None:
    index = Index()
    parts = KvParts(
        KvcacheSettings(), read=index.documents, index_id=str, event_log=None, replica="r"
    )
    parts.start(heat=dict, generation=lambda: 1)
    assert parts.warm_sources() == []
    assert parts.prompt_order("a", ["1"]) == ()
    assert parts.before_change("a", ["1"]) is None
    parts.after_change("a", ["1"], None, None)
    parts.forget_documents()
    assert texts(parts.read_documents(["1"], "a")) == ["one"]
    assert parts.warm_loop is None
    assert parts.close(1.0)


def test_a_round_tells_the_passages_what_is_hot(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    settings = KvcacheSettings(passages_dir=str(tmp_path), passages_model_id="abc")
    parts = KvParts(settings, read=Index().documents, index_id=str, event_log=None, replica="r")
    assert parts.passages is not None
    values = np.zeros((1, 1, 4, 4), np.float32)
    for name in ("1", "2"):
        parts.passages.put("a", name, Kv(np.arange(4, dtype=np.int32), values, values))
    parts.start(heat=lambda: {("a", "1"): 3.0, ("a", "gone"): 9.0}, generation=lambda: 1)
    assert parts.prediction is not None
    assert parts.prediction.wait_for(1, timeout_s=30)
    worth = parts.passages._worth
    assert worth.of(("a", "1")) > worth.of(("a", "2")), "though the other was kept later"
    assert worth.of(("a", "gone")) == 0.0
    assert parts.close(10.0)


def test_looking_ahead_is_no_demand_on_the_slots(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x")).save(
        str(tmp_path / "tokenizer.json")
    )
    index = Index()
    settings = KvcacheSettings(
        documents_bytes_max=10_000, engine_blocks_dir=str(tmp_path / "blocks"),
        engine_blocks_model_id="abc", engine_tokenizer=str(tmp_path),
    )  # fmt: skip
    parts = KvParts(settings, read=index.documents, index_id=str, event_log=None, replica="r")
    parts.start(heat=lambda: {("a", "1"): 3.0, ("a", "2"): 2.0}, generation=lambda: 1)
    assert parts.prediction is not None
    assert parts.prediction.wait_for(1, timeout_s=30)
    assert sorted(index.read) == ["1", "2"], "both were read for their tokens"
    assert parts.documents is not None
    counts = parts.documents.counts("a")
    assert (counts.hot, counts.cold, counts.used_bytes) == (0, 0, 0)
    assert parts.close(10.0)


def test_windows_of_tenants_are_apart_and_few() -> None:
    pytest.importorskip("sklearn")
    groups = LookupGroups(window_s=5.0, tenants_max=2)
    card, near = np.array([1.0, 0.0], np.float32), np.array([1.0, 0.1], np.float32)
    alone = [groups.key(tenant, "where is my card", card, 100.0) for tenant in "ab"]
    assert not any(map(is_grouped, alone))
    assert alone[0] == alone[1], "what another tenant asked changes nothing"
    assert is_grouped(groups.key("a", "my card, where is it", near, 101.0))
    assert groups.count(101.0) == 1
    groups.key("c", "x", card, 101.0)
    assert not is_grouped(groups.key("b", "my card, where is it", near, 101.0)), "it was dropped"
    assert groups.count(200.0) == len(groups._tenants) == 0, "what is over is not kept"
    parts = KvParts(
        KvcacheSettings(group_keys_enabled=True),
        read=Index().documents, index_id=str, event_log=None, replica="r",
    )  # fmt: skip
    assert parts.group_key("a", None, card, 1.0) == ""
    assert parts.group_key("a", "text", 0 * card, 1.0) == "", "it has no direction"
    assert parts.group_key("a", "text", card, 1.0).startswith("win:0|grp:-|sig:")


def test_a_missing_package_names_its_extra() -> None:
    from stoker.service.kv_events import need_package

    with pytest.raises(UnavailableError, match=r"stoker\[engines\]"):
        need_package("no_such_package_here", extra="engines")


def test_prompt_orders_of_many_threads_and_tenants_stay_whole() -> None:
    parts = KvParts(
        KvcacheSettings(prompt_order_enabled=True, reuse_tenants_max=2),
        read=Index().documents, index_id=str, event_log=None, replica="r",
    )  # fmt: skip
    faults: list[tuple[str, ...]] = []

    def ask(number: int) -> None:
        for step in range(100):
            names = [f"p{(step * number + place) % 17}" for place in range(5)]
            found = parts.prompt_order(f"t{number % 3}", names)
            if sorted(found) != sorted(names):
                faults.append(found)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert parts.prompt_order("x", ["b", "a", "b"]) in {("b", "a"), ("a", "b")}
