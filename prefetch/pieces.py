"""Long work in small steps, with a rest between them that lets others have the interpreter.

Python has one lock for all its threads. What plans a warm-up beside searches holds it, and whoever
wants it waits for the end of the step. So loops over keys or units go in steps of some tens of
microseconds, and each calls a rest after it. The rest is the caller's: it may do nothing, look at
the clock, or wait until nobody else has work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)

Rest = Callable[[], None]
"""Called between two steps; may wait."""

# Entries of a dict or list that a step makes or reads: 20 to 100 µs.
STEP_KEYS: Final = 128


def no_rest() -> None:
    """Go on at once."""


class Later(Protocol[T_co]):
    """The rest of some work, which can be done at any time, once."""

    def __call__(self, rest: Rest = no_rest, /) -> T_co:
        """Do it; ``rest`` is called between its steps."""
        ...


def steps(count: int, rest: Rest, *, size: int = STEP_KEYS) -> Iterator[slice]:
    """Cut ``range(count)`` into slices of ``size``, and rest after each."""
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))
        rest()
