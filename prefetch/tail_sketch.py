"""What is known of keys that the heat table has no room for: an estimate each, in fixed memory.

A count-min sketch of accesses in forward-decayed form (see `decay`), exponential with the heat's
half-life. It never says less than what was counted, and more by at most ``relative_error`` of all
that was counted, with probability ``1 - e^-hashes`` per key. A key enters the table once its
estimate exceeds the floor: what the hottest of the keys that were dropped last was worth then.

Source: Cormode, Muthukrishnan, "An improved data stream summary: the count-min sketch", J.
Algorithms 55 (2005), as `datasketches` has it; the decay, the floor and `raise_to` are ours.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.decay import landmark_for
from stoker.prefetch.snapshot import SnapshotCorrupt

_HASHES = 4
_MARGIN = 0.5  # accesses


class TailSketch:
    """Estimates of decayed demand, and the floor above which a key earns a place in the table.

    Keys are numbers made from content (`content_hash`); those that share one share an estimate.

    Invariant: an estimate is never below the decayed sum of what was counted since the landmark
    moved last; the landmark moves once in 256 half-lives, by when nothing counted is left.
    """

    def __init__(self, *, half_life_s: float, buckets: int) -> None:
        """Make an empty one.

        Args:
            half_life_s: Age at which an access counts half.
            buckets: Counters per hash; memory is 32 bytes each.
        """
        self._rate = 1.0 / half_life_s
        self._buckets = buckets
        self._sketch = _new_sketch(buckets)
        self._landmark = -math.inf
        self._floor = 0.0  # in the sketch's own, grown form

    def growth(self, time_s: float) -> float:
        """Return what one access at that time weighs in the sketch, which may move its landmark."""
        exponent = time_s * self._rate
        target = landmark_for(exponent)
        if target > self._landmark:
            if self._landmark != -math.inf:
                # What it holds would be scaled by 2^-256 and less: nothing.
                self._sketch = _new_sketch(self._buckets)
                self._floor = 0.0
            self._landmark = target
        return math.exp2(max(-1000.0, exponent - self._landmark))

    def bar(self, growth: float) -> float:
        """Return the weight with which a key enters the table: the floor and half an access.

        Without that margin every newcomer asked for once would beat those that were asked for once
        before, and the table would turn over for nothing.
        """
        return self._floor + _MARGIN * growth

    def count(self, key: int, weight: float) -> float:
        """Count an access of so much weight; returns the key's estimated weight, it included."""
        self._sketch.update(key, weight)
        estimate: float = self._sketch.get_estimate(key)
        return estimate

    def raise_to(self, key: int, time_s: float, demand: float) -> None:
        """See to it that the key's estimate at that time is at least ``demand``."""
        weight = demand * self.growth(time_s)
        lacking = weight - float(self._sketch.get_estimate(key))
        if lacking > 0.0:
            self._sketch.update(key, lacking)

    def estimate(self, key: int, now_s: float) -> float:
        """Return the key's estimated demand; at or after the newest time counted."""
        if self._landmark == -math.inf:
            return 0.0
        exponent = min(1000.0, now_s * self._rate - self._landmark)
        return float(self._sketch.get_estimate(key)) * math.exp2(-exponent)

    def set_floor(self, time_s: float, demand: float) -> None:
        """Ask for that much demand, decaying from that time on, before a key enters the table."""
        self._floor = demand * self.growth(time_s)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the sketch takes, whatever it has seen."""
        return int(self._sketch.get_serialized_size_bytes())

    @property
    def relative_error(self) -> float:
        """The share of all that was counted by which an estimate may be too high."""
        return float(self._sketch.get_relative_error())

    def to_state(self) -> tuple[dict[str, float | None], NDArray[np.uint8]]:
        """Return plain values and the sketch's bytes; equal state gives equal ones."""
        landmark = None if self._landmark == -math.inf else self._landmark
        values: dict[str, float | None] = {"landmark": landmark, "floor": self._floor}
        return values, np.frombuffer(self._sketch.serialize(), dtype=np.uint8)

    @staticmethod
    def from_state(
        values: dict[str, Any], data: NDArray[np.uint8], *, half_life_s: float, buckets: int
    ) -> TailSketch:
        """Return what `to_state` saved; continues bit for bit.

        Raises:
            SnapshotCorrupt: it has another number of buckets.
        """
        tail = TailSketch.__new__(TailSketch)
        tail._rate = 1.0 / half_life_s
        tail._buckets = buckets
        tail._sketch = _library().count_min_sketch.deserialize(data.tobytes())
        if (found := int(tail._sketch.num_buckets)) != buckets:
            raise SnapshotCorrupt(f"tail sketch has {found} buckets, settings say {buckets}")
        tail._landmark = -math.inf if values["landmark"] is None else float(values["landmark"])
        tail._floor = float(values["floor"])
        return tail


def _new_sketch(buckets: int) -> Any:
    return _library().count_min_sketch(_HASHES, buckets)


def _library() -> Any:
    """`datasketches`, imported when a table first overflows: that takes 75 ms, and few ever do."""
    return importlib.import_module("datasketches")
