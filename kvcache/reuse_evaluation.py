"""Measure semantic lookup reuse on labelled pairs, as if they arrived one after another.

Each line's ``b`` is looked up after its ``a`` was answered. The policy under test sees a pair's
truth only if it chose to verify that lookup: every refusal (a search follows anyway) and a sample
of the reuses. What it has learnt so is all it knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.error_bound import errors_expected_max
from stoker.kvcache.guards import Guard, first_conflict
from stoker.kvcache.nearest import NearestVectors, Slot
from stoker.kvcache.question import read_question
from stoker.kvcache.reuse_policy import ReusePolicy
from stoker.kvcache.reuse_selector import NEIGHBORS, Neighborhood, pair_features
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.telling_words import differences_of

_ALIASES = ("{}_vec", "{}_vector", "vec_{}", "vector_{}", "{}_embedding", "embedding_{}", "{}_emb",
            "emb_{}", "v{}", "{}v")  # fmt: skip
_SHOWN_MAX = 80  # characters of a wrong value in a message
_ALIKE = 0.8  # cosine at which an unlabelled question is taken to be of its neighbour's kind


@dataclasses.dataclass(frozen=True)
class Pair:
    """One labelled pair; the vectors are None until they are embedded."""

    a: str
    b: str
    same: bool
    a_vector: NDArray[np.float32] | None
    b_vector: NDArray[np.float32] | None


def pair_of(document: Mapping[str, Any], *, line: int) -> Pair:
    """Read one line of a pairs file.

    Args:
        document: ``a`` and ``b`` texts, ``same`` true or false (or 1 or 0); perhaps vectors, as
            ``a_vec``, ``a_vector``, ``vector_a``, ``a_embedding``, ``embedding_a`` or a like name.
        line: Its number, for messages.

    Raises:
        InputError: a field is missing or of another type; the message names line and field.
    """
    texts = []
    for key in ("a", "b"):
        text = document.get(key)
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"line {line}: expected a text in {key!r}, found {_shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"line {line}: expected Unicode in {key!r}: {error.reason}") from error
        texts.append(text)
    same = document.get("same")
    if not isinstance(same, bool) and not (isinstance(same, int) and same in (0, 1)):
        raise InputError(f"line {line}: expected true or false in 'same', found {_shown(same)}")
    a_vector = _vector_in(document, "a", line=line)
    b_vector = _vector_in(document, "b", line=line)
    if (a_vector is None) != (b_vector is None):
        raise InputError(f"line {line}: expected vectors for both texts or for none")
    if a_vector is not None and b_vector is not None and len(a_vector) != len(b_vector):
        raise InputError(
            f"line {line}: expected vectors of one dim, found {len(a_vector)} and {len(b_vector)}"
        )
    return Pair(texts[0], texts[1], bool(same), a_vector, b_vector)


def _shown(value: object) -> str:
    """Return a value as a message can hold it, however large it is."""
    shown = repr(value)
    return (
        shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}... ({type(value).__name__})"
    )


def _vector_in(document: Mapping[str, Any], key: str, *, line: int) -> NDArray[np.float32] | None:
    for alias in _ALIASES:
        name = alias.format(key)
        if document.get(name) is None:
            continue
        numbers = document[name]
        if isinstance(numbers, list):
            # numpy would read "1" and true as numbers.
            for kind in set(map(type, numbers)) - {int, float}:
                raise InputError(
                    f"line {line}: expected numbers in {name!r}, found {kind.__name__}"
                )
        try:
            vector = np.asarray(numbers, np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"line {line}: expected numbers in {name!r}: {error}") from error
        largest = float(np.abs(vector).max()) if vector.ndim == 1 and vector.size else 0.0
        if not math.isfinite(largest) or largest == 0.0:
            raise InputError(f"line {line}: expected one finite, non-zero vector in {name!r}")
        vector = vector / largest  # first, or the squares of large numbers overflow
        return (vector / np.linalg.norm(vector)).astype(np.float32)
    return None


def with_vectors(
    pairs: Sequence[Pair], embed: Callable[[list[str]], NDArray[np.float32]]
) -> list[Pair]:
    """Return the pairs with vectors, embedding each distinct text once where they lack them.

    Raises:
        InputError: the vectors given differ in dim.
    """
    missing = list(dict.fromkeys(
        text for pair in pairs if pair.a_vector is None for text in (pair.a, pair.b)
    ))  # fmt: skip
    known: dict[str, NDArray[np.float32]] = {}
    own = ""
    if missing:
        vectors = embed(missing)
        own = f"; pairs without vectors are embedded, {vectors.shape[1]} dims"
        lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
        known = dict(zip(missing, (vectors / lengths).astype(np.float32), strict=True))
    whole = [
        pair if pair.a_vector is not None
        else dataclasses.replace(pair, a_vector=known[pair.a], b_vector=known[pair.b])
        for pair in pairs
    ]  # fmt: skip
    lengths_seen = {
        len(vector): place
        for place, pair in reversed(list(enumerate(whole, start=1)))
        if (vector := pair.a_vector) is not None
    }
    if len(lengths_seen) > 1:
        where = ", ".join(f"{dim} (first in pair {n})" for dim, n in sorted(lengths_seen.items()))
        raise InputError(f"expected vectors of one dim, found {where}{own}")
    return whole


class KnownAnswers:
    """Which questions are known to need the same passages, from the truths revealed so far.

    A union-find of questions with a set of known differences between groups. Labelled questions
    can be found by nearness, so that a pair's surroundings can be asked.
    """

    def __init__(self, *, dim: int, questions_max: int, exact_max: int) -> None:
        self._near = NearestVectors(dim=dim, rows_max=questions_max, exact_max=exact_max)
        self._number: dict[str, int] = {}
        self._parent: list[int] = []
        self._differs: list[set[int]] = []
        self._slot_number: dict[Slot, int] = {}
        self._labelled: set[int] = set()

    def _number_of(self, text: str) -> int:
        number = self._number.get(text)
        if number is None:
            number = self._number[text] = len(self._parent)
            self._parent.append(number)
            self._differs.append(set())
        return number

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def reveal(self, pair: Pair) -> None:
        """Take the truth of one verified pair."""
        one, other = self._number_of(pair.a), self._number_of(pair.b)
        for number, vector in ((one, pair.a_vector), (other, pair.b_vector)):
            if number not in self._labelled and vector is not None:
                self._labelled.add(number)
                self._slot_number[self._near.put(vector)] = number
        left, right = self._root(one), self._root(other)
        if left == right:
            return
        if not pair.same:
            self._differs[left].add(right)
            self._differs[right].add(left)
            return
        if len(self._differs[left]) < len(self._differs[right]):
            left, right = right, left
        self._parent[right] = left
        for third in self._differs[right]:
            self._differs[third].discard(right)
            self._differs[third].add(left)
        self._differs[left] |= self._differs[right]
        self._differs[left].discard(left)
        self._differs[right] = set()

    def around(self, pair: Pair) -> Neighborhood:
        """Ask the labelled questions near ``b`` whether they are known to be of ``a``'s kind."""
        assert pair.a_vector is not None
        assert pair.b_vector is not None
        nearest = self._near.nearest(pair.b_vector, NEIGHBORS)
        kind = self._kind_of(pair.a, pair.a_vector)
        states = np.zeros(len(nearest), np.int8)
        if kind is not None:
            for place, (slot, _) in enumerate(nearest):
                root = self._root(self._slot_number[slot])
                states[place] = 1 if root == kind else -1 if root in self._differs[kind] else 0
        return Neighborhood(np.array([value for _, value in nearest], np.float32), states)

    def _kind_of(self, text: str, vector: NDArray[np.float32]) -> int | None:
        number = self._number.get(text)
        if number is not None and number in self._labelled:
            return self._root(number)
        nearest = self._near.nearest(vector, 1)
        if nearest and nearest[0][1] >= _ALIKE:
            return self._root(self._slot_number[nearest[0][0]])
        return None


