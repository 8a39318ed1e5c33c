"""What the small pieces of DESIGN 5 are worth on real traces, each switched on over what plans use.

    python tests/bench/bench_prefetch_ablation.py

Warm sets: as in `bench_prefetch_heat`, RAGPulse's next six hours are covered by the top N passages
by decayed demand; each row adds one piece. Query clusters are those of what a query retrieved,
because the trace has neither texts nor vectors; terms and entities are measured on data that has
texts (`bench_prefetch_topics`).

Regimes: the policy that the access entropy asks for, and what `entropy_regime` makes of all three,
against our own, LRU and LRU-K. Sharding by features: how often near vectors share a shard.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import bench_prefetch_topics
import numpy as np
import structlog
from bench_prefetch_heat import DATA, RAGPULSE, SIZES, TENANT, coverage, events_of
from bench_prefetch_topics import TEXTS
from numpy.typing import NDArray

from stoker.prefetch.entropy import AccessEntropy
from stoker.prefetch.events import Event
from stoker.prefetch.granularity import CHUNK, SESSION, TOKEN, Granularity
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.references import reference
from stoker.prefetch.regime import DriftAlarm, Regime, regime_for, sampling_rate
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.simulation import run_stoker
from stoker.prefetch.topics import QueryClusters, TopicHeat, blend
from stoker.prefetch.traces import Trace, read_trace
from stoker.prefetch.weights import OnlineWeights

Scores = dict[tuple[str, str], float]
# Demand as plans use it.
BASE = PrefetchSettings(heat_half_life_s=86400.0)
TRACES = {
    "RAGPulse": ("ragpulse/0_trace_days1-4.jsonl", "ragpulse"),
    "multi2": ("cache_traces/lirs_multi2.trace.gz", "lines"),
    "web12": ("cache_traces/cache2k_web12.trace.xz", "int32be"),
    "Mooncake conversation": ("mooncake/conversation_trace.jsonl", "mooncake"),
}


def last_asked(graph: HeatGraph, key: tuple[str, str], now_s: float) -> float:
    """Return how long ago a key was asked for; it is known."""
    number = graph._table.find(*key)
    return now_s - float(graph._last[number])


class Learnt:
    """The score's three terms under weights that follow what came true in the last window."""

    def __init__(self, *, learning: bool) -> None:
        self.weights = OnlineWeights((0.5, 0.3, 0.2))
        self._learning = learning
        self._before: tuple[float, list[tuple[tuple[str, str], Any]]] | None = None

    def __call__(self, graph: HeatGraph, now_s: float) -> Scores:
        terms = self._terms(graph, now_s)
        if self._before is not None and self._learning:
            then, rows = self._before
            for key, row in rows:
                asked = last_asked(graph, key, now_s) < now_s - then
                self.weights.observe(row, float(asked))
        scores = {key: float(self.weights.weights @ row) for key, row in terms.items()}
        best = sorted(scores, key=lambda key: (-scores[key], key))[:400]
        self._before = now_s, [(key, terms[key]) for key in best]
        return scores

    @staticmethod
    def _terms(graph: HeatGraph, now_s: float) -> dict[tuple[str, str], Any]:
        demand = graph.demand(now_s)
        top = max(demand.values(), default=1.0)
        rank = graph._padded_rank(len(graph._keys))
        rank_top = float(rank.max()) or 1.0
        rows = {}
        for key, value in demand.items():
            number = graph._table.find(*key)
            age = max(0.0, now_s - float(graph._last[number]))
            rows[key] = np.array(
                [value / top, np.exp(-age / 3600.0), float(rank[number]) / rank_top]
            )
        return rows


class Drift:
    """Demand in which what was asked for in the last window counts more after an alarm."""

    def __init__(self, events: Sequence[Event], *, requests_over: int) -> None:
        self._events = events
        self._alarm = DriftAlarm(requests_over=requests_over)
        self._entropy = AccessEntropy()
        self._at = 0
        self.alarms = 0

    def __call__(self, graph: HeatGraph, now_s: float) -> Scores:
        hot: set[tuple[str, str]] = set()
        requests = 0
        while self._at < len(self._events) and self._events[self._at].time_s < now_s:
            event = self._events[self._at]
            requests += 1
            for chunk in event.chunk_ids:
                self._entropy.add(chunk)
                hot.add((TENANT, chunk))
            self._at += 1
        factor = self._alarm.observe(self._entropy.bits, requests)
        self.alarms += factor != 1.0
        demand = graph.demand(now_s)
        return {key: value * (factor if key in hot else 1.0) for key, value in demand.items()}


