"""`stoker plan`: what a warm-up would load within a budget, and why."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.service.configuration import add_config_flags, config_from_args

if TYPE_CHECKING:
    from stoker.prefetch.heat import HeatGraph
    from stoker.prefetch.plan import WarmPlan
    from stoker.prefetch.protocols import ContentKey, UnitBatch, WarmSource

_MIB = float(1 << 20)
_POOL_BYTES = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "plan",
        help="show what a warm-up would load within a budget",
        description="Plans a warm-up of an index folder from the heat that a server over it has "
        "saved, and loads nothing. --explain says why a chunk is where it is.",
        epilog="example: stoker plan ./my-index --budget-mib 64 --explain guide-12",
    )
    parser.add_argument("index", metavar="INDEX", help="folder that `stoker index` made")
    parser.add_argument(
        "--budget-mib",
        type=float,
        metavar="N",
        help="bytes that may be loaded, in MiB (default: prefetch.warm_budget_ratio of all pages)",
    )
    parser.add_argument("--bandwidth-mib-s", type=float, metavar="N", help="what the device gives")
    parser.add_argument("--deadline-s", type=float, metavar="S", help="seconds for loading")
    parser.add_argument("--explain", metavar="CHUNK", help="say why this chunk is where it is")
    parser.add_argument("--tenant", default="default", help="whose chunk it is (default)")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Make and print the plan.

    Raises:
        InputError: the folder is no index, or a limit is malformed.
        CorruptError: the saved heat or the index is damaged.
    """
    from stoker.errors import InputError
    from stoker.index.collection import Collection
    from stoker.prefetch.coverage_curve import KNOWN
    from stoker.prefetch.held_back import unit_coverage
    from stoker.prefetch.plan import plan_warm
    from stoker.service.collection_index import CollectionIndex
    from stoker.service.logging import configure_logging

    configure_logging("warning")
    config = config_from_args(args).config
    if args.budget_mib is not None and not 0.0 <= args.budget_mib * _MIB < math.inf:
        raise InputError(f"--budget-mib must be finite and >= 0, got {args.budget_mib}")
    path = Path(args.index)
    now_s = time.time()
    with Collection(path, "r", memory_bytes=_POOL_BYTES) as collection:
        graph = _saved_heat(path, config)
        demand = {} if graph is None else graph.demand(now_s)
        source = CollectionIndex(collection)
        batches = source.unit_batches(demand)
        total = sum(len(batch.units) * batch.unit_bytes for batch in batches)
        budget = (
            config.prefetch.warm_budget_bytes(total)
            if args.budget_mib is None
            else int(args.budget_mib * _MIB)
        )
        bandwidth = None if args.bandwidth_mib_s is None else args.bandwidth_mib_s * _MIB
        started = time.perf_counter()
        coverage = KNOWN
        if graph is not None and demand:
            tried = unit_coverage(batches, [source], graph.held_back_later(now_s)())
            coverage = graph.coverage(now_s) if tried is None else tried
        # As a server with these settings would: its pool is not the one that is open here.
        room = config.index.memory_bytes or total
        whole = args.deadline_s is None and total <= room
        plan = plan_warm(
            batches,
            budget_bytes=budget,
            bandwidth_bytes_s=bandwidth,
            deadline_s=args.deadline_s,
            round_bytes=config.prefetch.plan_round_bytes,
            coverage=coverage,
            roomy={batch.source for batch in batches} if whole else (),
        )
        facts = _facts(plan, batches, budget, total, len(demand), time.perf_counter() - started)
        if args.explain is not None:
            key = (args.tenant, args.explain)
            # A server has no use for PageRank and keeps none: it is derived here.
            while graph is not None and not graph.tick(now_s):
                pass
            facts["explain"] = _explain(key, graph, now_s, config, source, plan)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def _saved_heat(path: Path, config: Any) -> HeatGraph | None:
    from stoker.prefetch.heat import HeatGraph
    from stoker.service.engine_opening import HEAT_NAME, state_folder
    from stoker.service.snapshot_file import read_snapshot

    snapshot = read_snapshot(state_folder(path, config.service) / HEAT_NAME)
    return None if snapshot is None else HeatGraph.from_snapshot(snapshot[1], config.prefetch)


