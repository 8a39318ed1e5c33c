"""Cosines do not depend on lengths, however short or long a float can make them."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stoker.index.collection import Collection
from stoker.index.collection_build import create_collection
from stoker.index.exact import inverse_norms, row_terms, score_pairs, search_exact
from stoker.index.settings import IndexSettings

DIM = 6


def directions(count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, DIM))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@settings(max_examples=80, deadline=None)
@given(
    row_exponent=st.integers(-36, 18), query_exponent=st.integers(-42, 18), seed=st.integers(0, 999)
)
def test_exact_cosines_are_those_of_the_directions(
    row_exponent: int, query_exponent: int, seed: int
) -> None:
    rows, query = directions(20, seed), directions(1, seed + 1000)
    vectors = (rows * 10.0**row_exponent).astype(np.float32)
    queries = (query * 10.0**query_exponent).astype(np.float32)
    wide = queries.astype(np.float64) / np.linalg.norm(queries.astype(np.float64))
    wanted = (rows @ wide[0]).astype(np.float32)
    scored = score_pairs(vectors, queries[0], "cosine")
    np.testing.assert_allclose(scored, wanted, atol=1e-5)
    terms = row_terms(vectors, "cosine")
    best, scores = search_exact(vectors, terms, queries, 5, metric="cosine")
    np.testing.assert_allclose(scores[0], wanted[best[0]], atol=1e-5)
    np.testing.assert_allclose(scores[0], np.sort(wanted)[::-1][:5], atol=1e-5)


def test_no_length_is_too_short_to_invert() -> None:
    rows = np.array([[1e-45, 0], [0, 0], [3e-39, 0], [2, 0]], np.float32)
    assert np.isfinite(inverse_norms(rows)).all()
    assert inverse_norms(rows)[[1, 3]].tolist() == [0, 0.5]


@pytest.mark.parametrize("exponent", [-41, -30, -20, 0, 17])
def test_a_collection_tells_directions_apart_at_any_length(tmp_path: Path, exponent: int) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=DIM, metric="cosine")
    rows = directions(40, 3)
    vectors = (rows * 10.0**exponent).astype(np.float32)
    # The shortest have few bits left: what counts is what they are as floats.
    wide = vectors.astype(np.float64)
    rows = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    with Collection(path, "rw", settings=IndexSettings(merge_rows=0)) as collection:
        collection.upsert(list(range(40)), vectors)
        for merged in (False, True):
            if merged:
                collection.merge()
            hits = collection.search(vectors, 3, recall_target=0.9999)
            assert hits.ids[:, 0].tolist() == list(range(40))
            wanted = -np.sort(-(rows @ rows.T), axis=1)[:, :3]
            np.testing.assert_allclose(hits.scores, wanted, atol=1e-4)
