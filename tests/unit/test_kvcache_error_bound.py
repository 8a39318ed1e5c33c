"""The error bound: its figures, and its coverage on a known truth that tries to break it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache.error_bound import DriftAlarm, ErrorBound, errors_expected_max


def test_no_error_needs_a_little_more_than_the_rule_of_three() -> None:
    # A fixed sample needs ln(1 / alpha) = 3.0; validity at every moment costs the rest.
    assert 3.0 < errors_expected_max(0, 0.05) < 4.0
    assert 4.7 < errors_expected_max(1, 0.05) < 8.0


def test_bound_grows_with_errors_and_confidence_and_stays_near_them() -> None:
    values = [errors_expected_max(errors, 0.05) for errors in range(200)]
    assert all(later > earlier for earlier, later in itertools.pairwise(values))
    assert errors_expected_max(3, 0.001) > errors_expected_max(3, 0.05)
    assert errors_expected_max(1000, 0.05) < 1000 + 5 * math.sqrt(1000)


def test_nothing_known_is_one() -> None:
    bound = ErrorBound(0.05)
    assert bound.upper() == 1.0
    bound.add(verify_ratio=0.5, wrong=False)
    assert bound.upper() == 1.0
    bound.check()


@pytest.mark.parametrize("truth", ["steady", "early", "late", "alternating", "chasing"])
def test_coverage_over_seeds_whatever_the_order(truth: str) -> None:
    """At every moment of 240 runs the bound is above the true mean; 5 % of runs may fail.

    22 of 240 are more than a level of 5 % gives once in 500 times.
    """
    alpha, runs, steps = 0.05, 240, 1_000
    broken = 0
    for seed in range(runs):
        rng = np.random.default_rng((17, seed))
        bound = ErrorBound(alpha)
        weighted = exposed = 0.0  # counted here: the bound's own exposure is under test
        for step in range(steps):
            rate = {
                "steady": 0.01,
                "early": 0.05 if step < 200 else 0.001,
                "late": 0.001 if step < 800 else 0.05,
                "alternating": 0.04 if step % 10 == 0 else 0.0,
                # An adversary that raises the rate whenever the bound looks too good.
                "chasing": 0.2 if (bound.errors / max(bound.exposure, 1.0)) < 0.005 else 0.0,
            }[truth]
            ratio = 1.0 if step % 3 else 0.3
            wrong = bool(rng.random() < ratio and rng.random() < rate)
            bound.add(verify_ratio=ratio, wrong=wrong)
            weighted += ratio * rate
            exposed += ratio
            if weighted / exposed > bound.upper():
                broken += 1
                break
    assert broken <= 22, f"{broken} of {runs} runs broke the bound"


def test_errors_that_it_could_bear_are_those_that_leave_it_below() -> None:
    bound = ErrorBound(0.05)
    assert bound.errors_bearable(0.01, most=3) == -1
    for wrong in (False, True):
        for _ in range(400):
            bound.add(verify_ratio=1.0, wrong=False)
        bound.add(verify_ratio=1.0, wrong=wrong)
        for delta in (0.005, 0.01, 0.02, 0.05):
            found = bound.errors_bearable(delta, most=9)
            after = [
                errors_expected_max(bound.errors + n, 0.05) / bound.exposure for n in range(11)
            ]
            assert found == sum(upper <= delta for upper in after[:10]) - 1
    assert bound.errors_bearable(1.0, most=4) == 4


def test_alarm_is_quiet_within_the_rate_and_loud_beyond() -> None:
    quiet = sounded = 0
    for seed in range(40):
        rng = np.random.default_rng((23, seed))
        alarm = DriftAlarm(rate=0.01)
        quiet += not any(alarm.add(wrong=bool(wrong)) for wrong in rng.random(3_000) < 0.005)
        alarm = DriftAlarm(rate=0.01)
        sounded += any(alarm.add(wrong=bool(wrong)) for wrong in rng.random(600) < 0.08)
    assert quiet >= 39
    assert sounded == 40


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, math.nan])
def test_senseless_levels_are_refused(value: float) -> None:
    with pytest.raises(InputError):
        ErrorBound(value)
    with pytest.raises(InputError):
        errors_expected_max(0, value)
    with pytest.raises(InputError):
        DriftAlarm(rate=value)


def test_senseless_exposure_is_refused() -> None:
    bound = ErrorBound(0.05)
    with pytest.raises(InputError):
        bound.add(verify_ratio=0.0, wrong=False)
    with pytest.raises(InputError):
        errors_expected_max(-1, 0.05)
