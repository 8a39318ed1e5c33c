"""Which differing words tell two questions apart, learnt from the outcomes of verified lookups.

"Delete the sales report" and "erase the sales report" want the same passages; with "export", or
with "billing", they do not, though each pair differs in one word and the cosines are alike. Which
words matter no table knows beforehand; the searches that follow refusals say so one by one.

Source: logistic regression with one step per outcome and a step size per weight, McMahan et al.,
"Ad click prediction: a view from the trenches", KDD 2013, over hashed words (Weinberger et al.,
ICML 2009). Ours has no sparsity term: the table is small. What it says is one feature of
`reuse_selector`, taken as it was *before* the outcome was known: so it is judged by questions that
it had not seen, like any other. Nothing is released on its word: it ranks, and the proof counts.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.guards import differing_words
from stoker.kvcache.question import Question, encoded

Differences = tuple[int, ...]
"""Places in the table of weights: of each word that only one has, and of pairs of such words."""

NO_DIFFERENCES: Differences = ()
WORDS_MAX = 48  # of each kind; long texts that differ in more differ in everything
_PLACES = 1 << 14
_STEP = 0.5


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
    costs reuse, not truth. Takes 128 KiB.
    """

    def __init__(self) -> None:
        self._weights: NDArray[np.float32] = np.zeros(_PLACES, np.float32)
        self._squares: NDArray[np.float32] = np.ones(_PLACES, np.float32)
        self._base, self._base_square = -1.0, 1.0

    def score(self, differences: Differences) -> float:
        """Return the log odds that a reuse across these differences is wrong."""
        weights = self._weights
        return self._base + math.fsum(float(weights[place]) for place in differences)

    def learn(self, differences: Differences, *, wrong: bool) -> None:
        """Take one verified outcome; a few microseconds a word."""
        chance = 1.0 / (1.0 + math.exp(-min(max(self.score(differences), -30.0), 30.0)))
        miss = float(wrong) - chance
        self._base_square += miss * miss
        self._base += _STEP * miss / math.sqrt(self._base_square)
        for place in differences:
            self._squares[place] += miss * miss
            self._weights[place] += _STEP * miss / math.sqrt(float(self._squares[place]))

    def bytes(self) -> int:
        """Return how much memory the weights take."""
        return self._weights.nbytes + self._squares.nbytes

    def relearn(self) -> None:
        """Let new outcomes count as the first ones did; what was learnt stays until they differ."""
        self._squares[:] = 1.0
        self._base_square = 1.0
