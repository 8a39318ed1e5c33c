"""Which time of an event is believed: a lone clock that runs ahead must not age everything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEVER = -np.inf
TIME_S_MAX = 1e12  # no event's time is as far from 1970


class Believed(NamedTuple):
    """What a run of events would be believed to be, not taken over yet.

    Attributes:
        times_s: The believed time of each event, shape (n,).
        watermarks_s: The watermark after each event.
        ahead: Events in a row that were ahead, after each event.
    """

    times_s: Floats
    watermarks_s: Floats
    ahead: Ints


class EventClock:
    """The newest believed event time, and how many events in a row claim a much later one.

    Invariant: ``watermark_s`` never falls.
    """

    def __init__(self, *, jump_s_max: float, jump_events: int) -> None:
        self._jump_s_max = jump_s_max
        self._jump_events = jump_events
        self.watermark_s = NEVER
        self.ahead = 0

    def believe(self, times_s: Floats) -> Believed:
        """Judge events in their order, without taking them over.

        An event further than the bound ahead of all before it counts at the watermark, until so
        many come in a row that the jump is believed.

        Raises:
            InputError: a time is not finite Unix seconds.
        """
        wrong = ~(np.abs(times_s) < TIME_S_MAX)
        if wrong.any():
            found = float(times_s[int(wrong.argmax())])
            raise InputError(f"event time must be finite Unix seconds, got {found!r}")
        marks = np.maximum.accumulate(np.concatenate(([self.watermark_s], times_s)))
        before, after = marks[:-1], marks[1:]
        jumps = (times_s > before + self._jump_s_max) & (before != NEVER)
        if not jumps.any():
            return Believed(times_s, after, np.zeros(len(times_s), dtype=np.int64))
        return self._one_by_one(times_s)

    def _one_by_one(self, times_s: Floats) -> Believed:
        mark, ahead = self.watermark_s, self.ahead
        believed, marks, aheads = [], [], []
        for time_s in times_s.tolist():
            if mark != NEVER and time_s > mark + self._jump_s_max:
                ahead += 1
                if ahead < self._jump_events:
                    time_s = mark
                else:
                    ahead = 0
            else:
                ahead = 0
            mark = max(mark, time_s)
            believed.append(time_s)
            marks.append(mark)
            aheads.append(ahead)
        return Believed(np.array(believed), np.array(marks), np.array(aheads, dtype=np.int64))

    def take(self, believed: Believed, count: int) -> Floats:
        """Take over the first ``count`` events; returns their believed times."""
        if count:
            self.watermark_s = float(believed.watermarks_s[count - 1])
            self.ahead = int(believed.ahead[count - 1])
        return believed.times_s[:count]
