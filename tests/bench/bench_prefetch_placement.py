"""Our placement policy beside the reference ones, on every trace of the shared data folder.

    python tests/bench/bench_prefetch_placement.py
    python tests/bench/bench_prefetch_placement.py --trace web12 --trace multi2
    python tests/bench/bench_prefetch_placement.py --ablation
    python tests/bench/bench_prefetch_placement.py --foretold
    python tests/bench/bench_prefetch_placement.py --misses
    python tests/bench/bench_prefetch_placement.py --samples 10

RAGPulse (sessions) is run at 100, 200, 400 and 800 passages; the others, which have none, at 1, 5,
10 and 25 % of their footprint. One set of defaults for all. --ablation leaves out the parts of
the session forecast one by one, on RAGPulse. --foretold says what better forecasts could win there:
the forecast is told beforehand how often each passage will be asked for in the whole period (a day,
or six hours) that the next request lies in, in place of its own estimate of popularity, and keeps
the best at each request, without a price for fetching; or it is told with each request whether its
session will ask again. Nobody can know that. --misses says which accesses ours and Belady's hit, by
how a key was last asked for. --samples N gives our hit ratios on RAGPulse as means over N draws of
four fifths of its sessions, by halves of the time and for the second half alone, which then starts
cold: on the whole trace two versions of the forecast differ by a few hits, often by chance.

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
from numpy.typing import NDArray

from stoker.prefetch import forecast
from stoker.prefetch.references import reference
from stoker.prefetch.simulation import (
    measured_mask,
    parse_capacities,
    parse_policies,
    run_stoker,
    simulate,
)
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


def foretold(
    trace: Trace, capacities: str, *, period_s: float | None, ends_told: bool = False
) -> dict[str, Any]:
    """Return hit ratios where something about the future is told.

    Args:
        trace: One with sessions.
        capacities: In keys.
        period_s: Each key's count in each period is told beforehand; None: it is not.
        ends_told: With each request is told whether it is its session's last one.
    """
    assert trace.times_s is not None
    assert trace.sessions is not None
    rooms = parse_capacities(capacities, trace.footprint)
    starts = np.flatnonzero(np.diff(trace.requests, prepend=-1))
    ends = np.append(starts[1:], len(trace))
    last_of = dict(zip(trace.sessions[starts].tolist(), starts.tolist(), strict=True))
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
        session = int(trace.sessions[start])
        model.observe(list(dict.fromkeys(keys)), session, now_s)
        if ends_told and last_of[session] == start:
            model._withdraw(session)
    told = f"told each {period_s / 3600.0:.0f} h's popularity" if period_s else "told nothing"
    if ends_told:
        told = "told whether a session goes on"
    return {"variant": told, "hit_ratios": (hits / len(trace)).tolist()}


CLASSES = (
    "never asked for before",
    "named twice in one request",
    "in the session's last turn",
    "earlier in the session",
    "by others, within 10 min",
    "by others, 10 min to 1 h ago",
    "by others, 1 h to 6 h ago",
    "by others, 6 h to 24 h ago",
    "by others, longer ago",
)
_AGES_S = (600.0, 3600.0, 21600.0, 86400.0)


def classes_of(trace: Trace) -> NDArray[np.int64]:
    """Return for each access which of `CLASSES` it is: how its key was last asked for."""
    assert trace.times_s is not None
    assert trace.sessions is not None
    asked_at: dict[int, float] = {}
    turns: dict[int, list[set[int]]] = {}
    out = np.zeros(len(trace), dtype=np.int64)
    open_request = -1
    columns = (trace.keys, trace.times_s, trace.sessions, trace.requests)
    for at, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        key, now_s, session, request = row
        mine = turns.setdefault(session, [])
        if request != open_request:
            open_request = request
            mine.append(set())
        if key in mine[-1]:
            out[at] = 1
        elif key in asked_at:
            earlier = [back for back, turn in enumerate(reversed(mine)) if key in turn]
            age = int(np.searchsorted(_AGES_S, now_s - asked_at[key]))
            out[at] = min(earlier[0] + 1, 3) if earlier else 4 + age
        mine[-1].add(key)
        asked_at[key] = now_s
    return out


def misses(trace: Trace, capacity: int) -> list[dict[str, Any]]:
    """Return which accesses ours and Belady's hit, one row a class; shares of all accesses."""
    ours = run_stoker(trace, capacity)[0]
    best = reference("belady", capacity).run(trace.keys)
    of = classes_of(trace)
    return [
        {
            "class": name,
            "all": float(np.mean(of == which)),
            "stoker": float(np.mean(ours & (of == which))),
            "belady": float(np.mean(best & (of == which))),
        }
        for which, name in enumerate(CLASSES)
    ]


