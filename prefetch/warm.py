"""Carry out a warm plan, stage by stage, and write the receipt.

Loading never fights demand: the sources load at a priority under it. It also never evicts what it
has just loaded: once a source says that there is no room, its later stages are left out, because
a colder unit would only push out a hotter one.

What the receipt predicts is tried on the newest accesses (`held_back`), which costs more than the
plan. No load waits for that: it is done once all is loaded, from accesses taken before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from stoker.errors import InputError, StokerError
from stoker.prefetch.coverage_curve import KNOWN, Coverage
from stoker.prefetch.held_back import HeldBack, unit_coverage
from stoker.prefetch.pieces import Rest, no_rest
from stoker.prefetch.plan import (
    WarmPlan,
    WarmStep,
    benefit_sums,
    plan_warm,
    unit_benefit,
)
from stoker.prefetch.protocols import (
    ContentKey,
    LoadOutcome,
    RecallReader,
    RoomReader,
    UnitBatch,
    WarmSource,
    units_offered,
)
from stoker.prefetch.receipt import Receipt, StageMark
from stoker.prefetch.warm_control import WarmControl, check_heat
from stoker.prefetch.warm_set import WarmSet
from stoker.prefetch.warm_tally import (
    KindCoverage,
    LineKey,
    ResidentShare,
    Tally,
    receipt_line,
)

log = structlog.get_logger(__name__)

SKIP_DEADLINE = "deadline passed"
SKIP_NO_ROOM = "no room in the pool"
SKIP_FAILED = "read failed or page damaged"
SKIP_STOPPED = "an earlier error stopped the warm-up"
SKIP_CANCELLED = "cancelled"

Progress = Callable[[StageMark], None]


@dataclass(frozen=True)
class _Limits:
    """What a warm-up may take, as `run_warm` was told."""

    budget_bytes: int | None
    bandwidth_bytes_s: float | None
    deadline_s: float | None
    round_bytes: int
    coverage: Coverage
    held_back: Sequence[HeldBack]


def run_warm(
    source: WarmSource | Sequence[WarmSource],
    heat: Mapping[ContentKey, float],
    *,
    budget_bytes: int | None = None,
    bandwidth_bytes_s: float | None = None,
    deadline_s: float | None = None,
    round_bytes: int = 16 << 20,
    coverage: Coverage = KNOWN,
    held_back: Sequence[HeldBack] = (),
    progress: Progress | None = None,
    all_loaded: Callable[[], None] = lambda: None,
    rest: Rest = no_rest,
    control: WarmControl | None = None,
    loaded: WarmSet | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Receipt:
    """Plan, load stage by stage with the top layers first, and read back what is resident.

    Blocks until done, or cancelled. An error of a source stops the loading, not the caller: it is
    in the receipt (`Receipt.error`) and logged, because a search can be served from what is there.

    Args:
        source: One room or several; several share the one budget by benefit per byte.
        heat: Weight (>= 0) per content key.
        budget_bytes: Bytes that may be made resident; None means no limit.
        bandwidth_bytes_s: What the device gives, where known: the plan then holds only what the
            deadline allows.
        deadline_s: Seconds from now after which no load starts. Pauses count.
        round_bytes: See `plan_warm`.
        coverage: See `plan_warm`.
        held_back: The newest accesses, on which the prediction is tried where there are any and
            no source has failed; it stands on ``coverage`` otherwise.
        progress: Called with the mark of each finished stage, in this thread. Its prediction
            stands on ``coverage``; the receipt's marks stand on what the receipt does.
        all_loaded: Called, in this thread, when nothing more will be loaded: only the receipt is
            still to be written.
        rest: Called, in this thread, between two steps of work of some tens of microseconds, see
            `pieces`; may wait. Where units are many, a step on whole arrays takes longer.
        control: Through which another thread pauses, resumes, re-prioritises or cancels it.
        loaded: Gets the units that became resident, for whoever measures later what they served.
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
    limits = _Limits(budget_bytes, bandwidth_bytes_s, deadline_s, round_bytes, coverage, held_back)
    run = _Run(sources, limits, clock, started, progress, rest, control, loaded)
    run.plan(heat)
    run.load()
    all_loaded()
    run.predict()
    rest()
    lines = []
    for key, tally in sorted(
        run.tallies.items(), key=lambda item: (item[0][2], item[0][0], item[0][1])
    ):
        lines.append(receipt_line(key, tally, run.owners[key[0], key[1]]))
        rest()
    receipt = Receipt(
        started_s=started_s,
        seconds=clock() - started,
        plan_seconds=run.plan_seconds,
        budget_bytes=budget_bytes,
        deadline_s=deadline_s,
        lines=tuple(lines),
        stages=run.stages(),
        planned_bytes=sum(line.planned_bytes for line in lines),
        bytes_read=sum(line.bytes_read for line in lines),
        resident_bytes=sum(
            (line.resident or 0) * run.tallies[line.source, line.kind, line.stage].unit_bytes
            for line in lines
        ),
        planned_hit_ratio=run.planned_hit_ratio,
        predicted_hit_ratio=run.covered_ratio(),
        heat_keys=run.heat_keys,
        error=run.error,
        untried=run.untried,
    )
    rest()
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
    sources: Sequence[WarmSource], heat: Mapping[ContentKey, float], rest: Rest
) -> tuple[list[UnitBatch], dict[tuple[str, str], WarmSource]]:
    check_heat(heat, rest)
    batches: list[UnitBatch] = []
    owners: dict[tuple[str, str], WarmSource] = {}
    for one in sources:
        for batch in units_offered(one, heat, rest):
            owner = owners.setdefault((batch.source, batch.kind), one)
            if owner is not one:
                raise InputError(
                    f"two sources offer {batch.source}/{batch.kind}; a plan could not tell which"
                )
            batches.append(batch)
    return batches, owners


