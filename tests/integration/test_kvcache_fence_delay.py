"""A reading server reuses nothing that a writer's change ended for longer than a second.

The clock is driven: the thread that follows the writer runs as in a server, but its waits and the
time that a round takes only move the test's clock. Changes fall wherever they wait longest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import stoker
from stoker.errors import ConfigError
from stoker.index.collection import Collection
from stoker.kvcache.lookup import LookupReuse
from stoker.service import rounds
from stoker.service.bodies import SearchRequest
from stoker.service.collection_index import CollectionIndex
from stoker.service.configuration import StokerConfig, load_config
from stoker.service.engine import Engine
from stoker.service.engine_parts import Parts
from stoker.service.settings import REFRESH_S_MAX, ServiceSettings
from stoker.service.text_model import TextModel

DIM, K, CHANGES = 8, 3, 24
ROUND_S = 0.2  # what a round is made to take; the real one takes milliseconds
QUESTION = "which passage is nearest"


class OneVector:
    """Every text has the same vector: the question's."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.tile(np.eye(DIM, dtype=np.float32)[0], (len(texts), 1))


class Clock:
    """Time that only waiting moves, and the changes that fall due on the way."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Any]] = []

    def advance(self, seconds: float) -> None:
        end = self.now_s + seconds
        while self.due and self.due[0][0] <= end:
            self.now_s, change = self.due.pop(0)
            change()
        self.now_s = end


class SlowRounds(CollectionIndex):
    """The index that is followed. A round looks first and takes its time then: what falls into
    that time is missed by it, and waits for the next one."""

    clock: Clock

    def refresh(self) -> bool:
        self.clock.advance(ROUND_S / 2)
        changed = super().refresh()
        self.clock.advance(ROUND_S / 2)
        return changed


def asked() -> SearchRequest:
    return SearchRequest(
        text=QUESTION, vector=None, k=K, filters=None, tenant=None, recall_target=None,
        deadline_ms=60_000, session=None, route=None, include_text=False, include_metadata=False,
    )  # fmt: skip


def test_no_answer_outlives_a_change_by_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(83)
    vectors = rng.standard_normal((50, DIM)).astype(np.float32)
    stoker.build(tmp_path / "index", vectors, [f"d{n}" for n in range(50)], metric="cosine")
    writer = Collection(tmp_path / "index", "rw")
    index = SlowRounds(Collection(tmp_path / "index", "r"))
    index.clock = clock = Clock()
    ended = threading.Event()
    written: dict[str, float] = {}  # document -> when its write returned
    shown: dict[str, float] = {}  # document -> when an answer first had it
    reused: list[float] = []

    class DrivenEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            look()
            clock.advance(timeout)
            if not clock.due and len(shown) == len(written):
                ended.set()
                return super().wait(60.0)  # until the engine is closed
            return self.is_set()

    monkeypatch.setattr(
        rounds,
        "threading",
        SimpleNamespace(Event=DrivenEvent, Condition=threading.Condition, Thread=threading.Thread),
    )
    config = StokerConfig(service=ServiceSettings(warm="none", refresh_s=REFRESH_S_MAX))
    text_model = TextModel(OneVector(), dim=DIM)
    engine = Engine(
        Parts(index, text_model, LookupReuse(config.kvcache)), config=config, receipt_path=None
    )
    monkeypatch.setattr(engine._place, "start", lambda: None)  # one thread only drives the clock

    def look() -> None:
        """Ask as a client would, twice: what was searched first may be reused then."""
        for _ in range(2):
            answer = engine.search(asked(), tenant="default", left_s=60.0, request_id="r")
            found = {result.id for result in answer.results}
            if answer.reuse.decision == "reused":
                reused.append(clock.now_s)
            for name in written:
                if name in found:
                    shown.setdefault(name, clock.now_s)

    def write(number: int) -> None:
        # Each change is nearer than all before it, so every answer that lacks it is stale.
        vector = np.eye(DIM, dtype=np.float32)[:1].copy()
        vector[0, 1] = 0.5 / (number + 2)
        writer.upsert([f"new{number}"], vector)
        written[f"new{number}"] = clock.now_s

    at_s = 0.0
    for number in range(CHANGES):
        # Far enough apart that none is pushed out of the nearest three before it was seen.
        at_s += 1.0 + float(rng.random())
        clock.due.append((at_s, lambda number=number: write(number)))
    text_model.start()
    assert text_model.wait_loaded(60.0)
    engine.start()
    assert ended.wait(60.0)
    engine.close()
    writer.close()
    assert len(written) == CHANGES
    delays = [shown[name] - at for name, at in written.items()]
    assert max(delays) <= 1.0, delays
    assert max(delays) > REFRESH_S_MAX, "no change fell where it waits longest: nothing is tested"
    assert len(reused) > CHANGES, "answers were reused between the changes"


def test_one_round_shows_all_changes_however_many(tmp_path: Path) -> None:
    rng = np.random.default_rng(89)
    vectors = rng.standard_normal((50, DIM)).astype(np.float32)
    stoker.build(tmp_path / "index", vectors, [f"d{n}" for n in range(50)], metric="cosine")
    with (
        Collection(tmp_path / "index", "rw") as writer,
        Collection(tmp_path / "index", "r") as reader,
    ):
        for number in range(400):
            writer.upsert([f"d{number % 60}"], rng.standard_normal((1, DIM)).astype(np.float32))
        writer.delete(["d3"])
        assert reader.change_offset < writer.change_offset
        assert reader.refresh()
        assert reader.change_offset == writer.change_offset


@pytest.mark.parametrize("value", ["0.51", "1", "60"])
def test_looking_seldom_enough_to_be_late_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"service\.refresh_s is .* at most 0\.5"):
        load_config(environment={}, flags={"service.refresh_s": value})
