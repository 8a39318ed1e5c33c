"""A cache over GPU, host and NVMe whose content follows a `PlacementLearner`.

Every key lies in one tier; NVMe holds what the others do not. An asked-for key contests the GPU,
then the host: it takes the place of the keys whose room earns least there, if it earns more. A key
that leaves the GPU contests the host in turn. Nothing moves between accesses.

Keys are followed for a while after they have left, so that what happens to them is learnt too.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from stoker.errors import ConfigError
from stoker.prefetch.candidates import Candidate
from stoker.prefetch.qlearning import (
    AGES,
    FREQUENCIES,
    GPU,
    HOST,
    NVME,
    PlacementLearner,
    Stretch,
    TierCosts,
    state_number,
)

UPDATE_S = 0.1


class _Key:
    """What is known of one key."""

    __slots__ = ("age", "entered", "frequency", "group", "key", "last", "size", "state", "tier")

    def __init__(self, key: Hashable, size: float, group: Hashable) -> None:
        self.key = key
        self.size = size
        self.group = group
        self.frequency = 0.0
        self.last = 0
        self.entered = 0  # when it came into its age class
        self.age = 0
        self.state = 0
        self.tier = NVME


class _Tier:
    """The keys of one tier by state, with the state that earns least at hand.

    Invariant: ``used`` is the size of all keys inside, and at most ``capacity``.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.count = 0
        self.used = 0.0
        self.buckets: dict[int, OrderedDict[Hashable, _Key]] = {}
        self._heap: list[tuple[float, int]] = []
        self._index: list[float] = []
        self.valued = 0  # evictions of what was still worth its room, and of the others
        self.worthless = 0

    def rank(self, index: list[float]) -> None:
        """Take new worths of the states."""
        self._index = index
        # Of equal states the older one, which has the higher number, is the least.
        self._heap = [(index[s], -s) for s, bucket in self.buckets.items() if bucket]
        heapq.heapify(self._heap)

    def add(self, key: _Key) -> None:
        """Put a key in; there is room."""
        bucket = self.buckets.get(key.state)
        if bucket is None:
            bucket = self.buckets[key.state] = OrderedDict()
        if not bucket:
            heapq.heappush(self._heap, (self._index[key.state], -key.state))
        bucket[key.key] = key
        self.used += key.size
        self.count += 1

    def remove(self, key: _Key) -> None:
        """Take a key out, by the state under which it was added."""
        del self.buckets[key.state][key.key]
        self.used -= key.size
        self.count -= 1

    def least(self) -> _Key | None:
        """Return the key whose room earns least; None where there is none."""
        heap = self._heap
        while heap:
            bucket = self.buckets.get(-heap[0][1])
            if bucket:
                return next(iter(bucket.values()))
            heapq.heappop(heap)
        return None

    def pressure(self) -> float:
        """Return the pressure since the last call, in [-1, 1]; see `PlacementLearner.update`."""
        total = self.valued + self.worthless
        push = (self.valued - self.worthless) / total if total else 0.0
        self.valued = self.worthless = 0
        return push

    def ordered(self) -> list[_Key]:
        """Return what is inside, the least worth first."""
        states = sorted(self.buckets, key=lambda s: (self._index[s], -s))
        return [key for state in states for key in self.buckets[state].values()]


