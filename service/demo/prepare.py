"""The demo's index, from nothing: documents, vectors, padding, one HNSW graph, one sealed segment.

Everything is kept in the demo's folder with a key that says what it was made from, so a second run
with the same settings starts with the index in place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import StokerError
from stoker.service.corpus_stdlib import stdlib_passages
from stoker.service.demo.options import DemoOptions
from stoker.service.demo.screen import Screen
from stoker.service.embedding import Embedder
from stoker.service.embedding_cache import EmbeddingCache
from stoker.service.padding import pad_neighbours
from stoker.service.passages import Passage
from stoker.service.traffic import Questions

METRIC = "cosine"
M = 16
EF_CONSTRUCTION = 200
# Bumped when the same settings would give other files.
_RECIPE = 2
# Of the time for embedding, this much at least is for passages, however slow the start was.
_PASSAGES_SHARE_MIN = 0.5
# Fewer real passages than this make padding that is all alike; they take 20 to 100 s on two
# processors.
_PASSAGES_MIN = 1_000
_WRITE_ROWS = 1_000
_LINK_ROWS = 2_000


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the rest of the demo works with.

    Attributes:
        vectors: float32, shape (n, dim), unit length; a read-only memory map.
        ids: n chunk ids; the first ``real_count`` are the library's, the others padding.
        wordings: float32, shape (rows of `Questions.texts`, dim).
        graph_path: hnswlib's file of the graph over ``vectors``.
        first_path: The index sealed before anything was known about the traffic.
        fresh: Whether it was made in this run.
    """

    vectors: NDArray[np.float32]
    ids: list[str]
    passages: list[Passage]
    corpus_count: int
    wordings: NDArray[np.float32]
    graph_path: Path
    first_path: Path
    fresh: bool

    @property
    def real_count(self) -> int:
        """Chunks with text."""
        return len(self.passages)


