"""`stoker repair`: rebuild what is damaged in an index from what is still there."""

from __future__ import annotations

import argparse
import json
from typing import Any

_SHOWN_MAX = 20
_EXIT_FAILED = 1
_EXIT_CORRUPT = 5


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "repair",
        help="rebuild what is damaged in an index from what is there",
        description="Verifies an index and rebuilds what is damaged: vectors that are whole are "
        "linked anew (or sealed anew with their links, where those are whole and no row is "
        "outdated), lost ones are taken from the documents, and what neither has is reported. "
        "Stop the server first. The new files are published in one step; a repair that was "
        "interrupted can be run again.",
        epilog="example: stoker repair ./my-index. exit codes: 0 whole, and nothing was lost; "
        "1 whole, but documents were lost; 3 no index there; 4 in use, or no room; 5 still damaged",
    )
    parser.add_argument("index", metavar="INDEX", help="folder of an index")
    parser.add_argument(
        "--metric",
        choices=("ip", "cosine", "l2"),
        help="needed only where nothing that is left says how vectors are compared",
    )


def run(args: argparse.Namespace) -> int:
    from stoker.index.repair import repair
    from stoker.service.logging import configure_logging
    from stoker.service.step_bars import step_bars

    configure_logging("warning")
    with step_bars(quiet=args.json) as progress:
        report = repair(args.index, metric=args.metric, progress=progress)
    code = _EXIT_CORRUPT if not report.whole else _EXIT_FAILED if report.rows_lost else 0
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
        return code
    if not report.repaired:
        print(f"{args.index}: whole; nothing to repair")
        return code
    for action in report.actions:
        print(f"  {action}")
    print(
        f"{args.index}: {'whole' if report.whole else 'still damaged'}; vectors kept from damaged "
        f"segments {report.rows_from_segments:,}, from documents {report.rows_from_documents:,}, "
        f"lost {report.rows_lost:,}"
    )
    for tenant, document_id in report.lost[:_SHOWN_MAX]:
        print(f"  lost: {tenant}/{document_id}")
    if len(report.lost) > _SHOWN_MAX:
        print("  and more; --json lists up to 1,000")
    return code
