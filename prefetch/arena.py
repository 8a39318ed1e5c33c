"""The arena: candidate policies run side by side on live accesses, and the best one acts.

Every candidate runs as a miniature cache over a spatial sample of the keys (all of them while the
cache is small), so their hits are comparable and cost little. The real content follows the acting
one: what it let go becomes an orphan, and orphans are what makes room. So a switch moves nothing
by itself; content changes only as misses come in.

A switch has to pay. It is allowed when the hits by which the new candidate led in the recent past
exceed ``switch_cost * missing * h / (1 - h)``, where ``missing`` counts the resident keys that it
does not hold and ``h / (1 - h)``, h being the hit ratio, is how many hits a key brings in one stay.
This is the test of metrical task systems (regret against the cost of moving), made once per block
of accesses because hits inside a burst are not independent. Each switch is logged with its figures.

Where sessions are known the forecast is what is expected to be best, and in a cold cache a single
hit would pay for a move. So leaving it needs evidence as well: a lead of more than two standard
deviations, taken from how much the leads of single blocks differ (a paired test on the blocks).
Going back to it only has to pay.

After a switch each miss may also bring in a few keys that the new policy holds, for orphans: the
content would else take a whole turnover to follow.

Sources: Waldspurger et al., "SHARDS", FAST 2015, and "Cache Modeling and Optimization using
Miniature Simulations", ATC 2017; Blum, Burch, "On-line learning and the metrical task system
problem", 2000. Following another cache's content: Gramacy et al., "Adaptive Caching by
Refetching", NIPS 2002; ours refetches a few keys per miss.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import structlog

from stoker.prefetch.candidates import CANDIDATES, Candidate
from stoker.prefetch.forecast_cache import ForecastCache

log = structlog.get_logger(__name__)

_SAMPLE_SPACE = 1 << 24
_GROWTH_MAX = 1e30
_STAY_HITS_MAX = 3.0
_SURE = 2.0  # standard deviations that a lead over the acting forecast must have


@dataclass(frozen=True)
class Switch:
    """A change of the acting policy, with its evidence."""

    access: int
    before: str
    after: str
    lead_hits: float
    keys_missing: int


def _sample_point(key: Hashable) -> int:
    """Return a point in the sample space that depends on the key alone, in every process."""
    number = key if isinstance(key, int) else zlib.crc32(repr(key).encode())
    mixed = (number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 29
    return ((mixed * 0xBF58476D1CE4E5B9) >> 20) & (_SAMPLE_SPACE - 1)


class Arena:
    """A cache of ``capacity`` keys that follows the best of several policies.

    Invariants: at most ``capacity`` keys are resident; orphans are resident; a resident key that
    is no orphan is in the acting candidate.

    With a forecast, the caller ends each request by `ForecastCache.renew` and `follow`.
    """

    def __init__(
        self,
        capacity: int,
        *,
        candidates: Sequence[type[Candidate]] = CANDIDATES,
        mini_capacity: int = 65_536,
        half_life_ratio: float = 10.0,
        block_accesses: int = 32,
        switch_cost: float = 0.08,
        refetch_per_miss: int = 16,
    ) -> None:
        self.capacity = capacity
        self._types = tuple(candidates)
        share = min(1.0, mini_capacity / capacity)
        self._sampling = share < 1.0
        self._sample_below = int(share * _SAMPLE_SPACE)
        mini = max(1, round(capacity * share))
        self._minis: list[Candidate] = [policy(mini) for policy in self._types]
        self._mini_access = [mini.access for mini in self._minis]
        self._forecast: ForecastCache | None = None
        self.names: tuple[str, ...] = tuple(policy.name for policy in self._types)
        count = len(self.names)
        self._active = 0
        self._full: Candidate = self._minis[0]
        if self._sampling:
            self._full = self._types[0](capacity)
        # key -> None, least recently used first
        self.resident: OrderedDict[Hashable, None] = OrderedDict()
        self._orphans: OrderedDict[Hashable, None] = OrderedDict()
        self._block_hits = [0] * count
        self._sampled = 0
        self._block = max(1, block_accesses)
        half_life = max(1.0, half_life_ratio * mini)
        self._growth_step = 2.0 ** (self._block / half_life)
        self._growth = 1.0
        self._score = [0.0] * count
        self._switch_cost = switch_cost
        self._refused = (-1, 0.0)
        self._chance = [0.0] * count  # what leads over the forecast may be by chance, squared
        self.refetch_per_miss = refetch_per_miss
        self._wanted: list[Hashable] = []  # what the acting policy holds and the cache may not
        # (key, key that made room) fetched ahead by the last access
        self.refetched: list[tuple[Hashable, Hashable]] = []
        self.accesses = 0
        self.real_hits = 0
        self.hits = [0] * count
        self.switches: list[Switch] = []

    def enter(self, forecast: ForecastCache) -> None:
        """Let a forecast compete from now on. It acts at once where nothing is known yet."""
        self._forecast = forecast
        self.names = (*self.names, forecast.name)
        self._block_hits.append(0)
        self._chance.append(0.0)
        self._score.append(self._score[self._active])
        self.hits.append(0)
        if not self.resident:
            self._active = len(self._minis)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The miniature caches, in the order of ``names``; without the forecast."""
        return tuple(self._minis)

    @property
    def active(self) -> str:
        """Name of the policy that acts now."""
        return self.names[self._active]

    @property
    def forecast_acts(self) -> bool:
        """Whether the forecast is the acting policy."""
        return self._active == len(self._minis)

    def _holds(self, key: Hashable) -> bool:
        """Whether the acting candidate has the key."""
        if self.forecast_acts:
            assert self._forecast is not None
            return key in self._forecast
        return key in self._full

    def access(self, key: Hashable) -> tuple[bool, bool, Hashable | None]:
        """Take one access.

        Returns:
            Whether it hit, whether the key was admitted by a miss, and the key that made room.
        """
        self.accesses += 1
        sampling = self._sampling
        sampled = not sampling or _sample_point(key) < self._sample_below
        if sampled:
            block, at = self._block_hits, 0
            for access in self._mini_access:
                if access(key):
                    block[at] += 1
                at += 1
            if self._forecast is not None and self._forecast.access(key):
                block[at] += 1
            self._sampled += 1
        elif self._forecast is not None:
            self._forecast.access(key)
        if self._active < len(self._minis):
            full = self._full
            if sampling:
                full.access(key)
            gone = full.gone
            if gone is not None and gone != key and gone in self.resident:
                self._orphans[gone] = None
        result = self._serve(key)
        if self.refetched:
            self.refetched = []
        if result[0]:
            self.real_hits += 1
        elif self._wanted:
            self._refetch()
        if sampled and self._sampled % self._block == 0:
            self._judge()
        return result

    def _serve(self, key: Hashable) -> tuple[bool, bool, Hashable | None]:
        resident, orphans = self.resident, self._orphans
        if key in resident:
            resident.move_to_end(key)
            if key in orphans and self._holds(key):
                del orphans[key]
            return True, False, None
        victim: Hashable | None = None
        if len(resident) >= self.capacity:
            if not orphans:
                return False, False, None  # the acting policy did not want it either
            victim = orphans.popitem(last=False)[0]
            del resident[victim]
        resident[key] = None
        if not self._holds(key):
            orphans[key] = None
        return False, True, victim

    def _refetch(self) -> None:
        """Bring in keys of the acting policy for orphans, a few per miss."""
        wanted, resident, orphans = self._wanted, self.resident, self._orphans
        left = self.refetch_per_miss
        while left > 0 and wanted and orphans:
            key = wanted.pop()
            if key in resident or not self._holds(key):
                continue
            victim = orphans.popitem(last=False)[0]
            del resident[victim]
            resident[key] = None
            self.refetched.append((key, victim))
            left -= 1

    def follow(
        self, gone: Sequence[Hashable], came: Sequence[Hashable]
    ) -> list[tuple[Hashable, Hashable | None]]:
        """Bring the content in line with what the forecast changed; only while it acts.

        Returns:
            (key, key that made room or None) for each key to load.
        """
        resident, orphans = self.resident, self._orphans
        for key in gone:
            if key in resident:
                orphans[key] = None
        moves: list[tuple[Hashable, Hashable | None]] = []
        for key in came:
            if key in resident:
                orphans.pop(key, None)
                continue
            victim: Hashable | None = None
            if len(resident) >= self.capacity:
                if not orphans:
                    continue
                victim = orphans.popitem(last=False)[0]
                del resident[victim]
            resident[key] = None
            moves.append((key, victim))
        return moves

    def _judge(self) -> None:
        """Close a block of sampled accesses and change the acting policy if that pays."""
        block = self._block_hits
        self._growth *= self._growth_step
        growth, score = self._growth, self._score
        for at, hits in enumerate(block):
            score[at] += growth * hits
            self.hits[at] += hits
        if self._forecast is not None:
            chance, unit, own = self._chance, growth * growth, block[-1]
            for at, hits in enumerate(block):
                chance[at] += unit * (hits - own) * (hits - own)
        self._block_hits = [0] * len(block)
        if growth > _GROWTH_MAX:
            self._score = score = [value / growth for value in score]
            self._chance = [value / growth / growth for value in self._chance]
            self._growth = growth = 1.0
        best = max(range(len(score)), key=score.__getitem__)
        gain = score[best] - score[self._active]
        if best == self._active or gain <= 0.0:
            return
        if self.forecast_acts and gain * gain <= _SURE * _SURE * self._chance[best]:
            return
        # A sampled lead stands for as many more hits as the sample is smaller than the whole.
        scale = _SAMPLE_SPACE / self._sample_below if self._sampling else 1.0
        lead = gain / growth * scale
        # Counting what is missing walks the content: not again before the lead has grown.
        if best == self._refused[0] and lead <= 1.1 * self._refused[1]:
            return
        missing = round(self._missing(best) * scale)
        misses = max(1, self.accesses - self.real_hits)
        worth = min(_STAY_HITS_MAX, self.real_hits / misses)
        if lead <= self._switch_cost * worth * missing:
            self._refused = (best, lead)
            return
        self._refused = (-1, 0.0)
        self._change(best, lead, missing)

    def _missing(self, best: int) -> int:
        """Count (sampled) resident keys that the candidate does not hold."""
        if best == len(self._minis):
            assert self._forecast is not None
            inside: Candidate | ForecastCache = self._forecast
        else:
            inside = self._minis[best]
        if not self._sampling:
            return sum(key not in inside for key in self.resident)
        below = self._sample_below
        return sum(_sample_point(key) < below and key not in inside for key in self.resident)

    def _change(self, best: int, lead: float, missing: int) -> None:
        if best < len(self._minis):
            if self._sampling:
                self._full = self._types[best](self.capacity)
                for key in self.resident:
                    self._full.access(key)
            else:
                self._full = self._minis[best]
        switch = Switch(self.accesses, self.active, self.names[best], lead, missing)
        self.switches.append(switch)
        log.info(
            "prefetch.policy_switched",
            before=switch.before,
            after=switch.after,
            lead_hits=round(lead, 1),
            keys_missing=missing,
        )
        self._active = best
        self._orphans = OrderedDict((k, None) for k in self.resident if not self._holds(k))
        self._wanted = []
        if not self.forecast_acts and not self._sampling and self.refetch_per_miss:
            held = self._full.keys()
            self._wanted = [key for key in held if key not in self.resident]

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self.resident) <= self.capacity
        assert self._orphans.keys() <= self.resident.keys()
        assert all(key in self._orphans or self._holds(key) for key in self.resident)
