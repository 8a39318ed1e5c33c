"""Policies and entropy on live searches: bounded in CPU and queue, and what is loaded ahead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from stoker.errors import UnavailableError
from stoker.prefetch.protocols import LoadOutcome, UnitBatch
from stoker.prefetch.regime import Regime
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.placement_wiring import Foreseen, LivePlacement


class Room:
    """A source with a page per passage ("p3" is page 3) and pages that everybody shares."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.failing = False

    def unit_batches(self, heat: Mapping[Any, float]) -> list[UnitBatch]:
        if self.failing:
            raise UnavailableError("the index is closing")
        benefit = np.full(100, 0.1, np.float32)
        for _, name in heat:
            benefit[int(name[1:])] += 1.0
        order = np.argsort(-benefit, kind="stable").astype(np.uint32)
        flat = np.ones(100, np.float32)
        return [
            UnitBatch("index", "links", 1, np.arange(100, dtype=np.uint32), 4096, flat),
            UnitBatch("index", "refine", 3, order, 4096, benefit[order]),
        ]

    def load_units(
        self, kind: str, units: Any, *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        assert not sticky
        assert deadline_s is not None
        self.loaded += [(kind, int(unit)) for unit in units]
        return LoadOutcome(len(units), 0, 0, 0, 0, 4096 * len(units), 1, 0.0)

    def total_bytes(self) -> int:
        return 200 * 4096


class Bench:
    """Live placement under clocks that the test sets."""

    def __init__(
        self,
        *,
        act: bool = False,
        cpu_ratio_max: float = 1.0,
        room: int = 8,
        settings: PrefetchSettings | None = None,
        foreseen: Foreseen = lambda query, tenant, now_s: {},
    ) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.cpu_step = 0.0
        self.wait_us = 0
        self.searched_s = -math.inf
        self.gpu: tuple[int, int] | None = None
        self.room = Room()
        self.placement = LivePlacement(
            settings or PrefetchSettings(),
            room_keys=room,
            act=act,
            foreseen=foreseen,
            cpu_ratio_max=cpu_ratio_max,
            sources=lambda: [self.room],
            demand_wait_us=lambda: self.wait_us,
            searched_s=lambda: self.searched_s,
            gpu_counts=lambda: self.gpu,
            monotonic=lambda: self.now,
            cpu_time=self._cpu_time,
            pause=lambda seconds: None,
        )

    def _cpu_time(self) -> float:
        self.cpu += self.cpu_step
        return self.cpu

    def search(
        self,
        *names: str,
        session: str | None = "s",
        route: str | None = None,
        query: str | None = None,
    ) -> None:
        self.placement.offer("t", route, session, list(names), self.now, query=query)

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.placement.tick()


@pytest.mark.parametrize("act", [False, True])
def test_what_searches_retrieve_is_compared_and_counted(act: bool) -> None:
    bench = Bench(act=act)
    assert bench.placement.report().acting == ""
    for _ in range(3):
        bench.search("p1", "p2", "p3", route="faq")
        bench.tick()
    report = bench.placement.report()
    assert (report.accesses, report.hits, report.skipped) == (9, 6, 0)
    assert report.acting in bench.placement.policies
    assert bench.placement.regime("t") is Regime.EVICT
    assert bench.placement.regime("t", "faq") is Regime.EVICT
    assert bench.placement.regime("other") is None
    assert report.entropy_bits == {
        name: pytest.approx(math.log2(3), abs=0.01) for name in ("least", "median", "most")
    }
    assert report.regimes == {"pin": 0, "evict": 2, "shard": 0}
    why = bench.placement.explain("t", "p1")
    assert why["acting"] == report.acting
    assert bool(why["forecast"]) == act  # without, the forecast does not compete
    assert why["qlearning"] is None


def test_its_share_of_cpu_is_never_passed_by_more_than_a_request() -> None:
    bench = Bench(cpu_ratio_max=0.02)
    bench.cpu_step = 0.001  # every look at the clock costs a millisecond
    for _ in range(200):
        for i in range(20):
            bench.search(f"p{i}")
        bench.tick()
    for _ in range(100):
        bench.tick()
    report = bench.placement.report()
    assert report.skipped + report.accesses == 4_000
    assert report.skipped > 3_000
    assert report.accesses > 0
    # What it may save up, its share, and a last request and three looks at the clock per tick.
    assert report.cpu_s <= 0.5 + 300 * 0.1 * 0.02 + 300 * 0.005


def test_requests_wait_for_a_gap_between_searches() -> None:
    bench = Bench()
    bench.searched_s = math.inf  # one runs all the time
    for _ in range(30):
        bench.search("p1", "p2")
        bench.tick(0.11)
    assert bench.placement.report().accesses == 2 * 30  # one request in 100 ms, in any case
    for _ in range(30):
        bench.search("p1", "p2")
    bench.tick(0.06)
    assert bench.placement.report().accesses == 2 * 30
    bench.tick(0.06)
    assert bench.placement.report().accesses == 2 * 31
    bench.searched_s = bench.now
    bench.tick(0.002)  # it has ended: too short ago
    assert bench.placement.report().accesses == 2 * 31
    bench.tick(0.002)
    assert bench.placement.report().accesses == 2 * 60
    assert bench.placement.report().skipped == 0


def test_long_renewals_leave_half_of_the_share_to_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(act=True, cpu_ratio_max=0.02)
    renewals = []

    def renew() -> list[Any]:
        bench.cpu += 0.04  # of half a million passages
        renewals.append(bench.now)
        return []

    monkeypatch.setattr(bench.placement._policy, "renew", renew)
    for _ in range(200):
        bench.search("p1")
        bench.tick(0.1)
    assert len(renewals) == 5  # one in 4 s
    assert bench.placement.report().accesses == 200
    assert bench.placement.report().cpu_s <= 20.0 * 0.02


def test_what_has_waited_for_seconds_is_skipped() -> None:
    bench = Bench()
    bench.searched_s = math.inf
    for _ in range(30):
        bench.search("p1")
    bench.tick(4.9)
    bench.tick(0.2)
    report = bench.placement.report()
    assert (report.accesses, report.skipped) == (1, 29)


def test_an_answer_just_given_is_no_gap() -> None:
    bench = Bench()
    bench.tick()
    bench.placement._taken_s = bench.now
    bench.search("p1")
    bench.tick(0.002)
    assert bench.placement.report().accesses == 0
    bench.tick(0.002)
    assert bench.placement.report().accesses == 1


def test_without_a_gap_the_content_is_renewed_and_nothing_is_loaded() -> None:
    bench = Bench(act=True)
    bench.searched_s = math.inf
    visits(bench)
    assert not bench.room.loaded
    report = bench.placement.report()
    assert report.accesses > 0
    assert sum(report.prefetch.values()) > 0


def test_a_full_queue_refuses_and_counts() -> None:
    bench = Bench()
    for _ in range(5_000):
        bench.search("p1")
    bench.search()  # nothing retrieved is no access
    bench.tick()
    report = bench.placement.report()
    assert report.accesses == 4_096
    assert report.skipped == 904


def visits(bench: Bench) -> None:
    """Sessions that ask for companions again and again, while others pass by."""
    for i in range(60):
        first = 10 * (i % 5)
        bench.search(f"p{first}", f"p{first + 1}", f"p{first + 2}", session=f"s{i}")
        bench.tick(2.0)
        bench.search(f"p{60 + i % 40}", session="x")
        bench.tick(2.0)


def test_what_the_acting_policy_wants_ahead_is_loaded_and_only_its_own_pages() -> None:
    bench = Bench(act=True)
    visits(bench)
    assert bench.room.loaded
    assert {kind for kind, _ in bench.room.loaded} == {"refine"}
    assert bench.placement.report().loaded_bytes == 4096 * len(bench.room.loaded)


def test_observing_loads_nothing() -> None:
    bench = Bench(act=False)
    visits(bench)
    assert bench.placement.report().accesses > 0
    assert not bench.room.loaded


def test_nothing_is_loaded_ahead_while_searches_wait_for_the_device() -> None:
    bench = Bench(act=True)
    for i in range(120):
        bench.search(f"p{10 * (i % 5)}", f"p{10 * (i % 5) + 1}", session=f"s{i}")
        bench.wait_us += 900_000  # of each second
        bench.tick(1.0)
    assert bench.placement.report().cross_tier.nvme_idle_ratio == pytest.approx(0.1)
    assert not bench.room.loaded


def test_a_source_that_fails_stops_nothing() -> None:
    bench = Bench(act=True)
    bench.room.failing = True
    visits(bench)
    assert bench.placement.report().loaded_bytes == 0


def test_the_cross_tier_condition_is_reported() -> None:
    bench = Bench()
    bench.gpu = (0, 0)
    bench.tick(1.0)
    bench.gpu = (80, 20)
    bench.tick(1.0)
    state = bench.placement.report().cross_tier
    assert state.open
    assert state.gpu_miss_ratio == pytest.approx(0.2)
    assert state.nvme_idle_ratio == 1.0


def test_a_hot_spot_is_counted_once_its_window_ends() -> None:
    bench = Bench(room=64)
    for start in range(2):
        for i in range(6_000):
            # First everything in turn, then two passages only.
            name = f"p{i % 64}" if start == 0 else f"p{i % 2}"
            bench.search(name, session=None)
            if i % 1_000 == 999:
                bench.tick(0.1)
        bench.tick(61.0)
    assert bench.placement.report().drifts == 1


def leads_to(*names: str) -> Foreseen:
    """Return what gives these passages of the asking tenant, the first the most."""

    def foreseen(query: str, tenant: str, now_s: float) -> dict[tuple[str, str], float]:
        assert query == "about Kafka"
        return {(tenant, name): 1.0 / (at + 1) for at, name in enumerate(names)}

    return foreseen


def test_what_a_question_leads_to_is_loaded_and_accounted() -> None:
    settings = PrefetchSettings(topics_ahead_max=2)
    bench = Bench(act=True, settings=settings, foreseen=leads_to("p1", "p50", "p60", "p70"))
    bench.search("p1", "p2", query="about Kafka")
    bench.tick(1.1)
    bench.tick(1.1)
    # Two of the four, and not the one that the question found itself.
    assert {50, 60} <= {unit for _, unit in bench.room.loaded}
    assert 70 not in {unit for _, unit in bench.room.loaded}
    before = bench.placement.report().prefetch
    bench.search("p50")
    bench.tick()
    after = bench.placement.report().prefetch
    assert after["useful"] == before["useful"] + 1


@pytest.mark.parametrize(("act", "count"), [(True, 0), (False, 2)])
def test_questions_lead_nowhere_where_that_is_off(act: bool, count: int) -> None:
    def never(query: str, tenant: str, now_s: float) -> dict[tuple[str, str], float]:
        raise AssertionError(query)

    bench = Bench(act=act, settings=PrefetchSettings(topics_ahead_max=count), foreseen=never)
    bench.search("p1", query="about Kafka")
    bench.tick(1.1)
    assert bench.placement.report().accesses == 1


def test_the_thread_starts_and_ends() -> None:
    placement = LivePlacement(PrefetchSettings(), room_keys=8, act=False, cpu_ratio_max=1.0)
    assert placement.stop(1.0)
    placement = LivePlacement(PrefetchSettings(), room_keys=8, act=False, cpu_ratio_max=1.0)
    placement.start()
    assert placement.stop(10.0)


def learning(path: Path) -> LivePlacement:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    return LivePlacement(
        PrefetchSettings(placement_qlearning=True),
        room_keys=8,
        act=False,
        cpu_ratio_max=1.0,
        learnt_path=path,
        monotonic=itertools.count(step=0.004).__next__,
    )


def learner_of(placement: LivePlacement) -> Any:
    learned = placement._policy.learned
    assert learned is not None
    return learned.learner


def test_what_was_learnt_outlives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "placement.safetensors"
    placement = learning(path)
    for i in range(600):
        placement.offer("t", None, None, [f"p{i % 20}"], float(i))
    placement.tick()
    placement.start()
    assert placement.stop(10.0)
    assert learner_of(placement).updates > 0
    again = learning(path)
    assert learner_of(again).to_bytes() == learner_of(placement).to_bytes()
    why = placement.explain("t", "p1")["qlearning"]
    assert set(why["value_us"]) == {"gpu", "host", "nvme"}


def test_damaged_learning_is_said_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "placement.safetensors"
    path.write_bytes(b"not what was written")
    with structlog.testing.capture_logs() as logs:
        assert learner_of(learning(path)).updates == 0
    assert [entry["event"] for entry in logs] == ["service.placement_unrestored"]
