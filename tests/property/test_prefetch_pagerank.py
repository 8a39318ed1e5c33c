"""PageRank in its three forms against an exact solve of the linear system."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prefetch.graph import EdgeTable
from stoker.prefetch.pagerank import LooseEdges, pagerank
from stoker.prefetch.rank_tracker import RankTracker, personalised_pagerank

COUNT = 30
T0 = 1_760_000_000.0


def table(edges: list[tuple[int, int]], *, degree: int = 6) -> EdgeTable:
    graph = EdgeTable(degree_max=degree, half_life_s=3600.0, capacity=COUNT)
    add(graph, edges)
    return graph


def columns(edges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    times = T0 + 60.0 * np.arange(len(pairs), dtype=np.float64)
    return pairs[:, 0], pairs[:, 1], times, np.ones(len(pairs))


def add(graph: EdgeTable, edges: list[tuple[int, int]]) -> None:
    graph.add(*columns(edges))
    graph.check()


def matrix(graph: EdgeTable) -> np.ndarray:
    dense = np.zeros((COUNT, COUNT))
    for key in range(COUNT):
        row = graph.out_edges(key)
        total = sum(row.values())
        for head, weight in row.items():
            dense[key, head] = weight / total
    return dense


def exact(dense: np.ndarray, restart: np.ndarray, *, damping: float = 0.85) -> np.ndarray:
    dangling = dense.sum(axis=1) == 0.0
    full = dense.copy()
    full[dangling] = restart
    rank = np.linalg.solve(np.eye(COUNT) - damping * full.T, (1.0 - damping) * restart)
    return np.asarray(rank / rank.sum())


edge_lists = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=150)
UNIFORM = np.full(COUNT, 1.0 / COUNT)


@settings(deadline=None)
@given(edges=edge_lists)
def test_power_iteration_equals_the_exact_solve(edges: list[tuple[int, int]]) -> None:
    graph = table(edges)
    rank = pagerank(graph, COUNT, tolerance=1e-13, steps_max=1000)
    np.testing.assert_allclose(rank, exact(matrix(graph), UNIFORM), atol=1e-9)


@settings(deadline=None)
@given(edges=edge_lists, more=st.lists(edge_lists, max_size=4), cleared=st.integers(0, COUNT - 1))
def test_tracker_equals_the_exact_solve_after_changes(
    edges: list[tuple[int, int]], more: list[list[tuple[int, int]]], cleared: int
) -> None:
    graph = table(edges)
    tracker = RankTracker(graph, COUNT, tolerance=1e-12)
    assert tracker.push(edges_max=10_000_000)
    for batch in more:
        if batch:
            tracker.add_edges(*columns(batch))
    tracker.clear(np.array([cleared]))
    np.testing.assert_allclose(tracker.residual, tracker.true_residual(), atol=1e-9)
    bound = tracker.error_bound
    truth = exact(matrix(graph), UNIFORM)
    unnormalised = np.linalg.solve(np.eye(COUNT) - 0.85 * matrix(graph).T, np.full(COUNT, 0.15))
    assert np.abs(tracker.x - unnormalised).sum() / COUNT <= bound + 1e-9
    assert tracker.push(edges_max=10_000_000)
    np.testing.assert_allclose(tracker.rank(), truth, atol=1e-9)


def test_a_cut_push_goes_on_where_it_stopped() -> None:
    rng = np.random.default_rng(4)
    graph = table([(int(a), int(b)) for a, b in rng.integers(0, COUNT, (200, 2))])
    tracker = RankTracker(graph, COUNT, tolerance=1e-10)
    settled = [tracker.push(edges_max=12) for _ in range(3000)]
    assert not settled[0]
    assert settled[-1]
    np.testing.assert_allclose(tracker.rank(), exact(matrix(graph), UNIFORM), atol=1e-8)


def test_new_keys_enter_with_their_restart_share() -> None:
    graph = EdgeTable(degree_max=4, half_life_s=60.0, capacity=COUNT)
    tracker = RankTracker(graph, 10, tolerance=1e-12)
    tracker.grow(COUNT)
    assert tracker.push()
    np.testing.assert_allclose(tracker.rank(), UNIFORM)


def test_a_push_goes_on_whatever_its_bound() -> None:
    graph = table([(0, 1), (1, 2), (2, 0), (3, 0)])
    tracker = RankTracker(graph, COUNT)
    pushes = 1
    while not tracker.push(edges_max=1):  # less than a row
        pushes += 1
        assert pushes < 10_000
    assert pushes > 1
    rank = exact(matrix(graph), UNIFORM)
    assert np.abs(tracker.rank() - rank).sum() <= 2 * tracker.error_bound + 1e-9


@settings(deadline=None)
@given(edges=edge_lists, seed=st.integers(0, COUNT - 1), other=st.integers(0, COUNT - 1))
def test_push_near_seeds_is_within_its_stated_error(
    edges: list[tuple[int, int]], seed: int, other: int
) -> None:
    graph = table(edges)
    seeds = {seed: 2.0, other: 1.0}
    mass, left = personalised_pagerank(graph, seeds, tolerance=1e-6, pushes_max=100_000)
    restart = np.zeros(COUNT)
    for key, share in seeds.items():
        restart[key] = share / sum(seeds.values())
    truth = np.linalg.solve(np.eye(COUNT) - 0.85 * matrix(graph).T, 0.15 * restart)
    estimate = np.zeros(COUNT)
    estimate[list(mass)] = list(mass.values())
    assert (estimate <= truth + 1e-9).all()
    assert np.abs(truth - estimate).sum() <= left + 1e-9
    assert left <= 1e-6 * COUNT


def test_loose_edges_count_like_those_of_the_table() -> None:
    edges = [(1, 2), (2, 3), (3, 1), (4, 1)]
    whole = table(edges)
    part = table(edges[:2])
    tails, heads, times, amounts = columns(edges)
    loose = LooseEdges(tails[2:], heads[2:], part.weight_of(times[2:], amounts[2:]))
    np.testing.assert_allclose(
        pagerank(part, COUNT, loose=loose), pagerank(whole, COUNT), atol=1e-9
    )


def test_rows_are_bounded_and_the_weakest_goes() -> None:
    graph = table([(0, 1)] * 5 + [(0, 2)] * 3 + [(0, 3), (0, 4)], degree=3)
    assert set(graph.out_edges(0)) == {1, 2, 4}  # of one call the strongest fit; 4 is newer
    graph.add(*columns([(0, 5)]))
    assert set(graph.out_edges(0)) == {1, 2, 5}
    assert graph.edge_count() == 3


def test_renumbering_keeps_edges_among_the_kept() -> None:
    graph = table([(0, 1), (1, 2), (2, 0), (3, 2)])
    graph.keep(np.array([1, 2, 3]))
    graph.check()
    assert [sorted(graph.out_edges(key)) for key in range(3)] == [[1], [], [1]]


def test_empty_graph_has_no_rank() -> None:
    assert len(pagerank(table([]), 0)) == 0
    assert personalised_pagerank(table([]), {}) == ({}, 0.0)
    assert personalised_pagerank(table([]), {3: 1.0})[0] == pytest.approx({3: 0.15})
