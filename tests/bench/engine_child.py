"""The measured process of the engine benchmark: one peer, one way of opening, one set of queries.

Run as ``python engine_child.py JOB``, JOB a JSON file; prints one JSON object. It measures one
thing, so that nobody's memory, cache or threads are anybody else's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_peers import PEERS

K = 10


def recall(found: Any, truth: Any) -> float:
    """Share of the true ids that were found."""
    return float((np.asarray(found)[:, :, None] == truth[:, None, :]).any(axis=1).mean())


def read_bytes() -> int:
    """Bytes that the kernel has read from devices for this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return -1


def warm(job: dict[str, Any], peer: Any, queries: Any, truth: Any) -> dict[str, Any]:
    """Speeds over efforts: batches, and on one thread also one query at a time."""
    rows = []
    for effort in peer.efforts:
        ids = peer.search(queries, K, effort, 1)
        row: dict[str, Any] = {"effort": effort, "recall": recall(ids, truth)}
        row["batch"] = []
        for _ in range(job["repeats"]):
            start = time.perf_counter()
            peer.search(queries, K, effort, job["threads"])
            row["batch"].append(len(queries) / (time.perf_counter() - start))
        if job["threads"] == 1:
            singles = queries[: min(len(queries), 500)]
            row["single"] = []
            for _ in range(job["repeats"]):
                start = time.perf_counter()
                for i in range(len(singles)):
                    peer.search(singles[i : i + 1], K, effort, 1)
                row["single"].append(len(singles) / (time.perf_counter() - start))
        rows.append(row)
        if row["recall"] > 0.9985:
            break
    return {"rows": rows}


def cold(job: dict[str, Any], peer: Any, queries: Any, truth: Any, opened: float) -> dict[str, Any]:
    """The first queries after opening, one at a time."""
    before = read_bytes()
    latencies = []
    answers = []
    first = 0.0
    for i in range(len(queries)):
        start = time.perf_counter()
        answers.append(np.asarray(peer.search(queries[i : i + 1], K, job["effort"], 1))[0])
        latencies.append(time.perf_counter() - start)
        first = first or time.monotonic() - job["started"]
    ordered = np.sort(latencies) * 1e3
    return {
        "open_ms": opened * 1e3,
        "first_answer_ms": first * 1e3,
        "p50_ms": float(np.percentile(ordered, 50)),
        "p99_ms": float(np.percentile(ordered, 99)),
        "qps": len(queries) / float(np.sum(latencies)),
        "recall": recall(np.array(answers), truth),
        "bytes_while_answering": read_bytes() - before,
        "bytes_in_all": read_bytes(),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for procs in job["groups"]:
        Path(procs).write_text(str(os.getpid()))
    queries = np.load(job["queries"])
    truth = np.load(job["truth"])
    peer = PEERS[job["peer"]]()
    start = time.perf_counter()
    peer.open(Path(job["folder"]), job["mode"], job["memory_bytes"])
    opened = time.perf_counter() - start
    measured = (
        warm(job, peer, queries, truth)
        if job["kind"] == "warm"
        else cold(job, peer, queries, truth, opened)
    )
    measured["open_ms"] = opened * 1e3
    measured["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
