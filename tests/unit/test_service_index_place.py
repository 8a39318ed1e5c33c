"""Another index in the place of the one that is served: traffic is sent away, with the reason."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import structlog

from stoker.index.build import build_segment
from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.prefetch.events import SEARCH_PERFORMED, new_event
from stoker.service.bodies import WarmupRequest
from stoker.service.configuration import StokerConfig
from stoker.service.engine_opening import open_engine
from stoker.service.index_place import IndexPlace
from stoker.service.settings import ServiceSettings

DIM = 8
VECTORS = np.random.default_rng(20_261_130).standard_normal((40, DIM)).astype(np.float32)


def make(path: Path, kind: str) -> Path:
    if kind == "bare":
        build_segment(path, VECTORS, np.arange(len(VECTORS)), metric="cosine")
    else:
        build_collection(path, VECTORS, metric="cosine")
    return path


@pytest.mark.parametrize("kind", ["bare", "r", "rw"])
def test_a_server_whose_index_was_replaced_is_not_ready_until_it_is_back(
    kind: str, tmp_path: Path
) -> None:
    path, other = make(tmp_path / "index", kind), make(tmp_path / "other", kind)
    settings = ServiceSettings(
        state_dir=str(tmp_path / "state"), writes="auto" if kind == "rw" else "off", warm="none"
    )
    engine = open_engine(path, StokerConfig(service=settings))
    try:
        look = engine._place.look
        look()
        assert engine.readiness().ready
        gone = path.rename(tmp_path / "gone")
        with structlog.testing.capture_logs() as lines:
            look()  # nothing is there
            assert engine.readiness().waiting_for == ("index-replaced",)
            other.rename(path)
            look()  # another one is
            look()
            assert not engine.readiness().ready
            shutil.rmtree(path)
            gone.rename(path)
            look()
            assert engine.readiness().ready
        assert [line["event"] for line in lines] == [
            "service.index_replaced", "service.index_back",
        ]  # fmt: skip
    finally:
        engine.close()


def test_what_a_writer_changes_in_an_index_does_not_replace_it(tmp_path: Path) -> None:
    path = make(tmp_path / "index", "rw")
    with Collection(path, "rw") as writer, Collection(path) as reader:
        for full in (False, True):
            writer.upsert([1_000 + full], VECTORS[:1], texts=["a"])
            writer.merge(full=full)
            reader.refresh()
            assert writer.in_place()
            assert reader.in_place()
    with Collection(path) as opened:
        assert opened.in_place()


@pytest.mark.parametrize("kind", ["bare", "rw"])
def test_a_disk_that_does_not_say_replaces_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one failed look, as of a network volume, would send all traffic away."""
    path = make(tmp_path / "index", kind)
    with Collection(path) as opened:
        place = IndexPlace(opened.in_place)

        def failing(*_: object, **__: object) -> os.stat_result:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", failing)
            with pytest.raises(OSError, match="Input/output"):
                place.look()
        assert place.waits_for == ()
        path.rename(tmp_path / "gone")
        path.write_bytes(b"")  # no folder any more
        place.look()
        assert place.waits_for == ("index-replaced",)


def test_looks_go_on_after_one_that_failed() -> None:
    answers: list[bool | Exception] = [True, OSError("gone"), OSError("gone"), False]

    def look() -> bool:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    place = IndexPlace(look)
    place._rounds._every_s = place._rounds._retry_s = 0.001
    with structlog.testing.capture_logs() as lines:
        place.start()
        assert place._rounds.wait_for(2, timeout_s=10.0)
        assert place.waits_for == ("index-replaced",)
        assert place.stop(10.0)
    assert [line["event"] for line in lines][:2] == [
        "service.index_not_looked", "service.index_replaced",
    ]  # fmt: skip


def test_a_server_writes_no_state_into_an_index_put_in_its_place(tmp_path: Path) -> None:
    """Its heat goes with the offsets of its own event log; the other one has another."""
    path, other = make(tmp_path / "index", "rw"), make(tmp_path / "other", "rw")
    search = new_event(SEARCH_PERFORMED, tenant="t", chunk_ids=["1"], time_s=time.time())
    config = StokerConfig(service=ServiceSettings(placement="off", embed_model="off", warm="none"))
    for folder in (other, path):
        engine = open_engine(folder, config)
        engine.start()
        engine.append_events([search])
        if folder is other:
            engine.close()
    assert (other / "state" / "heat.snapshot").exists()
    theirs = contents(other / "state")
    path.rename(tmp_path / "gone")
    other.rename(path)
    with structlog.testing.capture_logs() as lines:
        engine.start_warm(WarmupRequest(None, None, everything=False, wait=False))
        engine.wait_warm(60.0)
        engine.close()
    assert contents(path / "state") == theirs
    assert "service.snapshot_failed" in {line["event"] for line in lines}
    open_engine(path, config).close()  # it can be taken up, by this process too


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
