"""Reads figures out of the engine benchmark's results: medians, spreads, speeds at equal recall."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Rows = list[dict[str, Any]]


def disk_of(name: str) -> str:
    """The disk that moments were measured on: "cloud" of "cloud, told"."""
    return name.partition(",")[0]


def speed_at(rows: Rows, target: float, column: str) -> float | None:
    """Queries a second at a recall, log-linear between the two efforts around it."""
    speeds = [(r["recall"], float(np.median(r[column]))) for r in rows if column in r]
    for (r0, s0), (r1, s1) in itertools.pairwise(speeds):
        if r0 <= target <= r1 and r1 > r0:
            share = (target - r0) / (r1 - r0)
            return float(np.exp((1 - share) * np.log(s0) + share * np.log(s1)))
    if speeds and speeds[0][0] >= target:
        return speeds[0][1]
    return None


def middle(runs: Rows, *path: str) -> float | None:
    """Median over repeats of one figure; None where no repeat has it."""
    values = [value for run in runs if (value := _at(run, path)) is not None]
    return float(np.median(values)) if values else None


def spread(runs: Rows, *path: str, digits: int = 1) -> str:
    """Median over repeats, and the lowest and highest where there are several."""
    values = [value for run in runs if (value := _at(run, path)) is not None]
    if not values:
        return "-"
    text = f"{np.median(values):,.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):,.{digits}f}-{max(values):,.{digits}f})"
    return text


def _at(run: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(run, dict) or name not in run:
            return None
        run = run[name]
    return run


def error_of(runs: Rows) -> str:
    """The first error of some repeats; empty where there is none."""
    return next((str(run["error"]) for run in runs if "error" in run), "")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, figures to the right."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("| --- |" + " ---: |" * (len(header) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return [*lines, ""]


def number(value: float | None, digits: int = 0) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"
