"""Named places where a crash test kills the process.

``STOKER_FAILPOINT=collection.before_current`` kills the process, as ``kill -9`` would, the first
time that it comes to that place; ``name:3`` the third time. Nothing is flushed, no handler runs.
Every step of writing that a crash could split has such a place; the tests in ``tests/fault`` walk
them all. Unset, a place costs one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Final

FAILPOINTS: Final = (
    "documents.before_commit",
    "documents.after_commit",
    "merge.before_build",
    "merge.before_filters",
    "merge.before_current",
    "generation.before_rename",
    "generation.after_rename",
    "merge.before_remove",
    "merge.before_purge",
)

_name, _, _times = os.environ.get("STOKER_FAILPOINT", "").partition(":")
_left = int(_times) if _times.isdecimal() else 1


def failpoint(name: str) -> None:
    """Die here at once if ``name`` is the place that STOKER_FAILPOINT names."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
