"""The heat graph: from events to a score per content key.

Heat is keyed by content, (tenant, chunk id), and knows nothing of pages, so that a rebuilt index is
as warm as the old one. Everything that `apply` keeps depends on the stream of events alone, not on
how it was cut into batches, when ticks came or what the clock says: a run that was stopped,
restored and continued holds the same bytes as one that never stopped. PageRank is derived from
that by `tick` (`heat_tables`, where also is what can be read out).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.kernels._core import EventBatch, KeyRun, content_hash
from stoker.prefetch import heat_state
from stoker.prefetch.event_batch import (
    ACCESS_KINDS_END,
    KIND_DELETED,
    KIND_RESULT,
    KIND_SEARCH,
    batch_of,
)
from stoker.prefetch.events import Event
from stoker.prefetch.heat_clock import NEVER
from stoker.prefetch.heat_tables import EDGE_BLOCK, Floats, HeatTables, Ints
from stoker.prefetch.query_topics import QueryTopics
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.tail_sketch import TailSketch

_DROP_RATIO = 0.1


class HeatGraph(HeatTables):
    """`HeatTables` that follow a stream of events. One thread at a time; its invariants too."""

    def apply(self, events: Sequence[Event], *, arrived_s: Sequence[float] | None = None) -> None:
        """Take decoded events into the heat, in the order given; see `apply_batch`.

        Only here do topics learn: a batch's columns have no texts (`reads_queries`).
        """
        self.apply_batch(batch_of(events), arrived_s=arrived_s)
        if self.topics is not None:
            self.topics.observe(events, arrived_s=arrived_s)

    def apply_batch(
        self, batch: EventBatch, *, arrived_s: Sequence[float] | Floats | None = None
    ) -> None:
        """Take a batch's ready rows into the heat, in their order.

        Each counts in its own time, so late ones land where they belong. Duplicates must have
        been put out before. A search counts 1 per retrieved chunk, a used result
        ``heat_result_weight``, a deletion forgets the chunk up to its time, an upsert keeps it.

        Args:
            batch: Events as columns (`event_batch`).
            arrived_s: When the log took each row's event (Unix seconds, from the log and not from
                the clock): no event is then believed to be later than that. See `heat_clock`.

        Raises:
            InputError: a time is not finite; the heat may then hold a part of the batch.
        """
        times = batch.times()
        arrived = None if arrived_s is None else np.asarray(arrived_s, dtype=np.float64)
        kinds = batch.kinds()
        start = 0
        while start < len(batch):
            run = self._table.intern(
                batch,
                start=start,
                kinds_end=ACCESS_KINDS_END,
                stop_kind=KIND_DELETED,
                keys_max=self.settings.heat_keys_max,
                grow=self._tail is None,
            )
            self._name_new_keys()
            dropping = self._take_run(batch, run, times, arrived, kinds)
            start = run.stop
            if dropping:
                self._drop_coldest(dropping)
            elif start < len(batch):
                if kinds[start] == KIND_DELETED:
                    self._delete(batch, start, times, arrived)
                    start += 1
                else:  # the table has no room for this row's new keys
                    needed = len(batch.values(start)[5])
                    self._drop_coldest(max(needed, int(len(self._keys) * _DROP_RATIO)))
        self.events_applied += batch.ready_count

    def _name_new_keys(self) -> None:
        table, keys = self._table, self._keys
        if len(table) > len(keys):
            keys.extend(table.names(len(keys)))
            self._reserve(len(keys))

    def _take_run(
        self,
        batch: EventBatch,
        run: KeyRun,
        times: Floats,
        arrived: Floats | None,
        kinds: NDArray[np.uint8],
    ) -> int:
        """Count a run's accesses and links; returns how many keys to drop after it."""
        rows = run.rows()
        if not len(rows):
            return 0
        believed = self._clock.believe(times[rows], None if arrived is None else arrived[rows])
        weights = np.where(kinds[rows] == KIND_RESULT, self.settings.heat_result_weight, 1.0)
        amounts = np.repeat(weights, run.sizes())
        dropping = 0
        if self._tail is not None:
            dropping = self._admit(batch, run, believed.times_s, amounts)
            rows = run.rows()
            if not len(rows):
                return dropping
        moments = self._clock.take(believed, len(rows))
        config = self.settings
        links = self._sessions.links(
            batch,
            run,
            moments,
            kind=KIND_SEARCH,
            width=config.graph_transition_chunks,
            gap_s=config.graph_session_gap_s,
            sessions_max=config.graph_sessions_max,
            window=config.graph_window_chunks,
        )
        self._add_links(*links)
        numbers = run.numbers()
        self._count(numbers, run.sizes(), moments, amounts[: len(numbers)])
        return dropping

    def _admit(self, batch: EventBatch, run: KeyRun, moments: Floats, amounts: Floats) -> int:
        """Count the accesses of keys outside the table; let those in that have earned it.

        A key that enters brings its estimate, as accesses of that moment. The run is cut before the
        first row for whose keys the table may have no room.

        Returns:
            How many keys to drop after the run.
        """
        tail, table, limit = self._tail, self._table, self.settings.heat_keys_max
        assert tail is not None
        places, owners, hashes = run.outside(batch)
        absent = np.bincount(owners, minlength=1).tolist()
        entered: set[int] = set()  # since the run's keys were looked up
        row, dropping, growth, bar = -1, 0, 1.0, 0.0
        columns = (places, owners, hashes, amounts[places], moments[owners])
        for place, owner, key, amount, time_s in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if owner != row:
                row = owner
                if len(table) and len(table) + absent[row] > limit:
                    needed = self._absent(batch, run, row, places[owners == row].tolist())
                    if len(table) + needed > limit:
                        run.cut(row)
                        dropping = max(needed, int(limit * _DROP_RATIO))
                        break
                growth = tail.growth(time_s)
                bar = tail.bar(growth)
            if key in entered:
                number = table.find(*run.name(batch, owner, place))
                if number >= 0:
                    run.settle(place, number)
                    continue
            weight = tail.count(key, amount * growth)
            if weight >= bar:
                entered.add(key)
                run.settle(place, table.add(*run.name(batch, owner, place)))
                amounts[place] = weight / growth
        self._name_new_keys()
        return dropping

    def _absent(self, batch: EventBatch, run: KeyRun, row: int, places: list[int]) -> int:
        """Count a row's keys that are still not in the table: rows before it may have entered."""
        return sum(self._table.find(*run.name(batch, row, place)) < 0 for place in places)

    def _add_links(self, tails: Ints, heads: Ints, times: Floats) -> None:
        if not len(tails):
            return
        tails = np.concatenate([self._loose[0], tails])
        heads = np.concatenate([self._loose[1], heads])
        times = np.concatenate([self._loose[2], times])
        at = 0
        while len(tails) - at >= EDGE_BLOCK:
            end = at + EDGE_BLOCK
            block = (tails[at:end], heads[at:end], times[at:end], np.ones(EDGE_BLOCK))
            if self._tracker is None:
                self._edges.add(*block)
            else:
                self._tracker.grow(len(self._keys))
                self._tracker.add_edges(*block)
            at = end
        self._loose = (tails[at:], heads[at:], times[at:])

    def _count(self, numbers: Ints, sizes: Ints, moments: Floats, amounts: Floats) -> None:
        times = np.repeat(moments, sizes)
        alive = times > self._deleted[numbers]
        self._recent.add(numbers, times, amounts, alive | (numbers < 0))
        if self._tail is not None:
            alive &= numbers >= 0
        if not alive.all():
            sizes = np.bincount(
                np.repeat(np.arange(len(sizes)), sizes)[alive], minlength=len(sizes)
            )
            numbers, times, amounts = numbers[alive], times[alive], amounts[alive]
        self._counts.add_runs(numbers, sizes, moments, amounts)
        np.maximum.at(self._last, numbers, times)

    def _delete(self, batch: EventBatch, row: int, times: Floats, arrived: Floats | None) -> None:
        _, _, _, tenant, _, chunk_ids = batch.values(row)
        known = [n for n in (self._table.find(tenant, c) for c in chunk_ids) if n >= 0]
        only = slice(row, row + 1)
        believed = self._clock.believe(times[only], None if arrived is None else arrived[only])
        time_s = float(self._clock.take(believed, 1)[0])
        rows = np.array(known, dtype=np.int64)
        gone = rows[self._last[rows] <= time_s]
        self._deleted[rows] = np.maximum(self._deleted[rows], time_s)
        self._counts.clear(gone)
        self._last[gone] = NEVER
        if self._tracker is None:
            self._edges.clear(gone)
        else:
            self._tracker.grow(len(self._keys))
            self._tracker.clear(gone)

    def _drop_coldest(self, count: int) -> None:
        """Move the ``count`` keys of the least demand to the tail; ties go by the key's number."""
        total = len(self._keys)
        demand = self._counts.values(self._newest(), slice(0, total))
        order = np.lexsort((np.arange(total), demand))
        dropped = order[: min(count, total)]
        self._remember(dropped, demand)
        kept = np.sort(order[len(dropped) :])
        number = np.full(total, -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        self._counts.keep(kept)
        self._edges.keep(kept)
        self._tracker = None
        for name in ("_last", "_deleted"):
            old = getattr(self, name)
            new = np.full_like(old, NEVER)
            new[: len(kept)] = old[kept]
            setattr(self, name, new)
        if len(self._rank):
            self._rank = self._padded_rank(total)[kept]
        self._keys = [self._keys[i] for i in kept.tolist()]
        self._table.keep(kept)
        tails, heads, times = number[self._loose[0]], number[self._loose[1]], self._loose[2]
        alive = (tails >= 0) & (heads >= 0)
        self._loose = (tails[alive], heads[alive], times[alive])
        self._sessions.renumber(number)
        self._recent.renumber(number)

    def _remember(self, dropped: Ints, demand: Floats) -> None:
        """Keep an estimate of each dropped key, and ask for more than theirs to come back."""
        config = self.settings
        if self._tail is None:
            self._tail = TailSketch(
                half_life_s=config.heat_half_life_s, buckets=config.heat_tail_buckets
            )
        now_s = self._newest()
        for number in dropped.tolist():
            self._tail.raise_to(content_hash(*self._keys[number]), now_s, float(demand[number]))
        self._tail.set_floor(now_s, float(demand[dropped].max(initial=0.0)))

    def to_snapshot(self) -> bytes:
        """Return the whole state; equal state gives equal bytes."""
        return heat_state.to_snapshot(self)

    @staticmethod
    def from_snapshot(
        data: bytes,
        settings: PrefetchSettings | None = None,
        *,
        topics: QueryTopics | None = None,
    ) -> HeatGraph:
        """Return the graph that `to_snapshot` saved; without topics here, without them.

        Raises:
            SnapshotCorrupt: the bytes are damaged, or were written under another decay, degree or
                size of the tail; start from the log instead.
        """
        graph = HeatGraph(settings, topics=topics)
        heat_state.restore(graph, data)
        return graph
