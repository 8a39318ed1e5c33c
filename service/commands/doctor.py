"""`stoker doctor`: look whether a server would run here, and say what to do where not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import ConfigError
from stoker.service.configuration import add_config_flags, config_from_args

if TYPE_CHECKING:
    from stoker.service.doctor import Check


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="look whether a server would run here, and say what to do",
        description="Looks at what `stoker serve` needs with the same settings: configuration, "
        "index, model, state folder, disk, how pages can be read, broker and topics, clock. "
        "Changes nothing; a server may run beside it.",
        epilog="example: stoker doctor ./my-index --config stoker.toml. exit codes: 0 a server "
        "would run (warnings included), 1 a check failed, 2 usage",
    )
    parser.add_argument(
        "index", metavar="INDEX", nargs="?", help="folder of the index to serve (default: none)"
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line per check; return 1 where one failed."""
    from stoker.service.doctor import Check, examine
    from stoker.service.logging import configure_logging

    configure_logging("error")
    checks: list[Check] = []

    def found(check: Check) -> None:
        checks.append(check)
        if not args.json:
            _show(check)

    try:
        config = config_from_args(args).config
    except ConfigError as error:
        found(Check("configuration", "fail", str(error), "see `stoker config show --explain`"))
    else:
        found(Check("configuration", "ok", "read, and its parts go together"))
        for check in examine(config, Path(args.index) if args.index else None):
            found(check)
    failed = sum(check.state == "fail" for check in checks)
    if args.json:
        rows = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"ok": not failed, "checks": rows}, indent=2))
    elif failed:
        print(f"{failed} of {len(checks)} checks failed")
    else:
        print("a server would run here")
    return 1 if failed else 0


def _show(check: Check) -> None:
    print(f"{check.state:4}  {check.name}: {check.found}", flush=True)
    if check.action:
        print(f"      do: {check.action}", flush=True)
