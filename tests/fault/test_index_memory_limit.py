"""A process that serves under a budget keeps to it and a stated constant, under a hard limit.

The constant is the benchmark's: what a process needs with no index open, and `SLACK_BYTES`. Two
hard limits are tried: a memory control group, whose breach is a kill, and RLIMIT_AS, whose breach
is a failed allocation. What was resident at most is read from the kernel (VmHWM) either way.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker

COUNT, DIM = 5_000, 1_536
QUERIES = 500
SHARE = 0.1
STREAMS = ("uniform", "skewed")


@dataclasses.dataclass(frozen=True)
class Stand:
    """An index, questions for it, and the parts of the benchmark that measure a process."""

    parts: Any
    groups: Any
    bench: Any
    streams: dict[str, Any]
    empty: dict[str, Any]

    @property
    def constant_bytes(self) -> int:
        """What is resident beside the index's pages."""
        return int(self.empty["memory"]["rss_bytes"]) + int(self.parts.SLACK_BYTES)

    @property
    def mapped_bytes(self) -> int:
        """The same of what is mapped."""
        return int(self.empty["memory"]["mapped_bytes"]) + int(self.parts.SLACK_BYTES)

    def job(self, stream: str) -> Any:
        job, _ = self.parts.budget_job(self.bench, "stoker", self.streams[stream], SHARE, 0)
        job.target, job.settle = 0.9, 50
        return job


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "bench"))
        data, run, parts, groups = (
            importlib.import_module(f"engine_{name}") for name in ("data", "run", "parts", "groups")
        )
        work = tmp_path_factory.mktemp("engine")
        rng = np.random.default_rng(5)
        centres = rng.standard_normal((200, DIM)).astype(np.float32)
        vectors = centres[rng.integers(0, len(centres), COUNT)]
        vectors += np.float32(0.6) * rng.standard_normal((COUNT, DIM)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        bench = run.Bench(work, data.Corpus(vectors, "limit"), ["stoker"])
        stoker.build(
            bench.folder("stoker") / "index", vectors, metric="ip", m=8, ef_construction=16
        )
        asked = data.questions(bench.corpus, QUERIES, work)
        streams = parts.streams(bench, asked, learnt=QUERIES, asked=QUERIES)
        empty = bench.run(bench.job("empty", "stoker"), asked)
        assert "error" not in empty, empty
        yield Stand(parts, groups, bench, streams, empty)


def served(stand: Stand, run: dict[str, Any]) -> None:
    """Check that the measured process answered its queries, and read to do so."""
    assert "error" not in run, run
    assert run["asked"] == QUERIES - 50
    assert run["recall"] > 0.85
    assert run["own"]["page_misses"] > 0
    assert run["own"]["resident_bytes"] <= SHARE * stand.bench.bytes_of("stoker")


def within(stand: Stand, run: dict[str, Any]) -> bool:
    budget = int(SHARE * stand.bench.bytes_of("stoker"))
    return bool(run["memory"]["peak_rss_bytes"] <= stand.constant_bytes + budget)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_budget_holds_in_a_control_group(stand: Stand, stream: str) -> None:
    with stand.groups.memory_limit(1 << 30) as possible:
        if isinstance(possible, str):
            pytest.skip(possible)
    job = stand.job(stream)
    limit = job.memory_bytes + stand.constant_bytes
    run = stand.bench.cold(job, stand.streams[stream].asked, limit_bytes=limit)
    served(stand, run)
    assert 0 < run["group_peak_bytes"] <= limit
    assert within(stand, run)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_budget_holds_under_a_limit_of_what_may_be_mapped(stand: Stand, stream: str) -> None:
    job = stand.job(stream)
    job.mapped_bytes_max = stand.mapped_bytes + job.memory_bytes
    run = stand.bench.cold(job, stand.streams[stream].asked)
    served(stand, run)
    assert within(stand, run)


def test_without_a_budget_the_same_searches_hold_more(stand: Stand) -> None:
    """Or the bounds above would say nothing."""
    job = stand.job("uniform")
    limit = stand.mapped_bytes + job.memory_bytes
    job.mode, job.memory_bytes = "resident", 0
    run = stand.bench.cold(job, stand.streams["uniform"].asked)
    assert "error" not in run, run
    assert not within(stand, run)
    assert run["memory"]["mapped_bytes"] > limit
