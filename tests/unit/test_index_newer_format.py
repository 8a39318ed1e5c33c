"""What a newer Stoker wrote is refused as that: it is no damage, and nothing rewrites it."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stoker.kernels._core as core
from stoker.errors import CorruptError
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.generation import NewerFormat
from stoker.index.manifest import _crc_of
from stoker.index.paged_file import _CRC, HEADER_BYTES
from stoker.index.repair import repair
from stoker.index.verify import verify

SEED = 20_261_130


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "c"
    vectors = np.random.default_rng(SEED).standard_normal((30, 8)).astype(np.float32)
    build_collection(path, vectors)
    return path


def newer_current(folder: Path, whole: bool) -> Path:
    path = folder / "CURRENT"
    value = json.loads(path.read_bytes().partition(b"\n")[0])
    body = json.dumps(value | {"format": 2}, separators=(",", ":")).encode()
    path.write_bytes(body + b"\n%08x\n" % (zlib.crc32(body) ^ (not whole)))
    return path


def newer_manifest(folder: Path, whole: bool) -> Path:
    (path,) = folder.glob("segments/*/manifest.json")
    body = json.loads(path.read_bytes())
    stated = body.pop("crc32c")
    body["version"] = 9
    path.write_text(json.dumps(body | {"crc32c": _crc_of(body) if whole else stated}))
    return path


def newer_paged(folder: Path, whole: bool) -> Path:
    (path,) = folder.glob("segments/*/codes.stk")
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 8, 2)
    if whole:
        header = np.frombuffer(bytes(data[: HEADER_BYTES - _CRC.size]), np.uint8)
        _CRC.pack_into(data, HEADER_BYTES - _CRC.size, core.crc32c(header))
    path.write_bytes(data)
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    """Bytes of all that the formats describe, but the documents: SQLite counts who opens them."""
    paths = [folder / "CURRENT", *(folder / "segments").rglob("*")]
    return {path: path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize("make", [newer_current, newer_manifest, newer_paged])
def test_a_newer_format_is_no_damage(
    make: Callable[[Path, bool], Path], built: Path, tmp_path: Path
) -> None:
    """An older Stoker, rolled back to, called it damage; its repair linked all of it anew."""
    folder = shutil.copytree(built, tmp_path / "c")
    changed = make(folder, True)
    before = contents(folder)
    for mode in ("r", "rw"):
        with pytest.raises(NewerFormat, match=r"this Stoker reads .*upgrade") as caught:
            Collection(folder, mode)
        assert str(changed) in str(caught.value)
    for look in (verify, repair):
        with pytest.raises(NewerFormat):
            look(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("make", [newer_current, newer_manifest, newer_paged])
def test_a_version_whose_checksum_fails_is_damage(
    make: Callable[[Path, bool], Path], built: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(built, tmp_path / "c")
    make(folder, False)
    with pytest.raises(CorruptError):
        Collection(folder)
    assert verify(folder).damage
    assert repair(folder).whole
    with Collection(folder) as collection:
        assert collection.count == 30
