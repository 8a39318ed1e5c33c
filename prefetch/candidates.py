"""The small caches that compete in the arena, each a whole replacement policy over keys.

They run in the product on live accesses, so they are written for it: `access` is one call, the
victim is told at once, and a key's bytes never appear. For comparisons in benchmarks the reference
implementations of a cache-simulation library are used, not these.

Sources: LRU; S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, SOSP 2023; SIEVE: Zhang, Yang, Yue, Vigfusson,
Rashmi, NSDI 2024; ARC: Megiddo, Modha, FAST 2003; W-TinyLFU: Einziger, Friedman, Manes, ACM ToS
2017 (ours counts exactly and forgets by halving); decayed frequency: LRFU, Lee et al., IEEE ToC
2001 (ours keeps evicted keys' counts for a while).
"""

from __future__ import annotations

import abc
import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import ClassVar

Queue = OrderedDict[Hashable, None]


class Candidate(abc.ABC):
    """A cache of ``capacity`` keys under one policy.

    Invariants: never more than ``capacity`` keys are in it; after `access`, ``gone`` is the one key
    that left, or None.
    """

    name: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.gone: Hashable | None = None

    @abc.abstractmethod
    def access(self, key: Hashable) -> bool:
        """Take one access; return whether it hit. A miss may or may not admit the key."""

    @abc.abstractmethod
    def keys(self) -> list[Hashable]:
        """Return what is inside, roughly from the least to the most worth keeping."""

    @abc.abstractmethod
    def __contains__(self, key: Hashable) -> bool: ...

    @abc.abstractmethod
    def __len__(self) -> int: ...


