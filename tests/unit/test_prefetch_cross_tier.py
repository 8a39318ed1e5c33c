"""The condition of cross-tier prefetch, from counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.prefetch.cross_tier import CrossTierCondition
from stoker.prefetch.regime import cross_tier_open


def after(
    *, wait_us: int = 0, gpu: tuple[int, int] | None = (0, 0), seconds: float = 1.0
) -> CrossTierCondition:
    condition = CrossTierCondition()
    condition.observe(0.0, demand_wait_us=0, gpu=(0, 0) if gpu is not None else None)
    condition.observe(seconds, demand_wait_us=wait_us, gpu=gpu)
    return condition


def test_it_opens_at_a_missing_gpu_and_an_idle_device() -> None:
    state = after(wait_us=200_000, gpu=(87, 13)).state
    assert state.open
    assert (state.gpu_miss_ratio, state.nvme_idle_ratio) == (0.13, 0.8)


def test_each_half_alone_keeps_it_closed() -> None:
    assert not after(wait_us=200_000, gpu=(88, 12)).state.open
    assert not after(wait_us=350_000, gpu=(0, 100)).state.open


def test_without_a_gpu_or_without_demand_there_is_no_ratio() -> None:
    assert after(gpu=None).state.gpu_miss_ratio is None
    assert not after(gpu=None).state.open
    assert after(gpu=(0, 0)).state.gpu_miss_ratio is None


def test_waits_of_many_threads_count_as_busy_and_not_below_zero() -> None:
    assert after(wait_us=8_000_000, gpu=(0, 9)).state.nvme_idle_ratio == 0.0


def test_counters_that_start_anew_change_nothing_for_a_stretch() -> None:
    condition = after(wait_us=100_000, gpu=(50, 50))
    assert condition.state.open
    before = condition.state
    assert condition.observe(2.0, demand_wait_us=10, gpu=(1, 1)) == before
    now = condition.observe(3.0, demand_wait_us=10, gpu=(11, 1))
    assert now.gpu_miss_ratio == 0.0
    assert not now.open


def test_a_stretch_is_taken_whole() -> None:
    condition = after(gpu=(0, 10), seconds=0.5)
    assert condition.state.gpu_miss_ratio is None
    assert condition.observe(1.0, demand_wait_us=0, gpu=(0, 10)).open


@given(
    waits=st.lists(st.integers(0, 10**8), max_size=20),
    hits=st.lists(st.integers(0, 10**6), min_size=20, max_size=20),
    loads=st.lists(st.integers(0, 10**6), min_size=20, max_size=20),
)
def test_ratios_stay_in_bounds_and_agree_with_the_rule(
    waits: list[int], hits: list[int], loads: list[int]
) -> None:
    condition = CrossTierCondition(stretch_s=0.0)
    for at, wait in enumerate(waits):
        state = condition.observe(float(at), demand_wait_us=wait, gpu=(hits[at], loads[at]))
        assert 0.0 <= state.nvme_idle_ratio <= 1.0
        miss = state.gpu_miss_ratio
        assert miss is None or 0.0 <= miss <= 1.0
        assert state.open == (miss is not None and cross_tier_open(miss, state.nvme_idle_ratio))


def test_the_counts_of_a_real_slab_open_it() -> None:
    pytest.importorskip("torch")
    from stoker.kernels.device import Device
    from stoker.kernels.slab import PageSlab

    slab = PageSlab(Device("cpu"), page_bytes=64, frames_max=2, pages=8)
    condition = CrossTierCondition()

    def observed(now_s: float) -> bool:
        counts = slab.counts()
        return condition.observe(now_s, demand_wait_us=0, gpu=(counts.hits, counts.loads)).open

    assert not observed(0.0)
    for page in (0, 1, 2, 3, 0, 1, 2, 3):  # twice as many pages as frames, in turn
        slab.load(page, bytes(64))
    assert observed(1.0)
    assert condition.state.gpu_miss_ratio == 1.0
    for _ in range(50):
        slab.load(3, bytes(64))
    assert not observed(2.0)
    assert condition.state.gpu_miss_ratio == 0.0
