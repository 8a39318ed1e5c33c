"""Opening a server's parts: what it does without, and what it leaves where it cannot start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import UnavailableError
from stoker.index.collection_build import build_collection
from stoker.service.configuration import StokerConfig
from stoker.service.engine_opening import open_engine
from stoker.service.problems import FeatureOff
from stoker.service.settings import ServiceSettings

DIM = 8


def test_an_index_that_cannot_be_written_is_served_all_the_same(tmp_path: Path) -> None:
    """As on a read-only volume: `service.writes` promises to say so and to go on."""
    build_collection(tmp_path / "index", np.eye(DIM, dtype=np.float32), metric="cosine")
    lock = tmp_path / "index" / "writer.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()  # cannot be opened for writing, even by root
    state = str(tmp_path / "state")
    engine = open_engine(tmp_path / "index", StokerConfig(service=ServiceSettings(state_dir=state)))
    assert "writer.lock" in engine.readiness().parts["writes"]
    with pytest.raises(FeatureOff):
        engine.delete("default", "1")
    engine.close()
    config = StokerConfig(service=ServiceSettings(state_dir=state, writes="on"))
    with pytest.raises(UnavailableError, match=r"writer\.lock"):
        open_engine(tmp_path / "index", config)


def test_a_server_that_cannot_be_opened_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_collection(tmp_path / "index", np.eye(DIM, dtype=np.float32), metric="cosine")
    before = set(threading.enumerate())

    def missing(*_: Any, **__: Any) -> None:
        raise UnavailableError("a library is missing")

    monkeypatch.setattr("stoker.service.engine_opening.open_placement", missing)
    with pytest.raises(UnavailableError, match="library"):
        open_engine(tmp_path / "index", StokerConfig())
    assert set(threading.enumerate()) <= before
    monkeypatch.undo()
    open_engine(tmp_path / "index", StokerConfig()).close()


def test_a_replica_has_one_name_for_all(tmp_path: Path) -> None:
    """Its consumer group, its place in it, and its entries in the table that replicas share."""
    build_collection(tmp_path / "index", np.eye(DIM, dtype=np.float32), metric="cosine")
    names = []
    for _ in range(2):  # the same after a restart
        engine = open_engine(tmp_path / "index", StokerConfig())
        heat, kv = engine._parts.heat, engine._parts.kv
        assert heat is not None
        assert kv is not None
        assert heat._group == f"stoker-heat-{heat._member}"
        names += [heat._member, kv._replica]
        engine.close()
    assert len(set(names)) == 1
