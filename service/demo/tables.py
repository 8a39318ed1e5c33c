"""The demo's tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from stoker.service.coldstart.summary import Check, ModeRow, Spread

_MIB = float(1 << 20)


def print_rows(console: Console, rows: Sequence[ModeRow]) -> None:
    """Print one volume's modes side by side; medians, with the spread under them."""
    first = rows[0]
    table = Table(
        title=f"On {first.volume.label}: medians of {first.repeats} cold starts each"
        + (" (lowest–highest)" if first.repeats > 1 else "")
        + f"; the first {first.queries} queries after ready",
        title_justify="left",
        caption=None if all(row.cold for row in rows) else "NOT fully cold: see above",
    )
    table.add_column("")
    for row in rows:
        table.add_column(row.label, justify="right")
    lines: tuple[tuple[str, Callable[[ModeRow], str]], ...] = (
        ("first answer, s", lambda row: _shown(row.first_answer_s, 3)),
        ("ready, s", lambda row: _shown(row.ready_s, 3)),
        ("p50, ms", lambda row: f"{row.p50_ms:.2f}"),
        ("p99, ms", lambda row: f"{row.p99_ms:.2f}"),
        ("p99 of single cold starts, ms", lambda row: _shown(row.p99_runs_ms, 2)),
        (
            "read before ready, MiB",
            lambda row: f"{row.ready_bytes.median / _MIB:.1f} ({row.ready_ratio:.0%})",
        ),
        ("read in all, MiB", lambda row: f"{row.total_bytes.median / _MIB:.1f}"),
        ("page reads per query", lambda row: f"{row.pages_per_query.median:.2f}"),
        ("recall@10 against exact", lambda row: f"{row.recall.median:.4f}"),
        ("first answer's completeness", lambda row: f"{row.first_completeness.median:.2f}"),
    )
    for name, cell in lines:
        table.add_row(name, *(cell(row) for row in rows))
    console.print(table)


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print each promise with what was measured."""
    if not checks:
        return
    table = Table(title="What is promised, and what was measured", title_justify="left")
    table.add_column("promise")
    table.add_column("on")
    table.add_column("measured")
    table.add_column("")
    for check in checks:
        word = "[green]held[/green]" if check.held else "[red]missed[/red]"
        table.add_row(check.name, check.volume, check.text, word)
    console.print(table)


def _shown(spread: Spread, digits: int) -> str:
    text = f"{spread.median:.{digits}f}"
    if spread.low != spread.high:
        text += f" ({spread.low:.{digits}f}–{spread.high:.{digits}f})"
    return text
