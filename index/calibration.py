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

And of several k: the best and the three best of ten show in the same answers; a hundred take walks
of their own. Where few rows are near everything, or rows are that no link leads to, recall of a
hundred has nothing to do with recall of ten.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.index.calibrated import Calibration, KTable
from stoker.index.held_out import KINDS, NEAR_MIN, STRANGERS, K, Probe
from stoker.index.loss_lines import LOSS_KINDS, LossLines
from stoker.index.loss_probe import measure_losses
from stoker.index.manifest import FILES, Manifest
from stoker.index.range_recall import GROUP_COUNTS, WHOLE_NEAREST, RangeRecall
from stoker.index.range_table import Ranges
from stoker.index.recall_bounds import SCAN_ROWS_MAX, scan_width
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
# Mean recall from which on wider walks are not measured; or where one neighbor of all was missed:
# with few queries that is less, and says no more.
_WHOLE: Final = 0.9995
_WIDTHS: Final = (10, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768)
# Of the neighbors, how many are looked at apart beside all ten: they come with the same walks.
_FEW_K: Final = (1, 3)
# Widths for a hundred neighbors, in tenths of them as the others are of ten. From the last two on
# they say little more, at a high price: only a mean that is not reached before is measured there.
_DEEP_WIDTHS: Final = (10, 16, 24, 40, 64, 128)
# Mean recall of a hundred from which on wider walks are not measured.
_DEEP_WHOLE: Final = 0.998
# Where walks find less of some k than this, scans of small segments are measured too.
_SCANNED_BELOW: Final = 0.995
# One-sided, in standard errors: a mean of unseen queries is at least as high in 19 of 20 draws.
_SURE: Final = 1.65
# At which two ways to walk are compared by what they look at.
_COST_WIDTH: Final = 64
# Mean recall from which on wider walks give the same answers from memory, or nearly.
_SAME_WHOLE: Final = 0.998
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


def _sure_mean(recall: NDArray[np.float64], k: int = K) -> float:
    """A lower bound on the mean recall of queries that were not drawn, from those that were.

    By the normal approximation, with one more query that lost a neighbor: where few were drawn
    and all found everything, that says less than where many were.
    """
    n = len(recall)
    squared = float(((recall - recall.mean()) ** 2).sum()) + 1.0 / k**2
    return float(recall.mean()) - _SURE * math.sqrt(squared) / n


class _Worst(NamedTuple):
    """What the kind of query that fares worst reached: see `_worst_kind`."""

    mean: float
    low: float
    sure: float


def _worst_kind(recall: NDArray[np.float64], alike: NDArray[np.float64], k: int = K) -> _Worst:
    """Mean recall, recall reached by the stated share, and what the mean is at least.

    Each of the kind of query that fares worst in it.

    A target that holds in the mean over all kinds would be missed by whoever asks only the hard
    ones, and promises are made to them too. Of the mean the last kind is left out.

    Args:
        recall: Of the known queries.
        alike: Of those at random that no answer can tell from known ones, since they lie as near.
            No target is set by them, but what is promised to either is promised to both.
        k: Neighbors of each.
    """
    parts = [recall[kind :: len(KINDS)] for kind in range(len(KINDS))]
    # Where those at random fare better, they must not make up for a kind.
    lows = [min(_reached(part), _reached(np.concatenate([part, alike]))) for part in parts]
    means = [float(part.mean()) for part in parts[:_TARGET_KINDS]]
    return _Worst(min(means), min(lows), min(_sure_mean(part, k) for part in parts[:_TARGET_KINDS]))


def _is_whole(mean: float, count: int, sort: _Sort) -> bool:
    """Whether so many queries, with this mean recall, have nothing left to find."""
    return mean >= min(sort.whole, 1.0 - 1.5 / (max(count, 1) * sort.ks[-1]))


def _target_mean(recall: NDArray[np.float64]) -> float:
    """Mean recall of those known queries that targets are kept for: the last kind is left out."""
    return float(recall[np.arange(len(recall)) % len(KINDS) < _TARGET_KINDS].mean())


