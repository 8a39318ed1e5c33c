"""Which time of an event is believed: clocks that are wrong must neither age nor freeze the heat.

Heat has a time of its own, which starts as the first event's and from then on only goes on. No
event is later than the log took it, where there is a log. One that lies at most ``jump_s_max``
after the newest is believed, late ones too: unless the log took it more than ``silence_s_max``
before the newest (or without a log, it is as old itself). All others are odd:

* One ahead counts as now, one behind in its own time, until ``jump_events`` agree with each other
  within ``jump_s_max``.
* They are ahead by at most ``silence_s_max``, and nothing else came in between: nobody asked for so
  long, and the heat has aged.
* They are further off, ahead or behind: that is another clock. Nothing has aged; its offset to the
  heat's time is noted, and what comes by it counts in the heat's time from now on.

Up to `CLOCKS_MAX` offsets are held, the ones used last. So when a wrong clock is put right, the
events go on by the offset from before, at once; and producers of which some are wrong may come in
any order. What is believed depends on the events and their order alone: a replay, under whatever
clock, ends the same. A clock that is wrong by less than ``silence_s_max`` cannot be told from a
silence, nor the right events after it from late ones: those count in their own time, so that for
``silence_s_max`` at most they weigh less than the wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError

Floats = NDArray[np.float64]

NEVER: Final = -np.inf
TIME_S_MAX: Final = 1e12  # no event's time is as far from 1970
HEAT_S_MAX: Final = 3.0 * TIME_S_MAX  # nor from 0 in the heat's time, whatever the clocks
CLOCKS_MAX: Final = 4
_CANDIDATES_MAX: Final = 4


@dataclass(frozen=True)
class _State:
    """What the clock knows; times of the heat, but for those of candidates.

    Attributes:
        newest_s: The newest believed event.
        offsets_s: What each clock is ahead of the heat's time, the one used last first.
        candidates: Times that nothing explains yet: the newest of those that agree, and how many
            they are.
    """

    newest_s: float = NEVER
    offsets_s: tuple[float, ...] = (0.0,)
    candidates: tuple[tuple[float, int], ...] = ()


class Believed(NamedTuple):
    """What a run of events would be believed to be, not taken over yet.

    Attributes:
        times_s: The believed time of each event in the heat's time, shape (n,).
        claimed_s: What they were judged by: their own times, and
        arrived_s: when the log took them.
        after: The clock after all of them.
    """

    times_s: Floats
    claimed_s: Floats
    arrived_s: Floats
    after: _State


class EventClock:
    """The heat's time. Invariant: ``newest_s`` never falls."""

    def __init__(self, *, jump_s_max: float, jump_events: int, silence_s_max: float) -> None:
        self._jump_s_max = jump_s_max
        self._jump_events = jump_events
        self._silence_s_max = silence_s_max
        self._state = _State()

    @property
    def newest_s(self) -> float:
        """The newest believed event, in the heat's time; minus infinity before the first."""
        return self._state.newest_s

    @property
    def watermark_s(self) -> float:
        """The same by the clock that came last, Unix seconds."""
        return self._state.newest_s + self._state.offsets_s[0]

    def heat_s(self, time_s: float) -> float:
        """Return what a Unix time is in the heat's: by the clock that says the nearest to now."""
        now_s, offsets = self._state.newest_s, self._state.offsets_s
        if now_s == NEVER:
            return time_s - offsets[0]
        return min((time_s - offset for offset in offsets), key=lambda it: abs(it - now_s))

    def believe(self, times_s: Floats, arrived_s: Floats | None = None) -> Believed:
        """Judge events in their order, without taking them over.

        Args:
            times_s: The events' own times, Unix seconds, float64, shape (n,).
            arrived_s: When the log took each; None where there is none.

        Raises:
            InputError: a time is not finite Unix seconds.
        """
        arrived = times_s if arrived_s is None else arrived_s
        for times in (times_s, arrived):
            wrong = ~(np.abs(times) < TIME_S_MAX)
            if wrong.any():
                found = float(times[int(wrong.argmax())])
                raise InputError(f"event time must be finite Unix seconds, got {found!r}")
        state, offset = self._state, self._state.offsets_s[0]
        believed = np.minimum(times_s, arrived) - offset
        marks = np.maximum.accumulate(np.concatenate(([state.newest_s], believed)))
        before = marks[:-1]
        low = before - self._silence_s_max
        odd = (believed > before + self._jump_s_max) | (arrived - offset < low)
        if len(state.offsets_s) > 1:  # another clock may explain it
            odd |= believed < low
        if (odd & (before != NEVER)).any():
            return self._one_by_one(times_s, arrived)
        if len(times_s):
            first, last = float(marks[1]), float(marks[-1])
            state = _State(last, state.offsets_s, self._far(state, first, last))
        return Believed(believed, times_s, arrived, state)

    def _one_by_one(self, times_s: Floats, arrived_s: Floats) -> Believed:
        state, believed = self._state, []
        for time_s, taken_s in zip(times_s.tolist(), arrived_s.tolist(), strict=True):
            state, moment = self._judged(state, time_s, taken_s)
            state = replace(state, newest_s=max(state.newest_s, moment))
            believed.append(moment)
        return Believed(np.array(believed), times_s, arrived_s, state)

    def _judged(self, state: _State, time_s: float, arrived_s: float) -> tuple[_State, float]:
        """Return the clock after an event, and what its time is in the heat's."""
        now_s, claimed_s = state.newest_s, min(time_s, arrived_s)
        low, high = now_s - self._silence_s_max, now_s + self._jump_s_max
        for offset in state.offsets_s:
            moment = claimed_s - offset
            if now_s == NEVER or (moment <= high and arrived_s - offset >= low):
                if moment < low:  # late, or by another clock than the log's
                    own = (time_s - other for other in state.offsets_s)
                    moment = next((it for it in own if low <= it <= high), moment)
                mark_s = max(now_s, moment)
                held = self._far(state, mark_s, mark_s)
                return replace(state, offsets_s=_first(offset, state), candidates=held), moment
        moment = claimed_s - state.offsets_s[0]
        odd_s = claimed_s if moment > high else arrived_s
        agree = [c for c in state.candidates if abs(odd_s - c[0]) <= self._jump_s_max]
        count = 1 + max((c[1] for c in agree), default=0)
        if count < self._jump_events:
            others = sorted((c for c in state.candidates if c not in agree), key=lambda c: -c[1])
            held = ((odd_s, count), *others[: _CANDIDATES_MAX - 1])
            return replace(state, candidates=held), min(moment, now_s)
        if now_s < moment <= now_s + self._silence_s_max:
            return replace(state, candidates=()), moment
        offset = odd_s - now_s
        return replace(state, offsets_s=_first(offset, state), candidates=()), claimed_s - offset

    def _far(self, state: _State, first_s: float, last_s: float) -> tuple[tuple[float, int], ...]:
        """Return the candidates that no silence explains while the heat went from first to last."""
        low, high = first_s - self._silence_s_max, last_s + self._silence_s_max
        return tuple(
            one
            for one in state.candidates
            if not any(low <= one[0] - offset <= high for offset in state.offsets_s)
        )

    def take(self, believed: Believed, count: int) -> Floats:
        """Take over the first ``count`` events; returns their believed times."""
        if count < len(believed.times_s):
            believed = self.believe(believed.claimed_s[:count], believed.arrived_s[:count])
        self._state = believed.after
        return believed.times_s

    @property
    def is_plain(self) -> bool:
        """Whether the heat's time is Unix time."""
        return self._state.offsets_s == (0.0,)

    def to_values(self) -> dict[str, Any]:
        """Return plain values for a snapshot; equal state gives equal ones."""
        state = self._state
        values: dict[str, Any] = {
            "watermark_s": None if state.newest_s == NEVER else state.newest_s,
            "ahead": max((count for _, count in state.candidates), default=0),
        }
        if state != _State(state.newest_s):
            values["clock"] = {
                "offsets_s": list(state.offsets_s),
                "candidates": [list(one) for one in state.candidates],
            }
        return values

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Become what `to_values` gave.

        Raises:
            InputError: the values are no clock's.
        """
        try:
            newest_s = NEVER if values["watermark_s"] is None else float(values["watermark_s"])
            state, told = _State(newest_s), values.get("clock")
            if int(values["ahead"]) < 0:
                raise InputError(f"{values['ahead']} events ahead")
            if told is not None:
                state = _State(
                    newest_s,
                    tuple(map(float, told["offsets_s"])),
                    tuple((float(time_s), int(count)) for time_s, count in told["candidates"]),
                )
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"clock does not fit together: {error!r}") from error
        times = (*state.offsets_s, *(time_s for time_s, _ in state.candidates))
        if newest_s != NEVER:
            times += (newest_s,)
        if (
            not all(abs(time_s) < HEAT_S_MAX for time_s in times)
            or not 1 <= len(state.offsets_s) <= CLOCKS_MAX
            or len(state.candidates) > _CANDIDATES_MAX
            or not all(count >= 1 for _, count in state.candidates)
        ):
            raise InputError(f"clock cannot be {state}")
        self._state = state


def _first(offset: float, state: _State) -> tuple[float, ...]:
    others = (other for other in state.offsets_s if other != offset)
    return (offset, *others)[:CLOCKS_MAX]
