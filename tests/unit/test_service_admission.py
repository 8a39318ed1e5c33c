"""The bounded lanes: limits, deadlines, and that a slot is held until its thread is free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stoker.service.admission import Lane
from stoker.service.problems import DeadlinePassed, TooManyRequests


@pytest_asyncio.fixture
async def lane() -> AsyncIterator[Lane]:
    lane = Lane("test", threads=1, queued_max=1)
    yield lane
    lane.close()


async def started(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait)


async def test_a_call_runs_in_a_thread_and_gets_the_seconds_left(lane: Lane) -> None:
    loop_thread = threading.get_ident()
    left, thread = await lane.run(5.0, lambda left_s: (left_s, threading.get_ident()))
    assert 0 < left <= 5.0
    assert thread != loop_thread
    await lane.drained()
    assert lane.pending == 0


async def test_an_error_comes_through(lane: Lane) -> None:
    with pytest.raises(ZeroDivisionError):
        await lane.run(5.0, lambda left_s: 1 / 0)
    await lane.drained()
    assert lane.pending == 0


async def test_a_full_queue_refuses_at_once(lane: Lane) -> None:
    running, go = threading.Event(), threading.Event()

    def hold(left_s: float) -> str:
        running.set()
        go.wait()
        return "done"

    first = asyncio.create_task(lane.run(60.0, hold))
    await started(running)
    second = asyncio.create_task(lane.run(60.0, hold))
    await asyncio.sleep(0)
    assert (lane.pending, lane.queued) == (2, 1)
    with pytest.raises(TooManyRequests, match="1 running and 1 waiting"):
        await lane.run(60.0, hold)
    assert lane.refused == 1
    go.set()
    assert await asyncio.gather(first, second) == ["done", "done"]
    await lane.drained()
    assert lane.pending == 0


async def test_a_given_up_call_keeps_its_slot_until_its_thread_is_free(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.admission._RETURN_S", 0.0)
    running, go = threading.Event(), threading.Event()

    def hold(left_s: float) -> None:
        running.set()
        go.wait()

    task = asyncio.create_task(lane.run(0.5, hold))
    await started(running)
    with pytest.raises(DeadlinePassed, match="had started"):
        await task
    assert lane.pending == 1
    # It waits behind the one that was given up, and never starts.
    with pytest.raises(DeadlinePassed, match="waiting for a thread"):
        await lane.run(0.01, lambda left_s: pytest.fail("started after its deadline"))
    go.set()
    await lane.drained()
    assert lane.pending == 0


async def test_a_call_whose_time_is_up_when_a_thread_is_free_is_not_started(lane: Lane) -> None:
    with pytest.raises(DeadlinePassed, match="waited for a thread"):
        await lane.run(-0.01, lambda left_s: pytest.fail("started"))
