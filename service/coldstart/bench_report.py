"""The benchmark's results as data, as Markdown and as what is said on the screen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.service.coldstart.bench_options import SCENARIO_TEXTS, BenchOptions
from stoker.service.coldstart.slo import WINDOW_REPORTED_S, MethodRow, ScenarioFigures
from stoker.service.coldstart.summary import Check, Spread

_MIB = float(1 << 20)


def to_document(
    figures: Sequence[ScenarioFigures],
    checks: Sequence[Check],
    *,
    facts: Mapping[str, str],
    left_out: Mapping[str, str],
    index_bytes: int,
    options: BenchOptions,
) -> dict[str, Any]:
    """Return everything as plain data for JSON; what is not a number becomes null."""
    settings = {
        name: str(value) if name.endswith(("path", "out")) else value
        for name, value in dataclasses.asdict(options).items()
    }
    return {
        "facts": dict(facts),
        "options": settings,
        "index_bytes": index_bytes,
        "left_out": dict(left_out),
        "scenarios": [
            {
                "name": figure.name,
                "text": SCENARIO_TEXTS[figure.name],
                "steady_p99_ms": figure.steady_p99_ms,
                "slo_ms": figure.slo_ms,
                "steady_of": figure.steady_of,
                "methods": [
                    _plain({**dataclasses.asdict(row), "label": row.label}) for row in figure.rows
                ],
            }
            for figure in figures
        ],
        "goals": [dataclasses.asdict(check) for check in checks],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def markdown(
    figures: Sequence[ScenarioFigures],
    checks: Sequence[Check],
    *,
    facts: Mapping[str, str],
    left_out: Mapping[str, str],
    index_bytes: int,
    options: BenchOptions,
    plots: Sequence[str] = (),
) -> str:
    """Return the report as Markdown, the goals first."""
    out = ["# Cold starts under open-loop load", ""]
    out += [
        f"* {'held' if check.held else '**not held**'}: {check.volume}: {check.name}: {check.text}"
        for check in checks
    ]
    for figure in figures:
        out += ["", *_scenario(figure, options, index_bytes)]
    out += ["", *(f"![{name}]({name})" for name in plots)]
    out += ["", "## How it was measured", ""]
    out += [f"* {name}: {text}" for name, text in facts.items()]
    out += [f"* left out: {name}: {text}" for name, text in left_out.items()]
    out += [f"* {note}" for note in notes(options)]
    return "\n".join(out) + "\n"


def _scenario(figure: ScenarioFigures, options: BenchOptions, index_bytes: int) -> list[str]:
    del options
    heads = (
        *("what is loaded", "first answer, s", "ready, s"),
        *("p99 after ready, ms", "in single starts, ms", "while loading, ms"),
        *(
            "time to SLO, s",
            "read until then, MiB",
            "loaded, MiB",
            "queries that read",
            "recall@10",
        ),
    )
    out = [
        f"## {figure.name}: {SCENARIO_TEXTS[figure.name]}",
        "",
        f"Steady p99 {figure.steady_p99_ms:.2f} ms; SLO of a window {figure.slo_ms:.2f} ms;"
        f" index {index_bytes / _MIB:.1f} MiB.",
        "",
        "| " + " | ".join(heads) + " |",
        "| --- |" + " ---: |" * (len(heads) - 1),
    ]
    out += ["| " + " | ".join(_cells(row)) + " |" for row in figure.rows]
    ours = figure.row("stoker")
    if ours is not None and ours.predicted_hit_ratio is not None:
        out += [
            "",
            f"Stoker's receipt predicted a hit ratio of {ours.predicted_hit_ratio:.3f}; the pages"
            f" that it warmed served {_share(ours.served_ratio)} of the accesses after it.",
        ]
    out += ["", f"p99 by windows of {WINDOW_REPORTED_S:g} s since the traffic began, ms:", ""]
    count = max((len(row.windows_ms) for row in figure.rows), default=0)
    names = [f"{number * WINDOW_REPORTED_S:g} s" for number in range(count)]
    out += ["| | " + " | ".join(names) + " |", "| --- |" + " ---: |" * count]
    out += [
        f"| {row.label} | " + " | ".join(f"{value:.2f}" for value in row.windows_ms) + " |"
        for row in figure.rows
    ]
    return out


def _share(ratio: float | None) -> str:
    return "an unknown share (nothing followed)" if ratio is None else f"{ratio:.3f}"


def _cells(row: MethodRow) -> list[str]:
    slo_bytes = "-" if row.slo_bytes is None or row.slo_bytes < 0 else f"{row.slo_bytes / _MIB:.1f}"
    return [
        row.label,
        _range(row.first_answer_s, 2),
        _range(row.ready_s, 2),
        f"{row.first_p99_ms:,.2f}",
        _range(row.first_p99_runs_ms, 2),
        "-" if row.loading_p99_ms is None else f"{row.loading_p99_ms:,.2f}",
        _slo(row),
        slo_bytes,
        f"{row.load_bytes.median / _MIB:.1f}",
        f"{row.reading_ratio.median:.1%}",
        f"{row.recall.median:.3f}",
    ]


def _slo(row: MethodRow) -> str:
    text = "never" if row.slo_s is None else f"{row.slo_s:.2f}"
    runs = [run for run in row.slo_runs_s if run is not None]
    never = len(row.slo_runs_s) - len(runs)
    if len(row.slo_runs_s) < 2:
        return text
    span = f"{min(runs):.2f}–{max(runs):.2f}" if runs else ""
    missed = f"{never} never" if never else ""
    return f"{text} ({', '.join(part for part in (span, missed) if part)})"


def _range(spread: Spread, digits: int) -> str:
    text = f"{spread.median:,.{digits}f}"
    low, high = f"{spread.low:,.{digits}f}", f"{spread.high:,.{digits}f}"
    return text if low == high else f"{text} ({low}–{high})"


def notes(options: BenchOptions) -> list[str]:
    """Say what a reader must know to judge the figures."""
    return [
        "Each figure is of fresh processes; their clock starts before the interpreter does, and all"
        " import what a server does before the index is opened. The traffic begins when the replica"
        " is ready, as behind a balancer that asks /readyz: with nothing to load, as soon as it is"
        " open. In the last scenario it begins when the index is open, whatever is loaded then is"
        " loaded under it.",
        "Open loop: a request is due by schedule whatever became of the ones before, and its"
        " latency counts from then, so a queue behind slow ones shows.",
        f"p99 is over requests, of each one's median over the {options.repeats} starts; the plain"
        " p99 of single starts stands beside it, lowest and highest in brackets.",
        "Queries that read are the share, of those due after ready, that read any page from the"
        " device; it does not depend on how busy the machine is.",
        "Steady is the p99 of the replica that loaded everything, once it had. Time-to-SLO is the"
        f" first moment from which every window of {options.window_s:g} s holds, to the end, 1.5"
        " times the p99 of that replica's worst steady window.",
        f"All but nothing and everything may load {options.budget_ratio:.0%} of the bytes, by the"
        " same loader at a priority under demand; what requests read themselves comes on top for"
        " all alike.",
        "Sequential preload reads links and codes, then second codes and vectors, from the front."
        " The layout helps it: pages are sealed by kind, and hot rows first where heat was known.",
        "The last block list is what a pool of the budget's size held at the stop, in file order;"
        " most recent and W-TinyLFU's content come of the pages that each query before the stop"
        " needed, recorded one query at a time; the oracle's are those of the measured queries"
        " themselves, by how many need them. In scale-out these lists are handed to the new"
        " replica, which in practice has none. Scenarios that differ for Stoker alone share the"
        " starts of the others.",
        "Files were dropped from the operating system's cache before each start. A virtual"
        " machine's host may still hold them: its cache cannot be seen or dropped from inside.",
        "The slower disk is the kernel's throttle of reads and bytes a second; it adds no latency"
        " of its own, so a real network volume is harsher.",
    ]
