"""Account for every key fetched ahead: useful, late, unused or polluting.

* useful: asked for after it was fetched and before it left;
* late: asked for at the very time at which it was fetched; it helped nobody, and is no hit;
* unused: left without having been asked for;
* polluting: unused, and the key that made room for it was asked for meanwhile and missed.

What prefetching has been worth sets its room: where it pollutes more than it helps, the room halves
with each judgement, and it grows back when that has passed.

Source: the definition of pollution is that of the ChampSim project's discussion of prefetchers: a
prefetch must be unused *and* have cost a miss.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

_JUDGED_MIN = 64  # ended prefetches per judgement
_SURE = 2.0  # standard deviations by which harm must exceed help (sign test)
_SCALE_MIN = 1.0 / 64.0  # a little room stays, or it could never be seen to help again


class PrefetchAccount:
    """Counts of what became of prefetches.

    Invariants: ``issued_total == useful + late + unused + polluting + pending``.
    """

    def __init__(self) -> None:
        self.issued_total = 0
        self.useful = 0
        self.late = 0
        self.unused = 0
        self.polluting = 0
        # When each was fetched, and who made room: tuples, which the collector of cycles skips.
        self._pending: dict[Hashable, tuple[float, Hashable | None]] = {}
        self._victims: dict[Hashable, Hashable] = {}  # who made room -> for whom
        self._missed: set[Hashable] = set()  # fetched for one that was missed meanwhile
        self._scale = 1.0
        self._judged = (0, 0, 0)  # ended, useful, polluting at the last judgement

    @property
    def pending(self) -> int:
        """Prefetched keys that are resident and not asked for yet."""
        return len(self._pending)

    def issued(self, key: Hashable, victim: Hashable | None, time_s: float) -> None:
        """A key was fetched ahead."""
        self.issued_total += 1
        self._pending[key] = (time_s, victim)
        self._missed.discard(key)
        if victim is not None:
            self._victims[victim] = key

    def hit(self, key: Hashable, time_s: float) -> bool:
        """A resident key was asked for; return whether that is a hit (False when it is late)."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return True
        self._forget(key, pending[1])
        if time_s > pending[0]:
            self.useful += 1
            return True
        self.late += 1
        return False

    def missed(self, key: Hashable) -> None:
        """A key that is not resident was asked for."""
        blamed = self._victims.get(key)
        if blamed is not None and blamed in self._pending:
            self._missed.add(blamed)

    def evicted(self, key: Hashable) -> None:
        """A key left."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return
        if self._forget(key, pending[1]):
            self.polluting += 1
        else:
            self.unused += 1

    def _forget(self, key: Hashable, victim: Hashable | None) -> bool:
        """Forget an ended prefetch; tell whether the one that made room for it was missed."""
        if victim is not None:
            self._victims.pop(victim, None)
        if key in self._missed:
            self._missed.remove(key)
            return True
        return False

    def area_scale(self) -> float:
        """Return the share of its area that prefetching may use now, in (0, 1].

        Halved when, of the last 64 or more prefetches that ended, significantly more polluted than
        were useful (sign test, 2 sigma); raised by a quarter otherwise.
        """
        ended = self.useful + self.late + self.unused + self.polluting
        if ended - self._judged[0] >= _JUDGED_MIN:
            helped = self.useful - self._judged[1]
            harmed = self.polluting - self._judged[2]
            harmful = harmed - helped > _SURE * math.sqrt(harmed + helped)
            factor = 0.5 if harmful else 1.25
            self._scale = min(1.0, max(_SCALE_MIN, self._scale * factor))
            self._judged = (ended, self.useful, self.polluting)
        return self._scale

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {
            "issued": self.issued_total,
            "useful": self.useful,
            "late": self.late,
            "unused": self.unused,
            "polluting": self.polluting,
            "pending": self.pending,
        }
