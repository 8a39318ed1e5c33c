"""How fast a graph that is linked already becomes a segment, beside the disk's own writing.

The links are hnswlib's, so linking, which takes nearly all of a build, is not in it. Memory is what
the process holds of its own (mapped input files are not), sampled while it works.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from engine_job import Job
from engine_proc import status_bytes

if TYPE_CHECKING:
    from engine_run import Bench

_SAMPLE_S = 0.01
_WRITE_BYTES = 4 << 20


def sealing(bench: Bench, repeats: int) -> list[dict[str, Any]]:
    """Seal hnswlib's graph in a fresh process, ``repeats`` times."""
    place = bench.work / f"sealing-{bench.corpus.key}"
    runs = []
    for _ in range(repeats):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        job = Job(
            "seal",
            "stoker",
            str(place),
            earlier=str(bench.folder("hnswlib") / "index.bin"),
            vectors=str(bench.work / f"vectors-{bench.corpus.key}.npy"),
        )
        runs.append(bench.run(job, threads=len(os.sched_getaffinity(0))))
    shutil.rmtree(place, ignore_errors=True)
    return runs


def seal(job: Job, peer: Any) -> dict[str, Any]:
    """In the measured process: seal, then write as many bytes of nothing in particular."""
    from stoker.index.hnswlib_file import read_hnswlib
    from stoker.index.seal import seal_graph

    vectors = np.load(job.vectors, mmap_mode="r")
    graph = read_hnswlib(Path(job.earlier), dim=vectors.shape[1])
    before = status_bytes("RssAnon")
    peaks = {"sealing": before, "calibrating": before}
    phase = ["sealing"]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            peaks[phase[0]] = max(peaks[phase[0]], status_bytes("RssAnon"))

    def progress(what: str, _done: int, _total: int) -> None:
        if what == "calibrate":
            phase[0] = "calibrating"

    sampler = threading.Thread(target=sample)
    sampler.start()
    began = time.process_time()
    try:
        report = seal_graph(
            Path(job.folder) / "index",
            graph,
            vectors,
            np.arange(len(vectors)),
            metric="ip",
            source_rows=graph.labels.astype(np.int64),
            progress=progress,
        )
    finally:
        done.set()
        sampler.join()
    cpu_s = time.process_time() - began
    return {
        "bytes": report.total_bytes,
        "seal_s": report.seal_s,
        "calibrate_s": report.calibrate_s,
        "cpu_s": cpu_s,
        "write_s": _write_s(Path(job.folder) / "plain", report.total_bytes),
        "peak_bytes": {name: peak - before for name, peak in peaks.items()},
    }


def _write_s(path: Path, size: int) -> float:
    """Seconds that the disk takes for as many bytes, written from the front and made durable."""
    block = np.random.default_rng(0).bytes(_WRITE_BYTES)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, _WRITE_BYTES):
            file.write(block[: min(_WRITE_BYTES, size - start)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds
