"""The prediction that is tried on held-back accesses, against a model with dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prefetch.coverage_curve import CELLS, PRIOR_ACCESSES
from stoker.prefetch.events import DOCUMENT_DELETED, SEARCH_PERFORMED, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.held_back import HeldBack, unit_coverage
from stoker.prefetch.protocols import ContentKey, LoadOutcome, UnitBatch

T0 = 1.76e9
PAGE = 4096


class Shelf:
    """A source whose page p holds keys of number 4 p to 4 p + 3; a hundredth of each look is lost.

    What is lost goes to all pages alike, as a walk's looks do.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.calls = 0

    def unit_batches(self, heat: Mapping[ContentKey, float]) -> Sequence[UnitBatch]:
        self.calls += 1
        worth = np.full(self.pages, 0.01 * sum(heat.values()) / self.pages)
        for (_, chunk), value in heat.items():
            worth[int(chunk) // 4] += 0.99 * value
        order = np.argsort(-worth, kind="stable")
        return [
            UnitBatch(
                "index", "codes", 2, order.astype(np.uint32), PAGE, worth[order].astype(np.float32)
            )
        ]

    def load_units(self, *_: object, **__: object) -> LoadOutcome:
        raise NotImplementedError

    def total_bytes(self) -> int:
        return self.pages * PAGE


def span(keys: Sequence[int], *, weight: float = 1.0, outside: int = 0) -> HeldBack:
    counts = {("t", str(key)): float(count) for key, count in Counter(keys).items()}
    return HeldBack(counts, counts, outside, weight)


@settings(max_examples=80, deadline=None)
@given(
    earlier=st.lists(st.integers(0, 79), min_size=1, max_size=60),
    newest=st.lists(st.integers(0, 79), min_size=1, max_size=40),
    outside=st.integers(0, 9),
)
def test_the_curve_is_what_pages_in_the_order_of_before_served(
    earlier: list[int], newest: list[int], outside: int
) -> None:
    shelf = Shelf(20)
    demand = span([*earlier, *newest]).counts
    curve = unit_coverage(shelf.unit_batches(demand), [shelf], [span(newest, outside=outside)])
    assert curve is not None
    assert curve.accesses == pytest.approx(len(newest) + outside)
    assert (np.diff(curve.below) >= -1e-9).all()
    left, came = (shelf.unit_batches(span(part).counts)[0] for part in (earlier, newest))
    looks = dict(zip(came.units.tolist(), came.benefit.tolist(), strict=True))
    total = float(left.benefit.sum())
    have = served = 0.0
    for n, (unit, worth) in enumerate(zip(left.units.tolist(), left.benefit.tolist(), strict=True)):
        have += worth
        served += looks[unit]
        # To what has no key all pages are alike.
        found = served + outside * (n + 1) / 20
        cell = have / total * CELLS
        low, high = curve.below[int(cell)], curve.below[min(CELLS, int(cell) + 1)]
        # Units of equal worth may stand in any order.
        tie = [worth == other for other in left.benefit.tolist()].count(True)
        if tie == 1 and n + 1 < 20 and left.benefit[n + 1] != worth:
            assert low - 1e-3 <= found <= high + 1e-3
    assert curve.at(1.0) == pytest.approx(1.0)
    prior = (curve.below[100] + PRIOR_ACCESSES * 0.5) / (curve.accesses + PRIOR_ACCESSES)
    assert curve.at(0.5) == pytest.approx(prior)


def test_spans_are_taken_back_one_after_the_other() -> None:
    """The second span is laid over what the first one, too, had not heated yet."""
    shelf = Shelf(10)
    first, second = span([0] * 8), span([4] * 8, weight=0.5)
    demand = span([0] * 8 + [4] * 8 + [8] * 4).counts
    curve = unit_coverage(shelf.unit_batches(demand), [shelf], [first, second])
    assert curve is not None
    assert curve.accesses == 12.0
    # Neither had anything to do with what was hot before it.
    assert curve.below[CELLS // 2] < 0.3


def test_nothing_to_try_it_on_gives_none() -> None:
    shelf = Shelf(5)
    batches = shelf.unit_batches(span([1, 2]).counts)
    assert unit_coverage(batches, [shelf], []) is None
    assert unit_coverage(batches, [shelf], [span([])]) is None
    assert unit_coverage([], [], [span([1])]) is None
    # All that is known is held back: there is nothing to order pages by.
    assert unit_coverage(batches, [shelf], [span([1, 2])]) is None


def test_a_heat_gives_its_newest_accesses_without_the_deleted() -> None:
    rng = np.random.default_rng(1)
    keys = rng.zipf(1.3, (2_000, 5)) % 80
    graph = HeatGraph()
    graph.apply(
        [
            new_event(
                SEARCH_PERFORMED, tenant="t", chunk_ids=[str(k) for k in row], time_s=T0 + 9.0 * i
            )
            for i, row in enumerate(keys)
        ]
    )
    graph.apply(
        [new_event(DOCUMENT_DELETED, tenant="t", chunk_ids=["1"], time_s=T0 + 9.0 * len(keys))]
    )
    now_s = graph.watermark_s
    demand = graph.demand(now_s)
    spans = graph.held_back_later(now_s)()
    assert [one.weight for one in spans] == [1.0, 0.5, 0.25, 0.125]
    gone = Counter[ContentKey]()
    for one in spans:
        assert ("t", "1") not in one.counts
        assert one.counts.keys() == one.taken.keys()
        gone.update(one.taken)
    assert all(amount <= demand[key] * (1.0 + 1e-9) for key, amount in gone.items())
    size = 10_000 // 8
    newest = Counter(str(key) for key in keys.reshape(-1)[-1024:] if key != 1)
    assert size > 1024
    assert spans[0].counts == {("t", key): float(count) for key, count in newest.items()}
    assert HeatGraph().held_back_later(now_s)() == []
