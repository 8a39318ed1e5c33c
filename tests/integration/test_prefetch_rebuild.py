"""Heat outlives layout: after a rebuild that permutes everything, it warms as well as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from topic_corpus import ROWS, Vectors, corpus, questions

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.prefetch.coverage_curve import KNOWN
from stoker.prefetch.events import SEARCH_PERFORMED, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.plan import WarmPlan, plan_warm
from stoker.prefetch.protocols import NAVIGATION_STAGE
from stoker.service.collection_index import CollectionIndex

BUDGET_RATIO = 0.5  # links and codes, always needed whole, are a third of so small an index
TENANT = "default"
START_S = 1.75e9


def build(path: Path, vectors: Vectors, order: NDArray[np.int64]) -> Path:
    """Build with rows in ``order``; a passage's id goes where its vector goes."""
    build_collection(path, vectors[order], [f"d{row}" for row in order.tolist()], threads=1)
    return path


def pages_of(index: CollectionIndex, chunk: str) -> frozenset[tuple[str, int]]:
    """Return the page of each later kind that a passage's own heat makes hottest."""
    return frozenset(
        (batch.kind, int(batch.units[0]))
        for batch in index.unit_batches({(TENANT, chunk): 1.0})
        if batch.stage > NAVIGATION_STAGE
    )


def search(path: Path, asked: Vectors) -> list[list[str]]:
    with Collection(path, "r") as collection:
        return [[str(name) for name in collection.search(q, 10).ids] for q in asked]


def warm_set(index: CollectionIndex, graph: HeatGraph | None, now_s: float) -> WarmPlan:
    """Plan half of the bytes, as a server does; without a graph, blindly."""
    return plan_warm(
        index.unit_batches({} if graph is None else graph.demand(now_s)),
        budget_bytes=int(BUDGET_RATIO * index.total_bytes()),
        coverage=KNOWN if graph is None else graph.coverage(now_s),
    )


def coverage(
    path: Path, graph: HeatGraph | None, now_s: float, answers: list[list[str]]
) -> tuple[float, dict[str, frozenset[tuple[str, int]]]]:
    """Return the share of the next accesses that the warm set covers, and where chunks lie.

    An access is one passage of an answer on one of its pages.
    """
    with Collection(path, "r") as collection:
        index = CollectionIndex(collection)
        plan = warm_set(index, graph, now_s)
        warm = {(step.kind, unit) for step in plan.steps for unit in step.units.tolist()}
        where = {chunk: pages_of(index, chunk) for chunk in {c for row in answers for c in row}}
    accesses = [page for row in answers for chunk in row for page in where[chunk]]
    return sum(page in warm for page in accesses) / len(accesses), where


@pytest.mark.parametrize("seed", [1, 2])
def test_permuted_rows_and_pages_keep_the_warm_sets_coverage(tmp_path: Path, seed: int) -> None:
    vectors = corpus()
    order = np.random.default_rng(seed).permutation(ROWS)
    before = build(tmp_path / "before", vectors, np.arange(ROWS))
    after = build(tmp_path / "after", vectors, order)
    graph = HeatGraph()
    graph.apply(
        [
            new_event(
                SEARCH_PERFORMED,
                tenant=TENANT,
                session=f"s{at // 3}",
                chunk_ids=ids,
                time_s=START_S + at,
            )
            for at, ids in enumerate(search(before, questions(vectors, 600, seed=100 + seed)))
        ]
    )
    now_s = START_S + 600.0
    answers = search(before, questions(vectors, 150, seed=200 + seed))
    kept, where = coverage(before, graph, now_s, answers)
    rebuilt, elsewhere = coverage(after, graph, now_s, answers)
    moved = sum(where[chunk] != elsewhere[chunk] for chunk in where)
    assert moved > 0.95 * len(where), "the rebuild left passages where they were"
    assert abs(rebuilt - kept) <= 0.05
    blind, _ = coverage(after, None, now_s, answers)
    assert rebuilt > blind + 0.1
