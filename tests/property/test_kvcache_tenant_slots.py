"""Tenants' slots against dictionaries: quotas, readers, and tenants that do not feel each other."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker.errors import ConfigError, InputError
from stoker.kvcache.tenant_slots import SlotsFull, TenantQuota, TenantSlots

KEYS = st.sampled_from([f"k{n}" for n in range(8)])
TENANTS = st.sampled_from(["a", "b", "c"])


class SlotMachine(RuleBasedStateMachine):
    """Puts, reads that stay open, removals; whatever is found is what was put last."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: TenantSlots[int] = TenantSlots(bytes_max=100, quota=TenantQuota(60))
        self.last: dict[tuple[str, str], tuple[int, int]] = {}
        self.open: list[tuple[contextlib.ExitStack, str, str, int]] = []
        self.number = 0

    @rule(tenant=TENANTS, key=KEYS, size=st.integers(0, 70))
    def put(self, tenant: str, key: str, size: int) -> None:
        self.number += 1
        within = {
            other: self.slots.counts(other).used_bytes <= 100 / 3 for other in ("a", "b", "c")
        }
        before = {other: self.slots.counts(other).used_bytes for other in ("a", "b", "c")}
        try:
            self.slots.put(tenant, key, self.number, size)
        except SlotsFull:
            pass
        else:
            self.last[(tenant, key)] = (self.number, size)
        for other in ("a", "b", "c"):
            if other != tenant and within[other]:
                assert self.slots.counts(other).used_bytes == before[other]

    @rule(tenant=TENANTS, key=KEYS)
    def read(self, tenant: str, key: str) -> None:
        with self.slots.use(tenant, key) as value:
            assert value is None or value == self.last[(tenant, key)][0]

    @rule(tenant=TENANTS, key=KEYS)
    def hold(self, tenant: str, key: str) -> None:
        stack = contextlib.ExitStack()
        value = stack.enter_context(self.slots.use(tenant, key))
        if value is None or len(self.open) >= 3:
            stack.close()
        else:
            self.open.append((stack, tenant, key, value))

    @rule()
    def let_go(self) -> None:
        if self.open:
            self.open.pop(0)[0].close()

    @rule(tenant=TENANTS, key=KEYS)
    def remove(self, tenant: str, key: str) -> None:
        with self.slots.use(tenant, key) as value:
            there = value is not None
        assert self.slots.remove(tenant, key) == there
        self.last.pop((tenant, key), None)
        self.open = [entry for entry in self.open if entry[1:3] != (tenant, key)]

    @invariant()
    def holds(self) -> None:
        self.slots.check()
        for _, tenant, key, value in self.open:
            if self.last[(tenant, key)][0] == value:  # not replaced meanwhile
                with self.slots.use(tenant, key) as found:
                    assert found == value, "a slot in use was collected"


SlotMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlots = SlotMachine.TestCase


def test_cold_slots_are_judged_by_uses_and_hot_ones_by_recency() -> None:
    slots: TenantSlots[str] = TenantSlots(bytes_max=1_000, quota=TenantQuota(100, hot_ratio=0.3))
    for key in ("often", "once", "twice"):
        slots.put("a", key, key, 10)
    for key, uses in (("often", 5), ("twice", 2), ("once", 1)):
        for _ in range(uses):
            with slots.use("a", key) as value:
                assert value == key
    for number in range(7):  # pushes the three into the cold part, then over the threshold
        slots.put("a", f"new{number}", "new", 10)
    found = {}
    for key in ("new0", "once", "often", "new6"):
        with slots.use("a", key) as value:
            found[key] = value is not None
    assert found == {"new0": False, "once": True, "often": True, "new6": True}
    assert slots.counts("a").collected >= 1
    slots.check()


def test_readers_and_collection_go_on_beside_each_other() -> None:
    slots: TenantSlots[int] = TenantSlots(bytes_max=2_000, quota=TenantQuota(500))
    wrong: list[str] = []

    def work(tenant: str, seed: int) -> None:
        for number in range(600):
            key = f"k{(number * 7 + seed) % 40}"
            with slots.use(tenant, key) as value:
                if value is not None and value % 1_000 != int(key[1:]):
                    wrong.append(key)
            slots.put(tenant, key, 1_000 * number + int(key[1:]), 25)

    threads = [
        threading.Thread(target=work, args=(tenant, seed))
        for tenant in ("a", "b", "c")
        for seed in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots.check()
    assert not wrong


def test_a_quota_of_its_own_takes_hold_at_once() -> None:
    slots: TenantSlots[str] = TenantSlots(bytes_max=1_000, quota=TenantQuota(100))
    for number in range(9):
        slots.put("a", f"k{number}", "v", 10)
    slots.set_quota("a", TenantQuota(30))
    assert slots.counts("a").used_bytes <= 30
    with pytest.raises(SlotsFull, match="at most 30 bytes"):
        slots.put("a", "big", "v", 31)
    slots.put("b", "big", "v", 90)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_max": 0},
        {"hot_ratio": 0.0},
        {"collect_above_ratio": 0.5},
        {"collect_below_ratio": 0.0},
    ],
)
def test_senseless_quotas_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        TenantQuota(**{"bytes_max": 10, **wrong})  # type: ignore[arg-type]
    with pytest.raises(InputError):
        TenantSlots[int](bytes_max=10, quota=TenantQuota(10)).put("a", "k", 1, -1)
