"""The arena's candidates keep their bounds, and hit as the reference implementations do."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prefetch.candidates import CANDIDATES, Candidate, DecayedFrequency, Lru
from stoker.prefetch.references import reference
from stoker.prefetch.tiered import QLearning

LEARNED = (QLearning,) if importlib.util.find_spec("torch") else ()


@pytest.mark.parametrize("policy", [*CANDIDATES, *LEARNED])
@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.integers(0, 15), max_size=300),
    capacity=st.integers(1, 9),
)
def test_capacity_and_the_key_that_left(
    policy: type[Candidate], keys: list[int], capacity: int
) -> None:
    cache = policy(capacity)
    inside: set[object] = set()
    for key in keys:
        before = key in cache
        assert cache.access(key) == before == (key in inside)
        if not before:
            inside.add(key)
            inside.discard(cache.gone)
        else:
            assert cache.gone is None
        assert {k for k in range(16) if k in cache} == inside
        assert len(cache) == len(inside) <= capacity
        assert sorted(cache.keys()) == sorted(inside)  # type: ignore[type-var]


@given(keys=st.lists(st.integers(0, 15), max_size=200), capacity=st.integers(1, 9))
def test_lru_equals_the_plain_model(keys: list[int], capacity: int) -> None:
    cache, model = Lru(capacity), OrderedDict[int, None]()
    for key in keys:
        assert cache.access(key) == (key in model)
        model.pop(key, None)
        model[key] = None
        if len(model) > capacity:
            model.popitem(last=False)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("lru", 0.0), ("sieve", 0.002), ("arc", 0.002), ("s3-fifo", 0.005), ("w-tinylfu", 0.03)],
)
@pytest.mark.parametrize("capacity", [120, 700])
def test_hit_ratio_is_that_of_the_reference(name: str, tolerance: float, capacity: int) -> None:
    rng = np.random.default_rng(11)
    keys = rng.zipf(1.25, 40_000) % 9000
    keys[20_000:] = (keys[20_000:] * 7 + 13) % 9000  # the popular ones change half-way
    keys = keys.astype(np.int64)
    policy = next(p for p in CANDIDATES if p.name == name)
    cache = policy(capacity)
    ours = np.mean([cache.access(key) for key in keys.tolist()])
    theirs = reference(name, capacity).run(keys).mean()
    assert ours == pytest.approx(theirs, abs=tolerance)


def test_decayed_frequency_forgets() -> None:
    cache = DecayedFrequency(2, half_life_ratio=5.0)
    for key in ["a"] * 50 + ["b"] * 20:
        cache.access(key)
    for _ in range(60):
        cache.access("b")
    cache.access("c")
    assert "b" in cache
    assert "a" not in cache
