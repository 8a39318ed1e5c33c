"""A fast path for the few keys that everybody reads, there and back by what is measured.

Behind a lock a key that all threads ask for makes all of them wait. A key that was read more often
than a bound within a window, and whose reads are slow at the 99th percentile, is copied to a table
that is read without a lock; each thread counts its own reads, so that nothing is shared but what is
never written. When it is asked for less, or its value changes, it goes back.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from stoker.errors import InputError
from stoker.kvcache.snapshot_table import SnapshotTable

V = TypeVar("V")

_BUCKETS = 10  # of a window: what is counted is at most a tenth of it too old
_SAMPLES = 256  # newest reads of a key and thread whose time is kept


class _Reads:
    """One thread's reads of one key: how many per part of the window, and how long they took."""

    __slots__ = ("counts", "next", "stamp", "times_ns")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.stamp = -1  # number of the newest bucket
        self.times_ns: list[int] = []
        self.next = 0

    def add(self, bucket: int, taken_ns: int) -> None:
        self.turn(bucket)
        self.counts[bucket % _BUCKETS] += 1
        if taken_ns >= 0:
            if len(self.times_ns) < _SAMPLES:
                self.times_ns.append(taken_ns)
            else:
                self.times_ns[self.next] = taken_ns
                self.next = (self.next + 1) % _SAMPLES

    def turn(self, bucket: int) -> None:
        if bucket != self.stamp:
            for passed in range(max(self.stamp + 1, bucket - _BUCKETS + 1), bucket + 1):
                self.counts[passed % _BUCKETS] = 0
            self.stamp = bucket

    def total(self, bucket: int) -> int:
        oldest = bucket - _BUCKETS + 1
        return sum(
            count
            for place, count in enumerate(self.counts)
            if self.stamp - (self.stamp - place) % _BUCKETS >= oldest
        )


class _Counted:
    """What one thread counted; gone with its thread."""

    def __init__(self) -> None:
        self.reads: dict[str, _Reads] = {}
        self.calls = 0


class _Thread(threading.local):
    """Where a thread finds what it counts."""

    counted: _Counted | None = None


