"""A running warm-up is paused, resumed, re-prioritised and cancelled from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from stoker.errors import InputError, UnavailableError
from stoker.prefetch.protocols import ContentKey, LoadOutcome, UnitBatch
from stoker.prefetch.receipt import STATE_COMPLETE, STATE_PARTIAL, Receipt
from stoker.prefetch.warm import SKIP_CANCELLED, SKIP_DEADLINE, run_warm
from stoker.prefetch.warm_control import CANCELLED, PAUSED, RUNNING, WarmControl

_WAIT_S = 20.0
_UNITS = 32
_BYTES = 100
Heat = Mapping[ContentKey, float]


def heat_on(units: Sequence[int]) -> Heat:
    return {("t", str(unit)): float(weight + 1) for weight, unit in enumerate(reversed(units))}


class Room:
    """Chunk number n is what unit n of every kind is about; one hook is called before each load."""

    def __init__(self, before: Callable[[int], None] = lambda call: None) -> None:
        self.before = before
        self.loads: list[tuple[str, list[int]]] = []

    def unit_batches(self, heat: Heat) -> Sequence[UnitBatch]:
        benefit = np.zeros(_UNITS, np.float32)
        for (_, name), weight in heat.items():
            benefit[int(name)] = weight
        order = np.argsort(-benefit, kind="stable").astype(np.uint32)
        upper = np.arange(2, dtype=np.uint32)
        return [
            UnitBatch("index", "upper", 0, upper, _BYTES, np.full(2, 50.0, np.float32)),
            UnitBatch("index", "refine", 2, order, _BYTES, benefit[order]),
            UnitBatch("index", "vectors", 3, order[:4], _BYTES, benefit[order[:4]]),
        ]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        self.before(len(self.loads))
        self.loads.append((kind, units.tolist()))
        count = len(units)
        return LoadOutcome(count, 0, 0, 0, 0, count * _BYTES, 1, 0.0)

    def total_bytes(self) -> int:
        return (2 + _UNITS + 4) * _BYTES

    def loaded(self, kind: str) -> list[int]:
        return [unit for name, units in self.loads if name == kind for unit in units]


def warm(room: Room, control: WarmControl, heat: Heat, **limits: float | int | None) -> Receipt:
    return run_warm(room, heat, round_bytes=2 * _BYTES, control=control, **limits)  # type: ignore[arg-type]


def test_nothing_is_loaded_between_pause_and_resume() -> None:
    control = WarmControl()
    order: list[str] = []
    paused = threading.Event()

    def before(call: int) -> None:
        order.append("load")
        if call == 3:
            control.pause()
            order.append("paused")
            paused.set()

    room = Room(before)
    done: list[Receipt] = []
    thread = threading.Thread(target=lambda: done.append(warm(room, control, heat_on(range(32)))))
    thread.start()
    assert paused.wait(_WAIT_S)
    assert control.state == PAUSED
    order.append("resumed")
    control.resume()
    thread.join(_WAIT_S)
    assert not thread.is_alive()
    at = order.index("paused")
    assert order[at + 1] == "resumed"
    assert order.count("load") > 10
    assert done[0].state == STATE_COMPLETE


def test_a_pause_ends_by_itself_and_no_later_than_the_deadline() -> None:
    control = WarmControl(pause_max_s=0.001)
    control.pause()
    assert warm(Room(), control, {}).state == STATE_COMPLETE
    assert control.state == RUNNING
    patient = WarmControl()
    patient.pause()
    room = Room()
    receipt = warm(room, patient, {}, deadline_s=0.001)
    assert room.loads == []
    assert set(receipt.skipped) == {SKIP_DEADLINE}
    with pytest.raises(InputError, match="pause_max_s"):
        WarmControl(pause_max_s=0.0)


def test_cancelling_is_for_good_and_says_what_was_left_out() -> None:
    control = WarmControl()
    room = Room(lambda call: control.cancel() if call == 2 else None)
    receipt = warm(room, control, heat_on(range(32)))
    assert len(room.loads) == 3
    assert receipt.state == STATE_PARTIAL
    assert receipt.error is None
    loaded = sum(len(units) for _, units in room.loads)
    assert receipt.skipped == {SKIP_CANCELLED: 2 + _UNITS + 4 - loaded}
    control.resume()
    control.pause()
    assert control.state == CANCELLED
    again = Room()
    warm(again, control, {})
    assert again.loads == []


def test_cancelling_ends_a_pause() -> None:
    control = WarmControl()
    paused = threading.Event()

    def before(call: int) -> None:
        control.pause()
        paused.set()

    thread = threading.Thread(target=lambda: warm(Room(before), control, {}))
    thread.start()
    assert paused.wait(_WAIT_S)
    control.cancel()
    thread.join(_WAIT_S)
    assert not thread.is_alive()


def test_new_heat_decides_what_is_left_within_the_same_budget() -> None:
    control = WarmControl()
    first, second = heat_on(range(16)), heat_on(range(16, 32))
    room = Room(lambda call: control.reprioritise(second) if call == 2 else None)
    receipt = warm(room, control, first, budget_bytes=14 * _BYTES)
    # Two of upper, two rounds of the first heat's hottest, then the second heat's hottest.
    assert room.loaded("refine") == [0, 1, 2, 3, *range(16, 24)]
    assert receipt.planned_bytes == receipt.bytes_read == 14 * _BYTES
    assert receipt.heat_keys == 16
    # By the second heat: its hottest 8 of refine, and upper; none of the first heat's.
    total = sum(float(batch.benefit.sum()) for batch in Room().unit_batches(second))
    covered = 100.0 + sum(sorted(second.values())[8:])
    assert receipt.predicted_hit_ratio == pytest.approx(covered / total, abs=1e-6)
    assert {line.kind: line.planned for line in receipt.lines} == {
        "upper": 2,
        "refine": 12,
        "vectors": 0,
    }


def test_heat_that_cannot_be_had_stops_the_loading_not_the_caller() -> None:
    control = WarmControl()

    def nobody() -> Heat:
        raise UnavailableError("the heat went away")

    room = Room(lambda call: control.reprioritise(nobody) if call == 1 else None)
    receipt = warm(room, control, {})
    assert receipt.error == "the new heat: the heat went away"
    assert len(room.loads) == 2
    with pytest.raises(InputError, match="heat of"):
        control.reprioritise({("t", "1"): -1.0})


@given(
    budget_units=st.none() | st.integers(0, 2 * _UNITS),
    first=st.lists(st.integers(0, _UNITS - 1), unique=True),
    actions=st.dictionaries(
        st.integers(0, 12),
        st.sampled_from(["cancel", "resume"])
        | st.lists(st.integers(0, _UNITS - 1), unique=True, max_size=20),
        max_size=5,
    ),
)
def test_whatever_is_ordered_the_books_balance(
    budget_units: int | None,
    first: list[int],
    actions: dict[int, str | list[int]],
) -> None:
    control = WarmControl()

    def before(call: int) -> None:
        action = actions.get(call)
        if action == "cancel":
            control.cancel()
        elif action == "resume":
            control.resume()
        elif isinstance(action, list):
            control.reprioritise(heat_on(action))

    room = Room(before)
    budget = None if budget_units is None else budget_units * _BYTES
    receipt = warm(room, control, heat_on(first), budget_bytes=budget)
    for kind in ("upper", "refine", "vectors"):
        loaded = room.loaded(kind)
        assert len(set(loaded)) == len(loaded)
    loaded_bytes = sum(len(units) for _, units in room.loads) * _BYTES
    assert receipt.bytes_read == loaded_bytes
    if budget is not None:
        assert loaded_bytes <= max(budget, 2 * _BYTES)  # only stage 0 may go over
    for line in receipt.lines:
        assert line.loaded + line.already <= line.planned
        assert line.planned_bytes == line.planned * _BYTES
    assert 0.0 <= receipt.predicted_hit_ratio <= receipt.planned_hit_ratio + 1e-9 <= 1.0 + 2e-9
    if control.state == CANCELLED and receipt.state == STATE_COMPLETE:
        assert not receipt.skipped.get(SKIP_CANCELLED)
    assert Receipt.from_json(receipt.to_json()) == receipt
    assert [mark.pages for mark in receipt.stages] == sorted(m.pages for m in receipt.stages)
