"""The cross-tier condition from what real parts count: a page pool's waits, a GPU slab's misses.

A collection on disk answers cold searches, so its pool waits for reads; pages go through a slab on
the device facade's CPU. Only the clock is made: a wait of so long is more or less of a stretch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.prefetch.cross_tier import CrossTierCondition
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.collection_index import CollectionIndex
from stoker.service.placement_wiring import LivePlacement

ROWS, DIM = 3_000, 64
PAGE = 4096


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cross") / "index"
    vectors = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    build_collection(path, vectors, [f"d{row}" for row in range(ROWS)], threads=1)
    return path


def test_the_condition_follows_the_pools_and_the_slabs_own_counters(built: Path) -> None:
    pytest.importorskip("torch")
    from stoker.kernels.device import Device
    from stoker.kernels.slab import PageSlab

    slab = PageSlab(Device("cpu"), page_bytes=PAGE, frames_max=8, pages=64)
    content = bytes(PAGE)
    now = 0.0

    def gpu_counts() -> tuple[int, int]:
        counts = slab.counts()
        return counts.hits, counts.loads

    def page_through(pages: list[int]) -> None:
        for page in pages:
            slab.load(page, content)

    index = CollectionIndex(Collection(built, "r"))
    try:
        placement = LivePlacement(
            PrefetchSettings(),
            room_keys=8,
            act=False,
            cpu_ratio_max=1.0,
            sources=index.warm_sources,
            demand_wait_us=index.demand_wait_us,
            searched_s=index.searched_s,
            gpu_counts=gpu_counts,
            monotonic=lambda: now,
            pause=lambda seconds: None,
        )
        placement.tick()
        assert placement.report().cross_tier.gpu_miss_ratio is None
        before_us = index.demand_wait_us()
        rng = np.random.default_rng(2)
        for query in rng.standard_normal((60, DIM)).astype(np.float32):
            index.search(query, 10)
        waited_s = (index.demand_wait_us() - before_us) / 1e6
        _, misses = index.page_counts()
        assert misses > 0
        assert waited_s > 0.0  # each of those misses was a read that a search waited for

        # The slab misses every time, but searches waited for half of the stretch: closed.
        page_through(list(range(16)) * 2)
        assert gpu_counts() == (0, 32)
        condition = CrossTierCondition(stretch_s=0.0)
        condition.observe(0.0, demand_wait_us=before_us, gpu=(0, 0))
        busy = condition.observe(
            2.0 * waited_s, demand_wait_us=index.demand_wait_us(), gpu=gpu_counts()
        )
        assert busy.gpu_miss_ratio == 1.0
        assert busy.nvme_idle_ratio == pytest.approx(0.5)
        assert not busy.open

        # A stretch in which they waited for a tenth: open. From here on through live placement.
        now += max(1.0, 10.0 * waited_s)
        placement.tick()
        state = placement.report().cross_tier
        assert state.gpu_miss_ratio == 1.0
        assert state.nvme_idle_ratio == pytest.approx(1.0 - waited_s / now)
        assert state.open

        # Warm searches wait for nothing, and the slab misses one page of eight: open.
        between_us = index.demand_wait_us()
        for query in rng.standard_normal((5, DIM)).astype(np.float32):
            for _ in range(3):
                index.search(query, 10)
        waited_s = (index.demand_wait_us() - between_us) / 1e6
        resident = list(range(8, 16))
        page_through(resident * 7 + list(range(16, 24)))
        began, now = now, now + 100.0 * max(1.0, waited_s)
        placement.tick()
        state = placement.report().cross_tier
        assert state.gpu_miss_ratio == pytest.approx(8 / 64)
        assert state.nvme_idle_ratio == pytest.approx(1.0 - waited_s / (now - began))
        assert state.open

        # The same idle device, but the slab misses fewer than 12 of 100: closed.
        page_through(list(range(16, 24)) * 9 + list(range(24, 32)))
        now += 10.0
        placement.tick()
        state = placement.report().cross_tier
        assert state.gpu_miss_ratio == pytest.approx(8 / 80)
        assert not state.open
    finally:
        index.close()
