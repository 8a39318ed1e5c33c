"""A hard memory limit for a measured process, by a control group (v1 or v2).

The limit holds for everything that the process touches first: its own memory and the operating
system's cache of the files that it reads. An engine that maps its files has no other bound.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_REMOVE_TRIES = 100


class MemoryGroup:
    """A control group with a limit; `procs_path` is joined by writing a process id to it."""

    def __init__(self, group: Path, limit_bytes: int) -> None:
        self.group = group
        self.limit_bytes = limit_bytes

    @property
    def procs_path(self) -> Path:
        """The file to join by."""
        return self.group / "cgroup.procs"

    def peak_bytes(self) -> int:
        """Most that was charged at once, page cache included; -1 where unknown."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError, ValueError):
                return int((self.group / name).read_text())
        return -1


@contextlib.contextmanager
def memory_limit(limit_bytes: int, root: Path = ROOT) -> Iterator[MemoryGroup | str]:
    """Make a group with a limit, remove it afterwards; yields the reason where there is none."""
    if (root / "memory" / "memory.limit_in_bytes").exists():
        parent, setting = root / "memory", "memory.limit_in_bytes"
    elif (root / "cgroup.controllers").exists():
        parent, setting = root, "memory.max"
    else:
        yield f"no memory control group under {root}"
        return
    group = parent / f"stoker-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / setting).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield f"no memory limit could be set: {error.strerror or error}"
        return
    try:
        yield MemoryGroup(group, limit_bytes)
    finally:
        for _ in range(_REMOVE_TRIES):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.02)  # its last process is still leaving: the kernel tells nobody when
        else:
            print(f"control group {group} could not be removed", file=sys.stderr)
