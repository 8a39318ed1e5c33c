"""What a search returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a batch of answers says of itself, one entry a query.

    Attributes:
        completeness: float32: share of the walk's work that was done.
        recall_bound: float32: calibrated lower bound on recall@k.
        expected_recall: float32: estimate of recall@k for this very query.
        exact_share: float32: share of hits scored by their full vector.
        pages_read: int64: pages read from the device.
        bytes_read: int64: bytes read from the device.
        rounds: int64: rounds of device reads that waited for each other.
        deadline_hit: bool: whether the deadline cut the work short.
        scanned: bool: whether a segment compared every row that could be in the answer, instead of
            walking to the nearest.
    """

    completeness: NDArray[np.float32]
    recall_bound: NDArray[np.float32]
    expected_recall: NDArray[np.float32]
    exact_share: NDArray[np.float32]
    pages_read: NDArray[np.int64]
    bytes_read: NDArray[np.int64]
    rounds: NDArray[np.int64]
    deadline_hit: NDArray[np.bool_]
    scanned: NDArray[np.bool_]

    @classmethod
    def nothing_to_do(cls, count: int) -> Summary:
        """Of ``count`` answers that are whole because there was nothing to search."""
        ones, zeros = np.ones(count, np.float32), np.zeros(count, np.int64)
        no = np.zeros(count, np.bool_)
        return cls(ones, ones, ones, ones, zeros, zeros, zeros, no, no)


class Summarized:
    """Carries a `Summary`, computed when somebody first asks: most callers want the hits alone.

    Either the summary itself, or what computes it and the facts that it is computed from.
    """

    __slots__ = ("_facts", "_summary")

    def __init__(self, summary: Summary | Callable[[Any], Summary], facts: Any = None) -> None:
        self._summary = summary
        self._facts = facts

    @property
    def lazy_summary(self) -> tuple[Summary | Callable[[Any], Summary], Any]:
        """What another answer made of this one can carry without computing it now."""
        return self._summary, self._facts

    @property
    def summary(self) -> Summary:
        """The columns; see `Summary`."""
        summary = self._summary
        if not isinstance(summary, Summary):
            self._summary = summary = summary(self._facts)
            self._facts = None
        return summary


class Hits(Summarized):
    """The answer to one query (1-d arrays, plain numbers) or to a batch (a row a query).

    Attributes:
        ids: The caller's ids, shape (k,) or (nq, k), nearest first: int64, or str in an object
            array. Where fewer than k were found, the tail is -1 (or None).
        scores: float32, same shape: inner product or cosine (falling), or squared L2 distance
            (rising). The tail of missing hits is not-a-number.
    """

    __slots__ = ("_single", "ids", "scores")

    def __init__(
        self,
        ids: NDArray[Any],
        scores: NDArray[np.float32],
        summary: Summary | Callable[[Any], Summary],
        facts: Any = None,
        single: bool = False,
    ) -> None:
        # Flat, like the arguments by place: one is made for every query.
        self._summary = summary
        self._facts = facts
        self.ids = ids
        self.scores = scores
        self._single = single

    def _column(self, name: str) -> Any:
        values = getattr(self.summary, name)
        return values[0].item() if self._single else values

    @property
    def completeness(self) -> Any:
        """Share of the walk's work that was done, 0 to 1: below 1 when pages were damaged, or not
        resident and could not be read in time. A float, or float32 (nq,).
        """
        return self._column("completeness")

    @property
    def recall_bound(self) -> Any:
        """Lower bound on recall@k, calibrated when the segment was sealed, at the confidence that
        its calibration states. A float, or float32 (nq,).
        """
        return self._column("recall_bound")

    @property
    def expected_recall(self) -> Any:
        """The engine's own estimate of recall@k for this very query."""
        return self._column("expected_recall")

    @property
    def exact_share(self) -> Any:
        """Share of the hits whose score was computed from the full vector."""
        return self._column("exact_share")

    @property
    def pages_read(self) -> Any:
        """Pages read from the device. An int, or int64 (nq,)."""
        return self._column("pages_read")

    @property
    def bytes_read(self) -> Any:
        """Bytes read from the device. An int, or int64 (nq,)."""
        return self._column("bytes_read")

    @property
    def rounds(self) -> Any:
        """Rounds of device reads that waited for each other."""
        return self._column("rounds")

    @property
    def deadline_hit(self) -> Any:
        """Whether the deadline cut the work short. A bool, or bool (nq,)."""
        return self._column("deadline_hit")

    @property
    def scanned(self) -> Any:
        """Whether a segment compared every row instead of walking. A bool, or bool (nq,)."""
        return self._column("scanned")

    def first(self) -> Hits:
        """The only query's answer, unwrapped to 1-d arrays and plain numbers."""
        return Hits(self.ids[0], self.scores[0], self._summary, self._facts, True)

    def __len__(self) -> int:
        return len(self.ids)

    def __reduce__(self) -> tuple[Any, ...]:
        # What the summary would be computed from belongs to the open index and cannot travel.
        return Hits, (self.ids, self.scores, self.summary, None, self._single)

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{field.name}={self._column(field.name)!r}" for field in dataclasses.fields(Summary)
        )
        return f"Hits(ids={self.ids!r}, scores={self.scores!r}, {columns})"
