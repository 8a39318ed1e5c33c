"""The heat in parts: whole again to the byte, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.prefetch.events import DOCUMENT_DELETED, SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_parts import PARTS, join_heat, read_head, split_heat
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt

T0 = 1_760_000_000.0
ABOUT = {"topic": "events", "offsets": [[0, 7], [1, 9]]}


def graph_of(events: int, **changes: int) -> HeatGraph:
    rng = np.random.default_rng(3)
    graph = HeatGraph(PrefetchSettings(graph_edges_per_key_max=4, heat_tail_buckets=64, **changes))
    graph.apply(
        [
            Event(
                f"e{i}",
                DOCUMENT_DELETED if i % 50 == 49 else SEARCH_PERFORMED,
                T0 + 40.0 * i,
                f"t{i % 3}",
                f"s{i % 11}",
                None,
                None,
                tuple(f"c{int(c)}" for c in rng.zipf(1.3, 4) % 700),
                {},
            )
            for i in range(events)
        ]
    )
    return graph


@pytest.mark.parametrize("keys_max", [60, 10_000])
@pytest.mark.parametrize("events", [0, 1, 900])
def test_parts_make_the_whole_again(events: int, keys_max: int) -> None:
    graph = graph_of(events, heat_keys_max=keys_max)
    assert (graph._tail is not None) == (events == 900 and keys_max == 60)
    seen = [(f"t{i % 3}", f"e{i}") for i in range(events)]
    head, parts = split_heat(graph.to_snapshot(), seen, ABOUT)
    assert set(parts) <= set(range(PARTS))
    about, digests = read_head(head)
    assert (about, set(digests)) == (ABOUT, set(parts))
    snapshot, ids = join_heat(head, parts)
    assert snapshot == graph.to_snapshot()
    assert ids == seen
    assert split_heat(snapshot, ids, ABOUT) == (head, parts)


def test_what_ticks_derive_is_left_out() -> None:
    graph = graph_of(300)
    before = graph.to_snapshot()
    graph.tick(T0)
    assert graph.to_snapshot() != before
    snapshot, _ = join_heat(*split_heat(graph.to_snapshot(), [], ABOUT))
    assert snapshot == before


def test_a_part_that_is_damaged_missing_or_old_is_refused() -> None:
    head, parts = split_heat(graph_of(300).to_snapshot(), [], ABOUT)
    _, older = split_heat(graph_of(200).to_snapshot(), [], ABOUT)
    which = sorted(set(parts) & set(older))[0]
    with pytest.raises(SnapshotCorrupt, match=f"part {which} is missing"):
        join_heat(head, {n: data for n, data in parts.items() if n != which})
    with pytest.raises(SnapshotCorrupt, match=f"part {which} is of another publication"):
        join_heat(head, {**parts, which: older[which]})
    damaged = bytearray(parts[which])
    damaged[60] ^= 1
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        join_heat(head, {**parts, which: bytes(damaged)})
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        read_head(head[:-20] + bytes(byte ^ 1 for byte in head[-20:-16]) + head[-16:])
