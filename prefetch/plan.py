"""Choose what to load, in which order, under a budget of bytes, bandwidth and time.

The order of a plan:

1. Stage 0 (the upper layers) always and whole, even where the budget is smaller: without them no
   search can start, so the pool brings them anyway.
2. Then stage by stage. Links and codes of a stage pay off only together, so they rise together:
   a unit's level is the share of its kind's benefit that lies in hotter units, and the lower
   level goes first whatever its kind. Any prefix of that order covers both kinds equally.
3. Everything else of a stage by benefit per byte, over all sources: one budget.
4. Units that nothing is known about (benefit 0) come last, in stage order, if room is left.

Where a source has room for all of it, and so has the budget, nothing is to be chosen: each stage is
read in the order of the file and in few large reads, its kinds at the same rate.

A plan over 500,000 units takes well under 100 ms: whole arrays, no loop over units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.coverage_curve import KNOWN, Coverage
from stoker.prefetch.pieces import Rest, no_rest
from stoker.prefetch.protocols import NAVIGATION_KINDS, NAVIGATION_STAGE, UnitBatch

REASON_ALWAYS = "upper layers: every search needs them"
REASON_NAVIGATION = "links and codes by rising coverage: they pay off only together"
REASON_DENSITY = "benefit per byte"
REASON_FILL = "room left: nothing is known about these units"
REASON_WHOLE = "everything fits: in the order of the file"
SKIP_BUDGET = "over the byte budget"
SKIP_TIME = "over bandwidth x deadline"
STAGE_MAX = 1000

_STEPS_AT_ONCE = 32  # made between two rests: some tens of µs

_ORDER_ALWAYS, _ORDER_NAVIGATION, _ORDER_DENSITY, _ORDER_FILL, _ORDER_WHOLE = range(5)
_REASONS = (REASON_ALWAYS, REASON_NAVIGATION, REASON_DENSITY, REASON_FILL, REASON_WHOLE)


@dataclass(frozen=True)
class WarmStep:
    """One load call: units of one kind, in the plan's order, and why they are in the plan."""

    source: str
    kind: str
    stage: int
    units: NDArray[np.uint32]
    unit_bytes: int
    benefit: float
    reason: str

    @property
    def bytes(self) -> int:
        """Bytes that the step's units take."""
        return len(self.units) * self.unit_bytes


@dataclass(frozen=True)
class PlanSkip:
    """Units of one kind that the plan leaves out, and why."""

    source: str
    kind: str
    stage: int
    units: int
    bytes: int
    benefit: float
    reason: str


@dataclass(frozen=True)
class WarmPlan:
    """What to load, in order, and what is left out.

    Attributes:
        steps: In load order; each a single call on its source.
        skips: What is left out, by source, kind and stage.
        limit_bytes: Bytes that the budget and the time allow; None means no limit.
        limit_reason: Which of the two limits is the tighter one.
        planned_bytes: Sum over the steps; above ``limit_bytes`` only by what stage 0 needs.
        benefit_total: Expected demand over all units, planned or not (hits per unit, summed).
        predicted_hit_ratio: The share of the expected unit accesses that find their unit
            resident, see `predicted_ratio`. 0 where nothing is expected.
        coverage: As given to `plan_warm`.
        unit_benefit: Mean benefit of the units offered, by source, kind and stage; as given.
    """

    steps: tuple[WarmStep, ...]
    skips: tuple[PlanSkip, ...]
    limit_bytes: int | None
    limit_reason: str
    planned_bytes: int
    benefit_total: float
    predicted_hit_ratio: float
    coverage: Coverage = KNOWN
    unit_benefit: Mapping[tuple[str, str, int], float] = field(default_factory=dict)

    def explain(self, source: str, kind: str, unit: int) -> str:
        """Say in one sentence why a unit is, or is not, in the plan."""
        before = 0
        for step in self.steps:
            if step.source == source and step.kind == kind:
                at = np.flatnonzero(step.units == unit)
                if len(at):
                    start = before + int(at[0]) * step.unit_bytes
                    return (
                        f"{source}/{kind} unit {unit} is loaded in stage {step.stage} after "
                        f"{start} bytes: {step.reason}"
                    )
            before += step.bytes
        reasons = [s.reason for s in self.skips if s.source == source and s.kind == kind]
        why = f"left out: {reasons[0]}" if reasons else "not offered by its source"
        return f"{source}/{kind} unit {unit} is {why}"


