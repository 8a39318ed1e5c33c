"""The short way of a search: from query to ids in one native call.

Where all that counts lies in one sealed segment of whole-number ids, a warm query costs some ten
microseconds, and checking, holding and merging cost as much again. This way does without: the
native call itself checks the query, is what closing waits for, and writes ids. Whatever it cannot
do it leaves to the general way, `stoker.index.answer`, which answers alike, or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import stoker.kernels._core as _core
from stoker.index.hits import Hits, Summary

if TYPE_CHECKING:
    from stoker.index.segment import Segment

_FLOAT32: Final = np.dtype(np.float32)


class KnownSearch(NamedTuple):
    """How searches of one k, width and recall target are done.

    Attributes:
        width: Of the walk.
        options: The same for the native search.
        summarize: Makes the summary of what the native search says of itself.
        direct: Whether the short way may be taken.
        scans: Whether every row is looked at.
    """

    width: int
    options: _core.SearchOptions
    summarize: Callable[..., Summary]
    direct: bool
    scans: bool = False


class DirectSearch:
    """The short way into one open segment; see the module. Any thread may call anything.

    Holding one does not hold the segment open: after its close `search` gives nothing.
    """

    __slots__ = ("_ids_set", "_native", "_segment")

    def __init__(self, segment: Segment, native: _core.NativeSegment) -> None:
        """Search ``segment``, which ``native`` is the core of."""
        self._segment = segment
        self._native = native
        self._ids_set = False

    def search(
        self, queries: Any, k: int, ef: int | None, recall_target: float | None
    ) -> Hits | None:
        """Return the answer, or None where the general way has to give it.

        None comes back where the queries are no float32 array of this dimension or not finite, such
        a search was never done before, the ids are not in memory, or the segment was closed.
        """
        try:
            known = self._segment.known.get((k, ef, recall_target))
        except TypeError:  # A list, say, which no key can hold.
            return None
        if (
            known is None
            or not known.direct
            or type(queries) is not np.ndarray
            or queries.dtype is not _FLOAT32
        ):
            return None
        count, single = 1, queries.ndim == 1
        if not single:
            count = len(queries) if queries.ndim == 2 else 0
        shape: tuple[int, ...] = (k,) if single else (count, k)
        ids = np.empty(shape, np.int64)
        scores = np.empty(shape, np.float32)
        threads = 1 if count == 1 else self._segment.threads(count)
        facts = self._native.answer(queries, ids, scores, known.options, threads)
        if facts is None and self._set_ids():
            facts = self._native.answer(queries, ids, scores, known.options, threads)
        if facts is None:
            return None
        return Hits(ids, scores, known.summarize, facts, single)

    def _set_ids(self) -> bool:
        """Let searches have the ids once they have come into memory; True when this is new."""
        numbers = self._segment.ids.numbers
        if self._ids_set or numbers is None:
            return False
        self._native.set_ids(numbers)
        self._ids_set = True
        return True
