"""The demo, start to end: documents, index, traffic, heat, restart, comparison, report.

Nothing is staged: the index is real, the events take the real way, the restarts are processes, the
files are dropped from the cache, and the sentence at the end is made of the figures above it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from stoker.prefetch.receipt import Receipt
from stoker.service.coldstart import report, summary
from stoker.service.coldstart.job import MODE_NONE, MODE_STOKER
from stoker.service.coldstart.measure import ColdBench, ColdRun, VolumeSkipped, measure
from stoker.service.coldstart.summary import FIRST_QUERIES
from stoker.service.coldstart.throttle import CLOUD_VOLUME, OWN_DISK
from stoker.service.demo import prepare as preparing
from stoker.service.demo.drive import RECALL_TARGET, Driven, K, choose_ef, drive
from stoker.service.demo.options import DemoOptions
from stoker.service.demo.prepare import Prepared, prepare
from stoker.service.demo.screen import Screen
from stoker.service.demo.tables import print_checks, print_rows
from stoker.service.padding import exact_top
from stoker.service.traffic import Questions, Traffic

_CALIBRATION_SEED = 1_000_003
# On a busy machine fewer repeats, so that the demo stays within its few minutes.
_VOLUME_S = 30.0


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo found, and where it wrote it.

    Attributes:
        document: Everything, as plain data for JSON.
        index_path: The index that was measured; `stoker serve` takes it.
    """

    document: dict[str, Any]
    index_path: Path
    report_path: Path
    json_path: Path


def run_demo(options: DemoOptions, screen: Screen) -> DemoResult:
    """Run the whole demo; blocks for its few minutes.

    Raises:
        StokerError: what is missing or failed, with what to do.
    """
    questions = Questions()
    prepared = prepare(options, questions, screen)
    traffic = Traffic(questions, seed=options.seed)
    index_path = options.folder / "index"
    ef, driven = _traffic(options, questions, prepared, traffic, screen)
    index_bytes = _seal_with_heat(options, prepared, driven, index_path, screen)
    heat_path = _keep_state(options, index_path, driven)
    visits = traffic.draw(1 + options.queries)
    queries = traffic.vectors(visits, prepared.wordings)
    with screen.step("Exact search, to judge recall by"):
        rows = exact_top(prepared.vectors, queries, K)
        truth = [[prepared.ids[row] for row in part] for part in rows]
    bench = ColdBench(
        index_path=index_path,
        queries=queries,
        truth=truth,
        heat_path=heat_path,
        index_bytes=index_bytes,
        budget_ratio=options.budget_ratio,
        k=K,
        ef=ef,
        recall_target=RECALL_TARGET,
        repeats=options.repeats,
        volume_s=_VOLUME_S,
    )
    volumes = (OWN_DISK, CLOUD_VOLUME) if options.cloud else (OWN_DISK,)
    title = f"Restart cold, up to {options.repeats} times each, and ask the next {len(queries)}"
    with screen.step(title):
        runs, skipped = measure(bench, volumes, progress=_quietly(screen))
        screen.say(runs[-1].drop.sentence())
        for skip in skipped:
            screen.say(f"not measured on {skip.volume.label}: {skip.reason}")
    facts = _facts(options, prepared, driven, ef, index_bytes, runs)
    return _finish(options, screen, runs, skipped, facts, index_path)


def _traffic(
    options: DemoOptions,
    questions: Questions,
    prepared: Prepared,
    traffic: Traffic,
    screen: Screen,
) -> tuple[int, Driven]:
    title = f"Traffic: {options.searches:,} searches in sessions; their events become heat"
    with screen.step(title), stoker.open(prepared.first_path) as index:
        other = Traffic(questions, seed=options.seed + _CALIBRATION_SEED)
        index.warm()
        ef, recall = choose_ef(index, other, prepared)
        screen.say(
            f"search width {ef}: recall@{K} {recall:.3f} against exact search, fully loaded, on"
            " questions of another seed"
        )
        with screen.bar("searches") as bar:
            driven = drive(
                index,
                traffic,
                questions,
                prepared.wordings,
                options,
                ef=ef,
                state_dir=options.folder / "state",
                progress=bar,
            )
        screen.say(
            f"{driven.events:,} events ({driven.searches:,} searches, {driven.used:,} used results)"
            f" through {driven.log}; heat of {len(driven.demand):,} chunks"
        )
        screen.say(
            "each query's vector is a hand-written question's, moved a little towards the"
            " session's previous question and by noise, so that no two are the same"
        )
    return ef, driven


def _seal_with_heat(
    options: DemoOptions, prepared: Prepared, driven: Driven, index_path: Path, screen: Screen
) -> int:
    rows = {chunk_id: row for row, chunk_id in enumerate(prepared.ids)}
    heat = np.zeros(len(prepared.ids), dtype=np.float32)
    for chunk_id, weight in driven.demand.items():
        if chunk_id in rows:
            heat[rows[chunk_id]] = weight
    with screen.step("Seal a new generation with the heat, as a merge does: hot rows share pages"):
        with screen.named_bar() as bar:
            preparing.seal(
                index_path,
                prepared.graph_path,
                prepared.vectors,
                prepared.ids,
                prepared.passages,
                heat=heat,
                options=options,
                progress=bar,
            )
        with stoker.open(index_path) as index:
            total = index.total_bytes
        screen.say(
            f"{total / 2**20:.1f} MiB of pages; Stoker may read"
            f" {total * options.budget_ratio / 2**20:.1f} MiB of them before it is ready"
        )
    return total


