"""The heat in parts: whole again to the byte, or refused by name."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from stoker.prefetch.events import DOCUMENT_DELETED, SEARCH_PERFORMED, Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.heat_parts import PARTS, digest_of, join_heat, read_head, split_heat
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import SnapshotCorrupt, kind_of, pack, unpack

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
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
    seen = bytes(range(250)) * (events // 3)
    head, parts = split_heat(graph.to_snapshot(), seen, ABOUT)
    assert set(parts) <= set(range(PARTS))
    about, digests = read_head(head)
    assert (about, set(digests)) == (ABOUT, set(parts))
    snapshot, ids = join_heat(head, parts)
    assert snapshot == graph.to_snapshot()
    assert ids == seen
    assert split_heat(snapshot, ids, ABOUT) == (head, parts)


def test_a_golden_publication_with_the_names_of_ids_still_reads() -> None:
    published = json.loads((GOLDEN / "heat-publication-v1.json").read_text())
    head = base64.b64decode(published["head"])
    parts = {int(part): base64.b64decode(data) for part, data in published["parts"].items()}
    assert kind_of(head) == "heat head 1"
    about, digests = read_head(head)
    assert (about["offsets"], set(digests)) == ([[0, 60]], set(parts))
    snapshot, seen = join_heat(head, parts)
    assert seen == [(f"t{i % 2}", f"e{i}") for i in range(40, 60)]
    graph = HeatGraph.from_snapshot(snapshot)
    graph.check()
    assert (graph.events_applied, graph.key_count) == (60, 22)
    # Published anew it is of today's kind, and the same heat.
    again, parts_again = split_heat(snapshot, b"ids", about)
    assert kind_of(again) == "heat head 2"
    assert join_heat(again, parts_again) == (snapshot, b"ids")


def test_what_ticks_derive_is_left_out() -> None:
    graph = graph_of(300)
    before = graph.to_snapshot()
    graph.tick(T0)
    assert graph.to_snapshot() != before
    snapshot, _ = join_heat(*split_heat(graph.to_snapshot(), b"", ABOUT))
    assert snapshot == before


def test_a_part_that_is_damaged_missing_or_old_is_refused() -> None:
    head, parts = split_heat(graph_of(300).to_snapshot(), b"", ABOUT)
    _, older = split_heat(graph_of(200).to_snapshot(), b"", ABOUT)
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


@pytest.mark.parametrize(
    "heat",
    [
        None,
        {},
        {"kind": "heat graph 2", "values": {}, "key_count": 1 << 60},
        {"kind": "heat graph 2", "values": {}, "key_count": -1},
        {"kind": "heat graph 2", "values": {}, "key_count": 3},
        {"kind": "heat graph 2", "values": [], "key_count": "x"},
    ],
)
def test_a_head_that_fits_no_parts_is_refused(heat: object) -> None:
    head, parts = split_heat(graph_of(300).to_snapshot(), b"", ABOUT)
    values, arrays = unpack("heat head 2", head)
    with pytest.raises(SnapshotCorrupt):
        join_heat(pack("heat head 2", {**values, "heat": heat}, arrays), parts)
    for digests in (None, [], {"x": "y"}, {str(n): 5 for n in parts}):
        with pytest.raises(SnapshotCorrupt):
            join_heat(pack("heat head 2", {**values, "digests": digests}, arrays), parts)
    for name in set(arrays) - {"recent_numbers"}:  # a heat of before there were newest accesses
        rest = {other: array for other, array in arrays.items() if other != name}
        with pytest.raises(SnapshotCorrupt):
            HeatGraph.from_snapshot(
                join_heat(pack("heat head 2", values, rest), parts)[0], graph_of(0).settings
            )


def test_a_part_of_another_make_is_refused() -> None:
    head, parts = split_heat(graph_of(300).to_snapshot(), b"ids", ABOUT)
    values, arrays = unpack("heat head 2", head)
    which = sorted(parts)[0]
    plain, held = unpack("heat part 1", parts[which])
    made = [({**plain, name: odd}, held) for name in plain for odd in (None, 5, [[1]], [["t"]])]
    made += [(plain, {n: a for n, a in held.items() if n != name}) for name in held]
    made += [(plain, {**held, name: array[:-1]}) for name, array in held.items() if len(array)]
    made += [(plain, {**held, "numbers": held["numbers"] + 10_000})]
    refused = 0
    for one, columns in made:
        part = pack("heat part 1", one, columns)
        digests = {**values["digests"], str(which): digest_of(part)}
        changed = pack("heat head 2", {**values, "digests": digests}, arrays)
        try:
            snapshot, _ = join_heat(changed, {**parts, which: part})
            HeatGraph.from_snapshot(snapshot, graph_of(0).settings).tick(T0)
        except SnapshotCorrupt:
            refused += 1
    assert refused > len(made) / 2, (refused, len(made))
