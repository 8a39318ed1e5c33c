"""What a value read from JSON is, before it is trusted with a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

# What JSON gives for a number; true and false are of a type of their own.
_NUMBERS: Final = frozenset({int, float})


def is_int(value: object) -> bool:
    """Tell whether JSON gave a whole number: true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Tell whether it is a whole number of 32 bits, 0 or more."""
    return is_int(value) and 0 <= value < 1 << 32


def is_number(value: object) -> bool:
    """Tell whether JSON gave a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_share(value: Any) -> bool:
    """Tell whether it is a number in [0, 1]."""
    return is_number(value) and 0 <= value <= 1


def are_numbers(values: Sequence[Any], most: float) -> bool:
    """Tell whether all are numbers in [0, ``most``]; not-a-number is none.

    A manifest has thousands, and opening waits for this: asked one by one it takes ten times as
    long.
    """
    return _NUMBERS.issuperset(map(type, values)) and all(0 <= value <= most for value in values)


def are_shares(values: Sequence[Any]) -> bool:
    """Tell whether all are numbers in [0, 1]."""
    return are_numbers(values, 1.0)


def with_tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object whose lists are tuples, as fields of frozen classes are."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
