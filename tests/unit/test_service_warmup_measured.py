"""What a warm-up's receipt says of the accesses that came after it, and how often it is asked."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.prefetch.held_back import HeldBack
from stoker.prefetch.protocols import LoadOutcome, UnitBatch
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.warm_set import Accesses
from stoker.service.problems import DeadlinePassed
from stoker.service.turns import _PIECE_S, Callers
from stoker.service.warmup import _FIRST_S, WarmupRunner, read_receipt


class Pages:
    """One upper page and ten of links, whose benefit no heat changes; a merge numbers them anew."""

    def __init__(self) -> None:
        self.first_unit = 0

    def unit_batches(self, heat: Mapping[tuple[str, str], float]) -> list[UnitBatch]:
        units = self.first_unit + np.arange(10, dtype=np.uint32)
        upper = UnitBatch("index", "upper", 0, units[:1], 4096, np.ones(1, np.float32))
        benefit = np.linspace(1.0, 0.1, 10, dtype=np.float32)
        return [upper, UnitBatch("index", "links", 1, units, 4096, benefit)]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        return LoadOutcome(len(units), 0, 0, 0, 0, 4096 * len(units), 1, 0.001)

    def total_bytes(self) -> int:
        return 11 * 4096

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        return len(units)


def test_what_the_warm_up_served_is_added_to_the_receipt(tmp_path: Path) -> None:
    moment, asked = 1.8e9, Accesses({("a", "x"): 1_000.0}, outside=23)
    source, receipts = Pages(), list[float | None]()
    runner = WarmupRunner(
        lambda: [source],
        lambda: {("a", "x"): 1.0},
        settings=PrefetchSettings(warm_budget_bytes_min=0),
        receipt_path=tmp_path / "receipt.json",
        finished=lambda receipt: receipts.append(receipt.measured_hit_ratio),
        accesses_since=lambda since_s: asked if since_s == moment else Accesses(),
        wall=lambda: moment,
    )
    runner.measure()  # nothing to measure yet
    runner.start(budget_bytes=4096 * 5, deadline_s=None)
    runner.wait(60.0)
    runner.measure()
    assert receipts == [None]  # 1,023 accesses are too few
    asked = Accesses({("a", "x"): 1_024.0, ("a", "gone"): 0.0})
    runner.measure()
    # The upper page (1 of 6.5) and the first four of ten pages of links (1.0, 0.9, 0.8, 0.7).
    assert receipts[1:] == [pytest.approx(4.4 / 6.5)]
    kept = read_receipt(tmp_path / "receipt.json")
    assert kept is not None
    assert kept.measured_hit_ratio == pytest.approx(4.4 / 6.5)
    assert kept.measured_accesses == 1_024
    assert kept.prediction_error == pytest.approx(0.0)
    runner.measure()
    assert len(receipts) == 2  # once for each warm-up


def test_a_warm_up_whose_pages_were_laid_out_anew_is_not_measured() -> None:
    source, receipts = Pages(), list[float | None]()
    runner = WarmupRunner(
        lambda: [source],
        dict,
        settings=PrefetchSettings(),
        receipt_path=None,
        finished=lambda receipt: receipts.append(receipt.measured_hit_ratio),
        accesses_since=lambda since_s: Accesses({("a", "x"): 5_000.0}),
    )
    runner.start(budget_bytes=None, deadline_s=None, everything=True)
    runner.wait(60.0)
    source.first_unit = 1_000
    runner.measure()
    source.first_unit = 0
    runner.measure()
    assert receipts == [None]


def test_a_warm_up_that_nobody_asks_for_is_looked_at_ever_more_rarely() -> None:
    source, asked, looks, receipts = Pages(), Accesses(outside=5_000), [0], list[Any]()

    def sources() -> list[Pages]:
        looks[0] += 1
        return [source]

    runner = WarmupRunner(
        sources,
        dict,
        settings=PrefetchSettings(),
        receipt_path=None,
        finished=lambda receipt: receipts.append(receipt.measured_hit_ratio),
        accesses_since=lambda since_s: asked,
    )
    runner.start(budget_bytes=None, deadline_s=None, everything=True)
    runner.wait(60.0)
    looks[0] = 0
    looked = []
    for call in range(320):
        before = looks[0]
        runner.measure()
        if looks[0] > before:
            looked.append(call)
    assert looked == [0, 2, 6, 14, 30, 62, 126, 190, 254, 318]
    asked = Accesses({("a", "x"): 5e3})
    for _ in range(64):
        runner.measure()
    assert receipts == [None, 1.0]


class SlowToPredict(Pages):
    """Answers for the newest accesses only once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.let = threading.Event()
        self.loads: list[str] = []

    def unit_batches(self, heat: Mapping[tuple[str, str], float]) -> list[UnitBatch]:
        if ("a", "newest") in heat:
            self.asked.set()
            assert self.let.wait(60.0)
        return super().unit_batches(heat)

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        self.loads.append(kind)
        return super().load_units(kind, units, sticky=sticky, deadline_s=deadline_s)