def prepare(options: DemoOptions, questions: Questions, screen: Screen) -> Prepared:
    """Make the index, or find it as the last run left it.

    Raises:
        UnavailableError: no model, no library sources, no disk space.
        CorruptError: the bundled model's weights are not the known ones.
    """
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with EmbeddingCache(folder / "embeddings.sqlite") as cache:
        embedder = Embedder(options.model, cache=cache, thread_count=threads(options))
        key = _key(options, embedder.fingerprint, questions)
        place = folder / "prepared"
        if not options.fresh and (found := _found(place, key)) is not None:
            with screen.step("Documents, vectors and index: kept from the last run"):
                screen.say(_sizes(found))
            return found
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        passages, corpus_count, vectors, wordings = _embed(options, embedder, questions, screen)
    whole, pad_ids = _pad(options, vectors, screen)
    ids = [passage.id for passage in passages] + pad_ids
    np.save(place / "vectors.npy", whole)
    np.save(place / "wordings.npy", wordings)
    _write_lines(place / "passages.jsonl", [_row(passage) for passage in passages])
    (place / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
    _build(options, place, whole, ids, passages, screen)
    facts = {"key": key, "corpus_count": corpus_count}
    temporary = place / ".prepared.json"
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(place / "prepared.json")  # last: what has this file is whole
    made = _found(place, key)
    assert made is not None
    return dataclasses.replace(made, fresh=True)


def threads(options: DemoOptions) -> int:
    """Return how many threads embed and build."""
    return options.threads or min(2, len(os.sched_getaffinity(0)))


def _key(options: DemoOptions, fingerprint: str, questions: Questions) -> str:
    parts = (
        *(_RECIPE, sys.version, fingerprint, options.embed_s, options.words, options.padded_to),
        *(options.seed, METRIC, M, EF_CONSTRUCTION, questions.texts),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _found(place: Path, key: str) -> Prepared | None:
    try:
        facts = json.loads((place / "prepared.json").read_text(encoding="utf-8"))
        if facts["key"] != key:
            return None
        rows = (place / "passages.jsonl").read_text(encoding="utf-8").splitlines()
        passages = [Passage(origin="demo", **json.loads(row)) for row in rows]
        prepared = Prepared(
            vectors=np.load(place / "vectors.npy", mmap_mode="r"),
            ids=json.loads((place / "ids.json").read_text(encoding="utf-8")),
            passages=passages,
            corpus_count=facts["corpus_count"],
            wordings=np.load(place / "wordings.npy"),
            graph_path=place / "graph.hnsw",
            first_path=place / "index",
            fresh=False,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return prepared if prepared.first_path.is_dir() and prepared.graph_path.is_file() else None


def _embed(
    options: DemoOptions, embedder: Embedder, questions: Questions, screen: Screen
) -> tuple[list[Passage], int, NDArray[np.float32], NDArray[np.float32]]:
    with screen.step("Read the standard library's documentation (parsed, nothing is imported)"):
        corpus = list(stdlib_passages(words=options.words))
        screen.say(f"{len(corpus):,} passages of up to about {options.words} words")
    with screen.step(f"Embed them with {options.model}, for {options.embed_s:.0f} s"):
        started = time.monotonic()
        with screen.bar("questions") as report:
            wordings = embedder.embed(questions.texts, progress=report)
        with screen.bar("passages") as report:
            vectors, count = embedder.embed_within(
                [passage.text for passage in corpus],
                seconds=max(
                    options.embed_s - (time.monotonic() - started),
                    options.embed_s * _PASSAGES_SHARE_MIN,
                ),
                count_min=_PASSAGES_MIN,
                progress=report,
            )
        screen.say(
            f"{count:,} of {len(corpus):,} passages embedded"
            + (", as many as fit the time (--embed-seconds)" if count < len(corpus) else "")
            + f"; {questions.count} hand-written questions in {len(questions.texts)} wordings"
        )
    return corpus[:count], len(corpus), vectors, wordings


def _pad(
    options: DemoOptions, vectors: NDArray[np.float32], screen: Screen
) -> tuple[NDArray[np.float32], list[str]]:
    if options.padded_to <= len(vectors):
        return vectors, []
    with screen.step(f"Pad to {options.padded_to:,} vectors"):
        padded, ids = pad_neighbours(vectors, options.padded_to, seed=options.seed)
        screen.say(
            f"{len(ids):,} of them are GENERATED near neighbours of the real ones, without text:"
            " a cold start only hurts when the index is large (--no-pad turns this off)"
        )
    return padded, ids


def _build(
    options: DemoOptions,
    place: Path,
    vectors: NDArray[np.float32],
    ids: Sequence[str],
    passages: Sequence[Passage],
    screen: Screen,
) -> None:
    with screen.step("Build the HNSW graph with hnswlib and seal it into pages"):
        with screen.named_bar() as report:
            link(vectors, place / "graph.hnsw", options, report)
            facts = seal(
                place / "index",
                place / "graph.hnsw",
                vectors,
                ids,
                passages,
                heat=None,
                options=options,
                progress=report,
            )
        kinds = ", ".join(f"{k} {v / 2**20:.1f}" for k, v in facts.bytes_by_kind.items())
        screen.say(f"{facts.total_bytes / 2**20:.1f} MiB in pages; MiB by kind: {kinds}")


def link(
    vectors: NDArray[np.float32],
    path: Path,
    options: DemoOptions,
    progress: Callable[[str, int, int], None],
    *,
    seed: int = 100,
) -> None:
    """Link unit vectors into an HNSW graph and save hnswlib's file at ``path``."""
    import hnswlib

    count, dim = vectors.shape
    graph = hnswlib.Index(space="ip", dim=dim)
    graph.init_index(max_elements=count, M=M, ef_construction=EF_CONSTRUCTION, random_seed=seed)
    for start in range(0, count, _LINK_ROWS):
        stop = min(start + _LINK_ROWS, count)
        graph.add_items(
            np.ascontiguousarray(vectors[start:stop]),
            np.arange(start, stop),
            num_threads=threads(options),
        )
        progress("link", stop, count)
    graph.save_index(str(path))


def seal(
    target: Path,
    graph_path: Path,
    vectors: NDArray[np.float32],
    ids: Sequence[str],
    passages: Sequence[Passage],
    *,
    heat: NDArray[np.float32] | None,
    options: DemoOptions,
    progress: Callable[[str, int, int], None],
) -> Any:
    """Seal the graph into a collection at ``target``, with the passages' texts beside it.

    Args:
        target: Replaced when it is there.
        heat: float32, shape (n,), expected demand by row: hot rows share pages.

    Returns:
        The `BuildReport`.
    """
    from stoker.index.collection_build import collection_around
    from stoker.index.document_values import Change
    from stoker.index.documents import DocumentStore
    from stoker.index.hnswlib_file import read_hnswlib
    from stoker.index.ids import normalize_ids
    from stoker.index.seal import BuildReport, seal_graph

    graph = read_hnswlib(graph_path, dim=vectors.shape[1])

    def build(folder: Path) -> BuildReport:
        return seal_graph(
            folder,
            graph,
            vectors,
            normalize_ids(list(ids), len(ids)),
            metric=METRIC,
            heat=heat,
            source_rows=graph.labels.astype(np.int64),
            ef_construction=EF_CONSTRUCTION,
            threads=threads(options),
            progress=progress,
        )

    def documents(store: DocumentStore) -> None:
        for start in range(0, len(passages), _WRITE_ROWS):
            part = passages[start : start + _WRITE_ROWS]
            store.write(
                [Change(0, "default", p.id, False, p.text, dict(p.metadata), None) for p in part]
            )

    shutil.rmtree(target, ignore_errors=True)
    try:
        return collection_around(
            target, build, ef_construction=EF_CONSTRUCTION, documents=documents
        )
    except (OSError, StokerError):
        shutil.rmtree(target, ignore_errors=True)
        raise


def _sizes(prepared: Prepared) -> str:
    padded = len(prepared.ids) - prepared.real_count
    text = (
        f"{prepared.real_count:,} of the standard library's {prepared.corpus_count:,} passages,"
        f" {len(prepared.ids):,} vectors"
    )
    if padded:
        text += f", of which {padded:,} are GENERATED near neighbours (--no-pad turns this off)"
    return text


def _row(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "text": passage.text, "metadata": dict(passage.metadata)}


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
