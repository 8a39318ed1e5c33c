"""Log lines: one JSON object each, secrets masked, no local variables in tracebacks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import structlog

from stoker.service.logging import Level, configure_logging, log_level, set_log_level


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(form: Literal["json", "text"], write: Any, level: Any = "info") -> list[str]:
    stream = io.StringIO()
    configure_logging(level, form, stream=stream)
    write(structlog.get_logger("test"))
    return stream.getvalue().splitlines()


def test_a_line_is_one_json_object() -> None:
    (line,) = lines("json", lambda log: log.info("service.thing_done", pages=3, folder="x\ny"))
    record = json.loads(line)
    assert record["event"] == "service.thing_done"
    assert (record["pages"], record["level"], record["folder"]) == (3, "info", "x\ny")
    assert record["timestamp"].endswith("Z")


def test_no_value_can_stop_a_line() -> None:
    def write(log: Any) -> None:
        log.info("service.a_b", offsets={0: 1}, wide=1 << 70, odd=object(), folder=b"\xff")

    (line,) = lines("json", write)
    assert json.loads(line)["event"] == "service.a_b"


def test_lines_go_to_standard_error_as_it_is_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("info", "json")
    structlog.get_logger("test").info("service.a_b")
    assert json.loads(capsys.readouterr().err)["event"] == "service.a_b"
    other = io.StringIO()
    monkeypatch.setattr("sys.stderr", other)
    structlog.get_logger("test").info("service.c_d")
    assert json.loads(other.getvalue())["event"] == "service.c_d"
    assert capsys.readouterr().err == ""


def test_levels_are_filtered() -> None:
    def write(log: Any) -> None:
        log.debug("service.a_b")
        log.info("service.c_d")
        log.error("service.e_f")

    assert len(lines("json", write, "debug")) == 3
    assert len(lines("json", write, "info")) == 2
    assert len(lines("json", write, "error")) == 1


@pytest.mark.parametrize("form", ["json", "text"])
def test_secrets_are_masked_whoever_logs_them(form: Literal["json", "text"]) -> None:
    def write(log: Any) -> None:
        log.info("service.a_b", api_keys={"a": "s3cret"}, Authorization="Bearer s3cret")

    text = "\n".join(lines(form, write))
    assert "s3cret" not in text
    assert "***" in text


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_traceback_shows_no_local_variables(form: Literal["json", "text"]) -> None:
    def write(log: Any) -> None:
        token = "s3cret"
        try:
            raise ZeroDivisionError(len(token))
        except ZeroDivisionError:
            log.exception("service.a_b")

    text = "\n".join(lines(form, write))
    assert "ZeroDivisionError" in text
    assert text.count("s3cret") == text.count('token = "s3cret"') + text.count(
        'token = \\"s3cret\\"'
    )


def test_lines_of_libraries_take_the_same_form() -> None:
    def write(_: Any) -> None:
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("lost %s", "broker")

    (line,) = lines("json", write)
    assert json.loads(line)["event"] == "lost broker"


class _Full(io.StringIO):
    """Standard error on a disk that is full, or whose reader has gone."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("broken", [_Full(), _closed(), None], ids=["full", "closed", "none"])
@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_that_cannot_be_written_never_stops_the_work(
    form: Literal["json", "text"], broken: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", broken)
    configure_logging("info", form)
    structlog.get_logger("test").warning("service.a_b")
    logging.getLogger("library").error("of a library")
    kept = io.StringIO()
    monkeypatch.setattr("sys.stderr", kept)
    structlog.get_logger("test").warning("service.c_d")
    assert "service.c_d" in kept.getvalue()


def test_the_level_of_a_running_process_changes_at_once() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream=stream)
    held = structlog.get_logger("made before")
    steps: tuple[tuple[Level, list[str]], ...] = (
        ("debug", ["debug", "info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
        ("info", ["info", "warning", "error"]),
    )
    before = "info"
    for level, written in steps:
        stream.truncate(stream.seek(0))
        set_log_level(level)
        assert log_level() == level
        (said,) = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert (said["event"], said["before"], said["level"]) == (
            "service.log_level_set",
            before,
            "warning",
        )
        assert said["after"] == level
        stream.truncate(stream.seek(0))
        for name in ("debug", "info", "warning", "error"):
            getattr(held, name)("service.thing_done", said=name)
        logging.getLogger("library").warning("its own")
        records = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [record["said"] for record in records if "said" in record] == written
        assert any(record["event"] == "its own" for record in records) == (level != "error")
        before = level
