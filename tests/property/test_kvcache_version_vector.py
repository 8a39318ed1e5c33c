"""Version vectors against sets of updates: order, merge laws, convergence, no lost update."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker.errors import InputError
from stoker.kvcache.version_vector import (
    Order,
    Register,
    ReplicatedTable,
    Version,
    VersionVector,
)

REPLICAS = "abc"
vectors = st.dictionaries(st.sampled_from(REPLICAS), st.integers(0, 3)).map(VersionVector.of)


@given(vectors, vectors, vectors)
def test_merge_is_a_join(one: VersionVector, other: VersionVector, third: VersionVector) -> None:
    assert one.merged(other) == other.merged(one)
    assert one.merged(other).merged(third) == one.merged(other.merged(third))
    assert one.merged(one) == one
    assert one.merged(other).order(one) in (Order.EQUAL, Order.AFTER)


@given(vectors, vectors)
def test_order_is_that_of_the_updates_seen(one: VersionVector, other: VersionVector) -> None:
    seen = [
        {(replica, number) for replica, count in vector.counts for number in range(count)}
        for vector in (one, other)
    ]
    expected = (
        Order.EQUAL if seen[0] == seen[1]
        else Order.BEFORE if seen[0] < seen[1]
        else Order.AFTER if seen[0] > seen[1]
        else Order.CONCURRENT
    )  # fmt: skip
    assert one.order(other) is expected
    opposite = {Order.BEFORE: Order.AFTER, Order.AFTER: Order.BEFORE}
    assert other.order(one) is opposite.get(expected, expected)


class ReplicaMachine(RuleBasedStateMachine):
    """Three replicas write and exchange updates late, twice, in any order; the model is history.

    A write's history is every write that its replica had seen. What a replica must hold is the
    writes of its history that no other write in it has seen.
    """

    @initialize()
    def start(self) -> None:
        self.tables = {name: ReplicatedTable(name) for name in REPLICAS}
        self.seen: dict[str, set[int]] = {name: set() for name in REPLICAS}
        self.histories: list[set[int]] = []
        self.written: list[Version] = []
        self.sent: list[tuple[tuple[str, Register], set[int]]] = []

    @rule(name=st.sampled_from(REPLICAS), value=st.none() | st.text("xyz", min_size=1, max_size=2),
          time_s=st.integers(0, 3))  # fmt: skip
    def write(self, name: str, value: str | None, time_s: int) -> None:
        update = self.tables[name].write("k", value, time_s=float(time_s))
        number = len(self.histories)
        self.histories.append(set(self.seen[name]))
        self.seen[name].add(number)
        (version,) = update[1].versions
        self.written.append(version)
        self.sent.append((update, set(self.seen[name])))

    @rule(name=st.sampled_from(REPLICAS), pick=st.integers(0, 99))
    def receive(self, name: str, pick: int) -> None:
        if self.sent:
            update, history = self.sent[pick % len(self.sent)]
            self.seen[name] |= history
            assert self.tables[name].apply(update) == (len(self.alive(name)) > 1)

    @rule(name=st.sampled_from(REPLICAS), other=st.sampled_from(REPLICAS))
    def exchange(self, name: str, other: str) -> None:
        self.tables[name].apply(("k", self.tables[other].register("k")))
        self.seen[name] |= self.seen[other]

    def alive(self, name: str) -> set[int]:
        seen = self.seen[name]
        return {
            number for number in seen if not any(number in self.histories[other] for other in seen)
        }

    @invariant()
    def nothing_is_lost_and_equal_histories_agree(self) -> None:
        if not hasattr(self, "tables"):
            return
        for name in REPLICAS:
            found = set(self.tables[name].register("k").versions)
            assert found == {self.written[number] for number in self.alive(name)}
            for other in REPLICAS:
                if self.seen[name] == self.seen[other]:
                    assert self.tables[name].register("k") == self.tables[other].register("k")
                    assert self.tables[name].values() == self.tables[other].values()


ReplicaMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestReplicas = ReplicaMachine.TestCase


def test_conflict_is_found_named_and_ended() -> None:
    one, other = ReplicatedTable("a"), ReplicatedTable("b")
    from_one = one.write("k", "1", time_s=5.0)
    from_other = other.write("k", "2", time_s=4.0)
    assert one.apply(from_other)
    assert other.apply(from_one)
    assert one.conflicts() == other.conflicts() == ["k"]
    assert one.values() == other.values() == {"k": "1"}, "the later write wins"
    healed = other.write("k", "3", time_s=1.0)
    assert not one.apply(healed)
    assert one.values() == {"k": "3"}
    assert not one.apply(from_one), "an old update changes nothing"
    assert one.values() == {"k": "3"}
    one.apply(other.write("k", None, time_s=2.0))
    assert one.values() == {}


@pytest.mark.parametrize("counts", [{"a": -1}, {"": 1}, {"a": 1.5}, {"a": True}])
def test_senseless_counts_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(InputError):
        VersionVector.of(counts)
