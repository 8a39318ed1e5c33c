"""The parts of the engine benchmark: warm, cold, under a budget."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Final

import numpy as np
from engine_data import Questions, skewed_stream
from engine_job import Job
from engine_peers import PEERS
from engine_run import Bench, say

from stoker.service.coldstart.throttle import CLOUD_VOLUME, OWN_DISK, Volume

TARGETS: Final = (0.95, 0.99)
COLD_QUERIES: Final = 200
DEADLINE_MS: Final = 10.0
# What a process needs beside its imports and its index: buffers of its allocator, of its threads.
SLACK_BYTES: Final = 24 << 20
_TUNE_QUERIES: Final = 1_000


def warm(bench: Bench, asked: Questions, repeats: int) -> dict[str, Any]:
    """Everything resident: speeds over efforts, on one thread and on two."""
    found = {}
    for peer in bench.peers:
        for threads in (1,) if PEERS[peer].own_threads else (1, 2):
            say(f"warm: {peer}, {threads} thread(s)")
            job = bench.job("warm", peer, repeats=repeats)
            found[f"{peer}/{threads}"] = bench.run(job, asked, threads=threads)
    return found


class Efforts:
    """The effort at which an engine reaches a recall on a set of queries, worked out once."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._known: dict[str, int] = {}

    def at(self, peer: str, name: str, asked: Questions, target: float, **opened: Any) -> int:
        """The smallest; 0 where it reaches it with none.

        ``opened`` is how it is opened, where what it compares depends on that: under a small
        budget Stoker walks on smaller codes.
        """
        key = "/".join([peer, name, str(target), str(opened.get("memory_bytes", "resident"))])
        if key not in self._known:
            say(f"tuning {key}")
            job = self._bench.job("tune", peer, target=target, **opened)
            self._known[key] = self._bench.effort(job, asked[:_TUNE_QUERIES])
        return self._known[key]

    def all(self) -> dict[str, int]:
        """What was worked out, for the record."""
        return dict(self._known)


def device(bench: Bench, volume: Volume) -> dict[str, Any]:
    """The device's own speed on a volume."""
    file = bench.work / f"vectors-{bench.corpus.key}.npy"
    job = Job("device", "stoker", str(file), vectors=str(file))
    return bench.cold(job, None, volume)


def cold(
    bench: Bench, asked: Questions, efforts: Efforts, repeats: int, volumes: list[Volume]
) -> dict[str, Any]:
    """Fresh processes on dropped files; engines and modes take turns within each repeat."""
    first = asked[:COLD_QUERIES]
    found: dict[str, Any] = {"device": {}, "runs": {}, "moments": {}}
    tuned = {
        peer: efforts.at(peer, "uniform", asked, 0.95)
        for peer in bench.peers
        if PEERS[peer].cold_modes and peer != "stoker"
    }
    share = 0.15  # what Stoker's navigation set may take, given to those who have a cache to fill
    same_memory = int(share * bench.bytes_of("stoker")) if "stoker" in bench.peers else 0
    for volume in volumes:
        say(f"device: {volume.label}")
        found["device"][volume.name] = device(bench, volume)
        for repeat in range(repeats):
            for peer in bench.peers:
                told = PEERS[peer].told_modes if volume.throttled else ()
                for mode in (*PEERS[peer].cold_modes, *told):
                    say(f"cold {repeat + 1}/{repeats}: {peer} {mode} on {volume.label}")
                    job = bench.job("cold", peer, mode=mode)
                    if mode in told:
                        job.stated_iops, job.stated_bytes_s = volume.iops, volume.bytes_s
                    if peer == "stoker":
                        job.target = 0.95  # by its public interface: it chooses the width itself
                    else:
                        job.effort = tuned[peer] or PEERS[peer].efforts[-1]
                        job.memory_bytes = same_memory
                    run = bench.cold(job, first, volume)
                    found["runs"].setdefault(f"{peer}/{mode}/{volume.name}", []).append(run)
            if "stoker" not in bench.peers:
                continue
            for told in (False, True) if volume.throttled else (False,):
                name = f"{volume.name}, told" if told else volume.name
                say(f"cold {repeat + 1}/{repeats}: stoker's moments on {name}")
                job = bench.job(
                    "moments",
                    "stoker",
                    targets=list(TARGETS),
                    deadline_ms=DEADLINE_MS,
                    stated_iops=volume.iops if told else 0,
                    stated_bytes_s=volume.bytes_s if told else 0,
                )
                part = asked[: 2 * len(TARGETS) * COLD_QUERIES + 1]
                run = bench.cold(job, part, volume)
                found["moments"].setdefault(name, []).append(run)
    return found


@dataclasses.dataclass(frozen=True)
class Stream:
    """Queries for long-running processes.

    Attributes:
        asked: The stretch that is measured, its first queries unmeasured.
        earlier: File of queries that came before; empty where nothing is known.
        heat: File of the ids that Stoker found for them and how often; empty likewise.
    """

    asked: Questions
    earlier: str = ""
    heat: str = ""


