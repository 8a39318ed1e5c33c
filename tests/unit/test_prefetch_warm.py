"""Carrying out a plan, and the receipt that says what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import ConfigError, InputError, UnavailableError
from stoker.prefetch.held_back import HeldBack, unit_coverage
from stoker.prefetch.plan import benefit_sums
from stoker.prefetch.protocols import ContentKey, LoadOutcome, UnitBatch
from stoker.prefetch.receipt import Receipt
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.warm import SKIP_DEADLINE, SKIP_NO_ROOM, SKIP_STOPPED, run_warm


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeRoom:
    """A pool that holds ``room`` units and takes ``unit_s`` seconds to read one."""

    def __init__(self, clock: FakeClock, *, room: int = 1000, unit_s: float = 0.1) -> None:
        self.clock = clock
        self.room = room
        self.unit_s = unit_s
        self.resident: dict[str, set[int]] = {}
        self.calls: list[tuple[str, list[int], bool]] = []
        self.fail_kind: str | None = None

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        ones = np.ones(4, np.float32)
        units = np.arange(4, dtype=np.uint32)
        return [
            UnitBatch("index", "vectors", 2, units, 100, ones),
            UnitBatch("index", "links", 1, units, 100, ones * 3),
            UnitBatch("index", "codes", 1, units, 100, ones * 3),
            UnitBatch("index", "upper", 0, units[:2], 100, ones[:2] * 10),
        ]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        if kind == self.fail_kind:
            raise UnavailableError("the device went away")
        self.calls.append((kind, units.tolist(), sticky))
        have = self.resident.setdefault(kind, set())
        loaded = already = no_room = not_reached = 0
        spent = 0.0
        for unit in units.tolist():
            if unit in have:
                already += 1
            elif sum(map(len, self.resident.values())) >= self.room:
                no_room += 1
            elif deadline_s is not None and spent >= deadline_s:
                not_reached += 1
            else:
                have.add(unit)
                loaded += 1
                spent += self.unit_s
        self.clock.now += spent
        return LoadOutcome(loaded, already, no_room, 0, not_reached, loaded * 100, loaded, spent)

    def total_bytes(self) -> int:
        return 1400

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        return len(self.resident.get(kind, set()) & set(units.tolist()))


def warm(room: FakeRoom, clock: FakeClock, **limits: float | int | None) -> Receipt:
    return run_warm(room, {("t", "a"): 1.0}, clock=clock, wall=lambda: 1000.0, **limits)  # type: ignore[arg-type]


def test_loads_top_layers_first_and_sticky() -> None:
    clock = FakeClock()
    room = FakeRoom(clock)
    receipt = warm(room, clock)
    assert [call[0] for call in room.calls] == ["upper", "links", "codes", "vectors"]
    assert [call[2] for call in room.calls] == [True, False, False, False]
    assert receipt.state == "complete"
    assert receipt.upper_resident
    assert receipt.predicted_hit_ratio == receipt.planned_hit_ratio == 1.0
    assert receipt.resident_bytes == receipt.bytes_read == 1400
    assert [mark.stage for mark in receipt.stages] == [0, 1, 2]
    assert receipt.heat_keys == 1


def test_second_warm_up_loads_nothing_and_says_already() -> None:
    clock = FakeClock()
    room = FakeRoom(clock)
    warm(room, clock)
    receipt = warm(room, clock)
    assert receipt.bytes_read == 0
    assert sum(line.already for line in receipt.lines) == 14
    assert receipt.state == "complete"


def test_full_pool_stops_later_stages() -> None:
    clock = FakeClock()
    room = FakeRoom(clock, room=7)
    receipt = warm(room, clock)
    assert receipt.state == "partial"
    assert receipt.skipped == {SKIP_NO_ROOM: 7}
    assert [call[0] for call in room.calls] == ["upper", "links", "codes"]
    assert receipt.predicted_hit_ratio == pytest.approx((20 + 12 + 3) / 48)


def test_deadline_is_in_the_receipt() -> None:
    clock = FakeClock()
    room = FakeRoom(clock, unit_s=1.0)
    receipt = warm(room, clock, deadline_s=4.0)
    assert receipt.skipped == {SKIP_DEADLINE: 10}
    assert receipt.seconds == pytest.approx(4.0)


def test_budget_is_kept_and_named() -> None:
    clock = FakeClock()
    receipt = warm(FakeRoom(clock), clock, budget_bytes=600)
    assert receipt.planned_bytes == receipt.bytes_read == 600
    assert receipt.skipped == {"over the byte budget": 8}


def test_source_error_stops_loading_not_the_caller() -> None:
    clock = FakeClock()
    room = FakeRoom(clock)
    room.fail_kind = "links"
    receipt = warm(room, clock)
    assert receipt.error == "index/links: the device went away"
    assert receipt.state == "partial"
    assert receipt.upper_resident
    assert receipt.skipped == {SKIP_STOPPED: 12}


def test_two_sources_share_one_budget() -> None:
    clock = FakeClock()

    class Blocks(FakeRoom):
        def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
            units = np.arange(4, dtype=np.uint32)
            return [UnitBatch("kvcache", "kv_block", 2, units, 100, np.full(4, 5.0, np.float32))]

    pages, blocks = FakeRoom(clock), Blocks(clock)
    receipt = run_warm([pages, blocks], {}, budget_bytes=1400, clock=clock, wall=lambda: 0.0)
    assert {call[0] for call in blocks.calls} == {"kv_block"}
    assert "vectors" not in {call[0] for call in pages.calls}
    assert receipt.skipped == {"over the byte budget": 4}
    with pytest.raises(InputError, match="two sources"):
        run_warm([pages, FakeRoom(clock)], {})


def test_negative_heat_is_refused() -> None:
    with pytest.raises(InputError, match="heat of"):
        run_warm(FakeRoom(FakeClock()), {("t", "a"): -1.0})


def test_benefits_are_added_up_once_and_an_empty_kind_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index has millions of units; a kind that has none yet is no reason to warm nothing."""
    clock = FakeClock()
    room = FakeRoom(clock)
    batches = room.unit_batches({})
    none = np.empty(0, np.uint32)
    empty = UnitBatch("index", "pending", 2, none, 100, none.astype(np.float32))
    monkeypatch.setattr(room, "unit_batches", lambda heat: [*batches, empty])
    added: list[int] = []

    def counted(of: Sequence[UnitBatch]) -> list[float]:
        added.append(len(of))
        return benefit_sums(of)

    for module in ("warm", "plan"):
        monkeypatch.setattr(f"stoker.prefetch.{module}.benefit_sums", counted)
    receipt = warm(room, clock)
    assert added == [len(batches) + 1]
    assert receipt.predicted_hit_ratio == receipt.planned_hit_ratio == 1.0


