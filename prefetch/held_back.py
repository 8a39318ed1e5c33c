"""What a warm set will serve, tried on the newest accesses: planned as if they had not come yet.

A receipt's prediction is held against the share of the next accesses' looks that fall on the warm
units (`warm_set`). So is this: the newest span of accesses is taken back out of the demand, the
units are put into the plan's order by what is left, and the looks of the span are laid over them;
then the same with the span before, and so on. That gives, for each share c of the demand's benefit
that the first units hold, the share of the looks that came: F(c), as in `coverage_curve`, but over
units instead of keys. A unit holds hot keys and cold ones, and some looks fall anywhere in a kind:
so what a new key costs, or a key that only seemed hot, is less over units than over keys.

Spans, their weights and the prior are those of `coverage_curve`; but at most an eighth of the kept
accesses is a span, so that half of them is left to plan by. Benefits must add up over heats
(`UnitBatch`), so that a span's can be taken from the whole's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.coverage_curve import CELLS, Coverage
from stoker.prefetch.pieces import Rest, no_rest
from stoker.prefetch.plan import benefit_sums, plan_warm, unit_benefit
from stoker.prefetch.protocols import ContentKey, UnitBatch, WarmSource, units_offered

Floats = NDArray[np.float64]

_GRID: Final = np.linspace(0.0, 1.0, CELLS + 1)


@dataclass(frozen=True)
class HeldBack:
    """A span of accesses.

    Attributes:
        counts: How many fell on each content key.
        taken: What they are worth in the demand, by content key.
        outside: How many fell on keys that the heat has no room for.
        weight: What one counts in the prediction.
    """

    counts: Mapping[ContentKey, float]
    taken: Mapping[ContentKey, float]
    outside: int
    weight: float


def unit_coverage(
    batches: Sequence[UnitBatch],
    sources: Sequence[WarmSource],
    spans: Sequence[HeldBack],
    *,
    rest: Rest = no_rest,
) -> Coverage | None:
    """Return F over these units; None where no span fell on any of them.

    Args:
        batches: What the sources offer by the whole demand.
        sources: Asked for the spans' benefits: two calls each, with few keys.
        spans: The newest first.
        rest: Called between two pieces of work, see `run_warm`.
    """
    offered = [batch for batch in batches if len(batch.units)]
    places = _places(offered, rest)
    starts = np.cumsum([0, *(len(batch.units) for batch in offered)]).tolist()
    left = np.concatenate([np.zeros(0), *(batch.benefit.astype(np.float64) for batch in offered)])
    total_bytes = sum(len(batch.units) * batch.unit_bytes for batch in offered)
    below, accesses = np.zeros(CELLS + 1), 0.0
    for span in spans:
        _add(left, places, _asked(sources, span.taken, rest), -1.0, rest)
        before, came = np.maximum(left, 0.0), np.zeros(len(left))
        counted = _asked(sources, span.counts, rest)
        _add(came, places, counted, 1.0, rest)
        looks = float(came.sum())
        known = sum(span.counts.values())
        if not known or looks <= 0.0 or not before.any():
            continue
        plan = plan_warm(
            [
                # By their rows, which then need not be looked up step by step.
                replace(
                    batch,
                    units=np.arange(start, end, dtype=np.uint32),
                    benefit=before[start:end].astype(np.float32),
                )
                for batch, start, end in zip(offered, starts, starts[1:], strict=False)
            ],
            budget_bytes=None,
            round_bytes=max(1, total_bytes // CELLS),
            rest=rest,
        )
        rest()
        means = unit_benefit(counted, benefit_sums(counted))
        rows = np.concatenate([step.units for step in plan.steps])
        lengths = [len(step.units) for step in plan.steps]
        first = np.cumsum([0, *lengths[:-1]])
        rest()
        held = _rising(np.add.reduceat(before[rows], first))
        served = _rising(np.add.reduceat(came[rows], first))
        anywhere = _rising(
            [
                means.get((step.source, step.kind, step.stage), 0.0) * length
                for step, length in zip(plan.steps, lengths, strict=True)
            ]
        )
        rest()
        shares = held / max(float(held[-1]), 1e-300)
        fell = known * served / looks
        fell += span.outside * np.minimum(1.0, anywhere / looks)
        below += span.weight * np.interp(_GRID, shares, fell)
        accesses += span.weight * (known + span.outside)
    if not accesses:
        return None
    return Coverage(0.0, tuple(below.tolist()), max(accesses, float(below[-1])))


@dataclass(frozen=True)
class _Places:
    """Units of a kind, rising, and where each is among all units of all batches."""

    units: NDArray[np.uint32]
    rows: NDArray[np.int64]


def _places(batches: Sequence[UnitBatch], rest: Rest) -> dict[tuple[str, str], _Places]:
    parts: dict[tuple[str, str], list[tuple[NDArray[np.uint32], NDArray[np.int64]]]] = {}
    start = 0
    for batch in batches:
        rows = np.arange(start, start + len(batch.units))
        parts.setdefault((batch.source, batch.kind), []).append((batch.units, rows))
        start += len(batch.units)
    found: dict[tuple[str, str], _Places] = {}
    for key, mine in parts.items():
        units = np.concatenate([units for units, _ in mine])
        order = np.argsort(units, kind="stable")
        found[key] = _Places(units[order], np.concatenate([rows for _, rows in mine])[order])
        rest()
    return found


def _rising(parts: Floats | list[float]) -> Floats:
    """Return the sums from the first part on, with a 0 before them."""
    return np.concatenate([[0.0], np.cumsum(parts)])


def _asked(
    sources: Sequence[WarmSource], heat: Mapping[ContentKey, float], rest: Rest
) -> list[UnitBatch]:
    return [batch for source in sources for batch in units_offered(source, heat, rest)]


def _add(
    benefits: Floats,
    places: Mapping[tuple[str, str], _Places],
    batches: Sequence[UnitBatch],
    sign: float,
    rest: Rest,
) -> None:
    """Add the benefits of units to their rows; what lies elsewhere by now is left out."""
    for batch in batches:
        mine = places.get((batch.source, batch.kind))
        if mine is None:
            continue
        at = np.minimum(np.searchsorted(mine.units, batch.units), len(mine.units) - 1)
        there = mine.units[at] == batch.units
        benefits[mine.rows[at[there]]] += sign * batch.benefit[there].astype(np.float64)
        rest()
