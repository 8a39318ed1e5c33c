"""Passages that questions lead to, held ahead in a small area beside what the policy keeps.

A question names terms and entities, which led to passages before (`QueryTopics.expected`). Those of
them that it did not retrieve itself may be what is asked next. They never displace what is kept:
the area has its own room, the newest question's come in for the oldest, and each ends as useful,
late or unused (`shadow.PrefetchAccount`; nothing makes room, so nothing can pollute).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Mapping

from stoker.errors import ConfigError
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.shadow import PrefetchAccount


class QuestionArea:
    """A bounded area of passages that nobody has asked for yet. One thread at a time.

    Invariants: at most ``keys_max`` keys inside; each key brought in is accounted for once.
    """

    def __init__(self, keys_max: int, *, per_question_max: int) -> None:
        """Start empty.

        Args:
            keys_max: Passages inside; at least 1.
            per_question_max: Passages that one question may bring in; at least 1.
        """
        if keys_max < 1 or per_question_max < 1:
            raise ConfigError(
                "expected keys_max and per_question_max >= 1, found "
                f"{keys_max} and {per_question_max}"
            )
        self._keys_max = keys_max
        self._per_question_max = per_question_max
        self._inside: dict[ContentKey, None] = {}
        self.account = PrefetchAccount()

    def __contains__(self, key: object) -> bool:
        return key in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    def access(self, key: ContentKey, time_s: float) -> bool:
        """Take a key that was asked for out; return whether it had been there in time."""
        if key not in self._inside:
            return False
        del self._inside[key]
        return self.account.hit(key, time_s)

    def bring(
        self,
        expected: Mapping[ContentKey, float],
        time_s: float,
        *,
        retrieved: Collection[ContentKey],
        kept: Container[ContentKey],
    ) -> list[ContentKey]:
        """Bring in what a question leads to; return it, what is expected most first.

        Args:
            expected: Accesses (>= 0) by key, as `QueryTopics.expected` gives.
            time_s: Unix seconds of the question.
            retrieved: What it retrieved itself.
            kept: What is resident anyway.
        """
        new = [
            key
            for key in expected
            if key not in self._inside and key not in retrieved and key not in kept
        ]
        count = min(self._per_question_max, self._keys_max)
        brought = heapq.nsmallest(count, new, key=lambda key: (-expected[key], key))
        for key in brought:
            self._inside[key] = None
            self.account.issued(key, None, time_s)
        while len(self._inside) > self._keys_max:
            oldest = next(iter(self._inside))
            del self._inside[oldest]
            self.account.evicted(oldest)
        return brought

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._inside) <= self._keys_max
        assert self.account.pending == len(self._inside)
