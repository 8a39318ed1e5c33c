"""One search over a view: every sealed segment, the delta, one answer."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.index.documents import DocumentStore
from stoker.index.filters import Filter
from stoker.index.generation import IdKind
from stoker.index.hits import Hits, Summary
from stoker.index.segment import SegmentHits
from stoker.index.view import SegmentView, View


class Question(NamedTuple):
    """A checked search.

    Attributes:
        queries: float32, shape (nq, dim), finite.
        k: Hits wanted, at least 1.
        ef: Width of the walk, None for what the target needs.
        recall_target: Recall aimed at, None for the setting.
        deadline_s: Seconds that the whole batch may take, None for no limit.
        node: Filter, None for all.
    """

    queries: NDArray[np.float32]
    k: int
    ef: int | None
    recall_target: float | None
    deadline_s: float | None
    node: Filter | None


def answer(view: View, question: Question, store: DocumentStore | None, id_kind: IdKind) -> Hits:
    """Search everything in ``view`` and merge by score.

    A document is live in one place only, so merging needs no look at ids. Parts are searched one
    after another, so reads and rounds add up; completeness and the recall bound are those of the
    weakest part, since any of them could hold all of the true neighbors.
    """
    deadline = None if question.deadline_s is None else time.monotonic() + question.deadline_s
    if len(view.segments) == 1 and not view.rows.live_count:
        # The common case, one sealed segment and no change since, is one query's whole cost.
        source = view.segments[0]
        only = _search_segment(source, question, store, id_kind, deadline)
        if only is not None:
            ids = source.sealed.ids_at(only.rows, id_kind)
            return Hits(ids, only.scores, *only.lazy_summary)
        return _merged(view, question, [], [], id_kind)
    # The delta costs no read: with a deadline it is best had first.
    sources: list[SegmentView | None] = []
    parts: list[SegmentHits] = []
    if view.rows.live_count:
        part = _search_delta(view, question)
        if part is not None:
            sources.append(None)
            parts.append(part)
    for segment in view.segments:
        part = _search_segment(segment, question, store, id_kind, deadline)
        if part is not None:
            sources.append(segment)
            parts.append(part)
    return _merged(view, question, sources, parts, id_kind)


def _search_delta(view: View, question: Question) -> SegmentHits | None:
    allowed = None
    if question.node is not None:
        allowed = view.delta.allowed(question.node, view.rows)
        if not (allowed & view.rows.alive).any():
            return None
    rows, scores = view.rows.search(question.queries, question.k, allowed)
    count = question.queries.shape[0]
    bound = min([1.0, *(block.found_low(question.k) for block in view.rows.blocks)])
    summary = dataclasses.replace(
        Summary.nothing_to_do(count), recall_bound=np.full(count, bound, dtype=np.float32)
    )
    return SegmentHits(rows, scores, summary)


def _search_segment(
    segment: SegmentView,
    question: Question,
    store: DocumentStore | None,
    id_kind: IdKind,
    deadline: float | None,
) -> SegmentHits | None:
    node = question.node
    decided = True if node is None else segment.sealed.decided(node)
    allow, allowed_count = segment.alive_bits, segment.live_count if decided else 0
    if node is not None and decided is None:
        allow, allowed_count = segment.sealed.mask(node, segment.dead, store, id_kind)
    if allowed_count == 0:
        return None
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    return segment.sealed.segment.search(
        question.queries,
        question.k,
        ef=question.ef,
        recall_target=question.recall_target,
        deadline_s=left,
        allow=allow,
    )


def _merged(
    view: View,
    question: Question,
    sources: list[SegmentView | None],
    parts: list[SegmentHits],
    id_kind: IdKind,
) -> Hits:
    count, k = question.queries.shape[0], question.k
    rows = np.full((count, k), -1, dtype=np.int64)
    scores = np.full((count, k), np.nan, dtype=np.float32)
    source_of = np.full((count, k), -1, dtype=np.int64)
    if parts:
        all_rows = np.concatenate([part.rows for part in parts], axis=1)
        all_scores = np.concatenate([part.scores for part in parts], axis=1)
        all_sources = np.repeat(np.arange(len(parts)), [part.rows.shape[1] for part in parts])
        ranks = all_scores if view.generation.metric == "l2" else -all_scores
        ranks = np.where(all_rows >= 0, ranks, np.inf)
        best = np.argsort(ranks, axis=1, kind="stable")[:, :k]
        rows = np.take_along_axis(all_rows, best, axis=1)
        scores = np.where(rows >= 0, np.take_along_axis(all_scores, best, axis=1), np.nan)
        source_of = all_sources[best]
    ids = _ids(view, sources, rows, source_of, id_kind)
    sizes = [
        float(view.rows.alive.sum() if source is None else source.live_count) for source in sources
    ]
    return Hits(ids, scores.astype(np.float32), lambda _: _summary(parts, sizes, rows, source_of))


def _ids(
    view: View,
    sources: list[SegmentView | None],
    rows: NDArray[np.int64],
    source_of: NDArray[np.int64],
    id_kind: IdKind,
) -> NDArray[Any]:
    ids: NDArray[Any] = np.empty(rows.shape, dtype=object)
    if id_kind == "int":
        ids = np.full(rows.shape, -1, dtype=np.int64)
    for number, source in enumerate(sources):
        here = (source_of == number) & (rows >= 0)
        if not here.any():
            continue
        if source is None:
            ids[here] = [view.rows.keys[row][1] for row in rows[here]]
        else:
            ids[here] = source.sealed.ids_at(rows[here], id_kind)
    return ids


def _summary(
    parts: list[SegmentHits],
    sizes: list[float],
    rows: NDArray[np.int64],
    source_of: NDArray[np.int64],
) -> Summary:
    count = rows.shape[0]
    if not parts:
        return Summary.nothing_to_do(count)
    summaries = [part.summary for part in parts]
    found = rows >= 0
    hit_count = np.maximum(found.sum(axis=1), 1)
    shares = [
        np.count_nonzero((source_of == number) & found, axis=1) / hit_count
        for number in range(len(parts))
    ]
    nothing = ~found.any(axis=1)

    def weighted(name: str) -> NDArray[np.float32]:
        values = zip(shares, (getattr(part, name) for part in summaries), strict=True)
        return np.where(nothing, 1.0, sum(share * value for share, value in values)).astype(
            np.float32
        )

    # What a part could not look at gave no hit that it could be weighed by: the rows of such a
    # part are as likely to be in the answer as any others.
    unseen = np.zeros(count)
    for size, part in zip(sizes, summaries, strict=True):
        lacks = np.where(part.completeness < 1, 1.0 - part.expected_recall, 0.0)
        unseen += size / max(sum(sizes), 1.0) * lacks

    return Summary(
        completeness=np.minimum.reduce([part.completeness for part in summaries]),
        recall_bound=np.minimum.reduce([part.recall_bound for part in summaries]),
        expected_recall=np.minimum(weighted("expected_recall"), 1.0 - unseen).astype(np.float32),
        exact_share=weighted("exact_share"),
        pages_read=np.add.reduce([part.pages_read for part in summaries]),
        bytes_read=np.add.reduce([part.bytes_read for part in summaries]),
        rounds=np.add.reduce([part.rounds for part in summaries]),
        deadline_hit=np.logical_or.reduce([part.deadline_hit for part in summaries]),
        scanned=np.logical_or.reduce([part.scanned for part in summaries]),
    )
