"""A process that may start no thread any more still gets its answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from stoker.index.build import build_segment

_SEARCH = """
import resource, sys
import numpy as np
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings

queries = np.load(sys.argv[2])
with Segment.open(sys.argv[1], settings=IndexSettings(search_threads=8)) as segment:
    segment.search(queries[:1], 1)
    # Not enough address space for a thread's stack.
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (6 << 20), resource.RLIM_INFINITY))
    rows = segment.search(queries, 1).rows
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(segment.ids_at(rows)[:, 0].tolist())
"""


def test_a_batch_is_answered_where_no_thread_can_be_started(tmp_path: Path) -> None:
    vectors = np.random.default_rng(9).standard_normal((300, 96)).astype(np.float32)
    build_segment(tmp_path / "s", vectors, metric="l2", threads=1)
    np.save(tmp_path / "queries.npy", vectors[:64])
    done = subprocess.run(
        [sys.executable, "-c", _SEARCH, str(tmp_path / "s"), str(tmp_path / "queries.npy")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(list(range(64)))
