"""What answers promise holds for every k, of data where recall of ten says nothing of another.

A few rows are near everything there, or no link leads to most, or scores have few values.
Calibration saw none of these queries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.calibrated import Calibration, KTable, wrong_with
from stoker.index.k_tables import for_k
from stoker.index.segment import Segment, SegmentHits
from stoker.index.settings import IndexSettings

SEED = 20_261_130
COUNT = 1_600
ASKED = 160
KS = (1, 3, 10, 30, 100, 300)
# Standard errors that a mean of draws may be off: with so many cases one in fifty thousand is.
SIGMAS = 4.0

Opener = Callable[..., Segment]


def gaussian(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    return rng.standard_normal((COUNT, dim))


def popular(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    """Fifty rows that are near a half of all queries, and far from the other."""
    drawn = gaussian(rng, dim)
    drawn[:50] *= 20
    return drawn


def one_long(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    drawn = gaussian(rng, dim)
    drawn[:, 7] *= 100
    return drawn


def clustered(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    centres = rng.standard_normal((40, dim))
    return centres[rng.integers(0, 40, COUNT)] + 0.4 * gaussian(rng, dim)


def heavy_tailed(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    return gaussian(rng, dim) * np.exp(0.5 * rng.standard_normal((COUNT, 1)))


SORTS: dict[str, tuple[str, int, Callable[[np.random.Generator, int], NDArray[Any]]]] = {
    "far from the origin": ("ip", 48, lambda rng, dim: gaussian(rng, dim) + 30),
    "popular rows": ("ip", 48, popular),
    "one long dimension": ("ip", 48, one_long),
    "whole numbers": ("ip", 48, lambda rng, dim: rng.integers(0, 4, (COUNT, dim))),
    "binary": ("l2", 48, lambda rng, dim: rng.integers(0, 2, (COUNT, dim))),
    "heavy-tailed": ("l2", 72, heavy_tailed),
    "gaussian": ("cosine", 48, gaussian),
    "clustered": ("cosine", 72, clustered),
}


@dataclasses.dataclass
class Made:
    """A sealed segment, its vectors, queries, and the exact ranks of each row for each query."""

    path: Path
    vectors: NDArray[np.float32]
    queries: NDArray[np.float32]
    ranks: NDArray[np.float64]

    def recall(self, segment: Segment, hits: SegmentHits, k: int) -> NDArray[np.float64]:
        """Share of each answer that is no farther than the k-th neighbor: ties are as good."""
        least = -np.partition(-self.ranks, k - 1, axis=1)[:, k - 1 : k]
        ids = segment.ids_at(hits.rows)
        found = np.take_along_axis(self.ranks, np.maximum(ids, 0), axis=1)
        good: NDArray[np.bool_] = (ids >= 0) & (found >= least - 1e-6 * np.abs(least))
        return np.minimum(good.mean(axis=1), 1.0)


def make(path: Path, sort: str) -> Made:
    """Draw a sort's vectors and queries, and seal a segment at ``path``."""
    metric, dim, draw = SORTS[sort]
    rng = np.random.default_rng(SEED)
    vectors = np.asarray(draw(rng, dim), np.float32)
    # Half of what is asked is stored; the other half lies beside it.
    queries = vectors[rng.choice(COUNT, ASKED, replace=False)]
    queries[::2] += (0.3 * vectors.std(axis=0) * rng.standard_normal((ASKED // 2, dim))).astype(
        "f4"
    )
    build_segment(path, vectors, metric=metric, ef_construction=60, threads=1)
    x, q = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    ranks = q @ x.T
    if metric == "l2":
        ranks = 2 * ranks - (x * x).sum(axis=1)
        ranks -= (q * q).sum(axis=1, keepdims=True)
    return Made(path, vectors, queries, ranks)


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Make each sort once."""
    root = tmp_path_factory.mktemp("by_k")
    return functools.cache(lambda sort: make(root / sort.replace(" ", "-"), sort))


@pytest.mark.parametrize(
    ("sort", "bits"),
    # Short vectors have no coarse codes.
    [
        (sort, bits)
        for sort, (_, dim, _) in SORTS.items()
        for bits in ((4, 2) if dim > 64 else (4,))
    ],
)
def test_of_every_k_answers_reach_what_they_state(
    maker: Callable[[str], Made], opened: Opener, sort: str, bits: int
) -> None:
    made = maker(sort)
    with opened(made.path, bits) as segment:
        assert segment.navigation_bits == bits
        known = segment.calibration
        assert known is not None
        miss = 1 - known.confidence
        allowed = miss + SIGMAS * (miss * (1 - miss) / ASKED) ** 0.5
        for k in KS:
            measured = min((for_k(known, k).queries, 256)) / 4
            for ef in (None, 64, 400):
                hits = segment.search(made.queries, k, ef=ef)
                recall = made.recall(segment, hits, k)
                what = f"{sort}, {bits} bits, k {k}, ef {ef}"
                broken = float((recall < hits.summary.recall_bound - 1e-6).mean())
                assert broken <= allowed, f"{what}: {broken:.2f} of bounds are broken"
                # Both what was measured and what is found here are means of draws.
                stated = float(hits.summary.expected_recall.mean())
                spread = max(float(recall.std()), (stated * (1 - stated) / k) ** 0.5)
                off = SIGMAS * spread * (1 / ASKED + 1 / measured) ** 0.5
                assert recall.mean() >= stated - off - 0.005, f"{what}: {stated:.3f} is stated"


@pytest.mark.parametrize("sort", SORTS)
def test_a_few_rows_are_scanned_where_no_walk_finds_enough(
    maker: Callable[[str], Made], opened: Opener, sort: str
) -> None:
    made = maker(sort)
    target = IndexSettings().recall_target
    with opened(made.path, 4) as segment:
        for k in (1, 10, 100):
            hits = segment.search(made.queries, k)
            recall = made.recall(segment, hits, k).mean()
            noise = SIGMAS * (target * (1 - target) / ASKED / k**0.5) ** 0.5
            assert recall >= target - noise, f"{sort}, k {k}: {recall:.3f}"
            # Whoever gives a width has a walk.
            assert not segment.search(made.queries, k, ef=100).summary.scanned.any()
        scanned = segment.search(made.queries, 100).summary.scanned
        if sort == "popular rows":
            assert scanned.all()
        elif sort == "gaussian":
            assert not scanned.any()
    if sort == "popular rows":
        # Codes that have no room would be read anew by each query.
        with Segment.open(made.path, memory_bytes=1) as small:
            assert not small.search(made.queries[:5], 100).summary.scanned.any()
            # And nothing better was found by that than is said.
            assert small.search(made.queries[:5], 100).summary.recall_bound.max() < 0.9


BLANK = Calibration(
    queries=1024,
    k=10,
    confidence=0.95,
    ef=(10, 20, 40),
    recall_mean=(0.8, 0.9, 0.95),
    recall_low=(0.5, 0.7, 0.9),
    upper_mean=0.0,
    upper_low=0.0,
    code_recall=0.0,
    refined_recall=0.0,
    code_error=0.0,
    refine_error=0.0,
    scan=(0.99, 0.9),
)


def with_hundred(means: tuple[float, ...], lows: tuple[float, ...]) -> Calibration:
    lists = {"recall_mean": means, "recall_low": lows}
    one = KTable(1, 1024, BLANK.ef, {"recall_mean": (0.6,) * 3, "recall_low": (0.0,) * 3}, (1, 1))
    hundred = KTable(100, 256, (100, 200, 400), lists, (0.995, 0.97))
    return dataclasses.replace(BLANK, by_k=(one, hundred))


def test_between_measured_k_the_worse_of_both_counts() -> None:
    known = with_hundred((0.7, 0.95, 0.96), (0.6, 0.65, 0.95))
    assert for_k(known, 10).recall_mean == BLANK.recall_mean
    assert for_k(known, 100).ef == (100, 200, 400)
    thirty = for_k(known, 30)
    assert thirty.ef == (30, 60, 120)
    assert thirty.recall_mean == (0.7, 0.9, 0.95)
    assert thirty.recall_low == (0.5, 0.65, 0.9)
    # Of thirty a scan may lose all that it loses of a hundred.
    assert thirty.scan == pytest.approx((1 - 0.005 / 0.3, 0.9))
    assert for_k(known, 3).recall_mean == (0.6,) * 3
    assert for_k(known, 1).scan == (1, 1)


def test_beyond_all_measured_k_only_what_was_measured_is_promised() -> None:
    known = with_hundred((0.7, 0.8, 0.9), (0.6, 0.6, 0.9))
    thousand = for_k(known, 1000)
    assert thousand.ef == (1000, 2000, 4000)
    # Walks so wide find what the widest found of the hundred best.
    assert thousand.recall_low == pytest.approx((0.09,) * 3)
    # It fell from ten to a hundred: of the next nine hundred all is lost, two thirds, a third.
    expected = [max((mean + 9 * (1 - (1 - mean) / 0.3)) / 10, 0.09) for mean in (0.7, 0.8, 0.9)]
    assert thousand.recall_mean == pytest.approx(expected)
    # And where it does not fall it does not rise.
    assert for_k(with_hundred((0.9,) * 3, (0.9,) * 3), 1000).recall_mean[0] == pytest.approx(0.9)


def test_segments_that_know_ten_alone_are_scaled_as_ever() -> None:
    assert for_k(BLANK, 100) is BLANK


def test_what_no_writer_writes_of_other_k_is_refused() -> None:
    known = with_hundred((0.7,) * 3, (0.6,) * 3)
    fields: dict[str, Any] = vars(known)
    one, hundred = known.by_k
    bad = dataclasses.replace
    assert wrong_with(bad(known, scan=()), has_coarse=False) is None
    for wrong in (
        {"by_k": (hundred, one)},
        {"by_k": (bad(one, k=10), hundred)},
        {"by_k": (one, bad(hundred, ef=(100, 100, 400)))},
        {"by_k": (one, bad(hundred, ef=()))},
        {"by_k": (one, bad(hundred, queries=0))},
        {"by_k": (one, bad(hundred, scan=(0.9,)))},
        {"by_k": (one, bad(hundred, scan=(0.9, float("nan"))))},
        {"by_k": (one, bad(hundred, recall={**hundred.recall, "recall_low": (0.1, 0.2)}))},
        {"by_k": (one, bad(hundred, recall={**hundred.recall, "recall": (0.1,) * 3}))},
        {"scan": (0.9, 0.9, 0.9)},
        {"scan": (0.9, "x")},
    ):
        changed: dict[str, Any] = {**fields, **wrong}
        assert wrong_with(Calibration(**changed), has_coarse=False) is not None, wrong
