"""The heat graph: from events to a score per content key.

Heat is keyed by content, (tenant, chunk id), and knows nothing of pages, so that a rebuilt index is
as warm as the old one. Everything that `apply` keeps depends on the stream of events alone, not on
how it was cut into batches, when ticks came or what the clock says: a run that was stopped,
restored and continued holds the same bytes as one that never stopped. PageRank is derived from
that by `tick`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.decay import DecayedCounts, DecayLaw
from stoker.prefetch.events import (
    CHUNK_IDS_MAX,
    DOCUMENT_DELETED,
    RESULT_USED,
    SEARCH_PERFORMED,
    Event,
)
from stoker.prefetch.graph import EdgeTable
from stoker.prefetch.pagerank import LooseEdges, pagerank
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.rank_tracker import RankTracker, personalised_pagerank
from stoker.prefetch.score import heat_score, log_share, recency
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt, pack, unpack

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_KIND = "heat graph 2"
# Edges go into the table in blocks of exactly so many, whatever batches the events came in.
_EDGE_BLOCK = 4096
_DROP_RATIO = 0.1
_NEVER = -np.inf


class HeatGraph:
    """Decayed demand and links of content keys. One thread at a time.

    Invariants: every key has one number, ``0 <= number < key_count``; at most ``heat_keys_max``
    keys; less than a block of loose edges; ``watermark_s`` is the newest believed event time and
    never falls.
    """

    def __init__(self, settings: PrefetchSettings | None = None) -> None:
        self.settings = settings or PrefetchSettings()
        config = self.settings
        law = DecayLaw.named(config.heat_decay, half_life_s=config.heat_half_life_s)
        self._numbers: dict[str, dict[str, int]] = {}  # tenant -> chunk id -> number
        self._keys: list[ContentKey] = []
        self._counts = DecayedCounts(law)
        self._edges = EdgeTable(
            degree_max=config.graph_edges_per_key_max, half_life_s=config.graph_edge_half_life_s
        )
        self._last = np.full(1024, _NEVER)  # newest access, Unix seconds
        self._deleted = np.full(1024, _NEVER)  # newest deletion, Unix seconds
        self._rank = np.zeros(0)
        self._tracker: RankTracker | None = None  # only once there are many keys
        self._loose = _no_edges()  # tail, head, time; fewer than a block
        # (tenant, session) -> (time, numbers of the first chunks), least recent first
        self._sessions: dict[tuple[str, str], tuple[float, tuple[int, ...]]] = {}
        self.watermark_s = _NEVER
        self._ahead = 0
        self.events_applied = 0

    @property
    def key_count(self) -> int:
        """How many content keys are tracked."""
        return len(self._keys)

    # ---- events in ------------------------------------------------------------------------------

    def apply(self, events: Sequence[Event], *, arrived_s: Sequence[float] | None = None) -> None:
        """Take events into the heat, in the order given.

        Each counts in its own time, so late ones land where they belong. Duplicates must have
        been dropped before. A search counts 1 per retrieved chunk, a used result
        ``heat_result_weight``, a deletion forgets the chunk up to its time, an upsert keeps it.

        Args:
            events: Decoded events.
            arrived_s: When the log took each event (Unix seconds, from the log and not from the
                clock): no event is then believed to be later than that.

        Raises:
            InputError: a time is not finite; nothing of the batch's later events is applied.
        """
        batch = _Batch()
        for index, event in enumerate(events):
            kind = event.type
            amount = 1.0
            if kind == RESULT_USED:
                amount = self.settings.heat_result_weight
            elif kind == DOCUMENT_DELETED:
                self._flush(batch)
                self._delete(event)
                continue
            elif kind != SEARCH_PERFORMED:
                self.events_applied += 1
                continue
            time_s = event.time_s
            if arrived_s is not None and time_s > arrived_s[index]:
                time_s = arrived_s[index]
            time_s = self._believed(time_s)
            numbers = self._intern(event.tenant, event.chunk_ids, batch)
            batch.add(numbers, time_s, amount, linked=kind == SEARCH_PERFORMED)
            if event.session is not None and kind == SEARCH_PERFORMED:
                self._follow(event, numbers, time_s, batch)
            self.events_applied += 1
        self._flush(batch)

    def _believed(self, time_s: float) -> float:
        """Return the event's time, or the watermark where a lone clock runs ahead of all others."""
        if not -1e12 < time_s < 1e12:
            raise InputError(f"event time must be finite Unix seconds, got {time_s!r}")
        if time_s <= self.watermark_s:
            self._ahead = 0
            return time_s
        if self.watermark_s != _NEVER and time_s > self.watermark_s + self.settings.heat_jump_s_max:
            self._ahead += 1
            if self._ahead < self.settings.heat_jump_events:
                return self.watermark_s
        self._ahead = 0
        self.watermark_s = time_s
        return time_s

    def _intern(self, tenant: str, chunk_ids: Sequence[str], batch: _Batch) -> list[int]:
        """Return the keys' numbers, giving new ones where needed."""
        numbers = self._numbers.setdefault(tenant, {})
        try:
            return [numbers[chunk_id] for chunk_id in chunk_ids]
        except KeyError:
            pass
        keys = self._keys
        if len(keys) + len(chunk_ids) > self.settings.heat_keys_max and keys:
            self._flush(batch)
            self._drop_coldest(max(len(chunk_ids), int(len(keys) * _DROP_RATIO)))
            keys = self._keys
            numbers = self._numbers.setdefault(tenant, {})
        for chunk_id in chunk_ids:
            if chunk_id not in numbers:
                numbers[chunk_id] = len(keys)
                keys.append((tenant, chunk_id))
        self._reserve(len(keys))
        return [numbers[chunk_id] for chunk_id in chunk_ids]

    def _reserve(self, count: int) -> None:
        have = len(self._last)
        if count > have:
            room = max(count, 2 * have)
            grown = np.full((2, room), _NEVER)
            grown[0, :have] = self._last
            grown[1, :have] = self._deleted
            self._last, self._deleted = grown[0].copy(), grown[1].copy()
            self._counts.reserve(room)
            self._edges.reserve(room)

    def _flush(self, batch: _Batch) -> None:
        if not batch.sizes:
            return
        numbers, times, amounts = batch.accesses()
        new = batch.edges(numbers, times, self.settings.graph_window_chunks)
        if len(new[0]):
            self._loose = (
                np.concatenate((self._loose[0], new[0])),
                np.concatenate((self._loose[1], new[1])),
                np.concatenate((self._loose[2], new[2])),
            )
            self._merge_blocks()
        alive = times > self._deleted[numbers]
        if not alive.all():
            numbers, times, amounts = numbers[alive], times[alive], amounts[alive]
        self._counts.add(numbers, times, amounts)
        np.maximum.at(self._last, numbers, times)
        batch.clear()

    def _delete(self, event: Event) -> None:
        numbers = self._numbers.get(event.tenant, {})
        known = [numbers[c] for c in event.chunk_ids if c in numbers]
        time_s = self._believed(event.time_s)
        rows = np.array(known, dtype=np.int64)
        gone = rows[self._last[rows] <= time_s]
        self._deleted[rows] = np.maximum(self._deleted[rows], time_s)
        self._counts.clear(gone)
        self._last[gone] = _NEVER
        if self._tracker is None:
            self._edges.clear(gone)
        else:
            self._tracker.grow(len(self._keys))
            self._tracker.clear(gone)
        self.events_applied += 1

    def _follow(self, event: Event, numbers: list[int], time_s: float, batch: _Batch) -> None:
        """Note what follows what inside the session."""
        width = self.settings.graph_transition_chunks
        if not width:
            return
        sessions = self._sessions
        key = (event.tenant, event.session or "")
        before = sessions.pop(key, None)
        first = numbers[:width]
        if before is None:
            sessions[key] = (time_s, tuple(first))
            if len(sessions) > self.settings.graph_sessions_max:
                del sessions[next(iter(sessions))]
            return
        if 0.0 <= time_s - before[0] <= self.settings.graph_session_gap_s:
            batch.add_transition(before[1], first)
        sessions[key] = before if before[0] > time_s else (time_s, tuple(first))

    def _merge_blocks(self) -> None:
        loose = self._loose
        while len(loose[0]) >= _EDGE_BLOCK:
            tails, heads, times = loose
            block = (
                tails[:_EDGE_BLOCK],
                heads[:_EDGE_BLOCK],
                times[:_EDGE_BLOCK],
                np.ones(_EDGE_BLOCK),
            )
            if self._tracker is None:
                self._edges.add(*block)
            else:
                self._tracker.grow(len(self._keys))
                self._tracker.add_edges(*block)
            loose = (tails[_EDGE_BLOCK:], heads[_EDGE_BLOCK:], times[_EDGE_BLOCK:])
        self._loose = loose

    def _drop_coldest(self, count: int) -> None:
        """Forget the ``count`` keys of the least demand; ties go by age of the key's number."""
        total = len(self._keys)
        demand = self._counts.values(self.watermark_s, slice(0, total))
        order = np.lexsort((np.arange(total), demand))
        kept = np.sort(order[min(count, total) :])
        number = np.full(total, -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        self._counts.keep(kept)
        self._edges.keep(kept)
        self._tracker = None
        for name in ("_last", "_deleted"):
            old = getattr(self, name)
            new = np.full_like(old, _NEVER)
            new[: len(kept)] = old[kept]
            setattr(self, name, new)
        self._rank = self._padded_rank(total)[kept]
        self._keys = [self._keys[i] for i in kept.tolist()]
        self._numbers = _numbered(self._keys)
        renumber = number.tolist()
        tails, heads, times = number[self._loose[0]], number[self._loose[1]], self._loose[2]
        alive = (tails >= 0) & (heads >= 0)
        self._loose = (tails[alive], heads[alive], times[alive])
        self._sessions = {
            key: (time_s, tuple(renumber[n] for n in numbers if renumber[n] >= 0))
            for key, (time_s, numbers) in self._sessions.items()
        }

    # ---- scores out -----------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Bring PageRank up to date with the edges. Changes nothing that `apply` keeps.

        Few keys are solved anew, by power iteration from the last result. Many are tracked: a
        tick pushes what has changed, walks a bounded number of edges, and the next goes on.
        """
        del now_s  # edges decay in proportion, so PageRank does not depend on the hour
        count = len(self._keys)
        config = self.settings
        if count == 0:
            return
        if count > config.pagerank_exact_keys_max:
            if self._tracker is None:
                self._tracker = RankTracker(self._edges, count, damping=config.pagerank_damping)
            self._tracker.grow(count)
            self._tracker.push(edges_max=config.pagerank_tick_edges_max)
            self._rank = self._tracker.rank()
            return
        self._tracker = None
        self._rank = pagerank(
            self._edges,
            count,
            start=self._padded_rank(count) + 1e-12,
            damping=config.pagerank_damping,
            tolerance=config.pagerank_tolerance,
            loose=self._loose_edges(),
        )

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
        recent = np.flatnonzero(last >= max(now_s, self._newest()) - 60.0 * minutes)
        if len(recent) > seeds_max:
            recent = recent[np.argsort(-last[recent], kind="stable")[:seeds_max]]
        seeds = dict.fromkeys(recent.tolist(), 1.0)
        mass, _ = personalised_pagerank(self._edges, seeds, damping=self.settings.pagerank_damping)
        ranked = sorted(mass.items(), key=lambda item: (-item[1], item[0]))
        alive = [(row, value) for row, value in ranked if last[row] != _NEVER]
        return {self._keys[row]: value for row, value in alive[:limit]}

    def _loose_edges(self) -> LooseEdges:
        tails, heads, times = self._loose
        return LooseEdges(tails, heads, self._edges.weight_of(times, np.ones(len(times))))

    def _padded_rank(self, count: int) -> Floats:
        rank = np.zeros(count)
        have = min(count, len(self._rank))
        rank[:have] = self._rank[:have]
        return rank

    def demand(self, now_s: float, tenant: str | None = None) -> dict[ContentKey, float]:
        """Return the decayed access count per key: additive, so the right benefit for a plan.

        Args:
            now_s: Unix seconds; a time before the newest event counts as that event's.
            tenant: Only this tenant's keys; None means all.
        """
        keys, rows = self._selected(tenant)
        values = self._counts.values(max(now_s, self._newest()), rows)
        return dict(zip(keys, values.tolist(), strict=True))

    def unseen_ratio(self, now_s: float, tenant: str | None = None) -> float:
        """Return the share of coming accesses that will go to chunks without heat, in [0, 1].

        ``sum(w_i where w_i <= 1) / sum(w_i)`` over the decayed demands w: as many accesses go to
        what was never asked for as went to what was asked for about once. 1 without any demand.

        Source: Good, Biometrika 40 (1953), the Good-Turing estimate of missing mass; ours takes
        decayed counts. On RAGPulse it says 0.098 where 0.097 was found.
        """
        _, rows = self._selected(tenant)
        counts = self._counts.values(max(now_s, self._newest()), rows)
        total = float(counts.sum())
        return float(counts[counts <= 1.0].sum()) / total if total > 0.0 else 1.0

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
        now = max(now_s, self._newest())
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
        number = self._numbers.get(key[0], {}).get(key[1])
        if number is None or self._last[number] == _NEVER:
            return None
        now = max(now_s, self._newest())
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
        return self.watermark_s if self.watermark_s != _NEVER else -1e12

    def _selected(self, tenant: str | None) -> tuple[list[ContentKey], Ints]:
        if tenant is None:
            numbers = np.arange(len(self._keys))
        else:
            numbers = np.fromiter(self._numbers.get(tenant, {}).values(), dtype=np.int64)
        rows = numbers[self._last[numbers] != _NEVER].astype(np.int64)
        return [self._keys[i] for i in rows.tolist()], rows

    # ---- state ----------------------------------------------------------------------------------

    def to_snapshot(self) -> bytes:
        """Return the whole state; equal state gives equal bytes."""
        count = len(self._keys)
        return pack(
            _KIND,
            {
                "keys": [list(key) for key in self._keys],
                "sessions": [
                    [tenant, session, time_s, list(numbers)]
                    for (tenant, session), (time_s, numbers) in self._sessions.items()
                ],
                "watermark_s": None if self.watermark_s == _NEVER else self.watermark_s,
                "ahead": self._ahead,
                "events_applied": self.events_applied,
                "edge_landmark": None if self._edges.landmark == _NEVER else self._edges.landmark,
                "tracked": self._tracker is not None,
                "half_lives": [self.settings.heat_decay, self.settings.heat_half_life_s],
            },
            {
                "count_parts": self._counts.parts[:, :count],
                "count_landmarks": self._counts.landmarks,
                "last": self._last[:count],
                "deleted": self._deleted[:count],
                "rank": self._rank,
                "tracker_x": np.empty(0) if self._tracker is None else self._tracker.x,
                "tracker_residual": (
                    np.empty(0) if self._tracker is None else self._tracker.residual
                ),
                "edge_targets": self._edges.targets[:count],
                "edge_weights": self._edges.weights[:count],
                "loose_tails": self._loose[0],
                "loose_heads": self._loose[1],
                "loose_times": self._loose[2],
            },
        )

    @staticmethod
    def from_snapshot(data: bytes, settings: PrefetchSettings | None = None) -> HeatGraph:
        """Return the graph that `to_snapshot` saved.

        Raises:
            SnapshotCorrupt: the bytes are damaged, or were written under another decay or degree;
                start from the log instead.
        """
        values, arrays = unpack(_KIND, data)
        graph = HeatGraph(settings)
        config = graph.settings
        if values["half_lives"] != [config.heat_decay, config.heat_half_life_s]:
            raise SnapshotCorrupt(
                f"heat snapshot has decay {values['half_lives']}, settings say "
                f"{[config.heat_decay, config.heat_half_life_s]}"
            )
        if arrays["edge_targets"].shape[1] != config.graph_edges_per_key_max:
            raise SnapshotCorrupt(
                f"heat snapshot has {arrays['edge_targets'].shape[1]} edges per key, settings say "
                f"{config.graph_edges_per_key_max}"
            )
        graph._keys = [(tenant, chunk) for tenant, chunk in values["keys"]]
        graph._numbers = _numbered(graph._keys)
        count = len(graph._keys)
        graph._reserve(count)
        graph._counts.parts[:, :count] = arrays["count_parts"]
        graph._counts.landmarks = arrays["count_landmarks"]
        graph._last[:count] = arrays["last"]
        graph._deleted[:count] = arrays["deleted"]
        graph._rank = arrays["rank"]
        graph._edges.targets[:count] = arrays["edge_targets"]
        graph._edges.weights[:count] = arrays["edge_weights"]
        if values["edge_landmark"] is not None:
            graph._edges.landmark = values["edge_landmark"]
        if values["tracked"]:
            tracker = RankTracker(graph._edges, 0, damping=config.pagerank_damping)
            tracker.x, tracker.residual = arrays["tracker_x"], arrays["tracker_residual"]
            tracker.count = len(tracker.x)
            graph._tracker = tracker
        graph._loose = (arrays["loose_tails"], arrays["loose_heads"], arrays["loose_times"])
        graph._sessions = {
            (tenant, session): (time_s, tuple(numbers))
            for tenant, session, time_s, numbers in values["sessions"]
        }
        if values["watermark_s"] is not None:
            graph.watermark_s = values["watermark_s"]
        graph._ahead = values["ahead"]
        graph.events_applied = values["events_applied"]
        return graph

    def check(self) -> None:
        """Raise InputError on the first broken invariant."""
        if sum(map(len, self._numbers.values())) != len(self._keys):
            raise InputError("a key is numbered twice or not at all")
        if len(self._keys) > max(self.settings.heat_keys_max, CHUNK_IDS_MAX):
            raise InputError(f"{len(self._keys)} keys, at most {self.settings.heat_keys_max}")
        if len(self._loose[0]) >= _EDGE_BLOCK:
            raise InputError(f"{len(self._loose[0])} loose edges, expected below {_EDGE_BLOCK}")
        if len(self._sessions) > self.settings.graph_sessions_max:
            raise InputError(f"{len(self._sessions)} sessions remembered")
        self._counts.check()
        self._edges.check()


class _Batch:
    """Accesses of events that were interned but are not counted yet."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.numbers: list[int] = []
        self.sizes: list[int] = []
        self.times: list[float] = []
        self.amounts: list[float] = []
        self.linked: list[bool] = []
        self.follow_tails: list[int] = []
        self.follow_heads: list[int] = []
        self.follow_events: list[int] = []

    def add(self, numbers: list[int], time_s: float, amount: float, *, linked: bool) -> None:
        self.numbers += numbers
        self.sizes.append(len(numbers))
        self.times.append(time_s)
        self.amounts.append(amount)
        self.linked.append(linked)

    def add_transition(self, tails: Sequence[int], heads: Sequence[int]) -> None:
        """Link the last event's first chunks to what came before in its session."""
        for tail in tails:
            self.follow_tails += [tail] * len(heads)
            self.follow_heads += heads
        self.follow_events += [len(self.sizes) - 1] * (len(tails) * len(heads))

    def accesses(self) -> tuple[Ints, Floats, Floats]:
        sizes = np.array(self.sizes, dtype=np.int64)
        numbers = np.array(self.numbers, dtype=np.int64)
        times = np.repeat(np.array(self.times, dtype=np.float64), sizes)
        amounts = np.repeat(np.array(self.amounts, dtype=np.float64), sizes)
        return numbers, times, amounts

    def edges(self, numbers: Ints, times: Floats, window: int) -> tuple[Ints, Ints, Floats]:
        """Return co-retrievals and transitions in the order of their events.

        The order depends on the events alone, so that the blocks cut from it do too.
        """
        sizes = np.array(self.sizes, dtype=np.int64)
        event = np.repeat(np.arange(len(sizes)), sizes)
        linked = np.repeat(np.array(self.linked, dtype=bool), sizes)
        tails, heads, events = [], [], []
        for gap in range(1, window + 1):
            together = (event[:-gap] == event[gap:]) & linked[:-gap]
            first, second = numbers[:-gap][together], numbers[gap:][together]
            tails += [first, second]
            heads += [second, first]
            events += [event[:-gap][together]] * 2
        tails.append(np.array(self.follow_tails, dtype=np.int64))
        heads.append(np.array(self.follow_heads, dtype=np.int64))
        events.append(np.array(self.follow_events, dtype=np.int64))
        of_event = np.concatenate(events)
        order = np.argsort(of_event, kind="stable")
        moments = np.array(self.times, dtype=np.float64)[of_event[order]]
        return np.concatenate(tails)[order], np.concatenate(heads)[order], moments


def _no_edges() -> tuple[Ints, Ints, Floats]:
    return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)


def _numbered(keys: Sequence[ContentKey]) -> dict[str, dict[str, int]]:
    numbers: dict[str, dict[str, int]] = {}
    for number, (tenant, chunk_id) in enumerate(keys):
        numbers.setdefault(tenant, {})[chunk_id] = number
    return numbers
