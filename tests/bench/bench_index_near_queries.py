"""What narrow walks and wide entries are worth: searches by a recall target, with and without.

    python tests/bench/bench_index_near_queries.py --count 100000 --work WORK

Seals the benchmark's `local` vectors and asks several sorts of questions one by one, by the default
recall target: vectors with little and with much noise, far from all and between two, the engine
benchmark's own, and real ones where the shared data and the model that embedded it are there:
sentences out of the passages that are stored, and what people asked of others (mtRAG). Each is
asked of the segment as it is; of the same one without what calibration says of walks that enter
the bottom level widely; and without what it says of near queries either, which is how segments were
searched that know nothing of them. In turns, everything resident and within a tenth of the bytes.
Prints a row each: median microseconds, recall@10, and the share of queries that found less than
their bound promised. With --widths, then asks walks of those widths, entering at one place and as
widely, everything resident: what each costs and finds, whatever calibration made of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.index.build import build_segment
from stoker.index.held_out import recall_of
from stoker.index.manifest import Manifest
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings
from stoker.service.embedding import Embedder
from stoker.service.padding import exact_top

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_data import REAL_DIM, corpus

K = 10
SEED = 11
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
# Of a sentence that is asked: shorter ones are headings and rests of tables.
LETTERS = range(40, 160)
Vectors = NDArray[np.float32]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--questions", type=int, default=400, help="of each sort")
    parser.add_argument("--work", type=Path, required=True, help="folder for vectors and index")
    parser.add_argument("--segment", type=Path, help="of these vectors, sealed before; see --work")
    parser.add_argument("--widths", type=int, nargs="*", default=[])
    parser.add_argument("--only-widths", action="store_true", help="leave the first table out")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    vectors = np.asarray(corpus(args.count, REAL_DIM, args.work, "local").vectors)
    path = args.segment or args.work / f"near-{args.count}"
    if not path.exists():
        build_segment(path, vectors, metric="ip")
    whole = Manifest.read(path)
    assert whole.calibration is not None
    manifests = {
        "now": whole,
        "entered at one place": without(whole, "entry_"),
        "all alike": without(whole, "entry_", "near_"),
    }
    print(
        "| memory | questions | "
        + " | ".join(f"{name}, us; recall; broken" for name in manifests)
        + " |"
    )
    print("| --- | --- |" + " ---: |" * len(manifests))
    made = questions(vectors, args.questions) | real_questions(args.questions, args.work)
    asked = {sort: (queries, exact_top(vectors, queries, K)) for sort, queries in made.items()}
    for share in () if args.only_widths else (1.0, 0.1):
        budget = 0 if share == 1.0 else int(share * whole.total_bytes)
        opened = {
            name: Segment(path, manifest, budget, IndexSettings())
            for name, manifest in manifests.items()
        }
        for segment in opened.values():
            for batch in segment.unit_batches():
                segment.load_units(batch.kind, batch.units)
        for sort, (queries, truth) in asked.items():
            row = measure(opened, queries, truth)
            print(f"| {share:.0%} | {sort} | " + " | ".join(row) + " |", flush=True)
        for segment in opened.values():
            segment.close()
    if args.widths:
        by_width(path, asked, args.widths)


def by_width(
    path: Path, asked: dict[str, tuple[Vectors, NDArray[np.int64]]], widths: list[int]
) -> None:
    """Print processor time and recall of walks of each width, by sort of question, in batches."""
    print("| width | entered | " + " | ".join(f"{sort}, us; recall" for sort in asked) + " |")
    print("| --- | --- |" + " ---: |" * len(asked))
    with Segment.open(path, memory_bytes=0, settings=IndexSettings(search_threads=1)) as segment:
        for batch in segment.unit_batches():
            segment.load_units(batch.kind, batch.units)
        for width in widths:
            for widely in (False, True):
                entry_ef = width if widely else 1
                cells = []
                for queries, truth in asked.values():
                    least = math.inf
                    hits = segment.search(queries, K, ef=width, entry_ef=entry_ef)
                    for _ in range(3):
                        began = time.process_time()
                        segment.search(queries, K, ef=width, entry_ef=entry_ef)
                        least = min(least, time.process_time() - began)
                    recall = recall_of(segment.ids_at(hits.rows), truth).mean()
                    cells.append(f"{1e6 * least / len(queries):.1f}; {recall:.4f}")
                where = "as widely" if widely else "at one place"
                print(f"| {width} | {where} | " + " | ".join(cells) + " |", flush=True)


def without(manifest: Manifest, *parts: str) -> Manifest:
    """As a segment that was sealed before the fields of ``parts`` were measured."""
    assert manifest.calibration is not None
    fields = vars(manifest.calibration)
    blank = {
        name: ()
        for name, value in fields.items()
        if isinstance(value, tuple) and name.removeprefix("coarse_").startswith(parts)
    }
    older = dataclasses.replace(manifest.calibration, **blank)  # type: ignore[arg-type]
    return dataclasses.replace(manifest, calibration=older)


def questions(vectors: Vectors, count: int) -> dict[str, Vectors]:
    """Return questions by sort; float32, shape (count, dim) each."""
    rng = np.random.default_rng(SEED)
    base, other = (vectors[rng.integers(0, len(vectors), count)] for _ in range(2))
    noise = rng.standard_normal(base.shape) / np.sqrt(base.shape[1])
    reach = rng.uniform(0.0, 1.0, (count, 1))
    made = {
        "noise 0.25 to 0.5": base + (0.25 + 0.25 * reach) * noise,
        "noise 0.5 (as the engine benchmark's)": base + 0.5 * noise,
        "noise 0.5 to 0.7": base + (0.5 + 0.2 * reach) * noise,
        "far": base + (0.9 + 0.8 * reach) * noise,
        "between two": 0.6 * base + 0.4 * other + 0.3 * noise,
        "half of each": 0.5 * base + 0.5 * other + 0.3 * reach * noise,
    }
    return {name: queries.astype(np.float32) for name, queries in made.items()}


def real_questions(count: int, work: Path) -> dict[str, Vectors]:
    """Return questions in words, embedded once and kept; none where something for it is missing."""
    file = work / f"questions-in-words-{count}.npz"
    if not file.exists():
        passages = sorted((DATA / "docs_corpora").glob("*.jsonl.gz"))
        turns = sorted((DATA / "mtrag" / "human").glob("*/*_rewrite.jsonl"))
        if not passages or not turns:
            print(f"{DATA} has no passages or no questions: none asked in words")
            return {}
        rng = np.random.default_rng(SEED)
        lines = [
            line for path in passages for line in gzip.decompress(path.read_bytes()).splitlines()
        ]
        sentences = []
        for at in rng.permutation(len(lines)):
            text = re.split(r"(?<=[.!?])\s+", json.loads(lines[at])["text"])
            whole = [sentence for sentence in text if len(sentence) in LETTERS]
            if whole:
                sentences.append(str(rng.choice(whole)))
            if len(sentences) == count:
                break
        others = [
            json.loads(line)["text"].replace("|user|:", "").strip()
            for path in turns
            for line in path.read_text().splitlines()
        ]
        chosen = [others[at] for at in rng.permutation(len(others))[:count]]
        try:
            embedder = Embedder()
        except StokerError as error:
            print(f"{error}: none asked in words")
            return {}
        embedded = embedder.embed(sentences + chosen)
        np.savez(file, sentences=embedded[: len(sentences)], others=embedded[len(sentences) :])
    kept = np.load(file)
    return {"sentences of passages": kept["sentences"], "asked of others": kept["others"]}


def measure(opened: dict[str, Segment], queries: Vectors, truth: NDArray[np.int64]) -> list[str]:
    """Ask each segment one by one, in turns; a cell each."""
    times: dict[str, list[float]] = {name: [] for name in opened}
    found: dict[str, list[NDArray[np.int64]]] = {name: [] for name in opened}
    bounds: dict[str, list[float]] = {name: [] for name in opened}
    for query in queries:
        for name, segment in opened.items():
            began = time.perf_counter()
            hits = segment.search(query[None], K)
            times[name].append(time.perf_counter() - began)
            found[name].append(segment.ids_at(hits.rows)[0])
            bounds[name].append(float(hits.summary.recall_bound[0]))
    cells = []
    for name in opened:
        recall = recall_of(np.array(found[name]), truth)
        broken = np.mean(recall < np.array(bounds[name]) - 1e-6)
        cells.append(f"{1e6 * np.median(times[name]):.1f}; {recall.mean():.4f}; {broken:.3f}")
    return cells


if __name__ == "__main__":
    main()
