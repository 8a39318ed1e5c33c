"""A manifest whose checksum holds and whose fields no writer writes: refused, or of no effect."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker.kernels._core as _core
from stoker.errors import CorruptError
from stoker.index.build import build_segment
from stoker.index.calibrated import EF_MAX
from stoker.index.generation import NewerFormat
from stoker.index.json_values import are_shares, is_share
from stoker.index.manifest import NAME, Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings
from stoker.index.stored_graph import read_graph

ABSENT = "absent"
VALUES = (ABSENT, None, -1, 0, 1, 1 << 31, (1 << 32) - 1, 1 << 64, math.nan, 1e300, "x", [], [1, 2])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in ``value``; of lists the first two entries stand for all.

    Of long lists of objects, as calibration's of several k, the first does.
    """
    tables = isinstance(value, list) and value and isinstance(value[0], dict) and "ef" in value[0]
    many = 1 if tables else 2
    entries = value.items() if isinstance(value, dict) else enumerate(value[:many])
    for key, below in entries:
        yield (*at, key)
        if isinstance(below, dict | list):
            yield from places(below, (*at, key))


def changed(body: dict[str, Any], at: tuple[Any, ...], value: Any) -> bytes:
    """The manifest with one value changed or absent, under a checksum that holds."""
    # Only what lies on the way is copied: a copy of all costs as much as to check it.
    fresh: Any = copy.copy(body)
    holder = fresh
    for key in at[:-1]:
        holder[key] = copy.copy(holder[key])
        holder = holder[key]
    if value == ABSENT:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    raw = json.dumps(fresh, sort_keys=True, separators=(",", ":")).encode()
    return raw[:-1] + b',"crc32c":%d}' % _core.crc32c(np.frombuffer(raw, np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "s"
    vectors = np.random.default_rng(7).standard_normal((1_200, 96)).astype(np.float32)
    build_segment(path, vectors, metric="l2", m=8, ef_construction=40)
    return path


def use(folder: Path, manifest: Manifest, *, bits: int, changed: object) -> None:
    """Open the segment, search it and load it whole; what it promises is a number."""
    settings = IndexSettings(navigation_bits=bits, search_threads=1)
    with Segment(folder, manifest, 1, settings) as segment:
        hits = segment.search(np.ones((2, segment.dim), np.float32), 5)
        assert np.isfinite(hits.summary.recall_bound).all(), changed
        segment.ids_at(hits.rows)
        for batch in segment.unit_batches():
            segment.load_units(batch.kind, batch.units)


def test_hostile_fields_are_refused_or_of_no_effect(folder: Path) -> None:
    path = folder / NAME
    written = path.read_bytes()
    body = json.loads(written)
    assert body["calibration"] is not None
    assert body["coarse_per_page"] > 0
    del body["crc32c"]
    refused = 0
    try:
        for at in places(body):
            for value in VALUES:
                path.write_bytes(changed(body, at, value))
                try:
                    manifest = Manifest.read(folder)
                except (CorruptError, NewerFormat):
                    refused += 1
                    continue  # All that use it read it first.
                for bits in (2, 4):
                    with contextlib.suppress(CorruptError):
                        use(folder, manifest, bits=bits, changed=(at, value))
                with contextlib.suppress(CorruptError):
                    read_graph(folder)
    finally:
        path.write_bytes(written)
    assert refused > 500


@pytest.mark.parametrize("width", [EF_MAX + 1, 1 << 31, (1 << 32) - 1])
def test_widths_that_no_walk_could_have_are_refused(folder: Path, width: int) -> None:
    path = folder / NAME
    written = path.read_bytes()
    body = json.loads(written)
    del body["crc32c"]
    # None of those measured is enough: the widest is taken, and grows with k.
    for name in ("recall_mean", "coarse_recall_mean", "entry_mean", "coarse_entry_mean"):
        body["calibration"][name] = [0.5] * (len(body["calibration"]["ef"]) - 1) + [0.6]
    at = ("calibration", "ef", len(body["calibration"]["ef"]) - 1)
    try:
        path.write_bytes(changed(body, at, EF_MAX))
        with Segment.open(folder, memory_bytes=1) as segment:
            assert (segment.search(np.ones((1, segment.dim), np.float32), 1000).rows >= 0).all()
        path.write_bytes(changed(body, at, width))
        with pytest.raises(CorruptError, match="ef"):
            Segment.open(folder, memory_bytes=1)
    finally:
        path.write_bytes(written)


@pytest.mark.parametrize("value", [0.00001, 1e-7, 5e-324, 0.1 + 0.2, 1e-4])
def test_numbers_that_another_writer_spells_differently_keep_their_checksum(
    folder: Path, value: float
) -> None:
    path = folder / NAME
    written = path.read_bytes()
    body = json.loads(written)
    del body["crc32c"]
    body["builder"] = "für alle"
    try:
        raw = changed(body, ("calibration", "upper_low"), value)
        path.write_bytes(raw)
        read = Manifest.read(folder)
        assert read.calibration is not None
        assert read.calibration.upper_low == value
        path.write_bytes(raw.replace(b"f\\u00fcr", b"f\\u00e4r"))
        with pytest.raises(CorruptError, match="checksum"):
            Manifest.read(folder)
    finally:
        path.write_bytes(written)


@pytest.mark.parametrize("depth", [250, 260, 900, 1100, 100_000])
def test_a_nest_is_refused_however_deep(folder: Path, depth: int) -> None:
    path = folder / NAME
    written = path.read_bytes()
    try:
        path.write_bytes(written.replace(b"{", b'{"more":' + b"[" * depth + b"]" * depth + b",", 1))
        with pytest.raises(CorruptError, match=r"checksum|depth"):
            Manifest.read(folder)
    finally:
        path.write_bytes(written)


def test_shares_are_those_that_are_shares_one_by_one() -> None:
    odd = [0, 1, 0.5, -0.0, True, False, None, "0.5", [0.5], math.nan, math.inf, -1e-9, 1 + 1e-9]
    assert are_shares(())
    for value in odd:
        for values in ([value], [value, 0.5], [0.5, value], [0.25, value, 0.75]):
            assert are_shares(values) == all(map(is_share, values)), values
