"""What users of a fleet see while its replicas are restarted one by one, by what each one loads.

Three `stoker serve` processes, each with an index of its own on a throttled volume of its own, one
event log, and open-loop traffic over HTTP: a request leaves when it is due and its latency counts
from then. As behind a Kubernetes Service, requests go by turns to the replicas whose /readyz is
open. Each replica in turn is told to stop (SIGTERM), drains, has its files dropped from the
operating system's cache, and starts again. Compared are a replica that loads nothing, one that
loads everything, in the files' order, and one that loads what the heat asks for, in the same
traffic: latency and errors before, during and after. Nothing is tried again, so that every error
shows.

    python tests/bench/bench_service_fleet.py --prepare        # builds the index, once
    python tests/bench/bench_service_fleet.py                  # tables and a plot

All replicas share the machine here, which they do not in a cluster: a start takes processor time
from those that answer. So the ones that answer, and the traffic, stand ahead of one that starts,
where real-time priorities are allowed. Lookup reuse is off: it would answer part of the traffic
without the index.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.errors import UnavailableError
from stoker.index.collection_build import build_collection
from stoker.prefetch.events import SEARCH_PERFORMED, new_event
from stoker.service.async_client import AsyncClient
from stoker.service.coldstart import workload
from stoker.service.coldstart.page_cache import drop_files, files_of
from stoker.service.coldstart.throttle import CLOUD_VOLUME, Throttle
from stoker.service.demo.story import cpu_name
from stoker.service.event_wiring import open_event_log
from stoker.service.padding import pad_neighbours
from stoker.service.publisher import Publisher
from stoker.service.settings import ServiceSettings
from stoker.service.wire import RetryPolicy

METHODS = {"none": "nothing", "all": "everything", "auto": "Stoker"}
TITLES = {"none": "nothing loaded", "all": "everything loaded", "auto": "Stoker's warm-up"}
REPLICAS = 3
K = 10
PROBE_S = 0.1
RETURNED_S = 3.0  # the first seconds of a replica that came back
WAIT_S = 120.0
ONCE = RetryPolicy(retries_max=0)


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of a run. The traffic before, between and after the restarts is in seconds."""

    out: Path = Path("bench-results/fleet")
    vectors_path: Path | None = None
    generated: int = 8_000
    dim: int = 384
    total: int = 100_000
    rate: float = 40.0
    history: int = 4_000
    quiet_s: float = 5.0
    pause_s: float = 3.0
    notice_s: float = 1.0
    volume: bool = True
    seed: int = 7


SMALL = Options(
    generated=1_500, dim=48, total=1_500, rate=50.0, history=200, quiet_s=0.5, pause_s=0.3,
    notice_s=0.3, volume=False,
)  # fmt: skip


@dataclasses.dataclass
class Restart:
    """When one replica left and came back, in seconds of traffic."""

    replica: int
    left_s: float
    ended_s: float
    started_s: float
    ready_s: float = 0.0


@dataclasses.dataclass
class Run:
    """What the traffic saw under one method. One row of `answers` per request: when it was due,
    its latency in seconds, the replica, and how many pages the search read (-1: it failed)."""

    answers: list[tuple[float, float, int, int]]
    restarts: list[Restart]
    errors: list[str]
    loaded_bytes: list[int]
    cold: bool
    note: str = ""


