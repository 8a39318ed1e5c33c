"""When a model's chunk reuse is measured, what opens and closes it, and what is kept of it."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import structlog

from stoker.errors import ConfigError, InputError
from stoker.kvcache.chunk_gate import (
    ChunkGate,
    GatePrompt,
    GateRecord,
    GateReport,
    is_open,
    read_gate_prompts,
)
from stoker.kvcache.chunk_reuse import DEFAULT_CHOICE
from stoker.kvcache.gate_keeper import GateKeeper, due_reason
from stoker.kvcache.settings import KvcacheSettings

SETTINGS = KvcacheSettings(kv_gate_every_s=1_000.0, kv_gate_uses_max=5, kv_gate_retry_s=100.0)
REPORT = GateReport(
    model_id="abc", prompts=2, positions=40, kl_mean=0.02, agreement=0.95, loss_full=2.0,
    loss_reused=2.01, recompute_ratio=SETTINGS.kv_recompute_ratio, choice=DEFAULT_CHOICE,
    allowed=True,
)  # fmt: skip
REFUSED = dataclasses.replace(REPORT, kl_mean=0.9, allowed=False)


class Model:
    """A model on a clock that the test turns: what a measurement of it says next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 50_000.0
        self.says: GateReport | Exception = REPORT
        self.measured = 0
        self.keeper = self.opened()

    def opened(self) -> GateKeeper:
        """Return a keeper as a new process would open it."""
        return GateKeeper(
            ChunkGate(self.folder, settings=SETTINGS, wall=lambda: self.now_s),
            model_id="abc", measure=self.measure, settings=SETTINGS, wall=lambda: self.now_s,
        )  # fmt: skip

    def measure(self) -> GateReport:
        self.measured += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@pytest.mark.parametrize("worse", [{"kl_mean": 0.26}, {"agreement": 0.84}, {"loss_reused": 2.05}])
def test_each_measure_alone_is_below_the_bar(worse: dict[str, float]) -> None:
    assert REPORT.meets(SETTINGS)
    assert not dataclasses.replace(REPORT, **worse).meets(SETTINGS)


def test_off_until_measured_then_measured_by_uses_and_by_time(model: Model) -> None:
    keeper = model.keeper
    assert not keeper.allows()
    assert model.measured == 0, "a request measures nothing"
    assert keeper.measure_if_due() == "first"
    assert keeper.measure_if_due() is None
    assert [keeper.allows() for _ in range(4)] == [True] * 4
    assert keeper.measure_if_due() is None
    keeper.allows()
    assert keeper.measure_if_due() == "uses"
    assert keeper.measure_if_due() is None, "uses are counted from the last measurement"
    model.now_s += 999.0
    assert keeper.measure_if_due() is None
    model.now_s += 1.0
    assert keeper.measure_if_due() == "time"
    assert model.measured == 3


def test_below_the_bar_it_goes_off_and_comes_back(model: Model) -> None:
    keeper = model.keeper
    keeper.measure_if_due()
    model.says = REFUSED
    model.now_s += 1_000.0
    assert keeper.allows(), "the last verdict stands until there is another"
    with structlog.testing.capture_logs() as lines:
        assert keeper.measure_if_due() == "time"
    assert [(line["event"], line["open"]) for line in lines] == [("kvcache.gate_switched", False)]
    assert [keeper.allows() for _ in range(5)] == [False] * 5
    model.says = REPORT
    with structlog.testing.capture_logs() as lines:
        assert keeper.measure_if_due() == "uses", "who asks in vain brings it back, too"
    assert [(line["event"], line["open"]) for line in lines] == [("kvcache.gate_switched", True)]
    assert keeper.allows()
    record = ChunkGate(model.folder).record_of("abc")
    assert (record.allowed, record.refused, record.failed) == (2, 1, 0)


def test_verdict_and_date_outlive_the_process(model: Model) -> None:
    model.keeper.measure_if_due()
    model.now_s += 600.0
    again = model.opened()
    assert again.allows()
    assert again.measure_if_due() is None
    assert ChunkGate(model.folder).record_of("abc").measured_at_s == 50_000.0
    model.now_s += 400.0
    assert model.opened().measure_if_due() == "time"


def test_failures_wait_and_the_verdict_lapses(model: Model) -> None:
    keeper = model.keeper
    keeper.measure_if_due()
    model.says = RuntimeError("no memory")
    model.now_s += 1_000.0
    with structlog.testing.capture_logs() as lines:
        assert keeper.measure_if_due() == "time"
    assert [line["event"] for line in lines] == ["kvcache.gate_failed"]
    assert keeper.allows()
    assert keeper.measure_if_due() is None
    model.now_s += 99.0
    assert keeper.measure_if_due() is None
    model.now_s += 1.0
    assert keeper.measure_if_due() == "time"
    model.now_s += 900.0
    assert keeper.allows()
    model.now_s += 1.0
    assert not keeper.allows(), "twice the time between measurements is over"
    assert not ChunkGate(model.folder, settings=SETTINGS, wall=lambda: model.now_s).allows("abc")
    assert ChunkGate(model.folder).record_of("abc").failed == 2
    model.says = REPORT
    assert keeper.measure_if_due() == "time"
    assert keeper.allows()


