"""Folders that a process fills under a lock: what it leaves when it is killed can be told by that.

As long as the process lives the lock is held; the system gives it up with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path


def lock_folder(folder: Path) -> int:
    """Open a folder and lock it for as long as the descriptor that is returned stays open.

    Raises:
        OSError: it cannot be opened, or another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(parent: Path, pattern: str) -> None:
    """Remove folders in ``parent``, by a pattern of `Path.glob`, that no process has locked."""
    for left in parent.glob(pattern):
        with contextlib.suppress(OSError):  # its process is at work, or it is not ours
            held = lock_folder(left)
            try:
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)
