"""What each piece of the heat score is worth, and what heat costs at a million chunks.

    python tests/bench/bench_prefetch_heat.py
    python tests/bench/bench_prefetch_heat.py --size-only

Worth: RAGPulse's requests go into the heat; every six hours the top N passages by score are the
warm set, and the share of the next six hours' accesses that it covers is measured (from the
first day on). Each row switches one piece off or changes it.

Calibration (alone with --calibration): on every trace of the shared data folder, the hit ratio that
a receipt would predict for the most demanded 1, 5, 10 and 25 % of the keys, and the one that the
next twentieth of the accesses has; the first fifth only fills the heat. Traces without times are
spread over four days, as RAGPulse is. It takes a minute or two.

Entropy (alone with --entropy-accesses N): the running entropy against the exact one.

Size: a graph of a million chunks with ten million edges takes events; the time of applying them,
of a tick (PageRank tracked by push), of a snapshot, of cutting it into parts for the heat topic
and of a new replica's start from them is printed, and the process's memory.

Tail: streams of more and more distinct keys meet a table with room for 20,000, a tenth or half of
their accesses spread over all of them; a row each says what memory they take, at what rate they are
taken in, and how well the most asked are known.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.kernels._core import EventBatch
from stoker.prefetch.coupling import coupled_score
from stoker.prefetch.entropy import AccessEntropy
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.granularity import CHUNK
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_parts import join_heat, split_heat
from stoker.prefetch.plan import predicted_ratio
from stoker.prefetch.regime import sampled, sampling_rate
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.traces import Trace, read_trace

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
RAGPULSE = DATA / "ragpulse" / "0_trace_days1-4.jsonl"
START_S = 1_758_081_600.0
WINDOW_S = 6 * 3600.0
TENANT = "campus"
SIZES = (200, 400, 800)
SHARES = (0.01, 0.05, 0.10, 0.25)
WINDOWS = 20
WINDOWS_FILLING = 4
TIMELESS_SPAN_S = 4 * 86400.0
# name, file, format
CALIBRATED = (
    ("RAGPulse", "ragpulse/0_trace_days1-4.jsonl", "ragpulse"),
    ("Mooncake conversation", "mooncake/conversation_trace.jsonl", "mooncake"),
    ("Mooncake synthetic", "mooncake/synthetic_trace.jsonl", "mooncake"),
    ("multi2", "cache_traces/lirs_multi2.trace.gz", "lines"),
    ("web12", "cache_traces/cache2k_web12.trace.xz", "int32be"),
    ("scarab", "cache_traces/scarab_scarab-recs.trace.xz", "int64be"),
    ("orm-night", "cache_traces/cache2k_orm-night.trace.xz", "int32be"),
)

Ranker = Callable[[HeatGraph, float], dict[tuple[str, str], float]]
Keep = Callable[[Event], bool]


def events_of(trace: Trace) -> list[Event]:
    """Turn a trace's requests into search events."""
    assert trace.times_s is not None
    assert trace.sessions is not None
    starts = np.flatnonzero(np.diff(trace.requests, prepend=-1))
    ends = np.append(starts[1:], len(trace))
    events = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        chunks = tuple(str(key) for key in trace.keys[start:end].tolist())
        time_s = START_S + float(trace.times_s[start])
        session = str(int(trace.sessions[start]))
        events.append(
            Event(f"e{start}", SEARCH_PERFORMED, time_s, TENANT, session, None, None, chunks, {})
        )
    return events


def coverage(
    events: Sequence[Event],
    settings: PrefetchSettings,
    *,
    rank: Ranker | None = None,
    keep: Keep | None = None,
) -> list[float]:
    """Return, per size, the share of each next window's accesses that the warm set covers."""
    graph = HeatGraph(settings)
    first = events[0].time_s
    covered = np.zeros(len(SIZES))
    total = 0
    at = 0
    edge = first + WINDOW_S
    while at < len(events):
        upto = at
        while upto < len(events) and events[upto].time_s < edge:
            upto += 1
        window = events[at:upto]
        if edge - first > 86400.0 and window:
            now = edge - WINDOW_S
            graph.tick(now)
            scores = graph.scores(now) if rank is None else rank(graph, now)
            order = sorted(scores, key=lambda key: (-scores[key], key))
            asked = [chunk for event in window for chunk in event.chunk_ids]
            total += len(asked)
            for which, size in enumerate(SIZES):
                warm = {chunk for _, chunk in order[:size]}
                covered[which] += sum(chunk in warm for chunk in asked)
        graph.apply([event for event in window if keep is None or keep(event)])
        at = upto
        edge += WINDOW_S
    return (covered / max(1, total)).tolist()


