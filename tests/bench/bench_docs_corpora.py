"""Cold starts on real documents and a real trace: docs_corpora, asked as RAGPulse was.

    python tests/bench/bench_docs_corpora.py --out bench-results/docs-corpora
    python tests/bench/bench_docs_corpora.py --vectors 1000000

`stoker index` builds the index from the 19,302 documentation chunks under ../shared/data with their
ready vectors. RAGPulse's requests are replayed through the embedded log and the consumer loop into
the heat, at their real times, compressed: its passage i is chunk i here. The trace has ids and no
text, so a request's vector is taken to be the middle of its passages' vectors, plus noise; the
output says so. The heat is made from the first part of the trace, then the index is merged with it
and restarted cold, and the requests that follow are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker
from stoker.index.collection import Collection
from stoker.prefetch.events import EVENT_BYTES_MAX, Event
from stoker.prefetch.heat import HeatGraph
from stoker.service.coldstart import report, summary
from stoker.service.coldstart.measure import ColdBench, ColdRun, measure
from stoker.service.coldstart.throttle import CLOUD_VOLUME, OWN_DISK
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.heat_sink import HeatSink
from stoker.service.indexing import IndexPlan, build_index
from stoker.service.padding import exact_top, pad_neighbours
from stoker.service.replay import VirtualClock, replay
from stoker.service.replay_source import RAGPULSE_TENANT, read_source
from stoker.service.snapshot_file import write_snapshot

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
K = 10
SEED = 7
NOISE = 0.15
RECALL_TARGET = 0.985
RECALL_AIM = 0.985
EFS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of one run.

    Attributes:
        vectors: Chunks in all; above 19,302 they are continued by generated near neighbours.
        requests: Requests of the trace that the heat is made from.
        queries: Requests after those, measured; one more is the first answer.
        repeats: Cold starts of each mode on each disk.
        cloud: Whether to measure on the throttled disk too.
    """

    out: Path
    vectors: int = 19_302
    requests: int = 3_000
    queries: int = 200
    repeats: int = 3
    cloud: bool = True


def run(options: Options) -> dict[str, Any]:
    """Build, replay, merge, restart, measure; writes the results and returns them."""
    options.out.mkdir(parents=True, exist_ok=True)
    work = options.out / "work"
    work.mkdir(exist_ok=True)
    names = (DATA / "vectors" / "ids.txt").read_text(encoding="utf-8").split("\n")[:-1]
    real = np.load(DATA / "vectors" / "docs_minilm_f16.npy").astype(np.float32)
    real /= np.linalg.norm(real, axis=1, keepdims=True)
    events = _events(names)
    trained = events[: options.requests]
    asked = [e for e in events[options.requests :] if e.chunk_ids][: options.queries + 1]
    index_path, vectors, ids = _index(options, work, real, names)
    rows = {name: row for row, name in enumerate(names)}
    heat_path, demand, now_s, replayed = _replay(work, names, len(trained), trained[-1].time_s)
    queries = _queries([[rows[c] for c in e.chunk_ids] for e in asked], real)
    truth = [[ids[row] for row in part] for part in exact_top(vectors, queries, K)]
    earlier = _queries([[rows[c] for c in e.chunk_ids] for e in trained[-200:]], real)
    ef = _merge_and_choose_ef(index_path, demand, earlier, vectors, ids)
    with stoker.open(index_path) as index:
        total = index.total_bytes
    bench = ColdBench(
        index_path=index_path,
        queries=queries,
        truth=truth,
        heat_path=heat_path,
        index_bytes=total,
        tenant=RAGPULSE_TENANT,
        now_s=now_s,
        k=K,
        ef=ef,
        recall_target=RECALL_TARGET,
        repeats=options.repeats,
    )
    volumes = (OWN_DISK, CLOUD_VOLUME) if options.cloud else (OWN_DISK,)
    runs, skipped = measure(bench, volumes, progress=lambda text: _say(f"cold start: {text}"))
    facts = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "command": " ".join(sys.argv),
        "documents": f"{len(names):,} chunks of Python's, PostgreSQL's and Kafka's documentation",
        "vectors": f"{len(ids):,}, of which {len(ids) - len(names):,} generated near neighbours",
        "index": f"{total / 2**20:.1f} MiB of pages; search width {ef}",
        "trace": f"RAGPulse: {len(trained):,} requests replayed in {replayed:.1f} s, the next "
        f"{len(asked):,} measured; passage i is chunk i",
        "queries": "the middle of a request's passages plus noise, as the trace has ids only",
        "result hash": _hash(runs),
        "OS cache": runs[-1].drop.sentence(),
    }
    return _write(options, runs, [f"{s.volume.label}: {s.reason}" for s in skipped], facts)


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _events(names: Sequence[str]) -> list[Event]:
    found = read_source(
        DATA / "ragpulse", seed=SEED, chunk_ids=names, event_bytes_max=EVENT_BYTES_MAX
    )
    return [occurrence.event for occurrence in found if occurrence.event is not None]


