"""What the walk and the re-rank may lose together stays within the target."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.index.recall_bounds import ChosenWalk, WalkRecall
from stoker.index.search_plan import RERANK_SHARE_MIN, plan_search, sure_of_walk
from stoker.index.settings import IndexSettings


def mean_loss(
    *,
    bits: int,
    target: float,
    walk_recall: float,
    ef: int | None,
    whole_blocks: bool = True,
    holds_all: bool = False,
) -> float:
    return float(
        planned(
            bits=bits,
            target=target,
            walk_recall=walk_recall,
            ef=ef,
            whole_blocks=whole_blocks,
            holds_all=holds_all,
        )["mean_loss"]
    )


def planned(
    *,
    bits: int,
    target: float,
    walk_recall: float,
    ef: int | None,
    whole_blocks: bool = True,
    holds_all: bool = False,
    near_mean: float = 0.0,
) -> dict[str, Any]:
    recall = WalkRecall(walk_recall, 0.0)
    return plan_search(
        IndexSettings(),
        bits,
        walk=ChosenWalk(100, 1, recall, None, 0.0, near_from=0.8, near_mean=near_mean),
        k=10,
        ef=ef,
        recall_target=target,
        normalize=False,
        whole_blocks=whole_blocks,
        holds_all=holds_all,
    )


@pytest.mark.parametrize("target", [0.8, 0.9, 0.95, 0.98])
def test_where_the_target_chooses_the_width_the_re_rank_loses_what_the_walk_leaves(
    target: float,
) -> None:
    allowed = 1.0 - target
    # A caller's own width leaves the re-rank three quarters, whatever the walk is known to find.
    unit = mean_loss(bits=2, target=target, walk_recall=1.0, ef=100) / 0.75
    before = 0.0
    for share in (RERANK_SHARE_MIN, 0.6, 0.7, 0.75, 0.9, 1.0):
        walk_recall = 1.0 - (1.0 - share) * allowed
        found = mean_loss(bits=2, target=target, walk_recall=walk_recall, ef=None) / unit
        assert found * allowed + 1.0 - walk_recall <= allowed * (1 + 1e-9)
        assert max(before, RERANK_SHARE_MIN) - 1e-9 <= found <= 0.75 + 1e-9
        assert found == pytest.approx(min(share, 0.75))
        before = found
    # Where no width that was measured is enough, the re-rank keeps its least.
    lost = mean_loss(bits=2, target=target, walk_recall=target / 2, ef=None)
    assert lost / unit == pytest.approx(RERANK_SHARE_MIN)


def test_walks_on_first_codes_and_widths_that_callers_chose_keep_their_share() -> None:
    for bits, ef in ((4, None), (4, 64), (2, 64)):
        losses = {
            mean_loss(bits=bits, target=0.95, walk_recall=recall, ef=ef)
            for recall in (0.5, 0.97, 1.0)
        }
        assert len(losses) == 1
    assert mean_loss(bits=2, target=1.0, walk_recall=0.99, ef=None) == 0


@pytest.mark.parametrize("ef", [None, 64])
def test_shorter_coarse_codes_may_expect_to_lose_less(ef: int | None) -> None:
    longer, shorter = (
        mean_loss(bits=2, target=0.95, walk_recall=0.99, ef=ef, whole_blocks=whole)
        for whole in (True, False)
    )
    assert shorter / longer == pytest.approx(0.65)
    first = {
        mean_loss(bits=4, target=0.95, walk_recall=0.99, ef=ef, whole_blocks=whole)
        for whole in (True, False)
    }
    assert len(first) == 1


@pytest.mark.parametrize("bits", [4, 2])
def test_where_all_has_room_the_re_rank_lets_off_what_the_walk_leaves_until_vectors_are_loaded(
    bits: int,
) -> None:
    target, allowed = 0.95, 0.05
    lost = 1.0 if bits == 4 else 0.65
    for walk_recall in (0.9, 0.951, 0.96, 0.97, 0.975, 0.99):
        options = planned(
            bits=bits, target=target, walk_recall=walk_recall, ef=None, holds_all=True
        )
        mean = options["mean_loss"] * lost
        left = allowed - (1.0 - walk_recall)
        assert mean <= max(left, 0.1 * allowed) + 1e-9
        # No query that reads nothing may lack much more than the mean.
        assert (1.0 - options["rerank_target"]) * lost <= 2.8 * mean + 1e-6
        # Who chose the width himself gets what he got.
        asked = [
            planned(bits=bits, target=target, walk_recall=walk_recall, ef=64, holds_all=holds_all)
            for holds_all in (True, False)
        ]
        assert asked[0] == asked[1]


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("ef", [None, 64])
@pytest.mark.parametrize("holds_all", [False, True])
def test_near_queries_may_lose_by_the_re_rank_what_their_walk_does_not(
    bits: int, ef: int | None, holds_all: bool
) -> None:
    allowed, lost = 0.05, 1.0 if bits == 4 else 0.65
    for near_mean in (0.0, 0.9, 0.97, 0.99, 0.999, 1.0):
        options = planned(
            bits=bits,
            target=1 - allowed,
            walk_recall=0.97,
            ef=ef,
            holds_all=holds_all,
            near_mean=near_mean,
        )
        if near_mean == 0:
            assert "near_mean_loss" not in options
            continue
        near, any_other = options["near_mean_loss"], options["mean_loss"]
        assert options["near_from"] == 0.8
        assert "near_ef" not in options
        if ef is None and holds_all:
            assert near == any_other  # until the vectors are loaded
            continue
        # What the walk leaves, and no less than any query may.
        assert near * lost == pytest.approx(max(allowed - (1 - near_mean), any_other * lost))


def test_the_target_itself_is_asked_of_walks_only_where_the_re_rank_loses_nothing() -> None:
    settings = IndexSettings(recall_target=0.9)
    assert sure_of_walk(settings, None, holds_all=True) == 0.9
    assert sure_of_walk(settings, 0.95, holds_all=True) == 0.95
    assert sure_of_walk(settings, 0.95, holds_all=False) is None
    assert sure_of_walk(settings, 0.99, holds_all=False) == 0.99