def calibration(trace: Trace) -> list[dict[str, float]]:
    """Compare predicted with measured coverage of the warm set; one row per share of the keys.

    ``predicted`` and ``measured`` are means over the windows, ``window_error`` the mean distance of
    the two in one window.
    """
    times = trace.times_s
    if times is None:
        times = np.linspace(0.0, TIMELESS_SPAN_S, len(trace))
    edges = np.linspace(0, len(trace), WINDOWS + 1).astype(np.int64).tolist()
    rooms = [max(1, int(share * trace.footprint)) for share in SHARES]
    graph = HeatGraph()
    found: list[list[tuple[float, float]]] = []
    for window, (start, end) in enumerate(itertools.pairwise(edges)):
        if window >= WINDOWS_FILLING:
            now_s = START_S + float(times[start])
            demand, coverage = graph.demand(now_s), graph.coverage(now_s)
            amounts = np.array(list(demand.values()))
            keys = np.array([int(chunk) for _, chunk in demand])
            order = np.argsort(-amounts, kind="stable")
            asked = trace.keys[start:end]
            found.append(
                [
                    (
                        predicted_ratio(
                            covered=float(amounts[order[:room]].sum()),
                            total=float(amounts.sum()),
                            coverage=coverage,
                            anywhere=0.0,  # what was never asked for is not in a set of passages
                        ),
                        float(np.isin(asked, keys[order[:room]]).mean()),
                    )
                    for room in rooms
                ]
            )
        graph.apply(_in_events(trace.keys[start:end], times[start:end], first=start))
    table = np.array(found)
    mean = table.mean(axis=0)
    distance = np.abs(table[:, :, 0] - table[:, :, 1]).mean(axis=0)
    return [
        {
            "share": share,
            "predicted": float(mean[at, 0]),
            "measured": float(mean[at, 1]),
            "window_error": float(distance[at]),
        }
        for at, share in enumerate(SHARES)
    ]


def _in_events(
    keys: NDArray[np.int64], times: NDArray[np.float64], *, first: int, chunks: int = 10
) -> list[Event]:
    """Return searches of ten keys each: what calibration needs of a trace."""
    return [
        Event(
            f"e{first + at}",
            SEARCH_PERFORMED,
            START_S + float(times[at]),
            TENANT,
            None,
            None,
            None,
            tuple(str(key) for key in keys[at : at + chunks].tolist()),
            {},
        )
        for at in range(0, len(keys), chunks)
    ]


def entropy_error(accesses: int, *, seed: int) -> dict[str, float]:
    """Return the largest distance of running and exact entropy over a stream, in bits."""
    rng = np.random.default_rng(seed)
    errors = {}
    for decay in (0.9992, 1.0):
        entropy, worst = AccessEntropy(decay=decay), 0.0
        for start in range(0, accesses, 100_000):
            for key in (rng.zipf(1.2, min(100_000, accesses - start)) % 100_000).tolist():
                entropy.add(key)
            worst = max(worst, abs(entropy.bits - entropy.exact()))
        errors[f"decay {decay}"] = worst
    return errors


def _coupled(graph: HeatGraph, now_s: float) -> dict[tuple[str, str], float]:
    """Score by freshness and the predictability of all accesses, gated."""
    demand = graph.demand(now_s)
    entropy = AccessEntropy(decay=1.0)
    for (_, chunk), weight in demand.items():
        for _ in range(int(weight) + 1):
            entropy.add(chunk)
    norm = entropy.normalised
    fresh = {key: float(np.exp(-(now_s - graph._last[i]) / 3600.0)) for i, key in _keys(graph)}
    return {key: coupled_score(fresh[key], norm) for key in demand}


def _keys(graph: HeatGraph) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(graph._keys))


def _chunk_grain(graph: HeatGraph, now_s: float) -> dict[tuple[str, str], float]:
    return {key: CHUNK.heat(now_s - float(graph._last[i])) for i, key in _keys(graph)}


def _with_related(graph: HeatGraph, now_s: float) -> dict[tuple[str, str], float]:
    scores = graph.demand(now_s)
    top = max(scores.values(), default=1.0)
    for key, mass in graph.related(now_s, minutes=5.0).items():
        scores[key] = scores.get(key, 0.0) + top * mass
    return scores