def calibrate(
    folder: Path,
    manifest: Manifest,
    probe: Probe,
    groups: Ranges | None = None,
) -> Manifest:
    """Search the sealed files with the held-out queries; return the manifest with the findings.

    Args:
        folder: Of the segment.
        manifest: Of it, without a calibration.
        probe: Held-out queries, which all vectors have passed.
        groups: Of near rows; None without such.
    """
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
    deep = probe.deeper()
    with _opened(folder, manifest, bits=4) as segment:
        nearness_low, strange_nearness_low = probe.nearness_lows(segment)
        near_from, near = probe.near_ones(segment)
        nearness = probe.nearness(segment)
        alike = nearness[probe.known :] >= nearness_low
        edges, bands = probe.strange_bands(nearness, nearness_low)
        asked = _Asked(probe, few, alike, bands, near)
        walked = "vectors" if manifest.walks_vectors else "codes"
        _load(segment, "upper", "links", walked, "refine")
        entry_cost = _entry_cost(segment, few, min(_COST_WIDTH, widths[-1]))
        sorts = [_Sort((*_FEW_K, k), asked, widths, _WHOLE)]
        if deep is not None:
            deep_k = deep.rows.shape[1]
            wide = [-(-width * deep_k // k) for width in _DEEP_WIDTHS]
            wide = [w for w in wide if w <= manifest.count] or [deep_k]
            deep_near = near[np.r_[: deep.known, probe.known : len(near)]]
            if deep_near.sum() < NEAR_MIN:
                deep_near[:] = False
            of_deep = _Asked(deep, deep, alike, bands, deep_near)
            sorts.append(_Sort((deep_k,), of_deep, wide, _DEEP_WHOLE))
        ranges: tuple[RangeRecall, ...] = ()
        if groups is not None:
            ranges = tuple(entry for sort in sorts for entry in _ranges(segment, sort, groups))
        found = [_walks(segment, sort, entry_cost) for sort in sorts]
        scanned = manifest.count <= SCAN_ROWS_MAX and _lacking(found)
        scans = [_scan(segment, sort) if scanned else {} for sort in sorts]
    whole = zip(widths, found[0][k]["recall_mean"], strict=True)
    largest = next(
        (w for w, mean in whole if w >= _SETTLED * k and mean >= _SAME_WHOLE), widths[-1]
    )
    with _opened(folder, manifest, bits=4) as segment:
        _load(segment, "upper")
        upper = by_stage.recall_of(_from_memory(segment, by_stage, k, k))
        _load(segment, "links", walked)
        losses: tuple[LossLines, ...] = ()
        if not manifest.walks_vectors:
            losses = measure_losses(segment, probe, near, LOSS_KINDS[:1])
        by_code = by_stage.recall_of(_from_memory(segment, by_stage, largest, k))
        _load(segment, "refine")
        settled = _from_memory(segment, by_stage, largest, _SETTLED * k)
        refined = by_stage.recall_of(settled[:, :k])
        half = _half_recall(segment, by_stage, largest, settled)
    coarse_losses: tuple[LossLines, ...] = ()
    if manifest.has_coarse:
        with _opened(folder, manifest, bits=2) as segment:
            _load(segment, "upper", "links", "coarse")
            coarse_losses = measure_losses(segment, probe, near, LOSS_KINDS)
            _load(segment, "codes", "refine")
            for sort, by_k in zip(sorts, found, strict=True):
                coarse = _walks(segment, sort, entry_cost)
                for at_k, lists in coarse.items():
                    by_k[at_k] |= {f"coarse_{name}": values for name, values in lists.items()}
    of_k: dict[str, Any] = dict(found[0].pop(k))
    return dataclasses.replace(
        manifest,
        calibration=dataclasses.replace(
            blank,
            ef=tuple(widths),
            nearness_low=nearness_low,
            strange_nearness_low=strange_nearness_low,
            near_from=near_from,
            strange_below=edges,
            entry_cost=entry_cost,
            upper_mean=_target_mean(upper[: by_stage.known]),
            upper_low=_reached(upper),
            code_recall=_target_mean(by_code[: by_stage.known]),
            refined_recall=_target_mean(refined[: by_stage.known]),
            half_recall=_target_mean(half[: by_stage.known]),
            half_low=_reached(half),
            by_k=tuple(
                KTable(at_k, sort.asked.probe.known, tuple(sort.widths), lists, scan.get(at_k, ()))
                for sort, by_k, scan in zip(sorts, found, scans, strict=True)
                for at_k, lists in by_k.items()
            ),
            scan=scans[0].get(k, ()),
            losses=losses,
            coarse_losses=coarse_losses,
            ranges=ranges,
            **of_k,
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


def _found(
    segment: Segment, probe: Probe, width: int, *, widely: bool = False
) -> NDArray[np.int64]:
    """Rows that each held-out query finds as if all vectors were resident, int64, shape (nq, k).

    Answers are scored by their full vectors, which are read.

    Args:
        widely: Walk the level above the bottom as widely.
    """
    entry_ef = width if widely else None
    k = probe.rows.shape[1]
    hits = segment.search(probe.queries, k, ef=width, entry_ef=entry_ef, recall_target=1.0)
    return hits.rows


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
        _found(segment, probe, width, widely=widely)
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
    """Mean and lower bound of the recall at each width, and what the mean is at least, of one k.

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


class _Sort(NamedTuple):
    """What is measured by the same answers.

    Attributes:
        ks: Neighbors, rising; the last is how many are asked for.
        asked: Which queries.
        widths: To measure, rising.
        whole: Mean recall of the last of ``ks`` from which on wider walks are not measured.
    """

    ks: tuple[int, ...]
    asked: _Asked
    widths: Sequence[int]
    whole: float


def _walks(
    segment: Segment, sort: _Sort, entry_cost: float
) -> dict[int, dict[str, tuple[float, ...]]]:
    """Measure walks with one entry to the bottom, and with many; k -> fields of the calibration."""
    found = _by_width(segment, sort)
    entry = _by_width(segment, sort, entered=(entry_cost, found[-1]))
    return {
        k: {
            **{"recall_mean": one.means, "recall_low": one.lows, "recall_sure": one.sures},
            **{"entry_mean": many.means, "entry_low": many.lows, "entry_sure": many.sures},
            "strange_mean": one.strange_means,
            "strange_low": one.strange_lows,
            "strange_sure": one.strange_sures,
            "entry_strange_mean": many.strange_means,
            "entry_strange_low": many.strange_lows,
            "entry_strange_sure": many.strange_sures,
            "near_mean": one.near_means,
            "near_low": one.near_lows,
        }
        for k, one, many in zip(sort.ks, found, entry, strict=True)
    }


def _lacking(found: list[dict[int, dict[str, tuple[float, ...]]]]) -> bool:
    """Whether no walk finds nearly all of some k."""
    return any(
        max(lists["recall_mean"][-1], lists["entry_mean"][-1]) < _SCANNED_BELOW
        for by_k in found
        for lists in by_k.values()
    )


def _scan(segment: Segment, sort: _Sort) -> dict[int, tuple[float, ...]]:
    """What scans of all codes find, whose best are settled by vectors; k -> (mean, low).

    Of the kind or band that fares worst: what a scan loses is what codes mistake.
    """
    probe, k = sort.asked.few, sort.ks[-1]
    everything = np.packbits(np.ones(segment.count, np.bool_), bitorder="little")
    width = scan_width(segment.count, k)
    rows = segment.search(probe.queries, k, ef=width, recall_target=1.0, allow=everything).rows
    found: dict[int, tuple[float, ...]] = {}
    for at_k in sort.ks:
        recall = probe.recall_of(rows, at_k)
        known, strange = recall[: probe.known], recall[probe.known :]
        parts = [known[kind :: len(KINDS)] for kind in range(len(KINDS))]
        bands = [strange[band] for band in sort.asked.bands]
        means = [float(part.mean()) for part in (*parts[:_TARGET_KINDS], *bands)]
        found[at_k] = (min(means), min(map(_reached, (*parts, *bands))))
    return found


def _ranges(segment: Segment, sort: _Sort, ranges: Ranges) -> list[RangeRecall]:
    """What share of the true neighbors scans of the nearest groups of rows look at, for each k."""
    asked, probe = sort.asked, sort.asked.probe
    counts = tuple(n for n in GROUP_COUNTS if n <= ranges.groups) or (ranges.groups,)
    nearest = segment.nearest_groups(probe.queries, counts[-1])
    own = ranges.group_of_row[probe.rows]
    # How many groups it takes to look at each.
    met = own[:, :, None] == nearest[:, None, :]
    needed = np.where(met.any(axis=2), met.argmax(axis=2) + 1, counts[-1] + 1)
    left_out = ranges.in_small_piece()[probe.rows] & (needed > WHOLE_NEAREST)
    needed[left_out | (probe.rows < 0)] = counts[-1] + 1
    found = []
    for k in sort.ks:
        overall, means, lows = [], [], []
        strange: list[list[tuple[float, float]]] = [[] for _ in asked.bands]
        for count in counts:
            share = (needed[:, :k] <= count).mean(axis=1)
            of_strangers = share[probe.known :]
            worst = _worst_kind(share[: probe.known], of_strangers[asked.alike], k)
            overall.append(_target_mean(share[: probe.known]))
            means.append(worst.mean)
            lows.append(worst.low)
            for band, values in zip(asked.bands, strange, strict=True):
                values.append((float(of_strangers[band].mean()), _reached(of_strangers[band])))
        found.append(
            RangeRecall(
                k,
                counts,
                _stated(overall),
                _stated(means),
                _stated(lows),
                _stated(mean for values in strange for mean, _ in values),
                _stated(low for values in strange for _, low in values),
            )
        )
    return found


def _stated(shares: Iterable[float]) -> tuple[float, ...]:
    """Shares with four digits, rounded down: who opens a segment reads and checks each of them."""
    return tuple(math.floor(share * 1e4) / 1e4 for share in shares)


def _by_width(
    segment: Segment, sort: _Sort, *, entered: tuple[float, _ByWidth] | None = None
) -> list[_ByWidth]:
    """Measure each width, for each k; of the known queries the kind that fares worst counts.

    A wider walk can only meet more; noise in the sample must not say otherwise. Nor is more
    measured of those that have nothing left to find, or nobody would choose it.

    Args:
        segment: To search.
        sort: What to measure.
        entered: Measure walks that enter the bottom widely, which cost so many times their width;
            and what was found of the others: wider ones than find all are not wanted.
    """
    asked, widths = sort.asked, sort.widths
    enough, strange_enough, cost = math.inf, math.inf, 1.0
    if entered is not None:
        cost, other = entered
        per_band = np.reshape(other.strange_means, (-1, len(widths)))
        enough, strange_enough = (
            next((w for w, mean in zip(widths, means, strict=True) if mean >= sort.whole), math.inf)
            for means in (other.means, per_band.min(axis=0))
        )
    measured = [_Measured(k, asked) for k in sort.ks]
    # Of which a narrower walk found all: those would find it again.
    whole = np.zeros(len(asked.probe.queries), np.bool_)
    for width in widths:
        last = measured[-1]
        ask_known = not last.known or not (
            _is_whole(last.known[-1][0], asked.probe.known // len(KINDS), sort)
            or width * cost >= enough
        )
        # All of them at first; then those of bands that lack some, and whoever counts as known.
        strange = asked.alike & ask_known | (not last.strange)
        means = last.strange[-1][::3] if last.strange else ()
        for band, mean in zip(asked.bands, means, strict=False):
            if not (_is_whole(mean, int(band.sum()), sort) or width * cost >= strange_enough):
                strange |= band
        known = (asked.few if width >= _WIDE_FROM else asked.probe).known if ask_known else 0
        chosen = np.concatenate([np.arange(asked.probe.known) < known, strange]) & ~whole
        part = asked.probe.only(chosen)
        rows = np.empty((0, sort.ks[-1]), np.int64)
        if len(part.queries):
            rows = _found(segment, part, width, widely=entered is not None)
        for of_k in measured:
            of_k.add(
                part.recall_of(rows, of_k.k),
                chosen,
                known,
                near=entered is None and bool(asked.near.any()),
            )
        whole |= measured[-1].recall >= 1.0
    return [of_k.by_width() for of_k in measured]


class _Measured:
    """What was measured of one k, width after width.

    Attributes:
        recall: float64, shape (nq,): of each query, by the widest walk that it was asked with.
        known: Of each width what the kind that fares worst reached; see `_worst_kind`.
        strange: Of each width mean, low and sure mean of each band, one after the other.
    """

    def __init__(self, k: int, asked: _Asked) -> None:
        self.k = k
        self.known: list[tuple[float, ...]] = []
        self.strange: list[tuple[float, ...]] = []
        self.recall = np.zeros(len(asked.probe.queries))
        self._near: list[tuple[float, ...]] = []
        self._asked = asked

    def add(
        self, recall: NDArray[np.float64], chosen: NDArray[np.bool_], known: int, *, near: bool
    ) -> None:
        """Take what walks of one width reached.

        Args:
            recall: Of those that were asked.
            chosen: bool, shape (nq,): which those are. The others count as before.
            known: How many known ones count, the first; 0 to take what was said of them before.
            near: Whether to look at near ones.
        """
        asked = self._asked
        self.recall[chosen] = recall
        of_known, of_strangers = np.split(self.recall, [asked.probe.known])
        if known:
            alike = of_strangers[asked.alike]
            self.known.append(_worst_kind(of_known[:known], alike, self.k))
        else:
            self.known.append(self.known[-1])
        self.strange.append(
            tuple(
                value
                for band in asked.bands
                for value in (
                    float(of_strangers[band].mean()),
                    _reached(of_strangers[band]),
                    _sure_mean(of_strangers[band], self.k),
                )
            )
        )
        if near and known == asked.probe.known:
            of_near = of_known[asked.near[:known]]
            self._near.append((float(of_near.mean()), _reached(of_near)))
        elif near:
            self._near.append(self._near[-1])

    def by_width(self) -> _ByWidth:
        """All of it, none of which falls with the width."""
        bands = len(self._asked.bands)
        known, strange, near = map(_rising, (self.known, self.strange, self._near))
        by_band = [sum((strange[3 * band + at] for band in range(bands)), ()) for at in range(3)]
        return _ByWidth(*known, *by_band, *(near or ((), ())))


def _rising(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Columns of what was measured at each width, none of which falls."""
    if not rows:
        return []
    rising = np.maximum.accumulate(np.maximum(rows, 0.0), axis=0)
    return [tuple(float(value) for value in column) for column in rising.T]


def _estimate_errors(
    folder: Path, manifest: Manifest, probe: Probe, *, bits: int
) -> tuple[float, float]:
    """Root mean square errors over |q||x - centre|, q as it is coded, on true neighbors.

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
