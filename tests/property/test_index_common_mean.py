"""Rows of about one length with a common mean: what they have along it costs codes nothing."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import stoker.index.seal as seal
from stoker.index.build import build_segment
from stoker.index.manifest import Manifest
from stoker.index.recall_bounds import nearness
from stoker.index.row_length import common_length2
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

SEED = 20_261_130
ROWS = 400
DIM = 96


def unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))


def drawn(rng: np.random.Generator, count: int, mean: float) -> NDArray[np.float64]:
    """Unit rows whose mean is ``mean`` times as long as what they differ by."""
    rows = rng.standard_normal((count, DIM)) / np.sqrt(DIM)
    rows[:, 0] += mean
    return unit(rows)


def found_by_codes(
    path: Path, queries: NDArray[np.float64], k: int, bits: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What a scan of codes finds, with no vector and no second code: ids, and scores."""
    chosen = IndexSettings(navigation_bits=bits)
    with Segment.open(path, memory_bytes=0, settings=chosen) as segment:
        for batch in segment.unit_batches():
            if batch.kind in ("upper", "links", "codes" if bits == 4 else "coarse"):
                segment.load_units(batch.kind, batch.units)
        asked = queries.astype(np.float32)
        hits = segment.search(asked, k, ef=segment.count, resident_only=True)
        return segment.ids_at(hits.rows), hits.scores


def recall(found: NDArray[np.int64], scores: NDArray[np.float64], k: int) -> float:
    best = np.argsort(-scores, axis=1)[:, :k]
    return float((found[:, :, None] == best[:, None, :]).any(1).mean())


@pytest.mark.parametrize(("metric", "mean"), [("cosine", 1.0), ("cosine", 10.0), ("ip", 3.0)])
def test_codes_tell_apart_what_lies_in_the_means_direction(
    tmp_path: Path, metric: str, mean: float
) -> None:
    """Estimated with the rest, what rows have along their mean left 0.3 to 0.9 of ten found."""
    rng = np.random.default_rng(SEED + int(mean))
    rows = drawn(rng, ROWS, mean)
    kept = rows * (rng.uniform(0.5, 2.0, (ROWS, 1)) if metric == "cosine" else 7.0)
    build_segment(tmp_path / "s", kept.astype(np.float32), metric=metric, threads=1)
    centre = rows.mean(axis=0)
    away = np.sqrt(((rows - centre) ** 2).sum(axis=1).mean())
    for share in (0.0, 0.05):
        aside = away * share * rng.standard_normal((30, DIM)) / np.sqrt(DIM)
        queries = 3.0 * unit(centre + aside)
        for bits, least in ((4, 0.95), (2, 0.85)):
            found, _ = found_by_codes(tmp_path / "s", queries, 10, bits)
            assert recall(found, queries @ rows.T, 10) > least, (share, bits)
    # And better what lies anywhere else, since less of it is estimated.
    queries = unit(rows[:30] + away * rng.standard_normal((30, DIM)) / np.sqrt(DIM))
    found, scores = found_by_codes(tmp_path / "s", queries, 10, 4)
    assert recall(found, queries @ rows.T, 10) > 0.75
    worst = np.abs(scores - np.take_along_axis(queries @ kept.T, found, 1)) if metric == "ip" else 0
    assert np.max(worst) < 7.0 * 0.1 * away


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_rows_that_are_shorter_or_nothing_keep_their_place(
    tmp_path: Path, metric: str, bits: int
) -> None:
    """Their codes say so too: all scores, of shorter rows and of zeros, lie near the true ones."""
    rng = np.random.default_rng(SEED + 1)
    rows = drawn(rng, ROWS, 2.0)
    rows[::200] = 0
    rows[1::50] *= 0.97
    build_segment(tmp_path / "s", rows.astype(np.float32), metric=metric, threads=1)
    kept = unit(rows) if metric == "cosine" else rows
    queries = np.concatenate([drawn(rng, 10, 2.0), -drawn(rng, 5, 2.0), kept.mean(0)[None]])
    queries = unit(queries)
    with Segment.open(tmp_path / "s") as segment:
        assert segment.manifest.row_length2 == pytest.approx(1.0)
    found, scores = found_by_codes(tmp_path / "s", queries, ROWS, bits)
    assert (np.sort(found, axis=1) == np.arange(ROWS)).all()
    truth = np.take_along_axis(queries @ kept.T, found, 1)
    assert np.abs(scores - truth).max() < (0.1 if bits == 4 else 0.4)
    # In the mean's direction nothing is estimated.
    assert np.abs(scores[-1] - truth[-1]).max() < 1e-5


@pytest.mark.parametrize("phase", range(4))
def test_rows_whose_lengths_come_in_a_rhythm_have_no_one_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    """A sample in step with them saw one length: answers took codes for exact, and read nothing."""
    monkeypatch.setattr(seal, "_CENTRE_ROWS", ROWS // 4)
    rows = drawn(np.random.default_rng(SEED + 2), ROWS, 1.0)
    rows[phase::4] *= 2.0
    build_segment(tmp_path / "s", rows.astype(np.float32), metric="ip", threads=1)
    assert Manifest.read(tmp_path / "s").row_length2 == 0.0


@settings(max_examples=60)
@given(
    metric=st.sampled_from(["ip", "cosine", "l2"]), mean=st.sampled_from([0.0, 0.3, 3.0, 300.0]),
    lengths=st.sampled_from([0.0, 1e-4, 0.02, 0.5]), scale=st.sampled_from([1e-15, 1.0, 1e12]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_rows_have_one_length_where_it_tells_what_they_have_along_their_mean(
    metric: str, mean: float, lengths: float, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = drawn(rng, 500, mean)
    if metric != "cosine":
        rows *= scale * (1 + lengths * rng.uniform(-1, 1, (500, 1)))
    centre = rows.mean(axis=0)
    lengths2 = (rows**2).sum(axis=1)
    length2 = common_length2(metric, centre.astype(np.float32), lengths2)
    if metric == "l2" or mean == 0.0 or mean == 300.0:
        assert length2 == 0.0
    elif metric == "cosine":
        assert length2 == 1.0
    elif length2:
        assert length2 == lengths2.max()
        away2 = ((rows - centre) ** 2).sum(axis=1).mean()
        assert (length2 - lengths2).mean() <= 0.1001 * away2
    else:
        assert lengths > 1e-4 or not 1e-10 < scale < 1e10
    assert common_length2(metric, centre.astype(np.float32), lengths2[:0]) == 0.0


@given(
    metric=st.sampled_from(["ip", "cosine"]),
    mean=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_what_lies_in_the_means_direction_is_not_near(metric: str, mean: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = drawn(rng, 200, mean)
    centre = rows.mean(axis=0)
    queries = np.concatenate([rows[:20], centre[None], -centre[None], np.zeros((1, DIM))])
    scores = (unit(queries) if metric == "cosine" else queries) @ rows.T
    near = nearness(
        scores.max(axis=1),
        queries.astype(np.float32),
        metric=metric,
        centre=centre.astype(np.float32),
        spread=0.0,
        row_length2=1.0,
    )
    np.testing.assert_allclose(near[:20], 1.0, atol=1e-5)
    cosines = (unit(queries[20:22]) @ rows.T).max(axis=1)
    assert near[20] < min(0.65, cosines[0] - 0.1)
    assert near[21] <= cosines[1] + 1e-6
    assert np.isnan(near[22])
