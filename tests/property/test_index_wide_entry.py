"""Walks that enter the bottom level at many places: what they find, and when they are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.build import build_segment
from stoker.index.calibrated import Calibration, wrong_with
from stoker.index.held_out import recall_of
from stoker.index.manifest import Manifest
from stoker.index.recall_bounds import narrowest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

SEED = 20_261_130
COUNT, DIM, TOPIC = 12_000, 96, 200
TARGET = 0.95
# What 128 queries of a kind, as calibration has, and 400 may differ by: over three standard errors.
NOISE = 0.03


def topics(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Vectors of a few topics, so dense that nearly all links of the bottom stay inside one."""
    centres = np.random.default_rng(SEED).standard_normal((COUNT // TOPIC, DIM))
    drawn = centres[rng.integers(0, len(centres), count)]
    return (drawn + 0.4 * rng.standard_normal((count, DIM))).astype(np.float32)


@pytest.fixture(scope="module", params=["cosine", "l2"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, NDArray[np.float32], str]:
    vectors = topics(np.random.default_rng(SEED + 1), COUNT)
    path = tmp_path_factory.mktemp("entry") / "s"
    build_segment(path, vectors, metric=request.param, m=8, ef_construction=60, threads=1)
    return path, vectors, request.param


def asked(vectors: NDArray[np.float32], sort: str) -> NDArray[np.float32]:
    """Questions of a sort, 400 of them; none of those that calibration asked."""
    rng = np.random.default_rng(SEED + 2)
    base, other = (vectors[rng.integers(0, len(vectors), 400)] for _ in range(2))
    size = np.linalg.norm(base - vectors.mean(axis=0), axis=1, keepdims=True) / np.sqrt(DIM)
    noise = size * rng.standard_normal(base.shape)
    made = {
        "near": base + rng.uniform(0.1, 0.5, (400, 1)) * noise,
        "far": base + rng.uniform(0.9, 1.7, (400, 1)) * noise,
        "between": 0.6 * base + 0.4 * other + 0.3 * noise,
        "half and half": 0.5 * base + 0.5 * other,
        "random": noise,
    }
    return made[sort].astype(np.float32)


def truth(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], metric: str
) -> NDArray[np.int64]:
    """The ten nearest rows of each query, int64, shape (nq, 10), in no order."""
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = queries @ vectors.T
    if metric == "l2":
        scores = 2 * scores - (vectors**2).sum(axis=1)
    best: NDArray[np.int64] = np.argpartition(-scores, 10, axis=1)[:, :10]
    return best


def without_entries(manifest: Manifest) -> Manifest:
    """As a segment that was sealed before such walks were measured."""
    assert manifest.calibration is not None
    blank = {
        name: () for name in vars(manifest.calibration) if "entry_" in name and name != "entry_cost"
    }
    older = dataclasses.replace(manifest.calibration, **blank)  # type: ignore[arg-type]
    return dataclasses.replace(manifest, calibration=older)


@pytest.mark.parametrize("bits", [4, 2])
def test_a_wide_entry_finds_queries_that_one_place_loses(
    made: tuple[Path, NDArray[np.float32], str], bits: int
) -> None:
    path, vectors, metric = made
    queries = asked(vectors, "between")
    want = truth(vectors, queries, metric)
    lost = []
    with Segment.open(path, settings=IndexSettings(navigation_bits=bits)) as segment:
        for entry_ef in (None, 1, 64):
            # Settled by vectors: else what one batch may lack depends on those before it.
            hits = segment.search(queries, 10, ef=64, entry_ef=entry_ef, recall_target=0.99)
            recall = recall_of(segment.ids_at(hits.rows), want)
            assert (recall < hits.summary.recall_bound - 1e-6).mean() <= 0.05
            lost.append(int((recall < 0.5).sum()))
        for wrong in ({"entry_ef": 1}, {"ef": 8, "entry_ef": 9}, {"ef": 8, "entry_ef": 0}):
            with pytest.raises(InputError, match="entry_ef"):
                segment.search(queries, 10, **wrong)  # type: ignore[arg-type]
    assert lost[0] == lost[1]
    assert lost[1] >= 20
    assert lost[2] <= lost[1] / 4


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("sort", ["near", "far", "between", "half and half", "random"])
def test_the_target_takes_a_wide_entry_where_it_pays_and_promises_hold(
    made: tuple[Path, NDArray[np.float32], str],
    opened: Callable[..., Segment],
    sort: str,
    bits: int,
) -> None:
    path, vectors, metric = made
    queries = asked(vectors, sort)
    want = truth(vectors, queries, metric)
    manifest = Manifest.read(path)
    assert bits == 4 or manifest.has_coarse
    work = []
    for known in (manifest, without_entries(manifest)):
        with opened(path, bits, known) as segment:
            hits = segment.search(queries, 10, recall_target=TARGET)
            work.append(sum(segment.page_counts()))
            if known is manifest:
                recall = recall_of(segment.ids_at(hits.rows), want)
                # Calibration never saw these; of 5 % stated, the worst sort broke 2.8.
                assert (recall < hits.summary.recall_bound - 1e-6).mean() <= 0.05
                if sort in ("near", "far", "between"):
                    assert recall.mean() >= TARGET - NOISE
    # Most near ones have enough with a narrow walk at one place, which both have.
    assert work[0] < (1.1 if sort == "near" else 0.85) * work[1]


def test_a_filter_a_deadline_and_memory_alone_enter_widely_too(
    made: tuple[Path, NDArray[np.float32], str],
) -> None:
    path, vectors, metric = made
    queries = asked(vectors, "between")[:100]
    whole = truth(vectors, queries, metric)
    even = np.arange(COUNT) % 2 == 0
    with Segment.open(path) as segment:
        # Nothing of the bottom is in memory yet, and there is no time to read it.
        late = segment.search(queries, 10, deadline_s=0.0)
        recall = recall_of(segment.ids_at(late.rows), whole)
        assert (recall < late.summary.recall_bound - 1e-6).mean() <= 0.05
        assert (late.summary.completeness < 1).all()
        assert late.summary.deadline_hit.all()
        ids = segment.ids_at(np.arange(COUNT)[None])[0]
        allow = np.packbits(even[ids], bitorder="little")
        found = segment.ids_at(segment.search(queries, 10, allow=allow).rows)
        assert even[found].all()
        want = 2 * truth(vectors[::2], queries, metric)
        assert recall_of(found, want).mean() >= TARGET - NOISE
        there = segment.search(queries, 10, resident_only=True)
        recall = recall_of(segment.ids_at(there.rows), whole)
        assert (recall < there.summary.recall_bound - 1e-6).mean() <= 0.05


def test_the_cheapest_walk_that_is_enough_is_chosen(
    made: tuple[Path, NDArray[np.float32], str],
) -> None:
    manifest = Manifest.read(made[0])
    assert manifest.calibration is not None
    known = dataclasses.replace(
        manifest.calibration,
        ef=(10, 20, 40),
        recall_mean=(0.5, 0.7, 0.9),
        entry_mean=(0.6, 0.9, 0.92),
        entry_cost=1.5,
    )
    assert narrowest(known, 4, wanted=0.45) == (10, False)
    assert narrowest(known, 4, wanted=0.55) == (10, True)
    assert narrowest(known, 4, wanted=0.7) == (20, False)
    assert narrowest(known, 4, wanted=0.85) == (20, True)
    assert narrowest(known, 4, wanted=0.91) == (40, True)
    # None is enough: the one that finds most.
    assert narrowest(known, 4, wanted=0.99) == (40, True)
    dear = dataclasses.replace(known, entry_cost=2.5)
    assert narrowest(dear, 4, wanted=0.85) == (40, False)
    older = dataclasses.replace(known, entry_mean=())
    assert narrowest(older, 4, wanted=0.85) == (40, False)
    assert narrowest(older, 4, wanted=0.99) == (40, False)


def test_what_no_writer_writes_of_wide_entries_is_refused(
    made: tuple[Path, NDArray[np.float32], str],
) -> None:
    manifest = Manifest.read(made[0])
    known = manifest.calibration
    assert known is not None
    assert known.entry_cost > 1
    assert wrong_with(known, has_coarse=manifest.has_coarse) is None
    for wrong in (
        {"entry_mean": known.entry_mean[1:]},
        {"entry_low": ()},
        {"entry_strange_low": (*known.entry_strange_low[1:], -0.5)},
        {"coarse_entry_mean": ()},
        {"entry_cost": 0.0},
        {"entry_cost": float("nan")},
        {"entry_cost": "1.5"},
    ):
        fields: dict[str, Any] = {**vars(known), **wrong}
        damaged = Calibration(**fields)
        assert wrong_with(damaged, has_coarse=manifest.has_coarse) is not None
