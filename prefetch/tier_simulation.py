"""Compare placements over GPU, host and NVMe on a recorded or made trace.

All keys are loaded only when they are asked for, and what counts is the mean time of a read. Beside
ours stand:

* ``lru``: one order of use over both tiers: the newest on the GPU, the next on the host.
* ``frequency``: the same with decayed frequency, which keeps the counts of what it evicts.
* ``oracle``: knows every coming access. The GPU holds what is needed soonest, the host what is
  needed next; a key that is needed later than all of those is let through. For units of one size
  this is Belady's policy in both tiers at once (what it keeps in a smaller room lies within what it
  keeps in a larger one), and so an *upper bound* on what loading on demand can do. For mixed sizes
  no such policy is known; there it is `reuse_bound` for both tiers, which nothing attains.

The share of the oracle's gain over LRU is ``(t_lru - t) / (t_lru - t_oracle)``, t the mean time.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.qlearning import GPU, HOST, NVME, PlacementLearner, TierCosts
from stoker.prefetch.references import next_accesses
from stoker.prefetch.tiered import TieredPlacement
from stoker.prefetch.traces import Trace

Floats = NDArray[np.float64]

TIERED = ("qlearning", "lru", "frequency", "oracle")


@dataclass(frozen=True)
class TieredOutcome:
    """One policy over three tiers; counts are of the measured part.

    Attributes:
        gpu_ratio: Accesses found on the GPU.
        host_ratio: Accesses found in host memory.
        read_us: Mean time of a read.
        moves_per_access: Copies into GPU and host per access, with demotions.
        total_us: ``read_us`` and the time of the links that moves took, per access.
        oracle_share: Share of the oracle's gain over LRU in ``read_us``; None where one of the two
            was not run or they are equal.
        seconds: CPU time of the whole run.
        explained: Why keys that were asked about lie where they do at the end ("qlearning" only).
    """

    policy: str
    gpu_room: float
    host_room: float
    accesses: int
    gpu_ratio: float
    host_ratio: float
    read_us: float
    moves_per_access: float
    total_us: float
    oracle_share: float | None
    seconds: float
    explained: tuple[dict[str, Any], ...] = ()


class _Tiered(Protocol):
    moved: list[int]

    def access(self, key: int, *, size: float, time_s: float | None) -> int: ...


class Ranked:
    """Two tiers by one rank: the highest on the GPU, the next on the host.

    The rank of a key is given when it is asked for; a key enters a tier if it ranks above the least
    of it (or there is room), and what leaves the GPU contests the host.
    """

    def __init__(
        self,
        gpu_room: float,
        host_room: float,
        rank: Callable[[int, float], float],
    ) -> None:
        """Start empty; ``rank`` gives an asked-for key's rank from (key, size)."""
        self._room = [gpu_room, host_room]
        self._used = [0.0, 0.0]
        self._rank = rank
        self._heaps: tuple[list[tuple[float, int, int]], ...] = ([], [])
        self._where: dict[int, tuple[int, int, float, float]] = {}  # tier, serial, rank, size
        self._serial = 0
        self.moved = [0, 0]

    def access(self, key: int, *, size: float, time_s: float | None) -> int:
        """Take one access; returns the tier that the key was found in."""
        del time_s
        known = self._where.pop(key, None)
        found = NVME
        if known is not None:
            found = known[0]
            self._used[found] -= known[3]
        placed = self._descend(key, self._rank(key, size), size, GPU)
        if placed < found:
            self.moved[placed] += 1
        return found

    def _least(self, tier: int) -> tuple[float, int] | None:
        heap, where = self._heaps[tier], self._where
        while heap:
            rank, serial, key = heap[0]
            known = where.get(key)
            if known is None or known[0] != tier or known[1] != serial:
                heapq.heappop(heap)
                continue
            return rank, key
        return None

    def _descend(self, key: int, rank: float, size: float, tier: int) -> int:
        for at in range(tier, NVME):
            if size > self._room[at]:
                continue
            losers: list[tuple[int, float, float]] = []
            free = self._room[at] - self._used[at]
            lost = False
            while free + 1e-9 < size:
                least = self._least(at)
                if least is None or least[0] > rank:
                    lost = True
                    break
                _, _, old_rank, old_size = self._where.pop(least[1])
                losers.append((least[1], old_rank, old_size))
                free += old_size
            if lost:
                for loser, old_rank, old_size in losers:
                    self._put(loser, old_rank, old_size, at)
                continue
            self._used[at] -= sum(old_size for _, _, old_size in losers)
            self._put(key, rank, size, at)
            self._used[at] += size
            for loser, old_rank, old_size in losers:
                if self._descend(loser, old_rank, old_size, at + 1) == HOST:
                    self.moved[HOST] += 1
            return at
        return NVME

    def _put(self, key: int, rank: float, size: float, tier: int) -> None:
        self._serial += 1
        self._where[key] = (tier, self._serial, rank, size)
        heapq.heappush(self._heaps[tier], (rank, self._serial, key))


