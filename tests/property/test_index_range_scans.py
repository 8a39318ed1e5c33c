"""Queries that cannot walk yet scan groups of near rows: in few rounds, and as good as promised."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import stoker.index.range_table as range_table
import stoker.index.segment as segment_room
import stoker.index.segment_pages as segment_pages
from stoker.errors import CorruptError
from stoker.index.build import build_segment
from stoker.index.held_out import recall_of
from stoker.index.manifest import FILES, Manifest
from stoker.index.paged_file import HEADER_BYTES, PagedFile, PagedFileWriter
from stoker.index.range_recall import SMALL_SHARE, RangeRecall, choose_ranges
from stoker.index.range_table import Ranges, ranges_of
from stoker.index.recall_bounds import FACTS
from stoker.index.segment import Segment, SegmentHits

pytestmark = pytest.mark.usefixtures("many_codes")

SEED = 20_261_130
COUNT, DIM, K = 6_000, 48, 10
QUERIES = 150


@pytest.fixture(scope="module")
def many_codes(small_groups: None) -> Iterator[None]:
    """Have links and codes count as many, as of a large segment: else only the hurried scan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_pages, "_FEW_BYTES", 0)
        yield


def drawn(
    metric: str, seed: int = SEED
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """Clustered vectors, and queries of four sorts of which sealing saw none."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((COUNT // 60, DIM))
    vectors = centres[rng.integers(0, len(centres), COUNT)]
    vectors = vectors + 0.4 * rng.standard_normal((COUNT, DIM))
    if metric != "l2":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    size = np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean() / DIM**0.5
    base, other = (vectors[rng.integers(0, COUNT, QUERIES)] for _ in range(2))
    noise = size * rng.standard_normal(base.shape)
    sorts = {
        "near": base + 0.3 * noise,
        "far": base + noise,
        "between": 0.6 * base + 0.4 * other + 0.3 * noise,
        "strange": 1.5 * noise,
    }
    return vectors.astype(np.float32), {n: q.astype(np.float32) for n, q in sorts.items()}


def nearest(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], metric: str
) -> NDArray[np.int64]:
    scores = queries @ vectors.T
    if metric == "l2":
        scores = 2 * scores - (vectors**2).sum(axis=1)
    found: NDArray[np.int64] = np.argsort(-scores, axis=1)[:, :K]
    return found


@pytest.fixture(scope="module", params=["ip", "l2", "cosine"])
def sealed(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    small_groups: None,
) -> tuple[Path, str]:
    metric = request.param
    path = tmp_path_factory.mktemp("ranges") / metric
    build_segment(path, drawn(metric)[0], metric=metric, threads=1)
    return path, metric


def facts(hits: SegmentHits) -> dict[str, NDArray[np.float64]]:
    """Columns of what the native search said of itself."""
    columns = hits._facts.columns()
    return dict(zip(FACTS, columns.T, strict=True))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=30),
    runs=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_groups_part_the_rows_and_none_is_large(sizes: list[int], runs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)
    # As levels and heat cut each group into runs.
    places = places[np.lexsort((places, rng.integers(0, runs, len(places))))]
    found = ranges_of(places)
    if len(places) < 64:
        assert found is None
        return
    assert isinstance(found, Ranges)
    listed = np.full(len(places), -1)
    for group in range(found.groups):
        for first, rows in found.pieces[found.first_piece[group] : found.first_piece[group + 1]]:
            assert rows > 0
            assert (listed[first : first + rows] == -1).all()
            listed[first : first + rows] = group
    np.testing.assert_array_equal(listed, found.group_of_row)
    held = np.bincount(found.group_of_row)
    assert held.min() > 0
    assert held.max() <= range_table._ROWS_MAX
    small = found.in_small_piece()
    for group in range(found.groups):
        for first, rows in found.pieces[found.first_piece[group] : found.first_piece[group + 1]]:
            is_small = rows * SMALL_SHARE < held[group]
            assert (small[first : first + rows] == is_small).all()
    # What is of one group is of one place.
    for group in range(found.groups):
        assert len(set(places[found.group_of_row == group].tolist())) == 1


@settings(max_examples=100)
@given(
    shares=st.lists(st.floats(0.5, 1.0), min_size=3, max_size=3),
    target=st.floats(0.5, 0.999),
    seed=st.integers(0, 2**16),
)
def test_the_fewest_groups_are_chosen_that_hold_what_the_target_asks(
    shares: list[float], target: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = (4, 8, 16, 32)
    kinds = np.sort(rng.uniform(min(shares), 1.0, (3, len(groups))), axis=1)
    overall, worst = kinds.mean(axis=0), kinds.min(axis=0)
    measured = RangeRecall(K, groups, tuple(overall), tuple(worst), (0.0,) * 4, (), ())
    chosen = choose_ranges([measured], K, target)
    lost, lost_worst = (1 - overall) / (1 - target), (1 - worst) / (1 - target)
    if chosen is None:
        assert lost[-1] > 0.94 or lost_worst[-1] > 1.49
        return
    at = groups.index(chosen.groups)
    assert lost[at] <= 0.96
    assert lost_worst[at] <= 1.51
    assert at == 0 or lost[at - 1] > 0.94 or lost_worst[at - 1] > 1.49
    assert choose_ranges([measured], K + 1, target) is None


def test_a_query_with_nothing_loaded_reads_in_three_rounds_and_finds_the_target(
    sealed: tuple[Path, str],
) -> None:
    path, metric = sealed
    vectors, sorts = drawn(metric)
    for sort, queries in sorts.items():
        with Segment.open(path) as segment:
            want = nearest(vectors, queries, metric)
            answers = [segment.search(query[None, :], K) for query in queries]
            found = np.concatenate([segment.ids_at(hits.rows) for hits in answers])
            recall = recall_of(found, want)
            grouped = [facts(hits)["range_groups"][0] > 0 for hits in answers]
            bounds = np.array([hits.summary.recall_bound[0] for hits in answers])
            expected = np.mean([hits.summary.expected_recall[0] for hits in answers])
        assert grouped[0], sort
        # The table, the codes, and what settles: two helpings and vectors at most.
        assert max(int(hits.summary.rounds[0]) for hits in answers) <= 5, sort
        assert np.mean([int(hits.summary.rounds[0]) for hits in answers[:20]]) <= 3.5, sort
        if sort != "strange":
            assert recall.mean() >= 0.95 - 0.025, sort
        assert (recall < bounds - 1e-6).mean() <= 0.05, sort
        if sort != "strange":
            assert abs(recall.mean() - expected) <= 0.06, sort
        assert all(hits.summary.completeness[0] == 1.0 for hits in answers), sort


def test_scans_leave_out_small_pieces_beyond_the_nearest_groups(
    sealed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sealing counts it; of two nearest groups here, since few are scanned."""
    monkeypatch.setattr(segment_room, "WHOLE_NEAREST", 2)
    path, metric = sealed
    _, sorts = drawn(metric)
    pieces, tails = table_of(path, Manifest.read(path))
    left_out = 0
    for query in sorts["far"][:10]:
        with Segment.open(path) as segment:
            told = facts(segment.search(query[None, :], K))
            groups = int(told["range_groups"][0])
            assert groups > 2
            nearest_groups = segment.nearest_groups(query[None, :], groups)[0]
        expected = 0
        for place, group in enumerate(nearest_groups):
            first, count = tails[group]
            rows = pieces[first : first + count, 1].astype(np.int64)
            kept = rows
            if place >= 2:
                kept = rows[rows * SMALL_SHARE >= rows.sum()]
            expected += int(kept.sum())
            left_out += int(rows.sum() - kept.sum())
        assert told["evaluated"][0] == expected
    assert left_out > 0


def test_of_few_links_and_codes_only_the_hurried_scan(
    sealed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large clusters bring all of them within some queries, which then read nothing any more."""
    monkeypatch.setattr(segment_pages, "_FEW_BYTES", 64 << 20)
    path, metric = sealed
    _, sorts = drawn(metric)
    for deadline_s, scans in ((None, False), (60.0, True)):
        with Segment.open(path) as segment:
            told = facts(segment.search(sorts["far"][:1], K, deadline_s=deadline_s))
            assert (told["range_groups"][0] > 0) == scans


def test_once_all_is_there_walks_answer_and_a_given_width_always_does(
    sealed: tuple[Path, str],
) -> None:
    path, metric = sealed
    _, sorts = drawn(metric)
    with Segment.open(path) as segment:
        assert not facts(segment.search(sorts["far"], K, ef=64))["range_groups"].any()
    with Segment.open(path) as segment:
        cold = facts(segment.search(sorts["far"], K))
        assert cold["range_groups"].any()
        for batch in segment.unit_batches():
            segment.load_units(batch.kind, batch.units)
        warm = facts(segment.search(sorts["far"], K))
        assert not warm["range_groups"].any()
        assert (warm["expanded"] > 0).all()


def test_a_budget_too_small_for_what_walks_look_at_keeps_to_walks(sealed: tuple[Path, str]) -> None:
    path, metric = sealed
    _, sorts = drawn(metric)
    with Segment.open(path, memory_bytes=64 * 4096) as segment:
        if segment._pages is not None and segment._pages.holds_navigation:
            pytest.fail("the segment is too small for this test")
        assert not facts(segment.search(sorts["near"][:20], K))["range_groups"].any()


def test_where_frames_are_short_walks_read_what_they_miss(sealed: tuple[Path, str]) -> None:
    """What a scan brings would drive out what walks need, and they would miss that again."""
    path, metric = sealed
    _, sorts = drawn(metric)
    with Segment.open(path) as segment:
        pages = {entry.kind: entry.pages for entry in segment.resident().kinds}
    navigation = pages["upper"] + pages["links"] + pages["codes"]
    with Segment.open(path, memory_bytes=(navigation + navigation // 8) * 4096) as segment:
        assert segment._pages is not None
        assert segment._pages.holds_navigation
        assert segment.navigation_bits == 4
        segment.load_units("vectors", np.arange(pages["vectors"], dtype=np.uint32))
        hits = segment.search(sorts["near"][:20], K)
        told = facts(hits)
        assert not told["range_groups"].any()
        assert told["pages_read"].any()
        assert (hits.summary.completeness == 1).all()


def test_filters_that_take_out_little_scan_groups_too_and_find_what_is_left(
    sealed: tuple[Path, str],
) -> None:
    path, metric = sealed
    vectors, sorts = drawn(metric)
    queries = sorts["far"][:60]
    rng = np.random.default_rng(SEED)
    for kept in ("random", "without the nearest"):
        with Segment.open(path) as segment:
            rows = np.arange(COUNT)
            allowed = rng.random(COUNT) < 0.9
            if kept != "random":
                # Those that would be the answers of a query.
                best = nearest(vectors, queries[:1], metric)[0]
                allowed = ~np.isin(segment.ids_at(rows), best)
            bits = np.packbits(allowed, bitorder="little")
            answers = [segment.search(query[None, :], K, allow=bits) for query in queries]
            found = np.concatenate([hits.rows for hits in answers])
            ids = segment.ids_at(rows)[allowed]
            want = ids[nearest(vectors[ids], queries, metric)]
            recall = recall_of(segment.ids_at(found), want)
            assert any(facts(hits)["range_groups"][0] > 0 for hits in answers)
        assert np.isin(found[found >= 0], rows[allowed]).all()
        assert recall.mean() >= 0.93, kept


@pytest.mark.parametrize("groups", [1, 3, 9, 40])
def test_unseen_queries_find_in_so_many_groups_what_was_counted(
    sealed: tuple[Path, str], groups: int
) -> None:
    """As of a scan that a deadline left with so many whole ones."""
    path, metric = sealed
    vectors, sorts = drawn(metric)
    queries = sorts["near"]
    with Segment.open(path) as segment:
        ranges = segment.calibration.ranges if segment.calibration else ()
        assert ranges
        promised = ranges[2]
        assert promised.k == K
        whole = np.full(len(queries), groups)
        means, lows = promised.promised(whole, np.zeros(len(queries), np.int64))
        near = segment.nearest_groups(queries, groups)
        rows = segment.rows_of(nearest(vectors, queries, metric).ravel()).reshape(-1, K)
    group_of_row = groups_of(path)
    share = (group_of_row[rows][:, :, None] == near[:, None, :]).any(axis=2).mean(axis=1)
    assert share.mean() >= means[0] - 0.04
    assert (share < lows - 1e-6).mean() <= 0.05
    if groups < promised.groups[0]:
        assert not means.any()
        assert not lows.any()


def groups_of(path: Path) -> NDArray[np.uint32]:
    """The group of each row, read from the file."""
    manifest = Manifest.read(path)
    pages, first = table_of(path, manifest)
    group_of_row = np.full(manifest.count, 0xFFFFFFFF, np.uint32)
    for group in range(manifest.range_groups):
        start, count = first[group]
        for row, rows in pages[start : start + count]:
            group_of_row[row : row + rows] = group
    return group_of_row


def table_of(path: Path, manifest: Manifest) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pieces, and (first piece, pieces) of each group."""
    file = PagedFile(path / FILES["ranges"], kind="ranges")
    raw = file.read(0, file.info.page_count, file.checksums()).reshape(-1, manifest.page_bytes)
    size = manifest.group_record_bytes
    per_page = manifest.page_bytes // size
    pages = -(-manifest.range_groups // per_page)
    records = raw[:pages, : per_page * size].reshape(-1, size)[: manifest.range_groups]
    tails = np.ascontiguousarray(records[:, -8:]).view("<u4")
    pieces = np.ascontiguousarray(raw[pages:]).reshape(-1).view("<u4").reshape(-1, 2)
    return pieces[: manifest.range_pieces], tails


def rewritten(path: Path, into: Path, change: Any) -> Path:
    """A copy of the segment whose table ``change`` had in its hands, whole by all checksums."""
    shutil.copytree(path, into)
    manifest = Manifest.read(into)
    file = PagedFile(into / FILES["ranges"], kind="ranges")
    raw = file.read(0, file.info.page_count, file.checksums()).reshape(-1, manifest.page_bytes)
    raw = change(raw.copy())
    (into / FILES["ranges"]).unlink()
    with PagedFileWriter(
        into / FILES["ranges"],
        kind="ranges",
        page_bytes=manifest.page_bytes,
        record_bytes=0,
        per_page=0,
    ) as writer:
        writer.write_pages(raw, file.info.record_count)
        info = writer.close()
    crcs = {**manifest.file_crcs, "ranges": info.table_crc}
    (into / "manifest.json").unlink()
    dataclasses.replace(manifest, file_crcs=crcs).write(into)
    return into


@settings(max_examples=12)
@given(seed=st.integers(0, 2**16), share=st.sampled_from([0.002, 0.05, 1.0]))
def test_a_hostile_table_crashes_nothing_and_names_no_row_twice(
    sealed: tuple[Path, str],
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    share: float,
) -> None:
    path, metric = sealed
    rng = np.random.default_rng(seed)

    def hurt(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        words = raw.reshape(-1).view("<u4")
        chosen = rng.random(len(words)) < share
        small = rng.integers(0, 2 * COUNT, len(words)).astype("<u4")
        wild = rng.integers(0, 2**32, len(words), dtype=np.uint64).astype("<u4")
        words[chosen] = np.where(rng.random(len(words)) < 0.7, small, wild)[chosen]
        return raw

    copy = rewritten(path, tmp_path_factory.mktemp("hostile") / "s", hurt)
    _, sorts = drawn(metric)
    with Segment.open(copy) as segment:
        for query in sorts["far"][:10]:
            rows = segment.search(query[None, :], K).rows[0]
            there = rows[rows >= 0]
            assert len(set(there.tolist())) == len(there)
            assert (there < COUNT).all()
    shutil.rmtree(copy)


@pytest.mark.parametrize("of", ["groups", "pieces"])
def test_a_damaged_page_of_the_table_is_counted_and_queries_walk(
    sealed: tuple[Path, str], tmp_path: Path, of: str
) -> None:
    path, metric = sealed
    copy = tmp_path / "s"
    shutil.copytree(path, copy)
    manifest = Manifest.read(copy)
    page = 0
    if of == "pieces":
        page = -(-manifest.range_groups // (manifest.page_bytes // manifest.group_record_bytes))
    at = HEADER_BYTES + page * manifest.page_bytes + 100
    with open(copy / FILES["ranges"], "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))
    vectors, sorts = drawn(metric)
    queries = sorts["near"][:20]
    with Segment.open(copy) as segment:
        hits = segment.search(queries, K)
        told = facts(hits)
        assert told["damaged"][0] > 0
        assert not told["range_groups"].any()
        assert hits.summary.completeness[0] < 1
        found = segment.ids_at(hits.rows)
        assert recall_of(found, nearest(vectors, queries, metric)).mean() >= 0.93
        assert segment.damaged_pages() == {FILES["ranges"]: [page]}
    (copy / FILES["ranges"]).unlink()
    with pytest.raises(CorruptError, match=r"ranges\.stk"):
        Segment.open(copy)
    assert manifest.range_groups > 0


def test_a_manifest_without_a_fitting_table_is_refused(
    sealed: tuple[Path, str], tmp_path: Path
) -> None:
    path, _ = sealed
    manifest = Manifest.read(path)
    for wrong in (
        {"range_groups": manifest.count + 1},
        {"range_pieces": manifest.count + 1},
        {"range_pieces": manifest.range_groups - 1},
        {"range_groups": 0},
        {"range_groups": manifest.range_groups + 10**5},
        {"range_pieces": COUNT},
    ):
        copy = tmp_path / "-".join(f"{name}-{value}" for name, value in wrong.items())
        shutil.copytree(path, copy)
        (copy / "manifest.json").unlink()
        dataclasses.replace(manifest, **wrong).write(copy)
        with pytest.raises(CorruptError):
            Segment.open(copy)
