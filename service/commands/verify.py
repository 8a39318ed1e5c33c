"""`stoker verify`: check every checksum of an index and name what is damaged."""

from __future__ import annotations

import argparse
import json
from typing import Any

_MIB = float(1 << 20)
_SHOWN_MAX = 50
_EXIT_CORRUPT = 5


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check every checksum of an index, name what is damaged",
        description="Reads every file of an index and checks all that has a checksum: each page of "
        "each segment, and each document. Changes nothing; a server may use the index meanwhile.",
        epilog="example: stoker verify ./my-index || stoker repair ./my-index. exit codes: 0 "
        "whole, 3 no index there, 5 damaged",
    )
    parser.add_argument("index", metavar="INDEX", help="folder of an index")


def run(args: argparse.Namespace) -> int:
    from stoker.index.verify import verify
    from stoker.service.logging import configure_logging
    from stoker.service.step_bars import step_bars

    configure_logging("warning")
    with step_bars(quiet=args.json) as report:
        found = verify(args.index, progress=report)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0 if found.whole else _EXIT_CORRUPT
    checked = f"{len(found.segments)} segments, {found.bytes_checked / _MIB:,.1f} MiB"
    if found.whole:
        print(f"{args.index}: whole ({checked})")
        return 0
    print(f"{args.index}: damaged ({checked})")
    for damage in found.damage[:_SHOWN_MAX]:
        place = damage.file if damage.page is None else f"{damage.file}, page {damage.page}"
        kind = " (only repeats what other files say)" if damage.derived else ""
        print(f"  {place}: {damage.what}{kind}")
    if len(found.damage) > _SHOWN_MAX:
        print(f"  and {len(found.damage) - _SHOWN_MAX:,} more; --json lists them")
    print(f"`stoker repair {args.index}` rebuilds it from what is there")
    return _EXIT_CORRUPT
