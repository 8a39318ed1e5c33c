"""Replacing a small file as a whole: the old content or the new one, whatever happens between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from stoker.index.generation import file_identity

# Folders that this process has locked: the lock's file, and what tells it from all others.
_HELD: dict[Path, tuple[Path, tuple[int, int]]] = {}


def hold(folder: Path, lock_path: Path, descriptor: int) -> None:
    """Let nothing be written to a folder of this name any more but to the one that is locked.

    Whoever puts another index, and its state, into the place of one that is served would else find
    that server's heat and offsets in it, which belong to another event log.

    Args:
        folder: The folder.
        lock_path: The lock's file in it.
        descriptor: That file, open, and locked by this process.
    """
    found = os.fstat(descriptor)
    _HELD[folder.absolute()] = lock_path, (found.st_dev, found.st_ino)


def let_go(folder: Path) -> None:
    """Forget what `hold` was told, before the lock is given up."""
    _HELD.pop(folder.absolute(), None)


def replace_file(path: Path, *parts: bytes) -> None:
    """Give a file new content; durable when this returns.

    Written beside it, synced, renamed over it, and the folder synced. The name beside it is always
    the same, so that a writer that was killed leaves one such file at most, which the next one
    overwrites; whoever writes must therefore be alone, by the lock on its folder or otherwise.

    Args:
        path: The file; its folder must be there.
        parts: The content, one behind the other.

    Raises:
        OSError: it could not be written; the old content is still there. ESTALE: this process
            holds a folder of this name (`hold`), and another one lies there now.
    """
    _check_held(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_held(path: Path) -> None:
    """Return if nothing else lies where the folder was that this process holds."""
    held = _HELD.get(path.parent.absolute())
    if held is not None and file_identity(held[0]) != held[1]:
        raise OSError(
            errno.ESTALE, "not the folder that this process has locked; was it replaced?", str(path)
        )
