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
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.index.held_out import KINDS, K, Probe
from stoker.index.manifest import FILES, Calibration, Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

CONFIDENCE: Final = 0.95
# As many of the known queries are asked with walks too wide to ask all, where recall differs less
# from query to query; and from which width on.
_QUERIES_WIDE: Final = 512
_WIDE_FROM: Final = 192
# How many of them, the first, targets are kept for. All count for what is promised.
_TARGET_KINDS: Final = 3
# Mean recall from which on wider walks are not measured.
_WHOLE: Final = 0.9995
_WIDTHS: Final = (10, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768)
# One-sided, in standard errors: a mean of unseen queries is at least as high in 19 of 20 draws.
_SURE: Final = 1.65
# At which two ways to walk are compared by what they look at.
_COST_WIDTH: Final = 64
# Room for the vectors that re-ranking reads, beside all else that a walk may want in memory.
_READ_BYTES: Final = 64 << 20
# Vectors that one measured query may read: more than any leaves in doubt.
_READS_MAX: Final = 256


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
    squared = float(((recall - recall.mean()) ** 2).sum()) + 1.0 / K**2
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
