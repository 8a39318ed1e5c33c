"""Measure, when a segment is sealed, what its searches can promise.

Held-out queries are drawn near, far from and between stored vectors; their exact neighbors are
found while the vectors stream past; then the segment itself is searched at several widths. What is
kept is what the worst kind of query reached, and beside it what those reached that lie nearer to
what they found than nearly all of the other kinds: a walk can see that of a query when it has met
its best row, and a far narrower one is then enough.

Others are drawn at random, with no regard to what is stored. Walks find less of what those ask
for, and no target is set by them; but the answer to one like them promises what they reached, and
no more. Answers tell them apart by how near the best row is: see `recall_bounds.nearness`.

All of it is measured of two sorts of walks: those that enter the bottom level at one place, and
those that walk the level above as widely and enter it at all that they find (`narrowest`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.index.equal_rows import row_hashes
from stoker.index.exact import FEW_DIMS, unit_rows, wide_ranks
from stoker.index.manifest import FILES, Calibration, Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

CONFIDENCE: Final = 0.95
_K: Final = 10
# Of the known kinds together. Of 128 queries of a kind the mean recall was off by 0.01 and more,
# which is half of what a walk may lose.
_QUERIES: Final = 1024
# Of those, as many are asked with walks too wide to ask all, where recall differs less from query
# to query; and from which width on.
_QUERIES_WIDE: Final = 512
_WIDE_FROM: Final = 192
KINDS: Final = ("near", "far", "between", "halves")
# How many of them, the first, targets are kept for. All count for what is promised.
_TARGET_KINDS: Final = 3
_STRANGERS: Final = 128
# Of the random queries' lengths over those of the vectors about their centre.
_STRANGE_LENGTHS: Final = (0.5, 4.0)
# Share of the queries that may lie farther from their answers than is called known.
_FARTHEST: Final = 0.01
# How much nearer than it is a float32 score may make a row seem, or farther.
_ROUNDED: Final = 5e-7
# Share of the other kinds that may lie as near as is called near, and the fewest near ones that
# say anything.
_NEAREST: Final = 0.01
_NEAR_MIN: Final = 60
_ROWS_MIN: Final = 64
# Mean recall from which on wider walks are not measured.
_WHOLE: Final = 0.9995
_WIDTHS: Final = (10, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768)
# One-sided, in standard errors: a mean of unseen queries is at least as high in 19 of 20 draws.
_SURE: Final = 1.65
# At which two ways to walk are compared by what they look at.
_COST_WIDTH: Final = 64
_SEED: Final = 20_160_330
# Room for the vectors that re-ranking reads, beside all else that a walk may want in memory.
_READ_BYTES: Final = 64 << 20
# Vectors that one measured query may read: more than any leaves in doubt.
_READS_MAX: Final = 256


@dataclasses.dataclass
class Probe:
    """Held-out queries, and the best rows met so far while vectors stream by.

    Attributes:
        queries: float32, shape (nq, dim): those of `KINDS` in turn, then those at random.
        known: How many are of `KINDS`.
        spread: Mean squared distance of the vectors from their centre.
        scores: Shape (nq, k): best scores so far, falling (minus squared distance for l2, but for
            what a query's length adds). float32, or float64 where dimensions are few.
        rows: int64, shape (nq, k): the sealed rows that have them.
        hashes: Of the vectors met, in sealed order: equal ones stand for each other.
    """

    queries: NDArray[np.float32]
    known: int
    spread: float
    scores: NDArray[np.floating]
    rows: NDArray[np.int64]
    metric: str
    hashes: list[NDArray[np.uint64]] = dataclasses.field(default_factory=list)

    @classmethod
    def draw(cls, vectors: NDArray[Any], rows: NDArray[np.int64], *, metric: str) -> Probe | None:
        """Draw queries; None when there are too few rows for a measurement to mean anything.

        Four kinds in turn (see `KINDS`), because what a walk meets depends on how far from the
        stored vectors a query lies, and nobody knows yet what will be asked: *near* one vector
        (a cosine of 0.84 and more: a passage looks for its like), *far* from it (0.5 to 0.75: a
        question looks for a passage), *between* two that have nothing to do with each other, and
        *halves*, as near to the one as to the other: no width is chosen by those, which are seldom
        asked, but what is promised has to hold for them too. Then 128, or as many as those if they
        are fewer, in random directions, half from the origin and half from the vectors' centre, at
        half to four times the vectors' distance from it.
        """
        count = len(rows)
        if count < _ROWS_MIN:
            return None
        rng = np.random.default_rng(_SEED)
        queries = min(_QUERIES, count // 2)
        first = rng.choice(count, queries, replace=False)
        base = np.asarray(vectors[rows[first]], np.float32)
        other = np.asarray(vectors[rows[rng.integers(0, count, queries)]], np.float32)
        if metric == "cosine":
            base, other = unit_rows(base), unit_rows(other)
        centre = base.mean(axis=0)
        size = np.linalg.norm(base - centre, axis=1, keepdims=True)
        noise = rng.standard_normal(base.shape).astype(np.float32)
        noise *= size / np.sqrt(base.shape[1])
        reach = rng.uniform(0.0, 1.0, (queries, 1)).astype(np.float32)
        kind = np.arange(queries)[:, None] % len(KINDS)
        drawn = np.choose(
            kind,
            [
                base + (0.25 + 0.4 * reach) * noise,
                base + (0.9 + 0.8 * reach) * noise,
                0.6 * base + 0.4 * other + 0.3 * noise,
                0.5 * base + 0.5 * other + 0.3 * reach * noise,
            ],
        ).astype(np.float32)
        strange = rng.standard_normal((min(_STRANGERS, queries), base.shape[1]))
        low, high = np.log(_STRANGE_LENGTHS)
        strange *= np.exp(rng.uniform(low, high, (len(strange), 1))) * size.mean()
        strange /= np.sqrt(base.shape[1])
        strange[::2] += centre
        drawn = np.concatenate([drawn, strange.astype(np.float32)])
        if metric == "cosine":
            drawn = unit_rows(drawn)
        k = min(_K, count)
        dtype = np.float64 if drawn.shape[1] <= FEW_DIMS else np.float32
        return cls(
            queries=np.ascontiguousarray(drawn),
            known=queries,
            spread=float((size.astype(np.float64) ** 2).mean()),
            scores=np.full((len(drawn), k), -np.inf, dtype),
            rows=np.full((len(drawn), k), -1, np.int64),
            metric=metric,
        )

    def take(
        self,
        batch: NDArray[np.float32],
        first_row: int,
        *,
        parts: int = 1,
        run: Callable[[Callable[[int], None], Iterable[int]], Iterable[None]] = map,
    ) -> None:
        """Meet a batch of vectors whose sealed rows start at ``first_row``.

        Args:
            batch: float32, shape (n, dim).
            first_row: Of it.
            parts: Of the queries, which ``run`` may meet it with at the same time.
            run: As `map`.
        """
        self.hashes.append(row_hashes(batch))
        if batch.shape[1] <= FEW_DIMS:
            self._meet_few(batch, first_row)
            return
        bounds = np.linspace(0, len(self.queries), parts + 1).astype(int)

        def meet(part: int) -> None:
            here = slice(bounds[part], bounds[part + 1])
            _core.meet_rows(
                self.queries[here],
                batch,
                first_row=first_row,
                l2=self.metric == "l2",
                scores=self.scores[here],
                rows=self.rows[here],
            )

        for _ in run(meet, range(parts)):
            pass

    def _meet_few(self, batch: NDArray[np.float32], first_row: int) -> None:
        """The same for few dimensions, by products that tell apart what floats round to one."""
        ranks = wide_ranks(self.queries, batch, self.metric)
        if self.metric == "l2":
            ranks += (self.queries.astype(np.float64) ** 2).sum(axis=1)[:, None]
        scores = np.concatenate([self.scores, ranks], axis=1)
        found = np.broadcast_to(np.arange(first_row, first_row + len(batch)), ranks.shape)
        rows = np.concatenate([self.rows, found], axis=1)
        k = self.scores.shape[1]
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        best = np.take_along_axis(best, order, 1)
        self.scores = np.take_along_axis(scores, best, 1)
        self.rows = np.take_along_axis(rows, best, 1)

    def fewer(self, known: int) -> Probe:
        """Return those with the first ``known`` of the known queries, once all vectors were met."""
        return dataclasses.replace(
            self,
            known=min(known, self.known),
            queries=self.of_fewer(self.queries, known),
            scores=self.of_fewer(self.scores, known),
            rows=self.of_fewer(self.rows, known),
        )

    def of_fewer(self, values: NDArray[Any], known: int) -> NDArray[Any]:
        """Return of one value a query those that belong to `fewer`."""
        return np.concatenate([values[: min(known, self.known)], values[self.known :]])

    def nearness_lows(self, segment: Segment) -> tuple[float, float]:
        """How near at least the known queries lie to their neighbors, and those at random.

        A hundredth of each is left out.
        """
        near = self.nearness(segment)
        known, strange = (
            float(np.nan_to_num(np.quantile(part, _FARTHEST)))
            for part in (near[: self.known], near[self.known :])
        )
        return known - _ROUNDED, min(known, strange) - _ROUNDED

    def near_ones(self, segment: Segment) -> tuple[float, NDArray[np.bool_]]:
        """How near is nearer than nearly all of the other kinds, and which *near* queries are so.

        Returns:
            (nearness, bool array of shape (nq,)); none are where there are too few to speak of.
        """
        near = self.nearness(segment)
        kind = np.arange(len(near)) % len(KINDS)
        kind[self.known :] = len(KINDS)
        others = near[(kind > 0) & (kind < len(KINDS)) & np.isfinite(near)]
        from_ = float(np.quantile(others, 1.0 - _NEAREST)) if len(others) else math.inf
        chosen = (kind == 0) & (near >= from_)
        if chosen.sum() < _NEAR_MIN:
            return 0.0, np.zeros(len(near), np.bool_)
        return from_, chosen

    def nearness(self, segment: Segment) -> NDArray[np.float64]:
        """How near each query lies to its best row; see `recall_bounds.nearness`."""
        best = self.scores[:, 0].astype(np.float64)
        if self.metric == "l2":
            best = (self.queries.astype(np.float64) ** 2).sum(axis=1) - best
        return segment.nearness(best, self.queries)

    @functools.cached_property
    def _equals(self) -> NDArray[np.int64]:
        """A number for each sealed row, the same for equal vectors; once all were met."""
        _, numbers = np.unique(np.concatenate(self.hashes), return_inverse=True)
        return numbers.astype(np.int64)

    def recall_of(self, found: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share of each query's true neighbors that were found, or rows equal to them."""
        numbers = self._equals

        def named(rows: NDArray[np.int64]) -> NDArray[np.int64]:
            # The group of equal vectors, and the how manieth of it the row is in the answer.
            groups = np.sort(np.where(rows >= 0, numbers[rows], -1), axis=1)
            places = np.broadcast_to(np.arange(groups.shape[1]), groups.shape)
            new = np.ones(groups.shape, np.bool_)
            new[:, 1:] = groups[:, 1:] != groups[:, :-1]
            start = np.maximum.accumulate(np.where(new, places, 0), axis=1)
            unlike: NDArray[np.int64] = groups * groups.shape[1] + (places - start)
            return unlike

        return recall_of(named(found), named(self.rows))


def recall_of(found: NDArray[np.int64], truth: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of each query's true rows that were found, float64, shape (nq,)."""
    met: NDArray[np.float64] = (found[:, :, None] == truth[:, None, :]).any(axis=1).mean(axis=1)
    return met


def _reached(recall: NDArray[np.float64]) -> float:
    """The recall that the stated share of queries reached, with a margin for the sample's size.

    A distribution-free lower confidence bound on a quantile by order statistics (David & Nagaraja,
    Order Statistics, section 7.1): the index is moved down by 1.65 standard deviations of the
    binomial count.
    """
    ordered = np.sort(recall)
    n = len(ordered)
    miss = 1.0 - CONFIDENCE
    index = int(np.floor(n * miss - 1.65 * np.sqrt(n * miss * CONFIDENCE)))
    return float(ordered[index]) if index >= 0 else 0.0


def _sure_mean(recall: NDArray[np.float64]) -> float:
    """A lower bound on the mean recall of queries that were not drawn, from those that were.

    By the normal approximation, with one more query that lost a neighbor: where few were drawn
    and all found everything, that says less than where many were.
    """
    n = len(recall)
    squared = float(((recall - recall.mean()) ** 2).sum()) + 1.0 / _K**2
    return float(recall.mean()) - _SURE * math.sqrt(squared) / n


class _Worst(NamedTuple):
    """What the kind of query that fares worst reached: see `_worst_kind`."""

    mean: float
    low: float
    sure: float


def _worst_kind(recall: NDArray[np.float64], alike: NDArray[np.float64]) -> _Worst:
    """Mean recall, recall reached by the stated share, and what the mean is at least.

    Each of the kind of query that fares worst in it.

    A target that holds in the mean over all kinds would be missed by whoever asks only the hard
    ones, and promises are made to them too. Of the mean the last kind is left out.

    Args:
        recall: Of the known queries.
        alike: Of those at random that no answer can tell from known ones, since they lie as near.
            No target is set by them, but what is promised to either is promised to both.
    """
    parts = [recall[kind :: len(KINDS)] for kind in range(len(KINDS))]
    # Where those at random fare better, they must not make up for a kind.
    lows = [min(_reached(part), _reached(np.concatenate([part, alike]))) for part in parts]
    means = [float(part.mean()) for part in parts[:_TARGET_KINDS]]
    return _Worst(min(means), min(lows), min(_sure_mean(part) for part in parts[:_TARGET_KINDS]))


def _target_mean(recall: NDArray[np.float64]) -> float:
    """Mean recall of those known queries that targets are kept for: the last kind is left out."""
    return float(recall[np.arange(len(recall)) % len(KINDS) < _TARGET_KINDS].mean())


def calibrate(folder: Path, manifest: Manifest, probe: Probe) -> Manifest:
    """Search the sealed files with the held-out queries; return the manifest with the findings."""
    few = probe.fewer(_QUERIES_WIDE)
    walk_error, refine_error = _estimate_errors(folder, manifest, few, bits=4)
    coarse_error = 0.0
    if manifest.has_coarse:
        coarse_error, _ = _estimate_errors(folder, manifest, few, bits=2)
    k = probe.rows.shape[1]
    blank = Calibration(
        queries=probe.known,
        k=k,
        confidence=CONFIDENCE,
        ef=(k,),
        recall_mean=(1.0,),
        recall_low=(0.0,),
        upper_mean=0.0,
        upper_low=0.0,
        code_recall=0.0,
        refined_recall=0.0,
        code_error=walk_error,
        refine_error=refine_error,
        coarse_error=coarse_error,
        coarse_recall_mean=(1.0,) if manifest.has_coarse else (),
        coarse_recall_low=(0.0,) if manifest.has_coarse else (),
        spread=probe.spread,
    )
    manifest = dataclasses.replace(manifest, calibration=blank)
    widths = [w for w in _WIDTHS if k <= w <= manifest.count] or [k]
    with _opened(folder, manifest, bits=4) as segment:
        nearness_low, strange_nearness_low = probe.nearness_lows(segment)
        near_from, near = probe.near_ones(segment)
        alike = probe.nearness(segment) >= nearness_low
        asked = _Asked(probe, alike, near), _Asked(few, probe.of_fewer(alike, few.known), None)
        largest = min(_WIDTHS[-1], manifest.count)
        from_memory = functools.partial(_recall, segment, few, reading=False)
        _load(segment, "upper")
        upper = from_memory(k)
        _load(segment, "links", "vectors" if manifest.walks_vectors else "codes")
        by_code = from_memory(largest)
        _load(segment, "refine")
        refined = from_memory(largest)
        found = _by_width(segment, asked, widths)
        entry_cost = _entry_cost(segment, few, min(_COST_WIDTH, largest))
        entry = _by_width(segment, asked, widths, entered=(entry_cost, found))
    coarse = coarse_entry = _ByWidth((), (), (), (), (), (), ())
    if manifest.has_coarse:
        with _opened(folder, manifest, bits=2) as segment:
            _load(segment, "upper", "links", "coarse", "codes", "refine")
            coarse = _by_width(segment, asked, widths)
            coarse_entry = _by_width(segment, asked, widths, entered=(entry_cost, coarse))
    return dataclasses.replace(
        manifest,
        calibration=dataclasses.replace(
            blank,
            ef=tuple(widths),
            nearness_low=nearness_low,
            strange_nearness_low=strange_nearness_low,
            near_from=near_from,
            near_mean=found.near_means,
            near_low=found.near_lows,
            coarse_near_mean=coarse.near_means,
            coarse_near_low=coarse.near_lows,
            recall_mean=found.means,
            recall_low=found.lows,
            recall_sure=found.sures,
            coarse_recall_sure=coarse.sures,
            entry_sure=entry.sures,
            coarse_entry_sure=coarse_entry.sures,
            strange_mean=found.strange_means,
            strange_low=found.strange_lows,
            coarse_recall_mean=coarse.means,
            coarse_recall_low=coarse.lows,
            coarse_strange_mean=coarse.strange_means,
            coarse_strange_low=coarse.strange_lows,
            entry_mean=entry.means,
            entry_low=entry.lows,
            entry_strange_mean=entry.strange_means,
            entry_strange_low=entry.strange_lows,
            coarse_entry_mean=coarse_entry.means,
            coarse_entry_low=coarse_entry.lows,
            coarse_entry_strange_mean=coarse_entry.strange_means,
            coarse_entry_strange_low=coarse_entry.strange_lows,
            entry_cost=entry_cost,
            upper_mean=_target_mean(upper[: few.known]),
            upper_low=_reached(upper),
            code_recall=_target_mean(by_code[: few.known]),
            refined_recall=_target_mean(refined[: few.known]),
        ),
    )


def _opened(folder: Path, manifest: Manifest, *, bits: int) -> Segment:
    """Open with room for all but the vectors: a build holds no second copy of those in memory."""
    parts = ["links", "codes", "refine", *(["coarse"] if bits == 2 else [])]
    wanted = sum((folder / FILES[part]).stat().st_size for part in parts)
    settings = IndexSettings(navigation_bits=bits, rerank_reads_max=_READS_MAX)
    return Segment(folder, manifest, wanted + _READ_BYTES, settings)


def _load(segment: Segment, *kinds: str) -> None:
    for batch in segment.unit_batches():
        if batch.kind in kinds:
            segment.load_units(batch.kind, batch.units)


def _recall(
    segment: Segment, probe: Probe, width: int, *, reading: bool, widely: bool = False
) -> NDArray[np.float64]:
    """Recall of each held-out query, float64, shape (nq,).

    Args:
        reading: Score answers by their full vectors, reading them, as if all were resident. Else
            answer from what is resident alone.
        widely: Walk the level above the bottom as widely.
    """
    hits = segment.search(
        probe.queries,
        probe.rows.shape[1],
        ef=width,
        entry_ef=width if widely else None,
        recall_target=1.0 if reading else None,
        resident_only=not reading,
    )
    return probe.recall_of(hits.rows)


def _entry_cost(segment: Segment, probe: Probe, width: int) -> float:
    """Records that walks look at where they enter widely, over those of greedy entries.

    Measured of walks on 4-bit codes, of one width, that score their answers by vectors: records of
    second codes and vectors count in both, so the share is nearer to 1 than the walks' alone. It is
    taken for other widths and for walks on coarse codes too.
    """
    counts = [sum(segment.page_counts())]
    for widely in (False, True):
        _recall(segment, probe, width, reading=True, widely=widely)
        counts.append(sum(segment.page_counts()))
    return (counts[2] - counts[1]) / max(counts[1] - counts[0], 1)


class _Asked(NamedTuple):
    """Queries to measure with.

    Attributes:
        probe: They.
        alike: Which of them lie as near to what they find as known ones do.
        near: Which of them are near, where those are measured apart.
    """

    probe: Probe
    alike: NDArray[np.bool_]
    near: NDArray[np.bool_] | None


class _ByWidth(NamedTuple):
    """Mean and lower bound of the recall at each width: of known queries, random and near ones.

    And what the mean of known ones is at least: see `_sure_mean`.
    """

    means: tuple[float, ...]
    lows: tuple[float, ...]
    sures: tuple[float, ...]
    strange_means: tuple[float, ...]
    strange_lows: tuple[float, ...]
    near_means: tuple[float, ...]
    near_lows: tuple[float, ...]


def _by_width(
    segment: Segment,
    asked: tuple[_Asked, _Asked],
    widths: Sequence[int],
    *,
    entered: tuple[float, _ByWidth] | None = None,
) -> _ByWidth:
    """Measure each width; of the known queries the kind that fares worst counts.

    A wider walk can only meet more; noise in the sample must not say otherwise. Nor is more
    measured where nothing is left to find, or nobody would choose it.

    Args:
        segment: To search.
        asked: All queries, and those of them that wide walks are asked.
        widths: To measure, rising.
        entered: Measure walks that enter the bottom widely, which cost so many times their width;
            and what was found of the others: wider ones than find all are not wanted.
    """
    enough, cost = math.inf, 1.0
    if entered is not None:
        cost, other = entered
        whole = (w for w, mean in zip(widths, other.means, strict=True) if mean >= _WHOLE)
        enough = next(whole, math.inf)
    measured: list[tuple[float, ...]] = []
    for width in widths:
        if measured and (measured[-1][0] >= _WHOLE or width * cost >= enough):
            measured.append(measured[-1])
            continue
        probe, alike, near = asked[width >= _WIDE_FROM]
        recall = _recall(segment, probe, width, reading=True, widely=entered is not None)
        strange = recall[probe.known :]
        found = [
            *_worst_kind(recall[: probe.known], strange[alike[probe.known :]]),
            float(strange.mean()),
            _reached(strange),
        ]
        if entered is None and near is not None and near.any():
            found += [float(recall[near].mean()), _reached(recall[near])]
        elif measured:
            found += measured[-1][len(found) :]
        measured.append(tuple(found))
    columns = [
        tuple(float(value) for value in column)
        for column in np.maximum.accumulate(measured, axis=0).T
    ]
    return _ByWidth(*columns, *((),) * (len(_ByWidth._fields) - len(columns)))


def _estimate_errors(
    folder: Path, manifest: Manifest, probe: Probe, *, bits: int
) -> tuple[float, float]:
    """Root mean square errors over |q||x - centre|, on true neighbors.

    Of the codes that a walk on ``bits`` bits compares, and of both planes together.
    """
    with Segment(folder, manifest, 0, IndexSettings(navigation_bits=bits)) as segment:
        code: list[NDArray[np.float32]] = []
        refine: list[NDArray[np.float32]] = []
        asked = zip(probe.queries[: probe.known], probe.rows[: probe.known], strict=True)
        for query, rows in asked:
            by_code, by_both = segment.estimate_errors(query, rows[rows >= 0])
            code.append(by_code)
            refine.append(by_both)
    sizes = []
    for errors in (np.concatenate(code), np.concatenate(refine)):
        finite = errors[np.isfinite(errors)].astype(np.float64)
        sizes.append(float(np.sqrt(np.mean(finite**2))) if len(finite) else 0.0)
    return sizes[0], sizes[1]
