"""Batches, whose doubtful queries are settled while later ones walk, against singles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.index.build import build_segment
from stoker.index.exact import search_exact
from stoker.index.held_out import recall_of
from stoker.index.manifest import FILES
from stoker.index.paged_file import HEADER_BYTES, PagedFile
from stoker.index.segment import Segment, SegmentHits
from stoker.index.settings import IndexSettings

SEED = 20_261_130
FACTS = ("completeness", "recall_bound", "expected_recall", "exact_share", "deadline_hit")


def drawn(
    rng: np.random.Generator, count: int, dim: int, asked: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Vectors in loose clusters, and queries near some of them."""
    centres = rng.standard_normal((count // 20, dim))
    vectors = centres[rng.integers(0, len(centres), count)] + rng.standard_normal((count, dim))
    near = vectors[rng.integers(0, count, asked)] + 0.4 * rng.standard_normal((asked, dim))
    return vectors.astype(np.float32), near.astype(np.float32)


def one_by_one(
    segment: Segment, queries: NDArray[np.float32], k: int, **asked: Any
) -> list[SegmentHits]:
    """Ask each query alone."""
    return [segment.search(queries[i : i + 1], k, **asked) for i in range(len(queries))]


def test_a_batch_in_memory_answers_as_its_queries_do(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    for number, metric in enumerate(("ip", "cosine", "l2")):
        count, dim = int(rng.integers(300, 3_000)), int(rng.integers(2, 60))
        vectors, queries = drawn(rng, count, dim, 90)
        path = tmp_path / metric
        build_segment(path, vectors, metric=metric, threads=1)
        allow = np.packbits(rng.random(count) < 0.4, bitorder="little")
        for threads in (1, 3):
            with Segment.open(path, settings=IndexSettings(search_threads=threads)) as segment:
                for batch in segment.unit_batches():
                    segment.load_units(batch.kind, batch.units)
                for k, filtered in ((1, None), (10, allow), (50, None)):
                    together = segment.search(queries, k, allow=filtered)
                    alone = one_by_one(segment, queries, k, allow=filtered)
                    assert together.summary.rounds.max() == 0, number
                    for i, single in enumerate(alone):
                        assert np.array_equal(together.rows[i], single.rows[0])
                        assert np.array_equal(together.scores[i], single.scores[0])
                        for fact in FACTS:
                            assert getattr(together.summary, fact)[i] == pytest.approx(
                                getattr(single.summary, fact)[0]
                            )


@pytest.fixture(scope="module")
def sealed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, NDArray[np.float32], NDArray[np.float32]]:
    """A segment of 96 dimensions, its vectors, and queries."""
    vectors, queries = drawn(np.random.default_rng(SEED + 1), 6_000, 96, 300)
    path = tmp_path_factory.mktemp("batches") / "s"
    build_segment(path, vectors, metric="l2", threads=1)
    return path, vectors, queries


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_under_a_budget_reads_no_more_and_finds_as_much(
    sealed: tuple[Path, NDArray[np.float32], NDArray[np.float32]], bits: int, threads: int
) -> None:
    """Under a budget that holds what walks need and next to nothing of what settles answers."""
    path, vectors, queries = sealed
    truth = search_exact(
        vectors, np.einsum("ij,ij->i", vectors, vectors), queries, 10, metric="l2"
    )[0]
    settings = IndexSettings(search_threads=threads, navigation_bits=bits)
    with Segment.open(path, settings=settings) as whole:
        walked = {"upper", "links", "coarse" if bits == 2 else "codes"}
        kinds = whole.resident().kinds
        needed = sum(kind.pages * kind.page_bytes for kind in kinds if kind.kind in walked)
    # The first: lower than that, codes of four bits leave less in doubt than may be lost.
    lowest = 0.9 if bits == 2 else 0.98
    for spare, target, size in ((64, lowest, 300), (400, 0.97, 40), (400, 0.995, 300)):
        found, read = {}, {}
        for way in ("singles", "batches"):
            budget = needed + spare * 4_096
            with Segment.open(path, memory_bytes=budget, settings=settings) as segment:
                for batch in segment.unit_batches():
                    if batch.kind in walked:
                        segment.load_units(batch.kind, batch.units, sticky=True)
                before = segment.pool_stats()["demand_bytes"]
                answers = [
                    segment.search(queries[i : i + step], 10, ef=60, recall_target=target)
                    for step in (size if way == "batches" else 1,)
                    for i in range(0, len(queries), step)
                ]
                bytes_read = sum(int(hits.summary.bytes_read.sum()) for hits in answers)
                # Who read what is told exactly, though several share a read.
                assert bytes_read == segment.pool_stats()["demand_bytes"] - before
                assert segment.pool_stats()["resident_bytes"] <= budget
                assert all((hits.summary.completeness == 1).all() for hits in answers)
                rows = segment.ids_at(np.concatenate([hits.rows for hits in answers]))
                found[way], read[way] = float(recall_of(rows, truth).mean()), bytes_read
        assert read["batches"] > 0
        assert read["batches"] <= 1.3 * read["singles"]
        assert found["batches"] >= found["singles"] - 0.01
        assert found["batches"] >= 0.85


def test_damaged_pages_cost_a_batch_no_more_than_its_singles(
    sealed: tuple[Path, NDArray[np.float32], NDArray[np.float32]], tmp_path: Path
) -> None:
    """Damage in what settles answers: each is given, once, from what is sound."""
    source, _, queries = sealed
    path = tmp_path / "damaged"
    shutil.copytree(source, path)
    for part in ("refine", "vectors"):
        pages = PagedFile(path / FILES[part], kind=part).info
        raw = bytearray((path / FILES[part]).read_bytes())
        for page in range(0, pages.page_count, 2):
            raw[HEADER_BYTES + page * pages.page_bytes + 77] ^= 4
        (path / FILES[part]).write_bytes(bytes(raw))
    settings = IndexSettings(search_threads=1)
    with Segment.open(path, settings=settings) as segment, Segment.open(source) as sound:
        together = segment.search(queries, 10, ef=60, recall_target=0.995)
        want = sound.search(queries, 10, ef=60, recall_target=0.995)
        assert (together.rows >= 0).all()
        assert (np.diff(together.scores, axis=1) >= 0).all()
        assert segment.pool_stats()["checksum_failures"] > 0
        assert (together.summary.exact_share < want.summary.exact_share).any()
        same = (together.rows[:, :, None] == want.rows[:, None, :]).any(axis=1).mean()
        assert same > 0.9
