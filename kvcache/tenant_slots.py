"""Slots per tenant: a hot part by recency, a cold part by use count, within quotas.

What is new enters the hot part; what leaves it goes to the cold part and is judged there by how
often it was used. A tenant within its share is never touched for another's sake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from stoker.errors import CapacityError, ConfigError, InputError

V = TypeVar("V")


class SlotsFull(CapacityError):
    """The tenant's quota is taken by slots in use, or one value is larger than the quota."""


@dataclasses.dataclass(frozen=True)
class TenantQuota:
    """What one tenant may hold.

    Attributes:
        bytes_max: Never more than this.
        hot_ratio: Share of it for the hot part.
        collect_above_ratio: Share in use at which collection begins.
        collect_below_ratio: Share in use at which it ends.
    """

    bytes_max: int
    hot_ratio: float = 0.25
    collect_above_ratio: float = 0.95
    collect_below_ratio: float = 0.85

    def __post_init__(self) -> None:
        if self.bytes_max < 1:
            raise ConfigError(f"bytes_max: expected at least 1, found {self.bytes_max}")
        if not 0.0 < self.hot_ratio <= 1.0:
            raise ConfigError(f"hot_ratio: expected (0, 1], found {self.hot_ratio}")
        if not 0.0 < self.collect_below_ratio <= self.collect_above_ratio <= 1.0:
            raise ConfigError(
                "collect_below_ratio: expected 0 < below <= above <= 1, found "
                f"{self.collect_below_ratio} and {self.collect_above_ratio}"
            )


@dataclasses.dataclass(frozen=True)
class SlotCounts:
    """One tenant's slots and bytes, and what happened so far."""

    hot: int
    cold: int
    used_bytes: int
    hits: int
    misses: int
    collected: int


@dataclasses.dataclass(slots=True)
class _Slot(Generic[V]):
    value: V
    size_bytes: int
    uses: int = 0
    readers: int = 0


class _Tenant(Generic[V]):
    """One tenant's slots, behind its own lock."""

    def __init__(self, quota: TenantQuota) -> None:
        self.quota = quota
        self.lock = threading.Lock()
        self.hot: OrderedDict[str, _Slot[V]] = OrderedDict()  # oldest use first
        self.cold: OrderedDict[str, _Slot[V]] = OrderedDict()
        self.hot_bytes = self.cold_bytes = 0
        self.hits = self.misses = self.collected = 0

    @property
    def used_bytes(self) -> int:
        return self.hot_bytes + self.cold_bytes

    def find(self, key: str) -> _Slot[V] | None:
        """Return a slot and note its use: a cold one that is used again becomes hot."""
        slot = self.hot.get(key)
        if slot is None:
            slot = self.cold.pop(key, None)
            if slot is None:
                self.misses += 1
                return None
            self.cold_bytes -= slot.size_bytes
            self.hot[key] = slot
            self.hot_bytes += slot.size_bytes
        self.hot.move_to_end(key)
        slot.uses += 1
        self.hits += 1
        self.cool()
        return slot

    def cool(self) -> None:
        """Move what was used longest ago to the cold part until the hot part has its size."""
        while self.hot_bytes > self.quota.hot_ratio * self.quota.bytes_max and len(self.hot) > 1:
            key, slot = self.hot.popitem(last=False)
            self.hot_bytes -= slot.size_bytes
            self.cold[key] = slot
            self.cold_bytes += slot.size_bytes

    def collect(self, *, down_to: float) -> int:
        """Let go of cold slots, least used first, then hot ones, oldest first; return the bytes."""
        freed = 0
        if self.used_bytes <= down_to:
            return 0
        cold = sorted(self.cold, key=lambda key: self.cold[key].uses)  # stable: oldest first
        for key in [*cold, *self.hot]:
            if self.used_bytes <= down_to:
                break
            part = self.cold if key in self.cold else self.hot
            if not part[key].readers:
                freed += self.remove(key)
                self.collected += 1
        return freed

    def remove(self, key: str) -> int:
        slot = self.hot.pop(key, None)
        if slot is not None:
            self.hot_bytes -= slot.size_bytes
            return slot.size_bytes
        slot = self.cold.pop(key)
        self.cold_bytes -= slot.size_bytes
        return slot.size_bytes


