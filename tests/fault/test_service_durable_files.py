"""Each writer of a file that is replaced whole: durable in order, and clean where it fails."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import StokerError
from stoker.index.generation import Generation, read_current, write_current, write_durable
from stoker.kvcache.chunk_gate import ChunkGate, GateRecord
from stoker.kvcache.kv_file import read_kv, write_kv
from stoker.kvcache.language_model import Kv
from stoker.service.whole_file import replace_file

LARGE = 300_000


def _plain(path: Path, version: int) -> None:
    write_durable(path, bytes([version]) * LARGE)


def _current(path: Path, version: int) -> None:
    write_current(path.parent, Generation(version, 0, 4, "l2", None, 16, 200, "float32", ()))


def _whole(path: Path, version: int) -> None:
    replace_file(path, bytes([version]) * LARGE, b"end")


def _kv(path: Path, version: int) -> None:
    numbers = np.full((2, 2, 300, 64), version, np.float32)
    kv = Kv(np.arange(300, dtype=np.int32), numbers, numbers)
    write_kv(path, kv, tenant="t", chunk_id="c", model_id="m")


def _gate(path: Path, version: int) -> None:
    ChunkGate(path.parent).store("m", GateRecord(allowed=version))


def _bytes(path: Path) -> object:
    return path.read_bytes()


WRITERS: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Path], object]]] = {
    "index": ("blob", _plain, _bytes),
    "index, CURRENT": ("CURRENT", _current, lambda path: read_current(path.parent)),
    "service": ("name", _whole, _bytes),
    "kvcache": ("kv", _kv, lambda path: read_kv(path).keys.tobytes()),
    "kvcache, gate": ("gate-m.json", _gate, _bytes),
}
every_writer = pytest.mark.parametrize("writer", WRITERS)


class Calls:
    """What was synced and renamed, in order; any of it can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        self.fail_at = -1
        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            target = os.readlink(f"/proc/self/fd/{values[0]}") if name == "fsync" else values[1]
            self.seen.append(("fsync" if name == "fsync" else "rename", str(target)))
            if len(self.seen) - 1 == self.fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*values)

        return call


@every_writer
def test_the_file_is_synced_then_renamed_then_its_folder_synced(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, _ = WRITERS[writer]
    path = tmp_path / name
    calls = Calls(monkeypatch)
    write(path, 1)
    kinds = [kind for kind, _ in calls.seen]
    assert kinds == ["fsync", "rename", "fsync"]
    (_, synced), (_, renamed), (_, folder) = calls.seen
    assert Path(synced).parent == tmp_path
    assert Path(synced) != path
    assert renamed == str(path)
    assert folder == str(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@every_writer
@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_failure_before_the_rename_leaves_the_old_file_and_nothing_else(
    writer: str, fail_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, read = WRITERS[writer]
    path = tmp_path / name
    write(path, 1)
    before = read(path)
    calls = Calls(monkeypatch)
    calls.fail_at = fail_at
    with pytest.raises((OSError, StokerError)):
        write(path, 2)
    assert read(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    calls.fail_at = -1
    write(path, 2)
    assert read(path) != before


class Reluctant(io.FileIO):
    """A file that takes at most 4,093 bytes at a time, and none beyond its room."""

    room = 1 << 40

    def write(self, data: Any) -> int:
        taken = bytes(memoryview(data).cast("B")[: min(4_093, Reluctant.room)])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        Reluctant.room -= len(taken)
        return super().write(taken)


@every_writer
@pytest.mark.parametrize("room", [1 << 40, 200_000, 10])
def test_short_writes_are_gone_on_with_and_a_full_disk_is_cleaned_up(
    writer: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, read = WRITERS[writer]
    path, other = tmp_path / "here" / name, tmp_path / "there" / name
    path.parent.mkdir()
    other.parent.mkdir()
    write(path, 1)
    write(other, 2)
    size = other.stat().st_size
    before = read(path)
    real = Path.open

    def reluctant(self: Path, mode: str = "r", *args: Any, **values: Any) -> Any:
        if "w" not in mode:
            return real(self, mode, *args, **values)
        buffered = io.BufferedWriter(Reluctant(self, "w"))
        return buffered if "b" in mode else io.TextIOWrapper(buffered)

    monkeypatch.setattr(Reluctant, "room", room)
    monkeypatch.setattr(Path, "open", reluctant)
    if size > room:
        with pytest.raises((OSError, StokerError)):
            write(path, 2)
        assert read(path) == before
    else:
        write(path, 2)
        assert read(path) == read(other)
    assert [entry.name for entry in path.parent.iterdir()] == [name]