class HotKeys(Generic[V]):
    """Reads through a slow path, and past it for hot keys. Safe from several threads.

    Invariants (`check`): a fast key's value is what the slow path gave after the key's last
    `forget`; never more than ``fast_max`` fast keys, nor ``tracked_max`` counted ones per thread.

    Args:
        read: The slow path: the value of a key, or None. May block.
        accesses_min: Reads within the window above which a key may be fast.
        window_s: That window.
        p99_us: Time of the slow path's reads, at the 99th percentile, above which it pays.
        fast_max: Fast keys at once.
        tracked_max: Keys that a thread counts; beyond it the least read are forgotten.
        clock_ns: Nanoseconds, any origin, never falling.
    """

    REVIEW_CALLS = 64  # a thread looks at the clock of reviews once in so many reads

    def __init__(
        self,
        read: Callable[[str], V | None],
        *,
        accesses_min: int = 500,
        window_s: float = 10.0,
        p99_us: float = 100.0,
        fast_max: int = 256,
        tracked_max: int = 4_096,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if min(accesses_min, window_s, fast_max, tracked_max) <= 0 or p99_us < 0:
            raise InputError(
                f"expected bounds above 0, found {accesses_min}, {window_s}, {p99_us}, "
                f"{fast_max}, {tracked_max}"
            )
        self._read = read
        self._accesses_min = accesses_min
        self._bucket_ns = max(1, int(window_s * 1e9 / _BUCKETS))
        self._p99_ns = p99_us * 1e3
        self._fast_max = fast_max
        self._tracked_max = tracked_max
        self._clock_ns = clock_ns
        self._fast: SnapshotTable[V] = SnapshotTable(shards=1)
        self._mine = _Thread()
        self._threads: weakref.WeakSet[_Counted] = weakref.WeakSet()
        self._lock = threading.Lock()  # of reviews and of forgetting
        self._forgotten = 0  # calls of `forget` so far
        self._reviewed = -1  # bucket of the last review
        self.promoted = self.demoted = 0

    def get(self, key: str) -> V | None:
        """Return a key's value."""
        value = self._fast.present().get(key)
        now = self._clock_ns()
        taken = -1
        if value is None:
            value = self._read(key)
            after = self._clock_ns()
            taken, now = after - now, after
        self._note(key, now // self._bucket_ns, taken)
        return value

    def _note(self, key: str, bucket: int, taken_ns: int) -> None:
        mine = self._mine.counted
        if mine is None:
            mine = self._mine.counted = _Counted()
            with self._lock:
                self._threads.add(mine)
        reads = mine.reads
        found = reads.get(key)
        if found is None:
            if len(reads) >= self._tracked_max:
                self._shrink(reads, bucket)
            found = reads[key] = _Reads()
        found.add(bucket, taken_ns)
        mine.calls += 1
        due = mine.calls % self.REVIEW_CALLS == 0 and bucket != self._reviewed
        if due and self._lock.acquire(blocking=False):
            try:
                self._review(bucket)
            finally:
                self._lock.release()

    def _shrink(self, reads: dict[str, _Reads], bucket: int) -> None:
        """Forget the half of one thread's keys that it read least."""
        for key in sorted(reads, key=lambda name: reads[name].total(bucket))[: len(reads) // 2 + 1]:
            del reads[key]

    def review(self) -> None:
        """Move keys to the fast path and back; reads do this by themselves ten times a window."""
        with self._lock:
            self._review(self._clock_ns() // self._bucket_ns)

    def _review(self, bucket: int) -> None:
        self._reviewed = bucket
        totals: dict[str, int] = {}
        times: dict[str, list[int]] = {}
        for counted in self._threads:
            for key, found in list(counted.reads.items()):
                totals[key] = totals.get(key, 0) + found.total(bucket)
                times.setdefault(key, []).extend(found.times_ns)
        fast = {key for key, _ in self._fast.present().items()}
        # Half the bound, so that a key at the bound does not go there and back all the time.
        cold = {key for key in fast if totals.get(key, 0) <= self._accesses_min // 2}
        if cold:
            self._fast.write(dict.fromkeys(cold))
            self.demoted += len(cold)
        wanted = sorted(
            (
                key for key, total in totals.items()
                if key not in fast and total > self._accesses_min
                and _p99(times[key]) > self._p99_ns
            ),
            key=lambda key: (-totals[key], key),
        )  # fmt: skip
        for key in wanted[: self._fast_max - len(fast) + len(cold)]:
            before = self._forgotten
            value = self._read(key)
            # Told of a change while it was read: what was read may be of before it.
            if value is not None and self._forgotten == before:
                self._fast.write({key: value})
                self.promoted += 1

    def forget(self, key: str) -> None:
        """Take a key off the fast path: its value changes. Call before the change is told."""
        self._forgotten += 1  # before the lock: a review that reads now sees that it must not keep
        with self._lock:
            if self._fast.present().get(key) is not None:
                self._fast.write({key: None})
                self.demoted += 1

    def forget_all(self) -> None:
        """Take every key off the fast path."""
        self._forgotten += 1
        with self._lock:
            fast = {key for key, _ in self._fast.present().items()}
            self._fast.write(dict.fromkeys(fast))
            self.demoted += len(fast)

    def fast_keys(self) -> set[str]:
        """Return the keys on the fast path."""
        return {key for key, _ in self._fast.present().items()}

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        self._fast.check()
        assert len(self._fast.present()) <= self._fast_max
        with self._lock:
            assert all(len(counted.reads) <= self._tracked_max for counted in self._threads)


def _p99(times_ns: list[int]) -> float:
    if not times_ns:
        return 0.0
    ordered = sorted(times_ns)
    return float(ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)])
