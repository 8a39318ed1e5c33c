"""Differing words are weighed by what came of reuses across them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from stoker.kvcache.question import read_question
from stoker.kvcache.reuse_evaluation import Pair, evaluate_reuse
from stoker.kvcache.reuse_policy import ReusePolicy
from stoker.kvcache.reuse_selector import FEATURE_COUNT
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.telling_words import (
    NO_DIFFERENCES,
    WORDS_MAX,
    Differences,
    TellingWords,
    differences_of,
)
from stoker.kvcache.tenant_lookups import TenantLookups

THINGS = ("report", "invoice", "ledger", "budget", "forecast", "roster", "contract", "manual")
SHOPS = ("sales", "billing", "travel", "payroll", "legal", "vendor", "partner", "support")
SAME_DEEDS = ("deliver", "dispatch", "forward")
OTHER_DEED = "shred"


def between(one: str, other: str) -> Differences:
    return differences_of(read_question(one), read_question(other))


def taught(outcomes: int, *, seed: int = 5) -> TellingWords:
    """Another shop or another deed is another need; synonyms are not."""
    rng = random.Random(seed)
    words = TellingWords()
    for _ in range(outcomes):
        thing, shop, deed = rng.choice(THINGS), rng.choice(SHOPS), rng.choice(SAME_DEEDS)
        draw = rng.random()
        other_shop = rng.choice(SHOPS) if draw < 0.3 else shop
        other_deed = OTHER_DEED if 0.3 <= draw < 0.5 else rng.choice(SAME_DEEDS)
        differences = between(
            f"{deed} the {shop} {thing}", f"{other_deed} the {other_shop} {thing}"
        )
        words.learn(differences, wrong=other_shop != shop or other_deed == OTHER_DEED)
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


def test_what_was_learnt_changes_quickly_once_it_is_to_be_learnt_again() -> None:
    """After 600 outcomes a weight moves little with each; after a drift it moves as at first."""
    after = {}
    for relearnt in (False, True):
        words = taught(600)
        if relearnt:
            words.relearn()
        shred = between("forward the legal roster", "shred the legal roster")
        for _ in range(6):
            words.learn(shred, wrong=False)
        after[relearnt] = words.score(shred)
    assert after[True] < after[False] - 0.5


def test_scores_stay_finite_under_contradiction() -> None:
    words = TellingWords()
    one = between("ship the sales report", "send the billing report")
    for number in range(3_000):
        words.learn(one, wrong=number % 2 == 0)
        assert np.isfinite(words.score(one))
    for _ in range(3_000):
        words.learn(one, wrong=True)
    assert 3.0 < words.score(one) < 100.0


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
    before = policy.telling(told)
    features = np.zeros(3)
    policy.learn(policy.refuse(), features, same=False, differences=told)
    after_refusal = policy.telling(told)
    policy.learn(policy.decide(features, 0.5), features, same=False, differences=told)
    assert before < after_refusal < policy.telling(told)


def test_what_a_tenants_policy_takes_is_counted() -> None:
    settings = KvcacheSettings()
    policy = ReusePolicy(delta=0.01, alpha=0.05, verify_ratio=0.1)
    lookups = TenantLookups(settings, dim=4, policy=policy)
    empty = lookups.bytes()
    assert empty >= policy.bytes() >= 2 * 4 * 2**14  # the words' weights are there at once
    features = np.zeros(FEATURE_COUNT)
    for _ in range(2 * policy.HISTORY_MAX):
        policy.learn(policy.refuse(), features, same=True)
    held = lookups.bytes() - empty
    assert held >= policy.HISTORY_MAX * features.nbytes
    assert policy.bytes() <= 2_500_000
