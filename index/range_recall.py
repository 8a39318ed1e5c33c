"""What scans of groups of near rows find (`range_table.py`), as calibration measured it.

A scan looks at every row of so many groups, the nearest by their means. What it can find of a
query's true neighbors is what lies in those groups: counted at sealing, for each number of groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.index.json_values import are_shares, is_count, with_tuples

# Numbers of groups that are measured, of those that there are. More are read no sooner than walked.
GROUP_COUNTS: Final = (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 80, 96, 112, 128)
# Beyond so many groups, the nearest, a scan leaves out pieces of less than a so manieth of their
# group's rows, as are those of upper levels: each is a read, and holds few of the neighbors.
# A million rows, 48 groups: 56 reads for 78 (p99), 0.971 of the neighbors for 0.975. Sealing counts
# with these two, and segments promise what it counted: others would take another format version.
WHOLE_NEAREST: Final = 8
SMALL_SHARE: Final = 8
# Of what the target allows to be lost, what may lie outside of the groups that a scan looks at, in
# the mean over the kinds of query. The rest is what settling may lose.
_OUTSIDE_SHARE: Final = 0.95
# And of the kind that fares worst: what a kind needs beyond the others is bytes that all would wait
# for, and only until walks take over.
_OUTSIDE_SHARE_WORST: Final = 1.5


@dataclasses.dataclass(frozen=True)
class RangeRecall:
    """Of one k, the share of true neighbors that lie in the nearest groups.

    Attributes:
        k: Neighbors.
        groups: Numbers of groups, rising.
        overall: Mean share at each, over the kinds of known query.
        means: Mean share of the kind that fares worst, which is what is promised.
        lows: The share that the stated part of that kind's queries reached.
        strange_means: As ``means``, of strange queries, band after band.
        strange_lows: As ``lows``, of those.
    """

    k: int
    groups: tuple[int, ...]
    overall: tuple[float, ...]
    means: tuple[float, ...]
    lows: tuple[float, ...]
    strange_means: tuple[float, ...]
    strange_lows: tuple[float, ...]

    @property
    def strange_by_band(self) -> list[tuple[float, ...]]:
        """``strange_means`` of each band."""
        count = len(self.groups)
        starts = range(0, len(self.strange_means), count)
        return [self.strange_means[start : start + count] for start in starts]

    def promised(
        self, whole: NDArray[np.int64], band: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean share and the one that the stated part reached, of scans that looked at so much.

        Args:
            whole: Shape (nq,): groups that were looked at whole, the nearest.
            band: Shape (nq,): 0 for queries like known ones, else the band from 1 on.
        """
        count = len(self.groups)
        means = np.reshape((*self.means, *self.strange_means), (-1, count))
        lows = np.reshape((*self.lows, *self.strange_lows), (-1, count))
        at = np.searchsorted(self.groups, whole, "right") - 1
        row = np.minimum(band, len(means) - 1)
        known = at >= 0
        at = np.maximum(at, 0)
        return means[row, at] * known, lows[row, at] * known


class ChosenRanges(NamedTuple):
    """How many groups a scan looks at.

    Attributes:
        groups: Of a query like known ones.
        strange: Of strange ones, by band; no fewer.
        found: Mean share of the neighbors in the first, over the kinds of query.
        recall: What scans find.
    """

    groups: int
    strange: tuple[int, ...]
    found: float
    recall: RangeRecall


def choose_ranges(measured: Sequence[RangeRecall], k: int, target: float) -> ChosenRanges | None:
    """Choose the fewest groups that hold what the target asks for; None if no number does.

    Args:
        measured: By k, rising.
        k: Neighbors.
        target: Recall@k aimed at in the mean.
    """
    recall = _at_k(measured, k)
    if recall is None:
        return None
    wanted = 1.0 - _OUTSIDE_SHARE * (1.0 - target)
    least = 1.0 - _OUTSIDE_SHARE_WORST * (1.0 - target)
    found_at = zip(recall.groups, recall.overall, recall.means, strict=True)
    enough = [n for n, mean, worst in found_at if mean >= wanted and worst >= least]
    if not enough:
        return None
    groups = enough[0]
    strange = []
    for means in recall.strange_by_band:
        better = [n for n, mean in zip(recall.groups, means, strict=True) if mean >= wanted]
        strange.append(max((better or recall.groups[-1:])[0], groups))
    found = recall.overall[recall.groups.index(groups)]
    return ChosenRanges(groups, tuple(strange), found, recall)


def _at_k(measured: Sequence[RangeRecall], k: int) -> RangeRecall | None:
    """What is known of ``k`` neighbors: of two around it the worse, beyond the last nothing."""
    below = [entry for entry in measured if entry.k <= k]
    above = [entry for entry in measured if entry.k >= k]
    if not below or not above:
        return None
    one, other = below[-1], above[0]
    if one is other:
        return one
    lists = {
        name: tuple(map(min, getattr(one, name), getattr(other, name)))
        for name in ("overall", "means", "lows", "strange_means", "strange_lows")
    }
    return RangeRecall(k, one.groups, **lists)


def ranges_from_json(raw: Any) -> tuple[RangeRecall, ...]:
    """Make entries of the manifest's JSON list; check them with `wrong_with_ranges`.

    Raises:
        TypeError: fields are missing or unknown.
    """
    return tuple(RangeRecall(**with_tuples(dict(entry))) for entry in raw)


def wrong_with_ranges(entries: Any, *, bands: int) -> str | None:
    """Return what of it nobody measures; None if there is nothing of the kind.

    Args:
        entries: What the manifest says.
        bands: Of strange queries, that the calibration knows.
    """
    if not isinstance(entries, tuple) or len(entries) > 16:
        return "ranges: expected a list of 16 at most"
    before, numbers = 0, None
    for entry in entries:
        if not is_count(entry.k) or entry.k <= before:
            return f"ranges of k {entry.k!r} is not risen"
        before, where = entry.k, f"ranges of k {entry.k}"
        groups = entry.groups
        if not isinstance(groups, tuple) or not groups or not all(map(is_count, groups)):
            return f"{where}: groups {groups!r}"
        if groups[0] == 0 or any(later <= one for one, later in pairwise(groups)):
            return f"{where}: groups {groups!r} does not rise"
        if groups[-1] > GROUP_COUNTS[-1] or groups != (numbers or groups):
            return f"{where}: groups {groups!r}"
        numbers = groups
        for name, many in (
            ("overall", 1),
            ("means", 1),
            ("lows", 1),
            ("strange_means", bands),
            ("strange_lows", bands),
        ):
            values = getattr(entry, name)
            if not isinstance(values, tuple) or len(values) != many * len(groups):
                return f"{where}: {name} is not a list of {many * len(groups)}"
            if not are_shares(values):
                return f"{where}: {name} {values!r}"
    return None
