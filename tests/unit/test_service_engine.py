"""The engine over a brute-force index: tenants, filters, reuse, events, warm-ups, what is off."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.index.document_values import Document
from stoker.index.documents import StorageFull as DocumentsFull
from stoker.index.filters import flatten, matches, parse_filter
from stoker.index.hits import Hits, Summary
from stoker.index.residency import KindResidency, Residency
from stoker.kvcache.lookup import LookupReuse
from stoker.prefetch.events import Event, new_event
from stoker.prefetch.protocols import LoadOutcome, UnitBatch
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.warm import SKIP_CANCELLED
from stoker.service.bodies import DocumentRow, SearchRequest, WarmupRequest
from stoker.service.configuration import StokerConfig
from stoker.service.consume import ConsumeOptions
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.engine import Engine
from stoker.service.engine_metrics import ShownParts
from stoker.service.engine_parts import Parts
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.metrics import Metrics
from stoker.service.problems import (
    DeadlinePassed,
    FeatureOff,
    NotReady,
    RequestError,
    StorageFull,
    WarmupIdle,
    WarmupRunning,
)
from stoker.service.publisher import Publisher
from stoker.service.settings import ServiceSettings
from stoker.service.streams import DEAD_LETTERS_TOPIC, EVENTS_TOPIC, LogFull, TopicSpec
from stoker.service.text_model import TextModel
from stoker.service.warmup import read_receipt

DIM = 8


class BruteIndex:
    """Every search looks at everything; the surface of the real one."""

    dim = DIM
    metric = "cosine"
    id_kind = "str"
    mode = "rw"

    def __init__(self) -> None:
        self.generation = 1
        self.change_offset = 0
        self.rows: dict[
            tuple[str, str], tuple[NDArray[np.float32], str | None, dict[str, Any]]
        ] = {}
        self.searches = 0
        self.deadlines: list[float | None] = []
        self.completeness = 1.0
        self.full: Exception | None = None
        self.closed = False
        self.refreshed = threading.Event()
        self.source = Source()

    @property
    def count(self) -> int:
        return len(self.rows)

    def search(
        self,
        query: NDArray[np.float32],
        k: int = 10,
        *,
        ef: int | None = None,
        recall_target: float | None = None,
        deadline_ms: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> Hits:
        self.searches += 1
        self.deadlines.append(deadline_ms)
        node = parse_filter(filter)
        scored = []
        for (tenant, document_id), (vector, _, metadata) in self.rows.items():
            if matches(node, flatten(tenant, metadata)):
                length = float(np.linalg.norm(vector) * np.linalg.norm(query)) or 1.0
                scored.append((float(vector @ query) / length, document_id))
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        ids = np.full(k, None, dtype=object)
        scores = np.full(k, np.nan, np.float32)
        for i, (score, document_id) in enumerate(scored[:k]):
            ids[i], scores[i] = document_id, score
        values = (self.completeness, 0.9, 0.95, 1.0, 2, 8192, 1, self.completeness < 1, False)
        return Hits(ids, scores, Summary(*(np.array([v]) for v in values)), single=True)

    def documents(self, ids: Sequence[int | str], tenant: str) -> list[Document | None]:
        found: list[Document | None] = []
        for document_id in ids:
            row = self.rows.get((tenant, str(document_id)))
            found.append(Document(tenant, document_id, row[1], row[2], 1) if row else None)
        return found

    def contains(self, ids: Sequence[int | str], tenant: str) -> NDArray[np.bool_]:
        return np.array([(tenant, str(i)) in self.rows for i in ids])

    def upsert(
        self,
        ids: Sequence[int | str],
        vectors: NDArray[np.float32],
        *,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        tenant: str,
    ) -> int:
        if self.full is not None:
            raise self.full
        assert texts is not None
        assert metadata is not None
        for document_id, vector, text, values in zip(ids, vectors, texts, metadata, strict=True):
            self.rows[tenant, str(document_id)] = (vector, text, dict(values or {}))
        self.change_offset += len(ids)
        return self.change_offset

    def delete(self, ids: Sequence[int | str], tenant: str) -> int:
        for document_id in ids:
            self.rows.pop((tenant, str(document_id)), None)
        self.change_offset += len(ids)
        return self.change_offset

    def refresh(self) -> bool:
        self.refreshed.set()
        return False

    def in_place(self) -> bool:
        return True

    def warm_sources(self) -> list[Any]:
        return [self.source]

    def resident(self) -> Residency:
        kinds = (KindResidency("links", 10, 4, 0, 3, 4096),)
        return Residency(kinds, (0.4,), 40_960, 16_384, 1 << 20)

    def close(self) -> None:
        self.closed = True


class Source:
    """Ten pages of heat-independent benefit; can be held in the middle of a load."""

    def __init__(self) -> None:
        self.resident: set[int] = set()
        self.heat: Mapping[tuple[str, str], float] = {}
        self.loading = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def unit_batches(self, heat: Mapping[tuple[str, str], float]) -> list[UnitBatch]:
        if self.error is not None:
            raise self.error
        self.heat = dict(heat)
        units = np.arange(10, dtype=np.uint32)
        upper = UnitBatch("index", "upper", 0, units[:1], 4096, np.ones(1, np.float32))
        benefit = np.linspace(1.0, 0.1, 10, dtype=np.float32)
        return [upper, UnitBatch("index", "links", 1, units, 4096, benefit)]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        self.loading.set()
        self.go.wait()
        self.resident |= {(kind == "upper") * 100 + int(u) for u in units}
        return LoadOutcome(len(units), 0, 0, 0, 0, 4096 * len(units), 1, 0.001)

    def total_bytes(self) -> int:
        return 11 * 4096

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        return sum((kind == "upper") * 100 + int(u) in self.resident for u in units)


class Embedder:
    """A text's vector is its letters' counts; the same words in another order are the same."""

    def __init__(self, dim: int = DIM) -> None:
        self.dim = dim
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += texts
        out = np.zeros((len(texts), self.dim), np.float32)
        for i, text in enumerate(texts):
            for letter in text.lower():
                out[i, ord(letter) % self.dim] += 1
        return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-9)


class Bench:
    """An engine with what a test wants to reach into."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        embedder: Any = None,
        reuse: bool = False,
        heat: bool = False,
        **service: Any,
    ) -> None:
        # The stand-in's few pages are to be warmed in part: a share of them, not a mebibyte.
        config = StokerConfig(
            service=ServiceSettings(**({"warm": "none"} | service)),
            prefetch=PrefetchSettings(warm_budget_bytes_min=0),
        )
        self.index = BruteIndex()
        self.embedder = embedder
        off = "" if embedder is not None else "off: no model here"
        text_model = TextModel(embedder, dim=DIM, off=off)
        parts = Parts(self.index, text_model, LookupReuse(config.kvcache) if reuse else None)
        if folder is not None:
            event_log = EmbeddedLog(folder / "events")
            for topic in (EVENTS_TOPIC, DEAD_LETTERS_TOPIC):
                event_log.ensure_topic(TopicSpec(topic, partition_count=1))
            parts.event_log = event_log
            parts.publisher = Publisher(event_log, threads=False)
            if heat:
                parts.heat = HeatKeeper(
                    event_log,
                    topic=EVENTS_TOPIC,
                    group="g",
                    snapshot_path=folder / "heat.snapshot",
                    options=ConsumeOptions(snapshot_s=30.0),
                    settings=config.prefetch,
                )
        self.parts = parts
        self.engine = Engine(
            parts,
            config=config,
            receipt_path=None if folder is None else folder / "receipt.json",
            wall=lambda: 1_800_000_000.0,
        )

    def load_text_model(self) -> None:
        self.parts.text_model.start()
        assert self.parts.text_model.wait_loaded(60.0)

    def put(self, tenant: str, document_id: str, vector: Any = None, **more: Any) -> None:
        array = np.ones(DIM, np.float32) if vector is None else np.asarray(vector, np.float32)
        row = DocumentRow(document_id, more.get("text"), array, more.get("metadata", {}))
        assert self.engine.upsert(tenant, [row]) == 1

    def find(self, tenant: str = "a", **changes: Any) -> Any:
        return self.engine.search(request(**changes), tenant=tenant, left_s=60.0, request_id="r")

    def published(self) -> list[Event]:
        publisher = self.parts.publisher
        assert publisher is not None
        assert self.parts.event_log is not None
        while publisher.write_batch():
            pass
        from stoker.prefetch.events import decode

        consumer = self.parts.event_log.consumer(EVENTS_TOPIC, "test")
        try:
            records = consumer.poll(1000, 0.0)
        finally:
            consumer.close()
        return [decode(record.value) for record in records if record.value is not None]


