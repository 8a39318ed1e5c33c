"""What a write that failed leaves behind in memory, and how to be rid of it at once."""

from __future__ import annotations

import traceback

__all__ = ["let_go"]


def let_go(error: BaseException) -> None:
    """Drop the local variables of the calls that ``error`` came out of.

    They hold maps of files that the failure has removed, and a removed file keeps its space on the
    disk while a map of it lives: as long as anybody keeps the error, or until the next garbage
    collection. A full disk would then refuse the second try too. Calls that are still running,
    the caller's own among them, keep their variables.
    """
    errors: list[BaseException] = []
    found: list[BaseException | None] = [error]
    while found:
        step = found.pop()
        if step is None or any(step is one for one in errors):
            continue
        errors.append(step)
        traceback.clear_frames(step.__traceback__)
        found += [step.__cause__, step.__context__]
