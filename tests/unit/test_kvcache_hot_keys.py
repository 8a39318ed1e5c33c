"""Hot keys go to the fast path and back by counts and times; snapshots are counted exactly."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache.hot_keys import HotKeys
from stoker.kvcache.snapshot_table import SnapshotTable


class Store:
    """A slow path on a clock that the test turns."""

    def __init__(self, *, read_us: float = 200.0) -> None:
        self.values: dict[str, int] = {"hot": 1, "cold": 2}
        self.now_ns = 0
        self.read_us = read_us
        self.reads = 0

    def read(self, key: str) -> int | None:
        self.reads += 1
        self.now_ns += int(self.read_us * 1e3)
        return self.values.get(key)


def hot_of(store: Store) -> HotKeys[int]:
    return HotKeys(
        store.read, accesses_min=500, window_s=10.0, p99_us=100.0, clock_ns=lambda: store.now_ns
    )


def test_a_key_is_fast_above_both_bounds_and_back_below() -> None:
    store = Store()
    hot = hot_of(store)
    for _ in range(501):
        assert hot.get("hot") == 1
    for _ in range(100):
        hot.get("cold")
    hot.review()
    assert hot.fast_keys() == {"hot"}
    slow = store.reads
    for _ in range(50):
        assert hot.get("hot") == 1
    assert store.reads == slow, "the fast path asks nobody"
    store.now_ns += int(11e9)
    hot.review()
    assert hot.fast_keys() == set()
    assert (hot.promoted, hot.demoted) == (1, 1)
    assert hot.get("hot") == 1
    assert store.reads == slow + 1
    hot.check()


def test_what_is_quick_or_seldom_stays_where_it_is() -> None:
    quick = Store(read_us=50.0)
    hot = hot_of(quick)
    for _ in range(2_000):
        hot.get("hot")
    hot.review()
    assert hot.fast_keys() == set(), "reads of 50 us are no reason"
    slow = Store()
    hot = hot_of(slow)
    for _ in range(600):
        hot.get("hot")
        slow.now_ns += int(40e6)  # 25 a second: 250 in a window
    hot.review()
    assert hot.fast_keys() == set()


def test_reads_alone_bring_the_review() -> None:
    store = Store()
    hot = hot_of(store)
    for _ in range(1_200):
        hot.get("hot")
        store.now_ns += int(1e6)
    assert hot.fast_keys() == {"hot"}


def test_a_change_is_never_hidden() -> None:
    store = Store()
    hot = hot_of(store)
    for _ in range(600):
        hot.get("hot")
    hot.review()
    store.values["hot"] = 7
    hot.forget("hot")
    assert hot.get("hot") == 7
    hot.review()
    assert hot.get("hot") == 7
    del store.values["hot"]
    hot.forget_all()
    assert hot.get("hot") is None
    hot.review()
    assert hot.fast_keys() == set(), "what is not there is not kept"


def test_a_change_during_the_review_wins() -> None:
    store = Store()
    hot = hot_of(store)
    for _ in range(600):
        hot.get("hot")
    read, changed = store.read, threading.Event()

    def forget() -> None:
        hot.forget("hot")

    def read_and_change(key: str) -> int | None:
        value = read(key)
        store.values["hot"] = 9
        thread = threading.Thread(target=forget)
        thread.start()
        while hot._forgotten == 0:
            pass
        changed.set()
        threads.append(thread)
        return value

    threads: list[threading.Thread] = []
    hot._read = read_and_change
    hot.review()
    hot._read = read
    for thread in threads:
        thread.join()
    assert changed.is_set()
    assert hot.get("hot") == 9


def test_counts_are_bounded() -> None:
    store = Store()
    hot = HotKeys(store.read, tracked_max=10, clock_ns=lambda: store.now_ns)
    for number in range(100):
        hot.get(f"k{number}")
    hot.check()
    with pytest.raises(InputError):
        HotKeys(store.read, accesses_min=0)


@pytest.mark.parametrize("seed", range(5))
def test_a_table_is_as_a_dict_at_every_version(seed: int) -> None:
    rng = np.random.default_rng((41, seed))
    table: SnapshotTable[int] = SnapshotTable(shards=4)
    model: dict[str, int] = {}
    past = [(table.present(), dict(model))]
    for _ in range(200):
        changes: dict[str, int | None] = {
            f"k{int(rng.integers(20))}": int(rng.integers(9)) if rng.random() < 0.7 else None
            for _ in range(int(rng.integers(1, 4)))
        }
        table.write(changes)
        for key, value in changes.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
        past.append((table.present(), dict(model)))
    for snapshot, then in past:
        assert dict(snapshot.items()) == then, "what was seen once never changes"
        assert len(snapshot) == len(then)
    table.check()


def test_held_snapshots_outlive_writes_and_are_counted_exactly() -> None:
    table: SnapshotTable[int] = SnapshotTable()
    table.write({"a": 1})
    with table.hold() as first, table.hold() as again:
        assert first is again
        assert first.references() == 2
        table.write({"a": 2})
        assert first.get("a") == 1
        assert table.present().get("a") == 2
        assert table.held() == 2
    assert table.held() == 0
    table.write({"a": 3})
    table.check()
    with pytest.raises(InputError):
        SnapshotTable(shards=0)


def test_readers_of_several_threads_are_counted_together() -> None:
    table: SnapshotTable[int] = SnapshotTable()
    both = threading.Barrier(3)
    done = threading.Event()

    def read() -> None:
        with table.hold():
            both.wait()
            done.wait()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    both.wait()
    with table.hold() as snapshot, table.hold():
        counted, held = snapshot.references(), table.held()
    done.set()
    for reader in readers:
        reader.join()
    assert (counted, held) == (4, 4)
    assert (snapshot.references(), table.held()) == (0, 0)


def test_a_retired_snapshot_counts_nobody_and_gives_its_slot_on() -> None:
    table: SnapshotTable[int] = SnapshotTable()
    retired = table.present()
    table.write({"a": 1})
    table.write({"a": 2})
    assert table.retired == 2
    with table.hold() as snapshot:
        assert snapshot._slot == retired._slot, "else nothing below is shown"
        assert (snapshot.references(), retired.references()) == (1, 0)
        assert (snapshot.get("a"), retired.get("a")) == (2, None)
    table.check()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns every few instructions: at the usual 5 ms races hardly ever meet."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_counts_stay_exact_under_readers_and_writers_at_full_speed() -> None:
    """Every reader sees whole versions that never go back; at rest nothing is counted or kept."""
    table: SnapshotTable[int] = SnapshotTable(shards=8)
    keys = [f"k{number}" for number in range(16)]
    table.write(dict.fromkeys(keys, 0))
    stop = threading.Event()
    faults: list[str] = []

    def write(base: int) -> None:
        for number in range(400):
            table.write(dict.fromkeys(keys, base + number))

    def read() -> None:
        last = -1
        while not stop.is_set():
            with table.hold() as snapshot:
                seen = {snapshot.get(key) for key in keys}
                if len(seen) != 1:
                    faults.append(f"torn: {seen}")
                if snapshot.version < last:
                    faults.append(f"back from {last} to {snapshot.version}")
                if snapshot.references() < 1:
                    faults.append("held and not counted")
                with table._lock:
                    if snapshot is not table._present and snapshot not in table._at.values():
                        faults.append("held and retired")
                last = snapshot.version

    readers = [threading.Thread(target=read) for _ in range(4)]
    writers = [threading.Thread(target=write, args=(base,)) for base in (1_000, 2_000)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert faults == []
    assert table.held() == 0
    assert table.write({}) == 802
    table.check()
    assert table.retired == 802