def streams(bench: Bench, uniform: Questions, *, learnt: int, asked: int) -> dict[str, Stream]:
    """The uniform queries, and the skewed, drifting ones with what was learnt before them."""
    before, after = skewed_stream(bench.corpus, learnt, asked, bench.work)
    queries = bench.work / f"earlier-{bench.corpus.key}.npy"
    heat = bench.work / f"heat-{bench.corpus.key}.npz"
    np.save(queries, before)
    say(f"learning from {len(before):,} earlier queries")
    job = bench.job("heat", "stoker", target=0.95, heat=str(heat))
    learning = bench.run(job, Questions(before, np.zeros((len(before), 1), np.int64)), threads=2)
    if "error" in learning:
        raise SystemExit(f"no heat could be learnt: {learning['error']}")
    return {
        "uniform": Stream(uniform[:asked]),
        "skewed": Stream(after, str(queries), str(heat)),
    }


@dataclasses.dataclass(frozen=True)
class BudgetPlan:
    """What the budget part measures.

    Attributes:
        shares: Budgets as shares of the bytes of Stoker's index.
        targets: Recalls.
        repeats: Processes of each.
        seconds_max: Longest stretch that is measured in one; slow engines answer fewer queries.
        settle: Queries before it.
        volumes: Disks.
    """

    shares: list[float]
    targets: list[float]
    repeats: int
    seconds_max: float
    settle: int
    volumes: list[Volume]


def budget(
    bench: Bench, streams: dict[str, Stream], efforts: Efforts, plan: BudgetPlan
) -> dict[str, Any]:
    """Long-running processes under a hard memory limit, each warmed by earlier queries if it can.

    The budget is a share of the bytes of Stoker's index and the same bytes for everyone. The limit
    adds what a process of that engine needs anyway, measured, and `SLACK_BYTES`. Share 1.0 is
    Stoker with everything resident and no limit, which the others are compared with.
    """
    peers = [peer for peer in bench.peers if PEERS[peer].budget_mode]
    constants = {peer: constant_bytes(bench, peer, streams["uniform"].asked) for peer in peers}
    found: dict[str, Any] = {
        "index_bytes": bench.bytes_of("stoker"),
        "slack_bytes": SLACK_BYTES,
        "constants": constants,
        "extra": {peer: PEERS[peer].extra_bytes(bench.folder(peer)) for peer in peers},
        "runs": {},
    }
    # Repeats are the outermost, so that a noisy minute of the machine hits all engines.
    for repeat in range(plan.repeats):
        for name, target, share, peer in itertools.product(
            streams, plan.targets, [1.0, *plan.shares], peers
        ):
            if share == 1.0 and peer != "stoker":
                continue
            for volume in plan.volumes:
                key = f"{peer}/{name}/{target}/{share}/{volume.name}"
                job, limit = budget_job(bench, peer, streams[name], share, constants[peer])
                opened = {"mode": job.mode, "memory_bytes": job.memory_bytes, "heat": job.heat}
                if peer != "stoker" or share == 1.0:
                    opened = {}
                effort = efforts.at(peer, name, streams[name].asked, target, **opened)
                if not effort:
                    found["runs"][key] = [{"error": "never reaches it"}]
                    continue
                say(f"budget {repeat + 1}/{plan.repeats}: {key}")
                job.effort, job.target = effort, target
                job.settle, job.seconds_max = plan.settle, plan.seconds_max
                run = bench.cold(job, streams[name].asked, volume, limit_bytes=limit)
                found["runs"].setdefault(key, []).append(run)
    return found


def constant_bytes(bench: Bench, peer: str, asked: Questions) -> int:
    """What a process of an engine holds with no index; the queries are in it."""
    alone = bench.run(bench.job("empty", peer), asked)
    if "error" in alone:
        raise SystemExit(f"{peer} cannot be imported: {alone['error']}")
    return int(alone["memory"]["rss_bytes"])


def budget_job(
    bench: Bench, peer: str, stream: Stream, share: float, constant: int
) -> tuple[Job, int]:
    """The measurement and its memory limit; 0 for none."""
    if share == 1.0:
        return bench.job("budget", peer), 0
    job = bench.job(
        "budget",
        peer,
        mode=PEERS[peer].budget_mode,
        memory_bytes=int(share * bench.bytes_of("stoker")),
        earlier=stream.earlier,
        heat=stream.heat if peer == "stoker" else "",
    )
    extra = PEERS[peer].extra_bytes(bench.folder(peer))
    return job, job.memory_bytes + extra + constant + SLACK_BYTES


def volumes_of(names: str) -> list[Volume]:
    """The volumes by their names."""
    known = {volume.name: volume for volume in (OWN_DISK, CLOUD_VOLUME)}
    return [known[name] for name in names.split(",")]
