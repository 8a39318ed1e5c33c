"""Queries unlike all that calibration's kinds cover: walked on for; promises hold.

None of the sorts below is drawn as calibration draws. Nothing here was used to choose a rule. A
query that lies no farther than known ones is taken for one of them: it keeps their width, and is
promised what they reach. Left out are queries in the direction of the rows' mean under cosine: such
are near all rows, nothing tells them apart, and on coarse codes a quarter of them broke the bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.calibrated import BANDS_MAX, Calibration, wrong_with
from stoker.index.exact import unit_rows
from stoker.index.held_out import recall_of
from stoker.index.manifest import Manifest
from stoker.index.recall_bounds import FACTS
from stoker.index.segment import Segment, SegmentHits
from stoker.index.settings import IndexSettings

SEED = 20_261_201
COUNT, DIM, ASKED = 8_000, 96, 300
Opener = Callable[..., Segment]
# Stated, and by how much a sample of so many may be off: two standard errors.
BROKEN = 0.05 + 0.025
# What may be missed of the target by those that are walked on for: queries at equal distance are
# not all as hard.
NOISE = 0.05


def stored(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Topics in a subspace, as encoders leave them, far from the origin."""
    fixed = np.random.default_rng(SEED)
    scale = np.linspace(1.0, 0.1, DIM)
    centres = fixed.standard_normal((COUNT // 40, DIM)) * scale
    drawn = centres[rng.integers(0, len(centres), count)]
    return (drawn + 0.5 * rng.standard_normal((count, DIM)) * scale + 0.3).astype(np.float32)


def sorts(vectors: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Questions by sort, `ASKED` of each."""
    rng = np.random.default_rng(SEED + 1)
    fixed = np.random.default_rng(SEED + 2)
    centre = vectors.mean(axis=0)
    about = vectors - centre
    size = np.linalg.norm(about, axis=1).mean()
    scale = np.linspace(1.0, 0.1, DIM)
    drawn = vectors[rng.integers(0, COUNT, ASKED)]
    turned = np.linalg.qr(fixed.standard_normal((DIM, DIM)))[0]
    other = fixed.standard_normal((50, DIM)) * scale
    corpus = other[rng.integers(0, 50, ASKED)] + 0.5 * rng.standard_normal((ASKED, DIM)) * scale
    parts = about[rng.integers(0, COUNT, (3, ASKED))].sum(axis=0)
    made = {
        "another corpus": corpus + 0.3,
        "rotated": (drawn - centre) @ turned + centre,
        "another mean": drawn + size * turned[0],
        "three, subtracted and added": centre + parts - 2 * about[rng.integers(0, COUNT, ASKED)],
        "long": centre + 5.0 * corpus,
    }
    return {name: queries.astype(np.float32) for name, queries in made.items()}


@pytest.fixture(scope="module", params=["cosine", "l2"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, NDArray[np.float32], str]:
    vectors = stored(np.random.default_rng(SEED + 3), COUNT)
    path = tmp_path_factory.mktemp("strange") / "s"
    build_segment(path, vectors, metric=request.param, ef_construction=100, threads=1)
    return path, vectors, request.param


def truth(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], metric: str
) -> NDArray[np.int64]:
    x, q = vectors.astype(np.float64), queries.astype(np.float64)
    scores = q @ (unit_rows(vectors).astype(np.float64) if metric == "cosine" else x).T
    if metric == "l2":
        scores = 2 * scores - (x * x).sum(axis=1)
    best: NDArray[np.int64] = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    return best


def column(hits: SegmentHits, name: str) -> NDArray[np.float64]:
    """What the native search says of itself; before anybody asks for the summary."""
    facts: Any = hits._facts
    values: NDArray[np.float64] = facts.columns()[:, FACTS.index(name)]
    return values


def without_bands(manifest: Manifest) -> Manifest:
    """As a segment that was sealed before strange queries were parted."""
    known = manifest.calibration
    assert known is not None
    width = len(known.ef)
    older = {
        name: values[-width:]
        for name, values in vars(known).items()
        if "strange" in name and isinstance(values, tuple) and len(values) > width
    }
    unsure = {name: () for name in vars(known) if name.endswith("strange_sure")}
    changed: dict[str, Any] = {**older, **unsure, "strange_below": (), "by_k": ()}
    blank = dataclasses.replace(known, **changed)
    assert wrong_with(blank, has_coarse=manifest.has_coarse) is None
    return dataclasses.replace(manifest, calibration=blank)


@pytest.mark.parametrize("bits", [4, 2])
def test_strange_queries_reach_the_target_and_what_is_promised(
    made: tuple[Path, NDArray[np.float32], str], opened: Opener, bits: int
) -> None:
    path, vectors, metric = made
    target = IndexSettings().recall_target
    checked = 0
    with (
        opened(path, bits) as segment,
        opened(path, bits, without_bands(segment.manifest)) as before,
    ):
        known = segment.calibration
        assert known is not None
        for name, queries in sorts(vectors).items():
            want = truth(vectors, queries, metric)
            hits, earlier = segment.search(queries, 10), before.search(queries, 10)
            assert (column(earlier, "farther") == 0).all()
            on = column(hits, "farther") > 0
            recall = recall_of(segment.ids_at(hits.rows), want)
            earlier_recall = recall_of(before.ids_at(earlier.rows), want)
            broken = (recall < hits.summary.recall_bound - 1e-6).mean()
            assert broken <= BROKEN, f"{name}: {broken}"
            assert recall.mean() >= earlier_recall.mean() - 1e-6, name
            if on.sum() >= 100:
                checked += 1
                assert recall[on].mean() >= target - NOISE, name
                assert recall[on].mean() >= earlier_recall[on].mean() + 0.02, name
    assert checked >= 2


def test_known_queries_walk_as_before(
    made: tuple[Path, NDArray[np.float32], str], opened: Opener
) -> None:
    """Only what lies farther than 99 of 100 known queries is walked on for."""
    path, vectors, _ = made
    rng = np.random.default_rng(SEED + 4)
    base, other = (vectors[rng.integers(0, COUNT, ASKED)] for _ in range(2))
    noise = rng.standard_normal(base.shape) / DIM**0.5
    noise *= np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean()
    with opened(path, 4) as segment, opened(path, 4, without_bands(segment.manifest)) as before:
        for queries in (base + 0.4 * noise, 0.6 * base + 0.4 * other + 0.3 * noise):
            asked = queries.astype(np.float32)
            hits, earlier = segment.search(asked, 10), before.search(asked, 10)
            same = column(hits, "farther") == 0
            assert same.mean() >= 0.97
            work, worked = column(hits, "evaluated"), column(earlier, "evaluated")
            np.testing.assert_array_equal(work[same], worked[same])
            np.testing.assert_array_equal(hits.rows[same], earlier.rows[same])


def test_a_filter_a_given_width_and_a_past_deadline_are_not_walked_on_for(
    made: tuple[Path, NDArray[np.float32], str], opened: Opener
) -> None:
    path, vectors, metric = made
    queries = sorts(vectors)["rotated"]
    allow = np.packbits(np.ones(COUNT, np.bool_), bitorder="little")
    with opened(path, 4) as segment:
        assert column(segment.search(queries, 10), "farther").any()
        assert not column(segment.search(queries, 10, ef=64), "farther").any()
        assert not column(segment.search(queries, 10, allow=allow), "farther").any()
        late = segment.search(queries, 10, deadline_s=0.0)
        assert not column(late, "farther").any()
        recall = recall_of(segment.ids_at(late.rows), truth(vectors, queries, metric))
        assert (recall < late.summary.recall_bound - 1e-6).mean() <= BROKEN


def test_half_of_the_vectors_reach_what_calibration_says_of_them(
    made: tuple[Path, NDArray[np.float32], str],
) -> None:
    path, vectors, metric = made
    rng = np.random.default_rng(SEED + 5)
    base = vectors[rng.integers(0, COUNT, ASKED)]
    noise = rng.standard_normal(base.shape) / DIM**0.5
    noise *= np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean()
    queries = (base + rng.uniform(0.3, 1.6, (ASKED, 1)) * noise).astype(np.float32)
    with Segment.open(path, settings=IndexSettings(navigation_bits=4)) as segment:
        known = segment.calibration
        assert known is not None
        assert known.half_recall is not None
        assert known.half_low is not None
        assert known.refined_recall - 0.01 <= known.half_recall <= known.recall_mean[-1] + 0.01
        for batch in segment.unit_batches():
            units = batch.units
            if batch.kind == "vectors":
                units = rng.permutation(units)[: len(units) // 2]
            segment.load_units(batch.kind, units)
        hits = segment.search(queries, 10, ef=known.ef[-1], resident_only=True)
        recall = recall_of(segment.ids_at(hits.rows), truth(vectors, queries, metric))
        assert (recall < known.half_low - 1e-6).mean() <= BROKEN
        assert (recall < hits.summary.recall_bound - 1e-6).mean() <= BROKEN
        assert abs(recall.mean() - known.half_recall) <= 0.03


def test_recall_by_vectors_in_memory_goes_through_the_measured_half() -> None:
    whole = dict.fromkeys(("upper", "links", "codes", "refine"), 1.0)
    known = Calibration(
        queries=10, k=10, confidence=0.95, ef=(10,), recall_mean=(0.99,), recall_low=(0.9,),
        upper_mean=0.1, upper_low=0.0, code_recall=0.9, refined_recall=0.95, code_error=0.1,
        refine_error=0.01, half_recall=0.98, half_low=0.9,
    )  # fmt: skip
    older = dataclasses.replace(known, half_recall=None, half_low=None)
    for share, now, before in (
        (0, 0.95, 0.95),
        (0.25, 0.965, 0.96),
        (0.5, 0.98, 0.97),
        (1, 0.99, 0.99),
    ):
        coverage = whole | {"vectors": float(share)}
        assert known.recall_from_memory(4, coverage) == pytest.approx(now)
        assert older.recall_from_memory(4, coverage) == pytest.approx(before)


def test_what_no_writer_writes_of_bands_is_refused(
    made: tuple[Path, NDArray[np.float32], str],
) -> None:
    manifest = Manifest.read(made[0])
    known = manifest.calibration
    assert known is not None
    # A band more than were found here, as far as the last.
    doubled: dict[str, Any] = {
        name: values + values[-len(known.ef) :]
        for name, values in vars(known).items()
        if "strange" in name and isinstance(values, tuple) and len(values) >= len(known.ef)
    }
    doubled["by_k"] = ()
    doubled["strange_below"] = (*known.strange_below, known.strange_below[-1] - 0.1)
    known = dataclasses.replace(known, **doubled)
    assert wrong_with(known, has_coarse=manifest.has_coarse) is None
    for wrong in (
        {"strange_below": known.strange_below[::-1]},
        {"strange_below": known.strange_below[:1]},
        {"strange_below": tuple(-float(i) for i in range(BANDS_MAX + 1))},
        {"strange_below": (float("nan"), *known.strange_below[1:])},
        {"strange_mean": known.strange_mean[1:]},
        {"strange_sure": known.strange_sure[1:]},
        {"entry_strange_sure": ()},
        {"half_recall": 1.5},
        {"half_low": "0.5"},
    ):
        fields: dict[str, Any] = {**vars(known), **wrong}
        assert wrong_with(Calibration(**fields), has_coarse=manifest.has_coarse) is not None
