"""What callers hand over, as this room works with it, or refused by name.

Numpy's and Python's own errors say nothing of which argument was meant, and some mistakes they let
pass: one text is taken for a list of its letters, a mask is dropped, a set has any order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError

# Sums of weights over a page or a segment have to stay floats.
WEIGHT_MAX: Final = 1e30
THREADS_MAX: Final = 1_024
BYTES_MAX: Final = 1 << 62
WHOLE_MAX: Final = (1 << 63) - 1


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Return ``values`` as an array; no copy of what is one.

    Raises:
        InputError: rows of unlike lengths, masked values, or nothing that numpy takes.
    """
    # Masked values need the module of their own, which costs a cold start's first search 10 ms.
    if "numpy.ma" in sys.modules and np.ma.is_masked(values):
        raise InputError(f"{what}: expected numbers, found masked ones")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{what}: cannot be made an array: {error}") from error


def said(value: Any) -> str:
    """Return at most 80 letters of what was handed over, for a message."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes out no number of thousands of digits.
        return f"one {type(value).__name__} of too many digits"


def whole_number(value: Any, what: str) -> int:
    """Return ``value`` as an int. Raises InputError for anything else, True and 3.0 included.

    Nor is one of more than 64 bits taken: nothing here counts so far.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{what}: expected a whole number, found {said(value)}")
    number = int(value)
    if abs(number) > WHOLE_MAX:
        raise InputError(f"{what}: expected a whole number of 64 bits, found {said(number)}")
    return number


def real_number(value: Any, what: str) -> float:
    """Return ``value`` as a float. Raises InputError for what is no number, or not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InputError(f"{what}: expected a number, found {said(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if math.isnan(number):
        raise InputError(f"{what}: expected a number, found {said(value)}")
    return number


def byte_count(value: Any, what: str) -> int:
    """Return ``value`` as an int; 8e9 is as good as 8_000_000_000.

    Raises:
        InputError: below 0, above `BYTES_MAX`, no number, or with a part of a byte.
    """
    number = real_number(value, what) if isinstance(value, float | np.floating) else None
    whole = int(number) if number is not None and number.is_integer() else value
    count = whole_number(whole, what)
    if not 0 <= count <= BYTES_MAX:
        raise InputError(f"{what}: expected 0 to {BYTES_MAX}, found {count}")
    return count


def checked_threads(value: Any) -> int | None:
    """Return how many threads are asked for; None for as many as there are processors.

    Raises:
        InputError: no whole number from 1 to `THREADS_MAX`.
    """
    if value is None:
        return None
    threads = whole_number(value, "threads")
    if not 1 <= threads <= THREADS_MAX:
        raise InputError(f"threads: expected 1 to {THREADS_MAX}, found {threads}")
    return threads


def listed(values: Any, what: str, *, ordered: bool = True) -> list[Any]:
    """Return the items of a list, tuple, array or the like.

    Args:
        ordered: Whether each belongs to one of another list: a set is then refused.

    Raises:
        InputError: one text or bytes, a mapping, or nothing that has items.
    """
    alone = isinstance(values, str | bytes | bytearray | Mapping)
    if alone or not isinstance(values, Iterable) or (ordered and isinstance(values, Set)):
        raise InputError(f"{what}: expected a list, found one {type(values).__name__}")
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise InputError(f"{what}: expected a list, found an array of shape {values.shape}")
        return list(values.tolist())
    return list(values)


def checked_heat(heat: Any) -> Mapping[Any, float]:
    """Return a mapping of weights, as it is.

    Raises:
        InputError: no mapping, or a weight that is no number from 0 to `WEIGHT_MAX`.
    """
    if not isinstance(heat, Mapping):
        raise InputError(f"heat: expected a mapping of weights, found {type(heat).__name__}")
    for key, weight in heat.items():
        if not 0 <= real_number(weight, f"heat[{said(key)}]") <= WEIGHT_MAX:
            raise InputError(
                f"heat[{said(key)}]: expected a finite weight of 0 or more, at most "
                f"{WEIGHT_MAX:g}, found {said(weight)}"
            )
    return heat
