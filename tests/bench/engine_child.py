"""The measured process of the engine benchmark: one peer, one way of opening, one set of queries.

Run as ``python engine_child.py JOB``, JOB a file of `engine_job.Job`; prints one line, RESULT and
a JSON object. It measures one thing, so that nobody's memory, cache or threads are anybody else's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def join(groups: list[str], mapped_bytes_max: int) -> None:
    """Enter control groups and a limit, before the large imports, whose memory then counts too."""
    for procs in groups:
        Path(procs).write_text(str(os.getpid()))
    if mapped_bytes_max:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes_max, mapped_bytes_max))


if __name__ == "__main__":
    JOB = json.loads(Path(sys.argv[1]).read_text())
    join(JOB["groups"], JOB["mapped_bytes_max"])

import engine_sealing  # noqa: E402
import engine_stages  # noqa: E402
import numpy as np  # noqa: E402
from engine_job import Job  # noqa: E402
from engine_peers import PEERS  # noqa: E402
from engine_proc import Busy, group_reads, memory, reads  # noqa: E402

K = 10
_BLOCK = 100
_PASS_S = 2.0
_STEPS_MAX = 16


def recall(found: Any, truth: Any) -> float:
    """Share of the true ids that were found."""
    return float((np.asarray(found)[:, :, None] == truth[:, None, :]).any(axis=1).mean())


def build(job: Job, peer: Any) -> dict[str, Any]:
    """Build from a file of vectors."""
    vectors = np.load(job.vectors, mmap_mode="r")
    start = time.perf_counter()
    peer.build(Path(job.folder), vectors)
    return {"seconds": time.perf_counter() - start}


def empty(job: Job, peer: Any) -> dict[str, Any]:
    """Import everything, hold the queries, open no index: what a process needs anyway."""
    peer.prepare()
    return {"queries": len(np.load(job.queries))} if job.queries else {}


def opened(job: Job, peer: Any) -> float:
    """Open; return the seconds, imports apart."""
    peer.prepare()
    peer.target, peer.threads = job.target, job.threads
    peer.volume = (job.stated_iops, job.stated_bytes_s)
    if job.earlier:
        # Mapped: most peers never look at it.
        peer.earlier = np.load(job.earlier, mmap_mode="r")
    start = time.perf_counter()
    peer.open(Path(job.folder), job.mode, job.memory_bytes)
    return time.perf_counter() - start


def answered(peer: Any, queries: Any, effort: int, threads: int, seconds: float) -> Any:
    """Answer in blocks until done or the time is up; slow engines answer fewer queries."""
    found: list[Any] = []
    began = time.perf_counter()
    for start in range(0, len(queries), _BLOCK):
        found.append(peer.search(queries[start : start + _BLOCK], K, effort, threads))
        if time.perf_counter() - began > seconds:
            break
    return np.concatenate(found)


def known_heat(job: Job) -> dict[int, float]:
    """Weights by id that earlier queries gave; empty where none are known."""
    if not job.heat:
        return {}
    kept = np.load(job.heat)
    return dict(zip(kept["ids"].tolist(), kept["weights"].tolist(), strict=True))


def tune(job: Job, peer: Any) -> dict[str, Any]:
    """The smallest effort that reaches the target."""
    queries, truth = np.load(job.queries), np.load(job.truth)
    opened(job, peer)
    if job.mode == "budget":
        peer.warm_by(known_heat(job))
    tried = []
    for effort in peer.efforts:
        ids = answered(peer, queries, effort, 1, _PASS_S)
        tried.append((effort, recall(ids, truth[: len(ids)])))
        if tried[-1][1] >= job.target:
            return {"effort": effort, "tried": tried}
    return {"effort": 0, "tried": tried}


def warm(job: Job, peer: Any) -> dict[str, Any]:
    """Speeds over efforts: batches, and on one thread also one query at a time."""
    queries, truth = np.load(job.queries), np.load(job.truth)
    open_s = opened(job, peer)
    rows = []
    # Every other step of a fine list: speeds are read off between two.
    steps = peer.efforts[::2] if len(peer.efforts) > _STEPS_MAX else peer.efforts
    for effort in job.efforts or steps:
        ids = answered(peer, queries, effort, 1, _PASS_S)
        row: dict[str, Any] = {"effort": effort, "recall": recall(ids, truth[: len(ids)])}
        row |= {"asked": len(ids), "batch": []}
        for _ in range(job.repeats):
            start = time.perf_counter()
            peer.search(queries[: len(ids)], K, effort, job.threads)
            row["batch"].append(len(ids) / (time.perf_counter() - start))
        if job.threads == 1:
            singles = queries[: min(len(ids), 500)]
            row["single"] = []
            for _ in range(job.repeats):
                start = time.perf_counter()
                for i in range(len(singles)):
                    peer.search(singles[i : i + 1], K, effort, 1)
                row["single"].append(len(singles) / (time.perf_counter() - start))
        rows.append(row)
        if row["recall"] > 0.9985:
            break
    return {"rows": rows, "open_ms": open_s * 1e3}


def heat(job: Job, peer: Any) -> dict[str, Any]:
    """Answer earlier queries and count what is found: what a service knows of its demand."""
    queries = np.load(job.queries)
    opened(job, peer)
    ids, counts = np.unique(peer.search(queries, K, job.effort, job.threads), return_counts=True)
    np.savez(job.heat, ids=ids[ids >= 0], weights=counts[ids >= 0])
    return {"documents": len(ids)}


def asked_one_by_one(job: Job, peer: Any, queries: Any, truth: Any) -> dict[str, Any]:
    """Ask one query after the other; latencies, recall, reads, a query."""
    before, sent, own = reads(), group_reads(job.io_group), peer.counters()
    latencies, answers = [], []
    began, busy = time.perf_counter(), time.thread_time()
    for i in range(len(queries)):
        start = time.perf_counter()
        answers.append(np.asarray(peer.search(queries[i : i + 1], K, job.effort, 1))[0])
        latencies.append(time.perf_counter() - start)
        if start - began > job.seconds_max:
            break
    busy = time.thread_time() - busy
    count = len(answers)
    after, sent_after, own_after = reads(), group_reads(job.io_group), peer.counters()
    milliseconds = np.array(latencies) * 1e3
    found: dict[str, Any] = {
        "asked": count,
        "qps": count / float(np.sum(latencies)),
        "cpu_us": busy / count * 1e6,
        "recall": recall(np.array(answers), truth[:count]),
        "bytes_per_query": (after["read_bytes"] - before["read_bytes"]) / count,
        "faults_per_query": (after["major_faults"] - before["major_faults"]) / count,
        "reads_per_query": (sent_after - sent) / count if sent >= 0 else None,
        "latency_ms": [round(float(value), 4) for value in milliseconds],
    }
    for percent in (50, 95, 99):
        found[f"p{percent}_ms"] = float(np.percentile(milliseconds, percent))
    if own:
        seen = own_after["page_hits"] - own["page_hits"]
        missed = own_after["page_misses"] - own["page_misses"]
        found["hit_ratio"] = seen / max(1, seen + missed)
        found["misses_per_query"] = missed / count
        found["lookups_per_query"] = (seen + missed) / count
        found["own"] = own_after
    return found


def asked_at_once(job: Job, peer: Any, queries: Any, truth: Any) -> dict[str, float]:
    """Ask all queries in one call; speed, processor time and recall."""
    start, busy = time.perf_counter(), time.process_time()
    ids = peer.search(queries, K, job.effort, job.threads)
    seconds = time.perf_counter() - start
    return {
        "qps": len(queries) / seconds,
        "cpu_us": (time.process_time() - busy) / len(queries) * 1e6,
        "recall": recall(ids, truth),
    }


def cold(job: Job, peer: Any) -> dict[str, Any]:
    """The first queries after opening, one at a time."""
    queries, truth = np.load(job.queries), np.load(job.truth)
    open_s = opened(job, peer)
    found = asked_one_by_one(job, peer, queries, truth)
    found["open_ms"] = open_s * 1e3
    found["first_answer_ms"] = open_s * 1e3 + found["latency_ms"][0]
    found["bytes_in_all"] = reads()["read_bytes"]
    return found


def budget(job: Job, peer: Any) -> dict[str, Any]:
    """A long-running process under a budget: warmed as the peer can be, settled, then measured."""
    queries, truth = np.load(job.queries), np.load(job.truth)
    open_s = opened(job, peer)
    start = time.perf_counter()
    if job.mode == "budget":
        peer.warm_by(known_heat(job))
    warm_s = time.perf_counter() - start
    start = time.perf_counter()
    for i in range(job.settle):
        peer.search(queries[i : i + 1], K, job.effort, 1)
        if time.perf_counter() - start > job.seconds_max:
            break
    found = asked_one_by_one(job, peer, queries[job.settle :], truth[job.settle :])
    del found["latency_ms"]
    # The same queries again: what they left in memory is what the budget holds anyway.
    again = slice(job.settle, job.settle + found["asked"])
    found["batch"] = asked_at_once(job, peer, queries[again], truth[again])
    return {**found, "open_ms": open_s * 1e3, "warm_s": warm_s}


STAGES = {
    "build": build,
    "empty": empty,
    "tune": tune,
    "warm": warm,
    "heat": heat,
    "cold": cold,
    "budget": budget,
    "moments": engine_stages.moments,
    "device": engine_stages.device,
    "touched": engine_stages.touched,
    "seal": engine_sealing.seal,
}


def main(fields: dict[str, Any]) -> None:
    """Measure and print."""
    job = Job.of(fields)
    started_ms = (time.monotonic() - job.started) * 1e3
    busy = Busy()
    measured = STAGES[job.kind](job, PEERS[job.peer]())
    measured["machine"] = busy.since()
    measured["memory"] = memory()
    measured["started_ms"] = started_ms
    print(f"\nRESULT {json.dumps(measured)}", flush=True)
    # Some peers' threads do not end by themselves.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(JOB)
