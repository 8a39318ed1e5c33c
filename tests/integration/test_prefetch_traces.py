"""Our policy on real traces: above every simple one with sessions, near the best without.

The thresholds leave room to what `bench_prefetch_placement.py` measures; runs repeat exactly.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.prefetch.simulation import Outcome, measured_mask, parse_policies, simulate
from stoker.prefetch.traces import Trace, read_trace

pytestmark = pytest.mark.data


def compare(trace: Trace, capacity: int) -> dict[str, Outcome]:
    return {
        outcome.policy: outcome
        for outcome in simulate(
            trace,
            policies=parse_policies("all"),
            capacities=[capacity],
            measured=measured_mask(trace, None),
        )
    }


def best_simple(outcomes: dict[str, Outcome]) -> float:
    return max(o.hit_ratio for name, o in outcomes.items() if name not in {"stoker", "belady"})


def test_sessions_of_a_real_rag_service(shared_data: Path) -> None:
    trace = read_trace(shared_data / "ragpulse" / "0_trace_days1-4.jsonl", "ragpulse")
    assert (len(trace), trace.footprint) == (20_228, 2_737)
    outcomes = compare(trace, 200)
    ours = outcomes["stoker"]
    assert outcomes["lru"].hit_ratio == pytest.approx(0.401, abs=0.001)
    assert outcomes["belady"].hit_ratio == pytest.approx(0.639, abs=0.001)
    assert ours.hit_ratio > best_simple(outcomes) + 0.03
    assert ours.belady_share is not None
    assert ours.belady_share >= 0.82
    assert ours.prefetch["useful"] > ours.prefetch["polluting"]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.10, 0.25])
def test_keys_without_sessions_lose_at_most_one_percent(shared_data: Path, share: float) -> None:
    trace = read_trace(shared_data / "cache_traces" / "lirs_multi2.trace.gz", "lines")
    outcomes = compare(trace, int(trace.footprint * share))
    assert outcomes["stoker"].hit_ratio >= 0.99 * best_simple(outcomes)
