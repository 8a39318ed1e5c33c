"""Filters: which rows a search may return, said in JSON, by what their metadata hold.

An expression is JSON: an object whose entries must all hold.

    {"tenant": "a", "lang": {"in": ["en", "de"]}, "year": {"gte": 2020}}
    {"or": [{"tag": "draft"}, {"not": {"published": {"exists": true}}}]}
    {"created": {"gte": "2026-01-01", "lt": "2026-02-01T00:00:00Z"}}

===============================  ================================================================
``field: value``                 equal; where the row has a list, one of its items is equal
``field: {"eq" | "ne": value}``  ``ne`` also holds where the field is missing
``field: {"in": [...]}``         equal to one of them
``field: {"gt" "gte" "lt" "lte"  numbers, or ISO 8601 times (a time without an offset is UTC);
: bound}``                       two bounds may stand together
``field: {"exists": bool}``      the row has the field, and it is not null
``"and" | "or": [...]``          of expressions
``"not": {...}``                 an expression that must not hold
===============================  ================================================================

``tenant`` is always the tenant that a document was written under, never its metadata: a document
cannot talk itself into another tenant. Numbers, strings and booleans are different things: 1 is
1.0, and neither is true or "1". Nested objects are reached with dots (``"author.name"``).
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from stoker.errors import InputError

RESERVED_FIELDS: Final = frozenset({"and", "or", "not", "tenant"})
DEPTH_MAX: Final = 16
VALUES_MAX: Final = 10_000  # In one expression, over all its terms.

Kind = Literal["b", "i", "n", "s", "t", "w"]
"""What a value is: boolean, integer too wide for a float, number, string, time (Unix seconds), and
``w``: a wide integer rounded to a float, for ranges only."""

Fields = Mapping[tuple[str, str], Sequence[Any]]
"""One row's values by (field, kind)."""

_TENANT: Final = "\x00tenant"  # No JSON key of a document can reach it, see `flatten`.
_ISO_TIME: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_EXACT_MAX: Final = 1 << 53


class FilterError(InputError):
    """A filter expression cannot be taken; the message says where in it and why."""


@dataclasses.dataclass(frozen=True)
class All:
    """Holds where every part holds; with no parts, everywhere."""

    parts: tuple[Filter, ...]


@dataclasses.dataclass(frozen=True)
class Any_:
    """Holds where some part holds."""

    parts: tuple[Filter, ...]


@dataclasses.dataclass(frozen=True)
class Not:
    """Holds where ``part`` does not."""

    part: Filter


@dataclasses.dataclass(frozen=True)
class Equal:
    """Holds where ``field`` has one of the (kind, value) pairs."""

    field: str
    values: tuple[tuple[Kind, Any], ...]


@dataclasses.dataclass(frozen=True)
class Between:
    """Holds where ``field`` has a number or time between the bounds; infinite where open."""

    field: str
    kind: Kind
    low: float
    low_included: bool
    high: float
    high_included: bool

    @property
    def kinds(self) -> str:
        """The kinds of values that the bounds are compared with."""
        return "t" if self.kind == "t" else "nw"

    def holds(self, value: float) -> bool:
        """Tell whether ``value`` lies between the bounds."""
        above = value >= self.low if self.low_included else value > self.low
        return above and (value <= self.high if self.high_included else value < self.high)


@dataclasses.dataclass(frozen=True)
class Exists:
    """Holds where ``field`` is there."""

    field: str


Filter = All | Any_ | Not | Equal | Between | Exists


def parse_filter(expression: object) -> Filter:
    """Turn a JSON filter expression into a checked `Filter`.

    Raises:
        FilterError: anything unknown, of the wrong type, too deep or too long; names the place.
    """
    budget = [VALUES_MAX]
    return _parse_object(expression, "filter", 1, budget)


def _parse_object(expression: object, place: str, depth: int, budget: list[int]) -> Filter:
    if depth > DEPTH_MAX:
        raise FilterError(f"{place}: nested more than {DEPTH_MAX} deep")
    if not isinstance(expression, Mapping):
        raise FilterError(f"{place}: expected an object, found {_named(expression)}")
    parts: list[Filter] = []
    for key, value in expression.items():
        if not isinstance(key, str) or not key:
            raise FilterError(f"{place}: expected a field's name, found {key!r}")
        _spend(budget, place)
        here = f"{place}.{key}"
        if key in ("and", "or"):
            if not isinstance(value, list | tuple) or not value:
                raise FilterError(f"{here}: expected a list of expressions that is not empty")
            children = tuple(
                _parse_object(item, f"{here}[{i}]", depth + 1, budget)
                for i, item in enumerate(value)
            )
            parts.append(All(children) if key == "and" else Any_(children))
        elif key == "not":
            parts.append(Not(_parse_object(value, here, depth + 1, budget)))
        else:
            parts.append(_parse_field(_TENANT if key == "tenant" else key, value, here, budget))
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _parse_field(field: str, value: object, place: str, budget: list[int]) -> Filter:
    if not isinstance(value, Mapping):
        return Equal(field, (_typed(value, place),))
    if not value:
        raise FilterError(f"{place}: expected an operator, found an empty object")
    parts: list[Filter] = []
    bounds: dict[str, object] = {}
    for operator, operand in value.items():
        here = f"{place}.{operator}"
        if operator in ("gt", "gte", "lt", "lte"):
            bounds[operator] = operand
        elif operator == "eq":
            parts.append(Equal(field, (_typed(operand, here),)))
        elif operator == "ne":
            parts.append(Not(Equal(field, (_typed(operand, here),))))
        elif operator == "in":
            if not isinstance(operand, list | tuple):
                raise FilterError(f"{here}: expected a list, found {_named(operand)}")
            for _ in operand:
                _spend(budget, here)
            parts.append(Equal(field, tuple(_typed(item, here) for item in operand)))
        elif operator == "exists":
            if not isinstance(operand, bool):
                raise FilterError(f"{here}: expected true or false, found {_named(operand)}")
            parts.append(Exists(field) if operand else Not(Exists(field)))
        else:
            raise FilterError(
                f"{here}: unknown operator; known: eq, ne, in, gt, gte, lt, lte, exists"
            )
    if bounds:
        parts.append(_parse_bounds(field, bounds, place))
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _parse_bounds(field: str, bounds: Mapping[str, object], place: str) -> Between:
    if {"gt", "gte"} <= bounds.keys() or {"lt", "lte"} <= bounds.keys():
        raise FilterError(f"{place}: expected one lower and one upper bound, found {list(bounds)}")
    kinds = set()
    values: dict[str, float] = {}
    for operator, operand in bounds.items():
        if isinstance(operand, str):
            seconds = parse_time(operand)
            if seconds is None:
                raise FilterError(
                    f"{place}.{operator}: expected a number or an ISO 8601 time, found {operand!r}"
                )
            kinds.add("t")
            values[operator] = seconds
        else:
            kind, number = _typed(operand, f"{place}.{operator}")
            if kind not in ("n", "i"):
                raise FilterError(
                    f"{place}.{operator}: expected a number or an ISO 8601 time, "
                    f"found {_named(operand)}"
                )
            kinds.add("n")
            values[operator] = float(number)
    if len(kinds) == 2:
        raise FilterError(f"{place}: expected two numbers or two times, found one of each")
    return Between(
        field,
        "t" if "t" in kinds else "n",
        values.get("gt", values.get("gte", -math.inf)),
        "gt" not in values,
        values.get("lt", values.get("lte", math.inf)),
        "lt" not in values,
    )


def _spend(budget: list[int], place: str) -> None:
    budget[0] -= 1
    if budget[0] < 0:
        raise FilterError(f"{place}: more than {VALUES_MAX} values in one expression")


def _named(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _typed(value: object, place: str) -> tuple[Kind, Any]:
    if isinstance(value, bool):
        return "b", value
    if isinstance(value, int):
        if abs(value) <= _EXACT_MAX:
            return "n", float(value)
        if abs(value) < 1 << 64:
            return "i", str(value)
        raise FilterError(f"{place}: expected an integer of at most 64 bits, found {value}")
    if isinstance(value, float):
        if math.isfinite(value):
            return "n", value
        raise FilterError(f"{place}: expected a finite number, found {value}")
    if isinstance(value, str):
        return "s", value
    raise FilterError(f"{place}: expected text, a number or a boolean, found {_named(value)}")


def parse_time(text: str) -> float | None:
    """Return Unix seconds for an ISO 8601 date or time, None for any other text."""
    if len(text) > 40 or not _ISO_TIME.match(text):
        return None
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    try:
        return when.timestamp()
    except (OverflowError, ValueError):
        return None


def check_metadata(metadata: Mapping[str, Any], place: str) -> None:
    """Refuse what filters could never reach: reserved names, keys that are not text.

    Raises:
        InputError: naming ``place`` and the key.
    """
    for key in metadata:
        if not isinstance(key, str) or not key or key in RESERVED_FIELDS or key[0] == "\x00":
            raise InputError(
                f"{place}: metadata key {key!r} cannot be used; expected text other than "
                f"{', '.join(sorted(RESERVED_FIELDS))} (a tenant is its own argument)"
            )


def flatten(tenant: str, metadata: Mapping[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Return one row's values by (field, kind), as filters see them."""
    found: dict[tuple[str, str], list[Any]] = {(_TENANT, "s"): [tenant]}
    for field, kind, value in _walk("", metadata, 0):
        found.setdefault((field, kind), []).append(value)
    return found


def _walk(prefix: str, value: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Kind, Any]]:
    if depth > DEPTH_MAX:
        return
    for key, item in value.items():
        field = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _walk(f"{field}.", item, depth + 1)
            continue
        for single in item if isinstance(item, list | tuple) else (item,):
            if single is None or isinstance(single, list | tuple | Mapping):
                continue
            kind, typed = _typed(single, field)
            yield field, kind, typed
            if kind == "i":
                yield field, "w", float(int(typed))  # Apart, or it would equal its neighbors.
            if kind == "s":
                seconds = parse_time(typed)
                if seconds is not None:
                    yield field, "t", seconds


def matches(node: Filter, fields: Fields) -> bool:
    """Evaluate ``node`` for one row; the row-wise twin of `FilterIndex.select`."""
    match node:
        case All(parts):
            return all(matches(part, fields) for part in parts)
        case Any_(parts):
            return any(matches(part, fields) for part in parts)
        case Not(part):
            return not matches(part, fields)
        case Equal(field, values):
            return any(value in fields.get((field, kind), ()) for kind, value in values)
        case Between(field):
            return any(
                node.holds(value) for kind in node.kinds for value in fields.get((field, kind), ())
            )
        case Exists(field):
            return any((field, kind) in fields for kind in "binst")
