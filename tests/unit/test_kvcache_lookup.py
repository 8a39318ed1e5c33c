"""Lookup reuse: exact repeats, guards in place, the proof before reuse, tenants, bounds."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import ConfigError, InputError
from stoker.kvcache.guards import Guard
from stoker.kvcache.lookup import LookupReuse, Refusal, Reuse
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tenant_lookups import Fence

DIM = 16
FENCE = Fence(generation=1, change_offset=10)
IDS = [f"d{number}" for number in range(10)]


def vector_of(seed: int) -> NDArray[np.float32]:
    vector = np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def near(vector: NDArray[np.float32], cosine: float, seed: int) -> NDArray[np.float32]:
    """Return a unit vector at exactly this cosine, in a random direction."""
    other = vector_of(seed)
    other -= vector * float(other @ vector)
    other /= np.linalg.norm(other)
    return np.float32(cosine) * vector + np.float32(np.sqrt(1 - cosine**2)) * other


def filled(**changes: object) -> LookupReuse:
    settings = dataclasses.replace(KvcacheSettings(), **changes)  # type: ignore[arg-type]
    reuse = LookupReuse(settings, rng=random.Random(5))
    reuse.store("acme", "How do I delete a topic?", vector_of(1), IDS, np.arange(10.0), FENCE)
    return reuse


def test_exact_repeat_is_reused_with_nothing_to_prove() -> None:
    decision = filled().lookup("acme", "How do I delete a topic?", vector_of(1), FENCE)
    assert isinstance(decision, Reuse)
    assert decision.exact
    assert decision.bound == 0.0
    assert list(decision.result_ids) == IDS
    assert decision.scores.tolist() == list(range(10))
    assert decision.source_text == "How do I delete a topic?"
    assert decision.similarity == pytest.approx(1.0, abs=1e-6)


def test_same_text_with_another_embedding_is_not_exact() -> None:
    decision = filled().lookup("acme", "How do I delete a topic?", vector_of(2), FENCE)
    assert isinstance(decision, Refusal)


@pytest.mark.parametrize(
    ("text", "seed", "fence", "guard"),
    [
        ("How do I delete a topic?", 1, Fence(2, 10), Guard.FENCE),
        ("How do I delete a topic?", 1, Fence(1, 11), Guard.FENCE),
        ("How do I not delete a topic?", 1, FENCE, Guard.NEGATION),
        ("How do I delete 5 topics?", 1, FENCE, Guard.NUMBER),
        ("how can I delete topics", 1, FENCE, Guard.EVIDENCE),
        ("What is a broker?", 3, FENCE, Guard.SIMILARITY),
        ("", 1, FENCE, Guard.EMPTY),
        ("?!", 1, FENCE, Guard.EMPTY),
        ("a" * 5_000, 1, FENCE, Guard.EMPTY),
        ("emoji \ud83d cut in half", 1, FENCE, Guard.EVIDENCE),
    ],
)
def test_refusal_names_the_guard(text: str, seed: int, fence: Fence, guard: Guard) -> None:
    decision = filled().lookup("acme", text, vector_of(seed), fence)
    assert isinstance(decision, Refusal)
    assert decision.guard is guard


def test_disabled_says_so_and_keeps_nothing() -> None:
    reuse = filled(reuse_enabled=False)
    decision = reuse.lookup("acme", "How do I delete a topic?", vector_of(1), FENCE)
    assert decision == Refusal(Guard.DISABLED)
    assert reuse.counts("acme")["entries"] == 0


def test_tenants_never_see_each_other() -> None:
    reuse = filled()
    decision = reuse.lookup("rival", "How do I delete a topic?", vector_of(1), FENCE)
    assert decision == Refusal(Guard.NO_CANDIDATE)
    reuse.store("rival", "How do I delete a topic?", vector_of(1), ["secret"], [1.0], FENCE)
    ours = reuse.lookup("acme", "How do I delete a topic?", vector_of(1), FENCE)
    theirs = reuse.lookup("rival", "How do I delete a topic?", vector_of(1), FENCE)
    assert isinstance(ours, Reuse)
    assert isinstance(theirs, Reuse)
    assert list(ours.result_ids) == IDS
    assert theirs.result_ids == ("secret",)
    reuse.record_change("rival", Fence(1, 11), changed_ids=["d0"], vectors=None)
    assert isinstance(reuse.lookup("acme", "How do I delete a topic?", vector_of(1), FENCE), Reuse)
    reuse.forget("rival")
    assert reuse.lookup("rival", "x", vector_of(1), FENCE) == Refusal(Guard.NO_CANDIDATE)


@pytest.mark.parametrize("let_go", [False, True])
def test_what_another_policy_decided_is_no_part_of_a_proof(let_go: bool) -> None:
    reuse = filled()
    text, vector = "how can I delete topics", vector_of(1)
    decision = reuse.lookup("acme", text, vector, FENCE)
    if let_go:
        reuse.forget("acme")
    reuse.store("acme", text, vector, IDS, np.arange(10.0), FENCE, after=decision)
    assert len(reuse._tenants["acme"].policy._selector.outcomes().rows) == (0 if let_go else 1)
    reuse.check()


def test_proof_comes_before_reuse_and_a_rule_that_fails_is_stopped() -> None:
    """Right paraphrases are proved and then reused; when they turn wrong, reuse ends."""
    reuse = LookupReuse(KvcacheSettings(reuse_entries_max=200), rng=random.Random(5))
    topics = [vector_of(number) for number in range(20)]
    first_reuse = None
    reuses_after = 0
    for step in range(4_000):
        broken = step >= 3_000
        topic = step % 20
        vector = near(topics[topic], 0.97, 100 + step)
        text = f"please explain topic{'abcdefghijklmnopqrst'[topic]}" + " again" * (step % 7)
        truth = [f"{topic}-{step if broken else ''}-{rank}" for rank in range(10)]
        decision = reuse.lookup("acme", text, vector, FENCE)
        if isinstance(decision, Reuse):
            assert not decision.exact
            assert decision.bound <= 0.01
            first_reuse = step if first_reuse is None else first_reuse
            reuses_after += broken
        if isinstance(decision, Refusal) or decision.verify:
            reuse.store("acme", text, vector, truth, np.ones(10), FENCE, after=decision)
    assert first_reuse is not None
    assert first_reuse > 360, "nothing can be proved at 1 % from fewer outcomes"
    assert reuses_after < 100, "every one of them was wrong"
    reuse.check()


@pytest.mark.parametrize("let_go", [False, True])
def test_a_check_that_was_given_up_counts_as_wrong(let_go: bool) -> None:
    """But not in the proof of a policy that never asked for it."""
    reuse = LookupReuse(KvcacheSettings(reuse_delta=0.5), rng=random.Random(7))
    for step in range(200):
        vector = near(vector_of(1), 0.97, 100 + step)
        text = f"please explain topic{'abcdefghijklmnopqrst'[step % 20]}" + " again" * (step // 20)
        decision = reuse.lookup("acme", text, vector, FENCE)
        reuse.give_up("acme", Refusal(Guard.SIMILARITY))
        if isinstance(decision, Reuse) and decision.verify:
            break
        reuse.store("acme", text, vector, IDS, np.ones(10), FENCE, after=decision)
    else:
        pytest.fail("nothing was reused")
    if let_go:
        reuse.forget("acme")
        reuse.store("acme", text, vector, IDS, np.ones(10), FENCE)
    before = reuse.counts("acme")
    for _ in range(2):
        reuse.give_up("acme", decision)
    after = reuse.counts("acme")
    assert after["errors"] - before["errors"] == (0 if let_go else 1)
    assert after["exposure"] - before["exposure"] == (0 if let_go else 1)
    reuse.check()


def test_only_as_many_as_are_wanted_are_given_and_judged() -> None:
    """The first three of ten were right; the other seven were never given to anybody."""
    reuse = filled()
    asked, vector = "how can I delete topics", vector_of(1)
    exact = reuse.lookup("acme", "How do I delete a topic?", vector, FENCE, results=3)
    assert isinstance(exact, Reuse)
    assert list(exact.result_ids) == IDS[:3]
    assert exact.scores.tolist() == [0.0, 1.0, 2.0]
    few = reuse.lookup("acme", asked, vector, FENCE, results=3)
    assert few.trial is not None
    assert list(few.trial.result_ids) == IDS[:3]
    reuse.store("acme", "other", vector, IDS[:3], np.ones(3), FENCE, after=few)
    state = reuse._tenants["acme"].policy
    assert state._selector._wrong[-1] == 0.0
    other = reuse.lookup("acme", asked, vector, FENCE, results=3)
    # Of the earlier ten, but not of the three that would have been given.
    reuse.store("acme", "third", vector, IDS[5:8], np.ones(3), FENCE, after=other)
    assert state._selector._wrong[-1] == 1.0


def test_an_earlier_lookup_with_fewer_results_is_no_candidate() -> None:
    reuse = filled()
    for text in ("How do I delete a topic?", "how can I delete topics"):
        decision = reuse.lookup("acme", text, vector_of(1), FENCE, results=11)
        assert isinstance(decision, Refusal)
        assert decision.guard is Guard.FEWER_RESULTS
        assert decision.trial is None, "nothing was offered, so nothing is learnt of it"


def test_wrong_reuse_found_by_verification_is_dropped() -> None:
    reuse = filled()
    decision = reuse.lookup("acme", "how can I delete topics", vector_of(1), FENCE)
    assert isinstance(decision, Refusal)
    assert decision.trial is not None
    reuse.store(
        "acme", "how can I delete topics", vector_of(1), ["other"], [1.0], FENCE, after=decision
    )
    assert reuse.counts("acme")["entries"] == 2
    reuse.check()


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    reuse = LookupReuse(KvcacheSettings(reuse_entries_max=8, reuse_exact_entries_max=4))
    for number in range(30):
        reuse.store("acme", f"question {number}x", vector_of(number), ["d"], [1.0], FENCE)
        reuse.lookup("acme", "question 0x", vector_of(0), FENCE)  # keeps the first one in use
        reuse.check()
    assert reuse.counts("acme")["entries"] == 8
    assert isinstance(reuse.lookup("acme", "question 0x", vector_of(0), FENCE), Reuse)
    assert isinstance(reuse.lookup("acme", "question 29x", vector_of(29), FENCE), Reuse)
    assert isinstance(reuse.lookup("acme", "question 5x", vector_of(5), FENCE), Refusal)


def test_tenants_are_bounded() -> None:
    reuse = LookupReuse(KvcacheSettings(reuse_tenants_max=2))
    for name in ("a", "b", "c"):
        reuse.store(name, "question", vector_of(1), ["d"], [1.0], FENCE)
    assert isinstance(reuse.lookup("a", "question", vector_of(1), FENCE), Refusal)
    assert isinstance(reuse.lookup("c", "question", vector_of(1), FENCE), Reuse)
    reuse.check()


def test_change_that_cannot_matter_keeps_the_entry() -> None:
    reuse = LookupReuse()
    query = vector_of(1)
    for tenant in ("far", "near", "held", "unknown"):
        reuse.store(tenant, "q", query, IDS, np.ones(10), FENCE, similarity_floor=0.6)
    after = Fence(1, 11)
    far, close = near(query, 0.55, 3)[None, :], near(query, 0.65, 3)[None, :]
    assert reuse.record_change("far", after, changed_ids=["new"], vectors=far) == 0
    assert reuse.record_change("near", after, changed_ids=["new"], vectors=close) == 1
    assert reuse.record_change("held", after, changed_ids=["d3"], vectors=np.zeros((0, DIM))) == 1
    assert reuse.record_change("unknown", after, changed_ids=["new"], vectors=None) == 1
    assert isinstance(reuse.lookup("far", "q", query, after), Reuse)
    for tenant in ("near", "held", "unknown"):
        assert isinstance(reuse.lookup(tenant, "q", query, after), Refusal)


def test_unseen_change_in_between_drops_the_entry() -> None:
    reuse = LookupReuse()
    reuse.store("acme", "q", vector_of(1), IDS, np.ones(10), FENCE, similarity_floor=0.6)
    dropped = reuse.record_change(
        "acme", Fence(1, 13), changed_ids=["x"], vectors=np.zeros((0, DIM)), since=12
    )
    assert dropped == 1


@pytest.mark.parametrize(
    "vector", [np.zeros(DIM), np.full(DIM, np.nan), np.zeros((2, DIM)), np.zeros(0)]
)
def test_vectors_that_are_none_are_the_callers(vector: NDArray[np.float64]) -> None:
    with pytest.raises(InputError):
        filled().lookup("acme", "q", vector, FENCE)
    with pytest.raises(InputError):
        filled().store("acme", "q", vector, [], [], FENCE)


def test_other_dimension_and_length_are_the_callers() -> None:
    reuse = filled()
    with pytest.raises(InputError, match="expected 16 dimensions, found 3"):
        reuse.lookup("acme", "q", np.ones(3), FENCE)
    with pytest.raises(InputError, match="expected 1 scores, found 2"):
        reuse.store("acme", "q", vector_of(1), ["a"], [1.0, 2.0], FENCE)


def test_kept_scores_are_not_the_callers_array() -> None:
    reuse = LookupReuse()
    scores = np.ones(1, np.float32)
    reuse.store("acme", "q", vector_of(1), ["a"], scores, FENCE)
    scores[0] = 7
    decision = reuse.lookup("acme", "q", vector_of(1), FENCE)
    assert isinstance(decision, Reuse)
    assert decision.scores[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        decision.scores[0] = 2.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reuse_delta", 0.0),
        ("reuse_alpha", 1.5),
        ("reuse_entries_max", 0),
        ("reuse_similarity_min", 2.0),
        ("kv_block_tokens", 8),
        ("kv_recompute_ratio", -0.1),
        ("kv_gate_kl_max", 0.0),
        ("kv_storage", "float8"),
        ("hot_p99_us", -1.0),
        ("hot_p99_us", float("nan")),
        ("engine_lease_s", float("nan")),
        ("documents_bytes_max", -1),
        ("device", "tpu"),
    ],
)
def test_settings_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        dataclasses.replace(KvcacheSettings(), **{key: value})  # type: ignore[arg-type]