class Topics:
    """Demand with a share of it taken from hot topics."""

    def __init__(
        self, events: Sequence[Event], nodes: Sequence[list[tuple[str, str]]], share: float
    ) -> None:
        self._events = events
        self._nodes = nodes
        self._share = share
        self._heat = TopicHeat()
        self._at = 0

    def __call__(self, graph: HeatGraph, now_s: float) -> Scores:
        while self._at < len(self._events) and self._events[self._at].time_s < now_s:
            event = self._events[self._at]
            keys = [(TENANT, chunk) for chunk in event.chunk_ids]
            self._heat.observe(self._nodes[self._at], keys, event.time_s)
            self._at += 1
        return blend(graph.demand(now_s), self._heat.lift(now_s), share=self._share)


def cluster_nodes(events: Sequence[Event], clusters: int) -> list[list[tuple[str, str]]]:
    """Return the cluster of each request, by a random projection of what it retrieved."""
    random = np.random.default_rng(5)
    directions: dict[str, Any] = {}
    model = QueryClusters(clusters)
    nodes = []
    for event in events:
        vector = np.zeros(32, np.float32)
        for chunk in event.chunk_ids:
            if chunk not in directions:
                directions[chunk] = random.standard_normal(32).astype(np.float32)
            vector += directions[chunk]
        norm = float(np.linalg.norm(vector)) or 1.0
        nodes.append(model.of(vector / norm))
    return nodes


def session_nodes(events: Sequence[Event]) -> list[list[tuple[str, str]]]:
    """Return each request's session as its node."""
    return [[("session", event.session or "")] for event in events]


def grain(grain_of: Granularity) -> Any:
    """Return a ranker by one grain of heat alone."""
    return lambda graph, now_s: {
        key: grain_of.heat(last_asked(graph, key, now_s)) for key in graph.demand(now_s)
    }