def worth(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Measure the score and its variants; one row a variant."""
    base = PrefetchSettings()
    change = dataclasses.replace

    def weights(frequency: float, recent: float, pagerank: float) -> PrefetchSettings:
        return change(
            base,
            heat_weight_frequency=frequency,
            heat_weight_recency=recent,
            heat_weight_pagerank=pagerank,
        )

    entropy = AccessEntropy()

    def by_entropy(event: Event) -> bool:
        for chunk in event.chunk_ids:
            entropy.add(chunk)
        return sampled(event.id, sampling_rate(entropy.bits))

    variants: list[tuple[str, PrefetchSettings, Ranker | None, Keep | None]] = [
        ("score 0.5 / 0.3 / 0.2 (the default)", base, None, None),
        ("without recency", weights(5 / 7, 0.0, 2 / 7), None, None),
        ("without PageRank", weights(5 / 8, 3 / 8, 0.0), None, None),
        ("frequency only", weights(1.0, 0.0, 0.0), None, None),
        ("recency only", weights(0.0, 1.0, 0.0), None, None),
        ("PageRank only", weights(0.0, 0.0, 1.0), None, None),
        ("decayed demand (what a warm plan uses)", base, lambda g, t: g.demand(t), None),
        ("demand, exponential decay", change(base, heat_decay="exponential"), _demand, None),
        ("demand, half-life 1 h", change(base, heat_half_life_s=3600.0), _demand, None),
        ("demand, half-life 24 h", change(base, heat_half_life_s=86400.0), _demand, None),
        ("demand plus personalised PageRank of 5 min", base, _with_related, None),
        ("demand from 25 % of the events", base, _demand, lambda e: sampled(e.id, 0.25)),
        ("demand, sampled by entropy (25 % below 4.2 bit)", base, _demand, by_entropy),
        ("freshness and entropy, gated", base, _coupled, None),
        ("chunk grain 0.995 per second", base, _chunk_grain, None),
    ]
    return [
        {"variant": label, "coverage": coverage(events, settings, rank=rank, keep=keep)}
        for label, settings, rank, keep in variants
    ]


def _demand(graph: HeatGraph, now_s: float) -> dict[tuple[str, str], float]:
    return graph.demand(now_s)


def size(keys: int, degree: int, *, seed: int) -> dict[str, float]:
    """Measure a graph of ``keys`` chunks and ``keys * degree`` edges, in CPU seconds."""
    rng = np.random.default_rng(seed)
    settings = PrefetchSettings(
        graph_edges_per_key_max=degree,
        heat_keys_max=2 * keys,
        pagerank_exact_keys_max=min(20_000, keys // 2),
    )
    graph = HeatGraph(settings)
    graph._keys = [(TENANT, f"c{i}") for i in range(keys)]
    for key in graph._keys:
        graph._table.add(*key)
    graph._reserve(keys)
    graph._edges.landmark = 0.0
    graph._edges._advance(START_S * graph._edges.rate)
    graph._edges.targets[:keys] = rng.integers(0, keys, (keys, degree))
    graph._edges.weights[:keys] = rng.random((keys, degree)) * 2.0**256
    graph._last[:keys] = START_S
    graph._clock.load_values({"watermark_s": START_S, "ahead": 0})
    graph.tick(START_S)
    for _ in range(200):
        graph.tick(START_S)
        assert graph._tracker is not None
        if graph._tracker.error_bound < 0.05:
            break
    ticks, applies, count = [], [], 2000
    for turn in range(5):
        popular = rng.zipf(1.2, (count, 5)) % keys
        events = [
            Event(
                f"{turn}-{i}",
                SEARCH_PERFORMED,
                START_S + turn * 60 + i * 0.03,
                TENANT,
                f"s{i % 500}",
                None,
                None,
                tuple(f"c{c}" for c in popular[i].tolist()),
                {},
            )
            for i in range(count)
        ]
        started = time.process_time()
        graph.apply(events)
        applies.append(time.process_time() - started)
        started = time.process_time()
        graph.tick(START_S)
        ticks.append(time.process_time() - started)
    started = time.process_time()
    snapshot = graph.to_snapshot()
    snapshot_s = time.process_time() - started
    started = time.process_time()
    head, parts = split_heat(snapshot, b"", {})
    split_s = time.process_time() - started
    part_mib = max(map(len, parts.values())) / (1 << 20)
    started = time.process_time()
    joined, _ = join_heat(head, parts)
    HeatGraph.from_snapshot(joined, settings)
    start_s = time.process_time() - started
    return {
        "keys": keys,
        "edges": graph._edges.edge_count(),
        "events_per_cpu_s": count / float(np.median(applies)),
        "tick_ms": 1e3 * float(np.median(ticks)),
        "snapshot_s": snapshot_s,
        "snapshot_mib": len(snapshot) / (1 << 20),
        "publish_s": split_s,
        "part_mib_max": part_mib,
        "start_s": start_s,
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def tail(
    distinct: int, *, keys_max: int, events: int, tail_ratio: float, seed: int
) -> dict[str, float]:
    """Measure a heat with room for ``keys_max`` keys under a stream of ``distinct`` ones.

    All accesses but ``tail_ratio`` of them go to ten thousand popular keys, the rest to all alike.
    """
    rng = np.random.default_rng(seed)
    graph = HeatGraph(PrefetchSettings(heat_keys_max=keys_max, heat_tail_buckets=1 << 18))
    asked: dict[str, int] = {}
    took = 0.0
    for start in range(0, events, 2000):
        popular = rng.zipf(1.2, (2000, 10)) % 10_000
        rare = rng.integers(0, distinct, (2000, 10))
        chunks = np.where(rng.random((2000, 10)) < tail_ratio, rare, popular)
        batch = EventBatch()
        for i, row in enumerate(chunks.tolist()):
            keys = [f"c{number}" for number in row]
            batch.append(
                kind=0, time_s=START_S + (start + i) * 0.01, id="", tenant=TENANT,
                session=f"s{i % 500}", keys=keys,
            )  # fmt: skip
            for key in keys:
                asked[key] = asked.get(key, 0) + 1
        began = time.process_time()
        graph.apply_batch(batch)
        took += time.process_time() - began
    now = START_S + events * 0.01
    demand = graph.demand(now)
    top = sorted(asked, key=lambda key: (-asked[key], key))[:1000]
    errors = [graph.demand_of((TENANT, key), now) / asked[key] - 1.0 for key in top]
    return {
        "distinct": len(asked),
        "keys": graph.key_count,
        "memory_mib": graph.memory_bytes / (1 << 20),
        "events_per_cpu_s": events / took,
        "top_1000_kept": sum((TENANT, key) in demand for key in top) / 1000,
        "top_1000_error": float(np.mean(np.abs(errors))),
    }


def render_worth(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    out = [
        f"| warm set by | {' | '.join(f'top {n}' for n in SIZES)} |",
        "|---|" + "---:|" * len(SIZES),
    ]
    for row in rows:
        out.append(f"| {row['variant']} | {' | '.join(f'{c:.3f}' for c in row['coverage'])} |")
    return "\n".join(out) + "\n"


def calibrate_all() -> list[Any]:
    """Print calibration on each trace that is there; return all rows."""
    results: list[Any] = []
    for name, file, trace_format in CALIBRATED:
        if not (DATA / file).is_file():
            print(f"calibration: not measured on {name}, {DATA / file} is not there")
            continue
        for row in calibration(read_trace(DATA / file, trace_format)):
            results.append([name, row])
            print(
                f"{name:>22}, top {row['share']:>3.0%}: predicted {row['predicted']:.3f}, measured "
                f"{row['measured']:.3f}, off by {row['window_error']:.3f} in a window",
                flush=True,
            )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--size-only", action="store_true", help="only the million chunks")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument(
        "--distinct", type=int, nargs="*", default=[20_000, 200_000, 2_000_000],
        help="distinct keys of the streams that meet a table with less room",
    )  # fmt: skip
    parser.add_argument("--tail-events", type=int, default=100_000)
    parser.add_argument("--tail-keys", type=int, default=20_000, help="room in the table")
    parser.add_argument("--calibration", action="store_true", help="only the calibration")
    parser.add_argument("--entropy-accesses", type=int, default=0, help="only the entropy's error")
    args = parser.parse_args(argv)
    results: list[Any] = []
    if args.entropy_accesses:
        for name, error in entropy_error(args.entropy_accesses, seed=1).items():
            print(f"entropy, {name}: at most {error:.1e} bit off in {args.entropy_accesses:,}")
        return 0
    if not args.size_only:
        results += calibrate_all()
    if args.calibration:
        return 0
    if not args.size_only:
        if RAGPULSE.is_file():
            rows = worth(events_of(read_trace(RAGPULSE, "ragpulse")))
            results += rows
            print(render_worth(rows), flush=True)
        else:
            print(f"worth: not measured, {RAGPULSE} is not there")
    for name, value in size(args.keys, args.degree, seed=0).items():
        print(f"{name:>18}  {value:,.1f}")
    for distinct, tail_ratio in itertools.product(args.distinct, (0.1, 0.5)):
        row = tail(
            distinct, keys_max=args.tail_keys, events=args.tail_events, tail_ratio=tail_ratio,
            seed=0,
        )  # fmt: skip
        shown = [f"{name} {value:,.{0 if value >= 2 else 4}f}" for name, value in row.items()]
        print(f"tail {tail_ratio:.0%}:", ", ".join(shown), flush=True)
    digest = hashlib.blake2b(json.dumps(results).encode(), digest_size=6).hexdigest()
    print(
        f"{platform.platform()}, Python {platform.python_version()}; "
        f"python {' '.join(sys.argv)}; result {digest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
