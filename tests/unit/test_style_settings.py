"""STYLE, Errors and configuration: each setting documents its default and the reason for it."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.service.configuration import StokerConfig

ROOMS = {
    "index": "IndexSettings",
    "prefetch": "PrefetchSettings",
    "kvcache": "KvcacheSettings",
    "service": "ServiceSettings",
}
HELP_CHARACTERS_MIN = 25
# A reason is a clause of its own: after a semicolon, colon, comma or stop, or after one of these.
REASON = re.compile(r"[;:,.] \S|\b(?:because|since|so that|as|for|where|which|while|until)\b")
# A name's last word tells the unit; these units are too coarse or too fine to mix, or unclear.
UNIT_BANNED = re.compile(r"_(?:sec|secs|seconds|millis|milliseconds|msec|minutes|kb|mb|gb|pct)$")


def settings_class(room: str) -> Any:
    return getattr(importlib.import_module(f"stoker.{room}.settings"), ROOMS[room])


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_room_has_one_frozen_dataclass(room: str) -> None:
    cls = settings_class(room)
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert cls.__doc__
    nested = {
        field.name: type(getattr(StokerConfig(), field.name)) for field in fields_of(StokerConfig)
    }
    assert nested[room] is cls


def fields_of(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def test_each_setting_has_a_default_and_says_why(room: str) -> None:
    faults = []
    for field in fields_of(settings_class(room)):
        text = field.metadata.get("help", "")
        key = f"{room}.{field.name}"
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"{key}: no default")
        if len(text) < HELP_CHARACTERS_MIN:
            faults.append(f"{key}: no help, or hardly any: {text!r}")
        elif not REASON.search(text):
            faults.append(f"{key}: the help gives no reason: {text!r}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", field.name) or UNIT_BANNED.search(field.name):
            faults.append(
                f"{key}: a name in small letters, its unit one of _s _ms _us _ns _bytes _ratio"
            )
        if field.name.startswith(("no_", "disable_", "not_")):
            faults.append(f"{key}: a flag is positive")
    assert not faults, "\n".join(faults)


def test_defaults_are_valid_and_immutable(room: str) -> None:
    settings = settings_class(room)()
    assert settings == settings_class(room)()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, fields_of(settings)[0].name, None)


def test_numbers_are_checked(room: str) -> None:
    """No size, time or count may be negative; the error names the key."""
    cls = settings_class(room)
    measured = re.compile(r"_(?:s|ms|us|bytes|ratio|max|count|bits)$")
    for field in fields_of(cls):
        value = field.default
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not measured.search(field.name):
            continue
        with pytest.raises(ConfigError, match=field.name):
            cls(**{field.name: type(value)(-7)})
