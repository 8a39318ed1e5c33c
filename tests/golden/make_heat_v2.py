"""Make the golden heat snapshot of version 2: ``python tests/golden/make_heat_v2.py FILE``.

Run it again only to make the golden file of a *new* version, under a new name.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.prefetch.events import DOCUMENT_DELETED, RESULT_USED, SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph

START_S = 1_760_000_000.0


def golden_events() -> list[Event]:
    """Return 60 events: searches of four sessions, used results, a late one, a deletion."""
    events = []
    for i in range(60):
        kind = RESULT_USED if i % 7 == 3 else SEARCH_PERFORMED
        chunks = tuple(f"c{(i * step) % 11}" for step in (1, 3, 5))
        time_s = START_S + 30.0 * i - (600.0 if i == 40 else 0.0)
        if i == 50:
            kind, chunks = DOCUMENT_DELETED, ("c3",)
        events.append(
            Event(f"e{i}", kind, time_s, f"t{i % 2}", f"s{i % 4}", None, None, chunks, {})
        )
    return events


def golden_graph() -> HeatGraph:
    """Return the graph of those events, after one tick."""
    graph = HeatGraph()
    graph.apply(golden_events())
    graph.tick(START_S + 1800.0)
    return graph


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(golden_graph().to_snapshot())