def byte_limit(
    *, budget_bytes: int | None, bandwidth_bytes_s: float | None, deadline_s: float | None
) -> tuple[int | None, str]:
    """Return how many bytes may be loaded, and which limit says so.

    ``limit = min(budget_bytes, bandwidth_bytes_s * deadline_s)``; a None drops its term.
    """
    if budget_bytes is not None and budget_bytes < 0:
        raise InputError(f"budget_bytes must be >= 0, got {budget_bytes}")
    for name, value in (("bandwidth_bytes_s", bandwidth_bytes_s), ("deadline_s", deadline_s)):
        if value is not None and not (np.isfinite(value) and value >= 0):
            raise InputError(f"{name} must be finite and >= 0, got {value}")
    in_time = None
    if bandwidth_bytes_s is not None and deadline_s is not None:
        product = float(bandwidth_bytes_s) * deadline_s
        in_time = int(product) if math.isfinite(product) else None
    if in_time is not None and (budget_bytes is None or in_time < budget_bytes):
        return in_time, SKIP_TIME
    return budget_bytes, SKIP_BUDGET


def predicted_ratio(*, covered: float, total: float, coverage: Coverage, anywhere: float) -> float:
    """Return the expected hit ratio, in [0, 1].

    ``F(covered / total) + (1 - F(1)) * anywhere / total``: what holds that share of the demand
    serves F of the coming accesses (`Coverage.at`). Those that all demand would not serve, to what
    has no heat, look at each kind as often, but fall anywhere in it: a kind that is resident whole
    serves them too.

    Args:
        covered: Benefit of the resident units.
        total: Benefit of all units; 0 gives 0.
        coverage: F.
        anywhere: What the resident units would bring if each were as hot as the mean of its kind.
    """
    if total <= 0.0:
        return 0.0
    unseen = 1.0 - coverage.at(1.0)
    return min(1.0, coverage.at(covered / total) + unseen * min(1.0, anywhere / total))


def benefit_sums(batches: Sequence[UnitBatch]) -> list[float]:
    """Return the benefit of each batch, over all its units."""
    return [float(batch.benefit.sum(dtype=np.float64)) for batch in batches]


def unit_benefit(
    batches: Sequence[UnitBatch], sums: Sequence[float]
) -> dict[tuple[str, str, int], float]:
    """Return the mean benefit of the units offered, by source, kind and stage.

    Args:
        sums: From `benefit_sums`.
    """
    totals: dict[tuple[str, str, int], tuple[float, int]] = {}
    for batch, added in zip(batches, sums, strict=True):
        key = (batch.source, batch.kind, batch.stage)
        benefit, units = totals.get(key, (0.0, 0))
        totals[key] = (benefit + added, units + len(batch.units))
    return {key: benefit / units for key, (benefit, units) in totals.items() if units}


def _check(batch: UnitBatch) -> None:
    where = f"batch {batch.source}/{batch.kind} stage {batch.stage}"
    if len(batch.units) != len(batch.benefit):
        raise InputError(f"{where}: {len(batch.units)} units but {len(batch.benefit)} benefits")
    if batch.unit_bytes < 1:
        raise InputError(f"{where}: unit_bytes must be >= 1, got {batch.unit_bytes}")
    if not 0 <= batch.stage <= STAGE_MAX:
        raise InputError(f"{where}: stage must be in 0..{STAGE_MAX}")
    if len(batch.benefit) and not (
        np.isfinite(batch.benefit).all() and float(batch.benefit.min()) >= 0.0
    ):
        raise InputError(f"{where}: benefits must be finite and >= 0")


