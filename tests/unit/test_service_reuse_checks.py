"""What a server makes of a check of a reused answer whose true search fails or is cut short."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.index.hits import Hits, Summary
from stoker.kvcache.lookup import LookupReuse
from stoker.kvcache.settings import KvcacheSettings
from stoker.service.answers import SearchAnswer
from stoker.service.bodies import SearchRequest
from stoker.service.engine_events import EngineEvents
from stoker.service.engine_parts import Parts
from stoker.service.engine_search import EngineSearch
from stoker.service.metrics import Metrics
from stoker.service.reuse_front import ReuseFront
from stoker.service.text_model import TextModel

DIM = 8


class OneDocument:
    """An index that always finds the same, as completely as it is told to."""

    dim, metric, generation, change_offset = DIM, "cosine", 1, 1

    def __init__(self) -> None:
        self.incomplete: list[float] = []  # of the coming searches, first to last
        self.error: Exception | None = None
        self.deadlines: list[float] = []

    def search(self, query: NDArray[np.float32], k: int, **more: Any) -> Hits:
        if self.error is not None:
            raise self.error
        self.deadlines.append(more["deadline_ms"])
        done = self.incomplete.pop(0) if self.incomplete else 1.0
        values = (done, 0.9, 0.95, 1.0, 2, 8192, 1, done < 1.0, False)
        ids = np.array(["d"], dtype=object)
        summary = Summary(*(np.array([value]) for value in values))
        return Hits(ids, np.ones(1, np.float32), summary, single=True)


class Near:
    """An embedder for which every question is near every other."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rng = np.random.default_rng([ord(letter) for letter in texts[0]])
        return np.ones((1, DIM), np.float32) + 0.1 * rng.random((1, DIM)).astype(np.float32)


class Bench:
    """The read half of an engine whose reuse is proved, up to its first reuse that is checked."""

    def __init__(self) -> None:
        self.index = OneDocument()
        self.reuse = LookupReuse(KvcacheSettings(reuse_delta=0.5), rng=random.Random(101))
        parts = Parts(self.index, TextModel(Near(), dim=DIM), self.reuse)  # type: ignore[arg-type]
        parts.text_model.start()
        assert parts.text_model.wait_loaded(60.0)
        self.front = ReuseFront(self.reuse, metric="cosine", off="")
        metrics = Metrics()
        self.searching = EngineSearch(
            parts,
            reuse=self.front,
            events=EngineEvents(parts, metrics=metrics, wall=lambda: 1.8e9),
            metrics=metrics,
            verify_s=2.0,
            monotonic=lambda: 0.0,
        )
        self.asked = 0
        while self.find().reuse.decision != "reused":
            assert self.asked < 300
        self.drain()

    def find(self) -> SearchAnswer:
        letters = "abcdefghijklmnopqrst"
        words = f"{letters[self.asked % 20]}{letters[self.asked // 20 % 20]}"
        self.asked += 1
        request = SearchRequest(
            text=f"please explain {words}x", vector=None, k=1, filters=None, tenant=None,
            recall_target=None, deadline_ms=1000, session=None, route=None, include_text=False,
            include_metadata=False,
        )  # fmt: skip
        return self.searching.search(
            request, tenant="a", left_s=1.0, request_id="r", started=None, event_id=None
        )

    def drain(self) -> None:
        """Wait for the checks, and the fits, that are under way."""
        self.front._verifier.submit(lambda: None).result(60.0)

    def checked(self, *, incomplete: Sequence[float] = (), error: Exception | None = None) -> Any:
        """Reuse until one is checked; return (deadlines asked for, errors more, log lines)."""
        before, counts = len(self.index.deadlines), self.reuse.counts("a")
        self.index.incomplete, self.index.error = list(incomplete), error
        with structlog.testing.capture_logs() as lines:
            answer = self.find()
            self.drain()
        assert answer.reuse.decision == "reused"
        after = self.reuse.counts("a")
        assert after["exposure"] == counts["exposure"] + 1.0
        told = [line["reason"] for line in lines if line["event"] == "service.reuse_unverified"]
        return self.index.deadlines[before:], after["errors"] - counts["errors"], told


class NoneFree:
    """Places of which one gets free as soon as it is waited for."""

    def acquire(self, blocking: bool = True) -> bool:
        return blocking

    def release(self) -> None:
        pass


@pytest.mark.parametrize(
    ("incomplete", "deadlines", "errors"),
    [([], [2e3], 0), ([0.5], [2e3, 8e3], 0), ([0.5, 0.9], [2e3, 8e3], 1)],
)
def test_a_check_that_is_cut_is_tried_again_and_then_counts_as_wrong(
    incomplete: list[float], deadlines: list[float], errors: int
) -> None:
    bench = Bench()
    searched, more, told = bench.checked(incomplete=incomplete)
    assert searched == deadlines
    assert (more, len(told)) == (errors, errors)
    bench.reuse.check()


def test_a_check_that_fails_counts_as_wrong() -> None:
    bench = Bench()
    _, more, told = bench.checked(error=UnavailableError("the index is away"))
    assert (more, told) == (1, ["the index is away"])
    bench.reuse.check()


def test_a_request_that_checks_itself_tries_once() -> None:
    """Where too many checks wait, somebody waits for this one."""
    bench = Bench()
    bench.front._slots = NoneFree()  # type: ignore[assignment]
    searched, more, _ = bench.checked(incomplete=[0.5])
    assert (searched, more) == ([2e3], 1)


@pytest.mark.parametrize("closing", [True, False])
def test_a_check_is_not_tried_again_where_others_have_no_place_or_all_ends(closing: bool) -> None:
    """It takes four times as long, and a request, or who closes, would wait for it."""
    bench = Bench()
    if closing:
        bench.front._closing = True
    else:
        while bench.front._slots.acquire(blocking=False):
            pass
        bench.front._slots.release()  # the last is the check's own
    searched, more, _ = bench.checked(incomplete=[0.5])
    assert (searched, more) == ([2e3], 1)
