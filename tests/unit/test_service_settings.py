"""Settings: four sources in order, origins, nearest names, combinations, secrets."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from stoker.errors import ConfigError
from stoker.service.configuration import (
    StokerConfig,
    add_config_flags,
    config_from_args,
    load_config,
)
from stoker.service.setting_values import parse_value
from stoker.service.settings import ServiceSettings, is_loopback

KEY = "0123456789abcdef"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "stoker.toml"
    path.write_text(text)
    return path


def test_without_any_source_every_value_is_the_default() -> None:
    loaded = load_config(environment={})
    assert loaded.config == StokerConfig()
    assert {row["origin"] for row in loaded.rows()} == {"default"}


def test_later_sources_win_and_every_origin_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "[service]\nport = 1001\nk_max = 11\nbatch_max = 12\n")
    loaded = load_config(
        path,
        environment={"STOKER_SERVICE_PORT": "1002", "STOKER_SERVICE_K_MAX": "22"},
        flags={"service.port": "1003", "service.body_bytes_max": None},
        flag_names={"service.port": "--port"},
    )
    service = loaded.config.service
    assert (service.port, service.k_max, service.batch_max) == (1003, 22, 12)
    origins = {row["key"]: row["origin"] for row in loaded.rows()}
    assert origins["service.port"] == "flag --port"
    assert origins["service.k_max"] == "environment STOKER_SERVICE_K_MAX"
    assert origins["service.batch_max"] == f"file {path}"
    assert origins["service.body_bytes_max"] == "default"


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "[prefetch]\nheat_tau_s = 60\n")
    loaded = load_config(environment={"STOKER_CONFIG": str(path)})
    assert loaded.config.prefetch.heat_tau_s == 60.0
    assert isinstance(loaded.config.prefetch.heat_tau_s, float)


def test_every_setting_can_be_given_by_the_environment() -> None:
    """No two settings share a name in the environment, and every type can be spelled there."""
    given = {}
    for row in load_config(environment={}).rows():
        value = row["value"]
        name = "STOKER_" + row["key"].replace(".", "_").upper()
        assert name not in given
        if isinstance(value, dict):
            value = ",".join(f"{k}={v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ",".join(map(str, value))
        given[name] = "none" if value is None else str(value)
    assert load_config(environment=given).config == StokerConfig()


@pytest.mark.parametrize(
    ("toml", "suggestion"),
    [
        ("[service]\nporrt = 1", "did you mean service.port?"),
        ("[servce]\nport = 1", "did you mean [service]?"),
        ("[index]\nk_max = 1", "did you mean service.k_max?"),
        ("port = 1", "unknown table [port]"),
        ("service = 3", "expected a table [service]"),
    ],
)
def test_an_unknown_key_in_the_file_names_the_nearest(
    tmp_path: Path, toml: str, suggestion: str
) -> None:
    path = write(tmp_path, toml)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment={})
    assert suggestion in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_name_in_the_environment_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean STOKER_SERVICE_PORT"):
        load_config(environment={"STOKER_SERVCE_PORT": "1"})
    # Names for builds and tests are no settings; other programs' names are none of our business.
    load_config(environment={"STOKER_TEST_DATA": "x", "STOKERX": "y", "PATH": "z"})


def test_what_else_reads_the_environment_may_stand_in_it() -> None:
    """A name that a part of Stoker reads must not keep a server from starting."""
    root = Path(__file__).parents[2]
    read = re.compile(r"(?:environ(?:\.get)?|getenv)[\[(]\"(STOKER_[A-Z_]+)\"")
    names = {
        name
        for folder in ("service", "prefetch", "index", "kvcache", "kernels", "tests")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".hpp") and path.is_file()
        for name in read.findall(path.read_text(encoding="utf-8"))
    }
    assert {"STOKER_CLIENT_KEY", "STOKER_CLIENT_URL", "STOKER_SIMD"} <= names
    load_config(environment=dict.fromkeys(names, ""))


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean service\.warm_deadline_s"):
        load_config(environment={}, flags={"service.warm_dedline_s": "1"})


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
def test_a_time_that_no_wait_can_take_is_refused_at_the_start(value: str) -> None:
    """Later it would be an overflow in some thread, long after the server has started."""
    names = [
        field.name
        for field in dataclasses.fields(ServiceSettings)
        if field.type == "float" and field.name.endswith("_s")
    ]
    assert {"refresh_s", "drain_notice_s", "heat_wait_s", "connection_idle_s"} <= set(names)
    for name in names:
        with pytest.raises(ConfigError, match=f"service.{name} is"):
            load_config(environment={}, flags={f"service.{name}": value})


@pytest.mark.parametrize("value", ["1", "2097151"])
def test_ids_take_nothing_or_enough_to_be_of_use(value: str) -> None:
    with pytest.raises(ConfigError, match=f"service.event_dedup_bytes is {value}; .* 0, or at"):
        load_config(environment={}, flags={"service.event_dedup_bytes": value})
    for taken in ("0", "2MiB"):
        load_config(environment={}, flags={"service.event_dedup_bytes": taken})


def test_the_key_of_before_names_what_took_its_place() -> None:
    with pytest.raises(ConfigError, match=r"did you mean service\.event_dedup_s"):
        load_config(environment={}, flags={"service.event_dedup_max": "65536"})


def test_service_links_of_kubernetes_are_told_apart() -> None:
    links = {
        "STOKER_PORT": "tcp://10.0.0.7:8080",
        "STOKER_SERVICE_HOST": "10.0.0.7",
        "STOKER_SERVICE_PORT": "8080",
    }
    with pytest.raises(ConfigError, match="enableServiceLinks: false"):
        load_config(environment=links)


@pytest.mark.parametrize(
    ("key", "value", "hint", "expected"),
    [
        ("a.b_bytes_max", "512MiB", int, 512 << 20),
        ("a.b_bytes", "1.5 GiB", int, 3 << 29),
        ("a.b_bytes", "10kb", int, 10_000),
        ("a.b", "1_000", int, 1000),
        ("a.b", 3, float, 3.0),
        ("a.b", "on", bool, True),
        ("a.b", "No", bool, False),
        ("a.b", "x, y,", tuple[str, ...], ("x", "y")),
        ("a.b", [1, "2"], tuple[int, ...], (1, 2)),
        ("a.b", [1, 0.5], tuple[int, float], (1, 0.5)),
        ("a.b", "", int | None, None),
        ("a.b", "7", int | None, 7),
        ("a.b", "x", Literal["x", "y"], "x"),
        ("a.b", "t=k, u=l", dict[str, str], {"t": "k", "u": "l"}),
        ("a.b", "/x", Path, Path("/x")),
    ],
)
def test_values_take_their_type(key: str, value: Any, hint: Any, expected: Any) -> None:
    assert parse_value(key, value, hint, "here") == expected


@pytest.mark.parametrize(
    ("key", "value", "hint", "words"),
    [
        ("a.b", "1k", int, "a whole number"),
        ("a.b", True, int, "a whole number"),
        ("a.b", 1.5, int, "a whole number"),
        ("a.b_bytes", "5 parsecs", int, "KiB"),
        ("a.b", "maybe", bool, "true or false"),
        ("a.b", False, float, "a number"),
        ("a.b", 3, str, "text"),
        ("a.b", "z", Literal["x", "y"], "one of 'x', 'y'"),
        ("a.b", 3, tuple[str, ...], "a list"),
        ("a.b", [1], tuple[int, int], "needs 2 items"),
        ("a.b", "tk", dict[str, str], "a table of name = value"),
        ("a.b", "x", int | None, "a whole number or none"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_key_and_place(
    key: str, value: Any, hint: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value(key, value, hint, "file x")
    assert key in str(caught.value)
    assert "file x" in str(caught.value)
    assert words in str(caught.value)


def test_a_broken_file_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml", environment={})
    with pytest.raises(ConfigError, match="line 1"):
        load_config(write(tmp_path, "[service\n"), environment={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, environment={})


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"deadline_ms_default": 70_000}, ["deadline_ms_default", "deadline_ms_max"]),
        ({"body_bytes_max": 1 << 30}, ["service.body_bytes_max", "service.bodies_bytes_max"]),
        ({"event_log": "kafka"}, ["event_log", "kafka_bootstrap"]),
        ({"kafka_bootstrap": "h:9092"}, ["kafka_bootstrap", "event_log"]),
        ({"host": "0.0.0.0"}, ["service.host", "service.api_keys"]),
        ({"auth": "required"}, ["service.auth", "service.api_keys"]),
        ({"api_keys": {"a": "short"}}, ["service.api_keys.a"]),
        ({"api_keys": {"a": KEY, "b": KEY}}, ["service.api_keys.a", "service.api_keys.b"]),
        ({"api_keys": {"a": KEY}, "operator_key": KEY}, ["api_keys.a", "operator_key"]),
        ({"api_keys": {"": KEY}}, ["service.api_keys"]),
        ({"api_keys": {"a": KEY + "é"}}, ["service.api_keys.a"]),
        ({"port": 65_536}, ["service.port"]),
        ({"drain_s": 0.0}, ["service.drain_s"]),
        ({"drain_s": float("nan")}, ["service.drain_s"]),
        ({"tenant_default": ""}, ["service.tenant_default"]),
    ],
)
def test_impossible_combinations_name_their_keys(values: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceSettings(**values)
    for key in keys:
        assert key in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_rooms_own_complaint_gets_the_rooms_name() -> None:
    with pytest.raises(ConfigError, match=r"^prefetch\.heat_tau_s"):
        load_config(environment={}, flags={"prefetch.heat_tau_s": "-1"})


@pytest.mark.parametrize(
    ("values", "required"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"api_keys": {"a": KEY}}, True),
        ({"host": "0.0.0.0", "api_keys": {"a": KEY}}, True),
        ({"host": "0.0.0.0", "operator_key": KEY}, True),
        ({"host": "0.0.0.0", "auth": "off"}, False),
        ({"auth": "off", "api_keys": {"a": KEY}}, False),
    ],
)
def test_keys_are_asked_for_unless_the_address_is_loopback(
    values: dict[str, Any], required: bool
) -> None:
    assert ServiceSettings(**values).keys_required is required


def test_loopback() -> None:
    assert is_loopback("127.8.8.8")
    assert is_loopback("[::1]")
    assert not is_loopback("example.org")
    assert not is_loopback("::")


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f'[service]\noperator_key = "{KEY}X"\n[service.api_keys]\nacme = "{KEY}Y"\n',
    )
    rows = {row["key"]: row for row in load_config(path, environment={}).rows()}
    assert rows["service.api_keys"]["value"] == {"acme": "***"}
    assert rows["service.operator_key"]["value"] == "***"
    assert KEY not in str(rows)
    with pytest.raises(ConfigError) as caught:
        load_config(environment={"STOKER_SERVICE_API_KEYS": KEY})
    assert KEY not in str(caught.value)


def test_every_secret_is_marked() -> None:
    for field in dataclasses.fields(ServiceSettings):
        if field.name.endswith(("_key", "_keys", "_password")):
            assert field.metadata.get("secret"), field.name


def test_flags_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_CONFIG", raising=False)
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    args = parser.parse_args(["--set", "service.port=1", "--set", "service.k_max=7"])
    loaded = config_from_args(args, {"service.port": ("--port", 2), "service.host": ("-H", None)})
    assert loaded.config.service.port == 2
    assert loaded.config.service.k_max == 7
    assert loaded.origins["service.port"] == "flag --port"
    assert loaded.origins["service.k_max"] == "flag --set service.k_max"
    with pytest.raises(ConfigError, match="found no '='"):
        config_from_args(parser.parse_args(["--set", "service.port"]))


def test_events_are_kept_no_longer_than_the_heat_believes_a_silence() -> None:
    month = "2592000"
    with pytest.raises(ConfigError, match=r"prefetch\.heat_silence_s_max \(604800\.0\)"):
        load_config(environment={}, flags={"service.event_retention_s": month})
    both = {"service.event_retention_s": month, "prefetch.heat_silence_s_max": month}
    assert load_config(environment={}, flags=both).config.service.event_retention_s == 2_592_000.0
