"""`stoker config show`: the effective settings, and where each came from."""

from __future__ import annotations

import argparse
import json
from typing import Any

from stoker.service.configuration import add_config_flags, config_from_args


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="show the effective settings and where each came from",
        description="Settings come from defaults, then a TOML file, then STOKER_<ROOM>_<KEY> in "
        "the environment, then flags; a later one wins. Secrets are never printed.",
    )
    parser.add_argument("action", choices=["show"], help="show: print every setting")
    parser.add_argument(
        "--changed", action="store_true", help="only settings that are not at their default"
    )
    parser.add_argument("--explain", action="store_true", help="with what each setting does")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the settings.

    Raises:
        ConfigError: the settings do not load; the message names the key and the place.
    """
    rows = config_from_args(args).rows()
    if args.changed:
        rows = [row for row in rows if row["origin"] != "default"]
    if args.json:
        print(json.dumps({"settings": rows}, indent=2))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    if args.explain:
        table.add_column("what it does", overflow="fold")
    for row in rows:
        cells = [row["key"], json.dumps(row["value"]), row["origin"]]
        table.add_row(*cells, *([row["help"]] if args.explain else []))
    Console(markup=False, highlight=False).print(table)
    return 0
