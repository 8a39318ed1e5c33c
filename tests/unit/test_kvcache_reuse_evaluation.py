"""The measurement of reuse: what it reads, what it may see, and what it compares with."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache import error_bound, reuse_evaluation
from stoker.kvcache.error_bound import ErrorBound
from stoker.kvcache.reuse_evaluation import (
    KnownAnswers,
    Pair,
    best_fixed_threshold,
    best_proved_threshold,
    evaluate_reuse,
    pair_of,
    share_upper,
    with_vectors,
)
from stoker.kvcache.settings import KvcacheSettings
from stoker.service import cli

DIM = 24


def unit(rng: np.random.Generator) -> NDArray[np.float32]:
    vector = rng.standard_normal(DIM).astype(np.float32)
    return vector / np.float32(np.linalg.norm(vector))


def synthetic_pairs(count: int, *, seed: int) -> list[Pair]:
    """Questions of 12 kinds; each asks again near an earlier one, some of another kind nearby."""
    rng = np.random.default_rng((29, seed))
    kinds = [unit(rng) for _ in range(12)]
    latest: list[tuple[str, NDArray[np.float32]] | None] = [None] * 12
    pairs = []
    for number in range(count):
        kind = int(rng.integers(12))
        close = rng.random() < 0.8
        vector = kinds[kind] + np.float32(0.15 if close else 0.8) * unit(rng)
        vector /= np.float32(np.linalg.norm(vector))
        text = f"question about kind{'abcdefghijkl'[kind]}" + " indeed" * (number % 9)
        text += f" said {''.join('abcdefghij'[int(digit)] for digit in str(number))}o"  # no repeats
        wrong = rng.random() < (0.0 if close else 0.5)
        other = kind if not wrong else int(rng.integers(12))
        before = latest[other]
        if before is not None:
            pairs.append(Pair(before[0], text, other == kind, before[1], vector))
        latest[kind] = (text, vector)
    return pairs


@pytest.mark.parametrize("name", ["{}_vec", "{}_vector", "vector_{}", "{}_embedding", "{}_emb"])
def test_vectors_are_found_under_plausible_names(name: str) -> None:
    document = {"a": "x", "b": "y", "same": 1, name.format("a"): [3, 4], name.format("b"): [0, 2.0]}
    pair = pair_of(document, line=1)
    assert pair.same
    assert pair.a_vector is not None
    assert pair.b_vector is not None
    assert pair.a_vector.tolist() == pytest.approx([0.6, 0.8])
    assert pair.b_vector.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"b": "y", "same": True}, "'a'"),
        ({"a": " ", "b": "y", "same": True}, "'a'"),
        ({"a": "x", "b": 3, "same": True}, "'b'"),
        ({"a": "x", "b": "y"}, "'same'"),
        ({"a": "x", "b": "y", "same": "yes"}, "'same'"),
        ({"a": "x", "b": "y", "same": 2}, "'same'"),
        ({"a": "x", "b": "y", "same": True, "a_vec": [1.0]}, "both texts"),
        ({"a": "x", "b": "y", "same": True, "a_vec": ["?"], "b_vec": [1.0]}, "'a_vec'"),
        ({"a": "x", "b": "y", "same": True, "a_vec": ["1"], "b_vec": [1.0]}, "'a_vec', found str"),
        (
            {"a": "x", "b": "y", "same": True, "a_vec": [1.0], "b_vec": [True]},
            "'b_vec', found bool",
        ),
        ({"a": "x", "b": "y", "same": True, "a_vec": [1.0, None], "b_vec": [1.0, 2]}, "'a_vec'"),
        ({"a": "x", "b": "y", "same": True, "a_vec": [0.0], "b_vec": [1.0]}, "'a_vec'"),
        ({"a": "x", "b": "y", "same": True, "a_vec": [[1.0]], "b_vec": [1.0]}, "'a_vec'"),
        ({"a": "x", "b": "y", "same": True, "a_vec": [10**400], "b_vec": [1.0]}, "'a_vec'"),
        ({"a": "x", "b": "y", "same": True, "a_vec": [1.0, 0.0], "b_vec": [1.0]}, "2 and 1"),
        ({"a": "x \ud800", "b": "y", "same": True}, "Unicode in 'a'"),
    ],
)
def test_bad_lines_are_named(document: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=f"line 7.*{found}"):
        pair_of(document, line=7)


def test_a_wrong_value_is_shown_in_part() -> None:
    with pytest.raises(InputError) as found:
        pair_of({"a": ["q" * 10**6], "b": "y", "same": True}, line=7)
    assert len(str(found.value)) < 200


def test_numbers_of_any_size_make_a_unit_vector() -> None:
    large = {"a": "x", "b": "y", "same": 1, "a_vec": [3e200, 4e200], "b_vec": [3e-200, 4e-200]}
    pair = pair_of(large, line=1)
    for vector in (pair.a_vector, pair.b_vector):
        assert vector is not None
        assert vector.tolist() == pytest.approx([0.6, 0.8])


def test_only_missing_texts_are_embedded_once() -> None:
    asked: list[list[str]] = []

    def embed(texts: list[str]) -> NDArray[np.float32]:
        asked.append(texts)
        return np.full((len(texts), DIM), 2.0, np.float32)

    given = np.eye(DIM, dtype=np.float32)[0]
    pairs = [
        Pair("x", "y", True, None, None),
        Pair("y", "x", False, None, None),
        Pair("z", "x", True, given, given),
    ]
    whole = with_vectors(pairs, embed)
    assert asked == [["x", "y"]]
    assert all(
        np.linalg.norm(vector) == pytest.approx(1.0)
        for pair in whole
        for vector in (pair.a_vector, pair.b_vector)
        if vector is not None
    )
    with pytest.raises(InputError, match="one dim"):
        with_vectors([*pairs, Pair("q", "r", True, np.ones(3), np.ones(3))], embed)


def test_share_upper_is_clopper_pearson() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for wrong, count in ((0, 1), (0, 299), (1, 473), (5, 1_000), (40, 900), (7, 7)):
        expected = 1.0 if wrong == count else scipy_stats.beta.ppf(0.95, wrong + 1, count - wrong)
        assert share_upper(wrong, count, 0.05) == pytest.approx(expected, rel=1e-6)
    assert share_upper(0, 0, 0.05) == 1.0


@pytest.mark.parametrize("share", [0.001, 0.2, 0.9])
def test_tails_are_those_of_the_distributions(share: float) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for count in (1, 7, 400, 30_000):
        for wrong in {int(count * share * part) for part in (0.0, 0.5, 0.9, 1.0, 1.1, 3.0)}:
            expected = scipy_stats.binom.cdf(wrong, count, share)
            found = reuse_evaluation._binomial_at_most(wrong, count, share)
            assert found == pytest.approx(expected, rel=1e-7, abs=1e-12), (wrong, count)
            expected = scipy_stats.poisson.cdf(wrong, count * share)
            found = error_bound._poisson_at_most(wrong, count * share)
            assert found == pytest.approx(expected, rel=1e-7, abs=1e-12), (wrong, count)


def test_many_errors_are_compared_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth may be wrong: no bound on thousands of errors is summed from the first."""
    steps: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            steps.append(name)
            return getattr(math, name)

    monkeypatch.setattr(reuse_evaluation, "math", Counted())
    monkeypatch.setattr(error_bound, "math", Counted())
    rng = np.random.default_rng(47)
    similarities = rng.random(20_000)
    same = rng.random(20_000) < 0.7 + 0.2 * similarities
    given = {"delta": 0.2, "alpha": 0.05}
    found = best_fixed_threshold(similarities, same, **given, by_bound=True)
    assert 3_000 < found.reused < 20_000
    proved = best_proved_threshold(similarities, same, **given)
    assert proved.reused_false > 1_000, "a proof stands with many errors, too"
    for total in range(10_000, 20_000, 50):
        error_bound.errors_planned(float(total), 0.05)
    assert len(steps) < 200_000


