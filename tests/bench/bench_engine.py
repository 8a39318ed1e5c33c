"""The index engine beside its peers, in one run: warm, cold, and under a memory budget.

    python tests/bench/bench_engine.py --count 100000 --out bench-results/engine
    python tests/bench/bench_engine.py --count 1000000 --parts warm,cold
    python tests/bench/bench_engine.py --parts growth --growth 100000,300000,1000000

Vectors: `engine_data`. Every figure comes from a fresh process; indexes are built once and kept
under --work. Results: results.json, results.md, and plots. Parts: warm, cold, budget, growth (only
with --growth), ordering, sealing. Times of a machine on which others work are noise; the results
say how much of it they used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.service.logging import configure_quietly

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_data import EPOCH_MOVES, EPOCH_QUERIES, PADS, REAL_DIM, corpus, facts, questions
from engine_growth import growth, parse_sizes
from engine_machine import machine, read_ahead, versions
from engine_ordering import ordering
from engine_parts import TARGETS, BudgetPlan, Efforts, budget, cold, streams, volumes_of, warm
from engine_peers import PEERS
from engine_plots import draw
from engine_report import render
from engine_run import Bench, available, peer_versions, say
from engine_sealing import sealing


def main(argv: list[str] | None = None) -> int:
    """Measure, write, print."""
    args = arguments(argv)
    configure_quietly()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(args.work or out / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    peers = [peer for peer in args.peers.split(",") if available(peer)]
    text = ""
    # Written after each part: a run of hours may be stopped.
    for results in measure(args, work, peers):
        (out / f"{args.name}.json").write_text(json.dumps(results, indent=1))
        text = render(results)
        (out / f"{args.name}.md").write_text(text)
    print(text)
    for plot in draw(results, out):
        say(f"plot: {plot}")
    return 0


def measure(args: argparse.Namespace, work: Path, peers: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the results so far, after each part that was asked for."""
    parts = args.parts.split(",")
    vectors = corpus(args.count, args.dim, work, args.pads)
    asked = questions(vectors, args.queries, work)
    bench = Bench(work, vectors, peers)
    efforts = Efforts(bench)
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "versions": versions() | peer_versions(peers),
        "corpus": facts(vectors) | {"pads": args.pads},
        "peers": peers,
        "settings": {
            "epoch_queries": EPOCH_QUERIES,
            "epoch_moves": EPOCH_MOVES,
            "learnt": args.learnt,
            "settle": args.settle,
        },
        "build_s": {peer: bench.build(peer) for peer in peers},
        "bytes": {peer: bench.bytes_of(peer) for peer in peers},
    }
    if "warm" in parts:
        results["warm"] = warm(bench, asked, args.repeats)
        yield results
    volumes = volumes_of(args.volumes)
    with read_ahead(work, 128) as note:
        results["machine"]["read_ahead"] = note
        if "cold" in parts:
            results["cold"] = cold(bench, asked, efforts, args.repeats, volumes)
            yield results
        if "budget" in parts or "ordering" in parts:
            both = streams(bench, asked, learnt=args.learnt, asked=args.queries)
        if "budget" in parts:
            plan = BudgetPlan(
                shares=[float(share) for share in args.shares.split(",")],
                targets=[float(target) for target in args.targets.split(",")],
                repeats=args.repeats,
                seconds_max=args.seconds,
                settle=args.settle,
                volumes=volumes_of(args.budget_volumes),
            )
            results["budget"] = budget(bench, both, efforts, plan)
            yield results
        if "ordering" in parts:
            results["ordering"] = ordering(
                bench,
                both["skewed"],
                settle=args.settle,
                seconds_max=args.seconds,
            )
    if "sealing" in parts:
        results["sealing"] = sealing(bench, args.repeats)
        yield results
    if args.growth:
        several = [peer for peer in peers if peer in args.growth_peers.split(",")]
        results["growth"] = growth(parse_sizes(args.growth), several, work, args.repeats, args.pads)
    results["efforts"] = efforts.all()
    yield results


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--count", type=int, default=100_000, help="vectors")
    add("--dim", type=int, default=REAL_DIM, help="dimensions")
    add("--pads", choices=PADS, default="local", help="how vectors are generated")
    add("--queries", type=int, default=2_000, help="in each stream")
    add("--repeats", type=int, default=3)
    add("--peers", default=",".join(PEERS))
    add("--parts", default="warm,cold,budget,ordering,sealing")
    add("--volumes", default="own,cloud", help="disks of the cold part")
    add("--shares", default="0.1,0.2,0.5", help="budgets, of the index's bytes")
    add("--targets", default=",".join(map(str, TARGETS)), help="recalls of the budget part")
    add("--budget-volumes", default="own", help="disks of the budget part: own, cloud")
    add("--seconds", type=float, default=20.0, help="longest measured stretch under a budget")
    add("--learnt", type=int, default=10_000, help="earlier queries that heat is learnt from")
    add("--settle", type=int, default=500, help="unmeasured queries under a budget")
    add("--growth", default="", help="sizes, as 100000,300000,1000000,3000000x128")
    add("--growth-peers", default="stoker,hnswlib")
    add("--out", default="bench-results/engine")
    add("--name", default="results", help="of the JSON and the Markdown file")
    add("--work", help="where indexes are kept between runs; OUT/work unless given")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
