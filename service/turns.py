"""Work that nobody waits for takes turns with requests: it goes on in the gaps between them.

Python has one lock for all its threads, without priorities: what computes in short pieces still
holds up every request that meets one, for as long as the piece takes, and a busy server meets many.
So such work goes on for one piece when the last caller has been answered, because the next request
will hardly come just then; and after that only once no caller has come for a while, or in the next
gap. Where callers never leave a gap it goes on all the same after a few milliseconds, for one
piece. Such waits have a bound in all: the more of its patience is used up, the shorter they get,
and at last the work steps aside for no longer than it works. So it ends, however many pieces it
has: within twice the time that it takes alone, and its patience.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

# Longest that a piece is meant to be, and so what a request that comes meanwhile waits.
_PIECE_S: Final = 0.0001
# As long as a thread that wants the lock takes to wake up: a request that has just come is counted
# only once the event loop has it.
_BREATH_S: Final = 0.0001
# As long as a request that follows on an answer may take to come: after it, callers are few.
_QUIET_S: Final = 0.003
# Longest between two pieces: of a server that is never without a request these take a few percent.
_WAIT_S_MAX: Final = 0.003
# Patience of one piece of work: some thousand pieces beside callers that never leave a gap.
PATIENCE_S: Final = 10.0


class Callers:
    """How many requests have begun that somebody waits for, and are not answered.

    A context manager around each of them. Safe from several threads.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin with none; ``clock`` gives seconds, passed in by tests."""
        self.count = 0
        self.clock = clock
        self.gaps = 0  # how often the last one has been answered
        self._answered_s = clock() - _QUIET_S
        self._lock = threading.Lock()  # around the numbers, never around a wait
        self._waiting: deque[Any] = deque()  # a held lock of each thread that waits

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self.count -= 1
            if self.count:
                return
            self._answered_s = self.clock()
            self.gaps += 1
        for _ in range(len(self._waiting)):
            with contextlib.suppress(IndexError):  # one that has given up meanwhile
                self._waiting.popleft().release()

    def wait_gap(self, used: int, *, wait_s_max: float) -> int:
        """Wait until it is a good moment for a piece.

        Args:
            used: Number of the gap that the last piece was in.
            wait_s_max: Longest wait; from 0 down there is none.

        Returns:
            The number of the gap that it is now.
        """
        end_s = self.clock() + wait_s_max
        while (left_s := self._left_s(used, end_s)) > 0.0:
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
            # Once more: whoever is answered last from now on sees the turn.
            if self._left_s(used, end_s) > 0.0:
                turn.acquire(timeout=left_s)
            with contextlib.suppress(ValueError):  # released meanwhile
                self._waiting.remove(turn)
        return self.gaps

    def _left_s(self, used: int, end_s: float) -> float:
        """Return for how long to wait at most; from 0 down, the moment is good."""
        now_s = self.clock()
        left_s = end_s - now_s
        if self.count:
            return left_s
        if self.gaps != used:
            return 0.0
        return min(left_s, self._answered_s + _QUIET_S - now_s)


class Turns:
    """The turns of one piece of work, in one thread.

    Invariant: from any moment on it steps aside for no longer than its patience and the time that
    it has worked since, but for the last wait.
    """

    def __init__(
        self,
        callers: Callers,
        *,
        patience_s: float = PATIENCE_S,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Prepare.

        Args:
            patience_s: How long the work may step aside in all, beside as long as it works.
            pause: Waits for some seconds; passed in by tests.
        """
        self._callers = callers
        self._patience_s = patience_s
        self._pause = pause
        self._left_s = patience_s
        self._gap = callers.gaps
        self._since_s = callers.clock()

    def let_by(self) -> None:
        """Let requests by, if a piece's time has passed: call it often, between small steps."""
        now_s = self._callers.clock()
        left_s = min(self._patience_s, self._left_s + now_s - self._since_s)
        if now_s - self._since_s < _PIECE_S or left_s <= 0.0:
            return
        self._pause(_BREATH_S)
        # As long as ever while half of the patience is left, and then less and less.
        wait_s_max = _WAIT_S_MAX * left_s / max(left_s, 0.5 * self._patience_s)
        self._gap = self._callers.wait_gap(self._gap, wait_s_max=wait_s_max)
        self._since_s = self._callers.clock()
        self._left_s = left_s - (self._since_s - now_s)
