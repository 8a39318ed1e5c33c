"""Two plots of the benchmark, as PNG: latency over time, and time-to-SLO with the bytes it took.

They need matplotlib (the extra `bench`), which is imported here only.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import UnavailableError
from stoker.service.coldstart.bench_options import METHOD_LABELS, METHODS, BenchOptions
from stoker.service.coldstart.slo import SLO_FACTOR, MethodRow, ScenarioFigures, p99

# Okabe and Ito's palette: told apart with any colour vision.
_COLOURS = {"none": "#D55E00", "last-blocks": "#CC79A7", "all": "#0072B2", "stoker": "#009E73"}
_REST = "#9a9a9a"
_LINES = {"none": "-", "last-blocks": "-", "oracle": ":", "all": "-", "stoker": "-"}
_BIN_COUNT = 40
_MIB = float(1 << 20)


def draw(figures: Sequence[ScenarioFigures], folder: Path, options: BenchOptions) -> list[str]:
    """Draw both plots into ``folder``; returns their names.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        plot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnavailableError(
            "plots need matplotlib: pip install 'stoker[bench]', or run with --no-plots"
        ) from error
    return [
        _latency(plot, figures, folder, options),
        _slo(plot, figures, folder, options),
    ]


def _latency(
    plot: Any, figures: Sequence[ScenarioFigures], folder: Path, options: BenchOptions
) -> str:
    """p99 in short slices over time, one panel a scenario, the main methods only."""
    columns = min(2, len(figures))
    rows = -(-len(figures) // columns)
    canvas, axes = plot.subplots(
        rows,
        columns,
        figsize=(6.2 * columns, 3.2 * rows + 0.9),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    lines: dict[str, Any] = {}
    for axis, figure in zip(axes.flat, figures, strict=False):
        lines |= _panel(axis, figure, options)
    for axis in axes[:, 0]:
        axis.set_ylabel("p99 latency, ms (log)")
    for column in range(columns):
        last = axes[(len(figures) - 1 - column) // columns][column]
        last.set_xlabel("seconds since process start")
        last.tick_params(labelbottom=True)
    canvas.suptitle(
        "Latency of a replica that starts cold, counted from when each request was due\n"
        "a line begins when the replica takes traffic"
    )
    spare = axes.flat[len(figures) :]
    for axis in spare:
        axis.axis("off")
    if len(spare):
        spare[0].legend(lines.values(), lines.keys(), loc="center", fontsize=12, frameon=False)
    else:
        canvas.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines),
            frameon=False,
        )  # fmt: skip
    return _saved(plot, canvas, folder / "coldstart-latency.png")


def _panel(axis: Any, figure: ScenarioFigures, options: BenchOptions) -> dict[str, Any]:
    edges = np.linspace(0.0, options.seconds, _BIN_COUNT + 1)
    bins = np.clip(np.searchsorted(edges, figure.arrivals_s, "right") - 1, 0, _BIN_COUNT - 1)
    lines = {}
    for method in _LINES:
        row = figure.row(method)
        if row is None:
            continue
        latency = figure.latency_ms[method]
        (line,) = axis.plot(
            (edges[:-1] + edges[1:]) / 2 + row.begins_s.median,
            [p99(latency[bins == number]) for number in range(_BIN_COUNT)],
            _LINES[method],
            color=_COLOURS.get(method, "#333333"),
            linewidth=2.4 if method == "stoker" else 1.4,
            zorder=3 if method == "stoker" else 2,
        )
        lines[METHOD_LABELS[method]] = line
    limit = figure.slo_ms
    axis.axhline(limit, color="#333333", linewidth=0.9, linestyle="--", zorder=1)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlim(0, options.seconds)
    title = f"{figure.name}  (dashed: SLO, {limit:.2f} ms)"
    axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axis.grid(alpha=0.25)
    return lines


def _slo(plot: Any, figures: Sequence[ScenarioFigures], folder: Path, options: BenchOptions) -> str:
    """Bars of time-to-SLO, one panel a scenario, with what had been read by then."""
    shown = [m for m in reversed(METHODS) if any(figure.row(m) for figure in figures)]
    columns = min(3, len(figures))
    rows = -(-len(figures) // columns)
    canvas, axes = plot.subplots(
        rows,
        columns,
        figsize=(2.2 + 3.2 * columns, 0.6 + (1.0 + 0.42 * len(shown)) * rows),
        sharey=True,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    reached = [row.slo_s for figure in figures for row in figure.rows if row.slo_s is not None]
    widest = max([*reached, 0.1])
    for axis, figure in zip(axes.flat, figures, strict=False):
        for place, method in enumerate(shown):
            row = figure.row(method)
            if row is None:
                axis.text(widest * 0.03, place, "not measured", va="center", fontsize=9)
                continue
            _bar(axis, place, row, widest)
        axis.set_title(figure.name, loc="left", fontweight="bold")
        axis.set_xlim(0, widest * 1.45)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
    for axis in axes.flat[len(figures) :]:
        axis.axis("off")
    for column in range(columns):
        last = axes[(len(figures) - 1 - column) // columns][column]
        last.set_xlabel("s since process start")
        last.tick_params(labelbottom=True)
    axes[0][0].set_yticks(range(len(shown)), [METHOD_LABELS[method] for method in shown])
    canvas.suptitle(f"Time until p99 stays within {SLO_FACTOR} × steady, and MiB read by then")
    return _saved(plot, canvas, folder / "coldstart-slo.png")


def _bar(axis: Any, place: int, row: MethodRow, widest: float) -> None:
    if row.slo_s is None:
        axis.barh(place, widest * 1.45, color="none", edgecolor=_REST, hatch="////", linewidth=0)
        axis.text(
            widest * 0.05,
            place,
            "not within the run",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
        return
    axis.barh(place, row.slo_s, color=_COLOURS.get(row.method, _REST))
    text = f" {row.slo_s:.2f} s"
    if row.slo_bytes is not None and row.slo_bytes >= 0:
        text += f", {row.slo_bytes / _MIB:.0f} MiB"
    axis.text(row.slo_s, place, text, va="center", fontsize=9)


def _saved(plot: Any, canvas: Any, path: Path) -> str:
    canvas.savefig(path, dpi=130)
    plot.close(canvas)
    return path.name