def request(**changes: Any) -> SearchRequest:
    members: dict[str, Any] = dict(
        text=None, vector=None, k=3, filters=None, tenant=None, recall_target=None,
        deadline_ms=1000, session=None, route=None, include_text=True, include_metadata=True,
    )  # fmt: skip
    members |= changes
    if members["text"] is None and members["vector"] is None:
        members["vector"] = np.ones(DIM, np.float32)
    return SearchRequest(**members)


def ids(answer: Any) -> list[str]:
    return [result.id for result in answer.results]


def test_a_tenant_sees_its_own_documents_only() -> None:
    bench = Bench()
    for tenant in ("a", "b"):
        for name in ("x", "y"):
            bench.put(tenant, name, text=f"{tenant}'s {name}")
    bench.put("b", "z")
    answer = bench.find("a")
    assert ids(answer) == ["x", "y"]
    assert [result.text for result in answer.results] == ["a's x", "a's y"]
    assert answer.tenant == "a"


@pytest.mark.parametrize(
    "filters",
    [
        {"tenant": "b"},
        {"or": [{"tenant": "a"}, {"tenant": "b"}]},
        {"not": {"tenant": "a"}},
        {"tenant": {"ne": "a"}},
        {"tenant": {"exists": True}},
    ],
)
def test_no_filter_reaches_into_another_tenant(filters: dict[str, Any]) -> None:
    bench = Bench()
    bench.put("a", "mine")
    bench.put("b", "theirs", text="secret")
    answer = bench.find("a", filters=filters)
    assert set(ids(answer)) <= {"mine"}
    # Nor does a delete, or a document of the same id.
    assert bench.engine.delete("a", "theirs") == 0
    bench.put("a", "theirs", text="ours")
    assert bench.index.rows["b", "theirs"][1] == "secret"
    assert bench.engine.delete("a", "theirs") == 1
    assert ("b", "theirs") in bench.index.rows