def _coverage_level(benefit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each unit, the share of its kind's benefit that lies in hotter units."""
    total = float(benefit.sum())
    if total <= 0.0:
        return np.zeros_like(benefit)
    before = np.cumsum(benefit)
    before -= benefit
    before /= total
    return before


@dataclass(frozen=True)
class _Columns:
    """All units of all batches, one row a unit, in load order."""

    batch: NDArray[np.int32]
    unit: NDArray[np.uint32]
    nbytes: NDArray[np.int64]
    benefit: NDArray[np.float64]
    group: NDArray[np.int8]


def _ordered(batches: Sequence[UnitBatch], whole_sources: Collection[str], rest: Rest) -> _Columns:
    batch_of: list[NDArray[np.int32]] = []
    major: list[NDArray[np.int64]] = []
    minor: list[NDArray[np.float64]] = []
    group: list[NDArray[np.int8]] = []
    units: list[NDArray[np.uint32]] = []
    benefits: list[NDArray[np.float64]] = []
    stage_max = max((b.stage for b in batches), default=0) + 1
    for number, batch in enumerate(batches):
        benefit = batch.benefit.astype(np.float64)
        unit = batch.units.astype(np.uint32, copy=False)
        whole = batch.source in whole_sources
        if whole and batch.stage > 0:
            order = np.argsort(unit, kind="stable")
            benefit, unit = benefit[order], unit[order]
        elif len(benefit) > 1 and bool((np.diff(benefit) > 0).any()):
            order = np.argsort(-benefit, kind="stable")
            benefit, unit = benefit[order], unit[order]
        n = len(unit)
        if batch.stage == 0:
            code, key = _ORDER_ALWAYS, np.arange(n, dtype=np.float64)
        elif whole:
            code, key = _ORDER_WHOLE, np.arange(n, dtype=np.float64) / n
        elif batch.stage == NAVIGATION_STAGE and batch.kind in NAVIGATION_KINDS:
            code, key = _ORDER_NAVIGATION, _coverage_level(benefit)
        else:
            code, key = _ORDER_DENSITY, -benefit / batch.unit_bytes
        groups = np.full(n, code, dtype=np.int8)
        rank = np.full(n, batch.stage * 5 + code, dtype=np.int64)
        if batch.stage > 0 and not whole:
            unknown = benefit <= 0.0
            groups[unknown] = _ORDER_FILL
            rank[unknown] = (stage_max + batch.stage) * 5 + code
        batch_of.append(np.full(n, number, dtype=np.int32))
        major.append(rank)
        minor.append(key)
        group.append(groups)
        units.append(unit)
        benefits.append(benefit)
        rest()
    rank_all = np.concatenate(major)
    key_all = np.concatenate(minor)
    # Two stable passes; the inputs are runs that are sorted already, which makes them cheap.
    order = np.argsort(key_all, kind="stable")
    rest()
    order = order[np.argsort(rank_all[order].astype(np.int16), kind="stable")]
    owner = np.concatenate(batch_of)[order]
    rest()
    sizes = np.array([b.unit_bytes for b in batches], dtype=np.int64)
    return _Columns(
        batch=owner,
        unit=np.concatenate(units)[order],
        nbytes=sizes[owner],
        benefit=np.concatenate(benefits)[order],
        group=np.concatenate(group)[order],
    )


def _steps(
    batches: Sequence[UnitBatch], rows: _Columns, count: int, round_bytes: int, rest: Rest
) -> tuple[WarmStep, ...]:
    """Cut the first ``count`` rows into rounds, and each round into one step per batch.

    A round bounds how far one kind can run ahead of its partner when the load is cut short.
    """
    if count == 0:
        return ()
    owner = rows.batch[:count].astype(np.int64)
    group = rows.group[:count].astype(np.int64)
    stages = np.array([b.stage for b in batches], dtype=np.int64)[owner]
    ends = np.cumsum(rows.nbytes[:count])
    rounds = (ends - 1) // round_bytes
    rounds[group == _ORDER_ALWAYS] = 0  # the upper layers in one go
    rest()
    section = np.zeros(count, dtype=np.int64)
    if count > 1:
        new = (np.diff(group) != 0) | (np.diff(stages) != 0) | (np.diff(rounds) != 0)
        section[1:] = np.cumsum(new)
    key = section * len(batches) + owner
    order = np.argsort(key, kind="stable")
    rest()
    key = key[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(key)) + 1, [count]])
    # Over all steps at once: a prediction plans some hundreds of small ones, again and again.
    unit, leader = rows.unit[order], order[starts[:-1]]
    benefits = np.add.reduceat(rows.benefit[order], starts[:-1]).tolist()
    rest()
    steps: list[WarmStep] = []
    for (first, last), number, kind_of, benefit in zip(
        itertools.pairwise(starts.tolist()),
        owner[leader].tolist(),
        group[leader].tolist(),
        benefits,
        strict=True,
    ):
        batch = batches[number]
        steps.append(
            WarmStep(
                source=batch.source,
                kind=batch.kind,
                stage=batch.stage,
                units=unit[first:last],
                unit_bytes=batch.unit_bytes,
                benefit=benefit,
                reason=_REASONS[kind_of],
            )
        )
        if len(steps) % _STEPS_AT_ONCE == 0:
            rest()
    return tuple(steps)


