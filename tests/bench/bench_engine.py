"""The index engine beside its peers, in one run: warm, cold, and under a memory budget.

    python tests/bench/bench_engine.py --count 100000 --out bench-results/engine
    python tests/bench/bench_engine.py --count 1000000 --parts warm,cold

Vectors are the documentation corpus under ../shared/data (real, 384-d), continued by generated
near neighbours where more are asked for; the output states how alike the two are. Every figure
comes from a fresh process. Results: results.json, results.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import stoker.kernels._core as _core
from stoker.errors import UnavailableError
from stoker.service.coldstart.page_cache import drop_files, files_of
from stoker.service.coldstart.throttle import CLOUD_VOLUME, OWN_DISK, Throttle, block_device
from stoker.service.padding import pad_neighbours

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_peers import PEERS

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent.parent / "shared" / "data" / "vectors" / "docs_minilm_f16.npy"
TARGETS = (0.95, 0.99)
COLD_QUERIES = 200
K = 10
SEED = 7


def main() -> int:
    args = arguments()
    out = Path(args.out)
    work = Path(args.work or out / "work")
    work.mkdir(parents=True, exist_ok=True)
    peers = [p for p in args.peers.split(",") if available(p)]
    vectors, facts = corpus(args.count, work)
    queries, truth = questions(vectors, args.queries, work)
    results: dict[str, Any] = {
        "machine": machine(work),
        "corpus": facts,
        "command": " ".join(sys.argv),
        "warm": {},
        "cold": {},
    }
    for peer in peers:
        folder = work / f"{peer}-{args.count}"
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            start = time.perf_counter()
            say(f"building {peer}")
            PEERS[peer]().build(folder, vectors)
            (folder / "done").write_text(str(time.perf_counter() - start))
        results.setdefault("build_s", {})[peer] = float((folder / "done").read_text())
        results.setdefault("bytes", {})[peer] = sum(f.stat().st_size for f in files_of(folder))
    parts = args.parts.split(",")
    if "warm" in parts:
        for peer in peers:
            for threads in (1, 2):
                say(f"warm: {peer}, {threads} thread(s)")
                results["warm"][f"{peer}/{threads}"] = child(
                    work,
                    peer,
                    args.count,
                    "resident",
                    kind="warm",
                    threads=threads,
                    queries=queries,
                    truth=truth,
                    repeats=args.repeats,
                )
    efforts = {p: effort_at(results["warm"].get(f"{p}/1", {}).get("rows", []), 0.95) for p in peers}
    with read_ahead(work, 128) as note:
        results["machine"]["read_ahead"] = note
        few = (queries[:COLD_QUERIES], truth[:COLD_QUERIES])
        if "cold" in parts:
            for volume in (OWN_DISK, CLOUD_VOLUME):
                for peer in peers:
                    for mode in PEERS[peer].cold_modes:
                        say(f"cold: {peer} {mode} on {volume.label}")
                        results["cold"][f"{peer}/{mode}/{volume.name}"] = cold(
                            work, peer, args.count, mode, volume, efforts[peer] or 64, *few
                        )
    (out / "results.json").write_text(json.dumps(results, indent=1))
    table = render(results)
    (out / "results.md").write_text(table)
    print(table)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100_000, help="vectors (default 100000)")
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--parts", default="warm,cold")
    parser.add_argument("--out", default="bench-results/engine")
    parser.add_argument("--work", help="where indexes are kept between runs (default: OUT/work)")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def available(peer: str) -> bool:
    if peer == "stoker" or importlib.util.find_spec(PEERS[peer].package) is not None:
        return True
    say(f"{peer} is left out: package {PEERS[peer].package} is not installed")
    return False


def corpus(count: int, work: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The vectors, and how alike the real and the generated ones are."""
    if not DATA.exists():
        raise SystemExit(f"{DATA} is missing: the benchmark runs on real vectors")
    real = np.load(DATA).astype(np.float32)
    real /= np.linalg.norm(real, axis=1, keepdims=True)
    file = work / f"vectors-{count}.npy"
    if file.exists():
        vectors = np.load(file, mmap_mode="r")
    else:
        vectors = pad_neighbours(real[:count], count, seed=SEED)[0]
        np.save(file, vectors)
    facts: dict[str, Any] = {"count": count, "dim": real.shape[1], "real": min(count, len(real))}
    if count > len(real):
        facts["intrinsic_dimension_real"] = intrinsic_dimension(real)
        facts["intrinsic_dimension_generated"] = intrinsic_dimension(
            np.asarray(vectors[len(real) : 2 * len(real)])
        )
    return np.asarray(vectors), facts