class _Lru:
    """One order of use; exact for sizes, by two ordered maps."""

    def __init__(self, gpu_room: float, host_room: float) -> None:
        self._room = (gpu_room, host_room)
        self._used = [0.0, 0.0]
        self._queues: tuple[OrderedDict[int, float], OrderedDict[int, float]] = (
            OrderedDict(),
            OrderedDict(),
        )
        self.moved = [0, 0]

    def access(self, key: int, *, size: float, time_s: float | None) -> int:
        del time_s
        found = NVME
        for tier in (GPU, HOST):
            if key in self._queues[tier]:
                found = tier
                self._used[tier] -= self._queues[tier].pop(key)
        entering = [(key, size)]
        for tier in (GPU, HOST):
            leaving: list[tuple[int, float]] = []
            for name, bytes_ in entering:
                if bytes_ > self._room[tier]:
                    leaving.append((name, bytes_))
                    continue
                self._queues[tier][name] = bytes_
                self._used[tier] += bytes_
                if name != key or tier < found:
                    self.moved[tier] += 1
                while self._used[tier] > self._room[tier] + 1e-9:
                    old, old_size = self._queues[tier].popitem(last=False)
                    self._used[tier] -= old_size
                    leaving.append((old, old_size))
            entering = leaving
        return found


def _frequency(gpu_room: float, host_room: float) -> Ranked:
    # log2 of the forward-decayed count: the order does not change while nothing is asked for.
    levels: dict[int, float] = {}
    half_life = 8.0 * (gpu_room + host_room)
    now = [0]

    def rank(key: int, size: float) -> float:
        now[0] += 1
        at = now[0] / half_life
        before = levels.get(key)
        level = at
        if before is not None and before - at > -60.0:
            level = at + math.log2(1.0 + 2.0 ** (before - at))
        levels[key] = level
        return level - math.log2(size)

    return Ranked(gpu_room, host_room, rank)


def _oracle(gpu_room: float, host_room: float, keys: NDArray[np.int64]) -> Ranked:
    # Units of one size.
    following = next_accesses(keys).tolist()
    now = [-1]

    def rank(key: int, size: float) -> float:
        now[0] += 1
        del key, size
        return -float(following[now[0]])

    return Ranked(gpu_room, host_room, rank)


def reuse_bound(
    keys: NDArray[np.int64], sizes: Floats, room: float, measured: NDArray[np.bool_]
) -> float:
    """Return the most hits that any loading on demand can have, as a share of measured accesses.

    A hit takes its key's size for as long as the gap since the last access. The bound takes the
    cheapest gaps until the room over the whole trace is spent, without asking whether they fit at
    each moment. Only gaps that end in a measured access count.

    Args:
        keys: Accesses, int64, shape (n,).
        sizes: Size of each key, float64.
        room: In the same unit.
        measured: bool, shape (n,).

    Source: Berger, Beckmann, Harchol-Balter, "Practical bounds on optimal caching with variable
    object sizes", SIGMETRICS 2018, the bound PFOO-U.
    """
    following = next_accesses(keys)
    starts = np.flatnonzero(following < len(keys))
    ends = following[starts]
    counted = measured[ends]
    starts, ends = starts[counted], ends[counted]
    cost = np.sort((ends - starts) * sizes[keys[starts]])
    taken = int(np.searchsorted(np.cumsum(cost), room * len(keys), side="right"))
    return min(taken + 1, len(cost)) / int(np.count_nonzero(measured))


def simulate_tiers(
    trace: Trace,
    *,
    policies: Sequence[str],
    gpu_room: float,
    host_room: float,
    measured: NDArray[np.bool_],
    sizes: Floats | None = None,
    costs: TierCosts | None = None,
    accesses_per_s: float = 1000.0,
    learner: PlacementLearner | None = None,
    explain: Sequence[int] = (),
) -> list[TieredOutcome]:
    """Run placements over three tiers.

    Args:
        trace: What happened.
        policies: Some of `TIERED`.
        gpu_room: Usual units that fit on the GPU.
        host_room: Usual units that fit in host memory.
        measured: Which accesses count, bool, shape (n,).
        sizes: Size of each key in usual units, float64, shape (footprint,); None: all 1.
        costs: What tiers cost; None means the defaults.
        accesses_per_s: The rate that stands for time: decisions are learnt from every 100 ms.
        learner: What "qlearning" starts from; None starts it anew.
        explain: Keys whose place is to be explained.

    Raises:
        InputError: no access is measured.
        UnavailableError: "qlearning" is asked for and torch is not installed.
    """
    costs = costs or TierCosts()
    count = int(np.count_nonzero(measured))
    if not count:
        raise InputError("no access is left to measure; is --warm-until beyond the trace's end?")
    keys = trace.keys.tolist()
    size_of = [1.0] * trace.footprint if sizes is None else sizes.tolist()
    runs: dict[str, _Run] = {}
    for name in policies:
        if name == "oracle" and sizes is not None and len(np.unique(sizes)) > 1:
            runs[name] = _bound_run(trace.keys, sizes, gpu_room, host_room, measured)
            continue
        placement: _Tiered
        if name == "qlearning":
            placement = _QLearning(
                TieredPlacement(
                    gpu_room=gpu_room,
                    host_room=host_room,
                    costs=costs,
                    learner=learner,
                    accesses_per_s=accesses_per_s,
                )
            )
        elif name == "lru":
            placement = _Lru(gpu_room, host_room)
        elif name == "frequency":
            placement = _frequency(gpu_room, host_room)
        elif name == "oracle":
            placement = _oracle(gpu_room, host_room, trace.keys)
        else:
            raise InputError(f"policy {name!r}, expected one of {', '.join(TIERED)}")
        runs[name] = _run(placement, keys, size_of, measured, explain)
    mean = {name: run.read_us(costs) for name, run in runs.items()}
    gain = mean["lru"] - mean["oracle"] if {"lru", "oracle"} <= mean.keys() else 0.0
    return [
        TieredOutcome(
            policy=name,
            gpu_room=gpu_room,
            host_room=host_room,
            accesses=count,
            gpu_ratio=run.gpu_ratio,
            host_ratio=run.host_ratio,
            read_us=mean[name],
            moves_per_access=sum(run.moved) / len(keys),
            total_us=mean[name] + run.moves_us(costs) / len(keys),
            oracle_share=(mean["lru"] - mean[name]) / gain if gain > 0.0 else None,
            seconds=run.seconds,
            explained=run.explained,
        )
        for name, run in ((name, runs[name]) for name in policies)
    ]


