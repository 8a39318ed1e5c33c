"""The order of a sealed segment's rows: whatever it is, every row once and the same answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.build import build_segment
from stoker.index.hnsw_graph import HnswGraph
from stoker.index.row_order import HEAT_LOCALITY, ORDERINGS, row_order
from stoker.index.seal import seal_graph
from stoker.index.segment import Segment
from stoker.index.stored_graph import read_graph

SEED = 20_261_205


def graph_of(folder: Path, count: int) -> tuple[HnswGraph, NDArray[np.float32]]:
    rng = np.random.default_rng(SEED)
    # Along few directions, as embeddings: calibration then tries few widths.
    vectors = rng.standard_normal((count, 4)) @ rng.standard_normal((4, 24))
    vectors = (vectors + 0.1 * rng.standard_normal((count, 24))).astype(np.float32)
    build_segment(folder, vectors, metric="l2", m=6, ef_construction=60, threads=1)
    with Segment.open(folder) as segment:
        # Nodes of the graph read back are the segment's rows.
        return read_graph(folder), segment.vectors(np.arange(count))


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> tuple[HnswGraph, NDArray[np.float32]]:
    return graph_of(tmp_path_factory.mktemp("order") / "a", 700)


@settings(max_examples=40)
@given(
    ordering=st.sampled_from(ORDERINGS),
    hot=st.integers(0, 190),
    page_nodes=st.integers(1, 64),
    places=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
def test_every_row_is_there_once_and_levels_are_prefixes(
    linked: tuple[HnswGraph, NDArray[np.float32]],
    ordering: str,
    hot: int,
    page_nodes: int,
    places: int,
    seed: int,
) -> None:
    graph, _ = linked
    rng = np.random.default_rng(seed)
    heat = np.zeros(graph.count, np.float32)
    heat[rng.choice(graph.count, hot, replace=False)] = rng.exponential(1.0, hot)
    place = rng.integers(max(places, 1), size=graph.count).astype(np.uint32)
    order = row_order(
        graph,
        heat if hot else None,
        page_nodes=page_nodes,
        ordering=ordering,
        places=place if places else None,
    )
    np.testing.assert_array_equal(np.sort(order), np.arange(graph.count))
    levels = graph.levels[order].astype(int)
    assert (np.diff(levels) <= 0).all()
    bottom = order[levels == 0]
    if places and (ordering == "locality" or (ordering == HEAT_LOCALITY and not hot)):
        for level in np.unique(levels):
            assert (np.diff(place[order[levels == level]].astype(int)) >= 0).all()
    if ordering == "insertion":
        assert (np.diff(bottom.astype(int)) > 0).all()
    elif ordering == "heat":
        assert (np.diff(heat[bottom]) <= 0).all()
    elif ordering == HEAT_LOCALITY and hot:
        # All that is hot, with what is linked to it, lies before all that is not.
        near = heat > 0
        for row in np.flatnonzero(heat):
            near[graph.level0[row][: graph.level0_counts[row]]] = True
        cold = np.flatnonzero(~near[bottom])
        warm = np.flatnonzero(near[bottom])
        assert not len(cold) or not len(warm) or warm.max() < cold.min()


def test_no_other_ordering_is_taken(linked: tuple[HnswGraph, NDArray[np.float32]]) -> None:
    with pytest.raises(InputError, match=r"ordering: expected one of heat\+locality.*'heap'"):
        row_order(linked[0], None, page_nodes=8, ordering="heap")


def test_answers_do_not_depend_on_the_order(
    tmp_path: Path, linked: tuple[HnswGraph, NDArray[np.float32]]
) -> None:
    graph, vectors = linked
    rng = np.random.default_rng(SEED)
    heat = np.zeros(graph.count, np.float32)
    heat[rng.choice(graph.count, 50, replace=False)] = 1.0
    queries = rng.standard_normal((30, 24)).astype(np.float32)
    answers = []
    for ordering in ORDERINGS:
        folder = tmp_path / ordering
        seal_graph(
            folder,
            graph,
            vectors,
            np.arange(graph.count),
            metric="l2",
            heat=heat,
            ordering=ordering,
        )
        with Segment.open(folder) as segment:
            found = segment.search(queries, 10, ef=300, recall_target=1.0)
            answers.append(segment.ids_at(found.rows))
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])