def intrinsic_dimension(vectors: np.ndarray) -> float:
    """Two-nearest-neighbor estimate (Facco et al., Scientific Reports 7, 2017) on a sample."""
    rng = np.random.default_rng(SEED)
    sample = vectors[rng.choice(len(vectors), min(2_000, len(vectors)), replace=False)]
    squared = 2 - 2 * np.clip(sample @ vectors.T, -1, 1)
    near = np.sqrt(np.maximum(np.partition(squared, 3, axis=1)[:, :3], 0))
    near.sort(axis=1)
    ratio = near[:, 2] / np.maximum(near[:, 1], 1e-9)
    ratio = ratio[(ratio > 1) & np.isfinite(ratio)]
    return float(len(ratio) / np.log(ratio).sum())


def questions(vectors: np.ndarray, count: int, work: Path) -> tuple[np.ndarray, np.ndarray]:
    """Queries near real vectors, and their true neighbors."""
    file = work / f"truth-{len(vectors)}-{count}.npz"
    if file.exists():
        kept = np.load(file)
        return kept["queries"], kept["truth"]
    rng = np.random.default_rng(SEED + 1)
    base = vectors[rng.integers(0, len(vectors), count)]
    noise = rng.normal(size=base.shape).astype(np.float32) / np.float32(np.sqrt(base.shape[1]))
    queries = base + np.float32(0.5) * noise
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)
    truth = np.concatenate(
        [
            np.argsort(-(queries[i : i + 100] @ vectors.T), axis=1)[:, :K]
            for i in range(0, count, 100)
        ]
    )
    np.savez(file, queries=queries, truth=truth)
    return queries, truth


