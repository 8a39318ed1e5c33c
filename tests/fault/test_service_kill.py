"""`kill -9` a server while clients write: what was acknowledged is there after a restart."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import UnavailableError
from stoker.index.collection import Collection
from stoker.index.collection_build import create_collection
from stoker.prefetch.events import decode
from stoker.service.client import Client
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.streams import EVENTS_TOPIC
from stoker.service.wire import Document, RetryPolicy

DIM = 4
ONCE = RetryPolicy(retries_max=0)
WRITERS = 3


def vector(number: int) -> Any:
    raw = np.random.default_rng(number).standard_normal(DIM).astype(np.float32)
    return raw / np.linalg.norm(raw)


def start(index: Path) -> tuple[subprocess.Popen[str], str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker", "serve", str(index), "--port", "0", "--json",
         "--warm", "none", "--set", "index.merge_rows=40"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=clean,
    )  # fmt: skip
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    assert line["event"] == "listening"
    return process, str(line["url"])


class Writer(threading.Thread):
    """Writes, deletes and reports events until the server is gone; notes each acknowledgement."""

    def __init__(self, url: str, name: str, seed: int, progress: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.client = Client(url, retries=ONCE, deadline_s=60.0)
        self.prefix = name
        self.random = random.Random(seed)
        self.progress = progress
        self.alive: dict[str, int] = {}
        self.unsure: set[str] = set()
        self.events: list[str] = []

    def run(self) -> None:
        for i in range(100_000):
            name = f"{self.prefix}-{self.random.randrange(30)}"
            event = f"{self.prefix}-event-{i}"
            try:
                self.unsure = {name}
                if self.alive and self.random.random() < 0.2:
                    self.client.delete(name)
                    self.alive.pop(name, None)
                else:
                    self.client.upsert([Document(name, f"text {i}", vector(i), {"version": i})])
                    self.alive[name] = i
                self.unsure = set()
                self.client.send_events(
                    [
                        {
                            "id": event,
                            "type": "stoker.result.used.v1",
                            "data": {"chunk_ids": [name]},
                        }
                    ]
                )
                self.events.append(event)
            except UnavailableError:
                return
            self.progress.release()


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_what_was_acknowledged_survives(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    index = tmp_path / "collection"
    create_collection(index, dim=DIM, metric="cosine")
    alive: dict[str, int] = {}
    unsure: set[str] = set()
    events: set[str] = set()
    for round_number in range(2):
        process, url = start(index)
        progress = threading.Semaphore(0)
        writers = [
            Writer(url, f"w{number}", seed * 100 + round_number * 10 + number, progress)
            for number in range(WRITERS)
        ]
        for number, writer in enumerate(writers):
            # Each writer goes on with its own names; the state before is its own.
            writer.alive = {k: v for k, v in alive.items() if k.startswith(f"w{number}-")}
            writer.start()
        for _ in range(chance.randrange(20, 120)):
            assert progress.acquire(timeout=60)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
        alive = {}
        for writer in writers:
            writer.join(60)
            assert not writer.is_alive()
            writer.client.close()
            alive |= writer.alive
            unsure |= writer.unsure
            events |= set(writer.events)
    check_documents(index, alive, unsure)
    check_events(index / "state" / "events", events)


def check_documents(index: Path, alive: dict[str, int], unsure: set[str]) -> None:
    with Collection(index) as collection:
        collection.check()
        every = [f"w{number}-{i}" for number in range(WRITERS) for i in range(30)]
        there = dict(zip(every, collection.contains(every).tolist(), strict=True))
        found = dict(zip(every, collection.documents(every), strict=True))
        for name in every:
            if name in unsure:  # its last change was under way: either outcome is right
                continue
            assert there[name] is (name in alive), name
            if name in alive:
                document = found[name]
                assert document is not None
                assert document.metadata == {"version": alive[name]}
                assert document.text == f"text {alive[name]}"
                hits = collection.search(vector(alive[name]), 5)
                assert name in hits.ids.tolist() or hits.scores[0] > 0.99


def check_events(folder: Path, events: set[str]) -> None:
    event_log = EmbeddedLog(folder)
    consumer = event_log.consumer(EVENTS_TOPIC, "check")
    found: set[str] = set()
    while records := consumer.poll(1_000, 0.0):
        found |= {decode(record.value).id for record in records if record.value is not None}
    consumer.close()
    event_log.close()
    assert events <= found
