"""Say what a warm-up really did: planned, loaded, skipped and why, predicted and measured.

The receipt is what readiness gates on, so nothing in it is assumed: what is resident is read back
from the pool after loading, and a warm-up that did nothing cannot look like one that worked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from stoker.errors import InputError

RECEIPT_VERSION = 1

STATE_COMPLETE = "complete"
STATE_PARTIAL = "partial"
STATE_EMPTY = "empty"

_MIB = float(1 << 20)


@dataclass(frozen=True)
class ReceiptLine:
    """One kind of unit of one source.

    Attributes:
        offered: Units that the source offered.
        planned: Units that the plan chose; ``loaded + already + (the rest of) skipped`` of them.
        loaded: Read from the device by this warm-up.
        already: Resident before it.
        skipped: Reason -> units, both left out by the plan and planned but not loaded.
        resident: Planned units that the pool held when asked after loading; None where the
            source cannot say.
        planned_bytes: Bytes of the planned units.
        bytes_read: Bytes that loading read from the device, padding included; with the index's
            upper pages come its ids, which are no pages of the plan.
        reads: Read operations.
        seconds: Time spent in load calls.
    """

    source: str
    kind: str
    stage: int
    offered: int
    planned: int
    loaded: int
    already: int
    skipped: Mapping[str, int]
    resident: int | None
    planned_bytes: int
    bytes_read: int
    reads: int
    seconds: float


@dataclass(frozen=True)
class StageMark:
    """The state at the end of a stage: what could be promised from then on.

    Attributes:
        stage: Its number.
        seconds: Since the warm-up began.
        bytes_read: By all stages so far, from the device.
        predicted_hit_ratio: As the receipt's, of what is resident by then.
        pages: Units resident by then, loaded or found there.
        expected_recall: Mean recall@10 of an answer from memory alone by then; None where the
            source cannot say.
    """

    stage: int
    seconds: float
    bytes_read: int
    predicted_hit_ratio: float
    pages: int = 0
    expected_recall: float | None = None


@dataclass(frozen=True)
class Receipt:
    """The result of one warm-up.

    Attributes:
        started_s: Unix time at which it began, in seconds.
        seconds: How long planning, loading and reading back took.
        plan_seconds: Of that, planning; trying the prediction afterwards is no part of it.
        budget_bytes: The byte budget given; None means no limit.
        deadline_s: The time given; None means no limit.
        lines: One per source, kind and stage, in stage order.
        stages: One per stage, at its end.
        planned_bytes: Bytes that the plan chose.
        bytes_read: Bytes read from the device.
        resident_bytes: Bytes of planned units found resident afterwards (read back).
        planned_hit_ratio: The plan's prediction, had everything planned been loaded.
        predicted_hit_ratio: The same formula over what was really made resident.
        measured_hit_ratio: What came of the prediction: the share of the accesses after the
            warm-up that the units made resident here served (`warm_set`); what demand read since
            does not count. None until `with_measured` is called.
        measured_accesses: How many accesses to content keys that figure stands on.
        heat_keys: Content keys with heat that the plan was made from; 0 means a blind warm-up.
        error: Why loading stopped early; None when it did not.
        untried: Why the prediction could not be tried on the newest accesses, so that it stands on
            the heat's own estimate; None where it was, and where there are none.
    """

    started_s: float
    seconds: float
    plan_seconds: float
    budget_bytes: int | None
    deadline_s: float | None
    lines: tuple[ReceiptLine, ...]
    stages: tuple[StageMark, ...]
    planned_bytes: int
    bytes_read: int
    resident_bytes: int
    planned_hit_ratio: float
    predicted_hit_ratio: float
    measured_hit_ratio: float | None = None
    measured_accesses: int = 0
    heat_keys: int = 0
    error: str | None = None
    version: int = RECEIPT_VERSION
    untried: str | None = None

    @property
    def state(self) -> str:
        """``complete``: all planned units are in; ``empty``: none planned; else ``partial``."""
        planned = sum(line.planned for line in self.lines)
        if planned == 0:
            return STATE_EMPTY
        got = sum(line.loaded + line.already for line in self.lines)
        return STATE_COMPLETE if got == planned and self.error is None else STATE_PARTIAL

    @property
    def upper_resident(self) -> bool:
        """Whether every offered stage-0 unit is in: the least that a search needs."""
        upper = [line for line in self.lines if line.stage == 0]
        return all(
            (line.resident if line.resident is not None else line.loaded + line.already)
            >= line.offered
            for line in upper
        )

    @property
    def skipped(self) -> dict[str, int]:
        """Reason -> units, over all kinds."""
        total: dict[str, int] = {}
        for line in self.lines:
            for reason, units in line.skipped.items():
                total[reason] = total.get(reason, 0) + units
        return total

    @property
    def prediction_error(self) -> float | None:
        """Measured minus predicted hit ratio, in [-1, 1]; None until measured."""
        if self.measured_hit_ratio is None:
            return None
        return self.measured_hit_ratio - self.predicted_hit_ratio

    def with_measured(self, hit_ratio: float, *, accesses: int) -> Receipt:
        """Return a copy with the share of the next accesses that the warm units really served.

        Args:
            hit_ratio: In [0, 1], from `WarmSet.served`.
            accesses: Accesses it was measured over; at least 1.

        Raises:
            InputError: out of range.
        """
        if not 0.0 <= hit_ratio <= 1.0:
            raise InputError(f"hit_ratio must be in [0, 1], got {hit_ratio}")
        if accesses < 1:
            raise InputError(f"accesses must be >= 1, got {accesses}")
        return dataclasses.replace(self, measured_hit_ratio=hit_ratio, measured_accesses=accesses)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, `state` and others included that only derive from it."""
        data = dataclasses.asdict(self)
        data["lines"] = [dict(line) for line in data["lines"]]
        data["stages"] = list(data["stages"])
        data["state"] = self.state
        data["upper_resident"] = self.upper_resident
        data["prediction_error"] = self.prediction_error
        return data

    def to_json(self) -> str:
        """Return the receipt as one JSON object; `from_json` reads it back equal."""
        return orjson.dumps(self.to_dict()).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Receipt:
        """Read what `to_json` wrote. Raises InputError when it is not a receipt."""
        try:
            data = orjson.loads(text)
            version = data["version"]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"not a warm-up receipt: {error}") from error
        if version != RECEIPT_VERSION:
            raise InputError(f"receipt version {version!r}, expected {RECEIPT_VERSION}")
        known = {f.name for f in dataclasses.fields(Receipt)}
        fields = {key: value for key, value in data.items() if key in known}
        try:
            fields["lines"] = tuple(ReceiptLine(**line) for line in data["lines"])
            fields["stages"] = tuple(StageMark(**mark) for mark in data["stages"])
            return Receipt(**fields)
        except (KeyError, TypeError) as error:
            raise InputError(f"not a warm-up receipt: {error}") from error

    def render(self) -> str:
        """Return the receipt as plain text for a person, fixed width, no colour."""
        budget = "no limit" if self.budget_bytes is None else f"{self.budget_bytes / _MIB:.1f} MiB"
        deadline = "no limit" if self.deadline_s is None else f"{self.deadline_s:.1f} s"
        out = [
            f"Warm-up {self.state} in {self.seconds:.3f} s (planning {self.plan_seconds:.3f} s)",
            f"  budget {budget}, deadline {deadline}, heat of {self.heat_keys:,} chunks",
            f"  read {self.bytes_read / _MIB:.1f} MiB for {self.planned_bytes / _MIB:.1f} MiB "
            f"planned; {self.resident_bytes / _MIB:.1f} MiB resident (read back)",
            "",
            f"  {'what':<18}{'offered':>10}{'planned':>10}{'loaded':>10}{'already':>10}"
            f"{'skipped':>10}{'resident':>10}{'MiB read':>10}",
        ]
        for line in self.lines:
            resident = "not asked" if line.resident is None else f"{line.resident:,}"
            out.append(
                f"  {line.source + '/' + line.kind:<18}{line.offered:>10,}{line.planned:>10,}"
                f"{line.loaded:>10,}{line.already:>10,}{sum(line.skipped.values()):>10,}"
                f"{resident:>10}{line.bytes_read / _MIB:>10.1f}"
            )
        if not self.lines:
            out.append("  nothing was offered")
        if self.skipped:
            out += ["", "  skipped because"]
            out += [f"  {units:>10,}  {reason}" for reason, units in sorted(self.skipped.items())]
        out += ["", f"  predicted hit ratio {self.predicted_hit_ratio:.3f}"]
        if abs(self.planned_hit_ratio - self.predicted_hit_ratio) > 5e-4:
            out[-1] += f" (planned {self.planned_hit_ratio:.3f})"
        if self.untried is not None:
            out.append(f"  not tried on the newest accesses: {self.untried}")
        if self.measured_hit_ratio is None:
            out.append("  measured hit ratio  not yet")
        else:
            out.append(
                f"  measured hit ratio  {self.measured_hit_ratio:.3f} "
                f"over {self.measured_accesses:,} accesses, "
                f"off by {self.prediction_error:+.3f}"
            )
        if self.error is not None:
            out.append(f"  stopped early: {self.error}")
        return "\n".join(out) + "\n"