class TenantSlots(Generic[V]):
    """Values by tenant and key, under a quota each and a budget for all.

    Thread-safe: a lock per tenant; readers of a value hold no lock while they use it.

    Invariants (`check`): the bytes of a tenant are within its quota, those of all within the
    budget; a slot in use is never collected; a tenant within its share of the budget loses nothing
    to another.

    Args:
        bytes_max: For all tenants together.
        quota: Of tenants that have none of their own.
    """

    def __init__(self, *, bytes_max: int, quota: TenantQuota) -> None:
        if bytes_max < 1:
            raise ConfigError(f"bytes_max: expected at least 1, found {bytes_max}")
        self._bytes_max = bytes_max
        self._quota = quota
        self._lock = threading.Lock()  # of the table of tenants and the budget of all
        self._tenants: dict[str, _Tenant[V]] = {}

    def set_quota(self, tenant: str, quota: TenantQuota) -> None:
        """Give a tenant a quota of its own, collecting down to it now."""
        state = self._tenant(tenant)
        with state.lock:
            state.quota = quota
            state.cool()
            state.collect(down_to=quota.bytes_max)

    def _tenant(self, tenant: str) -> _Tenant[V]:
        with self._lock:
            return self._tenants.setdefault(tenant, _Tenant(self._quota))

    def put(self, tenant: str, key: str, value: V, size_bytes: int) -> None:
        """Keep a value, replacing the key's last; may collect this tenant's others.

        Raises:
            InputError: a negative size.
            SlotsFull: there is no room that may be taken. An earlier value is then still there.
        """
        if size_bytes < 0:
            raise InputError(f"size_bytes: expected at least 0, found {size_bytes}")
        state = self._tenant(tenant)
        with self._lock, state.lock:
            quota = state.quota
            slot = state.hot.get(key) or state.cold.get(key)
            held = slot.size_bytes if slot is not None else 0
            others_in_use = sum(
                other.size_bytes
                for part in (state.hot, state.cold)
                for name, other in part.items()
                if other.readers and name != key
            )
            if size_bytes > quota.bytes_max - others_in_use:
                raise SlotsFull(
                    f"{key}: expected at most {quota.bytes_max - others_in_use} bytes, found "
                    f"{size_bytes}"
                )
            uses = slot.uses if slot is not None else 0
            # The key itself must not be collected to make room for its own replacement.
            if slot is not None:
                slot.readers += 1
            try:
                if (
                    state.used_bytes - held + size_bytes
                    > quota.collect_above_ratio * quota.bytes_max
                ):
                    goal = quota.collect_below_ratio * quota.bytes_max
                    state.collect(down_to=min(goal, quota.bytes_max - size_bytes) + held)
                if state.used_bytes - held + size_bytes > quota.bytes_max:
                    state.collect(down_to=quota.bytes_max - size_bytes + held)
                self._make_room(size_bytes - held, asking=state)
            finally:
                if slot is not None:
                    slot.readers -= 1
            if slot is not None:
                state.remove(key)
            state.hot[key] = _Slot(value, size_bytes, uses)
            state.hot_bytes += size_bytes
            state.cool()

    def _make_room(self, size_bytes: int, *, asking: _Tenant[V]) -> None:
        """Bring the whole within its budget: first from those above their share, then the asker."""
        total = sum(state.used_bytes for state in self._tenants.values())
        excess = total + size_bytes - self._bytes_max
        if excess <= 0:
            return
        share = self._bytes_max / len(self._tenants)
        above = sorted(
            (state for state in self._tenants.values() if state.used_bytes > share),
            key=lambda state: -state.used_bytes,
        )
        for state in above:
            if excess <= 0:
                return
            goal = max(share, state.used_bytes - excess)
            if state is asking:
                excess -= state.collect(down_to=goal)
            else:
                with state.lock:  # only who holds the table's lock ever takes two of these
                    excess -= state.collect(down_to=goal)
        if excess > 0:
            excess -= asking.collect(down_to=asking.used_bytes - excess)
        if excess > 0:
            raise SlotsFull(f"expected {excess} bytes more that may be taken, found none")

    @contextlib.contextmanager
    def use(self, tenant: str, key: str) -> Iterator[V | None]:
        """Hold a value while it is read, or give None; it is not collected meanwhile."""
        state = self._tenant(tenant)
        with state.lock:
            slot = state.find(key)
            if slot is not None:
                slot.readers += 1
        try:
            yield None if slot is None else slot.value
        finally:
            if slot is not None:
                with state.lock:
                    slot.readers -= 1

    def remove(self, tenant: str, key: str) -> bool:
        """Forget a key; a reader that holds its value keeps that. False if it was not there."""
        state = self._tenant(tenant)
        with state.lock:
            if key not in state.hot and key not in state.cold:
                return False
            state.remove(key)
            return True

    def counts(self, tenant: str) -> SlotCounts:
        """Return what a tenant holds."""
        state = self._tenant(tenant)
        with state.lock:
            return SlotCounts(
                len(state.hot), len(state.cold), state.used_bytes, state.hits, state.misses,
                state.collected,
            )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        with self._lock:
            total = 0
            for state in self._tenants.values():
                with state.lock:
                    assert set(state.hot).isdisjoint(state.cold)
                    sizes = [
                        sum(slot.size_bytes for slot in part.values())
                        for part in (state.hot, state.cold)
                    ]
                    assert sizes == [state.hot_bytes, state.cold_bytes]
                    in_use = sum(
                        slot.size_bytes
                        for part in (state.hot, state.cold)
                        for slot in part.values()
                        if slot.readers
                    )
                    assert state.used_bytes <= max(state.quota.bytes_max, in_use)
                    total += state.used_bytes
            assert total <= self._bytes_max, (total, self._bytes_max)
