"""Turn what a file, the environment or a flag holds into a setting's type."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from stoker.errors import ConfigError

_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10, "KB": 1000, "KIB": 1 << 10,
    "M": 1 << 20, "MB": 1000**2, "MIB": 1 << 20,
    "G": 1 << 30, "GB": 1000**3, "GIB": 1 << 30,
    "T": 1 << 40, "TB": 1000**4, "TIB": 1 << 40,
}  # fmt: skip


def parse_value(key: str, value: Any, hint: Any, place: str, *, secret: bool = False) -> Any:
    """Turn a value from TOML, the environment or a flag into the setting's type.

    Sizes (`*_bytes`, `*_bytes_max`) take a unit: "512MiB", "4GB".

    Raises:
        ConfigError: the value does not fit; names key, place, what was expected and found.
    """
    try:
        return _converted(key, value, hint)
    except (TypeError, ValueError) as error:
        shown = "a secret" if secret else repr(value)
        raise ConfigError(
            f"{key} ({place}): expected {_type_words(hint)}, found {shown}: {error}"
        ) from error


def _converted(key: str, value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _converted_union(key, value, get_args(hint))
    if origin is Literal:
        if value not in get_args(hint):
            raise ValueError("not one of the choices")
        return value
    if origin in (tuple, list, Sequence):
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            raise TypeError("not a list")
        inner = [a for a in get_args(hint) if a is not Ellipsis] or [str]
        if origin is tuple and Ellipsis not in get_args(hint) and len(inner) > 1:
            if len(value) != len(inner):
                raise ValueError(f"needs {len(inner)} items")
            return tuple(_converted(key, v, h) for v, h in zip(value, inner, strict=True))
        return tuple(_converted(key, v, inner[0]) for v in value)
    if origin in (dict, Mapping):
        return _converted_mapping(key, value, get_args(hint) or (str, str))
    if hint is bool:
        return _converted_bool(value)
    if hint is int:
        return _converted_int(key, value)
    if hint is float:
        if isinstance(value, bool):
            raise TypeError("not a number")
        try:
            return float(value)
        except ValueError:
            raise ValueError("write a number, like 0.5") from None
    if hint is Path:
        return Path(value)
    if hint is str:
        if not isinstance(value, str):
            raise TypeError("not text")
        return value
    raise TypeError(f"settings of type {hint} are not supported")


def _converted_union(key: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if type(None) in choices and (
        value is None or (isinstance(value, str) and value.strip().lower() in ("", "none"))
    ):
        return None
    reason: Exception = ValueError("fits no choice")
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _converted(key, value, choice)
        except (TypeError, ValueError) as error:
            reason = error
    raise reason


def _converted_mapping(key: str, value: Any, hints: tuple[Any, ...]) -> Mapping[Any, Any]:
    if isinstance(value, str):
        pairs = {}
        for part in filter(None, (p.strip() for p in value.split(","))):
            name, equals, text = part.partition("=")
            if not equals:
                raise ValueError("each item is name=value")
            pairs[name.strip()] = text.strip()
        value = pairs
    if not isinstance(value, Mapping):
        raise TypeError("not a table")
    return types.MappingProxyType(
        {_converted(key, k, hints[0]): _converted(key, v, hints[1]) for k, v in value.items()}
    )


def _converted_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("true", "1", "yes", "on"):
        return True
    if word in ("false", "0", "no", "off"):
        return False
    raise ValueError("write true or false")


def _converted_int(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError("not a whole number")
    if isinstance(value, int):
        return value
    text = value.strip().replace("_", "")
    if "_bytes" in key:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
        if match and match[2].upper() in _BYTE_UNITS:
            unit = _BYTE_UNITS[match[2].upper()]
            return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
        raise ValueError("write bytes, or a number with KiB, MiB, GiB")
    try:
        return int(text)
    except ValueError:
        raise ValueError("write digits only") from None


def _type_words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type_words(a) for a in get_args(hint))
    if origin in (tuple, list, Sequence):
        return "a list"
    if origin in (dict, Mapping):
        return "a table of name = value"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))
