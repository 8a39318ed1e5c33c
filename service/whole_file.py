"""Replacing a small file as a whole: the old content or the new one, whatever happens between."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, *parts: bytes) -> None:
    """Give a file new content; durable when this returns.

    Written beside it, synced, renamed over it, and the folder synced. The name beside it is always
    the same, so that a writer that was killed leaves one such file at most, which the next one
    overwrites; whoever writes must therefore be alone, by the lock on its folder or otherwise.

    Args:
        path: The file; its folder must be there.
        parts: The content, one behind the other.

    Raises:
        OSError: it could not be written; the old content is still there.
    """
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
