"""Measure, when a segment is sealed, what its searches can promise.

Held-out queries are drawn near, far from and between stored vectors; their exact neighbors are
found while the vectors stream past; then the segment itself is searched at several widths. What is
kept is what the worst kind of query reached, and beside it what those reached that lie nearer to
what they found than nearly all of the other kinds: a walk can see that of a query when it has met
its best row, and a far narrower one is then enough.

Others are drawn at random. Walks find less of what those ask for, the less the farther they lie,
and the width of no first walk is set by them; but a query like them is walked on for as wide as
they need, and its answer promises what they reached, and no more. Searches tell them apart by how
near the best row is: see `recall_bounds.nearness`.

All of it is measured of two sorts of walks: those that enter the bottom level at one place, and
those that walk the level above as widely and enter it at all that they find (`narrowest`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.index.held_out import KINDS, STRANGERS, K, Probe
from stoker.index.manifest import FILES, Calibration, Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

CONFIDENCE: Final = 0.95
# As many of the known queries are asked with walks too wide to ask all, where recall differs less
# from query to query; and from which width on.
_QUERIES_WIDE: Final = 512
_WIDE_FROM: Final = 192
# Of those at random, how many the stages of loading are asked: the first, which lie farthest.
_STRANGERS_STAGES: Final = 128
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
# The half of the vectors that counts as resident: whole runs of pages, as they are loaded, drawn by
# chance. Nobody knows yet what will be hot, and an expected recall is asked for by how much of the
# demand finds its vectors: of a half by chance half does, of the first half of the file whatever
# topics lie there.
_RUN_PAGES: Final = 16
_HALF_SEED: Final = 20_261_130
# How many times as many rows as are asked for may be settled by their vectors, and of how many
# queries those lie in memory together.
_SETTLED: Final = 3
_HALF_QUERIES: Final = 64


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
    few = probe.fewer(_QUERIES_WIDE, STRANGERS)
    by_stage = probe.fewer(_QUERIES_WIDE, _STRANGERS_STAGES)
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
        nearness = probe.nearness(segment)
        alike = nearness[probe.known :] >= nearness_low
        edges, bands = probe.strange_bands(nearness, nearness_low)
        asked = _Asked(probe, few, alike, bands, near)
        largest = min(_WIDTHS[-1], manifest.count)
        _load(segment, "upper")
        upper = by_stage.recall_of(_from_memory(segment, by_stage, k, k))
        _load(segment, "links", "vectors" if manifest.walks_vectors else "codes")
        by_code = by_stage.recall_of(_from_memory(segment, by_stage, largest, k))
        _load(segment, "refine")
        settled = _from_memory(segment, by_stage, largest, _SETTLED * k)
        refined = by_stage.recall_of(settled[:, :k])
        half = _half_recall(segment, by_stage, largest, settled)
        found = _by_width(segment, asked, widths)
        entry_cost = _entry_cost(segment, few, min(_COST_WIDTH, largest))
        entry = _by_width(segment, asked, widths, entered=(entry_cost, found))
    coarse = coarse_entry = _ByWidth(*((),) * len(_ByWidth._fields))
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
            strange_below=edges,
            strange_mean=found.strange_means,
            strange_low=found.strange_lows,
            strange_sure=found.strange_sures,
            coarse_recall_mean=coarse.means,
            coarse_recall_low=coarse.lows,
            coarse_strange_mean=coarse.strange_means,
            coarse_strange_low=coarse.strange_lows,
            coarse_strange_sure=coarse.strange_sures,
            entry_mean=entry.means,
            entry_low=entry.lows,
            entry_strange_mean=entry.strange_means,
            entry_strange_low=entry.strange_lows,
            entry_strange_sure=entry.strange_sures,
            coarse_entry_mean=coarse_entry.means,
            coarse_entry_low=coarse_entry.lows,
            coarse_entry_strange_mean=coarse_entry.strange_means,
            coarse_entry_strange_low=coarse_entry.strange_lows,
            coarse_entry_strange_sure=coarse_entry.strange_sures,
            entry_cost=entry_cost,
            upper_mean=_target_mean(upper[: by_stage.known]),
            upper_low=_reached(upper),
            code_recall=_target_mean(by_code[: by_stage.known]),
            refined_recall=_target_mean(refined[: by_stage.known]),
            half_recall=_target_mean(half[: by_stage.known]),
            half_low=_reached(half),
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
    segment: Segment, probe: Probe, width: int, *, widely: bool = False
) -> NDArray[np.float64]:
    """Recall of each held-out query, float64, shape (nq,), as if all vectors were resident.

    Answers are scored by their full vectors, which are read.

    Args:
        widely: Walk the level above the bottom as widely.
    """
    entry_ef = width if widely else None
    k = probe.rows.shape[1]
    hits = segment.search(probe.queries, k, ef=width, entry_ef=entry_ef, recall_target=1.0)
    return probe.recall_of(hits.rows)


def _from_memory(segment: Segment, probe: Probe, width: int, k: int) -> NDArray[np.int64]:
    """Rows that each held-out query finds in what is resident alone, int64, shape (nq, k)."""
    hits = segment.search(probe.queries, min(k, segment.count), ef=width, resident_only=True)
    return hits.rows


def _entry_cost(segment: Segment, probe: Probe, width: int) -> float:
    """Records that walks look at where they enter widely, over those of greedy entries.

    Measured of walks on 4-bit codes, of one width, that score their answers by vectors: records of
    second codes and vectors count in both, so the share is nearer to 1 than the walks' alone. It is
    taken for other widths and for walks on coarse codes too.
    """
    counts = [sum(segment.page_counts())]
    for widely in (False, True):
        _recall(segment, probe, width, widely=widely)
        counts.append(sum(segment.page_counts()))
    return (counts[2] - counts[1]) / max(counts[1] - counts[0], 1)


def _half_recall(
    segment: Segment, probe: Probe, width: int, settled: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Recall of each query with half of the vectors in memory, the rest of them nowhere.

    No more pages of vectors are loaded than answers can be settled by: a segment may be larger than
    memory. Pages of vectors that are there now are there afterwards.

    Args:
        settled: int64, (nq, n): the best rows without vectors; none that are farther count.
    """
    count = sum(len(batch.units) for batch in segment.unit_batches() if batch.kind == "vectors")
    rng = np.random.default_rng(_HALF_SEED)
    # Where there are few pages in all, shorter runs part them evenly.
    length = min(max(count // _RUN_PAGES, 1), _RUN_PAGES)
    halves = np.repeat(rng.permutation(-(-count // length)) % 2 == 0, length)[:count]
    k = probe.rows.shape[1]
    found = np.empty((len(probe.queries), k), np.int64)
    before = segment.resident_units("vectors")
    away = before[~halves[before]]
    segment.evict_units("vectors", away)
    for start in range(0, len(found), _HALF_QUERIES):
        part = slice(start, start + _HALF_QUERIES)
        pages = np.empty(0, np.uint32)
        if not segment.manifest.walks_vectors:
            wanted = segment.vector_pages(settled[part])
            pages = wanted[halves[wanted]]
            segment.load_units("vectors", pages)
        found[part] = segment.search(probe.queries[part], k, ef=width, resident_only=True).rows
        segment.evict_units("vectors", pages)
    segment.load_units("vectors", before)
    return probe.recall_of(found)


class _Asked(NamedTuple):
    """Queries to measure with.

    Attributes:
        probe: They.
        few: Those of them that wide walks are asked.
        alike: Which of those at random lie as near to what they find as known ones do.
        bands: Which of those at random are of each band; see `Probe.strange_bands`.
        near: Which queries are near.
    """

    probe: Probe
    few: Probe
    alike: NDArray[np.bool_]
    bands: list[NDArray[np.bool_]]
    near: NDArray[np.bool_]


class _ByWidth(NamedTuple):
    """Mean and lower bound of the recall at each width, and what the mean is at least.

    See `_sure_mean`. Of known queries; of those at random, band after band; of near ones, of which
    nothing is said of what unseen ones reach.
    """

    means: tuple[float, ...]
    lows: tuple[float, ...]
    sures: tuple[float, ...]
    strange_means: tuple[float, ...]
    strange_lows: tuple[float, ...]
    strange_sures: tuple[float, ...]
    near_means: tuple[float, ...]
    near_lows: tuple[float, ...]


def _by_width(
    segment: Segment,
    asked: _Asked,
    widths: Sequence[int],
    *,
    entered: tuple[float, _ByWidth] | None = None,
) -> _ByWidth:
    """Measure each width; of the known queries the kind that fares worst counts.

    A wider walk can only meet more; noise in the sample must not say otherwise. Nor is more
    measured of those that have nothing left to find, or nobody would choose it.

    Args:
        segment: To search.
        asked: Which queries.
        widths: To measure, rising.
        entered: Measure walks that enter the bottom widely, which cost so many times their width;
            and what was found of the others: wider ones than find all are not wanted.
    """
    enough, strange_enough, cost = math.inf, math.inf, 1.0
    if entered is not None:
        cost, other = entered
        per_band = np.reshape(other.strange_means, (-1, len(widths)))
        enough, strange_enough = (
            next((w for w, mean in zip(widths, means, strict=True) if mean >= _WHOLE), math.inf)
            for means in (other.means, per_band.min(axis=0))
        )
    known: list[tuple[float, ...]] = []
    strange: list[tuple[float, ...]] = []
    near: list[tuple[float, ...]] = []
    of_strangers = np.empty(0)
    bands = len(asked.bands)
    for width in widths:
        ask_known = not known or not (known[-1][0] >= _WHOLE or width * cost >= enough)
        ask_strange = not strange or not (
            min(strange[-1][::3]) >= _WHOLE or width * cost >= strange_enough
        )
        probe = asked.few if width >= _WIDE_FROM else asked.probe
        part = probe.fewer(probe.known if ask_known else 0, STRANGERS if ask_strange else 0)
        recall = np.empty(0)
        if ask_known or ask_strange:
            recall = _recall(segment, part, width, widely=entered is not None)
        if ask_strange:
            of_strangers = recall[part.known :]
        if ask_known:
            known.append(_worst_kind(recall[: part.known], of_strangers[asked.alike]))
        else:
            known.append(known[-1])
        strange.append(
            tuple(
                value
                for band in asked.bands
                for value in (
                    float(of_strangers[band].mean()),
                    _reached(of_strangers[band]),
                    _sure_mean(of_strangers[band]),
                )
            )
        )
        if entered is None and asked.near.any():
            if ask_known and probe is asked.probe:
                of_near = recall[: part.known][asked.near[: part.known]]
                near.append((float(of_near.mean()), _reached(of_near)))
            else:
                near.append(near[-1])
    columns = [_rising(rows) for rows in (known, strange, near)]
    by_band = [sum((columns[1][3 * band + at] for band in range(bands)), ()) for at in range(3)]
    return _ByWidth(*columns[0], *by_band, *(columns[2] or ((), ())))


def _rising(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Columns of what was measured at each width, none of which falls."""
    if not rows:
        return []
    rising = np.maximum.accumulate(np.maximum(rows, 0.0), axis=0)
    return [tuple(float(value) for value in column) for column in rising.T]


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
