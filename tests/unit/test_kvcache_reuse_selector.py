"""The selector ranks candidates by outcomes, and counts errors by halves that had not seen them."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.kvcache.error_bound import errors_expected_max, errors_planned, exposure_needed
from stoker.kvcache.question import read_question
from stoker.kvcache.reuse_evaluation import share_upper
from stoker.kvcache.reuse_selector import (
    FEATURE_COUNT,
    NO_NEIGHBORHOOD,
    ReuseSelector,
    pair_features,
)

SAME = read_question("what is a page pool")


def taught(count: int, *, seed: int, refused_wrong: bool = False) -> ReuseSelector:
    """Feature 1 says it all: above 0.5 is always wrong; refused ones lie the other way round."""
    rng = np.random.default_rng((71, seed))
    selector = ReuseSelector(history_max=count)
    for number in range(count):
        features = rng.random(FEATURE_COUNT)
        features[0] = 1.0
        refused = refused_wrong and number % 3 == 0
        wrong = bool(features[1] < 0.5 if refused else features[1] > 0.5)
        selector.add(features, wrong=wrong, refused=refused)
    selector.fit()
    selector.check()
    return selector


def test_the_safest_come_first_and_errors_are_counted_out_of_sample() -> None:
    chances, errors = taught(600, seed=0).ranked()
    assert len(chances) == len(errors) == 600
    assert np.all(np.diff(chances) >= 0)
    assert errors[200] == 0.0
    assert errors[-1] == pytest.approx(300, abs=40)


def test_a_sharp_truth_learnt_step_by_step_is_not_lost() -> None:
    """Refitted as it grows, each fit from the last: the wrong ones stay the unlikely ones."""
    rng = np.random.default_rng(59)
    selector = ReuseSelector(history_max=3_000)
    for number in range(2_500):
        similarity = 1.0 - 0.4 * float(rng.beta(1.0, 4.0))
        features = pair_features(SAME, SAME, similarity=similarity, around=NO_NEIGHBORHOOD)
        selector.add(features, wrong=similarity <= 0.75, refused=False)
        if number >= 60 and number % 50 == 0:
            selector.fit()
    safe, wrong = (
        selector.chance(pair_features(SAME, SAME, similarity=at, around=NO_NEIGHBORHOOD))
        for at in (0.95, 0.65)
    )
    assert safe < 0.01 < 0.9 < wrong


def test_noise_is_not_believed() -> None:
    """Where outcomes are coin flips a selector finds nothing, and its own count says so."""
    rng = np.random.default_rng(3)
    selector = ReuseSelector(history_max=400)
    for _ in range(400):
        selector.add(rng.random(FEATURE_COUNT), wrong=bool(rng.random() < 0.5), refused=False)
    selector.fit()
    _, errors = selector.ranked()
    assert errors[99] > 30


def test_what_guards_refuse_says_nothing_of_the_rest() -> None:
    selector = taught(900, seed=1, refused_wrong=True)
    chances, errors = selector.ranked()
    assert len(chances) == 600, "only candidates that no guard refused are ranked"
    assert errors[200] < 10
    low, high = np.full(FEATURE_COUNT, 0.5), np.full(FEATURE_COUNT, 0.5)
    low[0] = high[0] = 1.0
    low[1], high[1] = 0.1, 0.9
    assert selector.chance(low) < 0.2 < 0.8 < selector.chance(high)


def test_only_the_newest_are_kept() -> None:
    selector = taught(300, seed=2)
    selector.keep_newest(100)
    selector.fit()
    assert len(selector.ranked()[0]) == 100


def test_exposure_needed_is_what_the_bound_then_asks() -> None:
    alpha = 0.03
    assert exposure_needed(0.0, alpha) == pytest.approx(errors_expected_max(0, alpha), abs=1e-6)
    after_two = exposure_needed(0.0, alpha, errors=2, held=4.0)
    assert after_two == pytest.approx(errors_expected_max(2, alpha) - 4.0, abs=1e-6)
    assert exposure_needed(0.5, alpha) > exposure_needed(0.25, alpha) > exposure_needed(0.0, alpha)
    assert exposure_needed(0.99, alpha) == float("inf")


@pytest.mark.parametrize("reuses", [100, 299, 300, 473, 1_000, 5_000])
def test_a_run_as_planned_nearly_always_shows_delta(reuses: int) -> None:
    delta, alpha = 0.01, 0.05
    planned = errors_planned(reuses * delta, alpha)
    if reuses < 299:
        assert planned == 0.0, "no run of that length can show 1 %"
        return
    rng = np.random.default_rng(reuses)
    wrong = rng.binomial(reuses, planned / reuses, size=2_000)
    shown = np.array([share_upper(int(count), reuses, alpha) <= delta * 1.005 for count in wrong])
    assert 0.955 < shown.mean() < 1.0 or planned == pytest.approx(0.0)
