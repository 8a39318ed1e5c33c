"""A fresh process's first searches wait for no further module: imports took 10 ms of 20 once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from stoker.index.collection_build import build_collection

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
