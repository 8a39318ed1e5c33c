"""The true neighbors that calibration gathers while vectors stream by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from stoker.index import calibration
from stoker.index.build import build_segment
from stoker.index.calibration import _target_mean, _worst_kind
from stoker.index.held_out import KINDS, Probe
from stoker.index.segment import Segment


@settings(max_examples=50)
@given(
    count=st.integers(64, 400),
    steps=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    metric=st.sampled_from(["ip", "l2"]),
    few_values=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_however_vectors_are_cut_into_batches_the_nearest_are_kept(
    count: int, steps: list[int], metric: str, few_values: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 6)).astype(np.float32)
    if few_values:
        vectors = np.round(vectors)  # many ties
    probe = Probe.draw(vectors, np.arange(count), metric=metric)
    assert probe is not None
    at = number = 0
    while at < count:
        step = steps[number % len(steps)]
        probe.take(vectors[at : at + step], at)()
        at, number = at + step, number + 1
    scores = probe.queries @ vectors.T
    if metric == "l2":
        scores = 2.0 * scores - (vectors * vectors).sum(axis=1)
    k = probe.rows.shape[1]
    np.testing.assert_allclose(probe.scores, -np.sort(-scores, axis=1)[:, :k], rtol=1e-5, atol=1e-5)
    found = np.take_along_axis(scores, probe.rows, axis=1)
    np.testing.assert_allclose(found, probe.scores, rtol=1e-5, atol=1e-5)
    assert all(len(set(rows)) == k for rows in probe.rows.tolist())


def test_random_queries_that_fare_well_do_not_raise_what_a_kind_is_promised() -> None:
    kinds = len(KINDS)
    recall = np.ones(128 * kinds)
    recall[:: 32 * kinds] = 0.2  # 4 of the first kind's 128: too many to be sure of the share.
    alone = _worst_kind(recall, np.empty(0))
    assert alone[:2] == (1.0 - 0.8 / 32, 0.2)
    assert _worst_kind(recall, np.ones(128)) == alone
    assert _worst_kind(recall, np.zeros(128)) == (alone.mean, 0.0, alone.sure)


def test_the_kind_that_no_target_is_kept_for_is_left_out_of_the_means_too() -> None:
    kinds = len(KINDS)
    recall = np.tile([0.9, 0.8, 0.7, 0.1], 128)[: 128 * kinds - 3]
    assert KINDS[-1] == "halves"
    assert abs(_target_mean(recall) - np.mean([0.9] * 128 + [0.8] * 127 + [0.7] * 127)) < 1e-12
    assert _worst_kind(recall, np.empty(0))[0] <= _target_mean(recall)


def test_bands_part_all_that_lie_farther_than_known_queries() -> None:
    vectors = np.random.default_rng(3).standard_normal((4000, 8)).astype(np.float32)
    probe = Probe.draw(vectors, np.arange(4000), metric="l2")
    assert probe is not None
    near = np.random.default_rng(4).uniform(0.0, 1.0, len(probe.queries))
    near[-3:] = np.nan  # As near to nothing as can be.
    strange = near[probe.known :]
    edges, bands = probe.strange_bands(near, 0.9)
    assert edges[0] == 0.9
    assert list(edges) == sorted(edges, reverse=True)
    assert len(edges) == len(bands) > 1
    np.testing.assert_array_equal(np.sum(bands, axis=0), ~(strange >= 0.9))
    assert max(band.sum() for band in bands) - min(band.sum() for band in bands) <= 1
    for below, band in zip(edges, bands, strict=True):
        assert not (strange[band] >= below).any()
    assert bands[-1][-3:].all()
    # Where next to none lies so far, all of them are one band.
    assert [band.all() for band in probe.strange_bands(near, -1.0)[1]] == [True]


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_who_has_found_all_is_not_asked_again_and_means_are_those_of_asking_everybody(
    metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(11)
    centres = rng.standard_normal((20, 24))
    vectors = centres[rng.integers(0, 20, 1_500)] + 0.5 * rng.standard_normal((1_500, 24))
    walk = calibration._found
    probes: list[Probe] = []
    widest: dict[Any, int] = {}
    whole: dict[Any, set[bytes]] = {}

    def found(
        segment: Segment, probe: Probe, width: int, *, widely: bool = False
    ) -> NDArray[np.int64]:
        rows = walk(segment, probe, width, widely=widely)
        sort = (segment.navigation_bits, probe.rows.shape[1], widely)
        if width <= widest.get(sort, 0):
            whole[sort] = set()  # It began anew.
        widest[sort] = width
        asked = [query.tobytes() for query in probe.queries]
        assert whole.setdefault(sort, set()).isdisjoint(asked), (sort, width)
        done = probe.recall_of(rows) >= 1.0
        whole[sort] |= {query for query, all_found in zip(asked, done, strict=True) if all_found}
        probes.append(probe)
        return rows

    monkeypatch.setattr(calibration, "_found", found)
    build_segment(tmp_path / "s", vectors.astype(np.float32), metric=metric, threads=1)
    everybody = max((p for p in probes if p.rows.shape[1] == 10), key=lambda p: len(p.queries))
    with Segment.open(tmp_path / "s") as segment:
        known = segment.manifest.calibration
        assert known is not None
        kinds = np.arange(everybody.known) % len(KINDS)
        for width, mean in zip(known.ef, known.recall_mean, strict=True):
            recall = everybody.recall_of(walk(segment, everybody, width))[: everybody.known]
            worst = min(recall[kinds == kind].mean() for kind in range(len(KINDS) - 1))
            # From 192 on half of the queries speak for all; for one in a thousand none is asked.
            assert abs(worst - mean) <= (0.002 if width < 192 else 0.01)
    assert len(whole) >= 4