class Prepared:
    """The index and the traffic; kept under `out`/work for the next run of the same size."""

    def __init__(self, options: Options) -> None:
        self.work = options.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        if options.vectors_path is None:
            real = workload.generated_vectors(options.generated, options.dim, seed=options.seed)
            self.origin = f"{len(real):,} GENERATED vectors"
        else:
            real = workload.read_vectors(options.vectors_path)[: options.total]
            self.origin = f"{len(real):,} real vectors ({options.vectors_path.name})"
        self.index = self.work / "index"
        self.count = options.total
        self._build(real, options)
        # More than enough requests for what is measured; the history is before them.
        count = options.history + int(options.rate * 300)
        self.requests = workload.generated_requests(count, len(real), seed=options.seed)
        self.queries = workload.query_vectors(self.requests.passages, real, seed=options.seed)
        self.events = self.work / "events"
        self._log(options)

    def _build(self, real: workload.Vectors, options: Options) -> None:
        key = hashlib.sha256(real.tobytes() + f"{options.total} {options.seed}".encode())
        kept = self.work / "key"
        if kept.exists() and kept.read_text() == key.hexdigest():
            return
        kept.unlink(missing_ok=True)
        shutil.rmtree(self.index, ignore_errors=True)
        shutil.rmtree(self.work / "run", ignore_errors=True)
        padded, pads = pad_neighbours(real, options.total, seed=options.seed)
        ids = [str(row) for row in range(len(real))] + pads
        build_collection(self.index, padded, ids, metric="cosine")
        kept.write_text(key.hexdigest())

    def _log(self, options: Options) -> None:
        """Ask the history, and leave its events in a log that all replicas follow."""
        shutil.rmtree(self.events, ignore_errors=True)
        settings = ServiceSettings()
        folder = self.work / "history"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        log = open_event_log(settings, folder)
        publisher = Publisher(log, topic=settings.event_topic, threads=False)
        began_s = time.time() - options.history / options.rate
        with stoker.open(self.index) as index:
            found = index.search(self.queries[: options.history], K).ids
        publisher.publish(
            [
                new_event(
                    SEARCH_PERFORMED,
                    tenant="default",
                    session=self.requests.sessions[number],
                    chunk_ids=[str(name) for name in ids],
                    time_s=began_s + number / options.rate,
                )
                for number, ids in enumerate(found.tolist())
            ]
        )
        publisher.close()
        log.close()
        (folder / "events").replace(self.events)


