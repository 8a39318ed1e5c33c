"""The process that crash tests kill: changes and merges a collection, and says what was answered.

Lines on stdout: ``start N`` before step N, ``done N`` once its call has returned. Run with the
collection's folder, a seed, the number of steps, the engine (brute, native, or apart: native in
a process of its own) and the writers.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from stoker.index import sealed
from stoker.index.collection import Collection
from stoker.index.settings import IndexSettings

DIM = 4


def brute_force_engine() -> Any:
    path = Path(__file__).resolve().parents[1] / "brute_force_engine.py"
    spec = importlib.util.spec_from_file_location("brute_force_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BruteForceEngine()


def steps(seed: int, count: int) -> list[tuple[str, list[int], list[list[float]]]]:
    """Return what the writer does, the same for the same seed: the test replays it in a dict."""
    rng = np.random.default_rng(seed)
    made: list[tuple[str, list[int], list[list[float]]]] = []
    for _ in range(count):
        kind = rng.choice(["upsert", "upsert", "upsert", "delete", "merge", "full"])
        ids = [] if kind in ("merge", "full") else rng.choice(40, int(rng.integers(1, 6)), False)
        vectors = rng.integers(-9, 9, (len(ids), DIM)).astype(float)
        made.append((str(kind), [int(i) for i in ids], vectors.tolist()))
    return made


def opened(path: str, engine: str) -> Collection:
    settings = IndexSettings(merge_rows=0, segments_max=3)
    chosen = brute_force_engine() if engine == "brute" else None
    return Collection(path, "rw", settings=settings, engine=chosen)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(collection: Collection, seed: int, count: int) -> None:
    for number, (kind, ids, vectors) in enumerate(steps(seed, count)):
        say(f"start {number}")
        if kind == "upsert":
            collection.upsert(
                ids, vectors, texts=[str(v) for v in vectors], metadata=[{"n": i} for i in ids]
            )
        elif kind == "delete":
            collection.delete(ids)
        else:
            collection.merge(full=kind == "full")
        say(f"done {number}")


def run_together(collection: Collection, seed: int, count: int, writers: int) -> None:
    """Several threads write documents of their own, ids thread * 1000 + n, while one merges."""
    lock = threading.Lock()

    def write(thread: int) -> None:
        rng = np.random.default_rng([seed, thread])
        for n in range(count):
            document = thread * 1000 + n
            collection.upsert([document], rng.integers(-9, 9, (1, DIM)).astype(float))
            with lock:
                say(f"done {document}")

    threads = [threading.Thread(target=write, args=(t,), daemon=True) for t in range(writers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collection.merge()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    # Standard output is the test's; what is logged goes elsewhere.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder, seed_text, count_text, engine_name, writers_text = sys.argv[1:]
    if engine_name == "apart":
        sealed.APART_ROWS_MIN = 1  # Every merge builds in a process of its own.
    with opened(folder, engine_name) as target:
        say("open")
        if int(writers_text) > 1:
            run_together(target, int(seed_text), int(count_text), int(writers_text))
        else:
            run(target, int(seed_text), int(count_text))
    say("closed")
