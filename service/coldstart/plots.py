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
    """p99 in short windows over time, one panel a scenario, the main methods only."""
    columns = min(2, len(figures))
    rows = -(-len(figures) // columns)
    canvas, axes = plot.subplots(
        rows, columns, figsize=(6.2 * columns, 3.5 * rows + 0.9), sharey=True, squeeze=False
    )
    for axis in axes.flat[len(figures) :]:
        axis.set_visible(False)
    for axis, figure in zip(axes.flat, figures, strict=False):
        edges = np.linspace(0.0, options.seconds, _BIN_COUNT + 1)
        bins = np.clip(np.searchsorted(edges, figure.arrivals_s, "right") - 1, 0, _BIN_COUNT - 1)
        centres = (edges[:-1] + edges[1:]) / 2
        for method in _LINES:
            if method not in figure.latency_ms:
                continue
            values = [
                p99(figure.latency_ms[method][bins == number]) for number in range(_BIN_COUNT)
            ]
            axis.plot(
                centres,
                values,
                _LINES[method],
                color=_COLOURS.get(method, "#333333"),
                linewidth=2.6 if method == "stoker" else 1.5,
                label=METHOD_LABELS[method],
                zorder=3 if method == "stoker" else 2,
            )
        limit = SLO_FACTOR * figure.steady_p99_ms
        axis.axhline(limit, color="#333333", linewidth=0.8, linestyle="--", zorder=1)
        axis.annotate(
            f"SLO {limit:.2g} ms",
            (options.seconds, limit),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        axis.set_yscale("log")
        axis.set_xlim(0, options.seconds)
        axis.set_title(figure.name, loc="left", fontweight="bold")
        axis.grid(alpha=0.25)
    for axis in axes[:, 0]:
        axis.set_ylabel("p99 latency, ms (log)")
    for axis in axes[-1]:
        axis.set_xlabel("seconds since the traffic began")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    canvas.suptitle("Latency after a cold start, counted from when a request was due", y=0.995)
    canvas.legend(
        handles, labels, loc="upper center", ncols=len(labels), bbox_to_anchor=(0.5, 0.965),
        frameon=False,
    )  # fmt: skip
    canvas.tight_layout(rect=(0, 0, 1, 0.93))
    return _saved(plot, canvas, folder / "coldstart-latency.png")


def _slo(plot: Any, figures: Sequence[ScenarioFigures], folder: Path, options: BenchOptions) -> str:
    """Bars of time-to-SLO, one panel a scenario, with what had been read by then."""
    shown = [m for m in reversed(METHODS) if any(figure.row(m) for figure in figures)]
    canvas, axes = plot.subplots(
        1,
        len(figures),
        figsize=(2.2 + 3.0 * len(figures), 1.6 + 0.42 * len(shown)),
        sharey=True,
        sharex=True,
        squeeze=False,
    )
    reached = [row.slo_s for figure in figures for row in figure.rows if row.slo_s is not None]
    widest = max([*reached, 0.1])
    for axis, figure in zip(axes[0], figures, strict=True):
        for place, method in enumerate(shown):
            row = figure.row(method)
            if row is None:
                axis.text(widest * 0.03, place, "not measured", va="center", fontsize=8)
                continue
            _bar(axis, place, row, widest)
        axis.set_title(figure.name, loc="left", fontweight="bold")
        axis.set_xlim(0, widest * 1.45)
        axis.grid(axis="x", alpha=0.25)
        axis.set_xlabel("s since process start")
        axis.set_axisbelow(True)
    axes[0][0].set_yticks(range(len(shown)), [METHOD_LABELS[method] for method in shown])
    canvas.suptitle(
        f"Time until p99 stays within {SLO_FACTOR} × steady, and MiB read by then", y=0.99
    )
    canvas.tight_layout(rect=(0, 0, 1, 0.97))
    return _saved(plot, canvas, folder / "coldstart-slo.png")


def _bar(axis: Any, place: int, row: MethodRow, widest: float) -> None:
    if row.slo_s is None:
        axis.barh(place, widest * 1.45, color="none", edgecolor=_REST, hatch="////", linewidth=0)
        axis.text(
            widest * 0.05,
            place,
            "not within the run",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
        return
    axis.barh(place, row.slo_s, color=_COLOURS.get(row.method, _REST))
    text = f" {row.slo_s:.2f} s"
    if row.slo_bytes is not None and row.slo_bytes >= 0:
        text += f", {row.slo_bytes / _MIB:.0f} MiB"
    axis.text(row.slo_s, place, text, va="center", fontsize=8)


def _saved(plot: Any, canvas: Any, path: Path) -> str:
    canvas.savefig(path, dpi=130)
    plot.close(canvas)
    return path.name