def warm_sets(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Measure the warm set with each piece; one row a piece."""
    rows: list[dict[str, Any]] = []

    def add(label: str, ranker: Any, note: str = "") -> None:
        rows.append({"piece": label, "coverage": coverage(events, BASE, rank=ranker), "note": note})

    add("decayed demand: what plans use", lambda graph, now: graph.demand(now))
    add("score, fixed weights", Learnt(learning=False))
    learnt = Learnt(learning=True)
    add("score, online weights (window 64)", learnt)
    rows[-1]["note"] = "ends at " + ", ".join(f"{w:.2f}" for w in learnt.weights.weights)
    for over in (5000, 100):
        drift = Drift(events, requests_over=over)
        add(f"demand, drift alarm over {over:,} requests a window", drift)
        rows[-1]["note"] = f"{drift.alarms} alarms"
    for which in (TOKEN, CHUNK, SESSION):
        add(f"{which.name} grain alone", grain(which))
    for clusters in (16, 64):
        nodes = cluster_nodes(events, clusters)
        for share in (0.1, 0.3):
            add(f"{1 - share:.0%} demand, {share:.0%} by {clusters} query clusters",
                Topics(events, nodes, share))  # fmt: skip
    sessions = session_nodes(events)
    add("90% demand, 10% by sessions as nodes", Topics(events, sessions, 0.1))
    return rows


def hit_ratio(policy: str, trace: Trace, capacity: int) -> float:
    """Return the share of a trace's accesses that a policy hits."""
    return float(reference(policy, capacity).run(trace.keys).mean())


def feature_shard(vectors: NDArray[np.float32], shards: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the shard of each vector by its features: near vectors mostly share one.

    ``sum of 2^i [r_i . v > 0]`` modulo ``shards``, with r_i drawn at random: two vectors at an
    angle t agree in a bit with probability ``1 - t / pi``.

    Args:
        vectors: float32, shape (n, dim), finite.
        shards: How many there are, at least 1.
        seed: Of the directions; the same in all replicas.

    Returns:
        int64, shape (n,), each in ``0 <= shard < shards``.

    Source: Charikar, STOC 2002, for the signs; the project's seed text for sharding by them.
    """
    bits = max(1, (shards - 1).bit_length())
    directions = np.random.default_rng(seed).standard_normal((vectors.shape[1], bits))
    above = vectors.astype(np.float64) @ directions > 0.0
    return np.asarray((above @ (1 << np.arange(bits))) % shards, dtype=np.int64)


def together(vectors: NDArray[np.float32], shards: int, *, queries: int = 500) -> dict[str, float]:
    """Return how often a vector's ten nearest lie in its shard, and what part the largest has."""
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    asked = np.random.default_rng(1).choice(len(vectors), min(queries, len(vectors)), replace=False)
    near = np.argsort(-(vectors[asked] @ vectors.T), axis=1)[:, 1:11]
    found = feature_shard(vectors, shards)
    return {
        "shards": shards,
        "near together": float((found[near] == found[asked][:, None]).mean()),
        "by chance": float((np.bincount(found) / len(found)) @ (np.bincount(found) / len(found))),
        "largest": float(np.bincount(found).max() / len(found)),
    }


def regimes(traces: dict[str, Trace], *, share: float) -> list[dict[str, Any]]:
    """Compare the policy that the entropy asks for; one row a trace."""
    rows = []
    for name, trace in traces.items():
        entropy = AccessEntropy()
        for key in trace.keys.tolist():
            entropy.add(key)
        regime = regime_for(entropy.bits)
        capacity = max(1, int(share * trace.footprint))
        asked = {Regime.PIN: "lfu-decay", Regime.EVICT: "lru-k"}.get(regime)
        hits, _, _ = run_stoker(trace, capacity)
        rows.append(
            {
                "trace": name,
                "bits": entropy.bits,
                "regime": regime.name,
                "capacity": capacity,
                # "No per-key caching": nothing is kept, so nothing hits.
                "asked for": hit_ratio(asked, trace, capacity) if asked else 0.0,
                "all three regimes": hit_ratio("entropy-regime", trace, capacity),
                "entropy-aware lru-k": hit_ratio("entropy-lru-k", trace, capacity),
                "lru": hit_ratio("lru", trace, capacity),
                "lru-k": hit_ratio("lru-k", trace, capacity),
                "stoker": float(hits.mean()),
                "sampled": sampling_rate(entropy.bits),
            }
        )
    return rows


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of warm sets."""
    out = [f"| piece | {' | '.join(f'top {n}' for n in SIZES)} | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        cells = " | ".join(f"{value:.4f}" for value in row["coverage"])
        out.append(f"| {row['piece']} | {cells} | {row['note']} |")
    return "\n".join(out) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if not DATA.is_dir():
        print(f"no traces: {DATA} is not there")
        return 0
    events = events_of(read_trace(RAGPULSE, "ragpulse"))
    sets = warm_sets(events)
    print(render(sets), flush=True)
    found = bench_prefetch_topics.run({name: read() for name, read in TEXTS.items()})
    print(bench_prefetch_topics.render(found), flush=True)
    traces = {}
    for name, (file, trace_format) in TRACES.items():
        trace = read_trace(DATA / file, trace_format)
        count = min(len(trace), 40_000)
        traces[name] = trace if count == len(trace) else Trace(
            trace.keys[:count], None, None, trace.requests[:count], trace.footprint
        )  # fmt: skip
    table = regimes(traces, share=0.05)
    for row in table:
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    vectors = np.load(DATA / "vectors" / "docs_minilm_f16.npy").astype(np.float32)
    for shards in (2, 4, 8, 16):
        print({k: round(v, 3) for k, v in together(vectors, shards).items()})
    digest = hashlib.blake2b(json.dumps([sets, found, table]).encode(), digest_size=6).hexdigest()
    print(f"{platform.platform()}; python {' '.join(sys.argv)}; result {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
