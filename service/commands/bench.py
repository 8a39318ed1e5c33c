"""`stoker bench coldstart`: how soon a cold replica is as fast as a warm one, by what is loaded."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

_EXAMPLES = """examples:
  stoker bench coldstart                               generated vectors and traffic
  stoker bench coldstart --vectors docs.npy --requests ragpulse/ --arrivals azure_conv.csv
  stoker bench coldstart --scenarios rebuild,drift --methods none,all,stoker --seconds 60
  stoker bench coldstart --small                       half a minute; no figures to quote

files: --vectors is .npy; --requests a RAGPulse trace, JSONL of events or an embedded log's folder;
--arrivals CSV with a column TIMESTAMP, a recording, or one number of seconds a line."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure cold starts under open-loop load, beside what people use today",
        description="Starts a replica cold, again and again, in four scenarios (restart, scale-out,"
        " rebuild, drift), while requests arrive by schedule; compares what may be loaded: nothing,"
        " files from the front, levels by id, yesterday's pages in three ways, everything, what an"
        " oracle would, and what Stoker's heat says. Prints tables, writes Markdown, JSON and"
        " plots. Takes minutes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["coldstart"], help="coldstart: the only one so far")
    parser.add_argument("--out", type=Path, help="results (default: bench-results/coldstart)")
    parser.add_argument("--small", action="store_true", help="half a minute, for a check that runs")
    parser.add_argument(
        "--vectors", dest="vectors_path", type=Path, metavar="FILE", help="real vectors"
    )
    parser.add_argument(
        "--requests", dest="requests_path", type=Path, metavar="FILE", help="what is asked"
    )
    parser.add_argument("--arrivals", dest="arrivals_path", type=Path, metavar="FILE", help="when")
    parser.add_argument("--total", type=int, metavar="N", help="vectors in all (100,000)")
    parser.add_argument("--rate", type=float, metavar="N", help="requests a second (80)")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of the traffic (20)")
    parser.add_argument("--window", dest="window_s", type=float, metavar="S", help="of the SLO (4)")
    parser.add_argument("--repeats", type=int, metavar="N", help="starts of each kind (3)")
    parser.add_argument(
        "--budget", dest="budget_ratio", type=float, metavar="RATIO", help="of the bytes (0.2)"
    )
    parser.add_argument(
        "--drift", dest="drift_ratio", type=float, metavar="RATIO", help="passages exchanged (0.5)"
    )
    parser.add_argument("--scenarios", metavar="NAME[,NAME...]", help="of the four (all)")
    parser.add_argument("--methods", metavar="NAME[,NAME...]", help="what is loaded (all)")
    parser.add_argument("--volume", choices=["cloud", "own"], help="disk (cloud: throttled)")
    parser.add_argument("--iops", dest="volume_iops", type=int, metavar="N", help="its reads/s")
    parser.add_argument(
        "--bandwidth", dest="volume_bytes_s", type=int, metavar="N", help="its bytes/s"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="that answer (2 per processor)")
    parser.add_argument("--seed", type=int, help="of all that is generated (7)")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        StokerError: a file or a value cannot be used, or a replica failed.
    """
    from stoker.service.coldstart.bench_run import run_bench
    from stoker.service.logging import configure_logging

    configure_logging("warning")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    result = run_bench(options_of(args), say)
    if args.json:
        print(json.dumps(result.document))
    else:
        print(result.markdown)
        print(f"{result.markdown_path}, {result.json_path}")
    return 0


def options_of(args: argparse.Namespace) -> Any:
    """Return what the command line asks for.

    Raises:
        ConfigError: a value is out of range.
    """
    from stoker.service.coldstart.bench_options import BenchOptions, small

    names = (
        *("out", "vectors_path", "requests_path", "arrivals_path", "total", "rate", "seconds"),
        *("window_s", "repeats", "budget_ratio", "drift_ratio", "volume", "volume_iops"),
        *("volume_bytes_s", "threads", "seed"),
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in ("scenarios", "methods"):
        if getattr(args, name):
            given[name] = tuple(getattr(args, name).split(","))
    options = BenchOptions(**given, plots=not args.no_plots)
    return small(options) if args.small else options
