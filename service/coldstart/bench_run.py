"""`stoker bench coldstart`, start to end: prepare, start replicas in turns, condense, write."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from stoker.errors import UnavailableError
from stoker.service.coldstart import bench_report, plots
from stoker.service.coldstart.bench_options import BenchOptions
from stoker.service.coldstart.load_run import Measured, measure_scenes
from stoker.service.coldstart.scenes import Say, Scenes, prepare_scenes
from stoker.service.coldstart.slo import figures, goals, latencies
from stoker.service.coldstart.summary import Check, Spread
from stoker.service.demo.story import cpu_name


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """What was found, and where it was written.

    Attributes:
        document: Everything, as plain data for JSON.
        markdown: The same for a reader.
    """

    document: dict[str, Any]
    markdown: str
    checks: list[Check]
    json_path: Path
    markdown_path: Path


def run_bench(options: BenchOptions, say: Say) -> BenchResult:
    """Run the benchmark; blocks for minutes.

    Raises:
        StokerError: what is missing or failed, with what to do.
    """
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    scenes = prepare_scenes(options, say)
    measured = measure_scenes(options, scenes, say)
    found = figures(measured.starts, scenes.schedule.arrivals_s, options)
    checks = goals(found, scenes.index_bytes, options)
    facts = _facts(options, scenes, measured, time.monotonic() - began)
    names: list[str] = []
    if options.plots:
        try:
            names = plots.draw(found, options.out, options)
        except UnavailableError as error:
            facts["plots"] = f"left out: {error}"
    common: dict[str, Any] = {
        "facts": facts,
        "left_out": scenes.left_out,
        "index_bytes": scenes.index_bytes,
        "options": options,
    }
    document = bench_report.to_document(found, checks, **common)
    text = bench_report.markdown(found, checks, **common, plots=names)
    _save_latencies(options.out / "coldstart.npz", scenes, measured)
    json_path, markdown_path = options.out / "coldstart.json", options.out / "coldstart.md"
    json_path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    markdown_path.write_text(text, encoding="utf-8")
    return BenchResult(document, text, checks, json_path, markdown_path)


def _save_latencies(path: Path, scenes: Scenes, measured: Measured) -> None:
    """Write every latency in seconds, by scenario, method and repeat, for a closer look."""
    due = scenes.schedule.arrivals_s
    rows: dict[str, Any] = {
        f"{start.scenario}/{start.method}/{start.repeat}": row
        for start in measured.starts
        for row in latencies([start], due)
    }
    np.savez_compressed(path, arrivals_s=due, **rows)


def _facts(
    options: BenchOptions, scenes: Scenes, measured: Measured, seconds: float
) -> dict[str, str]:
    starts = measured.starts
    latency = Spread.of([start.record.read_latency_s * 1e3 for start in starts])
    warm = sum(not start.drop.cold for start in starts)
    return {
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} processors, {platform.system()}"
        f" {platform.release()}, Python {platform.python_version()}, Stoker {stoker.__version__}",
        "load on the machine": "{:.1f}, {:.1f}, {:.1f} (1, 5, 15 min) at the end".format(
            *os.getloadavg()
        ),
        "disk": measured.disk.label + (f" ({measured.disk_note})" if measured.disk_note else ""),
        "read of one cold page": f"{latency.median:.3f} ms, {latency.low:.3f} to"
        f" {latency.high:.3f}, before anything else was read",
        "priority of the replicas": "; ".join(sorted({start.record.priority for start in starts})),
        "operating system's cache": (starts[0].drop.sentence() if starts else "")
        + (f"; {warm} of {len(starts)} starts were NOT fully cold" if warm else "; every start"),
        "host's cache": "unknown: below a virtual machine it can be neither seen nor dropped",
        **scenes.facts,
        "starts": f"{options.repeats} of each method and scenario, in turns",
        "seed": str(options.seed),
        "duration": f"{seconds:.0f} s",
    }
