"""What a newer Stoker wrote is refused as that: it is no damage, and nothing rewrites it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
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
    for path in sorted(folder.glob("segments/*/*.stk")):
        data = bytearray(path.read_bytes())
        struct.pack_into("<H", data, 8, 2)
        if whole:
            header = np.frombuffer(bytes(data[: HEADER_BYTES - _CRC.size]), np.uint8)
            _CRC.pack_into(data, HEADER_BYTES - _CRC.size, core.crc32c(header))
        path.write_bytes(data)
        if not whole:  # One is enough, and of the others it can be made anew.
            break
    return path.parent


def newer_documents(folder: Path, whole: bool) -> Path:
    path = folder / "documents.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={2 if whole else 0}")
    return path


def newer_tables(folder: Path, whole: bool) -> Path:
    path = newer_documents(folder, whole)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE meta RENAME TO facts")
    return path


def newer_logged(folder: Path, whole: bool) -> Path:
    """Its version is still in the log that a writer left behind."""
    path = folder / "documents.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA user_version={2 if whole else 0}")
        copies = {name: (folder / name).read_bytes() for name in (path.name, f"{path.name}-wal")}
    for name, data in copies.items():
        (folder / name).write_bytes(data)
    return path


NEWER = [newer_current, newer_manifest, newer_paged, newer_documents, newer_tables, newer_logged]


def contents(folder: Path) -> dict[Path, object]:
    """All that the formats describe: bytes of files, and of the documents the version and rows.

    SQLite itself counts who opens a file, and brings home what a log holds.
    """
    found: dict[Path, object] = {}
    for path in (folder / "CURRENT", *(folder / "segments").rglob("*")):
        if path.is_file():
            found[path] = path.read_bytes()
    with contextlib.closing(sqlite3.connect(folder / "documents.db")) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()
        found[folder / "documents.db"] = (version, list(connection.iterdump()))
    return found


@pytest.mark.parametrize("make", NEWER)
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


@pytest.mark.parametrize("make", [one for one in NEWER if one is not newer_current])
def test_a_newer_part_of_an_index_whose_current_is_damaged_is_not_rebuilt_without_it(
    make: Callable[[Path, bool], Path], built: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(built, tmp_path / "c")
    changed = make(folder, True)
    newer_current(folder, False)
    before = contents(folder)
    with pytest.raises(NewerFormat, match="upgrade") as caught:
        repair(folder, metric="l2")
    assert str(changed) in str(caught.value)
    assert contents(folder) == before


@pytest.mark.parametrize("make", [*NEWER[:4], newer_logged])
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