class _Run(NamedTuple):
    """What one placement did to a trace.

    Attributes:
        gpu_ratio: Share of the measured accesses that the GPU had.
        host_ratio: Share that host memory had.
        moved: Units moved onto each tier, over all of the trace.
        seconds: CPU time of all its decisions.
        explained: Why the keys asked for lie where they do, where the placement can say.
    """

    gpu_ratio: float
    host_ratio: float
    moved: Sequence[int]
    seconds: float
    explained: tuple[dict[str, Any], ...]

    def read_us(self, costs: TierCosts) -> float:
        """Mean time of a measured access."""
        read, gpu, host = costs.read_us, self.gpu_ratio, self.host_ratio
        return gpu * read[GPU] + host * read[HOST] + (1.0 - gpu - host) * read[NVME]

    def moves_us(self, costs: TierCosts) -> float:
        """Time of all moves."""
        to_gpu, to_host = costs.move_us(NVME, GPU), costs.move_us(GPU, HOST)
        return self.moved[GPU] * to_gpu + self.moved[HOST] * to_host


def _run(
    placement: _Tiered,
    keys: list[int],
    size_of: list[float],
    measured: NDArray[np.bool_],
    explain: Sequence[int],
) -> _Run:
    began = time.process_time()
    tiers = np.fromiter(
        (placement.access(key, size=size_of[key], time_s=None) for key in keys),
        np.int8,
        count=len(keys),
    )
    seconds = time.process_time() - began
    explained: tuple[dict[str, Any], ...] = ()
    if isinstance(placement, _QLearning):
        explained = tuple(placement.explain(key) for key in explain)
    gpu, host = (float((tiers[measured] == tier).mean()) for tier in (GPU, HOST))
    return _Run(gpu, host, placement.moved, seconds, explained)


def _bound_run(
    keys: NDArray[np.int64],
    sizes: Floats,
    gpu_room: float,
    host_room: float,
    measured: NDArray[np.bool_],
) -> _Run:
    """What no placement of units of unlike sizes passes; it moves nothing."""
    gpu = reuse_bound(keys, sizes, gpu_room, measured)
    both = reuse_bound(keys, sizes, gpu_room + host_room, measured)
    return _Run(gpu, both - gpu, [0, 0], 0.0, ())


class _QLearning:
    def __init__(self, placement: TieredPlacement) -> None:
        self._placement = placement
        self.moved = placement.moved

    def access(self, key: int, *, size: float, time_s: float | None) -> int:
        return self._placement.access(key, size=size, time_s=time_s)

    def explain(self, key: int) -> dict[str, Any]:
        return {"key": key, **(self._placement.explain(key) or {"tier": "nvme"})}


def parse_rooms(text: str, footprint: int) -> tuple[float, float]:
    """Return (GPU, host) room from "100,400" or "1%,5%" of the different keys.

    Raises:
        InputError: not two numbers, or no host room.
    """
    words = text.split(",")
    try:
        values = [
            float(word.strip()[:-1]) / 100.0 * footprint
            if word.strip().endswith("%")
            else float(word)
            for word in words
        ]
    except ValueError as error:
        raise InputError(f"--tiers {text!r}: expected two numbers or percentages") from error
    if len(values) != 2 or not all(map(math.isfinite, values)) or values[0] < 0 or values[1] < 1:
        raise InputError(f"--tiers {text!r}: expected GPU,HOST with room for one unit on the host")
    return math.floor(values[0]), math.floor(values[1])
