"""Bounds, monotonicity and limits of every formula of the prefetch room."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prefetch.coupling import coupled_score, entropy_gate
from stoker.prefetch.decay import (
    HYPERBOLIC_ERROR_MAX,
    DecayedCounts,
    DecayLaw,
    exponential_decay,
    hyperbolic_decay,
    logarithmic_decay,
)
from stoker.prefetch.entropy import AccessEntropy, normalised_entropy, shannon_entropy
from stoker.prefetch.entropy_regime import EntropyRegime, keep_value
from stoker.prefetch.granularity import CHUNK, SESSION, TOKEN
from stoker.prefetch.regime import (
    DriftAlarm,
    Regime,
    cross_tier_open,
    regime_for,
    sampled,
    sampling_rate,
)
from stoker.prefetch.score import TierAdvice, heat_score, log_share, recency, tier_advice
from stoker.prefetch.weights import OnlineWeights, simplex_projection

unit = st.floats(0.0, 1.0)
ages = st.floats(0.0, 1e8)
T0 = 1_760_000_000.0


@given(age=ages, later=ages, rate=st.floats(1e-7, 1.0))
def test_decays_are_bounded_and_monotone(age: float, later: float, rate: float) -> None:
    low, high = sorted((age, later))
    for law in (
        lambda t: exponential_decay(t, lambda_per_s=rate),
        lambda t: hyperbolic_decay(t, alpha_per_s=rate),
    ):
        assert 0.0 <= law(high) <= law(low) <= 1.0
        assert law(0.0) == law(-5.0) == 1.0
    grows = logarithmic_decay(np.array([low, high]), horizon_s=3600.0)
    assert 0.0 <= grows[0] <= grows[1] <= 1.0


@given(age=st.floats(0.0, 300.0), half_life=st.floats(1.0, 1e6))
def test_running_hyperbolic_law_is_close_to_the_formula(age: float, half_life: float) -> None:
    law = DecayLaw.named("hyperbolic", half_life_s=half_life)
    exact = hyperbolic_decay(age * half_life, alpha_per_s=1.0 / half_life)
    assert law.weight(age * half_life) == pytest.approx(exact, rel=HYPERBOLIC_ERROR_MAX)


@given(half_life=st.floats(1.0, 1e6))
def test_exponential_law_halves_at_its_half_life(half_life: float) -> None:
    law = DecayLaw.named("exponential", half_life_s=half_life)
    assert law.weight(half_life) == pytest.approx(0.5)


@settings(deadline=None)
@given(
    accesses=st.lists(
        st.tuples(st.integers(0, 5), st.floats(0.0, 3e7), st.floats(0.0, 5.0)), max_size=40
    ),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    kind=st.sampled_from(["exponential", "hyperbolic"]),
)
def test_decayed_counts_equal_the_sum_over_accesses(
    accesses: list[tuple[int, float, float]], cuts: list[int], kind: str
) -> None:
    law = DecayLaw.named(kind, half_life_s=3600.0)
    keys = np.array([a[0] for a in accesses], dtype=np.int64)
    times = T0 + np.array([a[1] for a in accesses], dtype=np.float64)
    amounts = np.array([a[2] for a in accesses], dtype=np.float64)
    now = float(times.max(initial=T0))
    whole, pieces = DecayedCounts(law, 6), DecayedCounts(law, 6)
    whole.add(keys, times, amounts)
    edges = [0, *sorted(min(c, len(keys)) for c in cuts), len(keys)]
    for first, last in itertools.pairwise(edges):
        pieces.add(keys[first:last], times[first:last], amounts[first:last])
    got = whole.values(now, slice(0, 6))
    expected = np.zeros(6)
    np.add.at(expected, keys, np.asarray(law.weight(now - times)) * amounts)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(pieces.values(now, slice(0, 6)), got)
    whole.check()


@given(
    terms=st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=20),
    raw=st.tuples(unit, unit, unit).filter(lambda w: sum(w) > 0.1),
)
def test_heat_score_is_bounded_and_rises_with_each_term(
    terms: list[tuple[float, float, float]], raw: tuple[float, float, float]
) -> None:
    weights = (raw[0] / sum(raw), raw[1] / sum(raw), raw[2] / sum(raw))
    columns = [np.array(column) for column in zip(*terms, strict=True)]
    base = heat_score(columns[0], columns[1], columns[2], weights=weights)
    assert ((base >= 0.0) & (base <= 1.0)).all()
    for at in range(3):
        raised = list(columns)
        raised[at] = np.minimum(raised[at] + 0.1, 1.0)
        assert (heat_score(raised[0], raised[1], raised[2], weights=weights) >= base).all()


@given(values=st.lists(st.floats(0.0, 1e9), min_size=1, max_size=20))
def test_log_share_keeps_order_and_reaches_one(values: list[float]) -> None:
    array = np.array(values)
    share = log_share(array, float(array.max()))
    assert ((share >= 0.0) & (share <= 1.0)).all()
    assert (np.diff(share[np.argsort(array, kind="stable")]) >= 0.0).all()
    assert share.max() == pytest.approx(1.0 if array.max() > 0.0 else 0.0)


@given(age=ages)
def test_recency_limits(age: float) -> None:
    value = float(recency(np.array([age]), tau_s=3600.0)[0])
    assert 0.0 <= value <= 1.0
    assert recency(np.array([0.0, 3600.0]), tau_s=3600.0) == pytest.approx([1.0, 1 / math.e])


def test_tier_thresholds() -> None:
    advice = [tier_advice(s, fast_threshold=0.85, queue_threshold=0.6) for s in (0.9, 0.85, 0.6)]
    assert advice == [TierAdvice.FAST, TierAdvice.QUEUE, TierAdvice.QUEUE]
    assert tier_advice(0.59, fast_threshold=0.85, queue_threshold=0.6) is TierAdvice.NVME


@settings(deadline=None)
@given(
    keys=st.lists(st.integers(0, 12), max_size=300), decay=st.sampled_from([1.0, 0.9992, 0.9, 0.5])
)
def test_running_entropy_equals_the_direct_one(keys: list[int], decay: float) -> None:
    entropy = AccessEntropy(decay=decay)
    weights: dict[int, float] = {}
    for key in keys:
        entropy.add(key)
        weights = {k: w * decay for k, w in weights.items()}
        weights[key] = weights.get(key, 0.0) + 1.0
    direct = shannon_entropy(weights.values())
    assert entropy.bits == pytest.approx(direct, abs=1e-9)
    assert 0.0 <= entropy.bits <= math.log2(max(1, len(weights))) + 1e-9
    assert 0.0 <= entropy.normalised <= 1.0


def test_entropy_stays_exact_over_many_accesses_and_restores() -> None:
    rng = np.random.default_rng(7)
    entropy = AccessEntropy()
    for key in (rng.zipf(1.2, 300_000) % 5000).tolist():
        entropy.add(str(key))
    assert entropy.bits == pytest.approx(entropy.exact(), abs=1e-9)
    copy = AccessEntropy.from_state(entropy.to_state())
    for key in ("1", "77", "1"):
        entropy.add(key)
        copy.add(key)
    assert copy.bits == entropy.bits


def test_entropy_limits() -> None:
    one, many = AccessEntropy(decay=1.0), AccessEntropy(decay=1.0)
    for key in range(64):
        one.add(0)
        many.add(key)
    assert one.bits == 0.0
    assert many.bits == pytest.approx(6.0)
    assert many.normalised == pytest.approx(1.0)
    assert normalised_entropy(3.0, 1) == 0.0


@given(entropy=unit, other=unit, fresh=unit)
def test_gate_and_coupled_score(entropy: float, other: float, fresh: float) -> None:
    low, high = sorted((entropy, other))
    assert 0.0 < entropy_gate(high) <= entropy_gate(low) < 1.0
    assert entropy_gate(0.5) == pytest.approx(0.5)
    score = coupled_score(fresh, entropy)
    assert 0.0 <= score <= 1.0
    assert coupled_score(1.0, entropy) >= score >= coupled_score(0.0, entropy)
    assert coupled_score(fresh, 1.0, steepness=500.0) == pytest.approx(0.0, abs=1e-9)
    assert coupled_score(fresh, 0.0, steepness=500.0) == pytest.approx(fresh)


@given(values=st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=6))
def test_simplex_projection_lands_on_the_simplex(values: list[float]) -> None:
    point = simplex_projection(np.array(values))
    assert (point >= 0.0).all()
    assert point.sum() == pytest.approx(1.0)


def test_weights_move_to_the_term_that_predicts() -> None:
    rng = np.random.default_rng(1)
    learner = OnlineWeights((0.5, 0.3, 0.2))
    for _ in range(3000):
        terms = rng.random(3)
        learner.observe(terms, float(terms[2] > 0.5))
        assert learner.weights.sum() == pytest.approx(1.0)
    assert learner.weights[2] > 0.9


def test_regimes_sampling_and_conditions() -> None:
    assert [regime_for(h) for h in (0.99, 1.0, 7.99, 8.0)] == [
        Regime.PIN,
        Regime.EVICT,
        Regime.EVICT,
        Regime.SHARD,
    ]
    assert (sampling_rate(4.19), sampling_rate(4.2)) == (0.25, 1.0)
    assert cross_tier_open(0.13, 0.66)
    assert not cross_tier_open(0.12, 0.66)
    assert not cross_tier_open(0.13, 0.65)


@given(distances=st.tuples(ages, ages), shares=st.tuples(unit, unit), entropy=unit)
def test_what_keeping_is_worth_falls_with_distance_and_rises_with_share(
    distances: tuple[float, float], shares: tuple[float, float], entropy: float
) -> None:
    near, far = sorted(distances)
    less, more = sorted(shares)
    for share in shares:
        worth = keep_value(near, share, entropy, room=9)
        assert 0.0 <= keep_value(far, share, entropy, room=9) <= worth <= 1.0
        assert keep_value(math.inf, share, entropy, room=9) <= worth
    assert keep_value(near, less, entropy, room=9) <= keep_value(near, more, entropy, room=9)
    assert keep_value(0.0, 1.0, entropy, room=1) == pytest.approx(1.0)
    assert keep_value(math.inf, 0.0, entropy, room=1) == 0.0


@settings(deadline=None)
@given(
    keys=st.lists(st.integers(0, 40), max_size=400),
    capacity=st.integers(1, 45),
    regime=st.sampled_from([None, *Regime]),
)
def test_a_cache_of_any_regime_keeps_its_bounds(
    keys: list[int], capacity: int, regime: Regime | None
) -> None:
    cache = EntropyRegime(capacity, regime=regime)
    inside: set[object] = set()
    for key in keys:
        assert cache.access(key) == (key in inside)
        inside.add(key)
        inside.discard(cache.gone)
        if regime is Regime.SHARD:
            inside.clear()
        assert set(cache.keys()) == inside
        cache.check()


def test_each_regime_does_what_it_says() -> None:
    pinned = EntropyRegime(2)
    for at in range(600):  # one key has nearly everything, a stream of others passes by
        pinned.access("hot" if at % 20 else f"once {at}")
    assert pinned.regime is Regime.PIN
    assert "hot" in pinned
    twice = EntropyRegime(3, regime=Regime.EVICT)
    for key in ("a", "a", "b", "c", "d", "e", "f"):  # LRU would have let it go
        twice.access(key)
    assert "a" in twice
    scattered = EntropyRegime(64)
    for key in range(4000):
        scattered.access(key)
    assert scattered.regime is Regime.SHARD
    full = len(scattered)
    assert not scattered.access("new")
    assert "new" not in scattered
    assert len(scattered) == full


def test_shares_add_up_to_one() -> None:
    entropy = AccessEntropy()
    assert entropy.share("a") == 0.0
    for key in "abracadabra" * 300:
        entropy.add(key)
    assert sum(map(entropy.share, "abrcd")) == pytest.approx(1.0)
    assert entropy.share("z") == 0.0
    assert entropy.share("a") > entropy.share("b")


def test_samples_have_their_rate_and_nest() -> None:
    ids = [f"event-{i}" for i in range(4000)]
    small = {i for i in ids if sampled(i, 0.25)}
    assert 0.22 < len(small) / len(ids) < 0.28
    assert small <= {i for i in ids if sampled(i, 0.5)}
    assert all(sampled(i, 1.0) for i in ids)


def test_drift_alarm_steps() -> None:
    alarm = DriftAlarm()
    assert alarm.observe(6.0, 9000) == 1.0
    assert alarm.observe(5.6, 9000) == 1.15
    assert alarm.observe(4.9, 9000) == 1.3
    assert alarm.observe(4.7, 9000) == 1.0
    assert alarm.observe(3.0, 5000) == 1.0


@given(age=st.floats(0.0, 1e5))
def test_grains_fade_in_their_own_time(age: float) -> None:
    assert TOKEN.heat(age) <= CHUNK.heat(age) <= SESSION.heat(age) <= 1.0
    assert CHUNK.heat(CHUNK.half_life_s) == pytest.approx(0.5)
    assert CHUNK.half_life_s == pytest.approx(138.28, abs=0.01)