@pytest.mark.parametrize("by_bound", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_best_fixed_threshold_equals_trying_all(seed: int, by_bound: bool) -> None:
    rng = np.random.default_rng((31, seed))
    similarities = np.round(rng.random(400), 2)  # many ties
    same = rng.random(400) < 0.4 + 0.6 * similarities
    best = 0
    for cut in np.unique(similarities):
        taken = similarities >= cut
        wrong = int((taken & ~same).sum())
        share = share_upper(wrong, int(taken.sum()), 0.05) if by_bound else wrong / taken.sum()
        if share <= 0.15:
            best = max(best, int(taken.sum()))
    found = best_fixed_threshold(similarities, same, delta=0.15, alpha=0.05, by_bound=by_bound)
    assert found.reused == best
    assert found.reused == found.reused_true + found.reused_false
    assert int((similarities >= found.threshold).sum()) == best


def test_the_best_threshold_of_many_pairs_is_one_bound_per_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nearly delta wrong: at each of 20,000 cuts the bound was worked out, and fails."""
    rng = np.random.default_rng(41)
    similarities, same = rng.random(20_000), rng.random(20_000) > 0.0097
    calls = []
    bound = reuse_evaluation._binomial_at_most
    monkeypatch.setattr(
        reuse_evaluation, "_binomial_at_most", lambda *args: calls.append(args) or bound(*args)
    )
    best_fixed_threshold(similarities, same, delta=0.01, alpha=0.05, by_bound=True)
    assert len(calls) <= int((~same).sum()) + 100


@pytest.mark.parametrize("seed", range(4))
def test_a_threshold_that_must_prove_itself_equals_counting_its_picks(seed: int) -> None:
    rng = np.random.default_rng((43, seed))
    similarities = np.round(rng.random(600), 2)
    same = rng.random(600) < 0.8 + 0.2 * similarities
    best = (0, 0)
    for cut in np.unique(np.quantile(similarities, np.linspace(0.0, 1.0, 400))):
        bound, right, wrong = ErrorBound(0.05), 0, 0
        for is_same in same[similarities >= cut]:
            if bound.upper() <= 0.15:
                right, wrong = right + bool(is_same), wrong + (not is_same)
            bound.add(verify_ratio=1.0, wrong=not is_same)
        best = max(best, (right, wrong), key=lambda counts: counts[0])
    found = best_proved_threshold(similarities, same, delta=0.15, alpha=0.05)
    assert (found.reused_true, found.reused_false) == best
    assert found.reused_true > 20, "nothing to compare"


@pytest.mark.parametrize("delta", [1e-3, 1e-18, 1e-21, 1e-300])
def test_no_threshold_is_proved_by_fewer_picks_than_the_bound_asks_for(delta: float) -> None:
    found = best_proved_threshold(
        np.linspace(0.1, 1.0, 500), np.ones(500, np.bool_), delta=delta, alpha=0.05
    )
    assert found.reused == 0  # with no error at all, 3 / delta picks: more than there are


def test_known_answers_join_and_tell_apart() -> None:
    rng = np.random.default_rng(37)
    vectors = {name: unit(rng) for name in "abcdef"}

    def pair(one: str, other: str, same: bool) -> Pair:
        return Pair(one, other, same, vectors[one], vectors[other])

    known = KnownAnswers(dim=DIM, questions_max=20, exact_max=20)
    known.reveal(pair("a", "b", True))
    known.reveal(pair("c", "d", True))
    known.reveal(pair("b", "c", False))
    known.reveal(pair("e", "f", True))
    around = known.around(Pair("a", "new", True, vectors["a"], vectors["d"]))
    near = {
        name: state
        for name, state in zip(
            sorted("abcdef", key=lambda n: -float(vectors[n] @ vectors["d"])),
            around.states.tolist(),
            strict=True,
        )
    }
    assert near == {"a": 1, "b": 1, "c": -1, "d": -1, "e": 0, "f": 0}
    known.reveal(pair("e", "d", True))  # what is known of d's kind holds for e's now
    states = known.around(Pair("a", "new", True, vectors["a"], vectors["e"])).states
    assert sorted(states.tolist()) == [-1, -1, -1, -1, 1, 1]


def test_reuse_is_worth_it_and_within_delta() -> None:
    pairs = synthetic_pairs(4_000, seed=1)
    found = evaluate_reuse(pairs, delta=0.02)
    document = found.to_json()
    assert found.reused_true > 500
    assert document["within_delta"] is True
    assert found.bound <= 0.02
    assert found.verified_refusals + found.reused == len(pairs)
    assert found.verified_reuses < found.reused
    assert sum(found.refusals.values()) == found.verified_refusals
    account = found.account
    assert sum(same for same, _ in account.values()) == found.true_pairs
    assert sum(different for _, different in account.values()) == found.false_pairs
    assert account["reused"] == (found.reused_true, found.reused_false)
    assert account["proving"][0] >= 150, "a proof of 2 % without errors takes 172 picks"
    assert json.loads(json.dumps(document)) == document
    again = evaluate_reuse(pairs, delta=0.02)
    assert again.result_hash == found.result_hash


def test_truth_that_was_not_verified_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = synthetic_pairs(3_000, seed=2)
    verified: list[Pair] = []
    reveal = KnownAnswers.reveal

    def watch(self: KnownAnswers, pair: Pair) -> None:
        verified.append(pair)
        reveal(self, pair)

    monkeypatch.setattr(reuse_evaluation.KnownAnswers, "reveal", watch)
    found = evaluate_reuse(pairs, delta=0.02)
    seen = {id(pair) for pair in verified}
    assert len(seen) < len(pairs)
    lied = [
        pair if id(pair) in seen else dataclasses.replace(pair, same=not pair.same)
        for pair in pairs
    ]
    assert evaluate_reuse(lied, delta=0.02).result_hash == found.result_hash


def test_exact_repeats_need_no_proof() -> None:
    pairs = synthetic_pairs(50, seed=6)
    repeats = [dataclasses.replace(p, b=f" {p.a}", b_vector=p.a_vector, same=True) for p in pairs]
    found = evaluate_reuse([*pairs, *repeats], delta=0.01)
    assert found.exact_reuses == found.reused == len(repeats)
    assert found.first_reuse_at == len(pairs)


def test_what_a_server_would_not_read_is_not_reused() -> None:
    """Texts beyond the bound, and texts without a word, even where they repeat."""
    unit = np.eye(DIM, dtype=np.float32)[0]
    texts = ["word " * 2_000, "?!", "!"]
    pairs = [Pair(text, text, True, unit, unit) for text in texts]
    found = evaluate_reuse(pairs, delta=0.01)
    assert (found.reused, found.refusals) == (0, {"empty": 3})


def test_labels_that_contradict_a_repeat_are_counted() -> None:
    unit = np.eye(DIM, dtype=np.float32)[0]
    pairs = [Pair("one text", "one text", bool(n % 4), unit, unit) for n in range(40)]
    found = evaluate_reuse(pairs, delta=0.01)
    assert (found.exact_reuses, found.exact_wrong) == (40, 10)
    assert found.to_json()["exact_wrong"] == 10
    assert found.to_json()["within_delta"] is False


@pytest.mark.parametrize("same", [True, False])
def test_pairs_of_one_kind_only_are_no_special_case(same: bool) -> None:
    pairs = [dataclasses.replace(p, same=same) for p in synthetic_pairs(1_200, seed=8)]
    found = evaluate_reuse(pairs, delta=0.01)
    assert found.reused_false == 0
    assert (found.reused_true > 0) == same


def test_few_pairs_prove_nothing_and_copies_of_pairs_are_pairs() -> None:
    assert evaluate_reuse(synthetic_pairs(20, seed=9), delta=0.01).reused == 0
    found = evaluate_reuse(synthetic_pairs(250, seed=10) * 8, delta=0.02)
    assert found.reused_true > 300
    assert found.false_share_upper <= 0.02


def test_a_meaning_of_same_that_turns_ends_reuse_within_delta() -> None:
    """From then on near pairs are wrong. One in ten is looked at, so some tens pass before it."""
    pairs = synthetic_pairs(3_600, seed=11)
    turned = [*pairs[:3_000], *(dataclasses.replace(p, same=not p.same) for p in pairs[3_000:])]
    found = evaluate_reuse(turned, delta=0.02)
    assert found.reused_true > 1_000
    assert found.reused_false <= 40
    assert found.false_share_upper <= 0.02


def test_nothing_provable_means_nothing_reused() -> None:
    rng = random.Random(5)
    pairs = [
        dataclasses.replace(p, same=rng.random() < 0.9) for p in synthetic_pairs(2_500, seed=3)
    ]
    found = evaluate_reuse(pairs, delta=0.01, settings=KvcacheSettings())
    assert found.reused == 0
    assert found.to_json()["gain_over_fixed"] in (None, 0.0)


def test_command_prints_json_and_names_bad_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"a": p.a, "b": p.b, "same": p.same, "a_vec": p.a_vector.tolist(),
         "b_vec": p.b_vector.tolist()}
        for p in synthetic_pairs(60, seed=4)
        if p.a_vector is not None and p.b_vector is not None
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert cli.main(["reuse", "evaluate", "--pairs", str(path), "--delta", "0.05", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pairs"] == len(lines)
    assert {"reuse_rate_true", "reuse_rate_false", "bound", "verification_cost",
            "fixed_threshold", "gain_over_fixed"} <= document.keys()  # fmt: skip
    assert cli.main(["reuse", "evaluate", "--pairs", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "fixed threshold" in shown
    assert "too little learnt yet" in shown
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a mark that some editors write
    assert cli.main(["reuse", "evaluate", "--pairs", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == len(lines)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert cli.main(["reuse", "evaluate", "--pairs", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == len(lines)
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(lzma.compress(plain))
    assert cli.main(["reuse", "evaluate", "--pairs", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == len(lines)
    for packed in (gzip.compress(plain), lzma.compress(plain)):
        path.write_bytes(packed[:-40])
        assert cli.main(["reuse", "evaluate", "--pairs", str(path), "--json"]) == 3
        assert "damaged compressed data" in capsys.readouterr().err
    path.write_bytes(bz2.compress(plain))
    assert cli.main(["reuse", "evaluate", "--pairs", str(path)]) == 3
    assert "unpack it first" in capsys.readouterr().err
    path.write_bytes(b'{"a": "x", "b": "y", "same": true}\n{"a": "caf\xe9"}\n')
    assert cli.main(["reuse", "evaluate", "--pairs", str(path)]) == 3
    assert "line 2: expected UTF-8" in capsys.readouterr().err
    path.write_text("\n" + "[" * 100_000)
    assert cli.main(["reuse", "evaluate", "--pairs", str(path)]) == 3
    assert "line 2" in capsys.readouterr().err
    path.write_text('{"a": "x", "b": "y", "same": true}\nnot json\n')
    assert cli.main(["reuse", "evaluate", "--pairs", str(path)]) == 3
    assert "line 2" in capsys.readouterr().err
    assert cli.main(["reuse", "evaluate", "--pairs", str(tmp_path / "none")]) == 3
    assert cli.main(["reuse", "evaluate", "--pairs", str(path), "--delta", "7"]) == 3