@dataclasses.dataclass(frozen=True)
class FixedThreshold:
    """The best single cosine threshold in hindsight, with every truth known.

    Attributes:
        threshold: The cosine; 2 where none qualifies.
        reused: Pairs at or above it.
        reused_true: Those that were right.
        reused_false: Those that were wrong.
        false_share_upper: Upper confidence bound of the wrong share.
    """

    threshold: float
    reused: int
    reused_true: int
    reused_false: int
    false_share_upper: float


@dataclasses.dataclass(frozen=True)
class ReuseEvaluation:
    """The outcome of one run; `to_json` names the fields for scripts.

    ``exact_wrong`` counts pairs of one text that are labelled different: no proof covers those,
    since a search for the same text finds the same, so they say that the labels contradict.

    ``account`` says what became of every pair: by the guard that refused it or the `Reason` of its
    verdict, how many pairs there were that want the same passages, and how many that do not.

    ``fixed_proved`` is a threshold known in hindsight that pays as ours does: nothing is reused
    until what it picks has proved delta, nor while an error has undone that.
    """

    pairs: int
    true_pairs: int
    false_pairs: int
    delta: float
    confidence: float
    reused_true: int
    reused_false: int
    false_share_upper: float
    bound: float
    bound_exposure: float
    bound_errors: int
    first_reuse_at: int | None
    exact_reuses: int
    exact_wrong: int
    verified_reuses: int
    verified_refusals: int
    refusals: dict[str, int]
    account: dict[str, tuple[int, int]]
    fixed_same_bound: FixedThreshold
    fixed_same_share: FixedThreshold
    fixed_proved: FixedThreshold
    result_hash: str
    seconds: float

    @property
    def reused(self) -> int:
        """Lookups that were reused."""
        return self.reused_true + self.reused_false

    def to_json(self) -> dict[str, object]:
        """Return plain values, ratios included."""
        best = self.fixed_same_bound
        return {
            "pairs": self.pairs,
            "true_pairs": self.true_pairs,
            "false_pairs": self.false_pairs,
            "delta": self.delta,
            "confidence": self.confidence,
            "reused": self.reused,
            "reused_true": self.reused_true,
            "reused_false": self.reused_false,
            "reuse_rate_true": _ratio(self.reused_true, self.true_pairs),
            "reuse_rate_false": _ratio(self.reused_false, self.false_pairs),
            "false_share": _ratio(self.reused_false, self.reused),
            "false_share_upper": self.false_share_upper,
            "within_delta": self.false_share_upper <= self.delta if self.reused else None,
            "bound": self.bound,
            "bound_exposure": self.bound_exposure,
            "bound_errors": self.bound_errors,
            "first_reuse_at": self.first_reuse_at,
            "exact_reuses": self.exact_reuses,
            "exact_wrong": self.exact_wrong,
            "verified": self.verified_reuses + self.verified_refusals,
            "verified_reuses": self.verified_reuses,
            "verified_refusals": self.verified_refusals,
            "verification_cost": _ratio(self.verified_reuses, self.reused),
            "refusals": self.refusals,
            "account": {
                name: {"same": same, "different": different}
                for name, (same, different) in self.account.items()
            },
            "fixed_threshold": dataclasses.asdict(best),
            "fixed_threshold_proved": dataclasses.asdict(self.fixed_proved),
            "fixed_threshold_share_only": dataclasses.asdict(self.fixed_same_share),
            "gain_over_fixed": _ratio(self.reused_true, best.reused_true),
            "result_hash": self.result_hash,
            "seconds": self.seconds,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def share_upper(wrong: int, count: int, alpha: float) -> float:
    """Return the Clopper-Pearson upper bound of a share: exact for a fixed sample.

    Args:
        wrong: Errors among ``count``.
        count: Sample size; 0 gives 1.
        alpha: One-sided level, in (0, 1).

    Source: Clopper and Pearson, Biometrika 26 (1934).
    """
    if count == 0 or wrong >= count:
        return 1.0
    low, high = wrong / count, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _binomial_at_most(wrong, count, middle) > alpha:
            low = middle
        else:
            high = middle
    return high


def _binomial_at_most(wrong: int, count: int, share: float) -> float:
    """Sum the shorter tail, outwards, until what is left adds nothing."""
    if wrong >= count or share <= 0.0 or share >= 1.0:
        return 1.0 if wrong >= count or share <= 0.0 else 0.0
    below = wrong < count * share
    k = wrong if below else wrong + 1
    odds = share / (1.0 - share)
    term = math.exp(
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        + k * math.log(share) + (count - k) * math.log1p(-share)
    )  # fmt: skip
    tail = 0.0
    while term > 1e-17 * tail:
        tail += term
        term *= k / ((count - k + 1) * odds) if below else (count - k) * odds / (k + 1)
        k += -1 if below else 1
    return min(1.0, tail) if below else max(0.0, 1.0 - tail)


def best_fixed_threshold(
    similarities: NDArray[np.float64], same: NDArray[np.bool_], *, delta: float, alpha: float,
    by_bound: bool,
) -> FixedThreshold:  # fmt: skip
    """Find the loosest single cosine threshold that keeps to ``delta``, knowing every truth.

    Args:
        similarities: Cosine of each pair, shape (n,).
        same: The truths, shape (n,).
        delta: Largest share of wrong reuses.
        alpha: Level of the upper bound.
        by_bound: Whether the bound of the share must keep to delta, or only the share itself.
    """
    order = np.argsort(-similarities, kind="stable")
    ranked = similarities[order]
    wrong = np.cumsum(~same[order])
    counts = np.arange(1, len(order) + 1)
    # A threshold takes all of equal cosine or none.
    fits = np.append(ranked[1:] != ranked[:-1], True) & (wrong <= delta * counts)
    failed = -1  # errors at which the most reuses there are were too few: fewer are, too
    for count in counts[fits][::-1].tolist():
        errors = int(wrong[count - 1])
        if by_bound and errors == failed:
            continue
        # The bound is within delta where so few errors were unlikely at a share of delta.
        if by_bound and _binomial_at_most(errors, count, delta) > alpha * (1.0 + 1e-9):
            failed = errors
            continue
        upper = share_upper(errors, count, alpha)
        if not by_bound or upper <= delta:
            cut = float(ranked[count - 1])
            return FixedThreshold(cut, count, count - errors, errors, upper)
        failed = errors
    return FixedThreshold(2.0, 0, 0, 0, 1.0)


def best_proved_threshold(
    similarities: NDArray[np.float64], same: NDArray[np.bool_], *, delta: float, alpha: float
) -> FixedThreshold:
    """Find the single cosine threshold that reuses most when it, too, must prove itself.

    What is at or above it is picked, from the first pair on, and verified. A pick is reused while
    the bound on the picks before it is at most ``delta``: the proof of `error_bound`, with all of
    ``alpha`` and every truth known. Thresholds are tried at 400 shares of the pairs.

    Args:
        similarities: Cosine of each pair in order of arrival, shape (n,).
        same: The truths, shape (n,).
        delta: Largest share of wrong reuses.
        alpha: Level of the proof.
    """
    best, best_cut, best_wrong = 0, 2.0, 0
    for cut in np.unique(np.quantile(similarities, np.linspace(0.0, 1.0, 400))).tolist():
        wrong = ~same[similarities >= cut]
        errors: NDArray[np.int64] = np.cumsum(wrong, dtype=np.int64)
        # With k errors a proof stands from errors_expected_max(k) / delta picks on.
        kinds, first = np.unique(errors, return_index=True)
        picks = np.ceil(_errors_expected_max(kinds, alpha) / delta)
        needed = np.minimum(picks, len(wrong) + 2.0).astype(np.int64)  # with a tiny delta: never
        begin = np.maximum(first + 1, needed)
        end = np.append(first[1:], len(wrong)) + 1  # two past the last pick with so many errors
        stands = begin < end
        turns = np.zeros(len(wrong) + 2, np.int64)
        turns[begin[stands]] += 1
        turns[end[stands]] -= 1  # each place at most once: no count of errors comes again
        reused = np.cumsum(turns)[: len(wrong)] > 0
        right = int((reused & ~wrong).sum())
        if right > best:
            best, best_cut, best_wrong = right, cut, int((reused & wrong).sum())
    count = best + best_wrong
    return FixedThreshold(best_cut, count, best, best_wrong, share_upper(best_wrong, count, alpha))


def _errors_expected_max(errors: NDArray[np.int64], alpha: float) -> NDArray[np.float64]:
    """Return `errors_expected_max` of each; above 200, on a line between counts 5 % apart."""
    most = int(errors.max(initial=0))
    grid = [count for count in range(201) if count <= most]
    while grid[-1] < most:
        grid.append(min(most, math.ceil(1.05 * grid[-1])))
    return np.interp(errors, grid, [errors_expected_max(count, alpha) for count in grid])


def evaluate_reuse(
    pairs: Sequence[Pair],
    *,
    delta: float,
    settings: KvcacheSettings | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ReuseEvaluation:
    """Run the reuse policy over pairs in order.

    Args:
        pairs: In order of arrival, all with unit vectors of one dim (`with_vectors`).
        delta: The largest share of wrong reuses.
        settings: Confidence, verification share and index sizes.
        seed: Of the draw of verifications; the result is the same for the same seed.
        progress: Called with (pairs done, pairs in all), now and then.

    Raises:
        InputError: no pairs, or delta outside (0, 1].
    """
    if not pairs:
        raise InputError("pairs: expected at least one")
    chosen = settings or KvcacheSettings()
    first = pairs[0].a_vector
    assert first is not None, "with_vectors comes first"
    started = time.perf_counter()
    known = KnownAnswers(
        dim=len(first), questions_max=2 * len(pairs), exact_max=chosen.reuse_exact_entries_max
    )
    policy = ReusePolicy(
        delta=delta, alpha=chosen.reuse_alpha, verify_ratio=chosen.reuse_verify_ratio
    )
    rng = random.Random(seed)
    refusals: Counter[str] = Counter()
    account: Counter[tuple[str, bool]] = Counter()
    similarities = np.zeros(len(pairs))
    decisions = bytearray()
    right = wrong = exact = exact_wrong = verified_reuses = 0
    first_reuse: int | None = None
    for place, pair in enumerate(pairs):
        assert pair.a_vector is not None
        assert pair.b_vector is not None
        similarities[place] = similarity = float(pair.a_vector @ pair.b_vector)
        coin = rng.random()
        if max(len(pair.a.encode()), len(pair.b.encode())) > chosen.reuse_text_bytes_max:
            asked = earlier = None
        else:
            asked, earlier = read_question(pair.b), read_question(pair.a)
        if asked is None or earlier is None or not (asked.normal and earlier.normal):
            refusals[Guard.EMPTY.value] += 1  # as a server does: no guard can read it
            account[Guard.EMPTY.value, pair.same] += 1
            decisions.append(False)
            continue
        if pair.a.strip() == pair.b.strip():  # an exact repeat needs no proof; nothing is learnt
            right, wrong = right + pair.same, wrong + (not pair.same)
            exact, exact_wrong = exact + 1, exact_wrong + (not pair.same)
            account["exact", pair.same] += 1
            first_reuse = place if first_reuse is None else first_reuse
            decisions.append(True)
            continue
        differences = differences_of(asked, earlier)
        features = pair_features(asked, earlier, similarity=similarity, around=known.around(pair))
        conflict = first_conflict(asked, earlier)
        if conflict is not None:
            guard: Guard | None = conflict.guard
        elif similarity < chosen.reuse_similarity_min:
            guard = Guard.SIMILARITY
        else:
            guard = None
        verdict = (
            policy.refuse() if guard else policy.decide(features, coin, differences=differences)
        )
        if verdict.allowed:
            right, wrong = right + pair.same, wrong + (not pair.same)
            verified_reuses += verdict.verify
            first_reuse = place if first_reuse is None else first_reuse
        else:
            refusals[(guard or Guard.EVIDENCE).value] += 1
        account[(guard or verdict.reason).value, pair.same] += 1
        decisions.append(verdict.allowed)
        if verdict.verify:
            policy.learn(verdict, features, same=pair.same, differences=differences)
            known.reveal(pair)
        else:
            policy.skip(verdict)
        if progress is not None and place % 256 == 255:
            progress(place + 1, len(pairs))
    policy.check()
    same = np.array([pair.same for pair in pairs])
    alpha = chosen.reuse_alpha
    return ReuseEvaluation(
        pairs=len(pairs), true_pairs=int(same.sum()), false_pairs=int((~same).sum()),
        delta=delta, confidence=1.0 - alpha, reused_true=right, reused_false=wrong,
        false_share_upper=share_upper(wrong, right + wrong, alpha),
        bound=policy.bound(), bound_exposure=policy.exposure(), bound_errors=policy.errors(),
        first_reuse_at=first_reuse, exact_reuses=exact, exact_wrong=exact_wrong,
        verified_reuses=verified_reuses,
        verified_refusals=len(pairs) - right - wrong, refusals=dict(sorted(refusals.items())),
        account={
            name: (account[name, True], account[name, False])
            for name in sorted({name for name, _ in account})
        },
        fixed_same_bound=best_fixed_threshold(
            similarities, same, delta=delta, alpha=alpha, by_bound=True
        ),
        fixed_same_share=best_fixed_threshold(
            similarities, same, delta=delta, alpha=alpha, by_bound=False
        ),
        fixed_proved=best_proved_threshold(similarities, same, delta=delta, alpha=alpha),
        result_hash=hashlib.blake2b(bytes(decisions), digest_size=8).hexdigest(),
        seconds=time.perf_counter() - started,
    )  # fmt: skip
