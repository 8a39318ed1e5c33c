"""What a warm-up counts of each kind of unit, and what its receipt makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.coverage_curve import Coverage
from stoker.prefetch.plan import predicted_ratio
from stoker.prefetch.protocols import ResidencyReader, WarmSource
from stoker.prefetch.receipt import ReceiptLine

LineKey = tuple[str, str, int]


@dataclass
class Tally:
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
    left_out: dict[str, int] = field(default_factory=dict)  # by the plan, before any load
    tried: list[NDArray[np.uint32]] = field(default_factory=list)

    def skip(self, reason: str, units: int) -> None:
        """Count units that were planned and not loaded."""
        if units:
            self.skipped[reason] = self.skipped.get(reason, 0) + units

    def tried_units(self) -> NDArray[np.uint32]:
        """Return what loads were asked for so far."""
        return np.concatenate(self.tried) if self.tried else np.empty(0, np.uint32)


@dataclass
class KindCoverage:
    """How much of a kind is resident: of what is expected of it, or of its units."""

    benefit: float = 0.0
    benefit_covered: float = 0.0
    units: int = 0
    units_covered: float = 0.0

    def ratio(self) -> float:
        """Return the share, in [0, 1]; 1 of a kind without units."""
        if self.benefit > 0.0:
            return min(1.0, self.benefit_covered / self.benefit)
        return min(1.0, self.units_covered / self.units) if self.units else 1.0


@dataclass(frozen=True)
class ResidentShare:
    """What `predicted_ratio` needs to know of some units; see there."""

    covered: float = 0.0
    total: float = 0.0
    anywhere: float = 0.0

    def ratio(self, coverage: Coverage) -> float:
        """Return the expected hit ratio of these units."""
        return predicted_ratio(
            covered=self.covered, total=self.total, coverage=coverage, anywhere=self.anywhere
        )


def receipt_line(key: LineKey, tally: Tally, owner: WarmSource) -> ReceiptLine:
    """Return what happened, with what the owner says is resident by now."""
    resident: int | None = None
    if isinstance(owner, ResidencyReader):
        units = tally.tried_units()
        resident = owner.resident_count(key[1], units) if len(units) else 0
    return ReceiptLine(
        source=key[0],
        kind=key[1],
        stage=key[2],
        offered=tally.offered,
        planned=tally.planned,
        loaded=tally.loaded,
        already=tally.already,
        skipped={
            reason: tally.left_out.get(reason, 0) + tally.skipped.get(reason, 0)
            for reason in (*tally.left_out, *tally.skipped)
        },
        resident=resident,
        planned_bytes=tally.planned_bytes,
        bytes_read=tally.bytes_read,
        reads=tally.reads,
        seconds=tally.seconds,
    )
