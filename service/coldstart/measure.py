"""Measures cold starts: each in a fresh process, on files really dropped from the OS cache.

The modes take turns within each repeat, so that a noisy minute of the machine hits all of them, and
each repeat begins with another one, because the disk and its throttle remember who read before;
medians over the repeats are reported, with the spread. Recall is against exact search, computed by
the caller. The same harness serves `stoker demo` and the benchmarks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.service.coldstart.job import MODES, ColdJob, ColdRecord, read_answers
from stoker.service.coldstart.page_cache import CacheDrop, drop_files, files_of
from stoker.service.coldstart.throttle import OWN_DISK, Throttle, Volume

_log = structlog.get_logger(__name__)

Progress = Callable[[str], None]
_REPEATS_MIN = 3


@dataclasses.dataclass(frozen=True)
class ColdBench:
    """What is measured.

    Attributes:
        index_path: Folder of the index; everything below is dropped from the cache.
        queries: float32, shape (n, dim): the next traffic, one after the other.
        truth: Exact ids per query, shape (n, k).
        heat_path: The heat graph's snapshot.
        budget_ratio: Share of the index's bytes that Stoker may load before it is ready.
        index_bytes: Bytes of all pages.
        k, tenant, now_s, first_deadline_ms, ef, recall_target, opener: See `ColdJob`.
        repeats: Cold starts of each mode on each volume.
        volume_s: After so many seconds on one volume no repeat begins that is not one of the first
            three; 0 means no such bound.
        timeout_s: Longest that one cold start may take.
    """

    index_path: Path
    queries: NDArray[np.float32]
    truth: Sequence[Sequence[Any]]
    heat_path: Path
    index_bytes: int
    budget_ratio: float = 0.2
    k: int = 10
    tenant: str = "default"
    now_s: float = 0.0
    first_deadline_ms: float = 0.0
    ef: int = 0
    recall_target: float = 0.0
    opener: str = "stoker.service.embedded:open"
    modes: tuple[str, ...] = MODES
    repeats: int = 3
    volume_s: float = 0.0
    timeout_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class ColdRun:
    """One cold start: what it saw, how right it was, and how cold it really was."""

    volume: Volume
    repeat: int
    record: ColdRecord
    recall: float
    drop: CacheDrop


@dataclasses.dataclass(frozen=True)
class VolumeSkipped:
    """A volume that was not measured, and why."""

    volume: Volume
    reason: str


def measure(
    bench: ColdBench,
    volumes: Sequence[Volume] = (OWN_DISK,),
    *,
    progress: Progress | None = None,
) -> tuple[list[ColdRun], list[VolumeSkipped]]:
    """Run every mode on every volume, `repeats` times.

    Blocks for the sum of the cold starts. Leaves nothing behind: control groups and temporary
    files are removed.

    Raises:
        UnavailableError: a measured process failed or took too long; its last words are in the
            message.
    """
    runs: list[ColdRun] = []
    skipped: list[VolumeSkipped] = []
    with tempfile.TemporaryDirectory(prefix="stoker-cold-") as folder:
        queries_path = Path(folder, "queries.npy")
        np.save(queries_path, np.ascontiguousarray(bench.queries, dtype=np.float32))
        for volume in volumes:
            try:
                runs.extend(_measure_volume(bench, volume, queries_path, progress))
            except _ThrottleRefused as refused:
                skipped.append(VolumeSkipped(volume, str(refused)))
                _log.info("service.volume_skipped", volume=volume.name, reason=str(refused))
    return runs, skipped


class _ThrottleRefused(Exception):
    """This machine does not let us slow its disk down."""


def _measure_volume(
    bench: ColdBench, volume: Volume, queries_path: Path, progress: Progress | None
) -> Iterator[ColdRun]:
    if not volume.throttled:
        yield from _repeats(bench, volume, queries_path, "", progress)
        return
    with contextlib.ExitStack() as stack:
        try:
            throttle = stack.enter_context(Throttle(bench.index_path, volume))
        except UnavailableError as error:
            raise _ThrottleRefused(str(error)) from error
        yield from _repeats(bench, volume, queries_path, str(throttle.procs_path), progress)


def _repeats(
    bench: ColdBench,
    volume: Volume,
    queries_path: Path,
    procs_path: str,
    progress: Progress | None,
) -> Iterator[ColdRun]:
    started = time.monotonic()
    for repeat in range(bench.repeats):
        late = bench.volume_s and time.monotonic() - started > bench.volume_s
        if late and repeat >= _REPEATS_MIN:
            return
        for mode in in_turn(bench.modes, repeat):
            if progress is not None:
                progress(f"{volume.label}: {mode}, {repeat + 1} of {bench.repeats}")
            drop = drop_files(files_of(bench.index_path))
            answers_path = queries_path.with_name("answers.json")
            job = ColdJob(
                mode=mode,
                index_path=str(bench.index_path),
                queries_path=str(queries_path),
                answers_path=str(answers_path),
                k=bench.k,
                heat_path=str(bench.heat_path),
                tenant=bench.tenant,
                now_s=bench.now_s,
                budget_bytes=int(bench.index_bytes * bench.budget_ratio),
                first_deadline_ms=bench.first_deadline_ms,
                ef=bench.ef,
                recall_target=bench.recall_target,
                procs_path=procs_path,
                opener=bench.opener,
            )
            record = run_process(job, queries_path.parent, timeout_s=bench.timeout_s)
            recall = recall_at_k(read_answers(answers_path), bench.truth)
            yield ColdRun(volume, repeat, record, recall, drop)


def in_turn(modes: Sequence[str], repeat: int) -> tuple[str, ...]:
    """Return the modes in a repeat's order: over as many repeats each is once at each place."""
    first = repeat % len(modes)
    return (*modes[first:], *modes[:first])


def run_process(job: ColdJob, folder: Path, *, timeout_s: float) -> ColdRecord:
    """Start one measured process, wait for it, and read its record.

    Raises:
        UnavailableError: it failed or took longer than ``timeout_s``; it is not left running.
    """
    job_path, record_path = folder / "job.json", folder / "record.json"
    record_path.unlink(missing_ok=True)
    job_path.write_text(
        dataclasses.replace(job, started_ns=time.monotonic_ns()).to_json(), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "stoker.service.coldstart.child",
        str(job_path),
        str(record_path),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"the cold start ({job.mode}) took longer than {timeout_s:.0f} s and was stopped"
        ) from error
    if done.returncode or not record_path.exists():
        words = " ".join(done.stderr.split())[-600:] or f"exit status {done.returncode}"
        raise UnavailableError(f"the measured process ({job.mode}) failed: {words}")
    return ColdRecord.from_json(record_path.read_text(encoding="utf-8"))


def recall_at_k(found: Sequence[Sequence[Any]], truth: Sequence[Sequence[Any]]) -> float:
    """Return the mean share of the exact ids that were found, per query; missing hits count as 0.

    Raises:
        ValueError: another number of answers than queries.
    """
    shares = [
        len(set(got) & set(right)) / len(right) for got, right in zip(found, truth, strict=True)
    ]
    return float(np.mean(shares)) if shares else 0.0
