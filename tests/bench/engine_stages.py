"""A cold start of Stoker by its moments, and the device's speed as a measured process sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine_job import Job
from engine_proc import reads

K = 10
# Queries of the loading stretch come again from the start when it outlasts them.
_FIRST = 1


def device(job: Job, peer: Any) -> dict[str, Any]:
    """Measure the device by direct reads of ``job.vectors``."""
    from engine_machine import probe_device

    return probe_device(Path(job.vectors))


def moments(job: Job, peer: Any) -> dict[str, Any]:
    """Open to first answer; the navigation set, queries meanwhile; then queries with it alone.

    Queries: the first, then a share for each of ``job.targets``; those asked while the navigation
    set loads come from the end. All through the public interface.
    """
    peer.prepare()
    import stoker
    from stoker.index.settings import IndexSettings

    queries, truth = np.load(job.queries), np.load(job.truth)
    start = time.perf_counter()
    index = stoker.open(
        Path(job.folder) / "index",
        memory_bytes=job.memory_bytes or None,
        settings=IndexSettings(
            search_threads=1, volume_iops=job.stated_iops, volume_bytes_s=job.stated_bytes_s
        ),
    )
    opened = time.perf_counter()
    hits = index.search(queries[0], K, deadline_ms=job.deadline_ms)
    first = time.perf_counter()
    peer.index = index
    found: dict[str, Any] = {
        "open_ms": (opened - start) * 1e3,
        "first_answer_ms": (first - start) * 1e3,
        "first": _answers([hits], [truth[0]]),
    }
    found["navigation"] = _load_navigation(job, peer, queries[::-1], truth[::-1])
    each = (len(queries) - _FIRST) // (2 * max(1, len(job.targets)))
    for number, target in enumerate(job.targets):
        part = slice(_FIRST + number * each, _FIRST + (number + 1) * each)
        found[f"settled_{target}"] = _settled(index, queries[part], truth[part], target)
    return found


def _load_navigation(job: Job, peer: Any, queries: Any, truth: Any) -> dict[str, Any]:
    index, bytes_wanted = peer.index, peer.navigation_bytes()
    before = reads()["read_bytes"]
    took: list[float] = []

    def load() -> None:
        start = time.perf_counter()
        index.warm(budget_bytes=bytes_wanted)
        took.append(time.perf_counter() - start)

    loader = threading.Thread(target=load)
    loader.start()
    latencies: list[float] = []
    answers: list[Any] = []
    asked: list[Any] = []
    while loader.is_alive():
        place = len(asked) % len(queries)
        start = time.perf_counter()
        answers.append(index.search(queries[place], K, deadline_ms=job.deadline_ms))
        latencies.append((time.perf_counter() - start) * 1e3)
        asked.append(truth[place])
    loader.join()
    resident = index.resident()
    found = {
        "bytes": bytes_wanted,
        "share": bytes_wanted / index.total_bytes,
        "seconds": took[0],
        "bytes_read": reads()["read_bytes"] - before,
        "resident": {entry.kind: entry.ratio for entry in resident.kinds},
        "asked_meanwhile": len(asked),
    }
    if asked:
        found |= {f"meanwhile_p{p}_ms": float(np.percentile(latencies, p)) for p in (50, 99)}
        found["meanwhile"] = _answers(answers, asked)
    return found


def touched(job: Job, peer: Any) -> dict[str, Any]:
    """Pages that single queries touch: each is asked of an index that was just opened."""
    peer.prepare()
    import stoker

    queries, truth = np.load(job.queries), np.load(job.truth)
    answers = []
    for query in queries:
        with stoker.open(Path(job.folder) / "index") as index:
            answers.append(index.search(query, K, recall_target=job.target or None))
            answers[-1].summary  # noqa: B018  (worked out while the index is open)
    return _answers(answers, truth)


def _settled(index: Any, queries: Any, truth: Any, target: float) -> dict[str, Any]:
    latencies, answers = [], []
    for query in queries:
        start = time.perf_counter()
        answers.append(index.search(query, K, recall_target=target))
        latencies.append((time.perf_counter() - start) * 1e3)
    return {
        **_answers(answers, truth),
        **{f"p{p}_ms": float(np.percentile(latencies, p)) for p in (50, 99)},
    }


def _answers(answers: list[Any], truth: Any) -> dict[str, Any]:
    found = np.array([hits.ids for hits in answers])
    right = (found[:, :, None] == np.asarray(truth)[:, None, :]).any(axis=1).mean()
    rounds = np.array([hits.rounds for hits in answers])
    pages = np.array([hits.pages_read for hits in answers])
    return {
        "asked": len(answers),
        "recall": float(right),
        "completeness": float(np.mean([hits.completeness for hits in answers])),
        "expected_recall": float(np.mean([hits.expected_recall for hits in answers])),
        "rounds_p50": float(np.median(rounds)),
        "rounds_p99": float(np.percentile(rounds, 99)),
        "pages_p50": float(np.median(pages)),
        "pages_p99": float(np.percentile(pages, 99)),
        "pages_mean": float(pages.mean()),
        "bytes_p50": float(np.median([hits.bytes_read for hits in answers])),
    }
