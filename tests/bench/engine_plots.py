"""Plots of the engine benchmark's results; left out, with a word, where matplotlib is missing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from engine_figures import middle
from engine_run import say

# One color and marker an engine, in every plot.
_STYLES = {
    "stoker": ("#d1495b", "o"),
    "hnswlib": ("#2e4057", "s"),
    "faiss-hnsw": ("#00798c", "^"),
    "usearch-f32": ("#8d6a9f", "v"),
    "usearch-i8": ("#c39bd3", "<"),
    "pyglass": ("#edae49", "D"),
    "diskannpy": ("#5c9e31", "P"),
    "lancedb": ("#8c8c8c", "X"),
}


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Draw what there are results for."""
    try:
        import matplotlib
    except ImportError:
        say("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    made = []
    for name, part in (
        ("warm", _warm),
        ("cold", _cold),
        ("budget", _budget),
        ("growth", _growth),
    ):
        if results.get(name):
            figure = part(results)
            file = out / f"{name}.png"
            figure.savefig(file, dpi=110, bbox_inches="tight")
            made.append(file)
    return made


def _panels(count: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for one in axes[count:]:
        one.set_axis_off()
    axes = axes[:count]
    for one in axes:
        one.grid(True, which="major", color="#dddddd")
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _line(axes: Any, peer: str, x: Any, y: Any, **more: Any) -> None:
    color, marker = _STYLES[peer]
    width = 2.4 if peer == "stoker" else 1.4
    axes.plot(x, y, **{"color": color, "marker": marker, "label": peer, "linewidth": width, **more})


def _title(results: dict[str, Any]) -> str:
    c = results["corpus"]
    return f"{c['count']:,} x {c['dim']}"


def _warm(results: dict[str, Any]) -> Any:
    figure, (batch, single) = _panels(2, f"Everything resident, one thread, {_title(results)}")
    single.sharey(batch)
    for axes, column, name in ((batch, "batch", "batches"), (single, "single", "one by one")):
        for peer in results["peers"]:
            rows = results["warm"].get(f"{peer}/1", {}).get("rows", [])
            rows = [row for row in rows if column in row and row["recall"] >= 0.85]
            if rows:
                # A logarithmic axis of what is missing keeps 0.95 and 0.99 apart.
                missing = [max(1 - row["recall"], 1e-4) for row in rows]
                _line(axes, peer, missing, [np.median(row[column]) for row in rows], markersize=5)
        axes.set(xscale="log", yscale="log", title=name, xlabel="recall@10", ylabel="queries/s")
        ticks = [0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]
        axes.set_xticks(ticks, [f"{1 - tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.invert_xaxis()
        _plain_numbers(axes.yaxis)
    single.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    return figure


def _cold(results: dict[str, Any]) -> Any:
    from matplotlib.ticker import NullLocator

    runs = results["cold"]["runs"]
    volumes = list(dict.fromkeys(key.split("/")[2] for key in runs))
    figure, panels = _panels(
        len(volumes), f"Cold: the first queries after opening, {_title(results)}"
    )
    dashes = ("-", "--", ":", "-.")
    for axes, volume in zip(panels, volumes, strict=True):
        modes: dict[str, int] = {}
        for key, repeats in runs.items():
            peer, mode, where = key.split("/")
            whole = [run for run in repeats if "latency_ms" in run]
            if where != volume or not whole:
                continue
            latency = np.median([run["latency_ms"] for run in whole], axis=0)
            latency[0] = np.median([run["first_answer_ms"] for run in whole])
            style = dashes[modes.setdefault(peer, 0) % len(dashes)]
            modes[peer] += 1
            # The highest of each stretch: what a caller waits for, not a cloud of 200 points.
            edges = np.unique(np.geomspace(1, len(latency), 14).astype(int))
            worst = [latency[a - 1 : b].max() for a, b in itertools.pairwise(edges)]
            _line(
                axes,
                peer,
                edges[: len(worst)],
                worst,
                linestyle=style,
                markersize=4,
                label=f"{peer}, {mode}",
            )
        axes.set(
            xscale="log",
            yscale="log",
            title=f"disk: {volume}",
            xlabel="query number (1: opening included)",
            ylabel="ms, slowest of each stretch",
        )
        _plain_numbers(axes.yaxis)
        ticks = [1, 2, 5, 10, 20, 50, 100, 200]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    return figure


def _budget(results: dict[str, Any]) -> Any:
    runs = results["budget"]["runs"]
    keys = [key.split("/") for key in runs]
    panels = list(dict.fromkeys((k[1], k[2], k[4]) for k in keys))
    figure, axes_of = _panels(
        len(panels), f"Under a budget: one thread, one query after the other, {_title(results)}"
    )
    for axes, (stream, target, volume) in zip(axes_of, panels, strict=True):
        base = middle(runs.get(f"stoker/{stream}/{target}/1.0/{volume}", []), "qps")
        if base:
            axes.axhline(base, color=_STYLES["stoker"][0], linestyle=":", linewidth=1.2)
            axes.annotate(
                "stoker, all resident",
                (0.02, base),
                xycoords=("axes fraction", "data"),
                va="bottom",
                fontsize=8,
                color=_STYLES["stoker"][0],
            )
        for peer in dict.fromkeys(k[0] for k in keys):
            points = []
            for k in keys:
                if (k[0], k[1], k[2], k[4]) != (peer, stream, target, volume) or k[3] == "1.0":
                    continue
                speed = middle(runs["/".join(k)], "qps")
                if speed:
                    points.append((100 * float(k[3]), speed))
            if points:
                x, y = zip(*sorted(points), strict=True)
                _line(axes, peer, x, y, markersize=6)
        shares = sorted({100 * float(k[3]) for k in keys if k[3] != "1.0"})
        axes.set(
            yscale="log",
            title=f"{stream}, recall {target}, disk: {volume}",
            xlabel="budget, % of the index's bytes",
            ylabel="queries/s",
        )
        axes.set_xticks(shares, [f"{share:g}" for share in shares])
        _plain_numbers(axes.yaxis)
    # Not every engine reaches every target, so the names come from all panels.
    named: dict[str, Any] = {}
    for axes in axes_of:
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, line)
    axes_of[min(1, len(axes_of) - 1)].legend(
        named.values(), named.keys(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9
    )
    return figure


def _growth(results: dict[str, Any]) -> Any:
    rows = [row for row in results["growth"]["rows"] if row.get("us_0.95")]
    dims = sorted({row["dim"] for row in rows}, reverse=True) or [0]
    figure, panels = _panels(len(dims), "Growth: everything resident, recall@10 0.95, one by one")
    for axes, dim in zip(panels, dims, strict=True):
        for peer in dict.fromkeys(row["peer"] for row in rows):
            points = sorted(
                (row["count"], row["us_0.95"])
                for row in rows
                if row["dim"] == dim and row["peer"] == peer
            )
            if points:
                x, y = zip(*points, strict=True)
                _line(axes, peer, x, y, markersize=6)
        counts = sorted({row["count"] for row in rows if row["dim"] == dim})
        axes.set(xscale="log", title=f"{dim} dimensions", xlabel="vectors", ylabel="us a query")
        axes.set_xticks(counts, [_short(count) for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", fontsize=9)
    return figure


def _short(count: int) -> str:
    return f"{count / 1e6:g}M" if count >= 1_000_000 else f"{count / 1e3:g}k"


def _plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogFormatter

    # Between powers of ten too, but only where the axis spans so little that these stand alone.
    sparse = LogFormatter(labelOnlyBase=False, minor_thresholds=(1.0, 0.4))

    def minor(value: float, place: int | None) -> str:
        sparse.set_axis(axis)
        sparse.set_locs(axis.get_minorticklocs())
        return f"{value:,g}" if sparse(value, place) else ""

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(FuncFormatter(minor))