def test_filters_and_what_is_included() -> None:
    bench = Bench()
    bench.put("a", "x", text="tx", metadata={"lang": "en"})
    bench.put("a", "y", text="ty", metadata={"lang": "de"})
    answer = bench.find(filters={"lang": "de"}, include_text=False)
    assert ids(answer) == ["y"]
    assert answer.results[0].text is None
    assert answer.results[0].metadata == {"lang": "de"}
    bare = bench.find(include_text=False, include_metadata=False)
    assert all(r.text is None and r.metadata is None for r in bare.results)
    with pytest.raises(RequestError, match="like") as caught:
        bench.find(filters={"lang": {"like": "d%"}})
    assert caught.value.where == "/filters"


def test_an_answer_says_how_complete_it_is_and_what_it_cost() -> None:
    bench = Bench()
    bench.put("a", "x")
    bench.index.completeness = 0.5
    answer = bench.find()
    assert answer.completeness.work_ratio == 0.5
    assert answer.completeness.deadline_hit
    assert (answer.pages_read, answer.bytes_read, answer.generation) == (2, 8192, 1)
    assert answer.reuse.decision == "off"
    assert answer.timings.total_ms >= answer.timings.search_ms >= 0
    # The index gets what is left of the deadline, never more.
    assert 0 < (bench.index.deadlines[-1] or 0) <= 60_000


