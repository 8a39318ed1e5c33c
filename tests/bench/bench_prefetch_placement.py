"""Our placement policy beside the reference ones, on every trace of the shared data folder.

    python tests/bench/bench_prefetch_placement.py
    python tests/bench/bench_prefetch_placement.py --trace web12 --trace multi2
    python tests/bench/bench_prefetch_placement.py --ablation
    python tests/bench/bench_prefetch_placement.py --foretold

RAGPulse (sessions) is run at 100, 200, 400 and 800 passages; the others, which have none, at 1, 5,
10 and 25 % of their footprint. One set of defaults for all. --ablation leaves out the parts of
the session forecast one by one, on RAGPulse. --foretold says what better forecasts could win there:
the forecast is told beforehand how often each passage will be asked for in the whole period (a day,
or six hours) that the next request lies in, in place of its own estimate of popularity, and keeps
the best at each request, without a price for fetching. Nobody can know that.

The longest trace takes about half an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from stoker.prefetch import forecast
from stoker.prefetch.simulation import measured_mask, parse_capacities, parse_policies, simulate
from stoker.prefetch.traces import Trace, read_trace

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
# name, file, format, capacities; the quick ones first
TRACES = {
    "ragpulse": ("ragpulse/0_trace_days1-4.jsonl", "ragpulse", "100,200,400,800"),
    "multi2": ("cache_traces/lirs_multi2.trace.gz", "lines", "1%,5%,10%,25%"),
    "web12": ("cache_traces/cache2k_web12.trace.xz", "int32be", "1%,5%,10%,25%"),
    "synthetic": ("mooncake/synthetic_trace.jsonl", "mooncake", "1%,5%,10%,25%"),
    "conversation": ("mooncake/conversation_trace.jsonl", "mooncake", "1%,5%,10%,25%"),
    "scarab": ("cache_traces/scarab_scarab-recs.trace.xz", "int64be", "1%,5%,10%,25%"),
    "orm-night": ("cache_traces/cache2k_orm-night.trace.xz", "int32be", "1%,5%,10%,25%"),
}
SIMPLE = ("lru", "lfu-decay", "w-tinylfu", "s3-fifo", "sieve", "arc", "lru-k", "area")
PARTS: dict[str, tuple[str, ...]] = {
    "everything": (),
    "without companions": ("companions", "companions by rank"),
    "without the last turn": ("last turn", "last turn by rank", "asked again"),
    "without earlier turns": ("earlier turns",),
    "without what used to follow": ("used to follow",),
    "without ranks": ("last turn by rank", "companions by rank", "popularity by rank"),
    "popularity only": tuple({n for n, _, _ in forecast._TERMS if not n.startswith("popularity")}),
}


def compare(trace: Trace, capacities: str) -> list[dict[str, Any]]:
    """Run everything on one trace; one row a capacity."""
    rows = []
    for capacity in parse_capacities(capacities, trace.footprint):
        outcomes = {
            outcome.policy: outcome
            for outcome in simulate(
                trace,
                policies=parse_policies("all"),
                capacities=[capacity],
                measured=measured_mask(trace, None),
            )
        }
        best = max(SIMPLE, key=lambda name: outcomes[name].hit_ratio)
        ours = outcomes["stoker"]
        rows.append(
            {
                "capacity": capacity,
                "stoker": ours.hit_ratio,
                "best": best,
                "best_hit_ratio": outcomes[best].hit_ratio,
                "belady": outcomes["belady"].hit_ratio,
                "belady_share": ours.belady_share,
                "against_best": ours.hit_ratio / max(1e-9, outcomes[best].hit_ratio) - 1.0,
                "ahead_per_miss": ours.loads_ahead / max(1, ours.loads_demand),
                "switches": len(ours.switches),
                "seconds": ours.seconds,
                "all": {name: outcome.hit_ratio for name, outcome in outcomes.items()},
            }
        )
    return rows


@contextmanager
def left_out(names: Sequence[str]) -> Iterator[None]:
    """Run with some terms of the forecast switched off."""
    learn = forecast.SessionForecast._learn
    kept = np.array([name not in names for name in forecast._NAMES])

    def masked(self: forecast.SessionForecast, known: list[int]) -> None:
        learn(self, known)
        self.weights = self.weights * kept

    forecast.SessionForecast._learn = masked  # type: ignore[method-assign]
    try:
        yield
    finally:
        forecast.SessionForecast._learn = learn  # type: ignore[method-assign]


def ablation(trace: Trace, capacities: str) -> list[dict[str, Any]]:
    """Run our policy with parts of its forecast left out; one row a variant."""
    rows = []
    for label, names in PARTS.items():
        with left_out(names):
            outcomes = simulate(
                trace,
                policies=["stoker"],
                capacities=parse_capacities(capacities, trace.footprint),
                measured=measured_mask(trace, None),
            )
        rows.append({"variant": label, "hit_ratios": [o.hit_ratio for o in outcomes]})
    return rows


def foretold(trace: Trace, capacities: str, *, period_s: float | None) -> dict[str, Any]:
    """Return hit ratios where each key's count per period is told beforehand; None: nothing is."""
    assert trace.times_s is not None
    assert trace.sessions is not None
    rooms = parse_capacities(capacities, trace.footprint)
    starts = np.flatnonzero(np.diff(trace.requests, prepend=-1))
    ends = np.append(starts[1:], len(trace))
    span = (trace.times_s - trace.times_s[0]) / (period_s or 1.0)
    period = span.astype(np.int64) if period_s else np.zeros(len(trace), dtype=np.int64)
    counts = np.zeros((int(period[-1]) + 1, trace.footprint))
    np.add.at(counts, (period, trace.keys), 1.0)
    requests = np.bincount(period[starts], minlength=len(counts))
    popularity = np.array([name.startswith("popularity") for name in forecast._NAMES])
    model = forecast.SessionForecast()
    hits = np.zeros(len(rooms))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        keys, now_s = trace.keys[start:end].tolist(), float(trace.times_s[start])
        known = np.array(model.keys, dtype=np.int64)
        if len(known):
            rates = model.rates()
            if period_s:
                kept = model.weights.copy()
                model.weights = kept * ~popularity
                at = int(period[start])
                rates = model.rates() + counts[at, known] / requests[at]
                model.weights = kept
            asked = [row for row in map(model.number, keys) if row is not None]
            for which, room in enumerate(rooms):
                least = -np.partition(-rates, room)[room] if room < len(rates) else -np.inf
                hits[which] += np.count_nonzero(rates[asked] > least)
        model.observe(list(dict.fromkeys(keys)), int(trace.sessions[start]), now_s)
    told = f"told each {period_s / 3600.0:.0f} h's popularity" if period_s else "told nothing"
    return {"variant": told, "hit_ratios": (hits / len(trace)).tolist()}


