"""Carry out a warm plan, stage by stage, and write the receipt.

Loading never fights demand: the sources load at a priority under it. It also never evicts what it
has just loaded: once a source says that there is no room, its later stages are left out, because
a colder unit would only push out a hotter one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError, StokerError
from stoker.prefetch.plan import WarmPlan, WarmStep, plan_warm, predicted_ratio
from stoker.prefetch.protocols import (
    ContentKey,
    LoadOutcome,
    ResidencyReader,
    UnitBatch,
    WarmSource,
)
from stoker.prefetch.receipt import Receipt, ReceiptLine, StageMark

log = structlog.get_logger(__name__)

SKIP_DEADLINE = "deadline passed"
SKIP_NO_ROOM = "no room in the pool"
SKIP_FAILED = "read failed or page damaged"
SKIP_STOPPED = "an earlier error stopped the warm-up"

Progress = Callable[[StageMark], None]
_LineKey = tuple[str, str, int]


@dataclass
class _Tally:
    """What happened to the units of one kind so far."""

    offered: int = 0
    planned: int = 0
    planned_bytes: int = 0
    loaded: int = 0
    already: int = 0
    bytes_read: int = 0
    reads: int = 0
    seconds: float = 0.0
    unit_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    tried: list[NDArray[np.uint32]] = field(default_factory=list)

    def skip(self, reason: str, units: int) -> None:
        if units:
            self.skipped[reason] = self.skipped.get(reason, 0) + units


def run_warm(
    source: WarmSource | Sequence[WarmSource],
    heat: Mapping[ContentKey, float],
    *,
    budget_bytes: int | None = None,
    bandwidth_bytes_s: float | None = None,
    deadline_s: float | None = None,
    round_bytes: int = 16 << 20,
    unseen_ratio: float = 0.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Receipt:
    """Plan, load stage by stage with the top layers first, and read back what is resident.

    Blocks until done. An error of a source stops the loading, not the caller: it is in the
    receipt (`Receipt.error`) and logged, because a search can be served from what is there.

    Args:
        source: One room or several; several share the one budget by benefit per byte.
        heat: Weight (>= 0) per content key.
        budget_bytes: Bytes that may be made resident; None means no limit.
        bandwidth_bytes_s: What the device gives, where known: the plan then holds only what the
            deadline allows.
        deadline_s: Seconds from now after which no load starts.
        round_bytes: See `plan_warm`.
        unseen_ratio: See `plan_warm`.
        progress: Called with the mark of each finished stage, in this thread.
        clock: Monotonic seconds; passed in by tests.
        wall: Unix seconds; passed in by tests.

    Returns:
        The receipt.

    Raises:
        InputError: a batch, a heat weight or a limit is malformed.
    """
    started = clock()
    started_s = wall()
    sources = list(source) if isinstance(source, Sequence) else [source]
    batches, owners = _collect(sources, heat)
    plan = plan_warm(
        batches,
        budget_bytes=budget_bytes,
        bandwidth_bytes_s=bandwidth_bytes_s,
        deadline_s=deadline_s,
        round_bytes=round_bytes,
        unseen_ratio=unseen_ratio,
    )
    plan_seconds = clock() - started
    log.info(
        "prefetch.plan_built",
        steps=len(plan.steps),
        planned_bytes=plan.planned_bytes,
        predicted_hit_ratio=round(plan.predicted_hit_ratio, 4),
        plan_ms=round(plan_seconds * 1e3, 2),
    )
    tallies = _tallies(batches, plan)
    run = _Run(owners, tallies, plan, clock, started, deadline_s, progress)
    run.load()
    lines = tuple(
        _line(key, tally, owners[key[0], key[1]])
        for key, tally in sorted(
            tallies.items(), key=lambda item: (item[0][2], item[0][0], item[0][1])
        )
    )
    receipt = Receipt(
        started_s=started_s,
        seconds=clock() - started,
        plan_seconds=plan_seconds,
        budget_bytes=budget_bytes,
        deadline_s=deadline_s,
        lines=lines,
        stages=tuple(run.marks),
        planned_bytes=plan.planned_bytes,
        bytes_read=sum(line.bytes_read for line in lines),
        resident_bytes=sum(
            (line.resident or 0) * tallies[line.source, line.kind, line.stage].unit_bytes
            for line in lines
        ),
        planned_hit_ratio=plan.predicted_hit_ratio,
        predicted_hit_ratio=run.covered_ratio(),
        heat_keys=len(heat),
        error=run.error,
    )
    log.info(
        "prefetch.warm_finished",
        state=receipt.state,
        bytes_read=receipt.bytes_read,
        resident_bytes=receipt.resident_bytes,
        predicted_hit_ratio=round(receipt.predicted_hit_ratio, 4),
        seconds=round(receipt.seconds, 4),
    )
    return receipt


def _collect(
    sources: Sequence[WarmSource], heat: Mapping[ContentKey, float]
) -> tuple[list[UnitBatch], dict[tuple[str, str], WarmSource]]:
    for key, weight in heat.items():
        if not weight >= 0.0:
            raise InputError(f"heat of {key!r} must be >= 0, got {weight}")
    batches: list[UnitBatch] = []
    owners: dict[tuple[str, str], WarmSource] = {}
    for one in sources:
        for batch in one.unit_batches(heat):
            owner = owners.setdefault((batch.source, batch.kind), one)
            if owner is not one:
                raise InputError(
                    f"two sources offer {batch.source}/{batch.kind}; a plan could not tell which"
                )
            batches.append(batch)
    return batches, owners


def _tallies(batches: Sequence[UnitBatch], plan: WarmPlan) -> dict[_LineKey, _Tally]:
    tallies: dict[_LineKey, _Tally] = {}
    for batch in batches:
        tally = tallies.setdefault((batch.source, batch.kind, batch.stage), _Tally())
        tally.offered += len(batch.units)
        tally.unit_bytes = batch.unit_bytes
    for step in plan.steps:
        tally = tallies[step.source, step.kind, step.stage]
        tally.planned += len(step.units)
        tally.planned_bytes += step.bytes
    for skip in plan.skips:
        tallies[skip.source, skip.kind, skip.stage].skip(skip.reason, skip.units)
    return tallies


class _Run:
    """One pass over a plan's steps. Holds what has been covered, and why it stopped."""

    def __init__(
        self,
        owners: Mapping[tuple[str, str], WarmSource],
        tallies: Mapping[_LineKey, _Tally],
        plan: WarmPlan,
        clock: Callable[[], float],
        started: float,
        deadline_s: float | None,
        progress: Progress | None,
    ) -> None:
        self._owners = owners
        self._tallies = tallies
        self._plan = plan
        self._clock = clock
        self._started = started
        self._deadline_s = deadline_s
        self._progress = progress
        self._covered = 0.0
        self._anywhere = 0.0
        self._bytes_read = 0
        self._full: set[str] = set()
        self.marks: list[StageMark] = []
        self.error: str | None = None

    def covered_ratio(self) -> float:
        plan = self._plan
        return predicted_ratio(
            covered=self._covered,
            total=plan.benefit_total,
            unseen_ratio=plan.unseen_ratio,
            anywhere=self._anywhere,
        )

    def load(self) -> None:
        stage: int | None = None
        for step in self._plan.steps:
            if stage is not None and step.stage != stage:
                self._mark(stage)
            stage = step.stage
            self._step(step)
        if stage is not None:
            self._mark(stage)

    def _mark(self, stage: int) -> None:
        mark = StageMark(
            stage=stage,
            seconds=self._clock() - self._started,
            bytes_read=self._bytes_read,
            predicted_hit_ratio=self.covered_ratio(),
        )
        self.marks.append(mark)
        if self._progress is not None:
            self._progress(mark)

    def _step(self, step: WarmStep) -> None:
        tally = self._tallies[step.source, step.kind, step.stage]
        count = len(step.units)
        left_s = None
        if self._deadline_s is not None:
            left_s = self._deadline_s - (self._clock() - self._started)
        if self.error is not None:
            tally.skip(SKIP_STOPPED, count)
        elif step.source in self._full:
            tally.skip(SKIP_NO_ROOM, count)
        elif left_s is not None and left_s <= 0.0:
            tally.skip(SKIP_DEADLINE, count)
        else:
            try:
                outcome = self._owners[step.source, step.kind].load_units(
                    step.kind, step.units, sticky=step.stage == 0, deadline_s=left_s
                )
            except (StokerError, OSError) as error:
                self.error = f"{step.source}/{step.kind}: {error}"
                log.error(
                    "prefetch.warm_stopped", source=step.source, kind=step.kind, error=str(error)
                )
                tally.skip(SKIP_STOPPED, count)
                return
            self._account(step, tally, outcome)

    def _account(self, step: WarmStep, tally: _Tally, outcome: LoadOutcome) -> None:
        tally.loaded += outcome.loaded
        tally.already += outcome.already
        tally.bytes_read += outcome.bytes_read
        tally.reads += outcome.reads
        tally.seconds += outcome.seconds
        tally.skip(SKIP_NO_ROOM, outcome.no_room)
        tally.skip(SKIP_FAILED, outcome.failed)
        tally.skip(SKIP_DEADLINE, outcome.not_reached)
        tally.tried.append(step.units)
        self._bytes_read += outcome.bytes_read
        if outcome.no_room:
            self._full.add(step.source)
        # Which units of a cut-short call came in is not known; their mean benefit is.
        got = (outcome.loaded + outcome.already) / len(step.units)
        self._covered += step.benefit * min(1.0, got)
        mean = self._plan.unit_benefit[step.source, step.kind, step.stage]
        self._anywhere += mean * len(step.units) * min(1.0, got)


def _line(key: _LineKey, tally: _Tally, owner: WarmSource) -> ReceiptLine:
    resident: int | None = None
    if isinstance(owner, ResidencyReader):
        units = np.concatenate(tally.tried) if tally.tried else np.empty(0, np.uint32)
        resident = owner.resident_count(key[1], units) if len(units) else 0
    return ReceiptLine(
        source=key[0],
        kind=key[1],
        stage=key[2],
        offered=tally.offered,
        planned=tally.planned,
        loaded=tally.loaded,
        already=tally.already,
        skipped=dict(tally.skipped),
        resident=resident,
        planned_bytes=tally.planned_bytes,
        bytes_read=tally.bytes_read,
        reads=tally.reads,
        seconds=tally.seconds,
    )
