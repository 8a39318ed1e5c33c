"""The product's own policy: arena, forecast, prefetch accounting."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.prefetch.arena import Arena
from stoker.prefetch.candidates import Candidate, Lru
from stoker.prefetch.forecast import SessionForecast
from stoker.prefetch.forecast_cache import ForecastCache
from stoker.prefetch.placement import StokerPolicy
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.shadow import PrefetchAccount


class Newest(Candidate):
    """Never evicts what came first: right for loops, wrong for everything recent."""

    name = "newest"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept: set[Hashable] = set()

    def keys(self) -> list[Hashable]:
        return list(self._kept)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def access(self, key: Hashable) -> bool:
        self.gone = None
        if key in self._kept:
            return True
        if len(self._kept) < self.capacity:
            self._kept.add(key)
        else:
            self.gone = key
        return False


def loop(arena: Arena, length: int, times: int) -> float:
    hits = [arena.access(key)[0] for _ in range(times) for key in range(length)]
    return sum(hits[len(hits) // 2 :]) / (len(hits) - len(hits) // 2)


def test_arena_changes_to_the_policy_that_hits() -> None:
    arena = Arena(50, candidates=(Lru, Newest))
    ratio = loop(arena, 70, 60)
    assert arena.active == "newest"
    assert ratio > 0.6  # LRU hits nothing on a loop that is too long
    assert arena.switches[0].lead_hits > 0
    arena.check()


def test_arena_on_a_sample_of_the_keys_finds_the_same() -> None:
    arena = Arena(400, candidates=(Lru, Newest), mini_capacity=64)
    ratio = loop(arena, 560, 60)
    assert arena.active == "newest"
    assert ratio > 0.6
    arena.check()


def test_a_switch_has_to_pay() -> None:
    arena = Arena(50, candidates=(Lru, Newest), switch_cost=1e9)
    for key in list(range(70)) * 60:
        arena.access(key)
        arena.access("hot")  # without any hit, a resident key would be worth nothing
    assert arena.active == "lru"
    assert arena.switches == []


@pytest.mark.parametrize("mini_capacity", [16, 65_536])
def test_invariants_hold_on_mixed_traffic(mini_capacity: int) -> None:
    rng = np.random.default_rng(5)
    arena = Arena(40, mini_capacity=mini_capacity)
    keys = np.concatenate(
        [rng.zipf(1.3, 3000) % 300, np.tile(np.arange(60), 40), rng.integers(0, 300, 2000)]
    )
    for at, key in enumerate(keys.tolist()):
        before = key in arena.resident
        hit, admitted, victim = arena.access(key)
        assert hit == before
        assert not (hit and admitted)
        assert victim is None or victim not in arena.resident
        if at % 50 == 0:
            arena.check()


def sessions(count: int, *, seed: int) -> list[tuple[float, int, list[int]]]:
    """Requests of sessions that stay on one of 40 topics, of which a few are popular."""
    rng = np.random.default_rng(seed)
    requests = []
    time_s = 0.0
    open_sessions: list[tuple[int, int]] = []
    for number in range(count):
        time_s += float(rng.exponential(20.0))
        if open_sessions and rng.random() < 0.5:
            session, topic = open_sessions[int(rng.integers(len(open_sessions)))]
        else:
            session, topic = number, int(rng.zipf(1.3)) % 40
            open_sessions = [*open_sessions[-3:], (session, topic)]
        requests.append((time_s, session, (topic * 12 + rng.permutation(12)[:5]).tolist()))
    return requests


def hit_ratio(policy: StokerPolicy, requests: list[tuple[float, int, list[int]]]) -> float:
    hits = total = 0
    for time_s, session, keys in requests:
        for key in keys:
            hits += policy.access(key, session=session, time_s=time_s).hit
            total += 1
        policy.close_request()
    policy.arena.check()
    return hits / total


def test_forecast_beats_what_knows_no_sessions() -> None:
    requests = sessions(1500, seed=2)
    lru = Lru(40)
    plain = np.mean([lru.access(key) for _, _, keys in requests for key in keys])
    policy = StokerPolicy(40)
    assert hit_ratio(policy, requests) > plain + 0.05
    assert policy.active == "forecast"


def test_leaving_the_forecast_needs_more_than_one_good_block() -> None:
    arena = Arena(64, candidates=(Newest,), block_accesses=32)
    forecast = ForecastCache(64, SessionForecast())  # observes nothing, so it never hits
    arena.enter(forecast)
    keys = [*range(16), *range(16)] * 2  # a block with 16 hits for the other, one with 32
    for key in keys:
        arena.access(key)
        forecast.observe([], None, 0.0)
    assert arena.hits == [48, 0]
    assert arena.active == "forecast"
    for key in keys * 2:
        arena.access(key)
        forecast.observe([], None, 0.0)
    assert [(switch.before, switch.after) for switch in arena.switches] == [("forecast", "newest")]
    arena.check()


def test_a_key_named_twice_in_a_request_does_not_count_against_the_forecast() -> None:
    cache = ForecastCache(4, SessionForecast())
    assert [cache.access(key) for key in ("a", "b", "a", "a")] == [False, False, True, True]
    cache.observe(["a", "b"], "session", 1.0)
    assert not cache.access("a")  # it comes with `renew`, which was not called
    cache.observe(["a"], "session", 2.0)
    cache.renew(swap=False)
    assert cache.access("a")


def test_every_prefetch_ends_in_one_way() -> None:
    policy = StokerPolicy(40, PrefetchSettings(placement_swap_gain=1.0))
    hit_ratio(policy, sessions(800, seed=3))
    account = policy.prefetch
    ended = account.useful + account.late + account.unused + account.polluting
    assert account.issued_total == ended + account.pending > 0
    assert account.useful > 0


def test_prefetch_can_be_switched_off() -> None:
    policy = StokerPolicy(40)
    policy.prefetch_enabled = False
    hit_ratio(policy, sessions(400, seed=3))
    assert policy.prefetch.issued_total == 0


def test_a_load_cannot_arrive_in_no_time() -> None:
    account = PrefetchAccount()
    account.issued("a", "victim", 5.0)
    account.issued("b", None, 5.0)
    assert not account.hit("a", 5.0)
    assert account.hit("b", 5.1)
    assert (account.late, account.useful) == (1, 1)


def test_pollution_needs_an_unused_prefetch_and_a_miss() -> None:
    account = PrefetchAccount()
    account.issued("a", "x", 1.0)
    account.issued("b", "y", 1.0)
    account.missed("x")
    account.evicted("a")
    account.evicted("b")
    account.missed("y")
    assert (account.polluting, account.unused) == (1, 1)


def test_prefetching_that_pollutes_loses_its_room() -> None:
    account = PrefetchAccount()
    scales = []
    for round_number in range(20):
        for i in range(64):
            account.issued(i, -1 - i, float(round_number))
            if round_number < 10:
                account.missed(-1 - i)
                account.evicted(i)
            else:
                account.hit(i, round_number + 0.5)
        scales.append(account.area_scale())
    assert scales[:3] == [0.5, 0.25, 0.125]
    assert min(scales) == 1 / 64
    assert scales[-1] > scales[9]


def test_requests_close_themselves_when_session_or_time_changes() -> None:
    explicit, implicit = StokerPolicy(40), StokerPolicy(40)
    requests = sessions(300, seed=4)
    first = hit_ratio(explicit, requests)
    decisions = [
        implicit.access(key, session=session, time_s=time_s)
        for time_s, session, keys in requests
        for key in keys
    ]
    assert np.mean([decision.hit for decision in decisions]) == pytest.approx(first)
    # What is to be loaded ahead is told to somebody.
    told = sum(len(decision.ahead) for decision in decisions)
    assert told == implicit.prefetch.issued_total > 0


@pytest.mark.parametrize("each", [2, 10])
def test_renewing_for_several_requests_costs_little_and_accounts_for_all(each: int) -> None:
    requests = sessions(1500, seed=2)
    always = StokerPolicy(40)
    first = hit_ratio(always, requests)
    policy = StokerPolicy(40)
    hits = ahead = 0
    for number, (time_s, session, keys) in enumerate(requests):
        for key in keys:
            decision = policy.access(key, session=session, time_s=time_s)
            hits += decision.hit
            ahead += len(decision.ahead)
        assert not any(move.ahead for move in policy.close_request(renew=False))
        if number % each == 0:
            ahead += sum(move.ahead for move in policy.renew())
            assert policy.renew() == []
            policy.arena.check()
    assert ahead == policy.prefetch.issued_total > 0
    total = sum(len(keys) for _, _, keys in requests)
    assert hits / total > first - 0.005 * each


def test_forecast_learns_explains_and_stays_bounded() -> None:
    forecast = SessionForecast(keys_max=64, sessions_max=10)
    for time_s, session, keys in sessions(600, seed=6):
        forecast.observe([f"k{key}" for key in keys], session, time_s)
        rates = forecast.rates()
        assert len(rates) == len(forecast.keys) <= 64
        assert np.isfinite(rates).all()
        assert (rates > 0.0).all()
    assert np.isfinite(forecast.weights).all()
    assert (forecast.weights >= 0.0).all()
    terms = forecast.explain(forecast.keys[int(np.argmax(forecast.rates()))])
    assert next(iter(terms)) in {"last turn", "last turn by rank", "companions", "popularity"}
    assert forecast.explain("never seen") == {}


def test_forecast_survives_time_that_stands_jumps_and_returns() -> None:
    forecast = SessionForecast()
    for time_s in (0.0, 0.0, 1e9, 5.0, 2e9):
        forecast.observe(["a", "b"], "s", time_s)
        assert np.isfinite(forecast.rates()).all()


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ConfigError):
        StokerPolicy(0)


@pytest.mark.parametrize(
    "bad",
    [
        {"placement_swap_gain": 0.9},
        {"placement_area_ratio": 1.1},
        {"placement_switch_cost": -1.0},
        {"placement_mini_capacity": 0},
        {"heat_weight_recency": 0.4},
        {"heat_tau_s": 0.0},
        {"heat_decay": "logarithmic"},
        {"heat_queue_threshold": 0.9},
        {"graph_window_chunks": 0},
        {"graph_transition_chunks": -1},
        {"heat_result_weight": -1.0},
        {"pagerank_damping": 1.0},
        {"warm_budget_ratio": 0.0},
        {"heat_weight_frequency": float("nan")},
    ],
)
def test_impossible_settings_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PrefetchSettings(**bad)
