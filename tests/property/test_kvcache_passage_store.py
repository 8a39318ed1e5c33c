"""The passage store against a dictionary: puts, gets, damage, warm-ups, reopening, a full disk."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker.kvcache import passages
from stoker.kvcache.language_model import Kv
from stoker.kvcache.passages import KIND, PassageStore

pytest.importorskip("safetensors")
pytestmark = pytest.mark.models

TENANTS = st.sampled_from(["a", "b"])
CHUNKS = st.sampled_from([f"c{n}" for n in range(5)])
ONE = 6 * (2 * 4 * 2 * 1 * 4 + 4)  # bytes of an entry of six tokens


def kv_of(number: int) -> Kv:
    keys = np.full((2, 1, 6, 4), number, np.float32)
    return Kv(np.full(6, number, np.int32), keys, -keys)


class StoreMachine(RuleBasedStateMachine):
    """What is found is what was put last, of the same tenant; bounds hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-kv-test-"))
        self.last: dict[tuple[str, str], int] = {}
        self.number = 0
        self.open()

    def open(self) -> None:
        self.store = PassageStore(
            self.folder, model_id="m", memory_bytes_max=3 * ONE, disk_bytes_max=8_000
        )

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(tenant=TENANTS, chunk=CHUNKS)
    def put(self, tenant: str, chunk: str) -> None:
        self.number += 1
        self.store.put(tenant, chunk, kv_of(self.number))
        self.last[(tenant, chunk)] = self.number

    @rule(tenant=TENANTS, chunk=CHUNKS)
    def put_on_a_full_disk(self, tenant: str, chunk: str) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        original, passages.write_kv = passages.write_kv, fail  # type: ignore[assignment]
        try:
            with pytest.raises(OSError, match="no space"):
                self.store.put(tenant, chunk, kv_of(0))
        finally:
            passages.write_kv = original

    @rule(tenant=TENANTS, chunk=CHUNKS)
    def get(self, tenant: str, chunk: str) -> None:
        number = self.last.get((tenant, chunk), -1)
        found = self.store.get(tenant, chunk, [number] * 6)
        if found is not None:
            np.testing.assert_array_equal(found.keys, kv_of(number).keys)
            np.testing.assert_array_equal(found.values, kv_of(number).values)

    @rule(tenant=TENANTS, chunk=CHUNKS)
    def get_of_an_older_text(self, tenant: str, chunk: str) -> None:
        assert self.store.get(tenant, chunk, [-7] * 6) is None
        self.last.pop((tenant, chunk), None)

    @rule(tenant=TENANTS, chunk=CHUNKS)
    def remove(self, tenant: str, chunk: str) -> None:
        if self.store.remove(tenant, chunk):
            assert (tenant, chunk) in self.last
        self.last.pop((tenant, chunk), None)

    @rule(chunk=CHUNKS, sticky=st.booleans())
    def warm(self, chunk: str, sticky: bool) -> None:
        heat = {("a", chunk): 2.0, ("b", chunk): 1.0}
        for batch in self.store.unit_batches(heat):
            outcome = self.store.load_units(KIND, batch.units, sticky=sticky, deadline_s=None)
            told = outcome.loaded + outcome.already + outcome.no_room + outcome.failed
            assert len(batch.units) == told
            resident = self.store.resident_count(KIND, batch.units)
            assert resident == outcome.loaded + outcome.already

    @rule()
    def reopen(self) -> None:
        before = self.store.counts()
        self.open()
        assert self.store.counts().entries == before.entries
        assert self.store.counts().disk_bytes == before.disk_bytes

    @rule(flip=st.integers(0, 10_000))
    def damage_one(self, flip: int) -> None:
        files = sorted((self.folder / "m").glob("*.safetensors"))
        if files:
            path = files[flip % len(files)]
            content = bytearray(path.read_bytes())
            content[-1 - flip % (ONE // 2)] ^= 1 + flip % 255
            path.write_bytes(content)

    @invariant()
    def checks(self) -> None:
        self.store.check()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPassageStore = StoreMachine.TestCase