def test_receipt_round_trip_and_measured() -> None:
    clock = FakeClock()
    receipt = warm(FakeRoom(clock), clock, budget_bytes=600)
    measured = receipt.with_measured(0.5, accesses=120)
    assert measured.prediction_error == pytest.approx(0.5 - receipt.predicted_hit_ratio)
    assert Receipt.from_json(measured.to_json()) == measured
    assert receipt.measured_hit_ratio is None
    for bad in ("{}", "[1]", "nope", '{"version": 99}', '{"version": 1}'):
        with pytest.raises(InputError):
            Receipt.from_json(bad)
    for ratio, accesses in ((1.5, 1), (0.5, 0)):
        with pytest.raises(InputError):
            receipt.with_measured(ratio, accesses=accesses)


def test_render_is_aligned_plain_text() -> None:
    clock = FakeClock()
    text = warm(FakeRoom(clock), clock, budget_bytes=600).with_measured(0.5, accesses=9).render()
    assert text.isascii()
    table = [row for row in text.splitlines() if "index/" in row or "offered" in row]
    assert len({len(row) for row in table}) == 1
    assert "over the byte budget" in text
    assert "measured hit ratio  0.500 over 9 accesses" in text


def test_an_index_of_a_few_pages_is_warmed_whole_where_no_budget_is_given() -> None:
    settings = PrefetchSettings()
    least = settings.warm_budget_bytes_min
    assert settings.warm_budget_bytes(0) == 0
    assert settings.warm_budget_bytes(4 * 4096) == 4 * 4096
    assert settings.warm_budget_bytes(3 * least) == least
    large = 100 * least
    assert settings.warm_budget_bytes(large) == int(large * settings.warm_budget_ratio)
    with pytest.raises(ConfigError, match="warm_budget_bytes_min"):
        PrefetchSettings(warm_budget_bytes_min=-1)