class _Run:
    """One warm-up: its plan, which may be made anew, and what has come of it.

    Attributes:
        owners: The source of each (source's name, kind).
        tallies: What happened, by source, kind and stage.
        plan_seconds: Spent on planning, all plans together.
        heat_keys: Of the last plan.
        error: Why loading stopped early; None where it did not.
    """

    def __init__(
        self,
        sources: Sequence[WarmSource],
        limits: _Limits,
        clock: Callable[[], float],
        started: float,
        progress: Progress | None,
        rest: Rest,
        control: WarmControl | None,
        loaded: WarmSet | None,
    ) -> None:
        self._sources = sources
        self._limits = limits
        self._clock = clock
        self._started = started
        self._progress = progress
        self._rest = rest
        self._control = control
        self._loaded = loaded
        self._batches: list[UnitBatch] = []
        self._steps: list[WarmStep] = []
        self._marks: list[tuple[StageMark, ResidentShare]] = []
        self._planned = ResidentShare()
        self._total = 0.0
        self._unit_benefit: Mapping[LineKey, float] = {}
        self._coverage = limits.coverage
        self._kinds: dict[tuple[str, str], KindCoverage] = {}
        self._covered = 0.0
        self._anywhere = 0.0
        self._bytes_read = 0
        self._pages = 0
        self._full: set[str] = set()
        self.owners: dict[tuple[str, str], WarmSource] = {}
        self.tallies: dict[LineKey, Tally] = {}
        self.plan_seconds = 0.0
        self.heat_keys = 0
        self.error: str | None = None
        self.untried: str | None = None

    @property
    def planned_hit_ratio(self) -> float:
        """Predicted for the last plan, had all of it been loaded."""
        return self._planned.ratio(self._coverage)

    def covered_ratio(self) -> float:
        return self._resident().ratio(self._coverage)

    def stages(self) -> tuple[StageMark, ...]:
        """Return a mark for the end of each stage, with what is predicted for it by now."""
        return tuple(
            replace(mark, predicted_hit_ratio=there.ratio(self._coverage))
            for mark, there in self._marks
        )

    def _resident(self) -> ResidentShare:
        return ResidentShare(self._covered, self._total, self._anywhere)

    def predict(self) -> None:
        """Try the last plan's units on the accesses held back, and predict by what came of it.

        Only called when all is loaded: it takes longer than the plan did. Where it fails, what is
        loaded is none the less so: the prediction stands on the coverage given, and says so.
        """
        if not self._limits.held_back or self.error is not None:
            return
        try:
            tried = unit_coverage(
                self._batches, self._sources, self._limits.held_back, rest=self._rest
            )
        except (StokerError, OSError) as error:
            self.untried = str(error)
            log.error("prefetch.prediction_untried", reason=self.untried)
            return
        if tried is not None:
            self._coverage = tried

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, heat: Mapping[ContentKey, float]) -> None:
        """Plan all that has not been tried yet, within what is left of the limits."""
        began = self._clock()
        limits = self._limits
        batches, self.owners = _collect(self._sources, heat, self._rest)
        self._batches = batches
        self._offer(batches)
        tried_bytes = sum(
            len(units) * tally.unit_bytes
            for tally in self.tallies.values()
            for units in tally.tried
        )
        plan = plan_warm(
            [self._untried(batch) for batch in batches],
            budget_bytes=None
            if limits.budget_bytes is None
            else max(0, limits.budget_bytes - tried_bytes),
            bandwidth_bytes_s=limits.bandwidth_bytes_s,
            deadline_s=self._left_s(),
            round_bytes=limits.round_bytes,
            coverage=self._coverage,
            unit_means=self._unit_benefit,
            roomy=self._roomy() if limits.deadline_s is None else (),
            rest=self._rest,
        )
        self._rest()
        self._steps = list(plan.steps)
        self._count(plan)
        self._rest()
        self.heat_keys = len(heat)
        seconds = self._clock() - began
        self.plan_seconds += seconds
        log.info(
            "prefetch.plan_built",
            steps=len(plan.steps),
            planned_bytes=plan.planned_bytes,
            predicted_hit_ratio=round(self.planned_hit_ratio, 4),
            plan_ms=round(seconds * 1e3, 2),
        )

    def _roomy(self) -> set[str]:
        """Return the sources that can hold all that they offer."""
        holding = {
            (name, isinstance(owner, RoomReader) and owner.has_room_for_all())
            for (name, _), owner in self.owners.items()
        }
        return {name for name, holds in holding if holds and (name, False) not in holding}

    def _offer(self, batches: Sequence[UnitBatch]) -> None:
        """Weigh all units by this heat: also what was loaded by an earlier one."""
        for tally in self.tallies.values():
            tally.offered = 0
        sums = benefit_sums(batches)
        self._unit_benefit = unit_benefit(batches, sums)
        self._kinds = {}
        self._total = self._covered = self._anywhere = 0.0
        for batch, whole in zip(batches, sums, strict=True):
            key = (batch.source, batch.kind, batch.stage)
            tally = self.tallies.setdefault(key, Tally())
            tally.offered += len(batch.units)
            tally.unit_bytes = batch.unit_bytes
            self._total += whole
            kind = self._kinds.setdefault(key[:2], KindCoverage())
            kind.benefit += whole
            kind.units += len(batch.units)
            if tally.tried:
                tried = np.isin(batch.units, tally.tried_units())
                have = float(batch.benefit[tried].sum(dtype=np.float64))
                self._cover(key, have, int(np.count_nonzero(tried)))
            self._rest()

    def _cover(self, key: LineKey, benefit: float, units: float) -> None:
        kind = self._kinds[key[:2]]
        kind.benefit_covered += benefit
        kind.units_covered += units
        self._covered += benefit
        self._anywhere += self._unit_benefit.get(key, 0.0) * units

    def _untried(self, batch: UnitBatch) -> UnitBatch:
        tally = self.tallies[batch.source, batch.kind, batch.stage]
        if not tally.tried:
            return batch
        left = ~np.isin(batch.units, tally.tried_units())
        return replace(batch, units=batch.units[left], benefit=batch.benefit[left])

    def _count(self, plan: WarmPlan) -> None:
        for tally in self.tallies.values():
            tally.left_out = {}
            tally.planned = len(tally.tried_units())
            tally.planned_bytes = tally.planned * tally.unit_bytes
        covered, anywhere = self._covered, self._anywhere
        for step in plan.steps:
            key = (step.source, step.kind, step.stage)
            tally = self.tallies[key]
            tally.planned += len(step.units)
            tally.planned_bytes += step.bytes
            covered += step.benefit
            anywhere += self._unit_benefit[key] * len(step.units)
        for skip in plan.skips:
            left_out = self.tallies[skip.source, skip.kind, skip.stage].left_out
            left_out[skip.reason] = left_out.get(skip.reason, 0) + skip.units
        self._planned = ResidentShare(covered, self._total, anywhere)

    # ---- loading -----------------------------------------------------------------------------

    def load(self) -> None:
        stage: int | None = None
        while self._steps:
            going = self._heed()
            if not self._steps:
                break
            step = self._steps.pop(0)
            if stage is not None and step.stage != stage:
                self._mark(stage)
            stage = step.stage
            if going:
                self._step(step)
                self._rest()
            else:
                key = (step.source, step.kind, step.stage)
                self.tallies[key].skip(SKIP_CANCELLED, len(step.units))
        if stage is not None:
            self._mark(stage)

    def _heed(self) -> bool:
        """Do what was ordered meanwhile; False: load nothing more."""
        if self._control is None:
            return True
        if not self._control.wait_turn(self._left_s()):
            return False
        give = self._control.take_heat()
        if give is not None and self.error is None:
            try:
                self.plan(give())
            except (StokerError, OSError) as error:
                self._stop("the new heat", error)
        return True

    def _left_s(self) -> float | None:
        if self._limits.deadline_s is None:
            return None
        return max(0.0, self._limits.deadline_s - (self._clock() - self._started))

    def _stop(self, where: str, error: Exception) -> None:
        self.error = f"{where}: {error}"
        log.error("prefetch.warm_stopped", where=where, error=str(error))

    def _mark(self, stage: int) -> None:
        mark = StageMark(
            stage=stage,
            seconds=self._clock() - self._started,
            bytes_read=self._bytes_read,
            predicted_hit_ratio=self.covered_ratio(),
            pages=self._pages,
            expected_recall=self._expected_recall(),
        )
        self._marks.append((mark, self._resident()))
        if self._progress is not None:
            self._progress(mark)

    def _expected_recall(self) -> float | None:
        for (name, _), owner in self.owners.items():
            if isinstance(owner, RecallReader):
                return owner.expected_recall(
                    {
                        kind: coverage.ratio()
                        for (source, kind), coverage in self._kinds.items()
                        if source == name
                    }
                )
        return None

    def _step(self, step: WarmStep) -> None:
        tally = self.tallies[step.source, step.kind, step.stage]
        count = len(step.units)
        left_s = self._left_s()
        if self.error is not None:
            tally.skip(SKIP_STOPPED, count)
        elif step.source in self._full:
            tally.skip(SKIP_NO_ROOM, count)
        elif left_s is not None and left_s <= 0.0:
            tally.skip(SKIP_DEADLINE, count)
        else:
            try:
                outcome = self.owners[step.source, step.kind].load_units(
                    step.kind, step.units, sticky=step.stage == 0, deadline_s=left_s
                )
            except (StokerError, OSError) as error:
                self._stop(f"{step.source}/{step.kind}", error)
                tally.skip(SKIP_STOPPED, count)
                return
            self._account(step, tally, outcome)

    def _account(self, step: WarmStep, tally: Tally, outcome: LoadOutcome) -> None:
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
        self._pages += outcome.loaded + outcome.already
        if outcome.no_room:
            self._full.add(step.source)
        # Which units of a cut-short call came in is not known; their mean benefit is.
        got = min(1.0, (outcome.loaded + outcome.already) / len(step.units))
        key = (step.source, step.kind, step.stage)
        self._cover(key, step.benefit * got, len(step.units) * got)
        if self._loaded is not None:
            self._loaded.add(step.source, step.kind, step.units, got)
