"""Remembered event ids against a dictionary that forgets by the same two bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import CorruptError, InputError
from stoker.kernels._core import EventBatch, IdWindow
from stoker.prefetch.event_batch import batch_of
from stoker.prefetch.events import RESULT_USED, Event
from stoker.prefetch.snapshot import pack, unpack
from stoker.service.event_ids import EventIds, ids_bytes

KEPT_MIN = 65_536
T0 = 1.76e9


def rows(ids: Sequence[tuple[str, str]]) -> EventBatch:
    return batch_of(
        [Event(name, RESULT_USED, T0, tenant, None, None, None, ("c",), {}) for tenant, name in ids]
    )


class Model:
    """Ids in the order in which they came, each with the time of its mark."""

    def __init__(self, *, ids_max: int, age_s: float) -> None:
        self.ids_max, self.age_s = ids_max, age_s
        self.held: dict[tuple[str, str], float] = {}
        self.order: deque[tuple[str, str]] = deque()
        self.newest_s = -np.inf
        self.mark_s = -np.inf

    def add(self, key: tuple[str, str], time_s: float) -> bool:
        if key in self.held:
            return False
        self.newest_s = max(self.newest_s, time_s)
        if len(self.held) == self.ids_max:
            self.forget()
        if not self.held or self.newest_s >= self.mark_s + self.age_s / 256.0:
            self.mark_s = self.newest_s
            while len(self.held) > KEPT_MIN and self.later_mark_s() < self.newest_s - self.age_s:
                self.forget()
        self.held[key] = self.mark_s
        self.order.append(key)
        return True

    def later_mark_s(self) -> float:
        """The mark after the oldest id's: all of that mark came before it."""
        first_s = self.held[self.order[0]]
        later = (self.held[key] for key in self.order if self.held[key] > first_s)
        return next(later, self.mark_s)

    def forget(self) -> None:
        del self.held[self.order.popleft()]


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.tuples(st.sampled_from("tu"), st.integers(0, 12)), max_size=80),
    room=st.integers(1, 12),
    steps=st.lists(st.sampled_from([0.0, 1.0, 50.0, -30.0, 1e9, -1e9]), min_size=80, max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=5),
)
def test_ids_are_a_bounded_dictionary(
    ids: list[tuple[str, int]], room: int, steps: list[float], cuts: list[int]
) -> None:
    """However the stream is cut, saved and restored, and whatever the log's clock does."""
    bytes_max = 20 * room + 8
    seen = EventIds(bytes_max=bytes_max, age_s_max=40.0, seed=5)
    model = Model(ids_max=room, age_s=40.0)
    times = T0 + np.cumsum(steps[: len(ids)])
    at = 0
    for end in [*sorted(cuts), len(ids)]:
        part, arrived = ids[at:end], times[at:end]
        at = max(at, end)
        named = [(tenant, str(name)) for tenant, name in part]
        kept = [model.add(key, time_s) for key, time_s in zip(named, arrived, strict=True)]
        if at % 2:  # the same by objects
            assert [
                seen.add(*key, time_s) for key, time_s in zip(named, arrived, strict=True)
            ] == kept
        else:
            batch = rows(named)
            assert seen.pass_rows(batch, arrived) == len(kept) - sum(kept)
            assert batch.ready_count == sum(kept)
        assert seen.kept().count == len(model.held)
        assert seen.kept().bytes_used <= bytes_max
        again = EventIds(bytes_max=bytes_max, age_s_max=40.0, seed=6)
        again.restore(seen.to_bytes())
        assert again.to_bytes() == seen.to_bytes()
        seen = again


@pytest.mark.parametrize("jump_s", [0.0, 3e8, -3e8])
def test_age_forgets_the_oldest_but_not_the_newest_65536(jump_s: float) -> None:
    """A day of a busy log: what is a day old goes, and where the clock jumps a good part stays."""
    count, age_s = 150_000, 86_400.0
    seen = EventIds(bytes_max=64 << 20, age_s_max=age_s, seed=1)
    names = [("t", f"e{i}") for i in range(count)]
    times = T0 + np.arange(count, dtype=np.float64)  # 1.7 days
    times[80_000:] += jump_s
    for at in range(0, count, 5_000):
        batch = rows(names[at : at + 5_000])
        assert seen.pass_rows(batch, times[at : at + 5_000]) == 0
    span = seen.kept().span_s
    if jump_s > 0:
        assert KEPT_MIN <= seen.kept().count < 71_000
    elif jump_s < 0:  # the age is not told any more; the bytes are the bound
        assert seen.kept().count > KEPT_MIN
    else:
        assert age_s <= span <= age_s * (1.0 + 2.0 / 256.0)
        assert seen.kept().count == pytest.approx(age_s, rel=0.01)
    for at in range(count - KEPT_MIN, count, 1_000):
        assert not seen.add(*names[at], times[-1])