def _facts(
    plan: WarmPlan,
    batches: Sequence[UnitBatch],
    budget: int,
    total: int,
    heat_keys: int,
    seconds: float,
) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {}
    for batch in batches:
        row = kinds.setdefault(
            f"{batch.source}/{batch.kind}",
            {"offered": 0, "planned": 0, "planned_bytes": 0, "skipped": {}, "reasons": []},
        )
        row["offered"] += len(batch.units)
    for step in plan.steps:
        row = kinds[f"{step.source}/{step.kind}"]
        row["planned"] += len(step.units)
        row["planned_bytes"] += step.bytes
        if step.reason not in row["reasons"]:
            row["reasons"].append(step.reason)
    for skip in plan.skips:
        skipped = kinds[f"{skip.source}/{skip.kind}"]["skipped"]
        skipped[skip.reason] = skipped.get(skip.reason, 0) + skip.units
    return {
        "total_bytes": total,
        "budget_bytes": budget,
        "limit_bytes": plan.limit_bytes,
        "planned_bytes": plan.planned_bytes,
        "predicted_hit_ratio": plan.predicted_hit_ratio,
        "heat_keys": heat_keys,
        "plan_ms": seconds * 1e3,
        "kinds": kinds,
    }


def _units_of(source: WarmSource, key: ContentKey) -> dict[tuple[str, str], list[int]]:
    """Return the units that a chunk lives on, by source and kind: those that its heat raises."""
    plain: dict[tuple[str, str, int], float] = {}
    for batch in source.unit_batches({}):
        for unit, benefit in zip(batch.units.tolist(), batch.benefit.tolist(), strict=True):
            plain[batch.source, batch.kind, unit] = benefit
    found: dict[tuple[str, str], list[int]] = {}
    for batch in source.unit_batches({key: 1.0}):
        gains = {
            unit: benefit - plain[batch.source, batch.kind, unit]
            for unit, benefit in zip(batch.units.tolist(), batch.benefit.tolist(), strict=True)
        }
        top = max(gains.values(), default=0.0)
        if top > 1e-9:
            found[batch.source, batch.kind] = [u for u, g in gains.items() if g >= 0.5 * top][:4]
    return found


def _explain(
    key: ContentKey,
    graph: HeatGraph | None,
    now_s: float,
    config: Any,
    source: WarmSource,
    plan: WarmPlan,
) -> dict[str, Any]:
    from stoker.prefetch.score import tier_advice

    heat: Mapping[str, Any] | None = None if graph is None else graph.explain(key, now_s)
    where = [
        plan.explain(room, kind, unit)
        for (room, kind), units in _units_of(source, key).items()
        for unit in units
    ]
    told: dict[str, Any] = {"tenant": key[0], "chunk": key[1], "heat": None, "pages": where}
    if heat is not None:
        advice = tier_advice(
            heat["score"],
            fast_threshold=config.prefetch.heat_fast_threshold,
            queue_threshold=config.prefetch.heat_queue_threshold,
        )
        told["heat"] = {
            **heat,
            "leads_to": [[chunk, share] for (_, chunk), share in heat["leads_to"][:5]],
            "advice": advice.value,
        }
    return told


def _print(facts: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, soft_wrap=True)
    heat = f"heat of {facts['heat_keys']:,} chunks" if facts["heat_keys"] else "no heat saved"
    console.print(
        f"plan: {facts['planned_bytes'] / _MIB:.1f} of {facts['total_bytes'] / _MIB:.1f} MiB "
        f"(budget {facts['budget_bytes'] / _MIB:.1f}), {heat}; "
        f"predicted hit ratio {facts['predicted_hit_ratio']:.3f}"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("pages", "offered", "planned", "MiB", "left out", "why"):
        table.add_column(name, justify="left" if name in ("pages", "why") else "right")
    for kind, row in facts["kinds"].items():
        why = [*row["reasons"], *(f"left out: {reason}" for reason in row["skipped"])]
        table.add_row(
            kind,
            f"{row['offered']:,}",
            f"{row['planned']:,}",
            f"{row['planned_bytes'] / _MIB:.1f}",
            f"{sum(row['skipped'].values()):,}",
            "; ".join(why),
        )
    console.print(table)
    told = facts.get("explain")
    if told is None:
        return
    console.print(f"chunk {told['chunk']!r} of tenant {told['tenant']!r}")
    heat_terms = told["heat"]
    if heat_terms is None:
        console.print("  no event has named it, as far as the saved heat knows")
    else:
        console.print(
            f"  score {heat_terms['score']:.3f} ({heat_terms['advice']}): decayed demand "
            f"{heat_terms['demand']:.2f}, last asked for {heat_terms['age_s']:,.0f} s ago, "
            f"PageRank {heat_terms['pagerank']:.2g}"
        )
        for chunk, share in heat_terms["leads_to"]:
            console.print(f"  leads to {chunk!r} ({share:.0%} of its links)")
    for line in told["pages"] or ["its pages are not in this index"]:
        console.print(f"  {line}")