def _index(
    options: Options, work: Path, real: NDArray[np.float32], names: Sequence[str]
) -> tuple[Path, NDArray[np.float32], list[str]]:
    path = work / f"index-{options.vectors}"
    vectors, pads = pad_neighbours(real, options.vectors, seed=SEED)
    ids = [*names, *pads]
    if path.exists():
        return path, vectors, ids
    _say(f"building {path}")
    if pads:
        stoker.build(path, vectors, ids)
    else:
        corpora = tuple(sorted((DATA / "docs_corpora").glob("*.jsonl.gz")))
        ready = DATA / "vectors" / "docs_minilm_f16.npy"
        build_index(IndexPlan(corpora, path, vectors_path=ready), embedder=_no_embedder)
    return path, vectors, ids


def _no_embedder() -> Any:
    raise AssertionError("every chunk has a ready vector")


def _replay(
    work: Path, names: Sequence[str], count: int, until_s: float
) -> tuple[Path, dict[str, float], float, float]:
    """Bring the first requests into the heat by log and consumer loop; returns its snapshot."""
    log_path = work / f"log-{time.monotonic_ns()}"
    clock = VirtualClock()
    sink = HeatSink(HeatGraph())
    log = EmbeddedLog(log_path)
    try:
        found = read_source(
            DATA / "ragpulse", seed=SEED, chunk_ids=names, event_bytes_max=EVENT_BYTES_MAX
        )
        report = replay(found, log, sink, clock=clock, topic="ragpulse", until_s=until_s)
    finally:
        log.close()
    assert report.events >= count, f"{report.events} of {count} requests replayed"
    path = work / "heat.snapshot"
    write_snapshot(path, {}, sink.to_snapshot())
    demand = {key[1]: weight for key, weight in sink.demand(clock.now()).items()}
    return path, demand, clock.now(), report.wall_s


def _queries(passages: Sequence[Sequence[int]], real: NDArray[np.float32]) -> NDArray[np.float32]:
    rng = np.random.default_rng(SEED)
    out = []
    for rows in passages:
        middle = real[list(rows)].mean(axis=0) if rows else real[rng.integers(len(real))]
        noise = rng.normal(size=real.shape[1]) * (NOISE / np.sqrt(real.shape[1]))
        vector = middle / np.linalg.norm(middle) + noise
        out.append(vector / np.linalg.norm(vector))
    return np.asarray(out, dtype=np.float32)


def _merge_and_choose_ef(
    path: Path,
    demand: dict[str, float],
    queries: NDArray[np.float32],
    vectors: NDArray[np.float32],
    ids: Sequence[str],
) -> int:
    """Re-pack the index with the heat, and find the width that its earlier requests need."""
    _say("merging with the heat")
    with Collection(path, "rw") as collection:
        collection.merge(full=True, heat=demand)
    truth = [{ids[row] for row in rows} for rows in exact_top(vectors, queries, K)]
    with stoker.open(path) as index:
        index.warm()
        for ef in EFS:
            found = index.search(queries, K, ef=ef, recall_target=RECALL_TARGET).ids
            shares = [len(set(f.tolist()) & t) / K for f, t in zip(found, truth, strict=True)]
            if float(np.mean(shares)) >= RECALL_AIM:
                return ef
    return EFS[-1]


def _hash(runs: Sequence[ColdRun]) -> str:
    """Hash what does not depend on time: recall of each mode, rounded."""
    facts = sorted({(run.record.mode, round(run.recall, 3)) for run in runs})
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _write(
    options: Options, runs: Sequence[ColdRun], skipped: list[str], facts: dict[str, str]
) -> dict[str, Any]:
    rows = summary.summarise(runs)
    checks = summary.checks(rows)
    sentences = summary.verdicts(rows)
    document = {
        "facts": facts,
        "rows": summary.to_json(rows),
        "checks": [dataclasses.asdict(check) for check in checks],
        "sentences": sentences,
        "skipped": skipped,
    }
    (options.out / "results.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    page = report.render_html(
        title="Cold starts on documentation, asked as RAGPulse was",
        runs=runs,
        rows=rows,
        checks=checks,
        sentences=sentences,
        facts=facts,
        notes=(__doc__ or "").split("\n\n")[2:],
    )
    (options.out / "index.html").write_text(page, encoding="utf-8")
    print(render(document))
    return document


def render(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [f"- {name}: {value}" for name, value in document["facts"].items()]
    lines += [
        "",
        "| disk | mode | first answer, s | ready, s | p50, ms | p99, ms | read before ready | "
        "pages a query | recall@10 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['volume']['name']} | {row['label']} | {row['first_answer_s']['median']:.3f} | "
            f"{row['ready_s']['median']:.3f} | {row['p50_ms']:.2f} | "
            f"{row['p99_ms']:.2f} | {row['ready_ratio']:.1%} | "
            f"{row['pages_per_query']['median']:.2f} | {row['recall']['median']:.4f} |"
        )
    lines += [""]
    for check in document["checks"]:
        word = "held" if check["held"] else "MISSED"
        lines.append(f"- {word}: {check['name']}, on {check['volume']}: {check['text']}")
    return "\n".join(lines)


def main() -> int:
    """Run from a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-results/docs-corpora"))
    parser.add_argument("--vectors", type=int, default=Options.vectors)
    parser.add_argument("--requests", type=int, default=Options.requests)
    parser.add_argument("--queries", type=int, default=Options.queries)
    parser.add_argument("--repeats", type=int, default=Options.repeats)
    parser.add_argument("--no-cloud", dest="cloud", action="store_false")
    args = parser.parse_args()
    if not DATA.is_dir():
        _say(f"there is no {DATA}: nothing measured")
        return 1
    run(Options(**vars(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
