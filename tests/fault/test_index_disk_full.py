"""A disk that is really full: files may not grow past a limit that the kernel holds."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.index.generation import NoRoom
from stoker.index.settings import IndexSettings

DIM = 32
CHILD = """
import resource, sys
import numpy as np
from stoker.errors import CapacityError, UnavailableError
from stoker.index.collection import Collection
from stoker.index.settings import IndexSettings

path, limit = sys.argv[1], int(sys.argv[2])
vectors = np.random.default_rng(2).standard_normal((3000, 32)).astype("f4")
settings = IndexSettings(merge_rows=0)
with Collection(path, "rw", settings=settings) as collection:
    kept = 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    refused = []
    try:
        while kept < 3000:
            ids = range(1000 + kept, 1000 + kept + 100)
            collection.upsert(ids, vectors[kept : kept + 100])
            kept += 100
    except (CapacityError, UnavailableError) as error:
        refused.append(type(error).__name__)
    try:
        collection.merge(full=True)
    except (CapacityError, UnavailableError) as error:
        refused.append(type(error).__name__)
    assert refused, "nothing was refused: the limit is too high"
    hits = collection.search(vectors[0], 5)
    assert collection.count == 400 + kept, (collection.count, kept)
    assert hits.completeness == 1.0
    print("kept", kept, *refused)
"""


@pytest.mark.parametrize("limit", [20_000, 120_000, 300_000])
def test_nothing_that_was_answered_is_lost(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "c"
    vectors = np.random.default_rng(1).standard_normal((400, DIM)).astype(np.float32)
    build_collection(path, vectors, metric="l2")
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(limit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    # The log goes to standard output too.
    (said,) = [line for line in run.stdout.splitlines() if line.startswith("kept ")]
    _, kept, *refused = said.split()
    with Collection(path, "rw", settings=IndexSettings(merge_rows=0)) as collection:
        collection.check()
        assert collection.count == 400 + int(kept)
        collection.merge(full=True)
        assert collection.count == 400 + int(kept)
        assert collection.contains(list(range(400))).all()
    assert refused


class FullAt:
    """A progress callback under which the disk is full at one step of a build."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.reached = False

    def __call__(self, what: str, done: int, total: int) -> None:
        if what == self.step:
            self.reached = True
            raise OSError(errno.ENOSPC, "No space left on device")


def removed_but_mapped(path: Path) -> list[str]:
    """Files under a folder that are gone, and whose space is not, since this process maps them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(path) in line and line.endswith("(deleted)")]


@pytest.mark.parametrize("step", ["gather", "link", "links", "seal", "calibrate"])
@pytest.mark.parametrize("rows", [200, 400], ids=["in this process", "in one of its own"])
def test_a_failed_merge_gives_its_space_back_while_its_error_is_kept(
    tmp_path: Path, step: str, rows: int
) -> None:
    path = tmp_path / "c"
    vectors = np.random.default_rng(1).standard_normal((rows, DIM)).astype(np.float32)
    build_collection(path, vectors[: rows // 2], metric="l2")
    full = FullAt(step)
    gc.collect()
    gc.disable()
    try:
        with Collection(path, "rw", settings=IndexSettings(merge_rows=0)) as collection:
            collection.upsert(range(rows // 2, rows), vectors[rows // 2 :])
            with pytest.raises(NoRoom) as failure:
                collection.merge(full=True, progress=full)
            assert full.reached
            assert removed_but_mapped(path) == []
            collection.merge(full=True)
            collection.check()
            assert collection.count == rows
        assert "No space left" in str(failure.value)
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["link", "links", "seal", "calibrate"])
def test_a_failed_build_gives_its_space_back_while_its_error_is_kept(
    tmp_path: Path, step: str
) -> None:
    vectors = np.random.default_rng(1).standard_normal((300, DIM)).astype(np.float32)
    full = FullAt(step)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(OSError, match="No space left") as failure:
            build_segment(tmp_path / "s", vectors, progress=full)
        assert full.reached
        assert removed_but_mapped(tmp_path) == []
        assert list(tmp_path.iterdir()) == []
        build_segment(tmp_path / "s", vectors)
        assert failure.value.errno == errno.ENOSPC
    finally:
        gc.enable()
