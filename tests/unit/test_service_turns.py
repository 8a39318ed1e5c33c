"""Work beside requests: it steps aside for callers, one piece a gap, and always goes on."""

from __future__ import annotations

import threading

import pytest

from stoker.service import turns
from stoker.service.turns import Callers, Turns


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Latch:
    """A thread that calls once, and tells when it has come back."""

    def __init__(self, work: Turns) -> None:
        self.back = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Turns) -> None:
        work.let_by()
        self.back.set()

    def ended(self) -> bool:
        self._thread.join(60.0)
        return self.back.is_set()


class Pauses:
    """Stands in for the moment in which others can take the lock."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = threading.Event()

    def __call__(self, seconds: float) -> None:
        self.count += 1
        self.begun.set()


def work_of(callers: Callers, clock: Clock) -> tuple[Turns, Pauses]:
    """Return work whose first piece is over, in a gap that is not quiet yet."""
    with callers:
        pass
    pauses = Pauses()
    work = Turns(callers, pause=pauses)
    clock.now_s += turns._PIECE_S
    return work, pauses


def test_within_a_piece_nothing_is_done() -> None:
    clock = Clock()
    callers = Callers(clock=clock)
    work, pauses = work_of(callers, clock)
    clock.now_s -= 0.5 * turns._PIECE_S
    with callers:
        work.let_by()
    assert pauses.count == 0


def test_work_steps_aside_while_a_caller_waits() -> None:
    clock = Clock()  # stands still: only the answer lets the work go on
    callers = Callers(clock=clock)
    work, pauses = work_of(callers, clock)
    with callers:
        latch = Latch(work)
        assert pauses.begun.wait(60.0)
        with callers:  # another comes and goes: the first still waits
            pass
        assert not latch.back.is_set()
    assert latch.ended()


def test_a_gap_between_callers_is_for_one_piece() -> None:
    clock = Clock()
    callers = Callers(clock=clock)
    work, pauses = work_of(callers, clock)
    latch = Latch(work)
    assert pauses.begun.wait(60.0)
    assert not latch.back.is_set()
    with callers:
        pass
    assert latch.ended()


def test_where_no_caller_has_come_for_a_while_work_goes_on_at_once() -> None:
    clock = Clock()
    callers = Callers(clock=clock)
    work, pauses = work_of(callers, clock)
    for count in range(1, 6):
        clock.now_s += turns._QUIET_S
        work.let_by()
        assert pauses.count == count


def test_work_beside_callers_that_leave_no_gap_goes_on_after_the_longest_wait() -> None:
    class Passing(Clock):
        """Passes with each look at it."""

        def __call__(self) -> float:
            self.now_s += 0.25 * turns._WAIT_S_MAX
            return self.now_s

    clock = Passing()
    callers = Callers(clock=clock)
    work, pauses = work_of(callers, clock)
    with callers:
        began_s = clock.now_s
        for count in range(1, 101):
            work.let_by()
            assert pauses.count == count
        assert clock.now_s - began_s <= 100 * 3 * turns._WAIT_S_MAX
    assert not callers._waiting


def test_a_gap_lets_all_work_go_on() -> None:
    clock = Clock()
    callers = Callers(clock=clock)
    with callers:
        works = [work_of(callers, clock) for _ in range(3)]
        latches = [Latch(work) for work, _ in works]
        for _, pauses in works:
            assert pauses.begun.wait(60.0)
        assert not any(latch.back.is_set() for latch in latches)
    assert all(latch.ended() for latch in latches)
    assert not callers._waiting


def test_callers_of_many_threads_are_counted_and_let_work_go_on() -> None:
    callers = Callers()
    work = Turns(callers, pause=Pauses())
    done = threading.Event()

    def call() -> None:
        for _ in range(2_000):
            with callers:
                pass

    def compute() -> None:
        while not done.is_set():
            work.let_by()

    threads = [threading.Thread(target=call) for _ in range(4)]
    worker = threading.Thread(target=compute)
    for thread in (worker, *threads):
        thread.start()
    for thread in threads:
        thread.join(60.0)
    done.set()
    worker.join(60.0)
    assert not worker.is_alive()
    assert callers.count == 0
    assert 1 <= callers.gaps <= 8_000
    assert not callers._waiting


def test_a_request_that_fails_no_longer_waits() -> None:
    callers = Callers()
    with pytest.raises(ValueError, match="no"), callers:
        raise ValueError("no")
    assert (callers.count, callers.gaps) == (0, 1)


@pytest.mark.parametrize("before_s", [0.0, 1_000.0])
def test_work_steps_aside_for_no_longer_than_its_patience_and_its_work(before_s: float) -> None:
    clock = Clock()
    waits: list[float] = []

    class Sleeping(Callers):
        """Never leaves a gap: each wait is as long as it may be."""

        def wait_gap(self, used: int, *, wait_s_max: float) -> int:
            waits.append(wait_s_max)
            clock.now_s += wait_s_max
            return used

    def pause(seconds: float) -> None:
        clock.now_s += seconds

    work = Turns(Sleeping(clock=clock), patience_s=1.0, pause=pause)
    clock.now_s += before_s  # in one piece: it saves nothing up for later
    work.let_by()
    began_s, worked_s = clock.now_s, 0.0
    for _ in range(20_000):
        clock.now_s += 1.001 * turns._PIECE_S
        worked_s += 1.001 * turns._PIECE_S
        work.let_by()
        aside_s = clock.now_s - began_s - worked_s
        assert aside_s <= worked_s + 1.0 + turns._WAIT_S_MAX
    assert waits[:100] == pytest.approx([turns._WAIT_S_MAX] * 100), "at first as long as ever"
    assert len(waits) > 15_000, "it never stops to step aside"
    assert waits[-1] < 0.1 * turns._WAIT_S_MAX
