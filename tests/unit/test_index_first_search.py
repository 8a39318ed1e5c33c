"""A fresh process's first searches wait for no further module: imports took 10 ms of 20 once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.read_ahead import announce_segments

ASKS = """
import sys
from stoker.index.collection import Collection
import numpy as np
with Collection(sys.argv[1], mode="r") as index:
    before = set(sys.modules)
    for k in (1, 5, 10, 20):
        index.search(np.ones((1, 24), np.float32), k, deadline_ms=1e6)
        index.search(np.ones(24, np.float32), k, recall_target=0.9)
    print(*sorted(set(sys.modules) - before))
"""


def test_a_first_search_imports_nothing(tmp_path: Path) -> None:
    vectors = np.random.default_rng(3).standard_normal((900, 24)).astype(np.float32)
    build_collection(tmp_path / "i", vectors, metric="l2", threads=1)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASKS, str(tmp_path / "i")],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == []


def test_what_opening_reads_was_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read through the pool; all else is on its way before it is waited for."""
    vectors = np.random.default_rng(3).standard_normal((900, 24)).astype(np.float32)
    build_collection(tmp_path / "i", vectors, metric="l2", threads=1)
    announced: set[tuple[str, int]] = set()
    read: set[tuple[str, int]] = set()
    advise, pread = os.posix_fadvise, os.pread

    def blocks(file: int, offset: int, length: int) -> set[tuple[str, int]]:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        end = min(offset + length, os.fstat(file).st_size)
        return {(name, block) for block in range(offset // 4096, -(-end // 4096))}

    def advised(file: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            announced.update(blocks(file, offset, length))
        advise(file, offset, length, advice)

    def was_read(file: int, length: int, offset: int) -> bytes:
        read.update(blocks(file, offset, length))
        return pread(file, length, offset)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "pread", was_read)
    with Collection(tmp_path / "i") as index:
        assert {name for name, _ in read} >= {"links.stk", "codes.stk", "ids.stk", "transform.stk"}
        assert read <= announced
        read.clear()
        index.search(vectors[0], 1, deadline_ms=1e6)
        # The id's own page is read where the answer says.
        assert {name for name, _ in read} == {"ids.stk"}
        assert len(read - announced) <= 1


def test_announcing_what_is_not_there_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "links.stk").mkdir()
    os.mkfifo(tmp_path / "ids.stk")
    (tmp_path / "codes.stk").touch()
    (tmp_path / "transform.stk").symlink_to("transform.stk")
    announce_segments([tmp_path, tmp_path / "nowhere", tmp_path / "codes.stk"])
