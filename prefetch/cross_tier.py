"""The condition under which keys are fetched across tiers, from what was counted.

``gpu_miss_ratio > 0.12 and nvme_idle_ratio > 0.65`` (`regime.cross_tier_open`; source: the
project's seed text), over the last stretch of at least ``stretch_s``:

* GPU misses: pages that had to be copied to the GPU over pages asked of its slab, from the slab's
  own counts (`kernels.slab.SlabCounts`: ``loads`` and ``hits``). Without a GPU tier, or while
  nothing was asked of it, there is no ratio, and the condition does not hold. So it is in every
  server today: none gives the placement a `gpu_counts`; only tests do.
* NVMe idle: the share of the stretch in which no search waited for a read, from the page pool's
  ``demand_wait_us``. Waits of several threads at once are added up, so that a busy device never
  looks idle; a little traffic over many threads may look busier than it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.prefetch.regime import cross_tier_open


@dataclass(frozen=True)
class CrossTierState:
    """What the last whole stretch was.

    Attributes:
        open: Whether to prefetch across tiers.
        gpu_miss_ratio: In [0, 1]; None without a GPU tier or demand for it.
        nvme_idle_ratio: In [0, 1].
    """

    open: bool
    gpu_miss_ratio: float | None
    nvme_idle_ratio: float


class CrossTierCondition:
    """Follows the counters. One thread at a time.

    Invariant: ratios are in [0, 1], whatever the counters do (they start anew with a generation).
    """

    def __init__(self, *, stretch_s: float = 1.0) -> None:
        self._stretch_s = stretch_s
        self._since: tuple[float, int, int, int] | None = None
        self.state = CrossTierState(False, None, 0.0)

    def observe(
        self, now_s: float, *, demand_wait_us: int, gpu: tuple[int, int] | None = None
    ) -> CrossTierState:
        """Take the counters as they are now; returns the state of the last whole stretch.

        Args:
            now_s: Monotonic seconds.
            demand_wait_us: Microseconds that searches have waited for reads so far.
            gpu: (hits, loads) of the GPU slab so far; None where there is no GPU tier.
        """
        hits, loads = gpu or (0, 0)
        if self._since is None:
            self._since = (now_s, demand_wait_us, hits, loads)
            return self.state
        then_s, wait_us, hits_before, loads_before = self._since
        if now_s - then_s < self._stretch_s:
            return self.state
        self._since = (now_s, demand_wait_us, hits, loads)
        if demand_wait_us < wait_us or hits < hits_before or loads < loads_before:
            return self.state  # other counters: the next stretch is theirs
        busy = (demand_wait_us - wait_us) / 1e6 / (now_s - then_s)
        idle = max(0.0, 1.0 - busy)
        asked = hits - hits_before + loads - loads_before
        miss = (loads - loads_before) / asked if asked else None
        is_open = miss is not None and cross_tier_open(miss, idle)
        self.state = CrossTierState(is_open, miss, idle)
        return self.state
