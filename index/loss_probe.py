"""Measure, when a segment is sealed, what answers by codes alone lose: see `loss_lines`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker.index.held_out import KINDS, NEAR_MIN, Probe
from stoker.index.loss_lines import LOSS_KINDS, LossLine, LossLines, between, fitted
from stoker.index.recall_bounds import FACTS
from stoker.index.segment import Segment

# Narrow walks differ most: what codes confuse they have not met. One as narrow as the answer is
# long has nothing to choose from. Near queries lose the same from some width on.
_WIDTHS: Final = (11, 12, 14, 16, 20, 32, 64, 128)
_NEAR_WIDTH_MAX: Final = 64
# Widths at which it is measured too what the walk has met; see `loss_lines.between`.
_MET_WIDTHS: Final = (11, 16, 32, 64, 128)


def measure_losses(
    segment: Segment, probe: Probe, near: NDArray[np.bool_], kinds: Sequence[str]
) -> tuple[LossLines, ...]:
    """Ask known queries, reading nothing; links and what walks compare are all that is in memory.

    Args:
        segment: To search.
        probe: The queries.
        near: Which of them are near; where none are, there is nothing to say of those.
        kinds: Of `LOSS_KINDS`, those to measure.
    """
    k = probe.rows.shape[1]
    found = []
    for kind in kinds:
        number = LOSS_KINDS.index(kind)
        asked = np.arange(len(near)) % len(KINDS) == number
        asked[probe.known :] = False
        asked &= near | (number > 0)
        widest = min(segment.count, _NEAR_WIDTH_MAX if number == 0 else _WIDTHS[-1])
        widths = [width for width in _WIDTHS if k < width <= widest]
        if asked.sum() >= NEAR_MIN and widths:
            lines = _lines(segment, probe.only(asked), widths)
            found.append(LossLines(kind, tuple(widths), *zip(*lines, strict=True)))
    return tuple(found)


def _lines(segment: Segment, probe: Probe, widths: list[int]) -> list[LossLine]:
    k = probe.rows.shape[1]
    expected, lost, unmet = [], [], {}
    for width in widths:
        hits = segment.search(probe.queries, k, ef=width, resident_only=True)
        _, facts = hits.lazy_summary
        expected.append(1.0 - facts.columns()[:, FACTS.index("expected_recall")])
        lost.append(1.0 - probe.recall_of(hits.rows))
        if width in _MET_WIDTHS or width == widths[-1]:
            # All that the walk ended with: what reads can bring back.
            met = segment.search(probe.queries, width, ef=width, resident_only=True).rows
            unmet[width] = 1.0 - probe.met_of(met)
    lines = []
    for width, by_codes, lacking in zip(widths, expected, lost, strict=True):
        below = max((w for w in unmet if w <= width), default=min(unmet))
        above = min(w for w in unmet if w >= width)
        part = between(width, (below, above), (0.0, 1.0)) if below < above else 0.0
        read_lost = (1.0 - part) * unmet[below] + part * unmet[above]
        lines.append(fitted(by_codes, lacking, read_lost, k))
    return lines
