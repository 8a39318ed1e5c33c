"""Progress bars on standard error for work that reports (what, done, total)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Report = Callable[[str, int, int], None]


@contextlib.contextmanager
def step_bars(*, quiet: bool) -> Iterator[Report]:
    """Show one bar per kind of step while the block runs; nothing where nobody watches.

    Args:
        quiet: Show nothing, as when JSON is asked for.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    off = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
