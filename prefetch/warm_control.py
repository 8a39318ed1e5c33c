"""Steer a running warm-up from another thread: pause, resume, re-prioritise, cancel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Final

from stoker.errors import InputError
from stoker.prefetch.pieces import STEP_KEYS, Rest, no_rest
from stoker.prefetch.protocols import ContentKey

Heat = Mapping[ContentKey, float]

RUNNING: Final = "running"
PAUSED: Final = "paused"
CANCELLED: Final = "cancelled"


class WarmControl:
    """Orders to one warm-up. They take effect between two load calls, so after a round at most.

    Invariants:
        * cancelling is for good, and wins over everything else;
        * a pause ends by itself after ``pause_max_s``: no warm-up waits for somebody who is gone;
        * of several new heats that nobody has taken yet, the last one counts.
    """

    def __init__(self, *, pause_max_s: float = 3_600.0) -> None:
        """``pause_max_s``: seconds after which a pause ends by itself, > 0."""
        if not pause_max_s > 0:
            raise InputError(f"pause_max_s must be > 0, got {pause_max_s}")
        self._pause_max_s = pause_max_s
        self._changed = threading.Condition()
        self._state = RUNNING
        self._heat: Callable[[], Heat] | None = None

    @property
    def state(self) -> str:
        """`RUNNING`, `PAUSED` or `CANCELLED`: what was ordered last."""
        with self._changed:
            return self._state

    def pause(self) -> None:
        """Load nothing more until `resume`. What is loaded stays."""
        self._order(PAUSED)

    def resume(self) -> None:
        """Go on where the pause began. Does nothing where there was none."""
        self._order(RUNNING)

    def cancel(self) -> None:
        """Load nothing more. What is loaded stays, and the receipt says what was left out."""
        self._order(CANCELLED)

    def reprioritise(self, heat: Heat | Callable[[], Heat]) -> None:
        """Plan what is left anew, by another heat; what is loaded counts against the budget.

        Args:
            heat: Weight (>= 0) per content key, or what gives them, called by the warm-up.

        Raises:
            InputError: a weight is malformed.
        """
        if callable(heat):
            give = heat
        else:
            known = dict(heat)
            check_heat(known)

            def give() -> Heat:
                return known

        with self._changed:
            self._heat = give

    def _order(self, state: str) -> None:
        with self._changed:
            if self._state != CANCELLED:
                self._state = state
            self._changed.notify_all()

    # ---- for the warm-up ---------------------------------------------------------------------

    def wait_turn(self, timeout_s: float | None) -> bool:
        """Wait while paused; False where it is cancelled.

        Args:
            timeout_s: Seconds that the warm-up has left; None means no limit. Past them it is
                told to go on, and finds its deadline passed.
        """
        limit = self._pause_max_s if timeout_s is None else min(self._pause_max_s, timeout_s)
        with self._changed:
            resumed = self._changed.wait_for(lambda: self._state != PAUSED, max(limit, 0.0))
            if not resumed:
                self._state = RUNNING
            return self._state != CANCELLED

    def take_heat(self) -> Callable[[], Heat] | None:
        """The newest heat that nobody has taken yet."""
        with self._changed:
            heat, self._heat = self._heat, None
            return heat


def check_heat(heat: Heat, rest: Rest = no_rest) -> None:
    """Refuse a weight that is negative or no number.

    Raises:
        InputError: names the key.
    """
    entries = iter(heat.items())
    while step := list(itertools.islice(entries, STEP_KEYS)):
        for key, weight in step:
            if not weight >= 0.0:
                raise InputError(f"heat of {key!r} must be >= 0, got {weight}")
        rest()
