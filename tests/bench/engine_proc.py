"""What the kernel knows of a measured process: memory, reads, and who else was busy.

Needs nothing but the standard library: peers run in environments of their own.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def status_bytes(key: str) -> int:
    """A memory figure of this process by its name in /proc/self/status; 0 where there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def memory() -> dict[str, int]:
    """Resident memory now and at its peak.

    Not from getrusage: its peak is inherited from the process that started this one.
    """
    return {
        "rss_bytes": status_bytes("VmRSS"),
        "rss_anon_bytes": status_bytes("RssAnon"),
        "peak_rss_bytes": status_bytes("VmHWM"),
        "mapped_bytes": status_bytes("VmPeak"),
    }


def reads() -> dict[str, int]:
    """Bytes that the kernel fetched from devices for this process, and its major faults."""
    fields = dict(
        line.split(": ", 1) for line in Path("/proc/self/io").read_text().splitlines() if line
    )
    return {
        "read_bytes": int(fields["read_bytes"]),
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
    }


def group_reads(group: str) -> int:
    """Reads that a block-I/O control group has sent to devices; -1 where nobody counts them."""
    try:
        lines = Path(group, "blkio.throttle.io_serviced").read_text().splitlines()
        return sum(int(line.split()[2]) for line in lines if line.split()[1:2] == ["Read"])
    except (OSError, IndexError):
        pass
    try:
        lines = Path(group, "io.stat").read_text().splitlines()
    except OSError:
        return -1
    return sum(
        int(field.removeprefix("rios="))
        for line in lines
        for field in line.split()
        if field.startswith("rios=")
    )


class Busy:
    """How busy the rest of the machine was between two moments, in cores.

    A figure taken while others work is noise, and says so.
    """

    def __init__(self) -> None:
        self._began = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
        ticks = os.sysconf("SC_CLK_TCK")
        own = sum(os.times()[:4])  # ended children too: they are part of what is measured
        all_busy = (user + nice + system + irq + softirq) / ticks
        return time.monotonic(), all_busy, steal / ticks, own

    def since(self) -> dict[str, float]:
        """Cores that others used, and that the host withheld, since this was made."""
        now = self._read()
        wall = max(now[0] - self._began[0], 1e-9)
        others = (now[1] - self._began[1]) - (now[3] - self._began[3])
        return {
            "others_cores": max(0.0, others / wall),
            "stolen_cores": max(0.0, (now[2] - self._began[2]) / wall),
        }