def test_a_wrong_dimension_and_a_passed_deadline_are_refused() -> None:
    bench = Bench()
    with pytest.raises(RequestError, match="expected 8 numbers, found 3") as caught:
        bench.find(vector=np.ones(3, np.float32))
    assert caught.value.where == "/vector"
    with pytest.raises(DeadlinePassed):
        bench.engine.search(request(), tenant="a", left_s=0.0)
    row = DocumentRow("x", None, np.ones(3, np.float32))
    with pytest.raises(RequestError) as caught:
        bench.engine.upsert("a", [row])
    assert caught.value.where == "/documents/0/vector"


def test_text_without_a_model_is_refused_and_reported() -> None:
    bench = Bench()
    with pytest.raises(FeatureOff, match="no model here"):
        bench.find(text="hello")
    with pytest.raises(FeatureOff):
        bench.engine.upsert("a", [DocumentRow("x", "hello", None)])
    assert bench.engine.readiness().parts["text"] == "off: no model here"
    bench.put("a", "x", text="with a vector it is fine")


def test_text_is_embedded_and_queries_are_remembered() -> None:
    embedder = Embedder()
    bench = Bench(embedder=embedder)
    with pytest.raises(NotReady):
        bench.find(text="hello")
    assert bench.engine.readiness().waiting_for == ("embedding-model",)
    bench.load_text_model()
    assert bench.engine.readiness().ready
    rows = [DocumentRow("x", "open files", None), DocumentRow("y", "zzzz", np.ones(DIM))]
    assert bench.engine.upsert("a", rows) == 2
    assert embedder.texts[-1] == "open files"
    count = len(embedder.texts)
    assert ids(bench.find(text="files open"))[0] == "x"
    bench.find(text="files open")
    assert embedder.texts[count:] == ["files open"]


def test_a_model_that_does_not_fit_or_load_is_off_and_says_why() -> None:
    bench = Bench(embedder=Embedder(dim=5))
    bench.load_text_model()
    assert "5 dimensions, the index 8" in bench.engine.readiness().parts["text"]
    with pytest.raises(FeatureOff, match="5 dimensions"):
        bench.find(text="hello")

    class Broken:
        def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
            raise UnavailableError("torch is not installed")

    bench = Bench(embedder=Broken())
    bench.load_text_model()
    assert "torch is not installed" in bench.engine.readiness().parts["text"]
    assert bench.engine.readiness().ready


def test_a_repeated_question_is_reused_until_a_document_changes() -> None:
    bench = Bench(embedder=Embedder(), reuse=True)
    bench.load_text_model()
    bench.put("a", "x", text="files")
    bench.put("a", "y", text="sockets")
    first = bench.find(text="how do I open files", k=2)
    assert first.reuse.decision == "searched"
    searches = bench.index.searches
    again = bench.find(text="how do I open files", k=2)
    assert again.reuse.decision == "reused"
    assert again.reuse.reason == "exact repeat"
    assert ids(again) == ids(first)
    assert again.completeness == first.completeness
    assert (bench.index.searches, again.pages_read) == (searches, 0)
    # Fewer results come from the same search, more do not.
    assert ids(bench.find(text="how do I open files", k=1)) == ids(first)[:1]
    assert bench.find(text="how do I open files", k=3).reuse.decision == "searched"
    # Another tenant asks the same and gets its own.
    assert bench.find("b", text="how do I open files", k=2).results == ()
    bench.engine.delete("a", "y")
    after = bench.find(text="how do I open files", k=2)
    assert after.reuse.decision == "searched"
    assert ids(after) == ["x"]


def test_what_takes_no_part_in_reuse_says_so() -> None:
    bench = Bench(embedder=Embedder(), reuse=True)
    bench.load_text_model()
    bench.put("a", "x")
    for changes, reason in (
        ({"vector": np.ones(DIM, np.float32)}, "vector"),
        ({"text": "q", "filters": {"lang": "en"}}, "filtered"),
        ({"text": "q", "recall_target": 0.9}, "recall target"),
    ):
        for _ in range(2):
            decision = bench.find(**changes).reuse
            assert decision.decision == "searched"
            assert reason in decision.reason
    bench.index.completeness = 0.5
    for _ in range(2):  # an incomplete result is not kept
        assert bench.find(text="w").reuse.decision == "searched"


