"""What calibration found of a sealed segment, as its manifest keeps it.

`stoker.index.calibration` measures it; `stoker.index.recall_bounds` makes promises of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

from stoker.index.json_values import are_shares, is_count, is_number, is_share, with_tuples
from stoker.index.loss_lines import LossLine, LossLines, lines_from_json, wrong_with_lines
from stoker.index.range_recall import RangeRecall, ranges_from_json, wrong_with_ranges

# Widest walk that can be asked for, or that calibration measures.
EF_MAX: Final = 1 << 20
# Bands of strange queries: as many as searches take.
BANDS_MAX: Final = 4
# Other k than ten that calibration may speak of.
_TABLES_MAX: Final = 16


class ByWidth(NamedTuple):
    """Recall at each width: the mean, what the stated share reached, what unseen ones reach.

    The last is empty where nobody worked it out.
    """

    means: tuple[float, ...]
    lows: tuple[float, ...]
    sures: tuple[float, ...]


# Fields of a calibration that have an entry for each width, or for each of each band.
PER_WIDTH: Final = tuple(
    f"{codes}{group}_{part}"
    for codes in ("", "coarse_")
    for group in ("recall", "entry", "strange", "entry_strange", "near")
    for part in (("mean", "low") if group == "near" else ("mean", "low", "sure"))
)


@dataclasses.dataclass(frozen=True)
class KTable:
    """What searches for another k found; see `k_tables.for_k`.

    Attributes:
        k: Neighbors asked for.
        queries: How many held-out queries there were, of the known kinds.
        ef: Widths measured, rising.
        recall: Field of `PER_WIDTH` -> the same of this k.
        scan: As that of the calibration.
    """

    k: int
    queries: int
    ef: tuple[int, ...]
    recall: Mapping[str, tuple[float, ...]]
    scan: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What searches on held-out queries found when the segment was sealed.

    Attributes:
        queries: How many held-out queries there were.
        k: Neighbors asked for.
        confidence: Of the lower bounds: the share of queries that reach them.
        ef: Widths measured, rising.
        recall_mean: Mean recall@k at each width, everything resident, of the worst kind of query.
        recall_low: The recall that the stated share of that kind's queries reached.
        upper_mean: Mean recall@k of answers from the upper layers alone, of the kinds of query that
            targets are kept for.
        upper_low: The recall that the stated share of them reached.
        code_recall: As ``upper_mean``, at the largest width, navigation codes alone.
        refined_recall: The same with both planes and no vectors.
        code_error: Standard deviation of the first plane's estimate over |q||x - centre|, where of
            the query what `PreparedQuery::shift` says is left off.
        refine_error: The same for both planes.
        coarse_error: The same for coarse codes; 0 in a segment without them.
        coarse_recall_mean: As ``recall_mean``, of walks on coarse codes; empty without them.
        coarse_recall_low: As ``recall_low``, of those.
        spread: Mean squared distance of the rows from their centre.
        nearness_low: How near the queries lay to what they found (`recall_bounds.nearness`), the
            farthest hundredth left out. Queries that lie farther are strange.
        strange_nearness_low: The same of queries at random. Nothing is known of farther ones.
        strange_below: Bands of strange queries, by how near they lie: the upper edge of each,
            falling, from ``nearness_low`` on. Empty where all of them are one band.
        strange_mean: As ``recall_mean``, of queries that lie as far as that, band after band; empty
            where they were not measured.
        strange_low: As ``recall_low``, of those.
        strange_sure: As ``recall_sure``, of those.
        coarse_strange_mean: As ``strange_mean``, of walks on coarse codes.
        coarse_strange_low: As ``strange_low``, of those.
        coarse_strange_sure: As ``strange_sure``, of those.
        near_from: How near queries lie to what they find of which nearly all are *near* ones: what
            was found of those alone says what narrow walks do for such. 0 where none were measured.
        near_mean: As ``recall_mean``, of near queries from there on; empty without them.
        near_low: As ``recall_low``, of those.
        coarse_near_mean: As ``near_mean``, of walks on coarse codes.
        coarse_near_low: As ``near_low``, of those.
        entry_mean: As ``recall_mean``, of walks as wide on the level above the bottom as there;
            empty where they were not measured.
        entry_low: As ``recall_low``, of those.
        entry_strange_mean: As ``strange_mean``, of those.
        entry_strange_low: As ``strange_low``, of those.
        entry_strange_sure: As ``strange_sure``, of those.
        coarse_entry_mean: As ``entry_mean``, of walks on coarse codes.
        coarse_entry_low: As ``entry_low``, of those.
        coarse_entry_strange_mean: As ``entry_strange_mean``, of those.
        coarse_entry_strange_low: As ``entry_strange_low``, of those.
        coarse_entry_strange_sure: As ``entry_strange_sure``, of those.
        recall_sure: What the mean over queries that were not drawn is at least, at 95 % confidence,
            where ``recall_mean`` is that of those that were. Empty where nobody worked it out.
        coarse_recall_sure: The same of walks on coarse codes.
        entry_sure: The same of walks that enter widely.
        coarse_entry_sure: The same of those on coarse codes.
        entry_cost: Records that such walks look at over those of the others, at equal width.
        half_recall: As ``refined_recall``, with half of the vectors in memory too, whole runs of
            pages by chance. None where nobody measured it.
        half_low: The recall that the stated share of those queries reached.
        by_k: What was found of other k, rising; empty where nobody measured them.
        scan: Of scans of all codes but coarse ones, whose best are settled by vectors: the mean and
            the recall that the stated share reached, each of the kind or band that fares worst.
            Empty where nobody measured them.
        losses: What near queries lose whose answers are settled by the codes that walks compare,
            and what they expect to; empty where nobody measured it.
        coarse_losses: The same of walks on coarse codes, of every kind.
        ranges: What the nearest groups of rows hold, by k; empty without such groups.
    """

    queries: int
    k: int
    confidence: float
    ef: tuple[int, ...]
    recall_mean: tuple[float, ...]
    recall_low: tuple[float, ...]
    upper_mean: float
    upper_low: float
    code_recall: float
    refined_recall: float
    code_error: float
    refine_error: float
    coarse_error: float = 0.0
    coarse_recall_mean: tuple[float, ...] = ()
    coarse_recall_low: tuple[float, ...] = ()
    spread: float = 0.0
    nearness_low: float = 0.0
    strange_nearness_low: float = 0.0
    strange_mean: tuple[float, ...] = ()
    strange_low: tuple[float, ...] = ()
    coarse_strange_mean: tuple[float, ...] = ()
    coarse_strange_low: tuple[float, ...] = ()
    near_from: float = 0.0
    near_mean: tuple[float, ...] = ()
    near_low: tuple[float, ...] = ()
    coarse_near_mean: tuple[float, ...] = ()
    coarse_near_low: tuple[float, ...] = ()
    entry_mean: tuple[float, ...] = ()
    entry_low: tuple[float, ...] = ()
    entry_strange_mean: tuple[float, ...] = ()
    entry_strange_low: tuple[float, ...] = ()
    coarse_entry_mean: tuple[float, ...] = ()
    coarse_entry_low: tuple[float, ...] = ()
    coarse_entry_strange_mean: tuple[float, ...] = ()
    coarse_entry_strange_low: tuple[float, ...] = ()
    entry_cost: float = 1.0
    recall_sure: tuple[float, ...] = ()
    coarse_recall_sure: tuple[float, ...] = ()
    entry_sure: tuple[float, ...] = ()
    coarse_entry_sure: tuple[float, ...] = ()
    strange_below: tuple[float, ...] = ()
    strange_sure: tuple[float, ...] = ()
    coarse_strange_sure: tuple[float, ...] = ()
    entry_strange_sure: tuple[float, ...] = ()
    coarse_entry_strange_sure: tuple[float, ...] = ()
    half_recall: float | None = None
    half_low: float | None = None
    by_k: tuple[KTable, ...] = ()
    scan: tuple[float, ...] = ()
    losses: tuple[LossLines, ...] = ()
    coarse_losses: tuple[LossLines, ...] = ()
    ranges: tuple[RangeRecall, ...] = ()

    @property
    def knows_strangers(self) -> bool:
        """Whether queries at random were measured too; segments of before have none."""
        return bool(self.strange_low)

    def by_width(self, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Means and lower bounds at each width of walks on codes of ``bits``."""
        if bits == 2:
            return self.coarse_recall_mean, self.coarse_recall_low
        return self.recall_mean, self.recall_low

    @property
    def strange_edges(self) -> tuple[float, ...]:
        """Upper edges of the bands of strange queries, falling: at least one."""
        return self.strange_below or (self.nearness_low,)

    def strange_by_width(self, bits: int, *, enters_widely: bool = False) -> tuple[ByWidth, ...]:
        """What each band of strange queries reached; empty where nobody measured them."""
        if not self.knows_strangers:
            return ()
        name = ("coarse_" if bits == 2 else "") + ("entry_" if enters_widely else "") + "strange_"
        means, lows, sures = (getattr(self, name + part) for part in ("mean", "low", "sure"))
        step = len(self.ef)
        bands = (slice(start, start + step) for start in range(0, len(means), step))
        return tuple(ByWidth(means[band], lows[band], sures[band]) for band in bands)

    def near_by_width(self, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The same of near queries; empty where nobody measured them apart."""
        if bits == 2:
            return self.coarse_near_mean, self.coarse_near_low
        return self.near_mean, self.near_low

    def loss_lines(self, bits: int, *, width: int, near: bool) -> tuple[LossLine, ...]:
        """What queries lose by walks of ``width``: near ones, or a line for each other kind."""
        measured = {2: self.coarse_losses, 4: self.losses}.get(bits, ())
        return tuple(kind.at(width) for kind in measured if (kind.kind == "near") == near)

    def entry_by_width(self, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """As `by_width`, of walks that enter widely; empty where nobody measured them."""
        if bits == 2:
            return self.coarse_entry_mean, self.coarse_entry_low
        return self.entry_mean, self.entry_low

    def sure_by_width(self, bits: int, *, enters_widely: bool = False) -> tuple[float, ...]:
        """What means of `by_width`, or of `entry_by_width`, are at least; empty if not known."""
        if enters_widely:
            return self.coarse_entry_sure if bits == 2 else self.entry_sure
        return self.coarse_recall_sure if bits == 2 else self.recall_sure

    def recall_from_memory(self, bits: int, coverage: Mapping[str, float]) -> float | None:
        """Mean recall@k of answers from memory alone, in [0, 1]; None where nobody measured it.

        Between two stages that were measured (upper layers; all of links and codes; second codes;
        half the vectors; vectors) in proportion to what demand finds of the kind that makes the
        difference.

        Args:
            bits: Of what walks compare. Walks on 2-bit codes were measured with everything
                resident only.
            coverage: Kind -> share of what demand looks at that is resident, in [0, 1].
        """
        if bits == 2 or coverage.get("upper", 1.0) < 1.0:
            return None
        vectors = coverage.get("vectors", 0.0)
        if bits > 4:  # Walks on vectors leave nothing to settle.
            walk = min(coverage.get("links", 0.0), vectors)
            return self.upper_mean + self._bought(walk, self.upper_mean)
        walk = min(coverage.get("links", 0.0), coverage.get("codes", 0.0))
        found = self.upper_mean + walk * (self.code_recall - self.upper_mean)
        settled = walk * coverage.get("refine", 0.0)
        found += settled * max(self.refined_recall - self.code_recall, 0.0)
        found += walk * self._bought(vectors, self.refined_recall)
        return min(max(found, 0.0), 1.0)

    def _bought(self, share: float, before: float) -> float:
        """Recall that so large a share of the vectors adds to what was there ``before`` them."""
        whole = max(self.recall_mean[-1] - before, 0.0)
        if self.half_recall is None:
            return share * whole
        half = min(max(self.half_recall - before, 0.0), whole)
        if share <= 0.5:
            return 2.0 * share * half
        return half + (2.0 * share - 1.0) * (whole - half)


def calibration_from_json(raw: Mapping[str, Any]) -> Calibration:
    """Make a calibration of the manifest's JSON object; check it with `wrong_with`.

    Raises:
        TypeError, ValueError, KeyError: fields are missing, unknown or of another shape.
    """
    by_k = tuple(_table(dict(table)) for table in raw.get("by_k", ()))
    lines = {name: lines_from_json(raw.get(name, ())) for name in ("losses", "coarse_losses")}
    ranges = ranges_from_json(raw.get("ranges", ()))
    return Calibration(**{**with_tuples(raw), "by_k": by_k, "ranges": ranges, **lines})


def _table(raw: dict[str, Any]) -> KTable:
    return KTable(**{**with_tuples(raw), "recall": with_tuples(dict(raw["recall"]))})


def wrong_with(calibration: Calibration, *, has_coarse: bool) -> str | None:
    """Return what of it no calibration finds; None if there is nothing of the kind."""
    for name in ("queries", "k"):
        value = getattr(calibration, name)
        if not is_count(value) or value == 0:
            return f"{name} {value!r}"
    for name in ("confidence", "upper_mean", "upper_low", "code_recall", "refined_recall"):
        if not is_share(getattr(calibration, name)):
            return f"{name} {getattr(calibration, name)!r}"
    for name in ("code_error", "refine_error", "coarse_error"):
        value = getattr(calibration, name)
        # As wide as a float32, which is what searches make of it.
        if not is_number(value) or not 0 <= value < 1e38:
            return f"{name} {value!r}"
    widths = calibration.ef
    if not isinstance(widths, tuple) or not widths or not all(map(is_count, widths)):
        return f"ef {widths!r}"
    if widths[0] == 0 or any(later <= width for width, later in pairwise(widths)):
        return f"ef {widths!r} does not rise"
    if widths[-1] > EF_MAX:
        return f"ef {widths[-1]}: expected {EF_MAX} at most"
    for name in ("recall_mean", "recall_low", "coarse_recall_mean", "coarse_recall_low"):
        values = getattr(calibration, name)
        expected = len(widths) if has_coarse or not name.startswith("coarse") else 0
        if not isinstance(values, tuple) or len(values) != expected:
            return f"{name} is not a list of {expected}"
        if not are_shares(values):
            return f"{name} {values!r}"
    if not is_number(calibration.entry_cost) or not 0 < calibration.entry_cost < 1e300:
        return f"entry_cost {calibration.entry_cost!r}"
    for name in ("spread", "nearness_low", "strange_nearness_low", "near_from"):
        value = getattr(calibration, name)
        if not is_number(value) or not -1e300 < value < 1e300 or (name == "spread" and value < 0):
            return f"{name} {value!r}"
    edges = calibration.strange_below
    if not isinstance(edges, tuple) or len(edges) > BANDS_MAX or not all(map(is_number, edges)):
        return f"strange_below {edges!r}"
    if not all(-1e300 < edge < 1e300 for edge in edges) or list(edges) != sorted(edges)[::-1]:
        return f"strange_below {edges!r} does not fall"
    for name in ("half_recall", "half_low"):
        value = getattr(calibration, name)
        if value is not None and not is_share(value):
            return f"{name} {value!r}"
    for name in PER_WIDTH:
        if name in ("recall_mean", "recall_low", "coarse_recall_mean", "coarse_recall_low"):
            continue
        values = getattr(calibration, name)
        if "entry" in name:
            measured = bool(calibration.entry_low)
        elif "near" in name:
            measured = bool(calibration.near_low)
        elif name.endswith("sure"):
            measured = True
        else:
            measured = calibration.knows_strangers
        if name.endswith("strange_sure"):
            measured = measured and bool(calibration.strange_sure)
        elif name.endswith("sure"):
            measured = measured and bool(calibration.recall_sure)
        measured = measured and (has_coarse or not name.startswith("coarse"))
        bands = len(calibration.strange_edges) if "strange" in name else 1
        expected = len(widths) * bands if measured else 0
        if not isinstance(values, tuple) or len(values) != expected:
            return f"{name} is not a list of {expected}"
        if not are_shares(values):
            return f"{name} {values!r}"
    wrong = _wrong_with_scan(calibration.scan)
    for lines in (calibration.losses, calibration.coarse_losses):
        wrong = wrong or wrong_with_lines(lines, ef_max=EF_MAX)
    wrong = wrong or wrong_with_ranges(calibration.ranges, bands=len(calibration.strange_edges))
    return wrong or _wrong_with_tables(calibration)


def _wrong_with_scan(scan: Any) -> str | None:
    if not isinstance(scan, tuple) or len(scan) not in (0, 2) or not are_shares(scan):
        return f"scan {scan!r}"
    return None


def _wrong_with_tables(calibration: Calibration) -> str | None:
    """Say what no calibration finds of other k, if there is any."""
    tables = calibration.by_k
    if not isinstance(tables, tuple) or len(tables) > _TABLES_MAX:
        return f"by_k: expected a list of {_TABLES_MAX} at most"
    before = 0
    for table in tables:
        where = f"by_k of k {table.k!r}"
        if not is_count(table.k) or table.k <= before or table.k == calibration.k:
            return f"{where} is not risen"
        before = table.k
        if not is_count(table.queries) or table.queries == 0:
            return f"{where}: queries {table.queries!r}"
        if not isinstance(table.ef, tuple) or not table.ef or not all(map(is_count, table.ef)):
            return f"{where}: ef {table.ef!r}"
        if table.ef[0] == 0 or any(later <= width for width, later in pairwise(table.ef)):
            return f"{where}: ef {table.ef!r} does not rise"
        if table.ef[-1] > EF_MAX:
            return f"{where}: ef {table.ef[-1]}: expected {EF_MAX} at most"
        if wrong := _wrong_with_scan(table.scan):
            return f"{where}: {wrong}"
        if set(table.recall) - set(PER_WIDTH):
            return f"{where}: recall of {sorted(table.recall)}"
        for name in PER_WIDTH:
            values = table.recall.get(name, ())
            entries = len(getattr(calibration, name)) // len(calibration.ef)
            # Of near queries too few may have been asked for more neighbors.
            expected = {entries * len(table.ef), 0 if "near" in name else entries * len(table.ef)}
            if not isinstance(values, tuple) or len(values) not in expected:
                return f"{where}: {name} is not a list of {max(expected)}"
            if not are_shares(values):
                return f"{where}: {name} {values!r}"
    return None