def test_nobody_waits_for_the_prediction_before_traffic_comes() -> None:
    source = SlowToPredict()
    newest = {("a", "newest"): 2_000.0}
    runner = WarmupRunner(
        lambda: [source],
        lambda: {("a", "x"): 1.0},
        settings=PrefetchSettings(),
        receipt_path=None,
        held_back=lambda: [HeldBack(newest, newest, 0, 1.0)],
    )
    assert not runner.loaded_once
    with pytest.raises(DeadlinePassed, match="still loads"):
        runner.wait_loaded(0.0)
    runner.start(budget_bytes=None, deadline_s=None, everything=True)
    runner.wait_loaded(60.0)
    assert source.asked.wait(60.0)
    assert source.loads == ["upper", "links"]
    assert runner.loaded_once
    assert (runner.status().state, runner.receipt) == ("running", None)
    source.let.set()
    runner.wait(60.0)
    assert runner.receipt is not None
    assert runner.receipt.state == "complete"


def test_a_warm_up_that_fails_keeps_no_traffic_waiting() -> None:
    def no_demand() -> Mapping[tuple[str, str], float]:
        raise UnavailableError("no heat today")

    runner = WarmupRunner(
        lambda: [Pages()], no_demand, settings=PrefetchSettings(), receipt_path=None
    )
    runner.start(budget_bytes=None, deadline_s=None)
    runner.wait(60.0)
    assert runner.loaded_once
    assert (runner.status().state, runner.status().error) == ("failed", "no heat today")


def test_searches_get_by_between_the_pieces_of_a_warm_up_that_nobody_waits_for() -> None:
    newest = {("a", "newest"): 2_000.0}
    source = SlowToPredict()
    source.let.set()
    rests: list[int] = []

    class Watched(Callers):
        """Tells after how many loads the warm-up let callers by; each look at the clock is late."""

        def __init__(self) -> None:
            super().__init__(clock=itertools.count().__next__)

        def wait_gap(self, used: int, *, wait_s_max: float) -> int:
            rests.append(len(source.loads))
            return used

    runner = WarmupRunner(
        lambda: [source],
        lambda: {("a", "x"): 1.0},
        settings=PrefetchSettings(),
        receipt_path=None,
        held_back=lambda: [HeldBack(newest, newest, 0, 1.0)],
        callers=Watched(),
    )
    runner.start(budget_bytes=None, deadline_s=None, everything=True)
    runner.wait(60.0)
    # The first one rests only once it has loaded: in the prediction and the receipt.
    assert len(rests) > 5
    assert set(rests) == {2}
    rests.clear()
    runner.start(budget_bytes=None, deadline_s=None, everything=True)
    runner.wait(60.0)
    # The next one rests while it plans, and after each load, as well.
    assert rests.count(2) > 5
    assert rests.count(3) == 1
    assert rests.count(4) > 5


def test_a_warm_up_ends_beside_callers_that_never_leave_a_gap(tmp_path: Path) -> None:
    newest = {("a", "newest"): 2_000.0}
    source, callers = SlowToPredict(), Callers()
    source.let.set()
    heat = {("a", f"x{n}"): 1.0 for n in range(1_000)}
    runner = WarmupRunner(
        lambda: [source],
        lambda: heat,
        settings=PrefetchSettings(),
        receipt_path=tmp_path / "receipt.json",
        held_back=lambda: [HeldBack(newest, newest, 0, 1.0)],
        accesses_since=lambda since_s: Accesses({("a", "newest"): 2_000.0}),
        callers=callers,
    )
    with callers:
        for loads in (2, 4):
            runner.start(budget_bytes=None, deadline_s=None, everything=True)
            runner.wait(60.0)
            assert runner.receipt is not None
            assert runner.receipt.state == "complete"
            assert len(source.loads) == loads
            runner.measure()
            assert runner.receipt.measured_hit_ratio == 1.0
    assert read_receipt(tmp_path / "receipt.json") == runner.receipt


