"""Keys of lookups that came together: ``win:<start>|grp:<cluster>|sig:<hash>``.

Questions within a few seconds of each other are grouped by density, so that one event can say
"these sessions ask for the same thing now". The key is the same whatever the order of arrival.

The clustering is DBSCAN (Ester et al., KDD 1996) of scikit-learn, run over the sliding window. A
group is named by its smallest fingerprint, since a library's cluster numbers depend on order. For
one question only those are clustered that near neighbours link to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.question import read_question

NO_GROUP = "-"
_ROUNDING = 1e-5  # of a product in float32: what is linked may be too many, never too few


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    time_s: float
    vector: NDArray[np.float32]
    fingerprint: int


class GroupKeys:
    """The sliding window of one tenant's questions. Not thread-safe.

    Args:
        window_s: Width of the window; seconds.
        distance_max: Cosine distance within which two questions are neighbours.
        asked_max: Questions kept in the window; the oldest go first beyond it.

    Raises:
        UnavailableError: at the first clustering, where scikit-learn is missing.
    """

    def __init__(
        self, *, window_s: float = 5.0, distance_max: float = 0.2, asked_max: int = 512
    ) -> None:
        if not window_s > 0 or not 0 < distance_max < 2 or asked_max < 2:
            raise InputError(
                f"expected a window, a distance in (0, 2) and at least 2 questions, found "
                f"{window_s}, {distance_max}, {asked_max}"
            )
        self._window_s = window_s
        self._distance_max = distance_max
        self._asked_max = asked_max
        self._window: deque[_Asked] = deque()

    def add(self, text: str, vector: NDArray[Any], time_s: float) -> None:
        """Take a question into the window; times may arrive a little out of order.

        Raises:
            InputError: the vector is not one finite, non-zero vector, or of another dim; the time
                is no number.
        """
        if not math.isfinite(time_s):
            raise InputError(f"time_s: expected seconds, found {time_s}")
        given = np.asarray(vector, np.float32)
        length = float(np.linalg.norm(given))
        if given.ndim != 1 or not math.isfinite(length) or length == 0.0:
            raise InputError("vector: expected finite values of shape (dim,) that are not all zero")
        if self._window and len(self._window[0].vector) != len(given):
            raise InputError(
                f"vector: expected {len(self._window[0].vector)} dimensions, found {len(given)}"
            )
        asked = _Asked(time_s, given / np.float32(length), read_question(text).fingerprint)
        newest = max([time_s, *(other.time_s for other in self._window)])
        kept = [*self._window, asked]
        kept = [other for other in kept if other.time_s > newest - self._window_s]
        # In an order of their own, so that the order of arrival cannot matter.
        kept.sort(key=lambda other: (other.time_s, other.fingerprint))
        self._window = deque(kept[-self._asked_max :])

    def key_of(self, text: str, time_s: float) -> str:
        """Return the key of a question that is in the window, or was.

        A question without neighbours, or no longer in the window, has the group ``-``.
        """
        fingerprint = read_question(text).fingerprint
        start = math.floor(time_s / self._window_s) * self._window_s
        group = self._group_of(fingerprint)
        # Of Unix times, six digits would be the same for hours.
        told = f"{start:.6f}".rstrip("0").removesuffix(".")
        return f"win:{told}|grp:{group}|sig:{fingerprint:016x}"

    def group_count(self, time_s: float) -> int:
        """Return how many groups the window that ends at a time holds."""
        near = [asked for asked in self._window if asked.time_s > time_s - self._window_s]
        return len(set(self._named(near).values()))

    def _group_of(self, fingerprint: int) -> str:
        """Return a question's group, clustering only what is linked to it by near neighbours.

        Clusters never reach beyond that, so most questions, which have no neighbour, cost one
        product of their vector with the window's.
        """
        window = list(self._window)
        reached = np.array([asked.fingerprint == fingerprint for asked in window], bool)
        if not reached.any():
            return NO_GROUP
        vectors = np.stack([asked.vector for asked in window])
        fresh = reached
        while fresh.any():
            near = (vectors @ vectors[fresh].T >= 1.0 - self._distance_max - _ROUNDING).any(axis=1)
            fresh = near & ~reached
            reached = reached | near
        linked = [window[place] for place in np.flatnonzero(reached)]
        return self._named(linked).get(fingerprint, NO_GROUP)

    def _named(self, window: Sequence[_Asked]) -> dict[int, str]:
        if len(window) < 2:
            return {}
        vectors = np.stack([asked.vector for asked in window])
        distances = np.clip(1.0 - vectors @ vectors.T, 0.0, 2.0)
        np.fill_diagonal(distances, 0.0)
        found = _dbscan()(eps=self._distance_max, min_samples=2, metric="precomputed")
        members: dict[int, list[int]] = {}
        for cluster, asked in zip(found.fit_predict(distances).tolist(), window, strict=True):
            if cluster >= 0:
                members.setdefault(cluster, []).append(asked.fingerprint)
        return {
            fingerprint: f"{min(prints):016x}"
            for prints in members.values()
            for fingerprint in prints
        }


def _dbscan() -> Any:
    try:
        from sklearn.cluster import DBSCAN
    except ImportError as error:
        raise UnavailableError(
            "expected the package scikit-learn, found none: install stoker[models]"
        ) from error
    return DBSCAN
