"""The machine under the engine benchmark: what it is, and how fast its device reads."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from stoker.errors import UnavailableError
from stoker.service.coldstart.throttle import block_device

_RANDOM_BYTES: Final = 4_096
_RANDOM_READS: Final = 3_000
_STREAM_BYTES: Final = 1 << 20
_STREAM_READS: Final = 256
_PROBE_S: Final = 3.0
_MEMORY_BYTES: Final = 256 << 20
PACKAGES: Final = (
    "stoker",
    "hnswlib",
    "faiss-cpu",
    "usearch",
    "pyglass-portable",
    "lancedb",
    "numpy",
)


def machine() -> dict[str, Any]:
    """What figures depend on."""
    import stoker.kernels._core as _core

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "simd": _core.simd_name(),
        "load_at_start": os.getloadavg()[0],
    }


def versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of what is compared; a package that is not there is left out."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def probe_device(file: Path) -> dict[str, Any]:
    """Measure reads past the operating system's cache: one by one at random, then in sequence.

    And how fast new memory comes, which what is read has to go to.

    The random ones are read twice: where the second time is much faster, something below the
    operating system (the host of a virtual machine, the device's own memory) has a cache, and
    nothing that is measured here is colder than that.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(descriptor).st_size
        rng = np.random.default_rng()  # the same places every time would find them cached below
        places = rng.integers(0, max(1, size // _RANDOM_BYTES - 1), _RANDOM_READS) * _RANDOM_BYTES
        first = _read_at(descriptor, places.tolist(), _RANDOM_BYTES)
        again = _read_at(descriptor, places[: len(first)].tolist(), _RANDOM_BYTES)
        start = int(rng.integers(0, max(1, size // _STREAM_BYTES - _STREAM_READS)))
        steps = [
            (start + n) * _STREAM_BYTES
            for n in range(_STREAM_READS)
            if (start + n + 1) * _STREAM_BYTES <= size
        ]
        began = time.perf_counter()
        streamed = len(_read_at(descriptor, steps, _STREAM_BYTES)) * _STREAM_BYTES
        seconds = time.perf_counter() - began
    except OSError as error:
        return {"error": f"no direct reads here: {error}"}
    finally:
        os.close(descriptor)
    milliseconds = np.array(first) * 1e3
    return {
        "random_4k_p50_ms": float(np.percentile(milliseconds, 50)),
        "random_4k_p99_ms": float(np.percentile(milliseconds, 99)),
        "random_4k_iops": len(first) / float(np.sum(first)),
        "random_4k_again_p50_ms": float(np.percentile(np.array(again) * 1e3, 50)),
        "sequential_mb_s": streamed / 1e6 / seconds if streamed else 0.0,
        "new_memory_mb_s": _new_memory(),
    }


def _new_memory() -> float:
    """MB/s at which a process gets memory that it never had, in large pages where it may.

    What is loaded needs such memory. Where a virtual machine hands its free memory back, the host
    gives it again more slowly than a fast device reads.
    """
    with mmap.mmap(-1, _MEMORY_BYTES) as memory:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = np.frombuffer(memory, np.uint8)
        began = time.perf_counter()
        view[:: mmap.PAGESIZE] = 1
        seconds = time.perf_counter() - began
        del view  # the map cannot be closed while it is looked at
    return _MEMORY_BYTES / 1e6 / seconds


def _read_at(descriptor: int, places: list[int], length: int) -> list[float]:
    taken = []
    with mmap.mmap(-1, length) as buffer:  # page-aligned, as direct reads want it
        began = time.perf_counter()
        for place in places:
            start = time.perf_counter()
            os.preadv(descriptor, [buffer], place)
            now = time.perf_counter()
            taken.append(now - start)
            if now - began > _PROBE_S:
                break
    return taken


@contextlib.contextmanager
def read_ahead(path: Path, kilobytes: int) -> Iterator[str]:
    """Set the device's read-ahead to the usual value, put it back afterwards; yields what was."""
    try:
        setting = Path("/sys/dev/block") / block_device(path) / "queue" / "read_ahead_kb"
        before = setting.read_text()
        setting.write_text(str(kilobytes))
    except (OSError, UnavailableError) as error:
        yield f"left as it is: {error}"
        return
    try:
        yield f"{kilobytes} KiB for the cold and the budget part (was {before.strip()})"
    finally:
        setting.write_text(before)
