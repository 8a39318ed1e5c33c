"""A receipt's prediction holds where the traffic stays the same, and its error shows where not.

A real index, its own answers as the accesses, and the runner of a server; the law of the questions
is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from topic_corpus import ROWS, Vectors, corpus, questions

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.prefetch.events import SEARCH_PERFORMED, Event, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.receipt import Receipt
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.collection_index import CollectionIndex
from stoker.service.warmup import WarmupRunner

LEARNT, FOLLOWED = 600, 200  # searches; each finds ten passages
TENANT = "default"
START_S = 1.75e9
# The standard error of 200 answers' share is 3.5 points at most, of what was learnt 2.
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "index"
    build_collection(path, corpus(), [f"d{row}" for row in range(ROWS)], threads=1)
    return path


def searches(index: CollectionIndex, asked: Vectors, *, from_s: float) -> list[Event]:
    """Search, which reads pages on demand too, and give the events."""
    return [
        new_event(
            SEARCH_PERFORMED,
            tenant=TENANT,
            session=f"s{at // 3}",
            chunk_ids=[str(name) for name in index.search(question, 10).ids],
            time_s=from_s + at,
        )
        for at, question in enumerate(asked)
    ]


@pytest.fixture
def index(built: Path) -> Iterator[CollectionIndex]:
    found = CollectionIndex(Collection(built, "r"))
    yield found
    found.close()


def receipt_of(index: CollectionIndex, *, budget_ratio: float, turned: bool) -> Receipt:
    """Learn, warm by what was learnt, serve, and measure as a server does."""
    vectors, graph, now_s = corpus(), HeatGraph(), START_S + LEARNT
    learnt = questions(vectors, LEARNT, seed=101, turned=False)
    graph.apply(searches(index, learnt, from_s=START_S))
    runner = WarmupRunner(
        index.warm_sources,
        lambda: graph.demand(now_s),
        settings=PrefetchSettings(),
        receipt_path=None,
        coverage=lambda: graph.coverage(now_s),
        held_back=lambda: graph.held_back_later(now_s)(),
        accesses_since=graph.accesses_since,
        wall=lambda: now_s - 0.5,
    )
    runner.start(budget_bytes=int(budget_ratio * index.total_bytes()), deadline_s=None)
    runner.wait(60.0)
    runner.measure()
    assert runner.receipt is not None
    assert runner.receipt.measured_hit_ratio is None  # nothing has followed yet
    following = questions(vectors, FOLLOWED, seed=201, turned=turned)
    graph.apply(searches(index, following, from_s=now_s))
    runner.measure()
    return runner.receipt


@pytest.mark.parametrize("budget_ratio", [0.1, 0.2, 0.3, 1.0])
def test_the_same_law_gives_what_was_predicted(index: CollectionIndex, budget_ratio: float) -> None:
    receipt = receipt_of(index, budget_ratio=budget_ratio, turned=False)
    assert receipt.measured_accesses == 10 * FOLLOWED
    assert receipt.prediction_error == pytest.approx(0.0, abs=TOLERANCE)


def test_traffic_that_turned_elsewhere_shows_as_an_error(index: CollectionIndex) -> None:
    # Half of what a walk looks at lies anywhere, so a turn never costs all that was predicted.
    receipt = receipt_of(index, budget_ratio=0.15, turned=True)
    assert receipt.prediction_error is not None
    assert receipt.prediction_error < -1.2 * TOLERANCE


def test_nothing_warmed_serves_nothing_whatever_demand_has_read(index: CollectionIndex) -> None:
    receipt = receipt_of(index, budget_ratio=0.0, turned=False)
    (upper,) = [line for line in receipt.lines if line.planned]  # always planned
    assert upper.kind == "upper"
    # Its pages and the ids, once: what the searches before had read of them is not its doing.
    assert upper.bytes_read <= upper.planned_bytes + 20 * ROWS
    hits, misses = index.page_counts()
    assert hits / (hits + misses) > 0.95
    assert receipt.measured_hit_ratio is not None
    assert receipt.measured_hit_ratio < 0.2  # what the upper pages are worth
