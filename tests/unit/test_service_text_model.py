"""Turns at the embedding model: one at a time, queries before documents, all with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.service import text_model
from stoker.service.problems import DeadlinePassed
from stoker.service.text_model import TextModel

DIM = 3


class HeldEmbedder:
    """Answers a call only when the test lets it; notes the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.called = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.running = 0
        self.together = 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.running += 1
        self.together = max(self.together, self.running)
        self.calls.append(list(texts))
        self.called.release()
        assert self.go.acquire(timeout=60)
        self.running -= 1
        return np.ones((len(texts), DIM), np.float32)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[HeldEmbedder, TextModel]:
    monkeypatch.setattr(text_model, "_PART", 2)
    embedder = HeldEmbedder()
    model = TextModel(embedder, dim=DIM)
    embedder.go.release()
    model.start()
    assert model.wait_loaded(60)
    assert embedder.called.acquire(timeout=60)
    embedder.calls.clear()
    return embedder, model


def test_a_query_goes_before_the_rest_of_the_documents(
    held: tuple[HeldEmbedder, TextModel],
) -> None:
    embedder, model = held
    shapes: list[tuple[int, ...]] = []
    documents = threading.Thread(
        target=lambda: shapes.append(
            model.embed_documents([f"d{i}" for i in range(5)], left_s=60).shape
        )
    )
    documents.start()
    assert embedder.called.acquire(timeout=60)  # the first part is at the model
    query = threading.Thread(target=lambda: model.embed_query("q", left_s=60))
    query.start()
    while not model._queries_waiting:
        query.join(0.001)
    for _ in range(4):
        embedder.go.release()
    documents.join(60)
    query.join(60)
    assert embedder.calls == [["d0", "d1"], ["q"], ["d2", "d3"], ["d4"]]
    assert shapes == [(5, DIM)]
    assert embedder.together == 1


def test_waiting_for_the_model_ends_at_the_deadline(held: tuple[HeldEmbedder, TextModel]) -> None:
    embedder, model = held
    first = threading.Thread(target=lambda: model.embed_query("a", left_s=60))
    first.start()
    assert embedder.called.acquire(timeout=60)
    with pytest.raises(DeadlinePassed, match="busy"):
        model.embed_query("b", left_s=0.001)
    assert model._queries_waiting == 0
    embedder.go.release()
    first.join(60)
    assert embedder.calls == [["a"]]


def test_documents_that_take_too_long_are_given_up_between_parts() -> None:
    now = [0.0]

    class Slow:
        def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
            now[0] += 10.0
            return np.ones((len(texts), DIM), np.float32)

    model = TextModel(Slow(), dim=DIM, clock=lambda: now[0])
    model.start()
    assert model.wait_loaded(60)
    with pytest.raises(DeadlinePassed, match="32 of 40 texts") as caught:
        model.embed_documents(["x"] * 40, left_s=20.0)
    assert "fewer documents" in caught.value.action
    assert model.embed_documents([], left_s=1.0).shape == (0, DIM)
    assert model.embed_documents(["x"] * 40, left_s=60.0).shape == (40, DIM)
