"""`stoker warm`: warm a running server, or show what it has loaded and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from stoker.errors import InputError, StokerError

if TYPE_CHECKING:
    from stoker.service.answers import WarmupStatus

_POLL_S = 0.2


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "warm",
        help="warm a running server, or show what it has loaded and why",
        description="Starts a warm-up in a running server and prints its receipt: planned, loaded, "
        "skipped and why, predicted and measured hit ratio. With --show, or an order to one that "
        "runs, it starts none.",
        epilog="example: stoker warm --budget 200MiB --deadline 30",
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("STOKER_CLIENT_URL", "http://127.0.0.1:8080"),
        help="the server (default: STOKER_CLIENT_URL, or %(default)s)",
    )
    steering = parser.add_mutually_exclusive_group()
    steering.add_argument(
        "--show", action="store_true", help="only show the state and the last receipt"
    )
    for action, text in (
        ("pause", "let the one that runs load nothing more until it is resumed"),
        ("resume", "let it go on"),
        ("reprioritise", "plan what it has left by the heat as it is now"),
        ("cancel", "end it; what is loaded stays"),
    ):
        steering.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=text
        )
    parser.add_argument("--budget", metavar="SIZE", help="bytes to load at most, e.g. 200MiB")
    parser.add_argument(
        "--deadline", metavar="SECONDS", type=float, help="load nothing more after so long"
    )
    parser.add_argument(
        "--everything", action="store_true", help="load all that fits, not only what is hot"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="return once it runs, without the receipt"
    )
    parser.epilog = (
        f"{parser.epilog}. Where the server asks for keys, the operator's key is read from "
        "STOKER_CLIENT_KEY"
    )


def run(args: argparse.Namespace) -> int:
    from stoker.service.client import Client
    from stoker.service.setting_values import parse_value

    budget = None
    if args.budget is not None:
        budget = parse_value("budget_bytes", args.budget, int, "--budget")
        if budget < 1:
            raise InputError(f"--budget: expected at least 1 byte, found {args.budget}")
    key = os.environ.get("STOKER_CLIENT_KEY") or None
    with Client(args.url, key=key) as client:
        if args.show:
            status = client.warmup()
        elif args.action:
            status = client.steer_warmup(args.action)
        else:
            status = client.start_warmup(
                budget_bytes=budget, deadline_s=args.deadline, everything=args.everything
            )
            if not args.no_wait:
                status = _finished(client, status, quiet=args.json)
    if args.json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
    else:
        print(_text(status))
    return 1 if status.state == "failed" else 0


def _finished(client: Any, status: WarmupStatus, *, quiet: bool) -> WarmupStatus:
    import time

    from rich.console import Console

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty(), highlight=False)
    with console.status("warming") as line:
        while status.state == "running":
            progress = status.progress or {}
            mib = progress.get("bytes_read", 0) / (1 << 20)
            line.update(f"warming: {mib:,.1f} MiB read")
            time.sleep(_POLL_S)
            status = client.warmup()
    return status


def _text(status: WarmupStatus) -> str:
    from stoker.prefetch.receipt import Receipt

    paused = bool(status.progress and status.progress.get("paused"))
    lines = [f"state: {'paused' if paused else status.state}"]
    if status.error:
        lines.append(f"error: {status.error}")
    if status.receipt is None:
        lines.append("no warm-up has finished in this server yet")
    else:
        try:
            lines.append(Receipt.from_json(json.dumps(dict(status.receipt))).render().rstrip())
        except StokerError:  # of a newer server
            lines.append(json.dumps(dict(status.receipt), indent=2))
    return "\n".join(lines)
