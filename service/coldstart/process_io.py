"""How much the kernel has read from devices for this process."""

from __future__ import annotations

from pathlib import Path

_PROC_IO = Path("/proc/self/io")


def device_bytes() -> int:
    """Return the bytes read from devices for this process so far, or -1 where nobody says."""
    try:
        text = _PROC_IO.read_text(encoding="utf-8")
    except OSError:
        return -1
    for line in text.splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return -1


def ids_bytes(index_path: Path) -> int:
    """Return the size of an index's tables of ids, which a warm-up reads beside its pages."""
    return sum(path.stat().st_size for path in index_path.rglob("ids.stk"))
