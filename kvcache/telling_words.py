"""Which differing words tell two questions apart, learnt from the outcomes of verified lookups.

"Delete the sales report" and "erase the sales report" want the same passages; with "export", or
with "billing", they do not, though each pair differs in one word and the cosines are alike. Which
words matter no table knows beforehand; the searches that follow refusals say so one by one.

Source: ridge logistic regression over hashed words (Weinberger et al., "Feature hashing for large
scale multitask learning", ICML 2009), by steps over the curvature of each weight. Boehning and
Lindsay (1988) step over a bound on it, and never go uphill; ours steps over what it is at hand,
with a floor: further, and without that promise. What it says of an outcome is said by weights that
were fitted without that outcome ("stacking", Wolpert 1992): so it is one feature of
`reuse_selector`, as good for the oldest outcome as for the newest. Nothing is released on its word:
it ranks, and the proof counts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.guards import differing_words
from stoker.kvcache.question import Question, encoded

Differences = tuple[int, ...]
"""Places in the table of weights: of each word that only one has, and of pairs of such words."""

NO_DIFFERENCES: Differences = ()
WORDS_MAX = 48  # of each kind; long texts that differ in more differ in everything
_PLACES = 1 << 14
_STEPS = 8  # each fit goes on from where the last one ended
_RIDGE = 1.0  # a word seen once or twice says little
_CURVATURE_MIN = 0.02  # of an outcome that is taken for certain: it may still be learnt from
_KEPT_MAX = 24  # of an outcome: more would cost time, and teach little of each
_ROW_BYTES = 112  # an array's own object

Places = NDArray[np.uint16]
"""Differences as they are kept: two bytes each."""


def differences_of(asked: Question, earlier: Question) -> Differences:
    """Name the differences of two questions: single words, and each word with each other one.

    A pair of words says more than its parts: "delete" tells much apart, "delete" against "erase"
    does not. The same whichever question came first.
    """
    only_asked, only_earlier = differing_words(asked, earlier)
    said = [f"1 {word}" for word in sorted(only_asked | only_earlier)[:WORDS_MAX]]
    if len(only_asked) * len(only_earlier) <= WORDS_MAX:
        said += [
            f"2 {min(one, other)} {max(one, other)}"
            for one in sorted(only_asked)
            for other in sorted(only_earlier)
        ]
    return tuple(sorted(zlib.crc32(encoded(text)) % _PLACES for text in said))


class TellingWords:
    """Weighs differing words by how often a reuse across them was wrong. Not thread-safe.

    Two words that fall on one place share its weight: at some thousand words that is rare, and
    costs reuse, not truth. Takes 64 KiB, and up to 450 KiB once it has seen many words.

    Args:
        parts: Of the outcomes; each is judged by weights that were fitted to the others.
    """

    def __init__(self, *, parts: int) -> None:
        self._parts = parts
        self._of_all: NDArray[np.float32] = np.zeros(_PLACES, np.float32)
        # Of every part and of all, for the places that the last fit has seen.
        self._seen: Places = np.zeros(0, np.uint16)
        self._weights: NDArray[np.float32] = np.zeros((parts + 1, 0), np.float32)
        self._bases = np.full(parts + 1, -1.0)

    def score(self, differences: Differences) -> float:
        """Return the log odds that a reuse across these differences is wrong."""
        weights = self._of_all
        return float(self._bases[-1]) + math.fsum(float(weights[place]) for place in differences)

    def fit(
        self, rows: Sequence[Places], wrong: NDArray[np.float64], part: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Fit to outcomes, and say of each what the others teach.

        Args:
            rows: The places of each outcome's differences.
            wrong: 1 where the reuse was wrong, shape (n,).
            part: 0 to ``parts`` - 1, shape (n,); an outcome stays in its part from fit to fit.

        Returns:
            float64, shape (n,): log odds by weights that have not seen that outcome.
        """
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        owner = np.repeat(np.arange(len(rows)), lengths)
        flat = np.concatenate([*rows, self._seen[:0]])  # the last makes it whole where none differs
        seen, place = np.unique(flat, return_inverse=True)
        weights = self._carried(seen)
        judged = np.zeros(len(rows))
        for number in range(self._parts + 1):
            used = (part != number).astype(np.float64)
            taught, base = weights[number], float(self._bases[number])
            for _ in range(_STEPS):
                logits = base + np.bincount(owner, weights=taught[place], minlength=len(rows))
                chance = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
                miss = used * (wrong - chance)
                # An outcome's curvature, shared by all its places: no step is then too long.
                bend = used * np.maximum(chance * (1.0 - chance), _CURVATURE_MIN) * (lengths + 1.0)
                pull = np.bincount(place, weights=miss[owner], minlength=len(seen))
                hold = np.bincount(place, weights=bend[owner], minlength=len(seen))
                taught = taught + (pull - _RIDGE * taught) / (hold + _RIDGE)
                base += float(miss.sum() / (bend.sum() + 1e-3))
            weights[number], self._bases[number] = taught, base
            apart = used == 0.0
            logits = base + np.bincount(owner, weights=taught[place], minlength=len(rows))
            judged[apart] = logits[apart]
        self._seen, self._weights = seen, weights.astype(np.float32)
        self._of_all[:] = 0.0
        self._of_all[seen] = weights[-1]
        return judged

    def _carried(self, seen: Places) -> NDArray[np.float64]:
        """Return the weights of the last fit for these places; 0 for those that are new."""
        weights = np.zeros((self._parts + 1, len(seen)))
        _, here, before = np.intersect1d(seen, self._seen, assume_unique=True, return_indices=True)
        weights[:, here] = self._weights[:, before]
        return weights

    def copy(self) -> TellingWords:
        """Return the same weights, to be fitted further while these still score."""
        other = TellingWords(parts=self._parts)
        other._of_all = self._of_all.copy()
        other._seen, other._weights = self._seen, self._weights  # replaced by a fit, never changed
        other._bases = self._bases.copy()
        return other

    def bytes(self) -> int:
        """Return how much memory the weights take."""
        return self._of_all.nbytes + self._seen.nbytes + self._weights.nbytes


def places_of(differences: Differences) -> Places:
    """Return differences as they are kept: of many, those that always come first."""
    return np.array(differences[:_KEPT_MAX], np.uint16)


def row_bytes(row: Places) -> int:
    """Return how much memory one outcome's differences take."""
    return _ROW_BYTES + row.nbytes
