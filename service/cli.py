"""The `stoker` command: finds the sub-command, runs it, turns errors into one clear line.

Only the module of the sub-command that was asked for is imported, so `stoker --help` stays quick
however heavy the others are. A module in `stoker.service.commands` has two functions,
`add_parser(subparsers) -> None` and `run(args) -> int`; a row here gives it its place and one line.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import json
import os
import stat
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from stoker.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    InputError,
    StokerError,
    UnavailableError,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_UNAVAILABLE = 4
EXIT_CORRUPT = 5
EXIT_INTERRUPTED = 130

# Most derived first is not needed: the five branches of the tree do not overlap.
_EXIT_CODES: tuple[tuple[type[StokerError], int], ...] = (
    (ConfigError, EXIT_USAGE),
    (InputError, EXIT_INPUT),
    (CapacityError, EXIT_UNAVAILABLE),
    (UnavailableError, EXIT_UNAVAILABLE),
    (CorruptError, EXIT_CORRUPT),
)

# name, module (where the name is no identifier), one line for `stoker --help`.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("demo", "demo", "the whole story on real text: index, traffic, restart, compare"),
    ("index", "index", "build an index from folders, JSONL, Parquet or .npy"),
    ("import", "import_", "take over an index that another library built"),
    ("verify", "verify", "check every checksum of an index, name what is damaged"),
    ("repair", "repair", "rebuild what is damaged in an index from what is there"),
    ("inspect", "inspect", "show what an index folder holds"),
    ("serve", "serve", "answer searches over HTTP, warmed before the first one"),
    ("warm", "warm", "warm a running server, or show what it has loaded and why"),
    ("replay", "replay", "send recorded or generated traffic to a server"),
    ("simulate", "simulate", "run cache policies over a recorded trace"),
    ("plan", "plan", "show what a warm-up would load within a budget"),
    ("reuse", "reuse", "measure semantic lookup reuse and its error rate"),
    ("bench", "bench", "run the cold-start benchmark"),
    ("doctor", "doctor", "look whether a server would run here, and say what to do"),
    ("config", "config", "show the effective settings and where each came from"),
)

# What an argument that names a file or folder is called in `--help`.
_FILE_METAVARS = frozenset({"DIR", "FILE", "FILE.jsonl", "FILE.npy", "INDEX", "LOG", "PATH"})
# Lists that are read in one go: a shell may hand them over by an open pipe, as <(...) does.
_READ_AT_ONCE = frozenset({"chunk_ids", "vector_ids"})
_OPEN_FILES = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")
_SERVER_FLAGS = frozenset({"--kafka", "--url"})
_HELP_COLUMNS = 78
_EXITS = "exit codes: 0 ok, 1 failed, 2 usage, 3 bad input, 4 unavailable, 5 corrupt"


class CommandModule(Protocol):
    """What a module in `stoker.service.commands` offers."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Any]) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are JSON when the command line asked for JSON."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if _Parser.as_json:
            _print_problem({"kind": "usage", "detail": message, "exit": EXIT_USAGE})
            sys.exit(EXIT_USAGE)
        text = _printable(message)
        self.exit(EXIT_USAGE, f"{self.prog}: {text}\n{self.prog}: see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `stoker` command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _Parser.as_json = "--json" in argv
    verbose = "--verbose" in argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In a locale without UTF-8, as cron has, one sign of a table would lose the whole result.
        sys.stdout.reconfigure(errors="replace")
    try:
        module, args = _parse(argv)
        if module is None:
            return EXIT_OK
        return module.run(args)
    except SystemExit as stop:  # argparse, after it has printed help or a usage error
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error worth a message. The interpreter would
        # complain again while it flushes at exit, so stdout is pointed elsewhere.
        sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: SIM115
        return EXIT_FAILED
    except Exception as error:
        return _report(error, verbose=verbose)


def exit_code(error: BaseException) -> int:
    """Return the exit code that a script sees for ``error``."""
    for error_class, code in _EXIT_CODES:
        if isinstance(error, error_class):
            return code
    return EXIT_FAILED


def _parse(argv: list[str]) -> tuple[CommandModule | None, argparse.Namespace]:
    parser = _Parser(
        prog="stoker",
        description="Keeps the part of a RAG system that the next requests need in fast memory.",
        epilog=f"`stoker COMMAND --help` explains one command. {_EXITS}",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks of errors")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Parser
    )
    wanted = next((word for word in argv if not word.startswith("-")), None)
    module: CommandModule | None = None
    names: list[argparse.Action] = []
    for name, file_name, line in COMMANDS:
        module_name = _module_name(name, file_name)
        if module_name is None:
            continue
        if name == wanted:
            module = cast(CommandModule, importlib.import_module(module_name))
            module.add_parser(subparsers)
            _add_common_flags(subparsers.choices[name])
            names = _names_of_files(subparsers.choices[name])
            _refuse_empty(names)
            _refuse_no_server(subparsers.choices[name])
        else:
            subparsers.add_parser(name, help=line)
    if wanted is not None and wanted not in subparsers.choices:
        parser.error(f"unknown command {wanted!r}{_suggestion(wanted, subparsers.choices)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = subparsers.choices.get(wanted or "", parser)._option_string_actions
        parser.error(f"unknown argument {unknown[0]!r}{_suggestion(unknown[0], flags)}")
    _refuse_special_files(names, args)
    # A flag may stand before the command too; argparse would let the command's default win.
    args.json = _Parser.as_json
    args.verbose = "--verbose" in argv
    if args.version:
        from stoker import __version__

        print(json.dumps({"version": __version__}) if _Parser.as_json else f"stoker {__version__}")
        return None, args
    if module is None:
        parser.print_help()
        return None, args
    return module, args


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _module_name(name: str, file_name: str) -> str | None:
    """Name the command's module, or None where it is not part of this installation."""
    folder = Path(__file__).with_name("commands")
    for stem in (file_name, name):
        if (folder / f"{stem}.py").exists():
            return f"stoker.service.commands.{stem}"
    return None


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("--json", "print machine-readable JSON, errors too"),
        ("--verbose", "show tracebacks of errors"),
    ):
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, action="store_true", help=text)
    laid_out = parser.formatter_class is argparse.RawDescriptionHelpFormatter
    if laid_out and parser.description:  # its epilog keeps its lines, its description need not
        parser.description = textwrap.fill(parser.description, _HELP_COLUMNS)
    if "exit codes" not in (parser.epilog or ""):
        between = "\n\n" if laid_out else ". "
        parser.epilog = f"{parser.epilog}{between}{_EXITS}" if parser.epilog else _EXITS


