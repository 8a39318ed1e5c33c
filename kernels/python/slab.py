"""The GPU tier: a slab of page frames in one tensor, filled from host memory by page number.

Kernels read pages through a page table that lives on the device, so a page can be anywhere in the
slab. The same code runs on the CPU, where the copies are done at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CapacityError, InputError
from stoker.kernels.device import Device, Ticket

NOT_RESIDENT = -1


class SlabFull(CapacityError):
    """Every frame holds a page in use or a sticky one; release pages or enlarge the slab."""


@dataclasses.dataclass(frozen=True)
class SlabCounts:
    """What happened so far, in pages."""

    resident: int
    sticky: int
    loads: int
    hits: int
    evictions: int


@dataclasses.dataclass(slots=True)
class _Frame:
    page: int
    sticky: bool
    uses: int
    loaded: Ticket
    last_use: Ticket


class PageSlab:
    """Page frames on a device, with a page table, pins and least-recently-used eviction.

    Not thread-safe: one owner drives it (on a GPU, the thread that launches kernels).

    Invariants (`check`): a page has at most one frame; the table on the device says of every page
    what the one on the host says; a page in use or sticky is never evicted; a frame is overwritten
    only after the kernels that read it are done.

    Args:
        device: Where the slab lives.
        page_bytes: Size of a page; a multiple of 16, so that rows can be viewed as floats.
        frames_max: Pages that the slab holds, at least 1.
        pages: Pages that exist: numbers are below it.
    """

    def __init__(self, device: Device, *, page_bytes: int, frames_max: int, pages: int) -> None:
        if page_bytes < 16 or page_bytes % 16:
            raise InputError(f"page_bytes: expected a multiple of 16, found {page_bytes}")
        if frames_max < 1 or pages < 1:
            raise InputError(f"expected at least one frame and page, found {frames_max}, {pages}")
        torch = device.torch
        self._device = device
        self.page_bytes = page_bytes
        self.frames_max = frames_max
        self.pages = pages
        self._slab = device.empty((frames_max, page_bytes), torch.uint8)
        self._table = device.full((pages,), NOT_RESIDENT, torch.int32)
        self._frames: OrderedDict[int, _Frame] = OrderedDict()  # frame -> state, oldest use first
        self._frame_of: dict[int, int] = {}
        self._free = list(range(frames_max - 1, -1, -1))
        self._up = device.channel()
        self._down = device.channel()
        # Two buffers: while one is being copied to the device, the host fills the other.
        self._staging = [device.host_buffer((page_bytes,), torch.uint8) for _ in range(2)]
        self._staged = [Ticket(None), Ticket(None)]
        self._turn = 0
        self._loads = self._hits = self._evictions = 0

    def load(
        self, page: int, content: NDArray[np.uint8] | memoryview | bytes, *, sticky: bool = False
    ) -> bool:
        """Put a page into the slab; the copy may still be running when this returns.

        Args:
            page: Its number, below ``pages``.
            content: Exactly ``page_bytes`` bytes; copied before this returns.
            sticky: Keep it until `evict` is called for it.

        Returns:
            False if it was resident already (then only ``sticky`` and its use are noted).

        Raises:
            InputError: the number or the size is wrong.
            SlabFull: no frame can be taken.
        """
        self._require_page(page)
        flat = np.frombuffer(content, np.uint8)
        if flat.nbytes != self.page_bytes:
            raise InputError(f"page {page}: expected {self.page_bytes} bytes, found {flat.nbytes}")
        frame = self._frame_of.get(page)
        if frame is not None:
            self._frames.move_to_end(frame)
            self._frames[frame].sticky |= sticky
            self._hits += 1
            return False
        frame, last_use = self._take_frame()
        turn, self._turn = self._turn, 1 - self._turn
        self._staged[turn].wait()
        self._staging[turn].numpy()[:] = flat
        self._up.wait_for(last_use)
        ticket = self._up.submit(self._slab[frame], self._staging[turn])
        self._staged[turn] = ticket
        self._frames[frame] = _Frame(page, sticky, 0, ticket, Ticket(None))
        self._frame_of[page] = frame
        self._table[page] = frame
        self._loads += 1
        return True

    def _require_page(self, page: int) -> None:
        if not 0 <= page < self.pages:
            raise InputError(f"page: expected 0 to {self.pages - 1}, found {page}")

    def _take_frame(self) -> tuple[int, Ticket]:
        if self._free:
            return self._free.pop(), Ticket(None)
        for frame, state in self._frames.items():
            if state.uses == 0 and not state.sticky:
                last_use = state.last_use
                self._drop(frame)
                self._evictions += 1
                self._free.remove(frame)
                return frame, last_use
        raise SlabFull(f"expected a frame to evict, found all {self.frames_max} in use or sticky")

    def _drop(self, frame: int) -> None:
        state = self._frames.pop(frame)
        state.loaded.wait()
        del self._frame_of[state.page]
        self._table[state.page] = NOT_RESIDENT
        self._free.append(frame)

    def evict(self, page: int) -> bool:
        """Let go of a page, sticky or not; False if it is not resident or is in use."""
        frame = self._frame_of.get(page)
        if frame is None or self._frames[frame].uses:
            return False
        self._frames[frame].last_use.wait()
        self._drop(frame)
        self._evictions += 1
        return True

    @contextlib.contextmanager
    def use(self, pages: Sequence[int]) -> Iterator[list[int]]:
        """Hold pages while kernels read them; yields the ones that are resident.

        Kernels launched inside wait for the pages' copies, on the device. Frames are overwritten
        only after those kernels are done, although the host does not wait for them.
        """
        held = [page for page in dict.fromkeys(pages) if page in self._frame_of]
        states = []
        for page in held:
            frame = self._frame_of[page]
            state = self._frames[frame]
            state.uses += 1
            self._frames.move_to_end(frame)
            self._device.compute_waits_for(state.loaded)
            states.append(state)
        try:
            yield held
        finally:
            mark = self._device.compute_mark()
            for state in states:
                state.uses -= 1
                state.last_use = mark

    def read(self, page: int) -> NDArray[np.uint8] | None:
        """Copy a page back to the host, or return None if it is not resident."""
        frame = self._frame_of.get(page)
        if frame is None:
            return None
        target = self._device.host_buffer((self.page_bytes,), self._device.torch.uint8)
        self._down.wait_for(self._frames[frame].loaded)
        self._down.submit(target, self._slab[frame]).wait()
        copied: NDArray[np.uint8] = target.numpy().copy()
        return copied

    def rows(self, dtype: Any, dim: int) -> Any:
        """View the slab as rows: (frames, rows per page, dim); what gather kernels take.

        Args:
            dtype: A torch floating type.
            dim: Values per row; rows fill a page exactly or leave a tail unused.

        Raises:
            InputError: not one row fits a page, or the page is no multiple of the type's size.
        """
        size = dtype.itemsize
        values = self.page_bytes // size
        per_page = values // dim
        if per_page < 1 or self.page_bytes % size:
            raise InputError(f"expected a row of {dim} x {size} bytes in {self.page_bytes}")
        view = self._slab.view(dtype)[:, : per_page * dim]
        return view.unflatten(1, (per_page, dim))

    @property
    def table(self) -> Any:
        """The page table on the device: int32, shape (pages,), a frame or -1."""
        return self._table

    def counts(self) -> SlabCounts:
        """Return what is resident and what happened so far."""
        sticky = sum(state.sticky for state in self._frames.values())
        return SlabCounts(len(self._frames), sticky, self._loads, self._hits, self._evictions)

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._frames) + len(self._free) == self.frames_max
        assert set(self._frames).isdisjoint(self._free)
        assert {state.page: frame for frame, state in self._frames.items()} == self._frame_of
        table = self._table.cpu().numpy()
        for page in range(self.pages):
            expected = self._frame_of.get(page, NOT_RESIDENT)
            assert table[page] == expected, (page, int(table[page]), expected)
        assert all(state.uses >= 0 for state in self._frames.values())