def test_writes_are_refused_where_the_index_is_read_only_or_full() -> None:
    bench = Bench()
    bench.index.full = DocumentsFull("disk full")
    with pytest.raises(StorageFull, match="disk full"):
        bench.put("a", "x")
    bench.index.mode = "r"
    with pytest.raises(FeatureOff, match="read-only"):
        bench.put("a", "x")
    with pytest.raises(FeatureOff):
        bench.engine.delete("a", "x")
    assert "read-only" in bench.engine.readiness().parts["writes"]


def test_integer_ids_are_spelled_as_text_outside() -> None:
    bench = Bench()
    bench.index.id_kind = "int"
    bench.put("a", "17")
    assert ids(bench.find()) == ["17"]
    with pytest.raises(RequestError, match="whole numbers"):
        bench.engine.delete("a", "x17")


@pytest.mark.parametrize(
    "spelled", ["017", "+17", " 17", "17 ", "1_7", "-0", "1٧", "17.0", "0x11", "", "1" * 5_000]
)
def test_an_integer_id_has_one_spelling(spelled: str) -> None:
    """Two spellings of one id would be two names in events and heat, and one document."""
    bench = Bench()
    bench.index.id_kind = "int"
    bench.put("a", "17")
    for act in (lambda: bench.put("a", spelled), lambda: bench.engine.delete("a", spelled)):
        with pytest.raises(RequestError, match="whole numbers"):
            act()
    assert ids(bench.find()) == ["17"]