class Lru(Candidate):
    """Evict what was used longest ago."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: Queue = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._queue

    def keys(self) -> list[Hashable]:
        return list(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def access(self, key: Hashable) -> bool:
        queue = self._queue
        self.gone = None
        if key in queue:
            queue.move_to_end(key)
            return True
        if len(queue) >= self.capacity:
            self.gone = queue.popitem(last=False)[0]
        queue[key] = None
        return False


class S3Fifo(Candidate):
    """A small queue for newcomers, a main one for the proven, a ghost of the rejected."""

    name = "s3-fifo"

    def __init__(self, capacity: int, *, small_ratio: float = 0.1, promote_hits: int = 2) -> None:
        super().__init__(capacity)
        self._small_max = max(1, int(capacity * small_ratio))
        self._main_max = capacity - self._small_max
        self._ghost_max = int(capacity * 0.9)
        self._promote_hits = promote_hits
        self._small: OrderedDict[Hashable, int] = OrderedDict()
        self._main: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost: Queue = OrderedDict()
        self._filled = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._main or key in self._small

    def keys(self) -> list[Hashable]:
        return [*self._small, *self._main]

    def __len__(self) -> int:
        return len(self._main) + len(self._small)

    def access(self, key: Hashable) -> bool:
        small, main = self._small, self._main
        self.gone = None
        if key in main:
            hits = main[key]
            if hits < 3:
                main[key] = hits + 1
            return True
        if key in small:
            small[key] += 1
            return True
        if len(small) + len(main) >= self.capacity:
            self._filled = True
            self._evict()
        if key in self._ghost:
            del self._ghost[key]
            main[key] = 0
        elif not self._filled and len(small) >= self._small_max:
            main[key] = 0  # until the cache is full, nothing has to prove itself
        else:
            small[key] = 0
        return False

    def _evict(self) -> None:
        small, main = self._small, self._main
        if len(main) <= self._main_max:
            while small:
                key, hits = small.popitem(last=False)
                if hits >= self._promote_hits:
                    main[key] = 0
                    continue
                self._ghost[key] = None
                if len(self._ghost) > self._ghost_max:
                    self._ghost.popitem(last=False)
                self.gone = key
                return
        while main:
            key, hits = main.popitem(last=False)
            if hits <= 0:
                self.gone = key
                return
            main[key] = hits - 1
        if small:
            self.gone = small.popitem(last=False)[0]


class Sieve(Candidate):
    """One queue in order of arrival; a hand walks from the oldest and spares what was used."""

    name = "sieve"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._visited: dict[Hashable, bool] = {}
        self._newer: dict[Hashable, Hashable | None] = {}
        self._older: dict[Hashable, Hashable | None] = {}
        self._newest: Hashable | None = None
        self._oldest: Hashable | None = None
        self._hand: Hashable | None = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._visited

    def keys(self) -> list[Hashable]:
        return list(self._visited)

    def __len__(self) -> int:
        return len(self._visited)

    def access(self, key: Hashable) -> bool:
        self.gone = None
        visited = self._visited
        if key in visited:
            visited[key] = True
            return True
        if len(visited) >= self.capacity:
            self._evict()
        visited[key] = False
        self._older[key] = self._newest
        self._newer[key] = None
        if self._newest is not None:
            self._newer[self._newest] = key
        self._newest = key
        if self._oldest is None:
            self._oldest = key
        return False

    def _evict(self) -> None:
        visited, newer = self._visited, self._newer
        at = self._hand if self._hand is not None else self._oldest
        while visited[at]:
            visited[at] = False
            at = newer[at]
            if at is None:
                at = self._oldest
        after, before = newer.pop(at), self._older.pop(at)
        self._hand = after
        if after is not None:
            self._older[after] = before
        else:
            self._newest = before
        if before is not None:
            newer[before] = after
        else:
            self._oldest = after
        del visited[at]
        self.gone = at


class Arc(Candidate):
    """Two lists, used once and used again, whose share follows which ghost list is hit."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._target = 0.0
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_ghost: Queue = OrderedDict()
        self._again_ghost: Queue = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._once or key in self._again

    def keys(self) -> list[Hashable]:
        return [*self._once, *self._again]

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def _replace(self, *, again_ghost_hit: bool) -> None:
        once = self._once
        from_once = len(once) > self._target or (again_ghost_hit and len(once) == int(self._target))
        if once and (from_once or not self._again):
            self.gone = once.popitem(last=False)[0]
            self._once_ghost[self.gone] = None
        else:
            self.gone = self._again.popitem(last=False)[0]
            self._again_ghost[self.gone] = None

    def access(self, key: Hashable) -> bool:
        self.gone = None
        once, again = self._once, self._again
        if key in again:
            again.move_to_end(key)
            return True
        if key in once:
            del once[key]
            again[key] = None
            return True
        ghost1, ghost2 = self._once_ghost, self._again_ghost
        if key in ghost1:
            step = max(1.0, len(ghost2) / len(ghost1))
            self._target = min(float(self.capacity), self._target + step)
            self._replace(again_ghost_hit=False)
            del ghost1[key]
            again[key] = None
            return False
        if key in ghost2:
            step = max(1.0, len(ghost1) / len(ghost2))
            self._target = max(0.0, self._target - step)
            self._replace(again_ghost_hit=True)
            del ghost2[key]
            again[key] = None
            return False
        if len(once) + len(ghost1) >= self.capacity:
            if ghost1:
                ghost1.popitem(last=False)
                self._replace(again_ghost_hit=False)
            else:
                self.gone = once.popitem(last=False)[0]
        else:
            known = len(once) + len(ghost1) + len(again) + len(ghost2)
            if known >= 2 * self.capacity and ghost2:
                ghost2.popitem(last=False)
            if len(once) + len(again) >= self.capacity:
                self._replace(again_ghost_hit=False)
        once[key] = None
        return False


