"""What is said of the mean recall of queries that calibration did not draw."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stoker.index.calibrated import Calibration, wrong_with
from stoker.index.calibration import _sure_mean
from stoker.index.recall_bounds import narrowest

BLANK = Calibration(
    queries=512,
    k=10,
    confidence=0.95,
    ef=(16, 32, 64, 128),
    recall_mean=(0.90, 0.94, 0.96, 0.98),
    recall_low=(0.0, 0.0, 0.0, 0.0),
    upper_mean=0.0,
    upper_low=0.0,
    code_recall=0.0,
    refined_recall=0.0,
    code_error=0.0,
    refine_error=0.0,
    entry_mean=(0.93, 0.96, 0.97, 0.98),
    entry_low=(0.0, 0.0, 0.0, 0.0),
    entry_strange_mean=(),
    entry_strange_low=(),
    entry_cost=1.5,
    recall_sure=(0.89, 0.93, 0.949, 0.975),
    entry_sure=(0.92, 0.951, 0.965, 0.975),
)


@pytest.mark.parametrize("lost", [0.04, 0.1, 0.2])
def test_unseen_queries_reach_what_draws_are_sure_of(lost: float) -> None:
    """Recall as walks have it: most queries find all, some miss many."""
    rng = np.random.default_rng(3)
    misses = rng.random((2_000, 256)) < 2 * lost
    recall = 1.0 - misses * rng.uniform(0, 1, misses.shape)
    sure = np.array([_sure_mean(draw) for draw in recall])
    # 5 % were the sum of so many skewed losses quite normal.
    assert np.mean(sure > 1.0 - lost) <= 0.1
    assert sure.mean() > 1.0 - lost - 0.25 * lost**0.5


def test_few_that_found_all_say_less_than_many() -> None:
    sure = [_sure_mean(np.ones(count)) for count in (8, 32, 256)]
    assert sure == sorted(sure)
    assert sure[0] < 0.98
    assert sure[-1] > 0.999


def test_the_cheapest_walk_that_is_enough_by_either_rule_is_taken() -> None:
    assert narrowest(BLANK, 4, wanted=0.975) == (128, False)
    # At 1.5 times the width it is surely enough where the other is not yet.
    assert narrowest(BLANK, 4, wanted=0.975, sure=0.95) == (32, True)
    assert narrowest(BLANK, 4, wanted=0.975, sure=0.92) == (16, True)
    assert narrowest(BLANK, 4, wanted=0.94, sure=0.97) == (32, False)
    # Neither: the walk that lacks least of either.
    assert narrowest(BLANK, 4, wanted=0.995, sure=0.99) == (128, False)
    before = dataclasses.replace(BLANK, recall_sure=(), entry_sure=())
    assert narrowest(before, 4, wanted=0.975, sure=0.95) == (128, False)


def test_what_no_writer_writes_is_refused() -> None:
    whole = dataclasses.replace(
        BLANK, entry_mean=(), entry_low=(), entry_sure=(), recall_sure=(0.89, 0.93, 0.949, 0.975)
    )
    assert wrong_with(whole, has_coarse=False) is None
    assert wrong_with(dataclasses.replace(whole, recall_sure=()), has_coarse=False) is None
    for wrong in ((0.5,), (0.9, 0.9, 0.9, 1.5), (0.9, 0.9, 0.9, float("nan"))):
        broken = dataclasses.replace(whole, recall_sure=wrong)
        assert wrong_with(broken, has_coarse=False) is not None
    assert wrong_with(dataclasses.replace(whole, entry_sure=(0.9,)), has_coarse=False) is not None