def test_searches_and_changes_become_events(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.put("a", "x")
    bench.find(session="s", route="faq")
    bench.engine.delete("a", "x")
    events = {event.type: event for event in bench.published()}
    assert set(events) == {
        "stoker.document.upserted.v1",
        "stoker.search.performed.v1",
        "stoker.document.deleted.v1",
    }
    search = events["stoker.search.performed.v1"]
    assert (search.tenant, search.session, search.route) == ("a", "s", "faq")
    assert search.chunk_ids == ("x",)
    assert search.raw["data"]["request_id"] == "r"
    bench.engine.close()
    assert bench.index.closed


def test_a_search_does_not_fail_by_its_event(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.put("a", "x")
    assert bench.parts.event_log is not None
    bench.parts.event_log.close()
    assert ids(bench.find()) == ["x"]
    assert ids(bench.find(text=None, session="s" * 300)) == ["x"]


def test_a_log_without_room_is_told_as_full_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    event = new_event("stoker.result.used.v1", tenant="a", chunk_ids=["x"], time_s=1.8e9)

    def full(*_: Any) -> None:
        raise LogFull("the disk is full")

    monkeypatch.setattr(bench.parts.event_log, "append_batch", full)
    with pytest.raises(StorageFull, match="the disk is full"):
        bench.engine.append_events([event])
    monkeypatch.undo()
    bench.engine.append_events([event])
    assert [event.id for event in bench.published()] == [event.id]


def test_clients_events_are_durable_or_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    event = new_event("stoker.result.used.v1", tenant="a", chunk_ids=["x"], time_s=1_800_000_000)
    bench.engine.append_events([event])
    assert [e.id for e in bench.published()] == [event.id]
    with pytest.raises(FeatureOff, match="keeps no events"):
        Bench().engine.append_events([event])


def test_a_warm_up_loads_by_heat_and_its_receipt_opens_readiness(tmp_path: Path) -> None:
    bench = Bench(tmp_path, heat=True, warm="auto")
    bench.engine.append_events(
        [
            new_event("stoker.search.performed.v1", tenant="a", chunk_ids=["x"], time_s=1.8e9)
            for _ in range(3)
        ]
    )
    assert bench.engine.readiness().waiting_for == ("warm-up",)
    assert bench.engine.warm_status().state == "none"
    bench.engine.start()
    bench.engine.wait_warm(60.0)
    assert bench.engine.readiness().ready
    receipt = bench.engine.receipt
    assert receipt is not None
    assert receipt.heat_keys == 1
    assert bench.index.source.heat[("a", "x")] > 0
    # A fifth of 11 pages: the upper layer and one more.
    assert receipt.planned_bytes == 2 * 4096
    bench.engine.close()
    kept = read_receipt(tmp_path / "receipt.json")
    assert kept is not None
    assert kept.planned_bytes == receipt.planned_bytes
    assert (tmp_path / "heat.snapshot").exists()
    # The next server starts from the snapshot.
    again = Bench(tmp_path, heat=True)
    assert again.parts.heat is not None
    assert again.parts.heat.sink.key_count == 1
    again.engine.close()


def test_a_warm_up_predicts_with_what_the_heat_does_not_know(tmp_path: Path) -> None:
    bench = Bench(tmp_path, heat=True, warm="auto")
    bench.engine.append_events(
        [new_event("stoker.search.performed.v1", tenant="a", chunk_ids=["x"], time_s=1.8e9)]
    )
    bench.engine.start()
    bench.engine.wait_warm(60.0)
    receipt = bench.engine.receipt
    assert receipt is not None
    # All that was asked was asked once: the next accesses fall anywhere. The upper page (benefit 1)
    # is there, and one of ten pages of links (5.5 together).
    assert receipt.predicted_hit_ratio == pytest.approx((1.0 + 0.55) / 6.5)
    bench.engine.close()


def test_what_a_warm_up_served_is_shown(tmp_path: Path) -> None:
    bench = Bench(tmp_path, heat=True, warm="auto")
    bench.engine.start()
    bench.engine.wait_warm(60.0)
    receipt = bench.engine.receipt
    assert receipt is not None
    metrics = Metrics()
    shown = ShownParts(bench.parts, metrics)
    shown.note_receipt(dataclasses.replace(receipt, measured_hit_ratio=0.67))
    assert "stoker_prefetch_measured_hit_ratio 0.67" in metrics.page().decode()
    bench.engine.close()


def test_one_warm_up_at_a_time_and_closing_stops_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    source = bench.index.source
    source.go.clear()
    bench.engine.start_warm(WarmupRequest(None, 60.0, everything=True, wait=False))
    assert source.loading.wait(60.0)
    status = bench.engine.warm_status()
    assert status.state == "running"
    assert status.progress is not None
    with pytest.raises(WarmupRunning):
        bench.engine.start_warm(WarmupRequest(None, None, everything=False, wait=False))
    with pytest.raises(DeadlinePassed):
        bench.engine.wait_warm(0.0)
    closer = threading.Thread(target=bench.engine.close)
    closer.start()
    # The load that runs may end; the next one does not begin, and the receipt says so.
    while not bench.engine._warmup._stop.is_set():
        closer.join(0.001)
    source.go.set()
    closer.join(60.0)
    assert bench.index.closed
    assert bench.engine.receipt is not None
    assert bench.engine.receipt.skipped == {SKIP_CANCELLED: 10}
    with pytest.raises(UnavailableError):
        bench.engine.start_warm(WarmupRequest(None, None, everything=False, wait=False))


def test_a_running_warm_up_is_paused_planned_anew_and_cancelled(tmp_path: Path) -> None:
    bench = Bench(tmp_path, heat=True)
    with pytest.raises(WarmupIdle, match="nothing to pause"):
        bench.engine.steer_warm("pause")
    bench.engine.start()
    source = bench.index.source
    source.go.clear()
    bench.engine.start_warm(WarmupRequest(None, 60.0, everything=True, wait=False))
    assert source.loading.wait(60.0)
    assert source.heat == {}
    bench.engine.steer_warm("pause")
    source.go.set()  # the load that runs ends; the next one waits
    with pytest.raises(DeadlinePassed):
        bench.engine.wait_warm(0.05)
    status = bench.engine.warm_status()
    assert status.progress is not None
    assert status.progress["paused"] is True
    # What was asked meanwhile decides what is left.
    bench.engine.append_events(
        [new_event("stoker.search.performed.v1", tenant="a", chunk_ids=["x"], time_s=1.8e9)]
    )
    assert bench.parts.heat is not None
    until_s = time.monotonic() + 60.0
    while bench.parts.heat.sink.key_count == 0:
        assert time.monotonic() < until_s
        threading.Event().wait(0.002)
    bench.engine.steer_warm("reprioritise")
    bench.engine.steer_warm("resume")
    bench.engine.wait_warm(60.0)
    assert bench.engine.receipt is not None
    assert bench.engine.receipt.state == "complete"
    assert set(source.heat) == {("a", "x")}
    source.loading.clear()
    source.go.clear()
    bench.engine.start_warm(WarmupRequest(None, 60.0, everything=True, wait=False))
    assert source.loading.wait(60.0)
    bench.engine.steer_warm("cancel")
    source.go.set()
    bench.engine.wait_warm(60.0)
    assert bench.engine.receipt.skipped == {SKIP_CANCELLED: 10}
    assert bench.engine.warm_status().state == "done"
    bench.engine.close()


def test_whoever_waits_for_a_warm_up_is_woken_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    request = WarmupRequest(None, None, everything=False, wait=False)

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(bench.engine._warmup, "_finished", broken)
    bench.engine.start_warm(request)
    bench.engine.wait_warm(60.0)
    assert bench.engine.warm_status().state == "failed"
    monkeypatch.undo()
    # No thread can be had: said, and the next one may.
    monkeypatch.setattr(threading.Thread, "start", broken)
    with pytest.raises(UnavailableError, match="a fault of ours"):
        bench.engine.start_warm(request)
    monkeypatch.undo()
    bench.engine.start_warm(request)
    bench.engine.wait_warm(60.0)
    assert bench.engine.warm_status().state == "done"
    bench.engine.close()


def test_a_failed_warm_up_is_told_and_does_not_hold_traffic_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, warm="auto")
    bench.index.source.error = UnavailableError("the device is gone")
    bench.engine.start()
    bench.engine.wait_warm(60.0)
    status = bench.engine.warm_status()
    assert status.state == "failed"
    assert status.error == "the device is gone"
    assert bench.engine.readiness().ready
    bench.engine.close()


def test_a_read_only_server_follows_the_writer() -> None:
    bench = Bench(refresh_s=0.001)
    bench.index.mode = "r"
    bench.engine.start()
    assert bench.index.refreshed.wait(60.0)
    bench.engine.close()


def test_draining_is_not_ready() -> None:
    bench = Bench()
    assert bench.engine.readiness().ready
    bench.engine.draining = True
    assert bench.engine.readiness().waiting_for == ("draining",)


def test_the_metrics_page_shows_what_happened(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.put("a", "x")
    bench.find()
    bench.published()
    page = bench.engine.metrics_page().decode()
    assert "stoker_index_incomplete_answers_total 0.0" in page
    for line in (
        'stoker_index_resident_bytes{kind="links"} 16384.0',
        'stoker_index_damaged_pages{kind="links"} 3.0',
        "stoker_index_live_documents 1.0",
        'stoker_index_written_documents_total{operation="upsert"} 1.0',
        "stoker_service_published_events_total 2.0",
        "stoker_index_read_bytes_total 8192.0",
        'stoker_kvcache_lookup_decisions_total{decision="off"} 1.0',
    ):
        assert line in page
    assert "stoker_service_published_events_total 2.0" in bench.engine.metrics_page().decode()
    bench.index.completeness = 0.5
    bench.find()
    assert "stoker_index_incomplete_answers_total 1.0" in bench.engine.metrics_page().decode()


def test_parts_that_hang_share_the_time_for_closing() -> None:
    """One after the other they would outlast the patience of whoever waits for the server."""
    clock = [0.0]

    class Hangs:
        def stop(self, timeout_s: float) -> bool:
            clock[0] += timeout_s
            return False

        close = stop

    bench = Bench()
    hangs: Any = Hangs()
    bench.parts.placement = bench.parts.kv = bench.parts.publisher = bench.parts.heat = hangs
    engine = Engine(bench.parts, config=bench.engine.config, monotonic=lambda: clock[0])
    with structlog.testing.capture_logs() as lines:
        engine.close()
    assert [line["event"] for line in lines] == ["service.close_incomplete"]
    assert clock[0] <= 30.0 - ServiceSettings().drain_s
    assert not bench.index.closed
