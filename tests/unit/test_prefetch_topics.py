"""Terms and query clusters as nodes: what they are, how they fade, what they lead to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.prefetch.topics import QueryClusters, Terms, TopicHeat, blend

pytest.importorskip("sklearn")

HOUR = 3600.0


def test_the_rarest_terms_come_first_and_stop_words_never() -> None:
    terms = Terms(per_text_max=4)
    for _ in range(5):
        terms.of("the library and the exam")
    found = terms.of("The library opens for Ramanujan")
    assert ("term", "ramanujan") in found
    assert len(found) == 4
    assert ("term", "library") not in found
    assert ("term", "the") not in found
    assert terms.of("") == []


def test_counted_terms_are_bounded() -> None:
    terms = Terms(terms_max=10)
    for i in range(50):
        terms.of(f"word{i} other{i}")
    assert len(terms._seen) == 10


def blob(random: np.random.Generator, centre: float) -> np.ndarray:
    return np.asarray(centre + 0.05 * random.standard_normal(4), np.float32)


def test_clusters_are_found_and_follow_drift_under_their_numbers() -> None:
    random = np.random.default_rng(1)
    clusters = QueryClusters(2, window=100, refit_every=50)
    names = [clusters.of(blob(random, float(i % 2)))for i in range(100)]  # fmt: skip
    assert names[0] == []  # nothing is known yet
    even, odd = set(map(tuple, names[60::2])), set(map(tuple, names[61::2]))
    assert len(even) == len(odd) == 1
    assert even != odd
    for step in range(1, 9):  # one of them wanders off
        for i in range(50):
            named = clusters.of(blob(random, 0.0 if i % 2 == 0 else 1.0 + 0.25 * step))
            assert (tuple(named) in even) == (i % 2 == 0)
    assert clusters.drift > 0.05


def test_clusters_are_the_same_for_the_same_queries() -> None:
    def run() -> list[list[tuple[str, str]]]:
        random = np.random.default_rng(2)
        clusters = QueryClusters(4, window=60, refit_every=30)
        return [clusters.of(blob(random, float(i % 4))) for i in range(200)]

    assert run() == run()


def test_impossible_clusters_are_refused() -> None:
    with pytest.raises(InputError, match="clusters"):
        QueryClusters(0)
    with pytest.raises(InputError, match="refit_every"):
        QueryClusters(8, refit_every=4)


def test_a_hot_node_lifts_its_chunks_by_their_share() -> None:
    heat = TopicHeat(node_half_life_s=HOUR, edge_half_life_s=24 * HOUR)
    exam, bus = ("term", "exam"), ("term", "bus")
    heat.observe([exam], [("t", "a"), ("t", "b")], 0.0)
    heat.observe([exam], [("t", "a")], 0.0)
    heat.observe([bus], [("t", "c")], 0.0)
    lift = heat.lift(0.0)
    assert lift == pytest.approx({("t", "a"): 4 / 3, ("t", "b"): 2 / 3, ("t", "c"): 1.0})
    later = heat.lift(HOUR)
    assert later == pytest.approx({key: value / 2 for key, value in lift.items()})
    heat.observe([bus], [], 2 * HOUR)
    assert heat.lift(2 * HOUR)[("t", "c")] == pytest.approx(1.25)
    heat.check()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.floats(0.0, 1e6)), max_size=120)
)
def test_bounds_hold_and_late_events_add_no_more_than_they_are(
    rows: list[tuple[int, int, float]],
) -> None:
    heat = TopicHeat(nodes_max=5, edges_max=4)
    for node, chunk, time_s in rows:
        heat.observe([("cluster", str(node))], [("t", str(chunk))], time_s)
        heat.check()
    lift = heat.lift(1e6)
    assert all(value >= 0.0 for value in lift.values())
    assert sum(lift.values()) <= len(rows) + 1e-6


def test_blending_keeps_the_total() -> None:
    demand = {("t", "a"): 3.0, ("t", "b"): 1.0}
    mixed = blend(demand, {("t", "c"): 10.0}, share=0.25)
    assert mixed == pytest.approx({("t", "a"): 2.25, ("t", "b"): 0.75, ("t", "c"): 1.0})
    assert math.isclose(sum(mixed.values()), 4.0)
    assert blend(demand, {}, share=0.25) == demand
    assert blend({}, {("t", "c"): 1.0}, share=0.25) == {}
