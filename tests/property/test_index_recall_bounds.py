"""What answers promise, to queries like those of calibration and to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.exact import unit_rows
from stoker.index.held_out import recall_of
from stoker.index.recall_bounds import FACTS, ChosenWalk, WalkRecall, summarize
from stoker.index.segment import Segment

SEED = 20_261_203


def clusters(rng: np.random.Generator, count: int, dim: int, number: int) -> NDArray[np.float32]:
    """A few clusters far from each other."""
    centres = rng.standard_normal((number, dim))
    drawn = centres[rng.integers(0, number, count)] + 0.3 * rng.standard_normal((count, dim))
    return drawn.astype(np.float32)


def exact_rows(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int, metric: str
) -> NDArray[np.int64]:
    """Rows of the true neighbors."""
    if metric == "cosine":
        vectors, queries = unit_rows(vectors), unit_rows(queries)
    x, q = vectors.astype(np.float64), queries.astype(np.float64)
    scores = q @ x.T
    if metric == "l2":
        scores = 2 * scores - (x * x).sum(axis=1)
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.float32]]:
    vectors = clusters(np.random.default_rng(SEED), 2000, 24, 100)
    path = tmp_path_factory.mktemp("sealed") / "s"
    build_segment(path, vectors, metric="l2", ef_construction=60, threads=1)
    return path, vectors


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_recall_bounds_hold_on_queries_at_random(
    metric: str, tmp_path: Path, opened: Callable[..., Segment]
) -> None:
    """Clusters, asked by who knows nothing of them, at the vectors' own length and beyond it."""
    rng = np.random.default_rng(SEED + 31)
    vectors = clusters(rng, 3000, 96, 8)
    build_segment(tmp_path / "s", vectors, metric=metric, ef_construction=60, threads=1)
    random = rng.standard_normal((300, 96))
    asked = {
        "near": vectors[:300] + 0.12 * rng.standard_normal((300, 96)),
        "random": random,
        "random, long": 5 * random,
        "half random": 0.5 * vectors[:300] + random,
    }
    for bits in (2, 4):
        bounds: dict[str, float] = {}
        with opened(tmp_path / "s", bits) as segment:
            assert segment.calibration is not None
            allowed = 1 - segment.calibration.confidence + 0.02
            for name, queries in asked.items():
                questions = queries.astype(np.float32)
                truth = exact_rows(vectors, questions, 10, metric)
                for ef in (16, 192):
                    hits = segment.search(questions, 10, ef=ef)
                    met = recall_of(segment.ids_at(hits.rows), truth)
                    broken = float(np.mean(met < hits.summary.recall_bound - 1e-6))
                    assert broken <= allowed, f"{name}, {bits} bits, ef {ef}: {broken}"
                bounds[name] = float(hits.summary.recall_bound.mean())
        # What is known well is promised all the same.
        assert bounds["near"] > 0.25


def test_nothing_is_promised_to_queries_beyond_all_that_was_asked(
    sealed: tuple[Path, NDArray[np.float32]],
) -> None:
    path, vectors = sealed
    with Segment.open(path) as segment:
        known = segment.search(vectors[:50], 10, ef=400).summary
        far = segment.search(1e4 * vectors[:50], 10, ef=400).summary
        assert known.recall_bound.mean() > 0.5
        assert (far.recall_bound == 0).all()
        assert (far.completeness == 1).all()


@pytest.mark.parametrize("kinds", [(), ("links",), ("codes",), ("refine", "vectors")])
def test_an_answer_from_next_to_nothing_says_so(
    sealed: tuple[Path, NDArray[np.float32]], kinds: tuple[str, ...]
) -> None:
    """Without the upper levels there is no way to the bottom, whatever of it is there."""
    path, vectors = sealed
    for question in ({"resident_only": True}, {"deadline_s": 0.0}):
        with Segment.open(path) as segment:
            for batch in segment.unit_batches():
                if batch.kind in kinds:
                    segment.load_units(batch.kind, batch.units)
            hits = segment.search(vectors[:5], 10, **question)  # type: ignore[arg-type]
            assert (hits.rows == -1).all()
            assert (hits.summary.completeness == 0).all()
            assert (hits.summary.recall_bound == 0).all()
            assert (hits.summary.expected_recall == 0).all()


def test_fewer_hits_than_there_are_promise_no_more_than_their_share() -> None:
    """A walk that was complete by its own account, and yet came back with 4 of 10."""
    facts = np.zeros((3, len(FACTS)))
    facts[:, FACTS.index("expected_recall")] = 1.0
    facts[:, [FACTS.index("expanded"), FACTS.index("evaluated")]] = 50
    facts[:, FACTS.index("found")] = 4, 10, 0
    walk = ChosenWalk(64, 1, WalkRecall(1.0, 1.0), None, 0.0)
    said = summarize(facts, np.ones(3), k=10, possible=500, walk=walk, calibration=None)
    assert said.recall_bound.tolist() == pytest.approx([0.4, 1.0, 0.0])
    assert said.expected_recall.tolist() == pytest.approx([0.4, 1.0, 0.0])
    few = summarize(facts, np.ones(3), k=10, possible=4, walk=walk, calibration=None)
    assert few.recall_bound[0] == 1.0