class ToldRoom(FakeRoom):
    """Notes in which order it is asked for benefits and for loads; fails for a span on demand."""

    def __init__(self, clock: FakeClock, *, fails: bool = False) -> None:
        super().__init__(clock)
        self.fails = fails
        self.order: list[str] = []

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        span = ("t", "newest") in heat
        self.order.append("a span" if span else "demand")
        if span and self.fails:
            raise UnavailableError("the ids went away")
        batches = super().unit_batches(heat)
        if not span:
            return batches
        # All of the span fell on the last page of a kind, which the demand ranks like any other.
        tail = np.array([0, 0, 0, 1], np.float32)
        return [replace(batch, benefit=tail[-len(batch.units) :]) for batch in batches]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        self.order.append(kind)
        return super().load_units(kind, units, sticky=sticky, deadline_s=deadline_s)


SPAN = HeldBack({("t", "newest"): 2_000.0}, {("t", "newest"): 0.5}, 100, 1.0)


def warm_told(room: ToldRoom, *, held_back: Sequence[HeldBack] = (SPAN,)) -> Receipt:
    return run_warm(
        room,
        {("t", "a"): 1.0},
        budget_bytes=1000,
        held_back=held_back,
        all_loaded=lambda: room.order.append("all loaded"),
        clock=room.clock,
        wall=lambda: 1000.0,
    )


def test_the_prediction_is_tried_once_all_is_loaded() -> None:
    room = ToldRoom(FakeClock())
    receipt = warm_told(room)
    loads = ["upper", "links", "codes"]
    assert room.order == ["demand", *loads, "all loaded", "a span", "a span"]
    # It is what it would have been, had it been tried before the first load, in all marks.
    tried = unit_coverage(room.unit_batches({}), [room], [SPAN])
    assert tried is not None
    untried = warm_told(ToldRoom(FakeClock()), held_back=())
    again = run_warm(
        ToldRoom(FakeClock()), {("t", "a"): 1.0}, budget_bytes=1000, coverage=tried, wall=float
    )
    assert receipt.predicted_hit_ratio == pytest.approx(again.predicted_hit_ratio)
    assert receipt.planned_hit_ratio == pytest.approx(again.planned_hit_ratio)
    assert [mark.predicted_hit_ratio for mark in receipt.stages] == pytest.approx(
        [mark.predicted_hit_ratio for mark in again.stages]
    )
    assert receipt.stages[-1].predicted_hit_ratio == receipt.predicted_hit_ratio
    assert abs(receipt.predicted_hit_ratio - untried.predicted_hit_ratio) > 0.05


def test_a_prediction_that_cannot_be_tried_is_told_and_takes_no_load_back() -> None:
    room = ToldRoom(FakeClock(), fails=True)
    receipt = warm_told(room)
    assert receipt.untried == "the ids went away"
    assert (receipt.error, receipt.state) == (None, "complete")
    assert "not tried on the newest accesses: the ids went away" in receipt.render()
    assert Receipt.from_json(receipt.to_json()) == receipt
    assert receipt.resident_bytes == 1000
    assert receipt.predicted_hit_ratio == warm_told(room, held_back=()).predicted_hit_ratio


def test_a_source_that_failed_is_not_asked_for_a_prediction() -> None:
    room = ToldRoom(FakeClock())
    room.fail_kind = "links"
    receipt = warm_told(room)
    assert receipt.error == "index/links: the device went away"
    assert "a span" not in room.order


class PatientRoom(ToldRoom):
    """Works out its units in two pieces."""

    def unit_batches_in_pieces(
        self, heat: Mapping[ContentKey, float], rest: Callable[[], None]
    ) -> Sequence[UnitBatch]:
        rest()
        found = self.unit_batches(heat)
        rest()
        return found


@pytest.mark.parametrize("kind", [ToldRoom, PatientRoom])
def test_rests_come_after_each_step_of_work(kind: type[ToldRoom]) -> None:
    room = kind(FakeClock())
    rests: list[int] = []
    run_warm(
        room,
        {("t", "a"): 1.0},
        held_back=[SPAN],
        rest=lambda: rests.append(len(room.calls)),
        clock=room.clock,
        wall=lambda: 1000.0,
    )
    # While it plans, after each of four loads, and while it predicts and writes the receipt.
    assert rests == sorted(rests)
    assert [rests.count(loads) for loads in (1, 2, 3)] == [1, 1, 1]
    assert rests.count(0) > 5
    assert rests.count(4) > 10
