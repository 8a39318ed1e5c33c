"""The directions that coarse codes keep: chosen where they help, stored, read back, refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import stoker.kernels._core as _core
from stoker.errors import CorruptError
from stoker.index.build import build_segment
from stoker.index.coarse_basis import (
    BasisLayout,
    basis_bytes,
    basis_memory,
    basis_of,
    basis_size,
    choose_basis,
    coarse_record_bytes,
)
from stoker.index.manifest import FILES, Manifest
from stoker.index.paged_file import HEADER_BYTES, SegmentFileCorrupt
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings
from stoker.index.verify import verify

SEED = 7
TWO_BITS = IndexSettings(navigation_bits=2)


def layout_of(basis: Any) -> BasisLayout:
    return BasisLayout(basis.directions, basis.wide_blocks, basis.fine, basis.blocks)


def vectors_of(count: int, dim: int, reach: float, seed: int = 5) -> NDArray[np.float32]:
    """Vectors whose variance falls to 1/e after ``reach`` of their dimensions, turned at random."""
    rng = np.random.default_rng(seed)
    spread = np.exp(-0.5 * np.arange(dim) / (reach * dim))
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(dim, dim)))[0]
    return ((rng.normal(size=(count, dim)) * spread) @ turn + 0.05).astype(np.float32)


def centre_of(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors.mean(axis=0, dtype=np.float64).astype(np.float32)


@pytest.mark.parametrize("dim", [72, 128, 200, 384])
def test_what_is_chosen_is_orthonormal_and_follows_the_variance(dim: int) -> None:
    vectors = vectors_of(4 * dim, dim, 0.1)
    centre = centre_of(vectors)
    basis = choose_basis(vectors, centre, SEED)
    assert basis is not None
    rows = basis.rows.view(np.float16).reshape(basis.directions, dim).astype(np.float64)
    np.testing.assert_allclose(rows @ rows.T, np.eye(basis.directions), atol=5e-3)
    centred = (vectors - centre).astype(np.float64)
    kept = ((centred @ rows.T) ** 2).sum() / (centred**2).sum()
    assert kept > 0.95
    assert (basis.steps > 0).all()
    assert len(basis.steps) == basis.directions
    # Where a record has room for it, it ends with its numbers.
    assert coarse_record_bytes(basis, dim) <= 0.75 * _core.code_record_bytes(dim)
    assert basis.blocks == {72: 0, 128: 0, 200: 3, 384: 4}[dim]


def test_alike_directions_few_vectors_and_long_ones_have_none() -> None:
    alike = np.random.default_rng(SEED).normal(size=(4_000, 128)).astype(np.float32)
    assert choose_basis(alike, centre_of(alike), SEED) is None
    skewed = vectors_of(511, 128, 0.1)
    assert choose_basis(skewed, centre_of(skewed), SEED) is None
    wide = np.zeros((8, 2_048), np.float32)
    assert choose_basis(wide, centre_of(wide), SEED) is None
    same = np.ones((600, 128), np.float32)
    assert choose_basis(same, centre_of(same), SEED) is None


@pytest.mark.parametrize("dim", [120, 200])
def test_bytes_come_back_and_have_the_stated_size(dim: int) -> None:
    vectors = vectors_of(1_000, dim, 0.1)
    basis = choose_basis(vectors, centre_of(vectors), SEED)
    assert basis is not None
    raw = np.frombuffer(basis_bytes(basis), np.uint8)
    layout = layout_of(basis)
    assert len(raw) == basis_size(layout, dim)
    again = basis_of(raw, layout, dim)
    assert again is not None
    assert basis_bytes(again) == raw.tobytes()
    np.testing.assert_array_equal(again.steps, basis.steps)
    assert layout_of(again) == layout
    assert basis_bytes(None) == b""
    nothing = BasisLayout(0, 0, 0, 0)
    assert basis_size(nothing, dim) == 0
    assert basis_of(raw[:0], nothing, dim) is None


Sealer = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def sealer(tmp_path_factory: pytest.TempPathFactory) -> Sealer:
    """Segments of 2,000 such vectors, by metric and dimensions: each is built once."""
    root = tmp_path_factory.mktemp("basis")

    def sealed_of(metric: str, dim: int) -> Path:
        path = root / f"{metric}-{dim}"
        if not path.exists():
            build_segment(path, vectors_of(2_000, dim, 0.1), metric=metric, m=8, threads=1)
        return path

    return sealed_of


@pytest.fixture
def sealed(sealer: Sealer) -> Path:
    """One of them, to look into and to copy."""
    return sealer("l2", 128)


@pytest.mark.parametrize(
    ("metric", "dim"), [("ip", 128), ("cosine", 128), ("l2", 128), ("ip", 200), ("l2", 200)]
)
def test_coarse_walks_find_more_with_a_basis(metric: str, dim: int, sealer: Sealer) -> None:
    vectors = vectors_of(2_000, dim, 0.1)
    queries = vectors_of(100, dim, 0.1, seed=6)
    with Segment.open(sealer(metric, dim), settings=TWO_BITS) as segment:
        assert segment.manifest.coarse_directions > 0
        for batch in segment.unit_batches():
            if batch.kind in ("upper", "links", "coarse"):
                segment.load_units(batch.kind, batch.units)
        hits = segment.search(queries, 10, ef=200, resident_only=True)
        found = segment.ids_at(hits.rows)
        settled = segment.ids_at(segment.search(queries, 10, ef=200, recall_target=0.999).rows)
        error = segment.manifest.calibration.coarse_error if segment.manifest.calibration else 0.0
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = queries @ vectors.T
    if metric == "l2":
        scores = 2 * scores - (vectors**2).sum(axis=1)
    truth = np.argsort(-scores, axis=1)[:, :10]

    def recall(ids: NDArray[np.int64]) -> float:
        return float((ids[:, :, None] == truth[:, None, :]).any(axis=1).mean())

    # Plain 2-bit codes of these reach 0.67 to 0.74 by themselves.
    assert recall(found) > 0.85
    assert recall(settled) > 0.98
    assert 0 < error < 0.02


def test_plain_codes_of_the_same_vectors_err_more() -> None:
    vectors = vectors_of(2_000, 128, 0.1)
    centre = centre_of(vectors)
    basis = choose_basis(vectors, centre, SEED)
    plain = _core.encode(vectors, seed=SEED, centre=centre)
    based = _core.encode(vectors, seed=SEED, centre=centre, basis=basis)
    # Both planes of the other codes are the same, whatever the coarse ones are.
    np.testing.assert_array_equal(plain[0], based[0])
    np.testing.assert_array_equal(plain[1], based[1])
    assert plain[2].shape == based[2].shape
    assert (plain[2] != based[2]).any()


def test_a_basis_of_another_size_is_refused(sealed: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(sealed)
    copy = tmp_path / "segment"
    copy.mkdir()
    for name in manifest.files.values():
        (copy / name).write_bytes((sealed / name).read_bytes())
    fewer = dataclasses.replace(manifest, coarse_directions=manifest.coarse_directions - 1)
    fewer.write(copy)
    with pytest.raises(SegmentFileCorrupt, match="bytes, expected"):
        Segment.open(copy, settings=TWO_BITS)


def test_a_basis_that_fits_no_code_is_refused(sealed: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(sealed)
    copy = tmp_path / "segment"
    copy.mkdir()
    for name in manifest.files.values():
        (copy / name).write_bytes((sealed / name).read_bytes())
    dataclasses.replace(manifest, coarse_wide_blocks=9).write(copy)
    with pytest.raises(CorruptError, match="coarse basis"):
        Segment.open(copy, settings=TWO_BITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("coarse_directions", 4_000),
        ("coarse_directions", 0),
        ("coarse_wide_blocks", -1),
        ("coarse_fine", 400),
        ("coarse_fine", 1),  # without blocks that end with the numbers
        ("coarse_blocks", -1),
    ],
)
def test_manifests_that_contradict_themselves_are_refused(
    field: str, value: int, sealed: Path, tmp_path: Path
) -> None:
    changed = dataclasses.replace(Manifest.read(sealed), **{field: value})
    changed.write(tmp_path)
    with pytest.raises(SegmentFileCorrupt, match="coarse"):
        Manifest.read(tmp_path)


def test_the_basis_counts_in_the_budget(sealed: Path) -> None:
    manifest = Manifest.read(sealed)
    budget = 1 << 20
    with Segment.open(sealed, memory_bytes=budget, settings=TWO_BITS) as segment:
        beside = basis_memory(manifest.basis, manifest.dim)
        assert beside > basis_size(manifest.basis, manifest.dim) > 0
        assert 0 < segment.resident().budget_bytes <= budget - beside


def test_a_damaged_basis_is_refused_where_codes_need_it_and_found_by_verify(
    sealed: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sealed, tmp_path / "s")
    file = folder / FILES["transform"]
    raw = bytearray(file.read_bytes())
    raw[HEADER_BYTES + 4096 + 5] ^= 1  # Behind the centre's page.
    file.write_bytes(raw)
    with pytest.raises(SegmentFileCorrupt, match="page 1"):
        Segment.open(folder, settings=TWO_BITS)
    query = np.ones((1, 128), np.float32)
    four_bits = IndexSettings(navigation_bits=4)
    with (
        Segment.open(folder, settings=four_bits) as damaged,
        Segment.open(sealed, settings=four_bits) as whole,
    ):
        found, expected = damaged.search(query, 5), whole.search(query, 5)
        np.testing.assert_array_equal(found.rows, expected.rows)
    assert [(found.file, found.page) for found in verify(folder).damage] == [("transform.stk", 1)]
