"""What a value read from JSON is, before it is trusted with a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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


def with_tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object whose lists are tuples, as fields of frozen classes are."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