class Stepping(Callers):
    """Callers that never leave a gap, on a clock that only work and waits move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits = 0
        super().__init__(clock=lambda: self.now_s)

    def wait_gap(self, used: int, *, wait_s_max: float) -> int:
        self.now_s += max(0.0, wait_s_max)
        self.waits += 1
        return used


class ManyKeys(SlowToPredict):
    """Looks keys up in 4,000 pieces: 0.4 s of work."""

    def __init__(self, callers: Stepping) -> None:
        super().__init__()
        self.let.set()
        self._callers = callers

    def unit_batches_in_pieces(
        self, heat: Mapping[tuple[str, str], float], rest: Callable[[], None]
    ) -> list[UnitBatch]:
        for _ in range(4_000):
            self._callers.now_s += 1.001 * _PIECE_S
            rest()
        return self.unit_batches(heat)


def runner_of_many_keys(source: ManyKeys, callers: Stepping) -> WarmupRunner:
    return WarmupRunner(
        lambda: [source],
        lambda: {("a", "x"): 1.0},
        settings=PrefetchSettings(),
        receipt_path=None,
        callers=callers,
    )


@pytest.mark.parametrize("deadline_s", [20.0, None])
def test_a_plan_of_many_keys_stands_in_time_beside_callers_that_leave_no_gap(
    deadline_s: float | None,
) -> None:
    callers = Stepping()
    source = ManyKeys(callers)
    runner = runner_of_many_keys(source, callers)
    runner._loaded.set()  # as after an earlier one
    runner.start(budget_bytes=None, deadline_s=deadline_s, everything=True)
    runner.wait(60.0)
    assert source.loads == ["upper", "links"]
    # Twice its work, and a tenth of the deadline or ten seconds.
    assert callers.now_s - 100.0 <= 0.9 + (10.0 if deadline_s is None else 0.1 * deadline_s)
    assert callers.waits > 1_000


def test_a_warm_up_steps_aside_for_nobody_once_its_server_stops() -> None:
    callers = Stepping()
    source = ManyKeys(callers)
    runner = runner_of_many_keys(source, callers)
    runner.start(budget_bytes=None, deadline_s=None, everything=True)
    assert runner.stop(60.0)
    callers.now_s += 1.0
    waits = callers.waits
    runner.rest()
    assert callers.waits == waits


class Noted(Pages):
    """Tells when it is asked for what it has, which reads, and when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def unit_batches(self, heat: Any) -> Any:
        self.asked.set()
        return super().unit_batches(heat)


class StandingClock:
    """Time that stands until it is let go: no wait ends by itself."""

    def __init__(self) -> None:
        self._now_s: float | None = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() if self._now_s is None else self._now_s

    def go(self) -> None:
        self._now_s = None


def first_warm_up(callers: Callers) -> tuple[WarmupRunner, Noted]:
    source = Noted()
    runner = WarmupRunner(
        lambda: [source],
        lambda: {("a", "x"): 1.0},
        settings=PrefetchSettings(),
        receipt_path=None,
        callers=callers,
    )
    runner.start(budget_bytes=None, deadline_s=None)
    return runner, source


def test_the_first_answer_comes_before_a_warm_up_reads_anything() -> None:
    clock = StandingClock()
    callers = Callers(clock=clock)
    with callers:
        runner, source = first_warm_up(callers)
        while not callers._waiting:  # until it waits for the answer
            assert not source.asked.is_set()
        assert not source.asked.is_set()
        clock.go()
    runner.wait(60.0)
    assert source.asked.is_set()
    assert runner._first_left_s > 0.0


@pytest.mark.parametrize("answered", [True, False])
def test_a_warm_up_waits_for_the_first_answer_only_and_not_for_long(answered: bool) -> None:
    """Others wait for what it loads, and the first may be one that never ends."""
    callers = Callers()
    if answered:
        with callers:
            pass
    with callers:
        runner, _ = first_warm_up(callers)
        runner.wait(60.0)
    assert (runner._first_left_s == _FIRST_S) if answered else (runner._first_left_s <= 0.0)