def plan_warm(
    batches: Sequence[UnitBatch],
    *,
    budget_bytes: int | None,
    bandwidth_bytes_s: float | None = None,
    deadline_s: float | None = None,
    round_bytes: int = 16 << 20,
    coverage: Coverage = KNOWN,
    unit_means: Mapping[tuple[str, str, int], float] | None = None,
    roomy: Collection[str] = (),
    rest: Rest = no_rest,
) -> WarmPlan:
    """Choose units by stage, then by benefit, within the tighter of budget and time.

    Args:
        batches: What the sources offer. Batches whose benefit does not fall are sorted here.
        budget_bytes: Bytes that may be resident for the plan; None means no limit.
        bandwidth_bytes_s: Bytes per second that the device gives; None means unknown.
        deadline_s: Seconds for loading; counts only together with the bandwidth.
        round_bytes: Load calls are cut at this size; larger reads more at once, smaller keeps
            links and codes closer together when the load is cut short.
        coverage: How many accesses what holds a share of the demand serves: only for the
            prediction, e.g. `HeatGraph.coverage`.
        unit_means: `unit_benefit` of these batches and of what a caller left out of them, where
            it knows; None works it out.
        roomy: Sources that have room for all that they offer and all the time that it takes: if
            the budget also holds everything, theirs is read in the order of the file.
        rest: Called between steps of the work, see `run_warm`.

    Returns:
        The plan. No unit is in it twice; the kept units are a prefix of the order above.

    Raises:
        InputError: a batch or a limit is malformed; the caller's mistake.
    """
    if round_bytes < 1:
        raise InputError(f"round_bytes must be >= 1, got {round_bytes}")
    for batch in batches:
        _check(batch)
    rest()
    limit, limit_reason = byte_limit(
        budget_bytes=budget_bytes, bandwidth_bytes_s=bandwidth_bytes_s, deadline_s=deadline_s
    )
    offered = [b for b in batches if len(b.units)]
    if not offered:
        return WarmPlan((), (), limit, limit_reason, 0, 0.0, 0.0)
    offered_bytes = sum(len(batch.units) * batch.unit_bytes for batch in offered)
    rows = _ordered(offered, roomy if limit is None or offered_bytes <= limit else (), rest)
    rest()
    ends = np.cumsum(rows.nbytes)
    always = int(np.count_nonzero(rows.group == _ORDER_ALWAYS))
    if limit is None:
        count = len(ends)
    else:
        count = max(always, int(np.searchsorted(ends, limit, side="right")))
    total = float(rows.benefit.sum())
    covered = float(rows.benefit[:count].sum())
    left_units = np.bincount(rows.batch[count:], minlength=len(offered))
    left_benefit = np.bincount(
        rows.batch[count:], weights=rows.benefit[count:], minlength=len(offered)
    )
    rest()
    skips = tuple(
        PlanSkip(
            batch.source,
            batch.kind,
            batch.stage,
            int(units),
            int(units) * batch.unit_bytes,
            float(benefit),
            limit_reason,
        )
        for batch, units, benefit in zip(offered, left_units, left_benefit, strict=True)
        if units
    )
    planned_bytes = int(ends[count - 1]) if count else 0
    means = unit_benefit(offered, benefit_sums(offered)) if unit_means is None else unit_means
    planned = np.bincount(rows.batch[:count], minlength=len(offered)).tolist()
    anywhere = sum(
        units * means[batch.source, batch.kind, batch.stage]
        for batch, units in zip(offered, planned, strict=True)
    )
    return WarmPlan(
        steps=_steps(offered, rows, count, round_bytes, rest),
        skips=skips,
        limit_bytes=limit,
        limit_reason=limit_reason,
        planned_bytes=planned_bytes,
        benefit_total=total,
        predicted_hit_ratio=predicted_ratio(
            covered=covered,
            total=total,
            coverage=coverage,
            anywhere=anywhere,
        ),
        coverage=coverage,
        unit_benefit=means,
    )
