"""Bound how many requests run and wait at once, and run them off the event loop.

Every queue of the service has a bound. A request that finds the queue full is told so at once
(429), because a long queue turns every answer into a late one. A slot is held until the thread
that does the work is free again, even when the request has given up before: otherwise a burst of
timeouts would start more work than there are threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from stoker.service.problems import DeadlinePassed, TooManyRequests

T = TypeVar("T")

_RETURN_S = 0.25


class Lane:
    """A pool of threads with a bounded queue in front.

    Invariants: at most ``threads`` calls run, at most ``queued_max`` wait, and ``pending`` is
    their sum. Used from one event loop.
    """

    def __init__(self, name: str, *, threads: int, queued_max: int) -> None:
        self.name = name
        self.threads = threads
        self.queued_max = queued_max
        self.pending = 0
        self.refused = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"stoker-{name}")
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queued(self) -> int:
        """How many calls wait for a thread now."""
        return max(0, self.pending - self.threads)

    async def run(self, deadline_s: float, call: Callable[[float], T]) -> T:
        """Run ``call`` in a thread and return what it returns.

        Args:
            deadline_s: Seconds from now. The call is not started after it.
            call: Gets the seconds that are left when it starts; expected to keep to them.

        Raises:
            TooManyRequests: the queue is full; nothing was started.
            DeadlinePassed: the time is up; the call may still be running.
        """
        if self.pending >= self.threads + self.queued_max:
            self.refused += 1
            raise TooManyRequests(
                f"{self.pending} requests run or wait and the limit is "
                f"{self.threads} running and {self.queued_max} waiting",
                where=self.name,
            )
        end = time.monotonic() + deadline_s
        self.pending += 1
        self._idle.clear()
        loop = asyncio.get_running_loop()
        work = self._pool.submit(_started, end, call)
        work.add_done_callback(functools.partial(self._finished_in_thread, loop))
        answer = asyncio.wrap_future(work)
        try:
            # The call itself keeps to the deadline and answers with what it has; the little more
            # is for it to come back in, so that a partial answer is not thrown away.
            return await asyncio.wait_for(asyncio.shield(answer), deadline_s + _RETURN_S)
        except TimeoutError as error:
            answer.add_done_callback(_retrieve)
            if work.cancel():
                detail = "the request was still waiting for a thread"
            else:
                detail = "the work had started and was given up"
            raise DeadlinePassed(
                f"no answer within {deadline_s * 1e3:.0f} ms; {detail}", where="deadline_ms"
            ) from error

    async def drained(self) -> None:
        """Wait until nothing runs or waits."""
        await self._idle.wait()

    def close(self) -> None:
        """Let the threads go; calls that still wait are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finished_in_thread(self, loop: asyncio.AbstractEventLoop, _work: Future[Any]) -> None:
        # The loop is closed when the server has gone down without waiting for this call.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finished)

    def _finished(self) -> None:
        self.pending -= 1
        if not self.pending:
            self._idle.set()


def _retrieve(answer: asyncio.Future[Any]) -> None:
    # A request that has given up never looks; asyncio would warn of an unseen error.
    if not answer.cancelled():
        answer.exception()


def _started(end: float, call: Callable[[float], T]) -> T:
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise DeadlinePassed(
            "the deadline passed while the request waited for a thread", where="deadline_ms"
        )
    return call(left_s)
