"""The order, the limits and the explanations of a warm plan."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.prefetch.coverage_curve import Coverage
from stoker.prefetch.plan import (
    REASON_ALWAYS,
    REASON_DENSITY,
    REASON_FILL,
    REASON_NAVIGATION,
    REASON_WHOLE,
    SKIP_BUDGET,
    SKIP_TIME,
    plan_warm,
)
from stoker.prefetch.protocols import UnitBatch


def batch(
    kind: str, stage: int, benefit: list[float], *, unit_bytes: int = 100, source: str = "index"
) -> UnitBatch:
    return UnitBatch(
        source,
        kind,
        stage,
        np.arange(len(benefit), dtype=np.uint32),
        unit_bytes,
        np.array(benefit, dtype=np.float32),
    )


def test_upper_layers_come_first_even_over_budget() -> None:
    plan = plan_warm([batch("vectors", 2, [9.0]), batch("upper", 0, [1.0] * 5)], budget_bytes=200)
    assert [(s.kind, len(s.units), s.reason) for s in plan.steps] == [("upper", 5, REASON_ALWAYS)]
    assert plan.planned_bytes == 500
    assert [(s.kind, s.units, s.reason) for s in plan.skips] == [("vectors", 1, SKIP_BUDGET)]


@pytest.mark.parametrize("walked", ["codes", "coarse", "vectors"])
def test_links_and_what_walks_compare_rise_together(walked: str) -> None:
    links = batch("links", 1, [8.0, 4.0, 2.0, 1.0], unit_bytes=100)
    codes = batch(walked, 1, [8.0, 4.0, 2.0, 1.0], unit_bytes=300)
    plan = plan_warm([links, codes], budget_bytes=800)
    kept = {s.kind: s.units.tolist() for s in plan.steps}
    assert kept == {"links": [0, 1], walked: [0, 1]}
    assert all(s.reason == REASON_NAVIGATION for s in plan.steps)
    assert plan.predicted_hit_ratio == pytest.approx(24 / 30)


def test_a_plan_is_the_same_whatever_rests_there_are() -> None:
    rng = np.random.default_rng(1)
    batches = [
        batch(kind, stage, np.sort(rng.random(size))[::-1].tolist(), unit_bytes=100)
        for kind, stage, size in (("upper", 0, 3), ("links", 1, 400), ("codes", 1, 900))
    ]
    rests: list[None] = []
    found = plan_warm(
        batches, budget_bytes=100_000, round_bytes=500, rest=lambda: rests.append(None)
    )
    plan = plan_warm(batches, budget_bytes=100_000, round_bytes=500)
    assert len(rests) > 10
    for ours, theirs in zip(found.steps, plan.steps, strict=True):
        np.testing.assert_array_equal(ours.units, theirs.units)
        assert (ours.kind, ours.benefit, ours.reason) == (
            theirs.kind,
            theirs.benefit,
            theirs.reason,
        )
    assert (found.skips, found.predicted_hit_ratio) == (plan.skips, plan.predicted_hit_ratio)


def test_rest_of_a_stage_goes_by_benefit_per_byte_over_sources() -> None:
    vectors = batch("vectors", 2, [10.0, 1.0], unit_bytes=100)
    blocks = batch("kv_block", 2, [30.0, 5.0], unit_bytes=400, source="kvcache")
    plan = plan_warm([blocks, vectors], budget_bytes=900)
    assert [(s.kind, s.units.tolist()) for s in plan.steps] == [
        ("kv_block", [0, 1]),
        ("vectors", [0]),
    ]
    assert plan.steps[0].reason == REASON_DENSITY
    assert [(s.kind, s.units) for s in plan.skips] == [("vectors", 1)]


def test_unknown_units_come_last_and_only_if_room_is_left() -> None:
    links = batch("links", 1, [5.0, 0.0])
    vectors = batch("vectors", 2, [1.0, 0.0])
    plan = plan_warm([links, vectors], budget_bytes=300)
    assert [(s.kind, s.units.tolist(), s.reason) for s in plan.steps] == [
        ("links", [0], REASON_NAVIGATION),
        ("vectors", [0], REASON_DENSITY),
        ("links", [1], REASON_FILL),
    ]
    assert plan.predicted_hit_ratio == 1.0


def test_time_limits_when_tighter_than_budget() -> None:
    plan = plan_warm(
        [batch("vectors", 1, [1.0] * 10)],
        budget_bytes=1000,
        bandwidth_bytes_s=100.0,
        deadline_s=3.0,
    )
    assert plan.planned_bytes == 300
    assert plan.skips[0].reason == SKIP_TIME


def test_rounds_cut_load_calls_and_keep_kinds_close() -> None:
    links = batch("links", 1, [1.0] * 8, unit_bytes=100)
    codes = batch("codes", 1, [1.0] * 8, unit_bytes=100)
    plan = plan_warm([links, codes], budget_bytes=None, round_bytes=400)
    assert [(s.kind, len(s.units)) for s in plan.steps] == [("links", 2), ("codes", 2)] * 4


def test_where_all_fits_a_stage_is_read_in_the_order_of_the_file() -> None:
    """By benefit every other page would be read first, and then the pages between them."""
    hot = [float(i % 2) * (i + 1) for i in range(16)]
    links = batch("links", 1, hot[:8])
    codes = batch("codes", 1, hot)
    vectors = batch("vectors", 2, hot[:4])
    upper = batch("upper", 0, [1.0])
    offered = [vectors, codes, links, upper]
    plan = plan_warm(offered, budget_bytes=2_900, round_bytes=1_300, roomy={"index"})
    assert [(s.kind, s.units.tolist(), s.reason) for s in plan.steps] == [
        ("upper", [0], REASON_ALWAYS),
        ("codes", list(range(8)), REASON_WHOLE),
        ("links", list(range(4)), REASON_WHOLE),
        ("codes", list(range(8, 16)), REASON_WHOLE),
        ("links", list(range(4, 8)), REASON_WHOLE),
        ("vectors", [0], REASON_WHOLE),  # what the round had room for
        ("vectors", [1, 2, 3], REASON_WHOLE),
    ]
    assert plan.skips == ()
    assert plan.predicted_hit_ratio == 1.0
    # One page too many for the budget, or a source without the room: the hottest first.
    for tight in (
        plan_warm(offered, budget_bytes=2_800, roomy={"index"}),
        plan_warm(offered, budget_bytes=None, roomy={"kvcache"}),
    ):
        first = next(step for step in tight.steps if step.kind == "codes")
        assert first.units.tolist()[:3] == [15, 13, 11]
        assert first.reason == REASON_NAVIGATION


def test_explain_says_why_in_and_why_out() -> None:
    plan = plan_warm([batch("vectors", 2, [3.0, 2.0, 1.0])], budget_bytes=200)
    assert "after 100 bytes: benefit per byte" in plan.explain("index", "vectors", 1)
    assert SKIP_BUDGET in plan.explain("index", "vectors", 2)
    assert "not offered" in plan.explain("index", "codes", 2)


def test_prediction_allows_for_what_was_never_asked_for() -> None:
    plan = plan_warm(
        [batch("vectors", 1, [6.0, 2.0, 1.0, 1.0])], budget_bytes=200, coverage=Coverage(0.2)
    )
    assert plan.predicted_hit_ratio == pytest.approx(0.8 * 0.8 + 0.2 * 0.5)
    with pytest.raises(InputError, match="unseen_ratio"):
        Coverage(1.5)


def test_unsorted_batch_is_sorted() -> None:
    plan = plan_warm([batch("vectors", 1, [1.0, 3.0, 2.0])], budget_bytes=200)
    assert plan.steps[0].units.tolist() == [1, 2]


def test_empty_offer_makes_empty_plan() -> None:
    plan = plan_warm([batch("links", 1, [])], budget_bytes=100)
    assert plan.steps == ()
    assert plan.predicted_hit_ratio == 0.0


@pytest.mark.parametrize(
    "bad",
    [
        UnitBatch("i", "links", 1, np.arange(2, dtype=np.uint32), 1, np.ones(1, np.float32)),
        UnitBatch("i", "links", 1, np.arange(1, dtype=np.uint32), 0, np.ones(1, np.float32)),
        UnitBatch("i", "links", -1, np.arange(1, dtype=np.uint32), 1, np.ones(1, np.float32)),
        UnitBatch("i", "links", 1, np.arange(1, dtype=np.uint32), 1, -np.ones(1, np.float32)),
        UnitBatch("i", "links", 1, np.arange(1, dtype=np.uint32), 1, np.full(1, np.nan, "f4")),
    ],
)
def test_malformed_batch_is_refused(bad: UnitBatch) -> None:
    with pytest.raises(InputError):
        plan_warm([bad], budget_bytes=None)


def test_malformed_limits_are_refused() -> None:
    with pytest.raises(InputError):
        plan_warm([], budget_bytes=-1)
    with pytest.raises(InputError):
        plan_warm([], budget_bytes=1, bandwidth_bytes_s=float("nan"), deadline_s=1.0)


def test_what_was_never_asked_for_finds_a_kind_that_is_resident_whole() -> None:
    batches = [batch("links", 1, [9.0, 9.0]), batch("vectors", 2, [1.0, 0.5, 0.5])]
    size = batches[0].unit_bytes
    plan = plan_warm(batches, budget_bytes=3 * size, coverage=Coverage(0.5))
    # Half of the accesses are to chunks without heat: their looks at links hit, and a third of
    # those at vectors.
    assert plan.predicted_hit_ratio == pytest.approx((0.5 * 19.0 + 0.5 * (18.0 + 2 / 3)) / 20.0)