def render(name: str, trace: Trace, rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    out = [
        f"{name}: {len(trace):,} accesses, {trace.footprint:,} keys",
        "",
        "| room | stoker | best simple one | against it | Belady | of Belady | ahead per miss "
        "| switches |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    out += [
        f"| {row['capacity']:,} | {row['stoker']:.4f} | {row['best']} {row['best_hit_ratio']:.4f} "
        f"| {row['against_best']:+.1%} | {row['belady']:.4f} | {row['belady_share']:.3f} "
        f"| {row['ahead_per_miss']:.2f} | {row['switches']} |"
        for row in rows
    ]
    return "\n".join(out) + "\n"


def render_ablation(rows: Sequence[dict[str, Any]], capacities: str) -> str:
    """Return a Markdown table."""
    sizes = capacities.split(",")
    out = [f"| forecast | {' | '.join(sizes)} |", "|---|" + "---:|" * len(sizes)]
    for row in rows:
        cells = " | ".join(f"{ratio:.4f}" for ratio in row["hit_ratios"])
        out.append(f"| {row['variant']} | {cells} |")
    return "\n".join(out) + "\n"


def stamp(results: Any) -> str:
    """Return the machine, the command, and a hash of the results."""
    stable = json.dumps(results, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(stable, digest_size=6).hexdigest()
    return (
        f"{platform.platform()}, Python {platform.python_version()}; "
        f"python {' '.join(sys.argv)}; result {digest}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trace", action="append", choices=list(TRACES), help="only these")
    parser.add_argument("--ablation", action="store_true", help="parts of the forecast instead")
    parser.add_argument("--foretold", action="store_true", help="what better forecasts could win")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if not DATA.is_dir():
        print(f"no traces: {DATA} is not there")
        return 0
    results: dict[str, Any] = {}
    for name in ["ragpulse"] if args.ablation or args.foretold else args.trace or TRACES:
        file, trace_format, capacities = TRACES[name]
        trace = read_trace(DATA / file, trace_format)
        if args.ablation or args.foretold:
            rows = (
                ablation(trace, capacities)
                if args.ablation
                else [
                    foretold(trace, capacities, period_s=period_s)
                    for period_s in (None, 86400.0, 21600.0)
                ]
            )
            print(render_ablation(rows, capacities))
        else:
            rows = compare(trace, capacities)
            print(render(name, trace, rows), flush=True)
        results[name] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    print(stamp(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
