"""What an answer says of itself: its columns, from the walk's facts and from calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.index.calibrated import Calibration
from stoker.index.hits import Summary
from stoker.index.k_tables import for_k
from stoker.index.loss_lines import LossLine
from stoker.index.manifest import Manifest
from stoker.index.range_recall import ChosenRanges, choose_ranges

# Columns of the native search's facts.
FACTS: Final = (
    "expected_recall",
    "expanded",
    "evaluated",
    "skipped",
    "exact",
    "refined",
    "damaged",
    "rounds",
    "pages_read",
    "bytes_read",
    "deadline_hit",
    "scanned",
    "found",
    "best",
    "query_length",
    "narrow",
    "farther",
    "unrelated",
    "range_groups",
    "ranges_whole",
)
# Up to so many rows a segment is scanned where no calibrated walk finds enough: that takes about as
# long as the widest of them (index/BENCHMARKS.md).
SCAN_ROWS_MAX: Final = 30_000
# Rows that a scan looks at for each that it settles. Not more than `kWalkFactor` in walk.cpp, or it
# would walk.
_SCAN_ROWS_PER_WIDTH: Final = 50
# Rows beyond twice the answer; walk.cpp keeps no fewer.
_SCAN_SPARE: Final = 100
# Of a score, as a share of the highest that there can be.
_ROUNDED: Final = 5e-7
_CONFIDENCE: Final = 0.975  # of the re-rank's part of the bound; the walk has its calibration's


def scan_width(count: int, k: int) -> int:
    """Rows that a scan of ``count`` keeps, to be settled; as many for any k up to ten."""
    return max(-(-count // _SCAN_ROWS_PER_WIDTH), 2 * max(k, 10) + _SCAN_SPARE)


class WalkRecall(NamedTuple):
    """Calibrated recall of walks of one width, by how near a query lies to what it finds.

    Attributes:
        mean: Of queries like those that were calibrated, the worst kind; 1 where nothing is known.
        low: The recall that the stated share of those reached; 0 where nothing is known.
        strange_means: Of queries that are farther from everything than those were, by band; empty
            where nobody measured such.
        strange_lows: Likewise.
    """

    mean: float
    low: float
    strange_means: tuple[float, ...] = ()
    strange_lows: tuple[float, ...] = ()


def walk_recall(
    calibration: Calibration | None, bits: int, width: int, k: int, *, enters_widely: bool = False
) -> WalkRecall:
    """Look up what walks of ``width`` for ``k`` neighbors on codes of ``bits`` were found to do.

    Args:
        enters_widely: Whether they are as wide on the level above the bottom; known only where
            calibration measured such.
    """
    if calibration is None:
        return WalkRecall(1.0, 0.0)
    if enters_widely:
        means, lows = calibration.entry_by_width(bits)
    else:
        means, lows = calibration.by_width(bits)
    bands = calibration.strange_by_width(bits, enters_widely=enters_widely)
    narrower = width / max(k / calibration.k, 1.0)
    at = int(np.searchsorted(calibration.ef, narrower, "right")) - 1
    if at < 0:
        strange_means = tuple(band.means[0] for band in bands)
        return WalkRecall(means[0], 0.0, strange_means, (0.0,) * len(bands))
    # What was measured of few queries may come out higher; it promises no more for that.
    return WalkRecall(
        means[at],
        lows[at],
        tuple(min(band.means[at], means[at]) for band in bands),
        tuple(min(band.lows[at], lows[at]) for band in bands),
    )


class NearWalk(NamedTuple):
    """The narrower walk that comes first, and is all there is for queries near what is stored.

    Attributes:
        width: Of it.
        near_from: `nearness` from which on it is enough.
        mean: Calibrated recall of such queries.
        low: The recall that the stated share of them reached.
        others: What walks of this width were found to do for any query.
    """

    width: int
    near_from: float
    mean: float
    low: float
    others: WalkRecall


class FartherWalk(NamedTuple):
    """The wider walk that goes on for queries which lie far from all that was found.

    Attributes:
        below: `nearness` under which it does.
        width: Of the walk over the bottom level.
        entry_width: Of the one on the level above it; 1 goes on from what was found at the bottom.
        recall: What such walks were found to do.
    """

    below: float
    width: int
    entry_width: int
    recall: WalkRecall


class ChosenWalk(NamedTuple):
    """How searches walk.

    Attributes:
        width: Of the walk over the bottom level.
        entry_width: Of the one on the level above it; 1 is greedy.
        recall: What such walks were found to do.
        near: The narrower walk that comes first, if one does.
        spread: Mean squared distance of the rows from their centre.
        farther: Wider walks for strange queries, by the bands that those come in, so that
            their edges fall; empty where the width was given, or none was measured.
        near_from: `nearness` from which on ``near_mean`` counts.
        near_mean: Calibrated recall of near queries by the walk that they end with; 0 where none is
            known.
        scans: Whether all rows are looked at, the best ``width`` of which are settled.
        near_losses: What near queries lose by the walk that they end with, by what they expect to;
            empty where it is not known.
        losses: The same of other queries, a line a kind.
        ranges: How many groups of near rows are scanned instead where a walk misses a page; None
            where it reads on.
    """

    width: int
    entry_width: int
    recall: WalkRecall
    near: NearWalk | None
    spread: float
    farther: tuple[FartherWalk, ...] = ()
    near_from: float = 0.0
    near_mean: float = 0.0
    scans: bool = False
    near_losses: tuple[LossLine, ...] = ()
    losses: tuple[LossLine, ...] = ()
    ranges: ChosenRanges | None = None


def narrowest(
    calibration: Calibration,
    bits: int,
    *,
    wanted: float,
    sure: float | None = None,
    band: int | None = None,
) -> tuple[int, bool]:
    """Return the width of the cheapest walk that finds every calibrated kind enough.

    Walks that enter the bottom level at one place miss queries whose neighbors lie elsewhere, where
    links are short, the more of them the more rows there are. Entering it at as many places as the
    walk is wide looks at half as much again, and then a far narrower walk may do.

    Args:
        bits: Of the codes that walks compare.
        wanted: Mean recall of the walk, as it was measured.
        sure: Mean recall that is as well enough where unseen queries reach it for sure, or None.
        band: Of strange queries, who are to find enough; None for the kinds.

    Returns:
        (width, whether it enters widely): where none is enough, the walk that finds most, and of
        those that find as much the cheapest.
    """
    _, width, widely = _cheapest(calibration, bits, wanted=wanted, sure=sure, band=band)
    return width, widely


def _cheapest(
    calibration: Calibration,
    bits: int,
    *,
    wanted: float,
    sure: float | None = None,
    band: int | None = None,
) -> tuple[float, int, bool]:
    """As `narrowest`: (recall that the walk lacks, its width, whether it enters widely)."""
    found = []
    for widely, cost in ((False, 1.0), (True, calibration.entry_cost)):
        if band is None:
            means = (calibration.entry_by_width if widely else calibration.by_width)(bits)[0]
            at_least = calibration.sure_by_width(bits, enters_widely=widely)
        elif widely and not calibration.entry_mean:
            continue
        else:
            means, _, at_least = calibration.strange_by_width(bits, enters_widely=widely)[band]
        if sure is None or not at_least:
            at_least = (-math.inf,) * len(means)
        # Those that are enough come first, by their cost; then the others, by what they lack.
        for width, mean, least in zip(calibration.ef, means, at_least, strict=False):
            missing = max(min(wanted - mean, (sure or 0.0) - least), 0.0)
            found.append((missing, width * cost, widely, width))
    missing, _, widely, width = min(found)
    return missing, width, widely


def near_walk(
    calibration: Calibration, bits: int, *, wanted: float, width: int, k: int
) -> NearWalk | None:
    """Return the narrowest walk that finds near queries enough; None if none under ``width`` does.

    Args:
        bits: Of the codes that walks compare.
        wanted: Mean recall of the walk.
        width: Of walks for any query.
        k: Neighbors.
    """
    means, lows = calibration.near_by_width(bits)
    scale = max(k / calibration.k, 1.0)
    for measured, mean, low in zip(calibration.ef, means, lows, strict=False):
        narrow = max(math.ceil(measured * scale), k)
        if mean >= wanted and narrow < width:
            others = walk_recall(calibration, bits, narrow, k)
            return NearWalk(narrow, calibration.near_from, mean, low, others)
    return None


def farther_walks(
    calibration: Calibration, bits: int, *, wanted: float, sure: float | None, k: int
) -> tuple[FartherWalk, ...]:
    """Return how queries of each strange band are walked on for, so that they find enough too.

    None where it was not worked out what unseen ones of them reach: segments of before know them as
    one sort, drawn farther from everything than most are that are asked.

    Args:
        bits: Of the codes that walks compare.
        wanted: See `narrowest`.
        sure: See `narrowest`.
        k: Neighbors.
    """
    if not calibration.strange_sure:
        return ()
    walks = []
    for band, below in enumerate(calibration.strange_edges):
        measured, widely = narrowest(calibration, bits, wanted=wanted, sure=sure, band=band)
        width = max(math.ceil(measured * max(k / calibration.k, 1.0)), k)
        recall = walk_recall(calibration, bits, width, k, enters_widely=widely)
        walks.append(FartherWalk(below, width, width if widely else 1, recall))
    return tuple(walks)


def _knowing_losses(
    walk: ChosenWalk, calibration: Calibration | None, bits: int, k: int
) -> ChosenWalk:
    """Add what queries are known to lose, and near ones to find, by the walk that they end with.

    Where that enters the bottom widely they find no less than was measured of others.
    """
    means = calibration.near_by_width(bits)[0] if calibration else ()
    if calibration is not None and calibration.k == k:
        walk = walk._replace(losses=calibration.loss_lines(bits, width=walk.width, near=False))
    if calibration is None or not means:
        return walk
    width = walk.near.width if walk.near else walk.width
    if calibration.k == k:
        walk = walk._replace(near_losses=calibration.loss_lines(bits, width=width, near=True))
    narrower = width / max(k / calibration.k, 1.0)
    at = int(np.searchsorted(calibration.ef, narrower, "right")) - 1
    if at < 0:
        return walk
    return walk._replace(near_from=calibration.near_from, near_mean=means[at])


def nearness(
    best: NDArray[np.floating],
    queries: NDArray[np.float32],
    *,
    metric: str,
    centre: NDArray[np.float32],
    spread: float,
    row_length2: float = 0.0,
) -> NDArray[np.float64]:
    """How near queries lie to the best rows of their answers; float64, (nq,), higher is nearer.

    The cosine; the inner product over the query's length; or by how much of it the squared distance
    falls short of what it would be to a row that has nothing to do with the query. Of rows of one
    length, how much of the way it is from the rows' mean score, or 0 where that is more, to the
    highest that there can be: a query in the direction of the mean is as near to all rows, and
    nearer to none. Comparable among queries of one segment, and not between segments.

    Args:
        best: Shape (nq,): the best score of each answer; not-a-number where it is empty.
        queries: float32, shape (nq, dim).
        metric: "ip", "cosine" or "l2".
        centre: float32, shape (dim,): of the rows; counts under l2, and of rows of one length.
        spread: Mean squared distance of the rows from it; counts under l2.
        row_length2: See `Manifest`.
    """
    from_centre = queries.astype(np.float64) - (centre if metric == "l2" else 0)
    squared = np.einsum("ij,ij->i", from_centre, from_centre)
    unrelated = np.zeros(len(queries))
    if row_length2 > 0:
        unrelated = np.maximum(from_centre @ centre.astype(np.float64), 0.0)
        if metric == "cosine":
            asked = squared > 0
            unrelated[asked] /= np.sqrt(squared[asked])
            squared = asked.astype(np.float64)
    near = np.asarray(best, np.float64)
    return _nearness(near, squared, unrelated, metric, spread, row_length2)


def _nearness(
    near: NDArray[np.float64],
    squared: NDArray[np.float64],
    unrelated: NDArray[np.float64],
    metric: str,
    spread: float,
    row_length2: float,
) -> NDArray[np.float64]:
    """The same from the queries' squared lengths, under l2 those of the way from the centre.

    Args:
        squared: As above; of queries of unit length under cosine.
        unrelated: Where rows are of one length, their mean score for each query, 0 at least.
    """
    # A query at the origin under "ip", or at a centre that is all there is, is near nothing.
    share: NDArray[np.float64] = np.full(len(near), np.nan)
    if row_length2 > 0:
        most = np.sqrt(squared * row_length2) - unrelated
        np.divide(near - unrelated, most, out=share, where=most > 0)
        return share
    if metric == "cosine":
        return near
    if metric == "ip":
        np.divide(near, np.sqrt(squared), out=share, where=squared > 0)
        return share
    unrelated = squared + spread
    np.divide(unrelated - near, unrelated, out=share, where=unrelated > 0)
    return share


class RecallBounds:
    """What answers of one segment can promise. It keeps nothing of the segment itself."""

    def __init__(self, manifest: Manifest, bits: int, centre: NDArray[np.float32]) -> None:
        """Speak of walks on codes of ``bits``; ``centre``: float32, shape (dim,)."""
        self._calibration = manifest.calibration
        self._count = manifest.count
        self._metric = manifest.metric
        self._row_length2 = manifest.row_length2
        self._bits = bits
        self._centre = centre

    @property
    def spread(self) -> float:
        """Mean squared distance of the rows from their centre; 0 where it was not measured."""
        return self._calibration.spread if self._calibration else 0.0

    def choose(
        self,
        k: int,
        *,
        ef: int | None,
        entry_ef: int | None = None,
        wanted: float,
        sure: float | None = None,
        scans: bool = False,
    ) -> ChosenWalk:
        """Choose how to walk: as asked for, or as every kind of calibrated query needs.

        Args:
            k: Neighbors.
            ef: Width that was asked for, or None.
            entry_ef: The same of the level above the bottom; only with ``ef``.
            wanted: Mean recall of the walk, where nothing was asked for.
            sure: See `narrowest`.
            scans: Whether memory has room for what a scan looks at. Then that is the search of few
                rows that no calibrated walk finds enough of.
        """
        calibration = for_k(self._calibration, k) if self._calibration else None
        bits = self._bits
        if ef is not None:
            known = calibration is not None and bool(calibration.entry_mean)
            widely = known and (entry_ef or 1) >= ef > 1
            recall = walk_recall(calibration, bits, ef, k, enters_widely=widely)
            chosen = ChosenWalk(ef, entry_ef or 1, recall, None, self.spread)
            return _knowing_losses(chosen, calibration, bits, k)
        if calibration is None:
            width = max(64, 2 * k)
            return ChosenWalk(width, 1, walk_recall(None, bits, width, k), None, self.spread)
        missing, measured, widely = _cheapest(calibration, bits, wanted=wanted, sure=sure)
        scan = calibration.scan
        if missing > 0 and scans and scan and scan[0] > wanted - missing:
            bands = len(calibration.strange_by_width(bits))
            recall = WalkRecall(scan[0], scan[1], scan[:1] * bands, scan[1:] * bands)
            width = scan_width(self._count, k)
            return ChosenWalk(width, 1, recall, None, self.spread, scans=True)
        width = max(math.ceil(measured * max(k / calibration.k, 1.0)), k)
        chosen = ChosenWalk(
            width,
            width if widely else 1,
            walk_recall(calibration, bits, width, k, enters_widely=widely),
            near_walk(calibration, bits, wanted=wanted, width=width, k=k),
            self.spread,
            farther_walks(calibration, bits, wanted=wanted, sure=sure, k=k),
        )
        return _knowing_losses(chosen, calibration, bits, k)

    def with_ranges(self, walk: ChosenWalk, k: int, target: float) -> ChosenWalk:
        """Have groups of near rows scanned where ``walk`` misses a page, if so many are known.

        Args:
            walk: Of searches that were given no width.
            k: Neighbors.
            target: Recall aimed at in the mean.
        """
        if self._calibration is None or walk.scans:
            return walk
        ranges = choose_ranges(self._calibration.ranges, k, target)
        if ranges is None or (walk.farther and len(walk.farther) != len(ranges.strange)):
            return walk
        return walk._replace(ranges=ranges)

    def nearness(
        self, best: NDArray[np.floating], queries: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """How near queries lie to the best rows of their answers; see `nearness`."""
        return nearness(
            best,
            queries,
            metric=self._metric,
            centre=self._centre,
            spread=self.spread,
            row_length2=self._row_length2,
        )

    @property
    def nearness_rounded(self) -> float:
        """How much nearer than it is a float32 score may make a row seem, or farther."""
        if not self._row_length2:
            return _ROUNDED
        along = np.linalg.norm(self._centre.astype(np.float64)) / math.sqrt(self._row_length2)
        return _ROUNDED / (1.0 - float(along))

    def summary(
        self,
        k: int,
        walk: ChosenWalk,
        facts: _core.Facts,
        allow: NDArray[np.uint8] | None = None,
    ) -> Summary:
        """Say what answers of ``k`` neighbors by ``walk`` can promise, from the walks' facts.

        Args:
            k: Neighbors asked for.
            walk: How they were looked for.
            facts: What the native search says of itself.
            allow: A bit per row that could be in an answer, or None for all.
        """
        columns = facts.columns()
        best, length, unrelated = (
            columns[:, FACTS.index(name)] for name in ("best", "query_length", "unrelated")
        )
        possible = self._count
        if allow is not None and (columns[:, FACTS.index("found")] < k).any():
            possible = int(np.unpackbits(allow, bitorder="little").sum())
        return summarize(
            columns,
            _nearness(best, length**2, unrelated, self._metric, self.spread, self._row_length2),
            k=k,
            possible=possible,
            walk=walk,
            calibration=self._calibration,
        )


def summarize(
    facts: NDArray[np.float64],
    near: NDArray[np.float64],
    *,
    k: int,
    possible: int,
    walk: ChosenWalk,
    calibration: Calibration | None,
) -> Summary:
    """Say of a batch of answers how complete they are, and what recall they can promise.

    Args:
        facts: float64, shape (nq, len(FACTS)).
        near: `nearness` of the queries to them.
        k: Neighbors asked for.
        possible: Rows that could be in an answer.
        walk: How they were looked for.
        calibration: Of the segment; None where nothing was measured.
    """
    column: dict[str, NDArray[np.float64]] = dict(zip(FACTS, facts.T, strict=True))
    found = column["found"]
    done = column["expanded"] + column["evaluated"]
    skipped = column["skipped"] + column["damaged"]
    completeness = np.where(done + skipped > 0, done / np.maximum(done + skipped, 1), 1.0)
    expected = column["expected_recall"]
    # A scan meets every allowed row, so only its re-rank can lose any. What one of all rows keeps
    # for it was measured.
    scanned = (column["scanned"] > 0) & (not walk.scans)
    mean, bound = _promised(column, near, walk, calibration)
    whole = np.where(scanned, 1.0, bound) - _loss_bound(expected, k)
    upper = calibration.upper_low if calibration else 0.0
    # With no row of the bottom followed, not even the upper levels need be there.
    partial = np.where(column["expanded"] > 0, upper, 0.0)
    # A scan of groups promises what those hold that were all there, however many are missing.
    grouped = column["range_groups"] > 0
    partial = np.where(grouped, whole, partial)
    share = np.where(grouped, 1.0, completeness)
    # Fewer hits than there are rows to find are so many missed.
    reached = found / min(k, possible) if possible else np.ones(len(found))
    return Summary(
        completeness=completeness.astype(np.float32),
        recall_bound=np.clip(np.where(skipped == 0, whole, partial), 0.0, reached).astype(
            np.float32
        ),
        expected_recall=np.minimum(share * np.where(scanned, 1.0, mean) * expected, reached).astype(
            np.float32
        ),
        exact_share=(column["exact"] / np.maximum(found, 1)).astype(np.float32),
        pages_read=column["pages_read"].astype(np.int64),
        bytes_read=column["bytes_read"].astype(np.int64),
        rounds=column["rounds"].astype(np.int64),
        deadline_hit=column["deadline_hit"] > 0,
        scanned=column["scanned"] > 0,
    )


def _promised(
    column: Mapping[str, NDArray[np.float64]],
    near: NDArray[np.float64],
    walk: ChosenWalk,
    calibration: Calibration | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean recall of walks for queries as near as these, and what the stated share reached."""
    # A row for each walk that may have been the last; a column for queries like those that were
    # calibrated, and one for each band of strange ones.
    narrow = column["narrow"] > 0
    last = column["farther"].astype(np.int64)
    recalls = [walk.recall, *(farther.recall for farther in walk.farther)]
    if walk.near is not None:
        last[narrow] = len(recalls)
        recalls.append(walk.near.others)
    band = np.zeros(len(near), np.int64)
    strangers = calibration is not None and calibration.knows_strangers
    if calibration is not None and strangers:
        # An answer without a best row is as strange as can be.
        for edge in calibration.strange_edges:
            band += ~(near >= edge)
    means = np.array([(recall.mean, *recall.strange_means) for recall in recalls])
    lows = np.array([(recall.low, *recall.strange_lows) for recall in recalls])
    mean, bound = means[last, band], lows[last, band]
    if walk.near is not None:
        # The walk took its codes' word for how near the best row is; here is what it was.
        surely = narrow & (band == 0) & (near >= walk.near.near_from)
        mean[surely], bound[surely] = walk.near.mean, walk.near.low
    grouped = column["range_groups"] > 0
    if walk.ranges is not None and grouped.any():
        looked_at = column["ranges_whole"][grouped].astype(np.int64)
        mean[grouped], bound[grouped] = walk.ranges.recall.promised(looked_at, band[grouped])
    if calibration is not None and strangers:
        bound[~(near >= calibration.strange_nearness_low)] = 0.0
    return mean, bound


def _loss_bound(expected_recall: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Share of the answer that the re-rank may have lost, at 97.5 % confidence; float64, (nq,).

    Each doubtful member is wrong independently with a small probability, so their number is about
    Poisson with the expected loss as its mean (Le Cam, Pacific J. Math. 10, 1960); this is its
    quantile.
    """
    mean = k * (1.0 - expected_recall)
    term = np.exp(-mean)
    total = term.copy()
    quantile = np.zeros(len(mean))
    for n in range(1, k + 1):
        open_ones = total < _CONFIDENCE
        if not open_ones.any():
            break
        quantile[open_ones] = n
        term *= mean / n
        total += term
    return quantile / k
