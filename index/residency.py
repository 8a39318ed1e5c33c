"""What of an index is in memory, read back from the page pool."""

from __future__ import annotations

import dataclasses
from typing import Any

from stoker.errors import InputError

PAGE_KINDS = ("upper", "links", "coarse", "codes", "refine", "vectors")


@dataclasses.dataclass(frozen=True)
class KindResidency:
    """Pages of one kind: how many there are, are in memory, held for good, and damaged."""

    kind: str
    pages: int
    resident: int
    sticky: int
    quarantined: int
    page_bytes: int

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory."""
        return self.resident * self.page_bytes

    @property
    def ratio(self) -> float:
        """Share of the pages that are in memory; 1 where there are none."""
        return self.resident / self.pages if self.pages else 1.0


@dataclasses.dataclass(frozen=True)
class Residency:
    """Residency per kind and per level, from the page pool's own tables.

    Attributes:
        kinds: One entry per kind of page, in loading order.
        levels: Share of each level's links that is resident, the bottom first.
        total_bytes: Bytes of all pages.
        resident_bytes: Bytes of pages in memory.
        budget_bytes: The page pool's budget.
        navigation_bits: Bits a dimension of what walks compare: codes of 4, or 2 where the budget
            does not hold the 4-bit ones; vectors of 32 or 16 where they are no longer than a
            code. The smallest of all segments; 0 without any.
    """

    kinds: tuple[KindResidency, ...]
    levels: tuple[float, ...]
    total_bytes: int
    resident_bytes: int
    budget_bytes: int
    navigation_bits: int = 0

    def kind(self, name: str) -> KindResidency:
        """The entry of one kind.

        Raises:
            InputError: no pages of such a kind are known.
        """
        for entry in self.kinds:
            if entry.kind == name:
                return entry
        known = ", ".join(entry.kind for entry in self.kinds)
        raise InputError(f"kind: expected one of {known}, found {name!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "total_bytes": self.total_bytes,
            "resident_bytes": self.resident_bytes,
            "budget_bytes": self.budget_bytes,
            "navigation_bits": self.navigation_bits,
            "levels": list(self.levels),
            "kinds": {
                entry.kind: {
                    "pages": entry.pages,
                    "resident": entry.resident,
                    "sticky": entry.sticky,
                    "quarantined": entry.quarantined,
                    "bytes": entry.pages * entry.page_bytes,
                    "resident_bytes": entry.resident_bytes,
                }
                for entry in self.kinds
            },
        }
