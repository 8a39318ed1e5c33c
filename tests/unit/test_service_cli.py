"""The command: what it lists, how it fails, and what a script sees."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
import threading
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import __version__, errors
from stoker.__main__ import main as command_main
from stoker.service import cli


class Fake(ModuleType):
    """A command that does what the test says."""

    def __init__(self, outcome: Any) -> None:
        super().__init__("stoker.service.commands.config")
        self.outcome = outcome

    def add_parser(self, subparsers: Any) -> None:
        parser = subparsers.add_parser("config", help="fake")
        parser.add_argument("word", nargs="?")

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if callable(self.outcome):
            return int(self.outcome(args))
        return int(self.outcome)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(outcome: Any) -> None:
        monkeypatch.setitem(sys.modules, "stoker.service.commands.config", Fake(outcome))

    return install


def _parsers(name: str, file_name: str) -> list[argparse.ArgumentParser]:
    module_name = cli._module_name(name, file_name)
    assert module_name is not None
    subparsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(module_name).add_parser(subparsers)
    return list(subparsers.choices.values())


def test_help_lists_the_commands_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, file_name, _ in cli.COMMANDS:
        listed = f"\n    {name} " in out
        assert listed is (cli._module_name(name, file_name) is not None), name


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"stoker {__version__}\n"
    assert cli.main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__}


@pytest.mark.parametrize(
    ("name", "file_name"), [(name, file_name) for name, file_name, _ in cli.COMMANDS]
)
def test_every_command_that_is_there_explains_itself(
    name: str, file_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if cli._module_name(name, file_name) is None:
        assert cli.main([name]) == 2
        return
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: stoker {name}" in out
    assert "--json" in out
    assert "--verbose" in out
    assert "exit codes" in " ".join(out.split())
    assert max(map(len, out.partition("options:")[0].splitlines())) <= 80
    (parser,) = _parsers(name, file_name)
    mute = [action.dest for action in parser._actions if not action.help]
    assert not mute, f"stoker {name} does not say what these are for: {mute}"


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (errors.ConfigError("x"), 2, "config"),
        (errors.InputError("x"), 3, "bad-input"),
        (errors.CapacityError("x"), 4, "capacity"),
        (errors.UnavailableError("x"), 4, "unavailable"),
        (errors.CorruptError("x"), 5, "corrupt"),
        (errors.StokerError("x"), 1, "failed"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 1, "failed"),
        (ZeroDivisionError("x"), 1, "failed"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    command: Any, error: Exception, code: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command(error)
    assert cli.main(["config"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stoker: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err

    assert cli.main(["config", "--json"]) == code
    problem = json.loads(capsys.readouterr().err)
    assert problem["type"] == f"urn:stoker:problem:{kind}"
    assert problem["exit"] == code
    assert problem["detail"]


def test_verbose_shows_the_traceback(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(errors.InputError("x"))
    assert cli.main(["--verbose", "config"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_message_of_several_lines_becomes_one(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(errors.InputError("a\n  b\n"))
    assert cli.main(["config"]) == 3
    assert capsys.readouterr().err == "stoker: a b\n"


def test_the_exit_code_of_a_command_is_passed_on(command: Any) -> None:
    command(0)
    assert cli.main(["config"]) == 0
    command(5)
    assert cli.main(["config"]) == 5


def test_common_flags_may_stand_before_or_behind(command: Any) -> None:
    seen = []

    def note(args: argparse.Namespace) -> int:
        seen.append((args.json, args.verbose))
        return 0

    command(note)
    for argv in (["config"], ["--json", "config"], ["config", "--json", "--verbose"]):
        assert cli.main(argv) == 0
    assert seen == [(False, False), (True, False), (True, True)]


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err
    assert cli.main(["confg"]) == 2
    assert "did you mean config?" in capsys.readouterr().err
    assert cli.main(["serve", "x", "--prot", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err
    assert cli.main(["no-such-command", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["exit"] == 2


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("srve x", 2, "did you mean serve?"),
        ("serve x --warm maybe", 2, "choose from"),
        ("serve x --memory 5parsecs", 2, "KiB, MiB, GiB"),
        ("serve x --set service.k_max=many", 2, "found 'many': write digits only"),
        ("serve x --set service.drain_s=long", 2, "found 'long': write a number, like 0.5"),
        ("serve nothing", 3, "`stoker index` builds one"),
        ("plan nothing", 3, "`stoker index` builds one"),
        ("inspect nothing", 3, "`stoker index` builds one"),
        ("verify nothing", 3, "no such folder"),
        ("repair nothing", 3, "no such folder"),
        *(
            (f"{command} {__file__}", 3, "no such folder")
            for command in ("plan", "inspect", "verify", "repair", "serve")
        ),
        ("replay nothing", 3, "no such file or folder"),
        ("reuse evaluate --pairs nothing", 3, "cannot read nothing: No such file"),
        ("bench coldstart --vectors nothing", 3, "nothing: cannot be read: No such file"),
        ("demo --kafka nohost", 2, "HOST:PORT"),
        ("warm --url nourl", 3, "expected http://HOST:PORT"),
        ("warm --budget many", 2, "KiB, MiB, GiB"),
        ("warm --url http://127.0.0.1:1", 4, "Connection refused; check that the server runs"),
        ("replay LOG --url http://127.0.0.1:1", 4, "Connection refused; check that the server"),
        ("simulate --made foo:1 --capacity 5", 3, "expected drift or jobs"),
        ("index nothing --output x", 3, "No such file"),
        ("import nothing x", 3, "nothing"),
        ("config show --set foo", 2, "ROOM.KEY=VALUE"),
    ],
)
def test_a_wrong_call_says_what_to_do(
    line: str,
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, in our words: no number of the system's, no traceback; and nothing is begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LOG").write_text("")
    try:
        found = cli.main(line.split())
    except SystemExit as ended:
        found = int(str(ended.code))
    said = capsys.readouterr().err
    assert (found, text in said) == (code, True), (found, said)
    assert "Traceback" not in said
    assert "[Errno" not in said


@pytest.mark.parametrize(("name", "file_name", "line"), cli.COMMANDS)
def test_no_command_takes_an_empty_name_for_the_folder_that_one_is_in(
    name: str, file_name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of `stoker repair "$INDEX"`, where the variable is not set."""
    for parser in _parsers(name, file_name):
        names = cli._names_of_files(parser)
        cli._refuse_empty(names)
        for action in names:
            assert callable(action.type)
            with pytest.raises(argparse.ArgumentTypeError, match="empty"):
                action.type("")
            assert str(action.type("a")) == "a"
    if name in ("verify", "repair", "inspect", "serve", "plan", "doctor"):
        assert cli.main([name, ""]) == 2
        assert "INDEX: expected the name of a file or folder, found an empty" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize(("name", "file_name", "line"), cli.COMMANDS)
