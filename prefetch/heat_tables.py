"""What the heat graph keeps of content keys, and what can be read out of it.

Only `heat.HeatGraph` changes what is kept, by events; PageRank alone is derived here, by `tick`.
Reading is in two steps where it takes long: columns first, what is made of them later, so that
whoever keeps a lock around the graph can give it up in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kernels._core import KeyTable, SessionTable, content_hash
from stoker.prefetch.coverage_curve import Coverage, RecentAccesses
from stoker.prefetch.decay import DecayedCounts, DecayLaw
from stoker.prefetch.events import CHUNK_IDS_MAX
from stoker.prefetch.graph import EdgeTable
from stoker.prefetch.heat_clock import NEVER, EventClock
from stoker.prefetch.held_back import HeldBack
from stoker.prefetch.pagerank import LooseEdges, pagerank
from stoker.prefetch.pieces import Later, Rest, no_rest, steps
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.query_topics import QueryTopics
from stoker.prefetch.rank_tracker import RankTracker, personalised_pagerank
from stoker.prefetch.score import heat_score, log_share, recency
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.tail_sketch import TailSketch
from stoker.prefetch.topics import blend
from stoker.prefetch.warm_set import Accesses

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Edges go into the table in blocks of exactly so many, whatever batches the events came in.
EDGE_BLOCK = 4096
# Accesses whose decay is worked out between two rests: some 100 µs.
_STEP_ACCESSES = 1024


class HeatTables:
    """Decayed demand and links of content keys, as they stand. One thread at a time.

    Invariants: every key has one number, ``0 <= number < key_count``; at most ``heat_keys_max``
    keys; less than a block of loose edges; times are kept in the heat's own (`heat_clock`), and
    none is after the newest believed event.
    """

    def __init__(
        self, settings: PrefetchSettings | None = None, *, topics: QueryTopics | None = None
    ) -> None:
        self.settings = settings or PrefetchSettings()
        config = self.settings
        # Terms and entities of queries, or None: by the settings, unless brought along.
        self.topics = QueryTopics.wanted(config) if topics is None else topics
        law = DecayLaw.named(config.heat_decay, half_life_s=config.heat_half_life_s)
        self._table = KeyTable()  # (tenant, chunk id) -> number
        self._keys: list[ContentKey] = []  # number -> (tenant, chunk id)
        self._tail: TailSketch | None = None  # only once keys had to be dropped
        self._counts = DecayedCounts(law)
        self._recent = RecentAccesses()
        self._edges = EdgeTable(
            degree_max=config.graph_edges_per_key_max, half_life_s=config.graph_edge_half_life_s
        )
        self._last = np.full(1024, NEVER)  # newest access, in the heat's time
        self._deleted = np.full(1024, NEVER)  # newest deletion, likewise
        self._rank = np.zeros(0)
        self._tracker: RankTracker | None = None  # only once there are many keys
        self._loose = no_edges()  # tail, head, time; fewer than a block
        self._sessions = SessionTable()  # the first chunks of each session's last turn
        self._clock = EventClock(
            jump_s_max=config.heat_jump_s_max,
            jump_events=config.heat_jump_events,
            silence_s_max=config.heat_silence_s_max,
        )
        self.events_applied = 0

    @property
    def key_count(self) -> int:
        """How many content keys are tracked."""
        return len(self._keys)

    @property
    def memory_bytes(self) -> int:
        """Bytes of tables and sketches, Python's own objects for names not counted."""
        arrays = (self._counts.parts, self._last, self._deleted, self._rank, *self._loose)
        edges = (self._edges.targets, self._edges.weights)
        tail = 0 if self._tail is None else self._tail.memory_bytes
        lists = tail + self._recent.memory_bytes
        return self._table.bytes_used + lists + sum(a.nbytes for a in (*arrays, *edges))

    @property
    def watermark_s(self) -> float:
        """The newest believed event, Unix seconds; minus infinity before the first.

        It falls where a clock that was far ahead is put right.
        """
        return self._clock.watermark_s

    @property
    def reads_queries(self) -> bool:
        """Whether events must come whole, by `apply`, because topics need their texts."""
        return self.topics is not None

    def _reserve(self, count: int) -> None:
        have = len(self._last)
        if count > have:
            room = max(count, 2 * have)
            grown = np.full((2, room), NEVER)
            grown[0, :have] = self._last
            grown[1, :have] = self._deleted
            self._last, self._deleted = grown[0].copy(), grown[1].copy()
            self._counts.reserve(room)
            self._edges.reserve(room)

    def tick(self, now_s: float) -> bool:
        """Bring PageRank up to date with the edges. Changes nothing that `apply` keeps.

        Few keys are solved anew, by power iteration from the last result. Many are tracked: a
        tick pushes what has changed, walks a bounded number of edges, and the next goes on.

        Returns:
            Whether it is up to date, or else the next tick has something left to do.
        """
        del now_s  # edges decay in proportion, so PageRank does not depend on the hour
        count = len(self._keys)
        config = self.settings
        if count == 0:
            return True
        if count > config.pagerank_exact_keys_max:
            if self._tracker is None:
                self._tracker = RankTracker(self._edges, count, damping=config.pagerank_damping)
            self._tracker.grow(count)
            settled = self._tracker.push(edges_max=config.pagerank_tick_edges_max)
            self._rank = self._tracker.rank()
            return settled
        self._tracker = None
        self._rank = pagerank(
            self._edges,
            count,
            start=self._padded_rank(count) + 1e-12,
            damping=config.pagerank_damping,
            tolerance=config.pagerank_tolerance,
            loose=self._loose_edges(),
        )
        return True

    def related(
        self, now_s: float, *, minutes: float = 5.0, seeds_max: int = 64, limit: int = 100
    ) -> dict[ContentKey, float]:
        """Return what the chunks of the last minutes lead to: personalised PageRank.

        Args:
            now_s: Unix seconds; a time before the newest event counts as that event's.
            minutes: How far back a chunk may have been accessed last to be a seed.
            seeds_max: At most so many seeds, the most recent first.
            limit: At most so many keys are returned, the largest first.

        Returns:
            Content key -> probability, seeds included; deleted keys left out.
        """
        last = self._last[: len(self._keys)]
        recent = np.flatnonzero(last >= self._now(now_s) - 60.0 * minutes)
        if len(recent) > seeds_max:
            recent = recent[np.argsort(-last[recent], kind="stable")[:seeds_max]]
        seeds = dict.fromkeys(recent.tolist(), 1.0)
        mass, _ = personalised_pagerank(self._edges, seeds, damping=self.settings.pagerank_damping)
        ranked = sorted(mass.items(), key=lambda item: (-item[1], item[0]))
        alive = [(row, value) for row, value in ranked if last[row] != NEVER]
        return {self._keys[row]: value for row, value in alive[:limit]}

    def _loose_edges(self) -> LooseEdges:
        tails, heads, times = self._loose
        real = tails != heads  # the table takes no loops either
        times = times[real]
        weights = self._edges.weight_of(times, np.ones(len(times)))
        return LooseEdges(tails[real], heads[real], weights)

    def _padded_rank(self, count: int) -> Floats:
        rank = np.zeros(count)
        have = min(count, len(self._rank))
        rank[:have] = self._rank[:have]
        return rank

    def demand(self, now_s: float, tenant: str | None = None) -> dict[ContentKey, float]:
        """Return the decayed access count per key: additive, so the right benefit for a plan.

        With topics, hot ones take over ``topics_share`` of the total; which keys there are does not
        depend on them.

        Args:
            now_s: Unix seconds; a time before the newest event counts as that event's.
            tenant: Only this tenant's keys; None means all.
        """
        return self.demand_later(now_s, tenant)()

    def demand_later(
        self, now_s: float, tenant: str | None = None
    ) -> Later[dict[ContentKey, float]]:
        """Read what `demand` needs; return the rest of its work, which asks nothing of the graph.

        The rest is nearly all of it, so whoever keeps a lock around the graph can give it up first.
        """
        rows = self._rows(tenant)
        values = self._all_counts(now_s)
        keys = self._keys.copy()
        lifted = {} if self.topics is None else self.topics.lift(now_s)

        def later(rest: Rest = no_rest, /) -> dict[ContentKey, float]:
            demand = _by_key(keys, rows, values[rows], rest)
            if not lifted:
                return demand
            lift = {key: more for key, more in lifted.items() if key in demand}
            return blend(demand, lift, share=self.settings.topics_share)

        return later

    def demand_of(self, key: ContentKey, now_s: float) -> float:
        """Return one key's decayed access count; of a key outside the table an estimate, not below.

        Args:
            key: Any content key.
            now_s: Unix seconds; a time before the newest event counts as that event's.
        """
        now = self._now(now_s)
        number = self._table.find(*key)
        if number >= 0:
            return float(self._counts.values(now, np.array([number], dtype=np.int64))[0])
        return 0.0 if self._tail is None else self._tail.estimate(content_hash(*key), now)

    def unseen_ratio(self, now_s: float, tenant: str | None = None) -> float:
        """Return the share of coming accesses that will go to chunks without heat, in [0, 1].

        ``sum(w_i where w_i <= 1) / sum(w_i)`` over the decayed demands w: as many accesses go to
        what was never asked for as went to what was asked for about once. 1 without any demand.

        Source: Good, Biometrika 40 (1953), the Good-Turing estimate of missing mass; ours takes
        decayed counts. On RAGPulse it says 0.098 where 0.097 was found.
        """
        return _unseen_ratio(self._all_counts(now_s)[self._rows(tenant)])

    def coverage(self, now_s: float, tenant: str | None = None) -> Coverage:
        """Return how many of the coming accesses the hottest keys will serve, by share of demand.

        Args:
            now_s: Unix seconds; a time before the newest event counts as that event's.
            tenant: Only this tenant's keys and accesses; None means all.
        """
        return self.coverage_later(now_s, tenant)()

    def coverage_later(self, now_s: float, tenant: str | None = None) -> Later[Coverage]:
        """Read what `coverage` needs and return the rest of its work; see `demand_later`."""
        rows, demand = self._rows(tenant), self._all_counts(now_s)
        now, recent = self._now(now_s), self._recent.copy()
        deleted_s = self._deleted[: len(self._keys)].copy()
        law = self._counts.law

        def later(rest: Rest = no_rest, /) -> Coverage:
            asked = np.zeros(len(demand), dtype=bool)
            asked[rows] = True
            weights = _worths(recent.amounts, now - recent.times_s, law, rest)
            return recent.coverage(
                demand,
                weights,
                unseen_ratio=_unseen_ratio(demand[rows]),
                asked=asked,
                deleted_s=deleted_s,
                rest=rest,
            )

        return later

    def held_back_later(self, now_s: float) -> Later[list[HeldBack]]:
        """Read the newest spans of accesses; see `held_back`, and `demand_later` for the rest."""
        total = float(self._all_counts(now_s).sum())
        now, recent = self._now(now_s), self._recent.copy()
        deleted_s = self._deleted[: len(self._keys)].copy()
        law, keys = self._counts.law, self._keys.copy()

        def later(rest: Rest = no_rest, /) -> list[HeldBack]:
            found = []
            for start, end, weight in recent.spans(total):
                numbers, times_s = recent.numbers[start:end], recent.times_s[start:end]
                worth = _worths(recent.amounts[start:end], now - times_s, law, rest)
                known = numbers >= 0
                outside = int(np.count_nonzero(~known))
                known[known] = times_s[known] > deleted_s[numbers[known]]
                rows, places = np.unique(numbers[known], return_inverse=True)
                rest()
                counts, taken = np.bincount(places), np.bincount(places, weights=worth[known])
                found.append(
                    HeldBack(
                        _by_key(keys, rows, counts.astype(np.float64), rest),
                        _by_key(keys, rows, np.asarray(taken, np.float64), rest),
                        outside,
                        weight,
                    )
                )
                rest()
            return found

        return later

    def accesses_since(self, time_s: float) -> Accesses:
        """Return the accesses later than a time, of the newest `KEPT_ACCESSES`; each counts one.

        Args:
            time_s: Unix seconds, by the clocks that give events their times.
        """
        recent = self._recent
        numbers, times_s = recent.numbers, recent.times_s
        late = times_s > self._clock.heat_s(time_s)
        numbers, times_s = numbers[late], times_s[late]
        known = numbers >= 0
        outside = int(np.count_nonzero(~known))
        numbers, times_s = numbers[known], times_s[known]
        alive = times_s > self._deleted[numbers]
        rows, counts = np.unique(numbers[alive], return_counts=True)
        named = [self._keys[row] for row in rows.tolist()]
        return Accesses(dict(zip(named, map(float, counts.tolist()), strict=True)), outside)

    def scores(self, now_s: float, tenant: str | None = None) -> dict[ContentKey, float]:
        """Return the heat score per key, in [0, 1]; see `score` for the formula and thresholds.

        Frequency and PageRank are normalised over the selected keys. Deleted keys are left out.

        Args:
            now_s: Unix seconds; a time before the newest event counts as that event's.
            tenant: Only this tenant's keys; None means all.
        """
        keys, rows = self._selected(tenant)
        if not keys:
            return {}
        config = self.settings
        now = self._now(now_s)
        counts = self._counts.values(now, rows)
        rank = self._padded_rank(len(self._keys))[rows] * len(self._keys)
        values = heat_score(
            log_share(counts, float(counts.max())),
            recency(now - self._last[rows], tau_s=config.heat_tau_s),
            log_share(rank, float(rank.max())),
            weights=(
                config.heat_weight_frequency,
                config.heat_weight_recency,
                config.heat_weight_pagerank,
            ),
        )
        return dict(zip(keys, values.tolist(), strict=True))

    def explain(self, key: ContentKey, now_s: float) -> dict[str, Any] | None:
        """Return the terms behind one key's score and its strongest links; None when unknown."""
        number = self._table.find(*key)
        if number < 0 or self._last[number] == NEVER:
            return None
        now = self._now(now_s)
        row = np.array([number], dtype=np.int64)
        return {
            "score": self.scores(now_s, key[0])[key],
            "demand": float(self._counts.values(now, row)[0]),
            "age_s": now - float(self._last[number]),
            "pagerank": float(self._padded_rank(len(self._keys))[number]),
            "leads_to": [(self._keys[head], share) for head, share in self._out_edges(number)],
        }

    def _out_edges(self, number: int) -> list[tuple[int, float]]:
        """Return (head, share) of a key's edges, loose ones included, strongest first."""
        weights = self._edges.out_edges(number)
        loose = self._loose_edges()
        for at in np.flatnonzero(loose.tails == number).tolist():
            head = int(loose.heads[at])
            weights[head] = weights.get(head, 0.0) + float(loose.weights[at])
        total = sum(weights.values())
        shares = [(head, weight / total) for head, weight in weights.items() if total > 0.0]
        return sorted(shares, key=lambda pair: (-pair[1], pair[0]))

    def _newest(self) -> float:
        newest_s = self._clock.newest_s
        return newest_s if newest_s != NEVER else -1e12

    def _now(self, now_s: float) -> float:
        return max(self._clock.heat_s(now_s), self._newest())

    def _selected(self, tenant: str | None) -> tuple[list[ContentKey], Ints]:
        rows = self._rows(tenant)
        return [self._keys[i] for i in rows.tolist()], rows

    def _all_counts(self, now_s: float) -> Floats:
        # Of all keys also where some would do: a slice is several times as quick as a choice.
        return self._counts.values(self._now(now_s), slice(0, len(self._keys)))

    def _rows(self, tenant: str | None) -> Ints:
        if tenant is None:
            alive: Ints = np.flatnonzero(self._last[: len(self._keys)] != NEVER)
        else:
            numbers = self._table.members(tenant)
            alive = numbers[self._last[numbers] != NEVER]
        return alive

    def check(self) -> None:
        """Raise InputError on the first broken invariant."""
        if len(self._table) != len(self._keys) or any(
            self._table.find(*key) != number for number, key in enumerate(self._keys)
        ):
            raise InputError("a key is numbered twice or not at all")
        if len(self._keys) > max(self.settings.heat_keys_max, CHUNK_IDS_MAX):
            raise InputError(f"{len(self._keys)} keys, at most {self.settings.heat_keys_max}")
        if len(self._loose[0]) >= EDGE_BLOCK:
            raise InputError(f"{len(self._loose[0])} loose edges, expected below {EDGE_BLOCK}")
        if len(self._sessions) > self.settings.graph_sessions_max:
            raise InputError(f"{len(self._sessions)} sessions remembered")
        self._counts.check()
        self._recent.check()
        self._edges.check()


def no_edges() -> tuple[Ints, Ints, Floats]:
    """Return empty tails, heads and times."""
    return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)


def _worths(amounts: Floats, ages_s: Floats, law: DecayLaw, rest: Rest) -> Floats:
    """Return what is left of accesses of these amounts and ages, resting between steps."""
    found = np.empty(len(amounts))
    for step in steps(len(amounts), rest, size=_STEP_ACCESSES):
        found[step] = amounts[step] * law.weight(ages_s[step])
    return found


def _by_key(
    keys: Sequence[ContentKey], rows: Ints, values: Floats, rest: Rest
) -> dict[ContentKey, float]:
    """Return a value of each key of these rows, resting between steps."""
    found: dict[ContentKey, float] = {}
    for step in steps(len(rows), rest):
        named = [keys[row] for row in rows[step].tolist()]
        found.update(zip(named, values[step].tolist(), strict=True))
    return found


def _unseen_ratio(counts: Floats) -> float:
    total = float(counts.sum())
    return float(counts[counts <= 1.0].sum()) / total if total > 0.0 else 1.0
