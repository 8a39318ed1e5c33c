"""`stoker simulate`: run placement policies over a recorded trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stoker.prefetch.simulation import Outcome
    from stoker.prefetch.traces import Trace

_EXAMPLES = """examples:
  stoker simulate --trace requests.jsonl --format ragpulse --capacity 100,200,400,800 --policy all
  stoker simulate --trace keys.txt.gz --format lines --capacity 1%,5% --policy stoker,lru,s3-fifo
  stoker simulate --trace events.jsonl --format events --capacity 500 --warm-until 1d --json
  stoker simulate --made drift:1 --tiers 100,400 --warm-until 20%

formats: ragpulse, mooncake (JSON lines of those data sets), events (one CloudEvents envelope a
line), lines (one key a line), int32be, int64be (big-endian integers). gzip and xz are read.
policies: stoker (ours, with its defaults), lru, lfu-decay, w-tinylfu, s3-fifo, sieve, arc, lru-k,
area, belady, qlearning (needs torch), entropy-lru-k, entropy-regime, and others of libcachesim;
all = ours, the eight before belady, and belady. With --tiers: qlearning, lru, frequency, oracle;
all = these four.
made traces: drift:SEED (popularity that drifts, sessions, one-offs), jobs:SEED (half of it a job
that comes back); with :mixed, keys of three sizes."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="run cache policies over a recorded trace",
        description="Replay a trace through placement policies, from the past alone, and compare "
        "hit ratios with the best possible one (Belady's). Reference policies need the package "
        "libcachesim; our own does not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="the trace")
    source.add_argument("--made", metavar="KIND:SEED", help="a made trace instead, see below")
    parser.add_argument("--format", help="what the file holds, see below")
    room = parser.add_mutually_exclusive_group(required=True)
    room.add_argument(
        "--capacity",
        metavar="N[,N...]",
        help="room in keys, or a share of the trace's different keys (5%%)",
    )
    room.add_argument(
        "--tiers",
        metavar="GPU,HOST",
        help="compare placements over GPU, host and NVMe, with so much room on the first two",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME[,NAME...]",
        help="policies, or all (stoker; with --tiers: all)",
    )
    parser.add_argument(
        "--warm-until",
        metavar="T",
        help="measure only from T on: seconds since the start (also 30m, 12h, 2d), a share of the "
        "accesses (50%%), or, in traces without times, a number of accesses",
    )
    parser.add_argument(
        "--unit-bytes", type=int, default=4096, help="size of one key's unit in bytes (4096)"
    )
    parser.add_argument(
        "--explain",
        metavar="KEY[,KEY...]",
        help="with --tiers: why these keys (numbers by first access) end where they do",
    )
    parser.add_argument("--json", action="store_true", help="print machine-readable JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        InputError: the trace or an argument cannot be taken.
        UnavailableError: a policy is asked for whose package (libcachesim, torch) is not there.
    """
    from stoker.errors import InputError
    from stoker.prefetch.drifting import made_trace
    from stoker.prefetch.simulation import (
        measured_mask,
        parse_capacities,
        parse_policies,
        simulate,
    )
    from stoker.prefetch.traces import read_trace
    from stoker.service.logging import configure_logging

    configure_logging("warning")
    if args.explain is not None and not args.tiers:
        raise InputError("--explain goes with --tiers: without, nothing says where a key lies")
    if args.made and args.format:
        raise InputError("--format says what --trace holds; a made trace has none: leave it out")
    if args.unit_bytes < 1:
        raise InputError(f"--unit-bytes must be >= 1, got {args.unit_bytes}")
    sizes = None
    if args.made:
        made = made_trace(args.made)
        trace, sizes = made.trace, made.sizes
    elif args.format:
        trace = read_trace(args.trace, args.format)
    else:
        raise InputError("--format: expected what the trace holds, see --help")
    measured = measured_mask(trace, args.warm_until)
    if args.tiers:
        return _run_tiers(args, trace, sizes, measured)
    outcomes = simulate(
        trace,
        policies=parse_policies("stoker" if args.policy is None else args.policy),
        capacities=parse_capacities(args.capacity, trace.footprint),
        measured=measured,
        unit_bytes=args.unit_bytes,
    )
    if args.json:
        _print_json(args, trace, outcomes)
        return 0
    print(f"{len(trace):,} accesses to {trace.footprint:,} keys")
    _print_table(outcomes)
    return 0


def _print_json(args: argparse.Namespace, trace: Trace, outcomes: Sequence[Any]) -> None:
    print(
        json.dumps(
            {
                "trace": args.made or str(args.trace),
                "accesses": len(trace),
                "footprint": trace.footprint,
                "requests": int(trace.requests[-1]) + 1,
                "results": [dataclasses.asdict(outcome) for outcome in outcomes],
            },
            indent=2,
        )
    )


def _run_tiers(
    args: argparse.Namespace,
    trace: Trace,
    sizes: NDArray[np.float64] | None,
    measured: NDArray[np.bool_],
) -> int:
    from stoker.errors import InputError
    from stoker.prefetch.tier_simulation import TIERED, parse_rooms, simulate_tiers

    policies: list[str] = []
    for word in ("all" if args.policy is None else args.policy).split(","):
        policies += TIERED if word.strip() == "all" else [word.strip()]
    gpu_room, host_room = parse_rooms(args.tiers, trace.footprint)
    try:
        explain = [] if args.explain is None else [int(word) for word in args.explain.split(",")]
    except ValueError as error:
        raise InputError(f"--explain {args.explain!r}: expected key numbers") from error
    for key in explain:
        if not 0 <= key < trace.footprint:
            raise InputError(
                f"--explain: key {key} is not in the trace, whose {trace.footprint:,} keys are "
                "numbered from 0 by first access"
            )
    outcomes = simulate_tiers(
        trace,
        policies=list(dict.fromkeys(policies)),
        gpu_room=gpu_room,
        host_room=host_room,
        measured=measured,
        sizes=sizes,
        explain=explain,
    )
    if args.json:
        _print_json(args, trace, outcomes)
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("GPU", "host", "us a read", "with moves", "moves", "of oracle", "seconds"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        share = "-" if outcome.oracle_share is None else f"{outcome.oracle_share:.3f}"
        table.add_row(
            outcome.policy,
            f"{outcome.gpu_ratio:.3f}",
            f"{outcome.host_ratio:.3f}",
            f"{outcome.read_us:.2f}",
            f"{outcome.total_us:.2f}",
            f"{outcome.moves_per_access:.2f}",
            share,
            f"{outcome.seconds:.1f}",
        )
    print(f"{len(trace):,} accesses to {trace.footprint:,} keys; room {gpu_room:g} + {host_room:g}")
    Console(markup=False, highlight=False).print(table)
    for outcome in outcomes:
        for reason in outcome.explained:
            print(json.dumps(reason))
    return 0


def _print_table(outcomes: Sequence[Outcome]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("capacity", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in ("hit ratio", "of Belady", "MiB asked", "MiB ahead", "useful", "seconds"):
        table.add_column(name, justify="right")
    before = None
    for outcome in outcomes:
        if before not in (None, outcome.capacity):
            table.add_section()
        before = outcome.capacity
        share = "-" if outcome.belady_share is None else f"{outcome.belady_share:.3f}"
        issued = outcome.prefetch.get("issued", 0)
        useful = f"{outcome.prefetch['useful'] / issued:.1%}" if issued else "-"
        table.add_row(
            f"{outcome.capacity:,}",
            outcome.policy,
            f"{outcome.hit_ratio:.4f}",
            share,
            f"{outcome.bytes_demand / (1 << 20):,.1f}",
            f"{outcome.bytes_ahead / (1 << 20):,.1f}",
            useful,
            f"{outcome.seconds:.1f}",
        )
    Console(markup=False, highlight=False).print(table)