def _names_of_files(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments that name files or folders."""
    found: list[argparse.Action] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += _names_of_files(inner)
        elif action.type is Path or (action.type is None and action.metavar in _FILE_METAVARS):
            found.append(action)
    return found


def _refuse_empty(names: Iterable[argparse.Action]) -> None:
    """Let arguments that name a file or folder refuse an empty one.

    `Path("")` is the folder that one is in: with `stoker repair "$INDEX"` and a variable that is
    not set, another index than the one that was meant.
    """
    for action in names:
        action.type = _path if action.type is Path else _file_name


def _refuse_no_server(parser: argparse.ArgumentParser) -> None:
    """Let flags that name a server refuse an empty name.

    `stoker serve INDEX --kafka "$KAFKA"` with a variable that is not set would keep events on this
    disk instead, and say nothing.
    """
    for flag, action in parser._option_string_actions.items():
        if flag in _SERVER_FLAGS:
            action.type = _server


def _refuse_special_files(names: Iterable[argparse.Action], args: argparse.Namespace) -> None:
    """Raise InputError where an argument names a pipe, a device or a socket.

    A pipe that nobody writes to would be waited for, and /dev/zero has no end. Settings are read in
    one go and within a bound, and may come by any pipe; lists of ids by one that is open already.
    """
    for action in names:
        given = getattr(args, action.dest, None)
        if given is None or action.dest == "config":
            continue
        for name in given if isinstance(given, list) else [given]:
            try:
                mode = os.stat(name).st_mode
            except (OSError, ValueError):
                continue  # its command says what it misses
            handed_over = stat.S_ISFIFO(mode) and str(name).startswith(_OPEN_FILES)
            if handed_over and action.dest in _READ_AT_ONCE:
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InputError(
                    f"{name}: expected a file or folder, found a pipe, device or socket"
                )


def _server(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "expected a server, found an empty name (of a variable that is not set, perhaps)"
        )
    return text


def _path(text: str) -> Path:
    return Path(_file_name(text))


def _file_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(
            "expected the name of a file or folder, found an empty one (of a variable that is not "
            "set, perhaps)"
        )
    return text


def _report(error: Exception, *, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exception(error)
    code = exit_code(error)
    detail = _one_line(error)
    kind = _kind(error)
    if _Parser.as_json:
        _print_problem(
            {
                "kind": kind,
                "detail": detail,
                "where": getattr(error, "where", ""),
                "action": getattr(error, "action", ""),
                "exit": code,
            }
        )
    elif isinstance(error, (StokerError, OSError)):
        _say(detail)
    else:
        _say(f"unexpected {detail}; run again with --verbose for the traceback, and report it")
    return code


def _kind(error: Exception) -> str:
    for error_class, code in _EXIT_CODES:
        if isinstance(error, error_class):
            return {
                EXIT_USAGE: "config",
                EXIT_INPUT: "bad-input",
                EXIT_UNAVAILABLE: "capacity" if error_class is CapacityError else "unavailable",
                EXIT_CORRUPT: "corrupt",
            }[code]
    return "failed"


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, StokerError):
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror or error}"
    text = " ".join(str(error).split())
    action = getattr(error, "action", None)
    if isinstance(action, str) and action and action not in text:
        text = f"{text}; {action}"
    if isinstance(error, StokerError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"


def _print_problem(members: dict[str, Any]) -> None:
    kind = members.pop("kind")
    problem = {"type": f"urn:stoker:problem:{kind}", "title": kind, **members}
    print(json.dumps({k: v for k, v in problem.items() if v != ""}), file=sys.stderr)


def _say(text: str) -> None:
    print(f"stoker: {_printable(text)}", file=sys.stderr)


def _printable(text: str) -> str:
    """Write out what a terminal would act on: a file's name may hold any character."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode()
        for sign in text
    )


if __name__ == "__main__":
    sys.exit(main())
