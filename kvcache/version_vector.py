"""Replicated metadata with version vectors: merge, dominance, and a stated rule for conflicts.

Each replica counts its own updates of a key. Of two versions one may have seen the other's updates
(it dominates) or neither has (a conflict). Merging is commutative, associative and idempotent, so
replicas that have seen the same events in any order, any number of times, hold the same.

Source: Parker et al., "Detection of mutual inconsistency in distributed systems", IEEE TSE 9
(1983). Ours keeps, in a conflict, every version that no other dominates, and names one the winner.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from stoker.errors import InputError


class Order(enum.StrEnum):
    """How one version vector stands to another."""

    EQUAL = "equal"
    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "concurrent"


@dataclasses.dataclass(frozen=True, slots=True)
class VersionVector:
    """Updates seen, by replica; replicas that are not named have none.

    Attributes:
        counts: (replica, updates), sorted by replica, updates at least 1.
    """

    counts: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(counts: Mapping[str, int]) -> VersionVector:
        """Build one from a mapping.

        Raises:
            InputError: a count is negative or no whole number, or a replica has no name.
        """
        for replica, count in counts.items():
            if not replica or not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise InputError(f"expected replica names and counts >= 0, found {dict(counts)!r}")
        return VersionVector(tuple(sorted((r, c) for r, c in counts.items() if c)))

    def bumped(self, replica: str) -> VersionVector:
        """Return the vector after one more update by a replica."""
        counts = dict(self.counts)
        counts[replica] = counts.get(replica, 0) + 1
        return VersionVector.of(counts)

    def merged(self, other: VersionVector) -> VersionVector:
        """Return the least vector that has seen what either has."""
        counts = dict(self.counts)
        for replica, count in other.counts:
            counts[replica] = max(count, counts.get(replica, 0))
        return VersionVector.of(counts)

    def order(self, other: VersionVector) -> Order:
        """Say whether this one came before, after, or beside another."""
        if self.counts == other.counts:
            return Order.EQUAL
        both = self.merged(other)
        if both == other:
            return Order.BEFORE
        return Order.AFTER if both == self else Order.CONCURRENT


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One value with the updates that it has seen.

    Attributes:
        vector: What it has seen.
        time_s: When it was written, by its writer's clock: only breaks ties between conflicts.
        replica: Who wrote it.
        value: JSON text, so that equal values are equal; None where the key was deleted.
    """

    vector: VersionVector
    time_s: float
    replica: str
    value: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """A key's versions that no other dominates: one, or several in conflict.

    The winner of a conflict is stated, not chosen by arrival: a value wins over a deletion, then
    the later write, then the greater replica name, then the greater value. A write after that has
    seen all of them and ends the conflict.
    """

    versions: tuple[Version, ...] = ()

    @property
    def conflicting(self) -> bool:
        """Whether versions stand beside each other."""
        return len(self.versions) > 1

    @property
    def winner(self) -> Version | None:
        """The version that readers get, or None where nothing was ever written."""
        return max(self.versions, key=_rank, default=None)

    @property
    def value(self) -> str | None:
        """What readers get; None where the key is absent or deleted."""
        winner = self.winner
        return None if winner is None else winner.value

    def written(self, value: str | None, *, replica: str, time_s: float) -> Register:
        """Return the register after a write here: it has seen, and replaces, all versions."""
        vector = VersionVector()
        for version in self.versions:
            vector = vector.merged(version.vector)
        return Register((Version(vector.bumped(replica), time_s, replica, value),))

    def merged(self, other: Register) -> Register:
        """Return the register that has seen both."""
        return Register(_maximal([*self.versions, *other.versions]))


def _rank(version: Version) -> tuple[bool, float, str, str, Any]:
    live = version.value is not None
    return live, version.time_s, version.replica, version.value or "", version.vector.counts


def _maximal(versions: Iterable[Version]) -> tuple[Version, ...]:
    distinct = set(versions)
    kept = [
        version
        for version in distinct
        if not any(version.vector.order(other.vector) is Order.BEFORE for other in distinct)
    ]
    return tuple(sorted(kept, key=_rank))


class ReplicatedTable:
    """One replica's table of registers. Not thread-safe.

    Writes return what is to be sent to the others; `apply` takes what they sent, in any order.
    """

    def __init__(self, replica: str) -> None:
        if not replica:
            raise InputError("replica: expected a name, found none")
        self.replica = replica
        self._registers: dict[str, Register] = {}

    def write(self, key: str, value: str | None, *, time_s: float) -> tuple[str, Register]:
        """Write or, with None, delete a key; returns the update for the other replicas."""
        register = self.register(key).written(value, replica=self.replica, time_s=time_s)
        self._registers[key] = register
        return key, register

    def apply(self, update: tuple[str, Register]) -> bool:
        """Take another replica's update; returns whether it left the key in conflict."""
        key, register = update
        merged = self.register(key).merged(register)
        self._registers[key] = merged
        return merged.conflicting

    def register(self, key: str) -> Register:
        """Return a key's register; an empty one where nothing is known of it."""
        return self._registers.get(key, Register())

    def values(self) -> dict[str, str]:
        """Return what readers see."""
        return {
            key: register.value
            for key, register in self._registers.items()
            if register.value is not None
        }

    def conflicts(self) -> list[str]:
        """Return the keys in conflict."""
        return sorted(key for key, register in self._registers.items() if register.conflicting)
