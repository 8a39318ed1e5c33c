"""The policy on a known truth, over many seeds: reused lookups are wrong at most delta of the time.

The truth is a chance of error that falls with nearness, unknown to the policy; after a drift the
nearest candidates are the wrong ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from stoker.kvcache.question import read_question
from stoker.kvcache.reuse_policy import FitTask, Reason, ReusePolicy, Verdict
from stoker.kvcache.reuse_selector import FEATURE_COUNT, NO_NEIGHBORHOOD, pair_features

DELTA, ALPHA = 0.03, 0.05
SAME = read_question("what is a page pool")


def run(seed: int, *, steps: int, drift_at: int | None) -> tuple[float, int, int]:
    """Return (sum of true error chances of the reuses, reuses, reuses after the drift)."""
    rng = np.random.default_rng((53, seed))
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.2)
    expected = 0.0
    reuses = after = 0
    for step in range(steps):
        similarity = 1.0 - 0.4 * float(rng.beta(1.0, 4.0))
        drifted = drift_at is not None and step >= drift_at
        chance = 0.4 if drifted else float(1 / (1 + np.exp(40 * (similarity - 0.86))))
        features = pair_features(SAME, SAME, similarity=similarity, around=NO_NEIGHBORHOOD)
        verdict: Verdict = policy.decide(features, float(rng.random()))
        wrong = bool(rng.random() < chance)
        if verdict.allowed:
            assert verdict.bound <= DELTA
            expected += chance
            reuses += 1
            after += drifted
        if verdict.verify:
            policy.learn(verdict, features, same=not wrong)
        else:
            policy.skip(verdict)
        if step % 200 == 0:
            policy.check()
    return expected, reuses, after


def test_coverage_over_seeds() -> None:
    seeds, broken, reused = 30, 0, 0
    for seed in range(seeds):
        expected, reuses, _ = run(seed, steps=2_500, drift_at=None)
        broken += expected > DELTA * reuses
        reused += reuses
    assert broken <= max(1, ALPHA * seeds), f"{broken} of {seeds} runs broke delta"
    assert reused > 150 * seeds, "a policy that never reuses proves nothing here"


@pytest.mark.parametrize("seed", range(3))
def test_errors_that_guards_refuse_do_not_delay_the_proof(seed: int) -> None:
    """Half of the pairs are wrong, look like the others, and are refused: the rest is clean."""
    rng = np.random.default_rng((67, seed))
    policy = ReusePolicy(delta=0.01, alpha=ALPHA, verify_ratio=0.1)
    clean = 0
    for _ in range(2_000):
        features = pair_features(
            SAME, SAME, similarity=1.0 - 0.2 * float(rng.random()), around=NO_NEIGHBORHOOD
        )
        wrong = bool(rng.random() < 0.5)
        verdict = policy.refuse() if wrong else policy.decide(features, float(rng.random()))
        clean += not wrong
        if verdict.allowed:
            break
        policy.learn(verdict, features, same=not wrong)
    assert clean <= 700, "355 clean picks prove 1 %: twice as many candidates are enough"


def test_reuses_are_watched_by_what_the_proof_could_bear() -> None:
    """All are verified while one error would end the proof, then fewer, never under the least."""
    rng = np.random.default_rng(59)
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.1)
    ratios = []
    for _ in range(2_500):
        features = pair_features(
            SAME, SAME, similarity=1.0 - 0.2 * float(rng.random()), around=NO_NEIGHBORHOOD
        )
        verdict = policy.decide(features, float(rng.random()))
        if verdict.allowed:
            ratios.append(verdict.verify_ratio)
        if verdict.verify:
            policy.learn(verdict, features, same=True)
        else:
            policy.skip(verdict)
    assert ratios[0] == 1.0
    assert set(ratios) == {1.0, 0.5, 0.25, 0.125, 0.1}
    assert ratios == sorted(ratios, reverse=True), "no error came, so the proof only grew"


@pytest.mark.parametrize("seed", range(3))
def test_room_for_errors_is_not_spent_on_what_is_likely_wrong(seed: int) -> None:
    """One candidate in fifty is far away and wrong half of the time: delta has room for all."""
    rng = np.random.default_rng((101, seed))
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.2)
    reused, likely_wrong = 0, 0
    for _ in range(1_500):
        far = bool(rng.random() < 0.02)
        similarity = 0.6 if far else 1.0 - 0.1 * float(rng.random())
        features = pair_features(SAME, SAME, similarity=similarity, around=NO_NEIGHBORHOOD)
        verdict = policy.decide(features, float(rng.random()))
        reused += verdict.allowed
        likely_wrong += verdict.allowed and far
        if verdict.verify:
            policy.learn(verdict, features, same=not far or bool(rng.random() < 0.5))
        else:
            policy.skip(verdict)
    assert reused > 900
    assert likely_wrong == 0


def unchecked(seed: int, *, wrong_only: bool, told: bool, policy: ReusePolicy) -> tuple[int, int]:
    """Prove on clean picks, then lose checks; return reuses from then on, and the wrong ones.

    Args:
        wrong_only: One pick in four is wrong, and exactly their checks are lost; else all are
            wrong and all checks are lost.
        told: Whether the owner says so; else it never comes back.
    """
    rng = np.random.default_rng((89, seed))
    reuses = wrong_reuses = 0
    for step in range(4_000):
        features = pair_features(
            SAME, SAME, similarity=1.0 - 0.2 * float(rng.random()), around=NO_NEIGHBORHOOD
        )
        verdict = policy.decide(features, float(rng.random()))
        late = step >= 1_000
        wrong = late and (not wrong_only or bool(rng.random() < 0.25))
        lost = late and (wrong or not wrong_only)
        reuses += late and verdict.allowed
        wrong_reuses += wrong and verdict.allowed
        if not verdict.verify:
            policy.skip(verdict)
        elif not lost:
            policy.learn(verdict, features, same=not wrong)
        elif told and verdict.allowed:
            policy.lose(verdict)
        if step % 100 == 0:
            policy.check()
    return reuses, wrong_reuses


@pytest.mark.parametrize("told", [True, False], ids=["told", "silent"])
@pytest.mark.parametrize("wrong_only", [True, False], ids=["of-wrong-ones", "all"])
@pytest.mark.parametrize("seed", range(2))
def test_no_reuse_rests_on_checks_that_find_nothing(
    seed: int, wrong_only: bool, told: bool
) -> None:
    """However clean the past was, reuse ends once checks are lost, and soon where that is told."""
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.1)
    reuses, wrong = unchecked(seed, wrong_only=wrong_only, told=told, policy=policy)
    # Errors that the proof of before could bear, by the share that was checked; then open checks.
    most = 200 if told else 200 + 10 * policy.CHECKS_OPEN_MAX
    assert 0 < wrong <= most
    assert reuses < 2_900, "of the 3,000 that came"


def test_a_check_is_counted_once() -> None:
    """Given up and then told all the same, told twice, or given up twice: one error, one look."""
    rng = np.random.default_rng(97)
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.1)
    while True:
        features = pair_features(
            SAME, SAME, similarity=1.0 - 0.2 * float(rng.random()), around=NO_NEIGHBORHOOD
        )
        verdict = policy.decide(features, 0.0)
        if verdict.allowed:
            break
        policy.lose(verdict)  # a refusal promised no check
        policy.learn(verdict, features, same=True)
    stood, errors = policy.exposure(), policy.errors()
    policy.lose(verdict)
    assert (policy.exposure(), policy.errors()) == (stood + 1.0, errors + 1)
    policy.lose(verdict)
    policy.learn(verdict, features, same=True)
    assert (policy.exposure(), policy.errors()) == (stood + 1.0, errors + 1)


def test_drift_ends_the_proofs_that_stood() -> None:
    rng = np.random.default_rng(61)
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.2)
    stood = 0.0
    for step in range(2_000):
        features = pair_features(
            SAME, SAME, similarity=1.0 - 0.2 * float(rng.random()), around=NO_NEIGHBORHOOD
        )
        verdict = policy.decide(features, float(rng.random()))
        if step == 1_200:
            stood = policy.exposure()
            assert policy.bound() <= DELTA
        if verdict.verify:
            policy.learn(verdict, features, same=step < 1_200 or bool(rng.random() < 0.5))
        else:
            policy.skip(verdict)
        if step > 1_200 and policy.exposure() < 0.5 * stood:
            break
    else:
        pytest.fail("a proof of before the drift is still counted on")
    assert policy.bound() > DELTA


def test_after_drift_reuse_ends_before_much_is_wrong() -> None:
    reused = 0
    for seed in range(6):
        _, reuses, after = run(seed, steps=3_200, drift_at=2_500)
        reused += reuses
        assert after < 60, f"seed {seed}: {after} reuses after the drift, 40 % of them wrong"
    assert reused > 600


def fed(*, fits_apart: bool, late: int) -> tuple[list[Verdict], ReusePolicy]:
    """Feed a stream; fits that are due apart are taken ``late`` outcomes later."""
    rng = np.random.default_rng(79)
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.2, fits_apart=fits_apart)
    verdicts: list[Verdict] = []
    waiting: list[tuple[int, FitTask]] = []
    for step in range(500):
        similarity = 1.0 - 0.4 * float(rng.beta(1.0, 4.0))
        features = pair_features(SAME, SAME, similarity=similarity, around=NO_NEIGHBORHOOD)
        verdict = policy.decide(features, float(rng.random()))
        verdicts.append(verdict)
        if verdict.verify:
            policy.learn(verdict, features, same=similarity > 0.7)
        else:
            policy.skip(verdict)
        task = policy.fit_due()
        assert fits_apart or task is None
        if task is not None:
            assert policy.fit_due() is None, "one fit at a time"
            waiting.append((step + late, task))
        if waiting and waiting[0][0] <= step:
            _, ready = waiting.pop(0)
            policy.end_fit(ready, ready.run())
    policy.check()
    return verdicts, policy


def test_a_fit_apart_finds_what_a_fit_at_once_does() -> None:
    at_once, _ = fed(fits_apart=False, late=0)
    apart, _ = fed(fits_apart=True, late=0)
    assert [(v.allowed, v.reason, v.bound) for v in apart] == [
        (v.allowed, v.reason, v.bound) for v in at_once
    ]
    assert any(verdict.allowed for verdict in at_once)
    reasons = {verdict.reason for verdict in at_once}
    assert {Reason.LEARNING, Reason.PROVING, Reason.REUSED} <= reasons


def test_a_fit_that_takes_long_breaks_no_proof() -> None:
    verdicts, _ = fed(fits_apart=True, late=25)
    assert any(verdict.allowed for verdict in verdicts)
    assert all(verdict.bound <= DELTA for verdict in verdicts if verdict.allowed)


def test_a_fit_of_before_a_drift_is_not_taken_after_it() -> None:
    policy = ReusePolicy(delta=DELTA, alpha=ALPHA, verify_ratio=0.2, fits_apart=True)
    rng = np.random.default_rng(83)
    task: FitTask | None = None
    for step in range(2_000):
        features = pair_features(
            SAME, SAME, similarity=1.0 - 0.2 * float(rng.random()), around=NO_NEIGHBORHOOD
        )
        verdict = policy.decide(features, 0.0)
        policy.learn(verdict, features, same=task is None)
        if task is not None and not policy.exposure():
            break  # the alarm ended the proofs
        due = policy.fit_due()
        if due is not None and step < 500:
            policy.end_fit(due, due.run())
        elif due is not None:
            task = due  # it runs while the world changes
    else:
        pytest.fail("no alarm")
    assert verdict.proofs
    policy.learn(verdict, features, same=False)  # decided before the alarm, known after it
    assert task is not None
    policy.end_fit(task, task.run())
    assert not policy.decide(features, 0.0).proofs, "what the old fit liked is not picked"
    after = policy.fit_due()
    assert after is not None, "the fit that the drift asked for waited for the old one"
    policy.end_fit(after, None)  # and one that found nothing makes room for the next
    policy.check()


def test_features_are_finite_for_anything() -> None:
    for one, other in (("", "a"), ("a" * 500, "?"), ("not", "5 km in 2024")):
        features = pair_features(
            read_question(one), read_question(other), similarity=-1.5, around=NO_NEIGHBORHOOD
        )
        assert features.shape == (FEATURE_COUNT,)
        assert np.all(np.isfinite(features))


@pytest.mark.parametrize("value", [0.0, 1.01, -0.1])
def test_senseless_settings_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="expected a value in"):
        ReusePolicy(delta=value, alpha=0.05, verify_ratio=0.1)