def test_a_model_whose_first_measurement_fails_stays_off(model: Model) -> None:
    model.says = dataclasses.replace(REPORT, model_id="other")
    assert model.keeper.measure_if_due() == "first"
    assert not model.keeper.allows()
    assert ChunkGate(model.folder).record_of("other") == GateRecord()
    assert ChunkGate(model.folder).record_of("abc").failed == 1
    model.says = REPORT
    model.now_s += 100.0
    assert model.keeper.measure_if_due() == "first"
    assert model.keeper.allows()


def test_a_verdict_that_cannot_be_stored_still_closes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.keeper.measure_if_due()
    model.now_s += 1_000.0
    model.says = REFUSED

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChunkGate, "store", full)
    with structlog.testing.capture_logs() as lines:
        assert model.keeper.measure_if_due() == "time"
    assert [line["event"] for line in lines] == ["kvcache.gate_unwritten", "kvcache.gate_switched"]
    assert not model.keeper.allows()


def test_a_clock_set_back_and_another_share_measure_anew() -> None:
    record = GateRecord(report=REPORT, measured_at_s=5_000.0, allowed=1)
    assert due_reason(record, uses=0, now_s=5_500.0, settings=SETTINGS) is None
    assert due_reason(record, uses=0, now_s=4_000.0, settings=SETTINGS) == "time"
    assert is_open(record, now_s=5_500.0, settings=SETTINGS)
    assert not is_open(record, now_s=5_000.0 - 3 * SETTINGS.kv_gate_every_s, settings=SETTINGS)
    other = dataclasses.replace(SETTINGS, kv_recompute_ratio=0.05)
    assert due_reason(record, uses=0, now_s=5_500.0, settings=other) == "settings"


def test_its_thread_measures_at_once_and_when_woken_by_uses(model: Model) -> None:
    done = threading.Semaphore(0)
    measure = model.measure

    def told() -> GateReport:
        done.release()
        return measure()

    keeper = GateKeeper(
        ChunkGate(model.folder), model_id="abc", measure=told, settings=SETTINGS,
        wall=lambda: model.now_s,
    )  # fmt: skip
    keeper.start()
    try:
        assert done.acquire(timeout=30)
        model.says = REFUSED
        while keeper.allows() or model.measured < 2:  # uses alone wake it: no time goes by
            pass
        assert done.acquire(timeout=30)
    finally:
        assert keeper.close()
    assert ChunkGate(model.folder).record_of("abc").refused >= 1


def test_who_only_reads_writes_nothing(tmp_path: Path) -> None:
    gate = ChunkGate(tmp_path / "gates")
    assert not gate.allows("abc")
    assert gate.report_of("abc") is None
    assert list(tmp_path.iterdir()) == []
    gate.keep(REPORT)
    assert gate.report_of("abc") == REPORT


def test_what_cannot_be_read_is_measured_again(model: Model) -> None:
    model.keeper.measure_if_due()
    (path,) = model.folder.iterdir()
    whole = json.loads(path.read_text())
    for broken in (
        "", "[]", "{}", "[" * 200_000, json.dumps({**whole, "model_id": "abd"}),
        json.dumps({**whole, "measured_at_s": "now"}), json.dumps({**whole, "report": {}}),
        json.dumps({**whole, "report": {**whole["report"], "model_id": "abd"}}),
    ):  # fmt: skip
        path.write_text(broken)
        assert ChunkGate(model.folder).record_of("abc") == GateRecord(), broken
        assert not model.opened().allows()


def test_stored_prompts_are_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    good = {"system": "s", "chunks": ["a", "b"], "continuation": "c"}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({**good, "chunks": ["z"]}) + "\n")
    assert read_gate_prompts(path) == [
        GatePrompt("s", ("a", "b"), "c"),
        GatePrompt("s", ("z",), "c"),
    ]
    for wrong in ({**good, "chunks": []}, {**good, "system": 3}, {"system": "s"}, [1], "text"):
        path.write_text(json.dumps(good) + "\n" + json.dumps(wrong) + "\n")
        with pytest.raises(InputError, match=r"prompts.jsonl:2"):
            read_gate_prompts(path)
    path.write_text(json.dumps(good) + "\n" + "[" * 200_000)
    with pytest.raises(InputError, match=r"prompts.jsonl:2"):
        read_gate_prompts(path)
    path.write_text("\n")
    with pytest.raises(InputError, match="at least one"):
        read_gate_prompts(path)
    with pytest.raises(InputError, match="file of prompts"):
        read_gate_prompts(tmp_path / "none")


@pytest.mark.parametrize(
    "key", ["kv_gate_every_s", "kv_gate_uses_max", "kv_gate_retry_s", "kv_gate_loss_gain_max"]
)
def test_a_schedule_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        dataclasses.replace(KvcacheSettings(), **{key: 0})
