"""The one configuration object that nests every room's settings, and where each value came from.

Values come from four places; a later one wins: the default in the dataclass, a TOML file,
`STOKER_<ROOM>_<KEY>` in the environment, a flag of the command. Every value remembers its place
(`stoker config show`). An unknown key is an error that suggests the nearest known one: a setting
that is spelled wrong and silently ignored costs more than a start that fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from stoker.errors import ConfigError
from stoker.index.settings import IndexSettings
from stoker.kvcache.settings import KvcacheSettings
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.setting_values import parse_value
from stoker.service.settings import ServiceSettings

# Longest file of settings, bytes: a thousand times what all of them with their reasons take.
_FILE_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class StokerConfig:
    """Every room's settings. The field names are the table names in TOML."""

    index: IndexSettings = dataclasses.field(default_factory=IndexSettings)
    prefetch: PrefetchSettings = dataclasses.field(default_factory=PrefetchSettings)
    kvcache: KvcacheSettings = dataclasses.field(default_factory=KvcacheSettings)
    service: ServiceSettings = dataclasses.field(default_factory=ServiceSettings)

    def __post_init__(self) -> None:
        kept_s, silence_s = self.service.event_retention_s, self.prefetch.heat_silence_s_max
        if kept_s > silence_s:
            raise ConfigError(
                f"service.event_retention_s ({kept_s!r}) must be at most "
                f"prefetch.heat_silence_s_max ({silence_s!r}): a new replica would take "
                "older events for another clock's and count them as now; raise the latter as well"
            )


@dataclass(frozen=True)
class LoadedConfig:
    """Effective settings, and the place that each one came from.

    Attributes:
        config: The settings.
        origins: "room.key" -> "default", "file PATH", "environment NAME" or "flag --NAME".
    """

    config: StokerConfig
    origins: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """List every setting in room order, with secrets masked, ready for a table or JSON."""
        rows: list[dict[str, Any]] = []
        for room in dataclasses.fields(self.config):
            settings = getattr(self.config, room.name)
            for field in dataclasses.fields(settings):
                value = getattr(settings, field.name)
                if field.metadata.get("secret"):
                    value = _masked(value)
                elif isinstance(value, Mapping):
                    value = dict(value)
                elif isinstance(value, tuple):
                    value = list(value)
                elif isinstance(value, os.PathLike):
                    value = str(value)
                key = f"{room.name}.{field.name}"
                rows.append(
                    {
                        "key": key,
                        "value": value,
                        "origin": self.origins.get(key, "default"),
                        "help": field.metadata.get("help", ""),
                    }
                )
        return rows


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: "***" for name in value}
    return "***" if value else ""