class WTinyLfu(Candidate):
    """A small window in front of a segmented LRU that admits only what is asked for more often."""

    name = "w-tinylfu"

    def __init__(self, capacity: int, *, window_ratio: float = 0.01) -> None:
        super().__init__(capacity)
        self._window_max = min(capacity, max(1, int(capacity * window_ratio)))
        self._main_max = capacity - self._window_max
        self._protected_max = int(self._main_max * 0.8)
        self._window: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._counts: dict[Hashable, int] = {}
        self._counted = 0
        self._halve_at = 10 * capacity

    def __contains__(self, key: Hashable) -> bool:
        return key in self._protected or key in self._probation or key in self._window

    def keys(self) -> list[Hashable]:
        return [*self._window, *self._probation, *self._protected]

    def __len__(self) -> int:
        return len(self._window) + len(self._protected) + len(self._probation)

    def access(self, key: Hashable) -> bool:
        self.gone = None
        counts = self._counts
        count = counts.get(key, 0)
        if count < 15:
            counts[key] = count + 1
        self._counted += 1
        if self._counted >= self._halve_at:
            self._counts = {k: c >> 1 for k, c in counts.items() if c > 1}
            self._counted //= 2
        window, protected, probation = self._window, self._protected, self._probation
        if key in protected:
            protected.move_to_end(key)
            return True
        if key in window:
            window.move_to_end(key)
            return True
        if key in probation:
            del probation[key]
            protected[key] = None
            if len(protected) > self._protected_max:
                probation[protected.popitem(last=False)[0]] = None
            return True
        window[key] = None
        if len(window) > self._window_max:
            self._admit(window.popitem(last=False)[0])
        return False

    def _admit(self, newcomer: Hashable) -> None:
        protected, probation = self._protected, self._probation
        if len(protected) + len(probation) < self._main_max:
            probation[newcomer] = None
            return
        queue = probation or protected
        if not queue:
            self.gone = newcomer
            return
        oldest = next(iter(queue))
        if self._counts.get(newcomer, 0) > self._counts.get(oldest, 0):
            del queue[oldest]
            probation[newcomer] = None
            self.gone = oldest
        else:
            self.gone = newcomer


class WideTinyLfu(WTinyLfu):
    """W-TinyLFU with a quarter of the room as window: for bursts that frequency sees too late."""

    name = "w-tinylfu-wide"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, window_ratio=0.25)


class DecayedFrequency(Candidate):
    """Evict the least decayed frequency. Counts halve every 50 x capacity accesses.

    Frequencies are kept as log2 of the forward-decayed count, so that order never changes with
    time and a lazily corrected heap finds the least.
    """

    name = "decayed-frequency"

    def __init__(self, capacity: int, *, half_life_ratio: float = 50.0) -> None:
        super().__init__(capacity)
        self._step = 1.0 / (half_life_ratio * capacity)
        self._now = 0.0
        self._level: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._left: OrderedDict[Hashable, float] = OrderedDict()
        self._left_max = 4 * capacity
        self._serial = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._level

    def keys(self) -> list[Hashable]:
        return sorted(self._level, key=self._level.__getitem__)

    def __len__(self) -> int:
        return len(self._level)

    def _raised(self, before: float) -> float:
        now = self._now
        gap = before - now
        return now + math.log2(1.0 + 2.0**gap) if gap > -60.0 else now

    def access(self, key: Hashable) -> bool:
        self.gone = None
        self._now += self._step
        level = self._level
        if key in level:
            level[key] = self._raised(level[key])
            return True
        before = self._left.pop(key, None)
        value = self._now if before is None else self._raised(before)
        if len(level) >= self.capacity:
            self._evict()
        level[key] = value
        self._serial += 1
        heapq.heappush(self._heap, (value, self._serial, key))
        return False

    def _evict(self) -> None:
        heap, level = self._heap, self._level
        while True:
            value, serial, key = heap[0]
            real = level[key]
            if real <= value:
                break
            heapq.heapreplace(heap, (real, serial, key))
        heapq.heappop(heap)
        del level[key]
        self._left[key] = value
        if len(self._left) > self._left_max:
            self._left.popitem(last=False)
        self.gone = key


CANDIDATES: tuple[type[Candidate], ...] = (
    S3Fifo,
    WTinyLfu,
    WideTinyLfu,
    Arc,
    DecayedFrequency,
    Sieve,
    Lru,
)