def test_no_command_takes_an_empty_name_for_the_server_that_is_here(
    name: str, file_name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of `stoker serve INDEX --kafka "$KAFKA"`: events would stay on this disk, unsaid."""
    for parser in _parsers(name, file_name):
        cli._refuse_no_server(parser)
        for flag in {"--kafka", "--url"} & parser._option_string_actions.keys():
            take = parser._option_string_actions[flag].type
            assert callable(take)
            for empty in ("", "  "):
                with pytest.raises(argparse.ArgumentTypeError, match="found an empty"):
                    take(empty)
            assert take("a:1") == "a:1"
    if name == "replay":  # It would replay nothing, where the others would start a server.
        for flag in ("--kafka", "--url"):
            assert cli.main([name, "nothing", f"{flag}="]) == 2
            assert f"{flag}: expected a server, found an empty" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "file_name", "line"), cli.COMMANDS)
def test_no_command_waits_for_a_pipe_or_reads_a_device(
    name: str, file_name: str, line: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for parser in _parsers(name, file_name):
        for action in cli._names_of_files(parser):
            if action.dest == "config":
                continue
            for path in (str(tmp_path / "pipe"), "/dev/zero"):
                for value in (path, [path], Path(path)):
                    args = argparse.Namespace(**{action.dest: value})
                    with pytest.raises(errors.InputError, match=f"{path}.*pipe, device or socket"):
                        cli._refuse_special_files([action], args)


def test_a_pipe_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = str(tmp_path / "pipe")
    for words in (
        ["reuse", "evaluate", "--pairs", pipe],
        ["import", pipe, "out"],
        ["import", __file__, "out", "--ids", pipe],
        ["index", __file__, "--output", "out", "--vectors", pipe],
        ["replay", __file__, "--chunk-ids", pipe],
        ["bench", "coldstart", "--arrivals", pipe],
    ):
        assert cli.main(words) == 3, words
        assert f"{pipe}: expected a file or folder, found a pipe" in capsys.readouterr().err


def test_an_interrupt_while_the_command_loads_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "stoker.service.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "stoker.service.cli")
    monkeypatch.delattr("stoker.service.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert command_main() == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "stoker: interrupted\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["stoker", "--version"])
    assert command_main() == 0
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"stoker": f"{command_main.__module__}:{command_main.__name__}"}


@pytest.mark.parametrize("text", ["a\nb\n", "", "a\n", "x\n" * 1_000_000])
def test_lists_of_ids_come_by_a_pipe_that_a_shell_has_opened(text: str, tmp_path: Path) -> None:
    """As of `--vector-ids <(cut -f1 ids.tsv)`; one that does not end is read up to a bound."""
    np.save(tmp_path / "v.npy", np.eye(2, 8, dtype=np.float32))
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n')
    receiving, sending = os.pipe()

    def send() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(sending, "w") as pipe:
            pipe.write(text)

    sender = threading.Thread(target=send)
    sender.start()
    code = cli.main(
        [
            "index", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "index"),
            "--threads", "1", "--vectors", str(tmp_path / "v.npy"),
            "--vector-ids", f"/dev/fd/{receiving}",
        ]
    )  # fmt: skip
    os.close(receiving)
    sender.join(60.0)
    assert code == (0 if text == "a\nb\n" else 3)


def test_a_list_of_passages_comes_by_a_pipe_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b"")
    receiving, sending = os.pipe()
    os.write(sending, b"a\n")
    os.close(sending)
    words = ["replay", str(tmp_path / "log"), "--chunk-ids", f"/dev/fd/{receiving}"]
    assert cli.main(words) == 3
    os.close(receiving)
    assert "log: no event in it" in capsys.readouterr().err, "the ids were read"


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--made", "drift:1", "--capacity", "9" * 400],
        ["bench", "coldstart", "--seconds", "nan"],
        ["bench", "coldstart", "--seconds", "inf"],
        ["bench", "coldstart", "--rate", "inf"],
        ["bench", "coldstart", "--rate", "nan"],
        ["replay", __file__, "--sample", "nan"],
        ["replay", __file__, "--tick", "nan"],
        ["replay", __file__, "--speed", "9" * 400],
        ["replay", __file__, "--until", "9" * 400 + "d"],
        ["plan", "missing", "--budget-mib", "nan"],
        ["config", "show", "--set", "service.drain_s=nan"],
        ["config", "show", "--set", "service.port=" + "9" * 5000],
    ],
)
def test_numbers_that_are_none_are_refused_and_no_fault(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) in (cli.EXIT_USAGE, cli.EXIT_INPUT)
    said = capsys.readouterr().err
    assert "unexpected" not in said
    assert "stoker" in said


@pytest.mark.parametrize(
    "text", [b"a=" + b"[" * 100_000, b"x" * 100, bytes(100), b"\xff", b"a=1\na=2"]
)
def test_a_file_that_holds_no_settings_is_refused_by_name(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.toml").write_bytes(text)
    assert cli.main(["config", "show", "--config", str(tmp_path / "settings.toml")]) == 2
    assert "settings.toml is not valid TOML" in capsys.readouterr().err
    assert cli.main(["config", "show", "--config", "/dev/zero"]) == 2
    assert "/dev/zero is longer than" in capsys.readouterr().err


@given(st.text())
def test_a_message_does_nothing_to_a_terminal(name: str) -> None:
    shown = cli._printable(name)
    assert all(sign.isprintable() or sign == "\n" for sign in shown)
    assert shown == name or not name.isprintable()


def test_a_name_of_control_characters_is_written_out(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(errors.InputError("\x1b]0;owned\x07\udcff: no such folder"))
    assert cli.main(["config"]) == 3
    assert capsys.readouterr().err == "stoker: \\x1b]0;owned\\x07\\udcff: no such folder\n"


def test_an_interrupt_and_a_closed_pipe(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(KeyboardInterrupt())
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "stoker: interrupted\n"
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    command(BrokenPipeError())
    assert cli.main(["config"]) == 1
    sys.stdout.close()
    monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_config_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_SERVICE_K_MAX", "77")
    monkeypatch.setenv("STOKER_SERVICE_API_KEYS", "acme=0123456789abcdef")
    assert cli.main(["config", "show", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert rows["service.k_max"]["value"] == 77
    assert rows["service.k_max"]["origin"] == "environment STOKER_SERVICE_K_MAX"
    assert rows["service.api_keys"]["value"] == {"acme": "***"}

    assert cli.main(["config", "show", "--changed", "--set", "service.port=1"]) == 0
    out = capsys.readouterr().out
    assert "service.port" in out
    assert "--set service.port" in out
    assert "service.host" not in out
    assert "0123456789abcdef" not in out

    assert cli.main(["config", "show", "--set", "service.prt=1"]) == 2
    assert "did you mean service.port?" in capsys.readouterr().err


# Of the client and the settings alone, which log nothing.
LOGLESS = {"warm", "config"}


@pytest.mark.parametrize(("name", "file_name"), [row[:2] for row in cli.COMMANDS])
def test_what_a_command_prints_is_not_mixed_with_the_log(name: str, file_name: str) -> None:
    """Lines of a log that nobody has configured go to standard output, into the JSON."""
    module_name = cli._module_name(name, file_name)
    assert module_name is not None
    module = importlib.import_module(module_name)
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert ("configure_logging(" in source) == (name not in LOGLESS)


def test_a_server_goes_on_when_nobody_reads_what_it_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`stoker serve | head -1`, or a file on a full disk; it ended, or ended with 1 at SIGTERM."""
    from stoker.service.commands.serve import _Teller

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    class Quiet:
        def readiness(self) -> Any:
            return argparse.Namespace(parts={})

        def warm_status(self) -> Any:
            return argparse.Namespace(state="none")

    monkeypatch.setattr(sys, "stdout", Gone())
    teller = _Teller(cast(Any, Quiet()), as_json=True)
    teller.listening("127.0.0.1", 1)
    teller.stopped()
    sys.stdout.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_sign_that_a_terminal_cannot_show_loses_no_result(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """In the locale of cron, or with a file name that is no UTF-8."""

    def run(_args: argparse.Namespace) -> int:
        print("a table's \u2026, a file's \udcff")
        return 0

    printed = io.BytesIO()
    module = argparse.Namespace(run=run)
    monkeypatch.setattr(cli, "_parse", lambda argv: (module, argparse.Namespace()))
    with io.TextIOWrapper(printed, encoding=encoding, write_through=True) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["inspect"]) == 0
        assert printed.getvalue().endswith(b"a file's ?\n")
