"""The slab against a dictionary: what was loaded reads back equal, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker.errors import ConfigError, InputError
from stoker.kernels.device import Device, DeviceUnavailable

torch = pytest.importorskip("torch")
from stoker.kernels.slab import PageSlab, SlabFull  # noqa: E402

pytestmark = pytest.mark.models

PAGES, FRAMES, PAGE_BYTES = 9, 4, 64


def content_of(page: int, version: int) -> bytes:
    return np.random.default_rng(1000 * page + version).bytes(PAGE_BYTES)


class SlabMachine(RuleBasedStateMachine):
    """Loads, reads, evictions and use, with the least recently used page predicted by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = PageSlab(Device("cpu"), page_bytes=PAGE_BYTES, frames_max=FRAMES, pages=PAGES)
        self.model: dict[int, bytes] = {}  # oldest use first
        self.sticky: set[int] = set()
        self.version = 0

    def touch(self, page: int) -> None:
        self.model[page] = self.model.pop(page)

    @rule(page=st.integers(0, PAGES - 1), sticky=st.booleans())
    def load(self, page: int, sticky: bool) -> None:
        self.version += 1
        content = content_of(page, self.version)
        if page in self.model:
            assert not self.slab.load(page, content, sticky=sticky)
            self.touch(page)
        else:
            victims = [other for other in self.model if other not in self.sticky]
            if len(self.model) == FRAMES and not victims:
                with pytest.raises(SlabFull):
                    self.slab.load(page, content, sticky=sticky)
                return
            if len(self.model) == FRAMES:
                del self.model[victims[0]]
            assert self.slab.load(page, content, sticky=sticky)
            self.model[page] = content
        if sticky:
            self.sticky.add(page)

    @rule(page=st.integers(0, PAGES - 1))
    def evict(self, page: int) -> None:
        assert self.slab.evict(page) == (page in self.model)
        self.model.pop(page, None)
        self.sticky.discard(page)

    @rule(pages=st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3))
    def use(self, pages: list[int]) -> None:
        with self.slab.use(pages) as held:
            assert held == [page for page in dict.fromkeys(pages) if page in self.model]
            for page in held:
                assert not self.slab.evict(page)
        for page in held:
            self.touch(page)

    @invariant()
    def reads_back_equal(self) -> None:
        for page in range(PAGES):
            found = self.slab.read(page)
            expected = self.model.get(page)
            assert (None if found is None else found.tobytes()) == expected

    @invariant()
    def checks(self) -> None:
        self.slab.check()
        assert self.slab.counts().resident == len(self.model)


SlabMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSlabMachine = SlabMachine.TestCase


def test_rows_are_seen_through_the_table() -> None:
    slab = PageSlab(Device("cpu"), page_bytes=96, frames_max=2, pages=5)
    pages = np.arange(5 * 24, dtype=np.float32).reshape(5, 24)
    for page in (4, 2):
        slab.load(page, pages[page].tobytes())
    rows = slab.rows(torch.float32, 10)  # two rows a page, four values unused
    assert rows.shape == (2, 2, 10)
    for page in (4, 2):
        frame = int(slab.table[page])
        np.testing.assert_array_equal(rows[frame].numpy(), pages[page][:20].reshape(2, 10))
    assert slab.table.tolist() == [-1, -1, int(slab.table[2]), -1, int(slab.table[4])]


def test_wrong_pages_are_refused_by_name() -> None:
    slab = PageSlab(Device("cpu"), page_bytes=32, frames_max=1, pages=2)
    with pytest.raises(InputError, match="expected 0 to 1, found 2"):
        slab.load(2, bytes(32))
    with pytest.raises(InputError, match="expected 32 bytes, found 31"):
        slab.load(1, bytes(31))
    with pytest.raises(InputError, match="multiple of 16"):
        PageSlab(Device("cpu"), page_bytes=30, frames_max=1, pages=1)
    with pytest.raises(InputError, match="a row of 100"):
        slab.rows(torch.float32, 100)


def test_device_names() -> None:
    assert Device("cpu").name == "cpu"
    with pytest.raises(ConfigError):
        Device("tpu")
    with pytest.raises(ConfigError):
        Device("cuda:x")
    if not torch.cuda.is_available():
        assert Device("auto").name == "cpu"
        with pytest.raises(DeviceUnavailable, match="found 0 CUDA devices"):
            Device("cuda:0")


@pytest.mark.parametrize("seed", [3])
def test_copies_do_not_keep_the_callers_buffer(seed: int) -> None:
    slab = PageSlab(Device("cpu"), page_bytes=64, frames_max=3, pages=3)
    buffer = np.random.default_rng(seed).integers(0, 256, 64, dtype=np.uint8)
    kept = buffer.copy()
    slab.load(0, buffer)
    buffer[:] = 0
    found = slab.read(0)
    assert found is not None
    np.testing.assert_array_equal(found, kept)
    found[:] = 0
    again = slab.read(0)
    assert again is not None
    np.testing.assert_array_equal(again, kept)