def _keep_state(options: DemoOptions, index_path: Path, driven: Driven) -> Path:
    """Move heat and events into the new index's state folder, where a server looks for them."""
    state = index_path / "state"
    (options.folder / "state").rename(state)
    return state / driven.heat_path.name


def _quietly(screen: Screen) -> Any:
    last: list[str] = []

    def progress(text: str) -> None:
        volume = text.split(":")[0]
        if volume not in last:
            last.append(volume)
            screen.say(f"on {volume} …")

    return progress


def _finish(
    options: DemoOptions,
    screen: Screen,
    runs: Sequence[ColdRun],
    skipped: Sequence[VolumeSkipped],
    facts: Mapping[str, str],
    index_path: Path,
) -> DemoResult:
    rows = summary.summarise(runs)
    checks = summary.checks(rows)
    sentences = summary.verdicts(rows)
    receipt = measured_receipt(runs)
    notes = _notes(options)
    with screen.step("The comparison"):
        for volume in dict.fromkeys(row.volume.name for row in rows):
            print_rows(screen.console, [row for row in rows if row.volume.name == volume])
        print_checks(screen.console, checks)
        if receipt is not None:
            screen.console.print("Stoker's receipt of the last warm-up:", style="bold")
            screen.console.print(receipt.render(), highlight=False, markup=False)
        for note in notes:
            screen.console.print(f"· {note}", highlight=False, markup=False, style="dim")
        for sentence in sentences:
            screen.console.print(f"\n{sentence}", style="bold", highlight=False, markup=False)
    document = {
        "facts": dict(facts),
        "rows": summary.to_json(rows),
        "checks": [dataclasses.asdict(check) for check in checks],
        "sentences": sentences,
        "notes": notes,
        "skipped": [dataclasses.asdict(skip) for skip in skipped],
        "receipt": None if receipt is None else receipt.to_dict(),
        "runs": [dataclasses.asdict(run) for run in runs],
        "seconds": round(screen.elapsed_s(), 1),
    }
    page = report.render_html(
        title="Stoker: a cold start, three ways",
        runs=runs,
        rows=rows,
        checks=checks,
        sentences=sentences,
        facts=facts,
        notes=notes,
        skipped=skipped,
        receipt_text="" if receipt is None else receipt.render(),
    )
    options.report_path.parent.mkdir(parents=True, exist_ok=True)
    options.report_path.write_text(page, encoding="utf-8")
    json_path = options.report_path.with_suffix(".json")
    json_path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return DemoResult(document, index_path, options.report_path, json_path)


def measured_receipt(runs: Sequence[ColdRun]) -> Receipt | None:
    """Return Stoker's last receipt with what it served of the first queries' answers."""
    ours = [run for run in runs if run.record.mode == MODE_STOKER and run.record.receipt]
    if not ours:
        return None
    return Receipt.from_json(json.dumps(ours[-1].record.receipt))


def _notes(options: DemoOptions) -> list[str]:
    return [
        "Every row is a fresh process; its clock starts before the interpreter does, so imports"
        " count.",
        "The index's files were dropped from the operating system's cache before each start. A"
        " virtual machine's host may still have them in its own memory, which cannot be dropped"
        " from inside.",
        "Query vectors are computed beforehand for every mode: embedding a question is not part of"
        " the figures.",
        f"The measured queries are the traffic's next {options.queries + 1}, which the heat has not"
        " seen, asked one after the other. Stoker answers the first before it warms up, as a"
        " process without warm-up does, and the others once it is ready, as /readyz has it."
        " Percentiles and page reads are of the first"
        f" {min(FIRST_QUERIES, options.queries)} queries after ready, which without warm-up is at"
        " once.",
        "p50 and p99 are over the queries, of each query's median over the repeats: a cold query is"
        " slow in every repeat, while another program's turn on the processor hits a different one"
        " each time. The plain p99 of single cold starts is below it.",
        "Bytes are the kernel's count of what was read from the device for the process.",
        "The slower disk is the kernel's block-I/O throttle: it limits reads and bytes a second and"
        " adds no latency of its own, so a real network volume is harsher.",
    ]


def _facts(
    options: DemoOptions,
    prepared: Prepared,
    driven: Driven,
    ef: int,
    index_bytes: int,
    runs: Sequence[ColdRun],
) -> dict[str, str]:
    padded = len(prepared.ids) - prepared.real_count
    none = [run.record for run in runs if run.record.mode == MODE_NONE]
    touched = sum(none[0].pages_read) if none else 0
    return {
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} processors,"
        f" {_memory_gib():.0f} GiB, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "stoker": stoker.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "documents": f"{prepared.real_count:,} of the standard library's"
        f" {prepared.corpus_count:,} passages",
        "generated padding": f"{padded:,} vectors" if padded else "none",
        "vectors": f"{len(prepared.ids):,} of {prepared.vectors.shape[1]} dimensions",
        "index": f"{index_bytes / 2**20:.1f} MiB of pages, hnswlib M={preparing.M},"
        f" ef_construction={preparing.EF_CONSTRUCTION}; search width {ef},"
        f" recall target {RECALL_TARGET}",
        "traffic": f"{driven.searches:,} searches, {driven.events:,} events through {driven.log}",
        "pages touched by the measured queries": f"{touched:,}",
        "seed": str(options.seed),
        "OS cache": runs[-1].drop.sentence() if runs else "",
    }


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it, or the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
