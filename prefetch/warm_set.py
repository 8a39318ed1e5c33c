"""What a warm-up made resident, kept so that its prediction can be held against what came.

A receipt predicts which share of the coming accesses its units will serve. What searches find in
memory later says nothing about that: pages that they read themselves count there too, and make any
warm-up look right. So the accesses that came are laid over the units as a plan lays demand over
them, each counting one, as in `coverage_curve`, and measured is

    n / (n + o) * covered / total + o / (n + o) * anywhere / total

with n accesses to known keys and o to keys that the heat has no room for; total is the benefit of
all units by those n, covered that of the warm ones, anywhere what the warm ones would have were
each as hot as the mean of its kind: the terms of `plan.predicted_ratio`, but of accesses that
came. Whether a unit is still resident is not asked: what demand evicted, the warm-up had served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.plan import benefit_sums, unit_benefit
from stoker.prefetch.protocols import ContentKey, UnitBatch

# Units may go one by one; where more went than this, their source has laid its content out anew.
GONE_RATIO_MAX: Final = 0.01


@dataclass(frozen=True)
class Accesses:
    """Accesses of a span of time.

    Attributes:
        by_key: How many fell on each content key.
        outside: How many fell on keys that the heat has no room for.
    """

    by_key: Mapping[ContentKey, float] = field(default_factory=dict)
    outside: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return round(sum(self.by_key.values())) + self.outside


class WarmSet:
    """The units that one warm-up loaded or found there. One thread at a time.

    Invariant: a unit is added once; four bytes are kept of each.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], list[tuple[NDArray[np.uint32], float]]] = {}

    def add(self, source: str, kind: str, units: NDArray[np.uint32], share: float) -> None:
        """Note the units of one load call.

        Args:
            units: uint32, shape (n,).
            share: How many of them came in, in [0, 1]: which of them is not known.
        """
        if len(units) and share > 0.0:
            self._parts.setdefault((source, kind), []).append((units, share))

    def still_offered(self, batches: Sequence[UnitBatch]) -> bool:
        """Tell whether the units are still those that their sources offer, but for a hundredth.

        After a merge the same content lies in other units, and what was warm cannot be told.
        """
        parts = self._parts.items()
        count = sum(len(units) for _, calls in parts for units, _ in calls)
        there = 0
        for key, calls in parts:
            offered = [batch.units for batch in batches if (batch.source, batch.kind) == key]
            mine = np.concatenate([units for units, _ in calls])
            if offered:
                there += int(np.count_nonzero(np.isin(mine, np.concatenate(offered))))
        return count - there <= GONE_RATIO_MAX * count

    def served(self, batches: Sequence[UnitBatch], accesses: Accesses) -> float | None:
        """Return the share of the accesses that fell on these units, in [0, 1]; formula above.

        Args:
            batches: What the sources offer for ``accesses.by_key`` as the heat.
            accesses: What came after the warm-up.

        Returns:
            None where no access fell on anything that the sources have.
        """
        sums = benefit_sums(batches)
        total = sum(sums)
        known = float(sum(accesses.by_key.values()))
        if known <= 0.0 or total <= 0.0:
            return None
        means = unit_benefit(batches, sums)
        covered = anywhere = 0.0
        for batch in batches:
            share = self._shares(batch)
            covered += float(batch.benefit.astype(np.float64) @ share)
            mean = means.get((batch.source, batch.kind, batch.stage), 0.0)
            anywhere += mean * float(share.sum())
        served = known * covered / total + accesses.outside * anywhere / total
        return min(1.0, served / (known + accesses.outside))

    def _shares(self, batch: UnitBatch) -> NDArray[np.float64]:
        """Return how much of each unit of a batch is warm, float64, shape (n,)."""
        calls = self._parts.get((batch.source, batch.kind), [])
        found = np.zeros(len(batch.units))
        if calls:
            mine = np.concatenate([units for units, _ in calls])
            shares = np.repeat([share for _, share in calls], [len(units) for units, _ in calls])
            order = np.argsort(mine)
            at = np.minimum(np.searchsorted(mine, batch.units, sorter=order), len(mine) - 1)
            rows = order[at]
            here = mine[rows] == batch.units
            found[here] = shares[rows[here]]
        return found