# Names in the environment that start with STOKER_ and are not settings: the configuration file's
# own name, and what clients, the native core, builds, tests and benchmarks read.
_ENVIRONMENT_FREE = re.compile(
    r"STOKER_(CONFIG|CLIENT_|SIMD|MODEL_CACHE|BUILD_|SANITIZE|TEST_|BENCH_|DEMO_|FAILPOINT)"
)


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read the settings from file, environment and flags, in that order; the last one wins.

    Args:
        path: A TOML file with one table per room; None reads `STOKER_CONFIG`, if it is set.
        environment: Names and values; None means this process's own.
        flags: "room.key" -> value. A str is parsed like the environment's; None is "not given".
        flag_names: "room.key" -> the flag as the user typed it, for messages and origins.

    Raises:
        ConfigError: a key is unknown (the message suggests the nearest), a value does not fit its
            type, or settings do not go together.
    """
    environment = os.environ if environment is None else environment
    known = _known_fields()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is None and environment.get("STOKER_CONFIG"):
        path = environment["STOKER_CONFIG"]
    if path is not None:
        for key, value in _file_values(Path(path), known).items():
            values[key] = value
            origins[key] = f"file {os.fspath(path)}"
    for key, (name, value) in _environment_values(environment, known).items():
        values[key] = value
        origins[key] = f"environment {name}"
    for key, value in (flags or {}).items():
        if value is None:
            continue
        name = (flag_names or {}).get(key, f"--set {key}")
        _check_known(key, known, f"flag {name}")
        values[key] = known[key].parse(value, f"flag {name}")
        origins[key] = f"flag {name}"

    rooms: dict[str, Any] = {}
    for room, room_class in _room_classes().items():
        prefix = f"{room}."
        given = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        try:
            rooms[room] = room_class(**given)
        except ConfigError as error:
            text = str(error)
            if text.startswith(prefix):
                raise
            raise ConfigError(f"{prefix}{text}") from error
    return LoadedConfig(StokerConfig(**rooms), origins)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Give a command `--config FILE` and `--set ROOM.KEY=VALUE`."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the tables [index], [prefetch], [kvcache], [service] "
        "(default: the STOKER_CONFIG environment variable, if set)",
    )
    group.add_argument(
        "--set",
        dest="settings",
        metavar="ROOM.KEY=VALUE",
        action="append",
        default=[],
        help="one setting, e.g. --set service.k_max=200; see `stoker config show` for all of them",
    )


def config_from_args(
    args: argparse.Namespace, flags: Mapping[str, tuple[str, Any]] | None = None
) -> LoadedConfig:
    """Load the settings for a command that called `add_config_flags`.

    Args:
        args: The parsed command line.
        flags: "room.key" -> (the command's own flag, its value or None), e.g.
            `{"service.port": ("--port", args.port)}`; these win over `--set`.

    Raises:
        ConfigError: as `load_config`.
    """
    values: dict[str, Any] = {}
    for item in args.settings:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected ROOM.KEY=VALUE, found no '='")
        values[key.strip()] = value
    names = {}
    for key, (name, value) in (flags or {}).items():
        if value is not None:
            values[key] = value
            names[key] = name
    return load_config(args.config, flags=values, flag_names=names)


def _room_classes() -> dict[str, type[Any]]:
    hints = get_type_hints(StokerConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(StokerConfig)}


@dataclass(frozen=True)
class _Known:
    """A setting that exists: its key, its type, and whether its value may be shown."""

    key: str
    hint: Any
    secret: bool

    def parse(self, value: Any, place: str) -> Any:
        return parse_value(self.key, value, self.hint, place, secret=self.secret)


def _known_fields() -> dict[str, _Known]:
    known: dict[str, _Known] = {}
    for room, room_class in _room_classes().items():
        hints = get_type_hints(room_class)
        for field in dataclasses.fields(room_class):
            key = f"{room}.{field.name}"
            known[key] = _Known(key, hints[field.name], bool(field.metadata.get("secret")))
    return known


def _check_known(key: str, known: Mapping[str, _Known], place: str) -> None:
    if key in known:
        return
    # The right name in the wrong room comes first: it is exact, a likeness is a guess.
    name = key.rpartition(".")[2]
    near = [other for other in known if other.partition(".")[2] == name]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`stoker config show` lists every setting"
    raise ConfigError(f"unknown setting {key} ({place}); {hint}")


def _file_values(path: Path, known: Mapping[str, _Known]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            raise ConfigError(
                f"configuration file {path} is longer than {_FILE_BYTES_MAX} bytes; is it one?"
            )
        tables = tomllib.loads(text.decode())
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    rooms = _room_classes()
    place = f"file {path}"
    for room, table in tables.items():
        if room not in rooms:
            near = difflib.get_close_matches(room, rooms, n=1)
            hint = f"did you mean [{near[0]}]?" if near else f"tables are {', '.join(rooms)}"
            raise ConfigError(f"unknown table [{room}] ({place}); {hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{room} ({place}): expected a table [{room}], found {table!r}")
        for name, value in table.items():
            key = f"{room}.{name}"
            _check_known(key, known, place)
            values[key] = known[key].parse(value, place)
    return values


def _environment_values(
    environment: Mapping[str, str], known: Mapping[str, _Known]
) -> dict[str, tuple[str, Any]]:
    names = {"STOKER_" + key.replace(".", "_").upper(): key for key in known}
    _refuse_service_links(environment)
    values: dict[str, tuple[str, Any]] = {}
    for name, value in sorted(environment.items()):
        if not name.startswith("STOKER_") or _ENVIRONMENT_FREE.match(name):
            continue
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]}?" if near else "`stoker config show` lists every setting"
            )
            raise ConfigError(f"unknown setting in the environment: {name}; {hint}")
        key = names[name]
        values[key] = (name, known[key].parse(value, f"environment {name}"))
    return values


def _refuse_service_links(environment: Mapping[str, str]) -> None:
    # Kubernetes gives every pod STOKER_SERVICE_HOST and STOKER_SERVICE_PORT when a Service is
    # named "stoker". They would be read as our settings and bind the cluster's address.
    link = environment.get("STOKER_PORT", "")
    if re.match(r"(tcp|udp|sctp)://", link):
        raise ConfigError(
            f"the environment holds Kubernetes service links (STOKER_PORT={link}), whose "
            "STOKER_SERVICE_HOST and STOKER_SERVICE_PORT collide with settings of the same name; "
            "set enableServiceLinks: false in the pod's spec"
        )
