"""A slower disk than the machine has, by the kernel's block-I/O throttle (cgroup v1 or v2).

Cold starts hurt on network volumes of a few thousand reads a second, and few laptops have one. For
the length of a measurement a control group is made with limits on one device, the measured process
joins it, and the group is removed again. Needs root and a writable cgroup file system; where that
is not given, the reason is said and nothing is changed.

The throttle lets a short burst through and then makes reads wait; it adds no latency to a read by
itself, as a real network volume does (0.5 ms and more). It is the kinder of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from types import TracebackType

from stoker.errors import UnavailableError

_GROUP_PREFIX = "stoker-cold-"
_REMOVE_TRIES = 50
_REMOVE_WAIT_S = 0.02


@dataclasses.dataclass(frozen=True)
class Volume:
    """A disk to measure on: its label, and limits where it is slower than the machine's.

    Attributes:
        iops: Reads a second; 0 means as fast as the machine's disk.
        bytes_s: Bytes a second; 0 likewise.
    """

    name: str
    label: str
    iops: int = 0
    bytes_s: int = 0

    @property
    def throttled(self) -> bool:
        """Whether the kernel has to hold reads back."""
        return bool(self.iops or self.bytes_s)


OWN_DISK = Volume("own", "this machine's own disk")
CLOUD_VOLUME = Volume(
    "cloud", "a cloud volume of 3,000 IOPS and 125 MB/s", iops=3_000, bytes_s=125_000_000
)


class Throttle:
    """A control group that limits reads from the device under one path; a context manager.

    Inside, `procs_path` is the file that a process writes its own id to, before it reads.

    Raises (on entry):
        UnavailableError: why this machine does not allow it; nothing has been changed.
    """

    def __init__(self, path: Path, volume: Volume, *, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._path = path
        self._volume = volume
        self._root = root
        self._group: Path | None = None
        self._io_enabled = False

    @property
    def procs_path(self) -> Path:
        """The file to join by."""
        assert self._group is not None, "used outside of its with block"
        return self._group / "cgroup.procs"

    def __enter__(self) -> Throttle:
        device = block_device(self._path)
        try:
            if (self._root / "blkio" / "blkio.throttle.read_iops_device").exists():
                self._enter_v1(self._root / "blkio", device)
            elif (self._root / "cgroup.controllers").exists():
                self._enter_v2(self._root, device)
            else:
                raise UnavailableError(f"no block-I/O control group under {self._root}")
        except OSError as error:
            self._leave()
            raise UnavailableError(
                f"the block-I/O throttle cannot be set: {error.strerror or error}"
                f" ({error.filename or self._root})"
            ) from error
        except UnavailableError:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _enter_v1(self, parent: Path, device: str) -> None:
        group = self._make(parent)
        if self._volume.iops:
            _write(group / "blkio.throttle.read_iops_device", f"{device} {self._volume.iops}")
        if self._volume.bytes_s:
            _write(group / "blkio.throttle.read_bps_device", f"{device} {self._volume.bytes_s}")

    def _enter_v2(self, parent: Path, device: str) -> None:
        if "io" not in (parent / "cgroup.controllers").read_text().split():
            raise UnavailableError("the cgroup v2 hierarchy has no io controller")
        if "io" not in (parent / "cgroup.subtree_control").read_text().split():
            _write(parent / "cgroup.subtree_control", "+io")
            self._io_enabled = True
        group = self._make(parent)
        limits = ""
        if self._volume.iops:
            limits += f" riops={self._volume.iops}"
        if self._volume.bytes_s:
            limits += f" rbps={self._volume.bytes_s}"
        _write(group / "io.max", device + limits)

    def _make(self, parent: Path) -> Path:
        for stale in parent.glob(f"{_GROUP_PREFIX}*"):
            owner = stale.name.removeprefix(_GROUP_PREFIX).split("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                _remove(stale)  # left by a run that was killed
        group = parent / f"{_GROUP_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        group.mkdir()
        self._group = group
        return group

    def _leave(self) -> None:
        if self._group is not None:
            _remove(self._group)
            self._group = None
        if self._io_enabled:
            self._io_enabled = False
            with contextlib.suppress(OSError):  # another group may use it by now
                _write(self._root / "cgroup.subtree_control", "-io")


def block_device(path: Path) -> str:
    """Return ``major:minor`` of the whole disk that holds ``path``.

    Raises:
        UnavailableError: the file system has no single block device (overlay, tmpfs, network).
    """
    number = os.stat(path).st_dev
    major, minor = os.major(number), os.minor(number)
    link = Path("/sys/dev/block", f"{major}:{minor}")
    if major == 0 or not link.exists():
        raise UnavailableError(
            f"the file system under {path} has no block device of its own to throttle"
        )
    place = link.resolve()
    if (place / "partition").exists():
        return (place.parent / "dev").read_text().strip()
    return f"{major}:{minor}"


def _write(path: Path, text: str) -> None:
    # One write call: these are kernel files, where each write is one command.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _remove(group: Path) -> None:
    """Remove a group; a process that has just ended may keep it busy for a moment."""
    for _ in range(_REMOVE_TRIES):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_REMOVE_WAIT_S)
