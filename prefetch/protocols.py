"""What a room offers to be warmed, and the words that plans and rooms share.

`prefetch` decides what to load but never touches a page: it sees the index and the KV cache only
through these protocols, as numbered units of a size with an expected benefit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.pieces import Rest

ContentKey = tuple[str, str]
"""(tenant, chunk id): the only key that heat ever has, so that it outlives any layout."""

KIND_LINKS = "links"
KIND_COARSE = "coarse"
KIND_CODES = "codes"
KIND_REFINE = "refine"
KIND_VECTORS = "vectors"
KIND_KV_BLOCK = "kv_block"

NAVIGATION_KINDS = frozenset({KIND_LINKS, KIND_COARSE, KIND_CODES, KIND_VECTORS})
"""Kinds that pay off only together: a hop reads a node's links and its neighbors' codes, or their
vectors, where those are no longer than a code."""

NAVIGATION_STAGE = 1
"""The stage at which they are offered; codes and vectors offered later are not navigated on."""


@dataclass(frozen=True)
class UnitBatch:
    """Loadable units of one kind, as arrays (one unit is one page or one KV block).

    Attributes:
        source: The room that owns the units: "index" or "kvcache".
        kind: One of the ``KIND_`` words above.
        stage: Lower stages are loaded first; stage 0 (the upper layers) always.
        units: uint32, shape (n,), the unit numbers within that kind's store, hottest first.
        unit_bytes: Bytes that one unit takes when resident; at least 1.
        benefit: float32, shape (n,), expected demand hits per unit, finite and >= 0, same order
            as ``units``.
    """

    source: str
    kind: str
    stage: int
    units: NDArray[np.uint32]
    unit_bytes: int
    benefit: NDArray[np.float32]


@dataclass(frozen=True)
class LoadOutcome:
    """What one `WarmSource.load_units` call did; the first five add up to the units asked for."""

    loaded: int
    already: int
    no_room: int
    failed: int
    not_reached: int
    bytes_read: int
    reads: int
    seconds: float


class WarmSource(Protocol):
    """A room whose units can be warmed."""

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        """Translate content heat into this room's units as they are laid out now.

        Args:
            heat: Weight (>= 0) per content key. Empty means that nothing is known.
        """
        ...

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        """Load units at a priority under demand; blocks until done or the deadline.

        Args:
            kind: The batch's kind.
            units: uint32, shape (n,), in any order.
            sticky: Whether the units may not be evicted afterwards.
            deadline_s: Seconds from now after which nothing new is read; None means no limit.
        """
        ...

    def total_bytes(self) -> int:
        """Return the bytes of everything that this source could make resident."""
        ...


@runtime_checkable
class PatientSource(Protocol):
    """A source whose translation of heat takes long, and can be done in pieces."""

    def unit_batches_in_pieces(
        self, heat: Mapping[ContentKey, float], rest: Rest
    ) -> Sequence[UnitBatch]:
        """Return what `WarmSource.unit_batches` does.

        Args:
            rest: Called after each step of a tenth of a millisecond or so; see `pieces`.
        """
        ...


def units_offered(
    source: WarmSource, heat: Mapping[ContentKey, float], rest: Rest
) -> Sequence[UnitBatch]:
    """Ask a source for its units, in pieces where it can, and rest after each."""
    if isinstance(source, PatientSource):
        return source.unit_batches_in_pieces(heat, rest)
    found = source.unit_batches(heat)
    rest()
    return found


@runtime_checkable
class ResidencyReader(Protocol):
    """A source that can say what is resident now, read from the pool and not remembered."""

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Return how many of ``units`` (uint32, shape (n,)) of ``kind`` are resident now."""
        ...


@runtime_checkable
class RoomReader(Protocol):
    """A source that knows how much it can hold."""

    def has_room_for_all(self) -> bool:
        """Tell whether everything that it offers can be resident at once."""
        ...


@runtime_checkable
class RecallReader(Protocol):
    """A source that can say what its answers are worth by what is resident."""

    def expected_recall(self, coverage: Mapping[str, float]) -> float | None:
        """Return the mean recall@10 of an answer from memory alone, in [0, 1].

        Args:
            coverage: Kind -> share of what demand looks at that is resident, in [0, 1].

        None where nobody has measured it.
        """
        ...