def render_misses(tables: dict[int, list[dict[str, Any]]]) -> str:
    """Return a Markdown table: of the first room's accesses all, and of each room the hits."""
    heads = " | ".join(f"{room}: stoker | Belady" for room in tables)
    out = [f"| key last asked for | all | {heads} |", "|---|---:|" + "---:|---:|" * len(tables)]
    for which, name in enumerate(CLASSES):
        rows = [table[which] for table in tables.values()]
        cells = " | ".join(f"{row['stoker']:.3f} | {row['belady']:.3f}" for row in rows)
        out.append(f"| {name} | {rows[0]['all']:.3f} | {cells} |")
    return "\n".join(out) + "\n"


def _part(trace: Trace, kept: NDArray[np.bool_]) -> Trace:
    assert trace.times_s is not None
    assert trace.sessions is not None
    numbers = trace.keys[kept], trace.times_s[kept], trace.sessions[kept], trace.requests[kept]
    return Trace(*numbers, trace.footprint)


def sampled(trace: Trace, capacities: str, *, samples: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return mean hit ratios over draws of four fifths of the sessions, one row a span of time."""
    assert trace.times_s is not None
    assert trace.sessions is not None
    rooms = parse_capacities(capacities, trace.footprint)
    middle_s = (trace.times_s[0] + trace.times_s[-1]) / 2.0
    sums = np.zeros((3, len(rooms)))
    random = np.random.default_rng(seed)
    for _ in range(samples):
        part = _part(trace, (random.random(trace.sessions.max() + 1) < 0.8)[trace.sessions])
        assert part.times_s is not None
        late = part.times_s >= middle_s
        for which, room in enumerate(rooms):
            hits = run_stoker(part, room)[0]
            cold = run_stoker(_part(part, late), room)[0]
            sums[:, which] += [hits[~late].mean(), hits[late].mean(), cold.mean()]
    spans = ("first half", "second half", "second half, from cold")
    ratios = (sums / samples).tolist()
    return [{"variant": s, "hit_ratios": r} for s, r in zip(spans, ratios, strict=True)]


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
    parser.add_argument("--samples", type=int, default=0, help="hit ratios on draws of sessions")
    parser.add_argument("--misses", action="store_true", help="which accesses are hit, by class")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if not DATA.is_dir():
        print(f"no traces: {DATA} is not there")
        return 0
    results: dict[str, Any] = {}
    only_sessions = args.ablation or args.foretold or args.misses or args.samples > 0
    for name in ["ragpulse"] if only_sessions else args.trace or TRACES:
        file, trace_format, capacities = TRACES[name]
        trace = read_trace(DATA / file, trace_format)
        if args.misses:
            rooms = parse_capacities(capacities, trace.footprint)
            tables = {room: misses(trace, room) for room in rooms}
            print(render_misses(tables))
            rows = [row for table in tables.values() for row in table]
        elif args.samples > 0:
            rows = sampled(trace, capacities, samples=args.samples)
            print(render_ablation(rows, capacities))
        elif args.ablation or args.foretold:
            rows = (
                ablation(trace, capacities)
                if args.ablation
                else [
                    foretold(trace, capacities, period_s=period_s)
                    for period_s in (None, 86400.0, 21600.0)
                ]
                + [foretold(trace, capacities, period_s=None, ends_told=True)]
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
