"""Small sets within a tenth of their bytes reach the default target on queries nobody drew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.index.build import build_segment
from stoker.index.held_out import recall_of
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

QUERIES = 400
# Of the mean of so many, two standard deviations.
NOISE = 0.02


@pytest.mark.parametrize(
    ("count", "dim", "metric"),
    [(2_500, 384, "ip"), (1_500, 128, "l2"), (2_000, 200, "cosine")],
)
def test_small_sets_reach_the_target_within_a_tenth_of_their_bytes(
    count: int, dim: int, metric: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(count)
    centres = rng.standard_normal((12, dim))
    spread = np.linspace(1.0, 0.1, dim)  # so that coarse codes have directions to choose
    vectors = centres[rng.integers(0, 12, count)] * 0.6 + rng.standard_normal((count, dim)) * spread
    vectors = vectors.astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric=metric, threads=1)
    base, other = (vectors[rng.integers(0, count, QUERIES)] for _ in range(2))
    size = np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean()
    noise = rng.standard_normal(base.shape) * size / dim**0.5
    asked = {
        "near": base + 0.4 * noise,
        "far": base + 1.2 * noise,
        "between": 0.6 * base + 0.4 * other + 0.3 * noise,
    }
    stored = vectors
    if metric == "cosine":
        stored = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    target = IndexSettings().recall_target
    with Segment.open(tmp_path / "s", memory_bytes=0) as segment:
        budget = segment.manifest.total_bytes // 10
        assert segment.manifest.has_coarse
    with Segment.open(tmp_path / "s", memory_bytes=budget) as segment:
        assert segment.navigation_bits == 2
        for sort, drawn in asked.items():
            queries = drawn.astype(np.float32)
            scores = queries @ stored.T
            if metric == "l2":
                scores = 2 * scores - (stored**2).sum(axis=1)
            want = np.argsort(-scores, axis=1)[:, :10]
            hits = segment.search(queries, 10)
            recall = recall_of(segment.ids_at(hits.rows), want)
            assert recall.mean() >= target - NOISE, sort
            assert (recall < hits.summary.recall_bound - 1e-6).mean() <= 0.05, sort
