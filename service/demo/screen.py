"""What the demo shows while it works: numbered steps, progress bars, tables.

On a terminal bars move; in a log each step is one line. With ``--json`` all of it goes to standard
error, so that standard output holds the one JSON object.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int], None]


class Screen:
    """Writes to one rich console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._step = 0
        self._started = time.monotonic()

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Print a numbered heading, and how long the block took after it."""
        self._step += 1
        start = time.monotonic()
        self.console.print(f"[bold]{self._step}. {title}[/bold]", highlight=False)
        yield
        took = time.monotonic() - start
        self.console.print(f"      [dim]{took:.1f} s[/dim]", highlight=False)

    def say(self, text: str) -> None:
        """Print one plain line under the current step."""
        self.console.print(f"      {text}", highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, what: str) -> Iterator[Report]:
        """Give a function that takes (done, total) and moves a bar."""
        columns = (
            TextColumn("      {task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=None)

            def report(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            yield report

    @contextlib.contextmanager
    def named_bar(self) -> Iterator[Callable[[str, int, int], None]]:
        """Give a function that takes (what, done, total), as builds report."""
        columns = (
            TextColumn("      {task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("", total=None)

            def report(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            yield report

    def elapsed_s(self) -> float:
        """Return the seconds since this screen was made."""
        return time.monotonic() - self._started