def child(
    work: Path,
    peer: str,
    count: int,
    mode: str,
    *,
    kind: str,
    queries: Any,
    truth: Any,
    threads: int = 1,
    repeats: int = 1,
    effort: int = 64,
    memory_bytes: int = 0,
    groups: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run one measurement in a fresh process."""
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        place = Path(scratch)
        np.save(place / "queries.npy", queries)
        np.save(place / "truth.npy", truth)
        job = {
            "peer": peer,
            "folder": str(work / f"{peer}-{count}"),
            "mode": mode,
            "kind": kind,
            "queries": str(place / "queries.npy"),
            "truth": str(place / "truth.npy"),
            "threads": threads,
            "repeats": repeats,
            "effort": effort,
            "memory_bytes": memory_bytes,
            "groups": list(groups),
            "started": time.monotonic(),
        }
        (place / "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "STOKER_BENCH_THREADS": str(threads),
        }
        done = subprocess.run(
            [sys.executable, "-P", str(HERE / "engine_child.py"), str(place / "job.json")],
            capture_output=True,
            text=True,
            env=environment,
            timeout=1_800,
            check=False,
        )
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]}
    return json.loads(done.stdout.splitlines()[-1])


def cold(
    work: Path, peer: str, count: int, mode: str, volume: Any, effort: int, queries: Any, truth: Any
) -> dict[str, Any]:
    dropped = drop_files(files_of(work / f"{peer}-{count}"))
    arguments: dict[str, Any] = {
        "kind": "cold",
        "queries": queries,
        "truth": truth,
        "effort": effort,
    }
    if volume.throttled:
        try:
            with Throttle(work, volume) as throttle:
                groups = (str(throttle.procs_path),)
                measured = child(work, peer, count, mode, groups=groups, **arguments)
        except UnavailableError as error:
            return {"error": [str(error)]}
    else:
        measured = child(work, peer, count, mode, **arguments)
    measured["cache"] = dropped.sentence()
    return measured


@contextlib.contextmanager
def read_ahead(work: Path, kilobytes: int) -> Any:
    """Set the device's read-ahead to the usual value and put it back."""
    try:
        setting = Path("/sys/dev/block") / block_device(work) / "queue" / "read_ahead_kb"
        before = setting.read_text()
        setting.write_text(str(kilobytes))
    except (OSError, UnavailableError) as error:
        yield f"left as it is: {error}"
        return
    try:
        yield f"{kilobytes} KiB for the cold part (was {before.strip()})"
    finally:
        setting.write_text(before)


def effort_at(rows: list[dict[str, Any]], target: float) -> int:
    return next((row["effort"] for row in rows if row["recall"] >= target), 0)


def speed_at(rows: list[dict[str, Any]], target: float, column: str) -> float | None:
    """Queries a second at a recall, log-linear between the two efforts around it."""
    speeds = [(r["recall"], float(np.median(r[column]))) for r in rows if column in r]
    for (r0, s0), (r1, s1) in itertools.pairwise(speeds):
        if r0 <= target <= r1 and r1 > r0:
            share = (target - r0) / (r1 - r0)
            return float(np.exp((1 - share) * np.log(s0) + share * np.log(s1)))
    if speeds and speeds[0][0] >= target:
        return speeds[0][1]
    return None


def machine(work: Path) -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "simd": _core.simd_name(),
        "note": "the host below this machine may still have cached the files",
    }


def render(results: dict[str, Any]) -> str:
    m = results["machine"]
    c = results["corpus"]
    lines = [
        f"# Index engine, {c['count']:,} x {c['dim']}",
        "",
        f"{m['processor']}, {m['cores']} cores, Linux {m['kernel']}, {m['simd']}. "
        f"{c['real']:,} real vectors, the rest generated near neighbours"
        + (
            f" (intrinsic dimension {c['intrinsic_dimension_real']:.1f} real, "
            f"{c['intrinsic_dimension_generated']:.1f} generated)."
            if "intrinsic_dimension_real" in c
            else "."
        ),
        "",
    ]
    if results["warm"]:
        lines += [
            "## Everything resident: queries a second at equal recall@10 (median of repeats)",
            "",
            "| engine | batch, 1 thread, 0.95 | 0.99 | one by one, 0.95 | 0.99 | 2 threads, 0.99 |"
            " peak MB |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for peer in results["build_s"]:
            one = results["warm"].get(f"{peer}/1", {})
            two = results["warm"].get(f"{peer}/2", {})
            if "rows" not in one:
                lines.append(f"| {peer} | {one.get('error')} |")
                continue
            cells = [speed_at(one["rows"], t, col) for col in ("batch", "single") for t in TARGETS]
            cells.append(speed_at(two.get("rows", []), 0.99, "batch"))
            shown = " | ".join("-" if v is None else f"{v:,.0f}" for v in cells)
            lines.append(f"| {peer} | {shown} | {one['peak_rss_mb']:,.0f} |")
        lines.append("")
    if results["cold"]:
        lines += [
            f"## Cold: the first {COLD_QUERIES} queries of a fresh process, one by one",
            "",
            "| engine, how opened, disk | open ms | first answer ms | p50 ms | p99 ms | recall |"
            " MB read |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, r in results["cold"].items():
            if "error" in r:
                lines.append(f"| {name} | {r['error']} |")
                continue
            lines.append(
                f"| {name} | {r['open_ms']:,.0f} | {r['first_answer_ms']:,.0f} "
                f"| {r['p50_ms']:,.2f} | {r['p99_ms']:,.1f} | {r['recall']:.3f} "
                f"| {r['bytes_in_all'] / 1e6:,.0f} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
