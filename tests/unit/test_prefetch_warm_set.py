"""What a warm-up served of the accesses after it: the quantity that its receipt predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.prefetch.event_batch import batch_of
from stoker.prefetch.events import new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.protocols import ContentKey, LoadOutcome, UnitBatch
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.warm import run_warm
from stoker.prefetch.warm_set import Accesses, WarmSet

PAGES = 20
BYTES = 100


class Room:
    """Key number n lies on page n; what is in the pool comes by warm-ups and by demand."""

    def __init__(self, *, room: int = PAGES) -> None:
        self.pool: set[int] = set()
        self.room = room

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        benefit = np.zeros(PAGES, np.float32)
        for (_, chunk), weight in heat.items():
            if int(chunk) < PAGES:
                benefit[int(chunk)] += weight
        order = np.argsort(-benefit, kind="stable")
        return [UnitBatch("index", "refine", 2, order.astype(np.uint32), BYTES, benefit[order])]

    def load_units(
        self, kind: str, units: NDArray[np.uint32], *, sticky: bool, deadline_s: float | None
    ) -> LoadOutcome:
        new = [unit for unit in units.tolist() if unit not in self.pool][: self.room]
        self.pool |= set(new)
        already = len(units) - len(new)
        return LoadOutcome(len(new), already, 0, 0, 0, BYTES * len(new), 1, 0.0)

    def total_bytes(self) -> int:
        return PAGES * BYTES


def evenly(keys: Sequence[int], each: float = 10.0) -> dict[ContentKey, float]:
    return {("t", str(key)): each for key in keys}


@pytest.mark.parametrize(("warmed", "served"), [(0, 0.0), (10, 0.5), (PAGES, 1.0)])
def test_only_what_the_warm_up_loaded_counts(warmed: int, served: float) -> None:
    room, loaded = Room(), WarmSet()
    asked = evenly(range(PAGES))
    receipt = run_warm(room, asked, budget_bytes=warmed * BYTES, loaded=loaded)
    assert receipt.predicted_hit_ratio == pytest.approx(served)
    assert loaded.served(room.unit_batches(asked), Accesses(asked)) == pytest.approx(served)
    room.pool |= set(range(PAGES))  # demand reads all the others
    assert loaded.served(room.unit_batches(asked), Accesses(asked)) == pytest.approx(served)


def test_traffic_that_turned_elsewhere_is_not_served() -> None:
    room, loaded = Room(), WarmSet()
    receipt = run_warm(room, evenly(range(10)), budget_bytes=10 * BYTES, loaded=loaded)
    assert receipt.predicted_hit_ratio == pytest.approx(1.0)
    for asked, served in ((range(10, 20), 0.0), (range(5, 15), 0.5)):
        accesses = evenly(asked)
        found = loaded.served(room.unit_batches(accesses), Accesses(accesses))
        assert found == pytest.approx(served)


def test_what_was_there_before_counts_as_in_the_prediction() -> None:
    room, loaded = Room(), WarmSet()
    room.pool = {0, 1, 2, 3}
    run_warm(room, evenly(range(8)), budget_bytes=8 * BYTES, loaded=loaded)
    asked = evenly(range(8))
    assert loaded.served(room.unit_batches(asked), Accesses(asked)) == pytest.approx(1.0)


def test_a_load_that_was_cut_short_counts_by_its_mean_and_others_fall_anywhere() -> None:
    room, loaded = Room(), WarmSet()
    loaded.add("index", "refine", np.arange(10, dtype=np.uint32), 0.5)
    loaded.add("index", "refine", np.empty(0, np.uint32), 1.0)
    asked = evenly(range(10))
    batches = room.unit_batches(asked)
    assert loaded.served(batches, Accesses(asked)) == pytest.approx(0.5)
    # Of accesses to keys that the heat does not hold, five of twenty pages serve a quarter.
    assert loaded.served(batches, Accesses(asked, outside=100)) == pytest.approx(0.375)


def test_nothing_is_said_of_accesses_to_what_no_source_has() -> None:
    room, loaded = Room(), WarmSet()
    run_warm(room, evenly(range(10)), loaded=loaded)
    for accesses in (Accesses(), Accesses(evenly([99])), Accesses(outside=5)):
        assert loaded.served(room.unit_batches(accesses.by_key), accesses) is None


def test_units_that_were_numbered_anew_are_told() -> None:
    loaded = WarmSet()
    none = np.zeros(500, np.float32)
    units = np.arange(500, dtype=np.uint32)
    loaded.add("index", "links", units, 1.0)
    assert loaded.still_offered([UnitBatch("index", "links", 1, units, BYTES, none)])
    more = UnitBatch("index", "links", 1, units + np.uint32(5), BYTES, none)
    assert loaded.still_offered([more])
    assert not loaded.still_offered([UnitBatch("index", "links", 1, units + 6, BYTES, none)])
    assert not loaded.still_offered([UnitBatch("index", "codes", 1, units, BYTES, none)])
    assert not loaded.still_offered([])
    assert WarmSet().still_offered([])


def test_the_heat_gives_the_accesses_since_a_time() -> None:
    graph = HeatGraph(PrefetchSettings())
    kinds = ("search.performed", "search.performed", "result.used", "document.deleted")
    chunks = (["a", "b"], ["b", "c"], ["b"], ["c"])
    events = [
        new_event(f"stoker.{kind}.v1", tenant="t", chunk_ids=names, time_s=1.8e9 + at)
        for at, (kind, names) in enumerate(zip(kinds, chunks, strict=True))
    ]
    graph.apply_batch(batch_of(events))
    assert graph.accesses_since(1.8e9 - 1.0).by_key == {("t", "a"): 1.0, ("t", "b"): 3.0}
    later = graph.accesses_since(1.8e9)  # a used result is one access too; what is deleted is none
    assert later.by_key == {("t", "b"): 2.0}
    assert later.total == 2
    assert graph.accesses_since(1.8e9 + 9.0).total == 0


def test_accesses_to_keys_without_room_are_outside() -> None:
    graph = HeatGraph(PrefetchSettings(heat_keys_max=1_000))
    events = [
        new_event(
            "stoker.search.performed.v1",
            tenant="t",
            chunk_ids=[f"{at}-{n}" for n in range(10)],
            time_s=1.8e9 + at,
        )
        for at in range(300)
    ]
    graph.apply_batch(batch_of(events))
    found = graph.accesses_since(1.8e9 - 1.0)
    assert found.total == 3_000
    assert found.outside >= 2_000
