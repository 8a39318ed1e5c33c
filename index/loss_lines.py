"""What answers lose that are settled without reading, by what their codes expect: a line a width.

The error model of codes takes errors for independent, and a walk's candidates for all that there
are. Both are wrong, and by how much differs from data to data and with the width of the walk. So
sealing measures what queries of each kind lose, and a straight line through it, over what they
expected: it says for a stream whose queries are in more doubt, or less, than those measured what
they lose in the mean. `stoker.index.calibration` measures; `stoker.index.search_plan` uses it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.index.json_values import are_numbers, is_count, with_tuples

# Kinds of query that lines are measured of; the first lie near what is stored.
LOSS_KINDS: Final = ("near", "far", "between")
# One-sided, in standard errors of the mean that was measured.
_SURE: Final = 1.65
# How far the slope may well lie from that of the line through nothing expected and nothing lost, as
# a share of it: few queries tell a slope badly.
_SLOPE_SPREAD: Final = 0.25
# What of the target's loss is left at least where few queries were measured, and what a query that
# does not read may expect at least.
_ALLOWED_MIN: Final = 0.1
# Of a line that is read, or fitted to queries that lose and expect next to nothing.
_SHARE_MAX: Final = 1e6
# See `Allowance.line`.
_MIXED: Final = 1.0
_FIELDS: Final = ("expected", "lost", "share", "error", "read_lost", "read_share")


class Allowance(NamedTuple):
    """How much may be lost without reading, for the native search.

    Attributes:
        mean_loss: In the mean over queries, as ``line`` counts it.
        rerank_target: One less what a query may expect to lose that no other has to make up for.
        line: What is lost without reads: least, and share of what is expected; what reads leave:
            least, and share of what was expected before. Then how many times as much more is
            expected where all of the answer is known by better codes than the rest: measured on
            three sets, where up to 0.6 of it were, 1 + that share within 5 %.
    """

    mean_loss: float
    rerank_target: float
    line: tuple[float, float, float, float, float]


class LossLine(NamedTuple):
    """One width of `LossLines`."""

    expected: float
    lost: float
    share: float
    error: float
    read_lost: float
    read_share: float

    def allowance(self, target: float) -> Allowance | None:
        """Return what a recall target allows; None where not even reading all of it would do."""
        allowed = max(1.0 - target - _SURE * self.error, _ALLOWED_MIN * (1.0 - target))
        if self.read_lost > allowed or self.share <= 0:
            return None
        least = self.lost - self.share * self.expected
        expected_max = (allowed - least) / self.share
        least_max = _ALLOWED_MIN * (1.0 - target)
        read_least = self.read_lost - self.read_share * self.expected
        return Allowance(
            allowed,
            1.0 - min(max(expected_max, least_max, 1e-4), 1.0),
            (least, self.share, read_least, self.read_share, _MIXED),
        )


@dataclasses.dataclass(frozen=True)
class LossLines:
    """What one kind of query loses whose answers are settled by the codes that walks compare.

    Attributes:
        kind: One of `LOSS_KINDS`.
        ef: Widths measured, rising.
        expected: Mean loss that the error model expected, at each.
        lost: Mean loss, as a share of the neighbors asked for, what the walk did not meet included.
        share: Slope of the line: how much more is lost where more is expected.
        error: Standard error of ``lost``.
        read_lost: Mean loss of what the walk did not meet, which no read brings back.
        read_share: Slope of that, at most ``share``.
    """

    kind: str
    ef: tuple[int, ...]
    expected: tuple[float, ...]
    lost: tuple[float, ...]
    share: tuple[float, ...]
    error: tuple[float, ...]
    read_lost: tuple[float, ...]
    read_share: tuple[float, ...]

    def at(self, width: int) -> LossLine:
        """Return the line of walks of ``width``; see `between`."""
        return LossLine(*(between(width, self.ef, getattr(self, field)) for field in _FIELDS))


def between(width: int, widths: Sequence[int], values: Sequence[float]) -> float:
    """Return what is measured at ``widths``, rising, of another: in proportion to its logarithm.

    Beyond them the last one counts.
    """
    return float(np.interp(math.log(width), np.log(widths), values))


def fitted(
    expected: NDArray[np.float64],
    lost: NDArray[np.float64],
    read_lost: NDArray[np.float64],
    k: int,
) -> LossLine:
    """Fit the line of one width to queries of a kind.

    Args:
        expected: Shape (n,), n >= 2: the loss that the error model expected of each.
        lost: Of each, without reading.
        read_lost: Of each, that was not met.
        k: Neighbors of each.
    """
    share, squared = _slope(expected, lost, k)
    read_share, _ = _slope(expected, read_lost, k)
    return LossLine(
        float(expected.mean()),
        float(lost.mean()),
        share,
        float(np.sqrt(squared)) / len(expected),
        float(read_lost.mean()),
        min(read_share, share),
    )


def _slope(expected: NDArray[np.float64], lost: NDArray[np.float64], k: int) -> tuple[float, float]:
    """Slope of the line, and the sum of squared differences from it.

    Least squares, drawn to the slope of the line through nothing by how sure they are (a normal
    prior, as in ridge regression). With one more query that lost a neighbor: see
    `calibration._sure_mean`.
    """
    mean = float(expected.mean())
    if mean <= 0:
        return 1.0, float(((lost - lost.mean()) ** 2).sum()) + 1.0 / k**2
    through_nothing = float(lost.mean()) / mean
    about = expected - mean
    spread = float((about**2).sum())
    by_squares = float((about * lost).sum()) / spread if spread > 0 else through_nothing
    off = lost - lost.mean() - by_squares * about
    squared = float((off**2).sum()) + 1.0 / k**2
    by_prior = squared / len(lost) / max((_SLOPE_SPREAD * through_nothing) ** 2, 1e-12)
    slope = (spread * by_squares + by_prior * through_nothing) / (spread + by_prior)
    return min(max(slope, 0.0), _SHARE_MAX), squared


def lines_from_json(raw: Any) -> tuple[LossLines, ...]:
    """Make lines of the manifest's JSON list; check them with `wrong_with_lines`.

    Raises:
        TypeError: fields are missing or unknown.
    """
    return tuple(LossLines(**with_tuples(dict(entry))) for entry in raw)


def wrong_with_lines(lines: Any, *, ef_max: int) -> str | None:
    """Return what of it nobody measures; None if there is nothing of the kind."""
    if not isinstance(lines, tuple):
        return "losses: expected a list"
    kinds = [entry.kind for entry in lines]
    if any(kind not in LOSS_KINDS or kinds.count(kind) > 1 for kind in kinds):
        return f"losses: expected each of {', '.join(LOSS_KINDS)} once at most, found {kinds!r}"
    for entry in lines:
        where = f"losses of {entry.kind!r}"
        if not isinstance(entry.ef, tuple) or not entry.ef or not all(map(is_count, entry.ef)):
            return f"{where}: ef {entry.ef!r}"
        if not 0 < entry.ef[0] <= entry.ef[-1] <= ef_max:
            return f"{where}: ef {entry.ef!r}: expected 1 to {ef_max}"
        if any(later <= width for width, later in pairwise(entry.ef)):
            return f"{where}: ef {entry.ef!r} does not rise"
        for field in _FIELDS:
            values = getattr(entry, field)
            if not isinstance(values, tuple) or len(values) != len(entry.ef):
                return f"{where}: {field} is not a list of {len(entry.ef)}"
            most = _SHARE_MAX if field in ("share", "read_share") else 1.0
            if not are_numbers(values, most):
                return f"{where}: {field} {values!r}"
    return None
