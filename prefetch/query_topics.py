"""The topics of a stream of searches: terms and entities of each query, and where they led.

A search heats the nodes that its text names and links them to what was retrieved. Plans then let
hot nodes take over a small share of demand (`HeatGraph.demand`), and `QueryTopics.expected` says
what a query leads to before it is answered. Nodes are per tenant: nobody's question moves
another's plan. Off by default (`prefetch/BENCHMARKS.md`).

What is kept depends on the events and their order alone, given one finder. It holds names out of
queries, as the log of events holds the queries themselves: guard a snapshot as you guard the log.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.entities import Entities, EntityFinder, SpacyFinder
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.heat_clock import EventClock
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.settings import TOPICS_OFF, PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt, pack, unpack
from stoker.prefetch.topics import Node, Terms, TopicHeat

_KIND = "query topics 1"
# How rare a term is shows only among many more than become nodes.
_COUNTED = 20


class QueryTopics:
    """Terms and entities of queries, their heat and the chunks that they lead to.

    One thread at a time, but for `read_ahead` and `find_ahead`, if the finder takes several.
    Invariants: those of `TopicHeat` with the settings' bounds; a node leads to chunks of its own
    tenant only.

    Args:
        settings: Which kinds there are, and the bounds.
        finder: Finds entities in place of the settings' pipeline; they are then on.

    Raises:
        UnavailableError: what the settings ask for is not installed; names the extra.
        ConfigError: the pipeline is none.
        CorruptError: the bundled pipeline differs from the known one.
    """

    def __init__(self, settings: PrefetchSettings, *, finder: EntityFinder | None = None) -> None:
        config = settings
        self._length_max = config.topics_text_length_max
        if finder is None and config.topics_entities != TOPICS_OFF:
            finder = SpacyFinder(config.topics_entities)
        self._entities = (
            None if finder is None else Entities(finder, text_length_max=self._length_max)
        )
        self._terms = (
            Terms(terms_max=_COUNTED * config.topics_nodes_max) if config.topics_terms else None
        )
        self._heat = TopicHeat(
            node_half_life_s=config.topics_half_life_s,
            nodes_max=config.topics_nodes_max,
            edges_max=config.topics_edges_per_node_max,
        )
        self._clock = EventClock(
            jump_s_max=config.heat_jump_s_max,
            jump_events=config.heat_jump_events,
            silence_s_max=config.heat_silence_s_max,
        )

    @classmethod
    def wanted(cls, settings: PrefetchSettings) -> QueryTopics | None:
        """Return the topics that the settings ask for; None where they ask for none."""
        off = settings.topics_entities == TOPICS_OFF and not settings.topics_terms
        return None if off else cls(settings)

    def __len__(self) -> int:
        return len(self._heat)

    def read_ahead(self, events: Sequence[Event]) -> None:
        """Find the entities of these events and remember them, so that `observe` is quick.

        Changes nothing that is kept; may run while another thread reads what is kept.
        """
        for event in events:
            if event.type == SEARCH_PERFORMED and event.query:
                self.find_ahead(event.query)

    def find_ahead(self, query: str) -> None:
        """Find a query's entities and remember them, so that `expected` is quick; any thread."""
        if self._entities is not None:
            self._entities.of(query)

    def observe(
        self,
        events: Sequence[Event],
        *,
        arrived_s: Sequence[float] | NDArray[np.float64] | None = None,
    ) -> None:
        """Take the searches among these events that have a text, in the order given.

        Args:
            events: Each once; duplicates must have been put out before.
            arrived_s: When the log took each (Unix seconds): none is believed to be later.

        Raises:
            InputError: a time is not finite.
        """
        times = np.array([event.time_s for event in events], dtype=np.float64)
        arrived = None if arrived_s is None else np.asarray(arrived_s, dtype=np.float64)
        believed = self._clock.take(self._clock.believe(times, arrived), len(times))
        for event, time_s in zip(events, believed.tolist(), strict=True):
            if event.type != SEARCH_PERFORMED or not event.query:
                continue
            nodes = self._entities_of(event.query)
            if self._terms is not None:
                nodes += self._terms.of(self._cut(event.query))
            self._heat.observe(
                [(kind, name, event.tenant) for kind, name in nodes],
                [(event.tenant, chunk) for chunk in event.chunk_ids],
                time_s,
            )

    def lift(self, now_s: float) -> dict[ContentKey, float]:
        """Return the accesses per chunk that hot nodes lead one to expect; see `TopicHeat.lift`.

        Args:
            now_s: Unix seconds; a time before the newest event counts as that event's.
        """
        return self._heat.lift(self._now(now_s))

    def expected(self, query: str, tenant: str, now_s: float) -> dict[ContentKey, float]:
        """Return the accesses per chunk that the nodes of a query lead one to expect, >= 0.

        Known before the query is answered; changes nothing.

        Args:
            query: Any text; the first `topics_text_length_max` characters are read.
            tenant: Only chunks of this tenant are expected.
            now_s: Unix seconds; a time before the newest event counts as that event's.
        """
        nodes = self._entities_of(query)
        if self._terms is not None:
            nodes += self._terms.peek(self._cut(query))
        return self._heat.expected(
            [(kind, name, tenant) for kind, name in nodes],
            self._now(now_s),
        )

    def _now(self, now_s: float) -> float:
        return max(self._clock.heat_s(now_s), self._clock.newest_s)

    def _entities_of(self, query: str) -> list[Node]:
        return [] if self._entities is None else self._entities.of(query)

    def _cut(self, text: str) -> str:
        # A lone surrogate could not be written into a snapshot.
        return text[: self._length_max].encode("utf-8", "replace").decode("utf-8")

    def to_bytes(self) -> bytes:
        """Return the whole state; equal state gives equal bytes."""
        values, arrays = self._heat.to_state()
        if self._terms is not None:
            values["terms"] = self._terms.to_state()
        values |= self._clock.to_values()
        return pack(_KIND, values, arrays)

    def restore(self, data: bytes) -> None:
        """Become what `to_bytes` saved, within these settings' bounds.

        Raises:
            SnapshotCorrupt: the bytes are damaged, or are no topics.
        """
        values, arrays = unpack(_KIND, data)
        try:
            self._heat.load_state(values, arrays)
            self._clock.load_values(values)
        except InputError as error:
            raise SnapshotCorrupt(f"topics in a snapshot: {error}") from error
        if self._terms is not None and "terms" in values:
            self._terms.load_state(values["terms"])

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        self._heat.check()
