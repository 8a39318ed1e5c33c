"""Lines of what is lost by what is expected keep a target in the mean, and are read back whole."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from stoker.index.loss_lines import (
    LOSS_KINDS,
    LossLine,
    LossLines,
    fitted,
    lines_from_json,
    wrong_with_lines,
)

SEED = 20_261_130
K = 10


def drawn(share: float, least: float, count: int = 4_000) -> LossLine:
    """The line fitted to queries of which each neighbor is lost by the true one, or was not met."""
    rng = np.random.default_rng(SEED)
    expected = rng.uniform(0.02, 0.2, count)
    unmet = rng.binomial(K, 0.05 * expected + 0.004) / K
    lost = rng.binomial(K, share * expected + least) / K
    return fitted(expected, np.maximum(lost, unmet), unmet, K)


def some_lines() -> tuple[LossLines, ...]:
    lines = [drawn(0.6, 0.01), drawn(0.5, 0.005)]
    return tuple(
        LossLines(kind, (11, 64), *(tuple(values) for values in zip(*lines, strict=True)))
        for kind in LOSS_KINDS
    )


@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("target", [0.8, 0.9, 0.95, 0.98])
def test_streams_that_expect_what_is_allowed_lose_no_more_than_the_target(
    share: float, target: float
) -> None:
    line = drawn(share, 0.005)
    allowance = line.allowance(target)
    assert allowance is not None
    least, slope, read_least, read_slope, _ = allowance.line
    assert abs(slope - share) <= 0.15 * share
    assert 0 <= read_slope <= slope
    # The mean that is allowed is that of the target, less what chance may have hidden.
    assert 0.5 * (1 - target) <= allowance.mean_loss <= 1 - target
    expected = 1 - allowance.rerank_target
    if expected < 1:
        assert least + slope * expected == pytest.approx(allowance.mean_loss, abs=1e-9)
        # By what queries truly lose: a tenth of the slope is what so many tell it by.
        assert share * expected + 0.005 <= (1 - target) * 1.1
    assert read_least + read_slope * line.expected == pytest.approx(line.read_lost)


def test_what_no_read_brings_back_allows_nothing() -> None:
    line = drawn(0.6, 0.01)
    assert line._replace(read_lost=0.06).allowance(0.95) is None
    assert line._replace(read_lost=0.04).allowance(0.95) is not None
    # Where all expect far more than the target allows, each is read for, but no further down.
    steep = line._replace(expected=0.7, lost=0.26, share=0.2).allowance(0.95)
    assert steep is not None
    assert 0 < 1 - steep.rerank_target <= 0.05 * 0.1 + 1e-9


def test_where_nothing_is_expected_the_line_says_what_is_lost() -> None:
    nothing = np.zeros(100)
    lost = np.full(100, 0.03)
    line = fitted(nothing, lost, lost, K)
    assert line.lost == line.read_lost == pytest.approx(0.03)
    assert line.share == 1.0


@pytest.mark.parametrize("expected_most", [1.0, 1e-4, 6e-8])
def test_whatever_queries_expect_and_lose_a_segment_with_their_line_can_be_opened(
    expected_most: float,
) -> None:
    # Codes may be sure of what a walk found while it found the wrong rows: no slope is too steep.
    rng = np.random.default_rng(SEED)
    for count in (2, 3, 30, 300):
        for some in (0.02, 0.5, 1.0):
            expected = expected_most * rng.random(count) * (rng.random(count) < some)
            lost = rng.integers(0, K + 1, count) / K
            line = fitted(expected, lost, lost * rng.integers(0, 2, count), K)
            lines = (LossLines("near", (11,), *((value,) for value in line)),)
            assert wrong_with_lines(lines, ef_max=1 << 20) is None, f"seed {SEED}: {line}"
            for target in (0.5, 0.9, 0.999):
                allowance = line.allowance(target)
                assert allowance is None or np.isfinite([*allowance[:2], *allowance.line]).all()


def test_allowances_grow_with_what_the_target_leaves_and_lie_between_those_of_widths() -> None:
    lines = some_lines()[0]
    grown = []
    for target in (0.97, 0.95, 0.9, 0.8):
        by_width = [lines.at(width).allowance(target) for width in (5, 11, 20, 40, 64, 500)]
        expected = [1 - a.rerank_target for a in by_width if a is not None]
        assert len(expected) == 6
        assert expected == sorted(expected)
        assert expected[0] == expected[1]
        assert expected[4] == expected[5]
        grown.append(expected[2])
    assert grown == sorted(grown)


def test_lines_are_read_back_from_json_and_others_are_refused() -> None:
    lines = some_lines()
    raw = json.loads(json.dumps([dataclasses.asdict(entry) for entry in lines]))
    assert lines_from_json(raw) == lines
    assert wrong_with_lines(lines, ef_max=1 << 20) is None
    assert wrong_with_lines((), ef_max=1 << 20) is None
    changes: list[dict[str, Any]] = [
        {"kind": "halves"},
        {"kind": 3},
        {"kind": {}},
        {"ef": ()},
        {"ef": (64, 11)},
        {"ef": (0, 11)},
        {"ef": (11, 1 << 30)},
        {"lost": (0.1,)},
        {"lost": (0.1, 1.5)},
        {"share": (0.1, -0.1)},
        {"read_share": (0.1, float("nan"))},
        {"expected": ("0.1", 0.1)},
        {"error": 0.1},
    ]
    for change in changes:
        damaged = (dataclasses.replace(lines[0], **change),)
        assert wrong_with_lines(damaged, ef_max=1 << 20) is not None, change
    assert wrong_with_lines((lines[0], lines[0]), ef_max=1 << 20) is not None
