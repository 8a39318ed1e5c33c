"""Placement over three tiers: what is learnt, kept, explained, and how it compares."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, InputError
from stoker.prefetch.drifting import drifting_trace, made_trace
from stoker.prefetch.placement import StokerPolicy
from stoker.prefetch.qlearning import (
    AGES,
    FREQUENCIES,
    GPU,
    HOST,
    LOCALITIES,
    NVME,
    STATES,
    WIDTHS,
    LearnerCorrupt,
    PlacementLearner,
    Stretch,
    TierCosts,
    state_number,
    state_parts,
)
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.tier_simulation import TIERED, parse_rooms, reuse_bound, simulate_tiers
from stoker.prefetch.tiered import QLearning, TieredPlacement
from stoker.prefetch.traces import Trace
from stoker.service.cli import main

pytest.importorskip("torch")
pytest.importorskip("safetensors")


def trace_of(keys: list[int]) -> Trace:
    array = np.array(keys, dtype=np.int64)
    return Trace(array, None, None, np.arange(len(array)), int(array.max()) + 1)


def test_every_state_has_a_number_of_its_own() -> None:
    numbers = {
        state_number(f, a, w, n): (f, a, w, n)
        for f in range(FREQUENCIES)
        for a in range(AGES)
        for w in range(WIDTHS)
        for n in range(LOCALITIES)
    }
    assert sorted(numbers) == list(range(STATES))
    assert all(state_parts(number) == parts for number, parts in numbers.items())


def test_a_state_that_is_asked_for_again_is_worth_the_fastest_tier() -> None:
    learner = PlacementLearner(room=100)
    hot, cold = state_number(3, 0, 1, 0), state_number(0, 5, 1, 2)
    for _ in range(200):
        learner.update([Stretch(hot, hot, 4.0, True), Stretch(cold, cold, 400.0, False)])
    assert learner.explain(hot, HOST)["best"] == "gpu"
    assert learner.explain(cold, HOST)["best"] == "nvme"
    assert learner.index_gpu[hot] > 0.0 > learner.index_host[cold]
    learner.check()


def test_prices_follow_what_evictions_were_worth() -> None:
    learner = PlacementLearner(room=100)
    before = learner.prices
    learner.update([], pressure=(1.0, 1.0))
    assert learner.prices > before
    for _ in range(500):
        learner.update([], pressure=(-1.0, 1.0))
    gpu, host = learner.prices
    assert gpu == host  # room above is never cheaper than room below
    learner.check()


def test_only_an_access_brings_a_key_up() -> None:
    """What lies on NVMe cannot hope for a better tier while nobody asks for it."""
    learner = PlacementLearner(room=100, horizon_ratio=1e9)
    hot, other = state_number(7, 0, 1, 0), state_number(1, 3, 1, 0)
    values = learner.values(hot)
    for _ in range(2_000):
        learner.update([Stretch(other, hot, 1e-9, False)])
    learnt = learner.values(other)
    assert math.isclose(learnt["nvme"], values["nvme"], rel_tol=0.05, abs_tol=0.5)
    assert math.isclose(learnt["gpu"], max(values.values()), rel_tol=0.05)


@settings(deadline=None, max_examples=40)
@given(
    keys=st.lists(st.integers(0, 40), min_size=1, max_size=400),
    gpu=st.integers(0, 6),
    host=st.integers(1, 9),
    mixed=st.booleans(),
)
def test_room_and_places_hold_after_every_access(
    keys: list[int], gpu: int, host: int, mixed: bool
) -> None:
    placement = TieredPlacement(gpu_room=gpu, host_room=host, accesses_per_s=100.0)
    for key in keys:
        size = (0.5, 1.0, 2.0)[key % 3] if mixed else 1.0
        before = placement.tier_of(key)
        resident = {k for t in (GPU, HOST) for k in placement.resident(t)}
        assert placement.access(key, size=size) == before
        placement.check()
        after = {k for t in (GPU, HOST) for k in placement.resident(t)}
        assert after | set(placement.gone) >= resident
        assert after - resident <= {key}


def run(seed: int, learner: PlacementLearner | None = None) -> tuple[list[int], TieredPlacement]:
    trace = drifting_trace(seed=seed, accesses=6_000, keys=1_000, period=1_000, job_keys=500).trace
    placement = TieredPlacement(gpu_room=10, host_room=40, learner=learner)
    return [placement.access(key) for key in trace.keys.tolist()], placement


def test_the_same_trace_gives_the_same_decisions_and_bytes() -> None:
    one, first = run(3)
    two, second = run(3)
    assert one == two
    assert first.learner.to_bytes() == second.learner.to_bytes()


def test_what_was_learnt_is_restored_to_the_bit_and_goes_on() -> None:
    _, before = run(4)
    saved = before.learner.to_bytes()
    learner = PlacementLearner(room=50)
    learner.restore(saved)
    assert learner.to_bytes() == saved
    step = [Stretch(5, 17, 3.0, True)]
    before.learner.update(step)
    learner.update(step)
    assert learner.to_bytes() == before.learner.to_bytes()
    fresh, _ = run(5)
    taught, _ = run(5, learner)
    assert fresh != taught


def test_damaged_or_foreign_values_are_refused() -> None:
    learner = PlacementLearner(room=50)
    saved = learner.to_bytes()
    for at in range(0, len(saved), 997):
        broken = bytearray(saved)
        broken[at] ^= 0x41
        with pytest.raises(LearnerCorrupt):
            learner.restore(bytes(broken))
    for cut in (0, 7, 100, len(saved) - 1):
        with pytest.raises(LearnerCorrupt):
            learner.restore(saved[:cut])
    with pytest.raises(ConfigError, match="costs"):
        PlacementLearner(room=50, costs=TierCosts(nvme_us=50.0)).restore(saved)
    assert learner.to_bytes() == saved


def test_a_larger_cache_takes_over_what_a_smaller_learnt_at_its_own_price() -> None:
    _, small = run(6)
    large = PlacementLearner(room=500)
    large.restore(small.learner.to_bytes())
    assert math.isclose(large.prices[1], small.learner.prices[1] / 10.0)


def test_a_decision_is_explained() -> None:
    _, placement = run(7)
    key = placement.resident(GPU)[-1]
    words = placement.explain(key)
    assert words is not None
    assert words["tier"] == "gpu"
    assert set(words["value_us"]) == {"gpu", "host", "nvme"}
    assert words["price_us"]["gpu"] >= words["price_us"]["host"] > 0.0
    assert placement.explain(-1) is None


def test_it_keeps_a_job_that_lru_loses() -> None:
    made = drifting_trace(
        seed=1, accesses=40_000, keys=2_000, job_keys=200, job_ratio=0.5, session_ratio=0.1
    )
    last = int(made.trace.keys[-1])
    outcomes = {
        outcome.policy: outcome
        for outcome in simulate_tiers(
            made.trace,
            policies=TIERED,
            gpu_room=40,
            host_room=160,
            measured=np.arange(len(made.trace)) >= 10_000,
            explain=[last, -1],
        )
    }
    assert outcomes["oracle"].read_us < outcomes["qlearning"].read_us
    share = outcomes["qlearning"].oracle_share
    assert share is not None
    assert share > 0.6
    assert outcomes["oracle"].oracle_share == 1.0
    assert outcomes["lru"].oracle_share == 0.0
    why = outcomes["qlearning"].explained
    assert [row["key"] for row in why] == [last, -1]
    assert set(why[0]["value_us"]) == {"gpu", "host", "nvme"}
    assert why[1]["tier"] == "nvme"
    assert not outcomes["lru"].explained


@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.integers(0, 12), min_size=2, max_size=150),
    gpu=st.integers(0, 4),
    host=st.integers(1, 5),
)
def test_nothing_beats_the_oracle(keys: list[int], gpu: int, host: int) -> None:
    trace = trace_of(keys)
    measured = np.ones(len(trace), dtype=bool)
    outcomes = simulate_tiers(
        trace, policies=TIERED, gpu_room=gpu, host_room=host, measured=measured
    )
    best = outcomes[TIERED.index("oracle")]
    for outcome in outcomes:
        assert outcome.gpu_ratio <= best.gpu_ratio + 1e-9
        both = outcome.gpu_ratio + outcome.host_ratio
        assert both <= best.gpu_ratio + best.host_ratio + 1e-9
    ones = np.ones(trace.footprint)
    bound = reuse_bound(trace.keys, ones, gpu + host, measured)
    assert best.gpu_ratio + best.host_ratio <= bound + 1e-9


def test_mixed_sizes_are_held_against_the_bound() -> None:
    made = made_trace("drift:2:mixed")
    count = 8_000
    trace = Trace(made.trace.keys[:count], None, None, np.arange(count), made.trace.footprint)
    outcomes = simulate_tiers(
        trace,
        policies=TIERED,
        gpu_room=50,
        host_room=100,
        measured=np.ones(count, dtype=bool),
        sizes=made.sizes,
    )
    times = {outcome.policy: outcome.read_us for outcome in outcomes}
    assert times["oracle"] < min(times[name] for name in TIERED if name != "oracle")


def test_made_traces_are_the_same_for_a_seed_and_drift() -> None:
    one, two = drifting_trace(seed=9), drifting_trace(seed=9)
    assert np.array_equal(one.trace.keys, two.trace.keys)
    assert not np.array_equal(one.trace.keys, drifting_trace(seed=10).trace.keys)
    half = len(one.trace) // 2
    hot = [
        set(np.argsort(-np.bincount(part, minlength=8_000))[:100].tolist())
        for part in (one.trace.keys[:half], one.trace.keys[half:])
    ]
    assert len(hot[0] & hot[1]) < 60


@pytest.mark.parametrize("name", ["drift", "drift:x", "steady:1", "jobs:1:wide"])
def test_made_traces_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match="made trace"):
        made_trace(name)


@pytest.mark.parametrize("text", ["100", "1,2,3", "a,b", "10,0", "-1,5"])
def test_rooms_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--tiers"):
        parse_rooms(text, 1_000)


def test_single_room_keeps_the_contract_of_a_candidate() -> None:
    cache = QLearning(5)
    inside: set[Any] = set()
    for key in drifting_trace(seed=2, accesses=2_000, keys=1_000).trace.keys.tolist():
        hit = cache.access(key)
        assert hit == (key in inside)
        inside.add(key)
        inside.discard(cache.gone)
        assert inside == set(cache.keys())
        assert len(cache) == len(inside) <= 5


def test_the_command_compares_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--made", "drift:1", "--tiers", "50,100", "--policy", "lru,oracle"]
    assert main([*command, "--warm-until", "80%", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in report["results"]] == ["lru", "oracle"]
    assert report["results"][1]["read_us"] < report["results"][0]["read_us"]
    assert main(command) == 0
    assert "oracle" in capsys.readouterr().out
    assert main(["simulate", "--made", "drift:1", "--tiers", "50,100", "--policy", "magic"]) != 0
    assert main([*command, "--explain", "hot"]) != 0
    capsys.readouterr()
    for nobody in ("-1", "8000", "0,99999999999999999999"):  # NVMe is no place for what is nowhere
        assert main([*command, f"--explain={nobody}"]) == 3
        assert "is not in the trace, whose 8,000 keys" in capsys.readouterr().err
    assert main([*command, "--policy", ""]) == 3
    assert main(["simulate", "--trace", "x", "--capacity", "5"]) != 0


def test_no_place_above_is_dropped_for_nothing() -> None:
    """A key found on the GPU that stays resident never counts as gone."""
    placement = TieredPlacement(gpu_room=2, host_room=2)
    for key in (1, 2, 3, 4, 1, 1, 1, 5, 5, 1):
        placement.access(key)
        for gone in placement.gone:
            assert placement.tier_of(gone) == NVME


def test_it_competes_in_the_arena_by_a_setting_and_acts_where_it_wins() -> None:
    made = drifting_trace(seed=1, accesses=20_000, keys=4_000)
    hits = {}
    for enabled in (False, True):
        policy = StokerPolicy(60, PrefetchSettings(placement_qlearning=enabled))
        hits[enabled] = sum(policy.access(key).hit for key in made.trace.keys.tolist())
        assert ("qlearning" in policy.arena.names) == enabled
        policy.arena.check()
    assert "qlearning" in {switch.after for switch in policy.switches}
    assert hits[True] > hits[False]
