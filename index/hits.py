"""What a search returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Hits:
    """The answer to one query (1-d arrays) or to a batch (2-d arrays, one row a query).

    Attributes:
        ids: The caller's ids, shape (k,) or (nq, k), nearest first: int64, or str in an object
            array. Where fewer than k were found, the tail is -1 (or None).
        scores: float32, same shape: inner product or cosine (falling), or squared L2 distance
            (rising). The tail of missing hits is not-a-number.
        completeness: Share of the walk's work that was done, 0 to 1: below 1 when pages were
            damaged or not resident and could not be read in time. A float, or float32 (nq,).
        recall_bound: Lower bound on recall@k, calibrated when the segment was sealed, at the
            confidence that its calibration states. A float, or float32 (nq,).
        expected_recall: The engine's own estimate of recall@k for this very query.
        exact_share: Share of the hits whose score was computed from the full vector.
        pages_read: Pages read from the device. An int, or int64 (nq,).
        bytes_read: Bytes read from the device.
        rounds: Rounds of device reads that waited for each other.
        deadline_hit: Whether the deadline cut the work short. A bool, or bool (nq,).
    """

    ids: NDArray[Any]
    scores: NDArray[np.float32]
    completeness: Any
    recall_bound: Any
    expected_recall: Any
    exact_share: Any
    pages_read: Any
    bytes_read: Any
    rounds: Any
    deadline_hit: Any

    def first(self) -> Hits:
        """The only query's answer, unwrapped to 1-d arrays and plain numbers."""
        return Hits(
            ids=self.ids[0],
            scores=self.scores[0],
            completeness=float(self.completeness[0]),
            recall_bound=float(self.recall_bound[0]),
            expected_recall=float(self.expected_recall[0]),
            exact_share=float(self.exact_share[0]),
            pages_read=int(self.pages_read[0]),
            bytes_read=int(self.bytes_read[0]),
            rounds=int(self.rounds[0]),
            deadline_hit=bool(self.deadline_hit[0]),
        )

    def __len__(self) -> int:
        return len(self.ids)