def test_fingerprints_collide_as_drawn_numbers_would() -> None:
    """By the lower and the upper 32 bits of 200,000 ids, of which 4.7 pairs are to be expected."""
    for seed in (1, 2**63 + 11):
        window = IdWindow(seed)
        names = [f"{i:032x}" for i in range(150_000)] + [f"search-{i}" for i in range(50_000)]
        for name in names:
            assert window.add("acme", name, T0, bytes_max=64 << 20, age_s_max=9.0)
        found = window.fingerprints()
        for bits in (found & 0xFFFFFFFF, found >> np.uint64(32)):
            assert len(names) - len(np.unique(bits)) <= 16


def test_tenants_and_seeds_are_apart() -> None:
    seen = EventIds(bytes_max=2 << 20, age_s_max=9.0)
    other = EventIds(bytes_max=2 << 20, age_s_max=9.0)
    assert seen.add("t", "ab", T0)
    assert seen.add("ta", "b", T0)
    assert seen.add("u", "ab", T0)
    assert not seen.add("t", "ab", T0 + 99.0)
    other.add("t", "ab", T0)
    one, two = (unpack("event ids 1", each.to_bytes())[1] for each in (seen, other))
    assert one["fingerprints"][0] != two["fingerprints"][0]


def test_none_are_remembered_where_they_are_off() -> None:
    seen = EventIds(bytes_max=0, age_s_max=9.0)
    assert seen.add("t", "a", T0)
    assert seen.add("t", "a", T0)
    assert seen.pass_rows(rows([("t", "a")]), np.array([T0])) == 0
    assert seen.kept().count == 0
    assert seen.false_expected == 0.0


def test_ids_of_before_go_where_they_are_switched_off() -> None:
    before = EventIds(bytes_max=2 << 20, age_s_max=9.0)
    before.add("t", "a", T0)
    for saved in (before.to_bytes(), [["t", "a"]]):
        seen = EventIds(bytes_max=0, age_s_max=9.0)
        seen.restore(saved, named_s=T0)
        assert seen.kept().count == 0
        with pytest.raises(CorruptError):
            seen.restore(before.to_bytes()[:-1])


def test_what_is_expected_to_be_lost_is_counted() -> None:
    seen = EventIds(bytes_max=2 << 20, age_s_max=9.0)
    seen.pass_rows(rows([("t", str(i)) for i in range(1_000)]), np.full(1_000, T0))
    seen.pass_rows(rows([("t", str(i)) for i in range(2_000)]), np.full(2_000, T0))
    assert seen.false_expected == pytest.approx((1_000 * 1_000 + 2_000 * 2_000) / 2**64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fingerprints", np.array([1, 2], np.uint64)),
        ("fingerprints", np.array([1, 1, 2], np.uint64)),
        ("fingerprints", np.array([1, 0, 2], np.uint64)),
        ("times_s", np.array([T0 + 1, T0])),
        ("times_s", np.array([np.nan, T0])),
        ("times_s", np.array([T0, np.inf])),
        ("times_s", np.array([-np.inf, T0])),
        ("counts", np.array([3, 0])),
        ("counts", np.array([4, -1])),
        ("counts", np.array([1])),
    ],
)
def test_ids_that_no_window_can_hold_are_refused(name: str, value: np.ndarray) -> None:
    arrays = {
        "fingerprints": np.array([1, 2, 3], np.uint64),
        "times_s": np.array([T0, T0 + 1]),
        "counts": np.array([2, 1]),
    }
    seen = EventIds(bytes_max=2 << 20, age_s_max=9.0)
    seen.restore(pack("event ids 1", {"seed": "7"}, arrays))
    assert seen.kept().count == 3
    before = seen.to_bytes()
    with pytest.raises(CorruptError):
        seen.restore(pack("event ids 1", {"seed": "7"}, {**arrays, name: value}))
    for odd in (b"", None, 5, [["t"]], pack("event ids 1", {"seed": "x"}, arrays)):
        with pytest.raises(CorruptError):
            seen.restore(odd)
    assert seen.to_bytes() == before


def test_names_from_before_become_bytes() -> None:
    seen = EventIds(bytes_max=2 << 20, age_s_max=9.0)
    seen.restore(ids_bytes([["t", "a"], ["t", "b"]], named_s=T0 - 5.0))
    assert not seen.add("t", "b", T0)
    assert seen.add("u", "b", T0)
    assert seen.kept().span_s == 5.0  # as far as they are known to reach, not to 1970
    assert ids_bytes(b"as they are", named_s=T0) == b"as they are"
    with pytest.raises(CorruptError):
        ids_bytes([["t", "a"]], named_s=float("nan"))
    with pytest.raises(InputError, match="one time per row"):
        IdWindow(1).pass_rows(rows([("t", "a")]), np.zeros(2), bytes_max=28, age_s_max=1.0)
