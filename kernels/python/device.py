"""One code path for GPU and CPU: where tensors live, and how bytes get there and back.

CPU builds of torch raise on pinned memory, streams and events. This facade gives both the same
words, so that everything above it runs in tests exactly as it runs on a GPU, only in order
instead of overlapped. torch is imported on first use: it is heavy and optional.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from stoker.errors import ConfigError, UnavailableError


class DeviceUnavailable(UnavailableError):
    """torch or the asked-for CUDA device is not there; choose ``cpu`` or install the extra."""


def import_torch() -> Any:
    """Import torch, or say which extra brings it."""
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailable(
            "expected the package torch, found none: install stoker[models]"
        ) from error
    return torch


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A submitted copy. ``wait`` blocks the host; a channel can wait without blocking it."""

    event: Any  # torch.cuda.Event, or None where the copy is already done

    def done(self) -> bool:
        """Return whether the copy has finished, without waiting."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Block until the copy has finished."""
        if self.event is not None:
            self.event.synchronize()


class CopyChannel:
    """Copies in one direction, in order among themselves and beside everything else.

    On CUDA a stream of its own; on the CPU each copy is done when `submit` returns.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.torch.cuda.Stream(device.torch_device) if device.is_cuda else None

    def submit(self, target: Any, source: Any) -> Ticket:
        """Start copying ``source`` into ``target``: tensors of equal shape and dtype.

        The host end must be a `Device.host_buffer`, or the copy is not asynchronous. Neither may
        be reused before the ticket is done.
        """
        if self._stream is None:
            target.copy_(source)
            return Ticket(None)
        torch = self._device.torch
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Ticket(event)

    def wait_for(self, ticket: Ticket) -> None:
        """Start no later copy before ``ticket`` is done; the host goes on."""
        if self._stream is not None and ticket.event is not None:
            self._stream.wait_event(ticket.event)


class Device:
    """A place for tensors: ``cpu`` or one CUDA device.

    Args:
        name: ``auto`` (CUDA where there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: another name.
        DeviceUnavailable: torch is missing, or that CUDA device is.
    """

    def __init__(self, name: str = "auto") -> None:
        self.torch = import_torch()
        if name == "auto":
            name = "cuda" if self.torch.cuda.is_available() else "cpu"
        if name != "cpu" and name != "cuda" and not name.startswith("cuda:"):
            raise ConfigError(f"device: expected auto, cpu or cuda:N, found {name!r}")
        self.is_cuda = name != "cpu"
        if self.is_cuda:
            self._require_cuda(name)
        self.name = name
        self.torch_device = self.torch.device(name)

    def _require_cuda(self, name: str) -> None:
        _, _, number = name.partition(":")
        if number and not number.isdecimal():
            raise ConfigError(f"device: expected cuda:N with a number, found {name!r}")
        count = self.torch.cuda.device_count() if self.torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise DeviceUnavailable(f"expected {name}, found {count} CUDA devices")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an uninitialised tensor on the device."""
        return self.torch.empty(shape, dtype=dtype, device=self.torch_device)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Any:
        """Allocate a tensor on the device with one value everywhere."""
        return self.torch.full(shape, value, dtype=dtype, device=self.torch_device)

    def host_buffer(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate host memory that copies to and from the device can overlap with."""
        if self.is_cuda:
            return self.torch.empty(shape, dtype=dtype, pin_memory=True)
        return self.torch.empty(shape, dtype=dtype)

    def channel(self) -> CopyChannel:
        """Open a copy channel; one each way is what the hardware has engines for."""
        return CopyChannel(self)

    def compute_waits_for(self, ticket: Ticket) -> None:
        """Start no later kernel on the current stream before ``ticket`` is done."""
        if self.is_cuda and ticket.event is not None:
            self.torch.cuda.current_stream(self.torch_device).wait_event(ticket.event)

    def compute_mark(self) -> Ticket:
        """Return a ticket that is done when all kernels submitted so far are."""
        if not self.is_cuda:
            return Ticket(None)
        event = self.torch.cuda.Event()
        event.record(self.torch.cuda.current_stream(self.torch_device))
        return Ticket(event)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this device the current one for kernels launched inside."""
        if not self.is_cuda:
            yield
            return
        with self.torch.cuda.device(self.torch_device):
            yield
