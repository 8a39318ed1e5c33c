"""Starts each replica in a fresh process on files dropped from the OS cache, in turns.

Within a repeat all scenarios and methods take turns, so that a noisy minute of the machine hits all
of them. Where two scenarios differ in Stoker's state alone (restart and scale-out), one start of a
baseline serves both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from stoker.errors import UnavailableError
from stoker.service.app import search_thread_count
from stoker.service.coldstart.ahead import put_ahead
from stoker.service.coldstart.bench_options import (
    IN_TRAFFIC,
    IN_TRAFFIC_METHODS,
    UNBUDGETED,
    BenchOptions,
)
from stoker.service.coldstart.load_job import LOAD_HEAT, LOAD_LIST, LoadJob, LoadRecord
from stoker.service.coldstart.measure import recall_at_k
from stoker.service.coldstart.page_cache import CacheDrop, drop_files, files_of
from stoker.service.coldstart.scenes import Scenario, Scenes, ids_found
from stoker.service.coldstart.throttle import OWN_DISK, Throttle, Volume
from stoker.service.engine_opening import HEAT_NAME
from stoker.service.settings import ServiceSettings

_log = structlog.get_logger(__name__)

Progress = Callable[[str], None]
_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of one replica: what it saw, how right it was, how cold it really was.

    Attributes:
        recall: Of the judged queries, against exact search.
    """

    scenario: str
    method: str
    repeat: int
    record: LoadRecord
    recall: float
    drop: CacheDrop


@dataclasses.dataclass(frozen=True)
class Measured:
    """All starts, and on what disk.

    Attributes:
        disk_note: Why it is not the disk that was asked for; empty where it is.
    """

    starts: list[Start]
    disk: Volume
    disk_note: str


def measure_scenes(options: BenchOptions, scenes: Scenes, progress: Progress) -> Measured:
    """Run all starts; blocks for their sum. Control groups are removed again.

    Raises:
        UnavailableError: a replica failed or took too long; its last words are in the message.
    """
    disk, note = options.disk, ""
    with contextlib.ExitStack() as stack:
        procs_path = ""
        if disk.throttled:
            try:
                throttle = stack.enter_context(Throttle(options.out, disk))
                procs_path = str(throttle.procs_path)
            except UnavailableError as error:
                disk, note = OWN_DISK, f"no {disk.label}, because {error}"
                _log.info("service.volume_skipped", volume=options.disk.name, reason=str(error))
        run = _Run(options, scenes, procs_path, progress)
        starts = [start for repeat in range(options.repeats) for start in run.turn(repeat)]
    return Measured(starts, disk, note)


class _Run:
    def __init__(
        self, options: BenchOptions, scenes: Scenes, procs_path: str, progress: Progress
    ) -> None:
        self._options = options
        self._scenes = scenes
        self._procs_path = procs_path
        self._progress = progress
        self._folder = options.out / "work" / "run"

    def turn(self, repeat: int) -> list[Start]:
        """Start every method of every scenario once."""
        starts: list[Start] = []
        done: dict[tuple[str, str, str, bool], Start] = {}
        for scenario in self._scenes.scenarios:
            for method in self._options.methods:
                gated = scenario.name != IN_TRAFFIC
                if method in self._scenes.left_out:
                    continue
                if not gated and method not in IN_TRAFFIC_METHODS:
                    continue
                key = (
                    method,
                    str(scenario.index_path),
                    str(scenario.queries_path),
                    gated or method == "none",  # ready as soon as it is open
                )
                start = done.get(key) if method != "stoker" else None
                if start is None:
                    self._progress(
                        f"repeat {repeat + 1} of {self._options.repeats}: {scenario.name}, {method}"
                    )
                    start = self._start(scenario, method, repeat)
                    done[key] = start
                starts.append(dataclasses.replace(start, scenario=scenario.name))
        return starts

    def _start(self, scenario: Scenario, method: str, repeat: int) -> Start:
        options, scenes = self._options, self._scenes
        state = self._folder / "state"
        shutil.rmtree(state, ignore_errors=True)
        files = files_of(scenario.index_path)
        if method == "stoker":
            shutil.copytree(scenario.state_path, state)
            assert (state / HEAT_NAME).exists() == (scenario.state_path.name == "back")
            files = files + files_of(state)
        load = {"stoker": LOAD_HEAT}.get(method, method if method in UNBUDGETED else LOAD_LIST)
        job = LoadJob(
            load=load,
            index_path=str(scenario.index_path),
            queries_path=str(scenario.queries_path),
            result_path=str(self._folder / "result.npz"),
            list_path=str(scenario.lists[method]) if load == LOAD_LIST else "",
            state_path=str(state) if load == LOAD_HEAT else "",
            now_s=scenes.now_s,
            budget_bytes=int(scenes.index_bytes * options.budget_ratio),
            k=options.k,
            ef=scenes.ef,
            recall_target=options.recall_target,
            threads=options.threads or search_thread_count(ServiceSettings()),
            gated=scenario.name != IN_TRAFFIC,
            procs_path=self._procs_path,
        )
        drop = drop_files(files)
        record = start_replica(job, timeout_s=_TIMEOUT_S + 4 * options.seconds)
        recall = recall_at_k(ids_found(record.ids, scenario.judged), scenario.truth)
        return Start(scenario.name, method, repeat, record, recall, drop)


def start_replica(job: LoadJob, *, timeout_s: float) -> LoadRecord:
    """Start one measured process, wait for it, and read its record.

    Raises:
        UnavailableError: it failed or took longer than ``timeout_s``; it is not left running.
    """
    result = Path(job.result_path)
    result.unlink(missing_ok=True)
    job_path = result.with_name("job.json")
    job_path.write_text(
        dataclasses.replace(job, started_ns=time.monotonic_ns()).to_json(), encoding="utf-8"
    )
    command = [sys.executable, "-m", "stoker.service.coldstart.load_child", str(job_path)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        put_ahead(process.pid)
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"the replica ({job.load}) took longer than {timeout_s:.0f} s and was stopped"
            ) from error
        finally:
            process.kill()  # nothing is left running, whatever happened
    if process.returncode or not result.exists():
        words = " ".join(said.split())[-600:] or f"exit status {process.returncode}"
        raise UnavailableError(f"the measured replica ({job.load}) failed: {words}")
    return LoadRecord.load(result)
