"""A disk that is really full: files may not grow past a limit that the kernel holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
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
