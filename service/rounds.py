"""A thread that does the same thing again and again: how it starts, waits, fails and ends.

What keeps something up to date beside the requests works in rounds. A round that fails must not end
them, nor pass in silence; and a server that stops waits for the one that runs, up to a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stoker.errors import StokerError

Failed = Callable[[Exception, bool], None]
"""(error, whether the round before failed too): logs it."""


class Rounds:
    """Calls a step until stopped, the first time at once. Safe from any thread; starts once.

    Invariants: never two rounds at a time; ``ended`` is called once, by the thread, after the last.
    """

    def __init__(
        self,
        step: Callable[[], object],
        *,
        name: str,
        every_s: float,
        failed: Failed,
        retry_s: float | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up; nothing runs before `start`.

        Args:
            step: One round.
            name: Of the thread.
            every_s: Seconds between two rounds.
            failed: Told of every round that raised; the next one comes all the same.
            retry_s: Seconds after a round that failed; None means ``every_s``.
            ended: Lets go of what the rounds held.
        """
        self._step = step
        self._every_s = every_s
        self._retry_s = every_s if retry_s is None else retry_s
        self._failed = failed
        self._ended = ended
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._done = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: a long round may end early."""
        return self._stop.is_set()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait_for(self, rounds: int, *, timeout_s: float) -> bool:
        """Wait until that many rounds have ended well; tells whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= rounds, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Begin no other round and wait for the last; tells whether it ended in time."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failing = False
        try:
            while not self._stop.is_set():
                try:
                    self._step()
                except Exception as error:
                    self._failed(error, failing)
                    failing = True
                    self._stop.wait(self._retry_s)
                    continue
                failing = False
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()
                self._stop.wait(self._every_s)
        finally:
            self._ended()


def is_fault(error: Exception) -> bool:
    """Tell whether an error is a fault of ours, whose traceback belongs in the log."""
    return not isinstance(error, StokerError | OSError)
