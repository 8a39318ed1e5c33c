"""Differing words are weighed by what came of reuses across them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from stoker.kvcache.question import read_question
from stoker.kvcache.reuse_evaluation import Pair, evaluate_reuse
from stoker.kvcache.reuse_policy import ReusePolicy
from stoker.kvcache.reuse_selector import FEATURE_COUNT, PARTS, Features, ReuseSelector
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.telling_words import (
    NO_DIFFERENCES,
    WORDS_MAX,
    Differences,
    TellingWords,
    differences_of,
    places_of,
)
from stoker.kvcache.tenant_lookups import TenantLookups

THINGS = ("report", "invoice", "ledger", "budget", "forecast", "roster", "contract", "manual")
SHOPS = ("sales", "billing", "travel", "payroll", "legal", "vendor", "partner", "support")
SAME_DEEDS = ("deliver", "dispatch", "forward")
OTHER_DEED = "shred"


def between(one: str, other: str) -> Differences:
    return differences_of(read_question(one), read_question(other))


def fitted(words: TellingWords, outcomes: Sequence[tuple[Differences, bool]]) -> Features:
    """Fit to (differences, wrong) as they came; returns what the others say of each."""
    rows = [places_of(differences) for differences, _ in outcomes]
    wrong = np.array([float(wrong) for _, wrong in outcomes])
    return words.fit(rows, wrong, np.arange(len(rows)) % PARTS)


def outcomes_of(count: int, *, seed: int = 5) -> list[tuple[Differences, bool]]:
    """Another shop or another deed is another need; synonyms are not."""
    rng = random.Random(seed)
    outcomes = []
    for _ in range(count):
        thing, shop, deed = rng.choice(THINGS), rng.choice(SHOPS), rng.choice(SAME_DEEDS)
        draw = rng.random()
        other_shop = rng.choice(SHOPS) if draw < 0.3 else shop
        other_deed = OTHER_DEED if 0.3 <= draw < 0.5 else rng.choice(SAME_DEEDS)
        differences = between(
            f"{deed} the {shop} {thing}", f"{other_deed} the {other_shop} {thing}"
        )
        outcomes.append((differences, other_shop != shop or other_deed == OTHER_DEED))
    return outcomes


def taught(outcomes: int, *, seed: int = 5) -> TellingWords:
    words = TellingWords(parts=PARTS)
    fitted(words, outcomes_of(outcomes, seed=seed))
    return words


def test_the_same_whichever_came_first_and_none_for_the_same_words() -> None:
    assert between("ship the sales report", "send the billing report") == between(
        "send the billing report", "ship the sales report"
    )
    assert between("ship the report", "please ship the report") == NO_DIFFERENCES


def test_half_a_character_fails_nothing() -> None:
    """JSON readers other than ours let such texts pass."""
    cut = "emoji \ud83d in names"
    assert read_question(cut).fingerprint == read_question(cut.upper()).fingerprint
    assert between(f"find {cut}x", "find emoji in names") != NO_DIFFERENCES
    assert between(f"find {cut} zz\ud83d", f"find {cut}") == between(
        f"find {cut}", f"find {cut} zz\ud83d"
    )


def test_long_texts_are_bounded() -> None:
    names = ["".join(letters) for letters in itertools.product("bdfgk", "aeiou", "lmnrt")]
    assert len(between(" ".join(names[:60]), " ".join(names[60:]))) == WORDS_MAX
    assert len(between(" ".join(names[:6]), " ".join(names[60:68]))) <= 2 * WORDS_MAX


def test_words_that_told_apart_are_known_from_those_that_did_not() -> None:
    words = taught(600)
    synonym = words.score(between("forward the legal roster", "dispatch the legal roster"))
    deed = words.score(between("forward the legal roster", "shred the legal roster"))
    shop = words.score(between("forward the legal roster", "forward the vendor roster"))
    assert synonym < words.score(NO_DIFFERENCES) + 1.0
    assert min(deed, shop) > synonym + 2.0


def test_each_outcome_is_judged_by_the_others() -> None:
    """A difference that was seen once says nothing of itself, and all there is once it is known."""
    words = TellingWords(parts=PARTS)
    once = between("ship the sales report", "send the billing report")
    outcomes = [*outcomes_of(300), (once, True)]
    judged = fitted(words, outcomes)
    assert words.score(once) > judged[-1]
    wrong = np.array([wrong for _, wrong in outcomes])
    assert judged[wrong].mean() > judged[~wrong].mean() + 2.0
    flipped = [*outcomes[:-1], (once, False)]
    assert fitted(TellingWords(parts=PARTS), flipped)[-1] == judged[-1]


def test_a_fit_follows_the_outcomes_that_are_kept() -> None:
    """After a drift the old ones go; words that only they had weigh nothing any more."""
    words = taught(600)
    shred = between("forward the legal roster", "shred the legal roster")
    elsewhere = between("ship the sales report", "ship the billing report")
    assert words.score(shred) > words.score(NO_DIFFERENCES) + 1.0
    fitted(words, [(elsewhere, True)] * 40 + [(NO_DIFFERENCES, False)] * 40)
    assert words.score(shred) == words.score(NO_DIFFERENCES)
    fitted(words, [(shred, False)] * 40 + [(elsewhere, True)] * 40)
    assert words.score(shred) < words.score(NO_DIFFERENCES)


def test_scores_stay_finite_under_contradiction_and_certainty() -> None:
    words = TellingWords(parts=PARTS)
    one = between("ship the sales report", "send the billing report")
    for _ in range(5):
        judged = fitted(words, [(one, number % 2 == 0) for number in range(3_000)])
        assert np.all(np.isfinite(judged))
    assert abs(words.score(one)) < 1.0
    for _ in range(20):
        assert np.all(np.isfinite(fitted(words, [(one, True)] * 3_000)))
    assert 3.0 < words.score(one) < 100.0
    assert len(fitted(words, [(NO_DIFFERENCES, False)] * 3)) == 3


@pytest.mark.parametrize("seed", range(2))
def test_what_cosine_cannot_tell_is_reused_by_its_words(seed: int) -> None:
    """Every pair has one cosine: only the words say which half is wrong, and they do."""
    rng = random.Random(seed)
    one, other = np.eye(2, dtype=np.float32)
    near = (0.9 * one + np.sqrt(0.19) * other).astype(np.float32)
    pairs = []
    while len(pairs) < 2_500:
        thing, shop, deed = rng.choice(THINGS), rng.choice(SHOPS), rng.choice(SAME_DEEDS)
        same = rng.random() < 0.5
        other_shop = shop if same else rng.choice([s for s in SHOPS if s != shop])
        number = "".join(rng.choice("bdfgkl") for _ in range(6))  # no two pairs alike
        first = f"{deed} the {shop} {thing} {number}"
        second = f"{rng.choice(SAME_DEEDS)} the {other_shop} {thing} {number}"
        if first != second:
            pairs.append(Pair(first, second, same, one, near))
    found = evaluate_reuse(pairs, delta=0.02)
    assert found.reused_true > 300, "nothing but the words tells these apart"
    assert found.false_share_upper <= 0.02
    assert found.fixed_same_bound.reused == 0


def test_a_policy_learns_words_from_refused_and_from_picked_alike() -> None:
    policy = ReusePolicy(delta=0.01, alpha=0.05, verify_ratio=0.1)
    told = between("forward the legal roster", "shred the legal roster")
    features = np.zeros(FEATURE_COUNT)
    features[0] = 1.0

    def chance() -> float:
        return policy.decide(features, 0.5, differences=told).error_chance

    for _ in range(policy.LEARN_MIN):
        policy.learn(policy.refuse(), features, same=False, differences=told)
        policy.learn(policy.decide(features, 0.5), features, same=True)
    after_refusals = chance()
    assert after_refusals > policy.decide(features, 0.5).error_chance
    for _ in range(2 * policy.LEARN_MIN):
        verdict = policy.decide(features, 0.5, differences=told)
        policy.learn(verdict, features, same=True, differences=told)
    assert chance() < after_refusals


def test_what_a_tenants_policy_takes_is_counted() -> None:
    policy = ReusePolicy(delta=0.01, alpha=0.05, verify_ratio=0.1)
    empty = TenantLookups(KvcacheSettings(), dim=4, policy=policy).bytes()
    assert empty >= policy.bytes() >= 4 * 2**14  # the words' weights are there at once
    selector = ReuseSelector(history_max=policy.HISTORY_MAX)
    rng, features = np.random.default_rng(7), np.zeros(FEATURE_COUNT)
    for _ in range(policy.HISTORY_MAX + 500):  # as many differences as there can be
        told = tuple(rng.integers(0, 2**14, 2 * WORDS_MAX).tolist())
        selector.add(features, wrong=False, refused=False, differences=told)
    before = selector.bytes()
    selector.fit()
    assert selector.bytes() > before >= policy.HISTORY_MAX * (features.nbytes + 2 * 24)
    assert selector.bytes() <= 4_000_000