class TieredPlacement:
    """Placement over three tiers by what was learnt. One thread at a time.

    Invariants (`check`): a key lies in one tier; no tier holds more than its room; every key that
    lies above NVMe is followed.
    """

    def __init__(
        self,
        *,
        gpu_room: float,
        host_room: float,
        learner: PlacementLearner | None = None,
        costs: TierCosts | None = None,
        group_of: Callable[[Hashable], Hashable] | None = None,
        accesses_per_s: float = 1000.0,
        history_ratio: float = 3.0,
    ) -> None:
        """Start empty.

        Args:
            gpu_room: Usual units that fit on the GPU; 0 means that there is none.
            host_room: Usual units that fit in host memory, at least one.
            learner: What was learnt before; None starts anew.
            costs: For a new learner.
            group_of: Gives a key's neighbourhood; None takes numbers by eights, others alone.
            accesses_per_s: The rate that stands for time where a caller gives none.
            history_ratio: Keys followed that are not resident, per unit of room.
        """
        if not (gpu_room >= 0.0 and host_room >= 1.0):
            raise ConfigError(
                f"gpu_room must be >= 0 and host_room >= 1, got {gpu_room!r} and {host_room!r}"
            )
        room = gpu_room + host_room
        self.learner = learner or PlacementLearner(room=room, costs=costs)
        self._tiers = (_Tier(gpu_room), _Tier(host_room))
        self._group_of = group_of or _neighbourhood
        self._step_s = 1.0 / accesses_per_s
        self._known: dict[Hashable, _Key] = {}
        self._history_max = int(history_ratio * room) + 1
        self._history = 0  # followed keys on NVMe
        self._unit = max(1, round(room / 32))
        # Age class -> lower bound in accesses; the last one has no upper bound.
        self._bounds = [0] + [self._unit << age for age in range(AGES - 1)]
        self._ages: list[OrderedDict[Hashable, _Key]] = [OrderedDict() for _ in range(AGES)]
        self._half_life = 30.0 * room
        self._groups: OrderedDict[Hashable, int] = OrderedDict()
        self._groups_max = int(2 * room) + 16
        self._now = 0
        self._time_s = 0.0
        self._updated_s = 0.0
        self._stretches: list[Stretch] = []
        self.moved = [0, 0]  # copies into GPU and host
        self.gone: deque[Hashable] = deque()  # keys that the last access sent to NVMe
        self._rank()

    def tier_of(self, key: Hashable) -> int:
        """Return the tier that a key lies in."""
        known = self._known.get(key)
        return NVME if known is None else known.tier

    def access(self, key: Hashable, *, size: float = 1.0, time_s: float | None = None) -> int:
        """Take one access; returns the tier that the key was found in.

        Args:
            key: The unit.
            size: Its bytes in usual units; the same at every access.
            time_s: Seconds, never falling; None counts accesses.
        """
        self._now += 1
        self._time_s = self._time_s + self._step_s if time_s is None else time_s
        self.gone.clear()
        if self._now % self._unit == 0:
            self._grow_older()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Key(key, size, self._group_of(key))
            self._history += 1
            found = NVME
        else:
            found = known.tier
            del self._ages[known.age][key]
            if found != NVME:
                self._tiers[found].remove(known)
            known.frequency *= 2.0 ** ((known.last - self._now) / self._half_life)
        before = known.state
        known.frequency += 1.0
        entered, known.entered = known.entered, self._now
        first = known.last == 0
        known.last = self._now
        known.age = 0
        known.state = self._state(known)
        self._groups[known.group] = self._now
        self._groups.move_to_end(known.group)
        if len(self._groups) > self._groups_max:
            self._groups.popitem(last=False)
        self._ages[0][key] = known
        if not first:
            self._stretches.append(Stretch(before, known.state, self._now - entered, True))
        self._place(known, found)
        if self._time_s - self._updated_s >= UPDATE_S:
            self._updated_s = self._time_s
            self._learn()
        return found

    # -- states ----------------------------------------------------------------------------

    def _state(self, known: _Key) -> int:
        frequency = min(FREQUENCIES - 1, int(known.frequency).bit_length() - 1)
        width = 0 if known.size < 0.75 else 1 if known.size <= 1.5 else 2
        gap = self._now - self._groups.get(known.group, -math.inf)
        locality = 0 if gap <= self._unit else 1 if gap <= 16 * self._unit else 2
        return state_number(max(0, frequency), known.age, width, locality)

    def _grow_older(self) -> None:
        """Move keys into the age class that they have reached; forget the oldest on NVMe."""
        now = self._now
        for age in range(AGES - 1):
            queue, bound = self._ages[age], self._bounds[age + 1]
            while queue:
                known = next(iter(queue.values()))
                if now - known.last < bound:
                    break
                del queue[known.key]
                self._enter_age(known, age + 1)
        oldest, stay = self._ages[AGES - 1], self._bounds[AGES - 1]
        while oldest:
            known = next(iter(oldest.values()))
            if now - known.entered < stay:
                break
            del oldest[known.key]
            self._enter_age(known, AGES - 1)
        age = AGES - 1
        while self._history > self._history_max and age > 0:
            for key in [k for k, known in self._ages[age].items() if known.tier == NVME]:
                if self._history <= self._history_max:
                    break
                del self._ages[age][key], self._known[key]
                self._history -= 1
            age -= 1

    def _enter_age(self, known: _Key, age: int) -> None:
        tier = known.tier
        if tier != NVME:
            self._tiers[tier].remove(known)
        before = known.state
        known.age = age
        known.state = self._state(known)
        self._stretches.append(Stretch(before, known.state, self._now - known.entered, False))
        known.entered = self._now
        self._ages[age][known.key] = known
        if tier != NVME:
            self._tiers[tier].add(known)

    # -- placing ---------------------------------------------------------------------------

    def _place(self, known: _Key, found: int) -> None:
        """Put an asked-for key where its room earns; it is in no tier's room now."""
        known.tier = NVME
        if found != NVME:
            self._history += 1
        self._descend(known, GPU)
        if known.tier < found:
            self.moved[known.tier] += 1
        if known.tier == NVME and found != NVME:
            self.gone.append(known.key)

    def _descend(self, known: _Key, tier: int) -> None:
        """Let a key contest this tier and, if it loses, those below."""
        learner = self.learner
        for at in range(tier, NVME):
            index = learner.index_gpu if at == GPU else learner.index_host
            losers = self._contest(known, self._tiers[at], index)
            if losers is None:
                continue
            self._tiers[at].add(known)
            known.tier = at
            self._history -= 1
            for loser in losers:
                loser.tier = NVME
                self._history += 1
                self._descend(loser, at + 1)
                if loser.tier == NVME:
                    self.gone.append(loser.key)
                elif at == GPU:
                    self.moved[HOST] += 1
            return

    def _contest(self, known: _Key, tier: _Tier, index: list[float]) -> list[_Key] | None:
        """Take the least keys out for a better one; None, and nothing changed, if it is not."""
        if known.size > tier.capacity:
            return None
        losers: list[_Key] = []
        worth = index[known.state]
        while tier.used + known.size > tier.capacity + 1e-9:
            least = tier.least()
            if least is None or index[least.state] > worth:
                for loser in losers:
                    tier.add(loser)
                self._count(tier, worth)
                return None
            tier.remove(least)
            losers.append(least)
        for loser in losers:
            self._count(tier, index[loser.state])
        return losers

    @staticmethod
    def _count(tier: _Tier, worth: float) -> None:
        if worth > 0.0:
            tier.valued += 1
        else:
            tier.worthless += 1

    # -- learning --------------------------------------------------------------------------

    def _learn(self) -> None:
        gpu, host = self._tiers
        self.learner.update(self._stretches, pressure=(gpu.pressure(), host.pressure()))
        self._stretches = []
        self._rank()

    def _rank(self) -> None:
        self._tiers[GPU].rank(self.learner.index_gpu)
        self._tiers[HOST].rank(self.learner.index_host)

    def explain(self, key: Hashable) -> dict[str, Any] | None:
        """Say why a key is where it is; None where nothing is known of it."""
        known = self._known.get(key)
        return None if known is None else self.learner.explain(known.state, known.tier)

    def resident(self, tier: int) -> list[Hashable]:
        """Return the keys of GPU or host, the least worth first."""
        return [known.key for known in self._tiers[tier].ordered()]

    def count(self, tier: int) -> int:
        """Return how many keys lie on GPU or host."""
        return self._tiers[tier].count

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        self.learner.check()
        inside = 0
        for at, tier in enumerate(self._tiers):
            keys = tier.ordered()
            assert all(known.tier == at for known in keys)
            assert all(self._known[known.key] is known for known in keys)
            assert abs(tier.used - sum(known.size for known in keys)) < 1e-6
            assert tier.used <= tier.capacity + 1e-6
            assert tier.count == len(keys)
            inside += len(keys)
        assert self._history == len(self._known) - inside
        assert sum(len(queue) for queue in self._ages) == len(self._known)


class QLearning(Candidate):
    """Q-learning between one tier and NVMe: what the arena and a single room compare.

    Raises:
        UnavailableError: torch is not installed.
    """

    name: ClassVar[str] = "qlearning"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.placement = TieredPlacement(gpu_room=0.0, host_room=float(capacity))

    def access(self, key: Hashable) -> bool:
        """Take one access; return whether it hit."""
        placement = self.placement
        hit = placement.access(key) == HOST
        self.gone = placement.gone[0] if placement.gone else None
        if self.gone is None and not hit and placement.tier_of(key) == NVME:
            self.gone = key  # it was not let in
        return hit

    def keys(self) -> list[Hashable]:
        """Return what is inside, the least worth first."""
        return self.placement.resident(HOST)

    def __contains__(self, key: Hashable) -> bool:
        return self.placement.tier_of(key) == HOST

    def __len__(self) -> int:
        return self.placement.count(HOST)


def _neighbourhood(key: Hashable) -> Hashable:
    return key // 8 if isinstance(key, int) else key
