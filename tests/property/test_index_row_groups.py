"""Groups of near rows, by which a sealed segment's rows are laid out: near rows share one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.index.row_groups import GROUP_ROWS, group_rows

SEED = 20_261_130


def groups_of(vectors: NDArray[np.float32], seed: int = SEED) -> NDArray[np.uint32]:
    return group_rows(lambda rows: vectors[rows], len(vectors), seed=seed)


@settings(max_examples=15)
@given(
    count=st.integers(0, 3_000),
    dim=st.integers(2, 90),
    distinct=st.integers(1, 3_000),
    scale=st.sampled_from([0.0, 1e-40, 1e-18, 1.0, 1e12, 1e33]),
    far=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_row_has_a_group_and_threads_change_nothing(
    count: int, dim: int, distinct: int, scale: float, far: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((distinct, dim)).astype(np.float32) * np.float32(scale)
    vectors = vectors[rng.integers(distinct, size=count)] + np.float32(1e4 * scale * far)
    found = groups_of(vectors, seed)
    assert found.shape == (count,)
    assert found.dtype == np.uint32
    wanted = -(-count // GROUP_ROWS)
    assert count == 0 or found.max() < 2 * wanted + 2
    if wanted < 2:
        assert not found.any()
    with ThreadPoolExecutor(2) as pool:
        again = group_rows(lambda rows: vectors[rows], count, seed=seed, run=pool.map)
    np.testing.assert_array_equal(found, again)


def test_rows_longer_than_any_of_the_sample_have_a_group() -> None:
    rng = np.random.default_rng(SEED)
    vectors = rng.standard_normal((30_000, 8)).astype(np.float32)
    vectors[rng.choice(len(vectors), 3, replace=False)] *= np.float32(1e37)
    assert len(np.unique(groups_of(vectors))) > 1


def test_few_vectors_are_held_at_a_time() -> None:
    vectors = np.random.default_rng(SEED).standard_normal((200_000, 2)).astype(np.float32)
    asked: list[int] = []

    def read(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        assert (np.diff(rows) > 0).all()
        asked.append(len(rows))
        return vectors[rows]

    group_rows(read, len(vectors), seed=SEED)
    # What directions are found on is read once, by one thread; all else by as many as there are.
    assert asked[0] <= 16_384
    assert max(asked[1:]) <= 2_048


@pytest.mark.parametrize("far", [0.0, 20.0, 1e4])
def test_what_lies_together_is_grouped_together(far: float) -> None:
    # As many topics as groups: few groups hold most of a topic, and hold little else.
    rng = np.random.default_rng(SEED)
    topics, each, dim = 24, 400, 96
    centres = rng.standard_normal((topics, dim)).astype(np.float32) + np.float32(far)
    of = rng.permutation(np.repeat(np.arange(topics), each))
    noise = rng.standard_normal((topics * each, dim)).astype(np.float32)
    found = groups_of(centres[of] + np.float32(0.3) * noise)
    for group in np.unique(found):
        members = np.bincount(of[found == group], minlength=topics)
        # A group may be of two topics, but is never spread over all of them.
        assert np.count_nonzero(members > 0.02 * members.sum()) <= 4
    spread = [len(np.unique(found[of == topic])) for topic in range(topics)]
    assert np.mean(spread) <= 5, f"seed {SEED}"
