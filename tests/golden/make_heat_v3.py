"""Make the golden heat snapshot of version 3, with a tail: ``python ... make_heat_v3.py FILE``.

Run it again only to make the golden file of a *new* version, under a new name.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make_heat_v2 import START_S, golden_events

from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings

SETTINGS = PrefetchSettings(heat_keys_max=15, heat_tail_buckets=16, graph_edges_per_key_max=4)


def golden_graph() -> HeatGraph:
    """Return the graph of version 2's events in a table that cannot hold all of their keys."""
    graph = HeatGraph(SETTINGS)
    graph.apply(golden_events())
    graph.tick(START_S + 1800.0)
    return graph


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(golden_graph().to_snapshot())
