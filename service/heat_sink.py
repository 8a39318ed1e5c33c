"""The heat graph with a lock around it: the consumer writes it, warm-ups and metrics read it.

The graph itself is for one thread at a time (`prefetch.heat`). A batch of events is applied within
a few milliseconds, and what a reader takes with the lock in hand is a copy of columns: the rest of
its work, hundreds of milliseconds at a million keys, holds nobody up. Only a snapshot does, and the
consumer, whose thread writes it, would have to wait for it anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.kernels._core import EventBatch
from stoker.prefetch.coverage_curve import Coverage
from stoker.prefetch.events import Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.held_back import HeldBack
from stoker.prefetch.pieces import Rest, no_rest
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.warm_set import Accesses


class HeatSink:
    """A `service.consume.Sink` that keeps a heat graph, safe from several threads."""

    def __init__(self, graph: HeatGraph) -> None:
        self._graph = graph
        self._lock = threading.Lock()

    @classmethod
    def open(cls, snapshot: bytes | None, settings: PrefetchSettings) -> HeatSink:
        """Make a sink from a snapshot, or an empty one from None.

        Raises:
            CorruptError: the snapshot is not a heat graph's.
        """
        if snapshot is None:
            return cls(HeatGraph(settings))
        return cls(HeatGraph.from_snapshot(snapshot, settings))

    @property
    def reads_queries(self) -> bool:
        """Whether events must come whole, by `apply`, because topics need their texts."""
        return self._graph.reads_queries

    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        """Take events into the heat, in the order given."""
        if self._graph.topics is not None:
            # A query's entities take milliseconds to find: not while others wait for the heat.
            self._graph.topics.read_ahead(events)
        with self._lock:
            self._graph.apply(events, arrived_s=arrived_s)

    def apply_batch(
        self, batch: EventBatch, /, *, arrived_s: NDArray[np.float64] | None = None
    ) -> None:
        """Take a batch's ready rows into the heat, in order."""
        with self._lock:
            self._graph.apply_batch(batch, arrived_s=arrived_s)

    def to_snapshot(self) -> bytes:
        """Write the whole heat."""
        with self._lock:
            return self._graph.to_snapshot()

    def tick(self, now_s: float) -> None:
        """Bring what is derived from the links up to date."""
        with self._lock:
            self._graph.tick(now_s)

    def demand(
        self, now_s: float, tenant: str | None = None, *, rest: Rest = no_rest
    ) -> dict[ContentKey, float]:
        """Return the decayed access count per content key: what a warm plan weighs."""
        with self._lock:
            later = self._graph.demand_later(now_s, tenant)
        return later(rest)

    def expected(self, query: str, tenant: str, now_s: float) -> dict[ContentKey, float]:
        """Return what a question leads to, see `QueryTopics.expected`; nothing without topics."""
        topics = self._graph.topics
        if topics is None:
            return {}
        topics.find_ahead(query)  # milliseconds, while nobody waits for the heat
        with self._lock:
            return topics.expected(query, tenant, now_s)

    def coverage(
        self, now_s: float, tenant: str | None = None, *, rest: Rest = no_rest
    ) -> Coverage:
        """Return how many coming accesses the hottest chunks will serve; see `HeatGraph`."""
        with self._lock:
            later = self._graph.coverage_later(now_s, tenant)
        return later(rest)

    def held_back(self, now_s: float, *, rest: Rest = no_rest) -> list[HeldBack]:
        """Return the newest spans of accesses, for a prediction; see `prefetch.held_back`."""
        with self._lock:
            later = self._graph.held_back_later(now_s)
        return later(rest)

    def accesses_since(self, time_s: float) -> Accesses:
        """Return the newest accesses later than a time; see `HeatGraph`."""
        with self._lock:
            return self._graph.accesses_since(time_s)

    @property
    def key_count(self) -> int:
        """How many content keys are tracked; read without the lock, which a snapshot holds long."""
        return self._graph.key_count
