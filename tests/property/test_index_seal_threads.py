"""Sealing spreads its work over threads; what it writes does not depend on how many there are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.index import seal
from stoker.index.build import build_segment
from stoker.index.manifest import NAME as MANIFEST_NAME
from stoker.index.segment import Segment
from stoker.index.stored_graph import read_graph


@pytest.mark.usefixtures("small_groups")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(260, 700),
    dim=st.sampled_from([7, 24, 33]),
    metric=st.sampled_from(["ip", "cosine", "l2"]),
    batch=st.sampled_from([64, 100, 300]),
    seed=st.integers(0, 2**16),
)
def test_files_are_the_same_however_many_threads_seal(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    dim: int,
    metric: str,
    batch: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("seal")
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 4)) @ rng.standard_normal((4, dim))
    vectors = (vectors + 0.1 * rng.standard_normal((count, dim)) + 0.5).astype(np.float32)
    build_segment(folder / "linked", vectors, metric=metric, m=6, ef_construction=40, threads=1)
    with Segment.open(folder / "linked") as segment:
        rows = segment.vectors(np.arange(count))
    graph = read_graph(folder / "linked")
    with pytest.MonkeyPatch.context() as patch:
        # Several batches, whose records end in the middle of pages.
        patch.setattr(seal, "_BATCH_ROWS", batch)
        for threads in (1, 3):
            seal.seal_graph(
                folder / str(threads), graph, rows, np.arange(count), metric=metric, threads=threads
            )
    one, three = (_contents(folder / name) for name in ("1", "3"))
    assert one == three


def _contents(folder: Path) -> dict[str, object]:
    """All but what wide entries cost, which counts pages as the device happens to bring them."""
    found: dict[str, object] = {file.name: file.read_bytes() for file in folder.iterdir()}
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    del manifest["crc32c"], manifest["calibration"]["entry_cost"]
    return found | {MANIFEST_NAME: manifest}
