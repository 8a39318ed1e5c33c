"""Starts the measured processes of the engine benchmark, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine_data import Corpus, Questions
from engine_groups import MemoryGroup, memory_limit
from engine_job import Job
from engine_peers import PEERS

from stoker.errors import UnavailableError
from stoker.service.coldstart.page_cache import drop_files, files_of
from stoker.service.coldstart.throttle import OWN_DISK, Throttle, Volume

CHILD = Path(__file__).resolve().parent / "engine_child.py"
_TIMEOUT_S = 1_800


def say(text: str) -> None:
    """Tell the person who waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def interpreter(peer: str) -> str:
    """The Python that has a peer's package: this one, or one in an environment of the peer's own.

    Some packages pin what others need newer; `make bench` then gives them an environment under
    the benchmark's own, and STOKER_BENCH_PYTHON_<PEER> names another.
    """
    named = os.environ.get(f"STOKER_BENCH_PYTHON_{peer.upper().replace('-', '_')}")
    if named:
        return named
    own = Path(sys.prefix) / "peers" / peer / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def available(peer: str) -> bool:
    """Whether a peer can be run here; says so where not."""
    package = PEERS[peer].package
    python = interpreter(peer)
    if python == sys.executable:
        found = importlib.util.find_spec(package) is not None
    else:
        check = (
            f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        )
        found = subprocess.run([python, "-c", check], check=False).returncode == 0
    if not found:
        say(f"{peer} is left out: package {package} is not installed")
    return found


def peer_versions(peers: list[str]) -> dict[str, str]:
    """Versions of those that have an environment of their own."""
    found = {}
    for peer in peers:
        if interpreter(peer) != sys.executable:
            name = PEERS[peer].distribution
            ask = f"import importlib.metadata as m; print(m.version({name!r}))"
            done = subprocess.run(
                [interpreter(peer), "-c", ask], capture_output=True, text=True, check=True
            )
            found[name] = done.stdout.strip()
    return found


@dataclasses.dataclass
class Bench:
    """One size of index and the engines that are compared on it."""

    work: Path
    corpus: Corpus
    peers: list[str]

    def folder(self, peer: str) -> Path:
        """Where a peer's index is."""
        return self.work / f"{peer}-{self.corpus.key}"

    def job(self, kind: str, peer: str, **fields: Any) -> Job:
        """A measurement on a peer's index."""
        return Job(kind, peer, str(self.folder(peer)), **fields)

    def bytes_of(self, peer: str) -> int:
        """Size of a peer's index."""
        return sum(f.stat().st_size for f in files_of(self.folder(peer)) if f.name != "done")

    def build(self, peer: str) -> float:
        """Build a peer's index unless it is there; return the seconds that it took."""
        folder = self.folder(peer)
        done = folder / "done"
        if not done.exists():
            say(f"building {peer}, {self.corpus.count:,} x {self.corpus.dim}")
            folder.mkdir(exist_ok=True)
            vectors = self.work / f"vectors-{self.corpus.key}.npy"
            made = self.run(
                Job("build", peer, str(folder), vectors=str(vectors)),
                threads=len(os.sched_getaffinity(0)),
                timeout_s=12 * 3_600,
            )
            if "error" in made:
                raise SystemExit(f"{peer} could not be built: {made['error']}")
            done.write_text(str(made["seconds"]))
        return float(done.read_text())

    def run(
        self,
        job: Job,
        asked: Questions | None = None,
        *,
        threads: int = 1,
        timeout_s: float = _TIMEOUT_S,
    ) -> dict[str, Any]:
        """Measure in a fresh process; {"error": ...} where it failed."""
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            place = Path(scratch)
            if asked is not None:
                job.queries, job.truth = str(place / "queries.npy"), str(place / "truth.npy")
                np.save(job.queries, asked.queries)
                np.save(job.truth, asked.truth)
            job.threads, job.started = threads, time.monotonic()
            job.write(place / "job.json")
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "passive",
            }
            with (place / "out").open("w+") as out, (place / "err").open("w+") as errors:
                # Files, not pipes: some peers print a lot.
                try:
                    done = subprocess.run(
                        [interpreter(job.peer), "-P", str(CHILD), str(place / "job.json")],
                        stdout=out,
                        stderr=errors,
                        env=environment,
                        timeout=timeout_s,
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    return {"error": f"not done after {timeout_s:,.0f} s"}
                out.seek(0)
                errors.seek(0)
                answer = next(
                    (line[7:] for line in out.read().splitlines() if line.startswith("RESULT ")), ""
                )
                if done.returncode == -9:
                    return {"error": "killed: over the memory limit"}
                if done.returncode != 0 or not answer:
                    last = errors.read().strip().splitlines()[-1:]
                    return {"error": last[0][:200] if last else f"status {done.returncode}"}
        return dict(json.loads(answer))

    def cold(
        self,
        job: Job,
        asked: Questions | None,
        volume: Volume = OWN_DISK,
        *,
        limit_bytes: int = 0,
    ) -> dict[str, Any]:
        """Measure on files dropped from the cache, on a volume, under a memory limit if given."""
        dropped = drop_files(files_of(Path(job.folder)))
        with contextlib.ExitStack() as stack:
            notes = [dropped.sentence()]
            group: MemoryGroup | None = None
            try:
                throttle = stack.enter_context(Throttle(self.work, volume))
            except UnavailableError as error:
                if volume.throttled:
                    return {"error": str(error)}
            else:
                job.groups.append(str(throttle.procs_path))
                job.io_group = str(throttle.procs_path.parent)
            if limit_bytes:
                limited = stack.enter_context(memory_limit(limit_bytes))
                if isinstance(limited, str):
                    notes.append(limited)
                else:
                    group = limited
                    job.groups.append(str(group.procs_path))
            measured = self.run(job, asked)
            if group is not None:
                measured["group_peak_bytes"] = group.peak_bytes()
                measured["limit_bytes"] = limit_bytes
        measured["notes"] = notes
        return measured

    def effort(self, job: Job, asked: Questions) -> int:
        """The smallest effort that reaches ``job.target`` on these queries; 0 where none does."""
        found = self.run(job, asked)
        if "error" in found:
            say(f"{job.peer} at {job.target}: {found['error']}")
        return int(found.get("effort", 0))