class Replica:
    """One server, its copy of the index, its state and its volume."""

    def __init__(self, number: int, folder: Path, prepared: Prepared, procs: Path | None) -> None:
        self.number = number
        self.index = folder / f"index-{number}"
        self.state = folder / f"state-{number}"
        if not self.index.exists():  # kept for the next method
            shutil.copytree(prepared.index, self.index)
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir()
        (self.state / "events").symlink_to(folder.resolve() / "events")
        self.procs = procs
        self.ready = False
        self.cold = True
        self.process: subprocess.Popen[str] | None = None
        self.client: AsyncClient | None = None

    def start(self, warm: str, options: Options, *, heat: bool = True) -> None:
        """Start it with its files out of the cache; returns when it listens.

        Args:
            heat: Whether it has its heat. Without, everything is loaded in the files' order, as one
                would read them into memory; with heat the hot pages come first, in small reads.
        """
        state = self.state
        if not heat:
            state = state.with_name(f"{state.name}-without-heat")
            shutil.rmtree(state, ignore_errors=True)
        dropped = drop_files(files_of(self.index))
        self.cold = self.cold and dropped.cold
        serve = [
            *(sys.executable, "-P", "-m", "stoker", "serve", str(self.index), "--port", "0"),
            *("--json", "--read-only", "--state-dir", str(state), "--warm", warm),
            *("--set", f"service.drain_notice_s={options.notice_s}"),
            *("--set", "kvcache.reuse_enabled=false"),
        ]
        if self.procs is not None:  # joined before anything is read
            serve = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.procs), *serve]
        self.process = subprocess.Popen(
            serve,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("STOKER_")},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if told["event"] == "listening":
                self.url = told["url"]
                return
        raise UnavailableError(f"replica {self.number} ended with {self.process.wait()}")

    def probe(self) -> None:
        """Ask once whether it is ready, as a kubelet does."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                self.ready = answer.status == 200
        except OSError:  # 503 too
            self.ready = False

    def loaded_bytes(self) -> int:
        status: dict[str, Any] = {"state": "running"}
        end_s = time.monotonic() + WAIT_S
        while status["state"] == "running":  # the receipt comes a moment after /readyz opens
            if time.monotonic() >= end_s:
                raise UnavailableError(f"replica {self.number} still warms after {WAIT_S:g} s")
            with urllib.request.urlopen(f"{self.url}/v1/warmup", timeout=5) as answer:
                status = json.loads(answer.read())
        receipt = status.get("receipt")
        return int(receipt["bytes_read"]) if receipt else 0

    def end(self) -> None:
        """Wait until a replica that was told to stop has ended."""
        assert self.process is not None
        self.process.communicate(timeout=WAIT_S)
        if self.process.returncode:
            raise UnavailableError(f"replica {self.number} ended with {self.process.returncode}")

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


class Fleet:
    """The replicas, the traffic over them, and the roll."""

    def __init__(self, replicas: Sequence[Replica], prepared: Prepared, options: Options) -> None:
        self.replicas = replicas
        self.prepared = prepared
        self.options = options
        self.run = Run([], [], [], [], cold=True)
        self._turn = 0
        self._began_s = 0.0
        self._ended = asyncio.Event()

    def now(self) -> float:
        return time.monotonic() - self._began_s

    async def roll(self, warm: str) -> Run:
        """Bring the fleet up warm by its heat, send the traffic, and restart each replica."""
        options = self.options
        await asyncio.gather(
            *(asyncio.to_thread(replica.start, "auto", options) for replica in self.replicas)
        )
        probing = asyncio.create_task(self._probe())
        for replica in self.replicas:
            await until_ready(replica)
        for replica in self.replicas:
            replica.client = AsyncClient(replica.url, retries=ONCE, deadline_s=30.0)
            await replica.client.search(vector=self.prepared.queries[0], k=K)
            ahead(replica.process)
        self._began_s = time.monotonic()
        traffic = asyncio.create_task(self._traffic())
        await asyncio.sleep(options.quiet_s)
        for replica in self.replicas:
            await self._restart(replica, warm)
            await asyncio.sleep(options.pause_s)
        await asyncio.sleep(options.quiet_s)
        self._ended.set()
        await traffic
        probing.cancel()
        for replica in self.replicas:
            assert replica.client is not None
            await replica.client.close()
            assert replica.process is not None
            replica.process.terminate()
        await asyncio.gather(*(asyncio.to_thread(replica.end) for replica in self.replicas))
        self.run.cold = all(replica.cold for replica in self.replicas)
        return self.run

    async def _restart(self, replica: Replica, warm: str) -> None:
        assert replica.process is not None
        assert replica.client is not None
        left_s = self.now()
        replica.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(replica.end)
        replica.ready = False
        ended_s = self.now()
        old = replica.client
        started_s = self.now()
        await asyncio.to_thread(replica.start, warm, self.options, heat=warm != "all")
        replica.client = AsyncClient(replica.url, retries=ONCE, deadline_s=30.0)
        await until_ready(replica)
        ahead(replica.process)
        self.run.restarts.append(
            Restart(replica.number, left_s, ended_s, started_s, ready_s=self.now())
        )
        print(f"{self.now():6.1f} s: replica {replica.number} is back", file=sys.stderr)
        self.run.loaded_bytes.append(await asyncio.to_thread(replica.loaded_bytes))
        await old.close()

    async def _probe(self) -> None:
        while True:
            for replica in self.replicas:
                await asyncio.to_thread(replica.probe)
            await asyncio.sleep(PROBE_S)

    async def _traffic(self) -> None:
        options = self.options
        gaps = workload.generated_arrivals(int(options.rate * 300), seed=options.seed)
        tasks = []
        for number, due_s in enumerate((gaps / options.rate).tolist()):
            await asyncio.sleep(max(0.0, due_s - self.now()))
            if self._ended.is_set():
                break
            tasks.append(asyncio.create_task(self._ask(options.history + number, due_s)))
        await asyncio.gather(*tasks)

    async def _ask(self, number: int, due_s: float) -> None:
        ready = [replica for replica in self.replicas if replica.ready]
        self._turn += 1
        if not ready:
            self.run.errors.append(f"{self.now():.2f} s: no replica is ready")
            self.run.answers.append((due_s, self.now() - due_s, -1, -1))
            return
        replica = ready[self._turn % len(ready)]
        assert replica.client is not None
        pages = -1
        try:
            answer = await replica.client.search(
                vector=self.prepared.queries[number % len(self.prepared.queries)],
                k=K,
                session=self.prepared.requests.sessions[number % len(self.prepared.queries)],
            )
            pages = answer.pages_read
        except stoker.StokerError as error:
            self.run.errors.append(f"{self.now():.2f} s, replica {replica.number}: {error}")
        self.run.answers.append((due_s, self.now() - due_s, replica.number, pages))


async def until_ready(replica: Replica, *, wait_s: float = WAIT_S) -> None:
    """Wait until a replica was found ready.

    Raises:
        UnavailableError: it has ended, or is not ready after ``wait_s``.
    """
    end_s = time.monotonic() + wait_s
    while not replica.ready:
        assert replica.process is not None
        code = replica.process.poll()
        if code is not None:
            raise UnavailableError(f"replica {replica.number} ended with {code}")
        if time.monotonic() >= end_s:
            raise UnavailableError(f"replica {replica.number} is not ready after {wait_s:g} s")
        await asyncio.sleep(PROBE_S / 10)


def ahead(process: subprocess.Popen[str] | None) -> None:
    """Put a replica that answers ahead of one that starts, where that is allowed."""
    assert process is not None
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


def measure(prepared: Prepared, method: str, options: Options) -> Run:
    """Roll a fleet under one method."""
    folder = prepared.work / "run"
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / "events", ignore_errors=True)
    shutil.copytree(prepared.events, folder / "events")
    note = ""
    with contextlib.ExitStack() as stack:
        replicas: list[Replica] = []
        for number in range(REPLICAS):
            procs = None
            if options.volume:
                try:
                    procs = stack.enter_context(Throttle(folder, CLOUD_VOLUME)).procs_path
                except UnavailableError as error:
                    note = f"not throttled: {error}"
            replicas.append(Replica(number, folder, prepared, procs))
            stack.callback(replicas[-1].kill)
        run = asyncio.run(Fleet(replicas, prepared, options).roll(method))
    run.note = note
    return run


def parts_of(run: Run) -> dict[str, np.ndarray[Any, Any]]:
    """Return the latencies in ms of the answered requests before, during and after the restarts,
    and of those that a replica got in its first seconds after it came back."""
    rows = np.array(sorted(run.answers))
    due, latency, replica, pages = rows.T
    good = pages >= 0
    begins, ends = run.restarts[0].left_s, run.restarts[-1].ready_s + RETURNED_S
    returned = np.zeros(len(rows), dtype=bool)
    for restart in run.restarts:
        since = due - restart.ready_s
        returned |= (replica == restart.replica) & (since >= 0) & (since < RETURNED_S)
    choices = {
        "before": due < begins,
        "during": (due >= begins) & (due < ends),
        "after": due >= ends,
        "returned": returned,
    }
    return {name: latency[chosen & good] * 1e3 for name, chosen in choices.items()}


def table(runs: dict[str, Run]) -> str:
    """Return the figures as Markdown."""
    heads = [METHODS[method] for method in runs]
    out = ["| a restarted replica loads | " + " | ".join(heads) + " |"]
    out.append("| --- |" + " ---: |" * len(heads))

    def row(name: str, cells: Sequence[str]) -> None:
        out.append(f"| {name} | " + " | ".join(cells) + " |")

    parts = {method: parts_of(run) for method, run in runs.items()}
    row(
        "requests; failed",
        [f"{len(run.answers):,}; {len(run.errors)}" for run in runs.values()],
    )
    for name, text in (
        ("before", "before"),
        ("during", "while replicas restart"),
        ("returned", f"of a replica's first {RETURNED_S:g} s after it came back"),
        ("after", "after"),
    ):
        for share, label in ((50, "p50"), (99, "p99"), (100, "max")):
            cells = [
                f"{np.percentile(part[name], share):.1f}" if len(part[name]) else "-"
                for part in parts.values()
            ]
            row(f"{text}: {label}, ms", cells)
    row(
        "ready, s after its start",
        [
            f"{np.median([r.ready_s - r.started_s for r in run.restarts]):.1f}"
            for run in runs.values()
        ],
    )
    row(
        "read before ready, MiB",
        [f"{np.median(run.loaded_bytes) / 2**20:.0f}" for run in runs.values()],
    )
    return "\n".join(out)


def facts(prepared: Prepared, runs: dict[str, Run], options: Options) -> list[str]:
    """Return what a reader must know."""
    disk = f"{CLOUD_VOLUME.label} for each replica" if options.volume else "the machine's own disk"
    notes = sorted({run.note for run in runs.values() if run.note})
    cold = all(run.cold for run in runs.values())
    return [
        f"{cpu_name()}, {len(os.sched_getaffinity(0))} processors for all three replicas and the"
        f" traffic; load {', '.join(f'{load:.1f}' for load in os.getloadavg())} at the end",
        f"{prepared.count:,} vectors: {prepared.origin}, the rest generated near neighbours",
        f"{options.rate:g} requests a second (Poisson), lookup reuse off; {disk}",
        f"files {'dropped' if cold else 'NOT wholly dropped'} from the OS cache before each start",
        *notes,
    ]


def plot(runs: dict[str, Run], path: Path) -> None:
    """Draw every latency over time, one panel a method, the restarts shaded."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as drawing

    canvas, axes = drawing.subplots(
        len(runs), 1, figsize=(9, 2.3 * len(runs) + 0.8), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, (method, run) in zip(axes[:, 0], runs.items(), strict=True):
        for restart in run.restarts:
            axis.axvspan(restart.left_s, restart.ready_s, color="#0072B2", alpha=0.15, linewidth=0)
        rows = np.array([row for row in run.answers if row[3] >= 0])
        axis.plot(rows[:, 0], rows[:, 1] * 1e3, ".", color="#333333", markersize=2.5)
        failed = [row[0] for row in run.answers if row[3] < 0]
        axis.plot(failed, [1.0] * len(failed), "x", color="#D55E00")
        axis.set_yscale("log")
        axis.set_ylabel("latency, ms")
        axis.set_title(TITLES[method], loc="left", fontweight="bold", fontsize=10)
        axis.grid(alpha=0.25)
    axes[-1, 0].set_xlabel("seconds of traffic (shaded: a replica is out, from SIGTERM to ready)")
    canvas.suptitle("A rolling restart of three replicas: latency of every request")
    canvas.savefig(path, dpi=130)
    drawing.close(canvas)


def test_a_roll_fails_no_request(tmp_path: Path) -> None:
    """The small size: it runs, and nothing fails; never on time."""
    options = dataclasses.replace(SMALL, out=tmp_path)
    prepared = Prepared(options)
    runs = {"auto": measure(prepared, "auto", options)}
    (run,) = runs.values()
    assert not run.errors
    assert len(run.restarts) == REPLICAS
    assert all(size > 0 for size in run.loaded_bytes)
    assert "| requests; failed |" in table(runs)


def test_a_replica_that_does_not_get_ready_ends_the_roll(tmp_path: Path) -> None:
    options = dataclasses.replace(SMALL, out=tmp_path, generated=60, total=60, history=5)
    prepared = Prepared(options)
    folder = tmp_path / "run"
    shutil.copytree(prepared.events, folder / "events")
    replica = Replica(0, folder, prepared, None)
    with contextlib.ExitStack() as stack:
        stack.callback(replica.kill)
        replica.process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
        )
        with pytest.raises(UnavailableError, match="replica 0 is not ready after 0 s"):
            asyncio.run(until_ready(replica, wait_s=0.0))
        replica.process.communicate("\n")
        with pytest.raises(UnavailableError, match="replica 0 ended with 0"):
            asyncio.run(until_ready(replica))
    # Nobody to ask is a failed request, and no fault of the benchmark.
    fleet = Fleet([replica], prepared, options)
    asyncio.run(fleet._ask(0, 1.5))
    assert [answer[2:] for answer in fleet.run.answers] == [(-1, -1)]
    assert len(fleet.run.errors) == 1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Options.out)
    parser.add_argument("--vectors", type=Path, help=".npy of embeddings; else some are generated")
    parser.add_argument("--total", type=int, default=Options.total, help="padded to so many")
    parser.add_argument("--rate", type=float, default=Options.rate, help="requests a second")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--own-disk", action="store_true", help="no throttle")
    parser.add_argument("--prepare", action="store_true", help="build the index, and end")
    args = parser.parse_args(argv)
    # Ended from outside, it lets its servers and its control groups go all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = Options(
        out=args.out,
        vectors_path=args.vectors,
        total=args.total,
        rate=args.rate,
        volume=not args.own_disk,
    )
    prepared = Prepared(options)
    if args.prepare:
        return 0
    with contextlib.suppress(OSError):  # where it is not allowed, the traffic is as all others
        # Not what is started from here: a replica gets there when it answers.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    runs = {name: measure(prepared, name, options) for name in args.methods.split(",")}
    text = "\n".join([table(runs), "", *(f"* {fact}" for fact in facts(prepared, runs, options))])
    print(text)
    for method, run in runs.items():
        for error in run.errors[:5]:
            print(f"  {METHODS[method]}: {error}")
    (args.out / "fleet.md").write_text(text + "\n")
    (args.out / "fleet.json").write_text(
        json.dumps({name: dataclasses.asdict(run) for name, run in runs.items()})
    )
    plot(runs, args.out / "fleet.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
