"""Rounds of a thread: they outlive what fails, say so, and end when they are told to."""

from __future__ import annotations

import threading

import structlog

from stoker.errors import UnavailableError
from stoker.service.heat_topic import HeatPublisher
from stoker.service.rounds import Rounds, is_fault

WAIT_S = 30.0


class Steps:
    """Rounds that fail where the test says, and what they told."""

    def __init__(self, *outcomes: Exception | None, every_s: float = 0.0) -> None:
        self.outcomes = list(outcomes)
        self.told: list[tuple[Exception, bool]] = []
        self.ended: list[str] = []
        self.rounds = Rounds(
            self.step,
            name="steps",
            every_s=every_s,
            retry_s=0.0,
            failed=lambda error, again: self.told.append((error, again)),
            ended=lambda: self.ended.append(threading.current_thread().name),
        )

    def step(self) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome


def test_rounds_go_on_after_failures_and_tell_each() -> None:
    first, second, third = UnavailableError("away"), KeyError("a fault"), OSError("disk")
    steps = Steps(first, second, None, third)
    steps.rounds.start()
    assert steps.rounds.wait_for(2, timeout_s=WAIT_S)
    assert steps.told == [(first, False), (second, True), (third, False)]
    assert steps.ended == []
    assert steps.rounds.stop(WAIT_S)
    assert steps.ended == ["steps"]
    assert [is_fault(error) for error, _ in steps.told] == [False, True, False]


def test_a_stop_ends_the_wait_between_rounds() -> None:
    steps = Steps(every_s=3600.0)
    steps.rounds.start()
    assert steps.rounds.wait_for(1, timeout_s=WAIT_S)
    assert not steps.rounds.stopping
    assert steps.rounds.stop(WAIT_S)
    assert steps.rounds.stopping
    assert not steps.rounds.wait_for(2, timeout_s=0.0)


def test_a_stop_waits_no_longer_than_it_may() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert leave.wait(WAIT_S)

    rounds = Rounds(hang, name="hang", every_s=0.0, failed=lambda error, again: None)
    assert rounds.stop(0.0), "one that never began has ended"
    rounds = Rounds(hang, name="hang", every_s=0.0, failed=lambda error, again: None)
    rounds.start()
    assert inside.wait(WAIT_S)
    assert not rounds.stop(0.0)
    leave.set()
    assert rounds.stop(WAIT_S)


def test_what_is_said_once_comes_with_a_traceback_only_where_it_is_a_fault() -> None:
    publisher = object.__new__(HeatPublisher)
    publisher._topic = "heat"
    with structlog.testing.capture_logs() as logged:
        publisher._failed(UnavailableError("away"), again=False)
        publisher._failed(UnavailableError("away"), again=True)
        publisher._failed(ValueError("ours"), again=False)
    assert [line["exc_info"] for line in logged] == [False, True]
