"""What the engine benchmark asks of whom: vectors, queries with their true neighbours, streams.

Vectors are the documentation corpus under ../shared/data (real, 384-d), continued by generated near
neighbours where more are asked for, in one of two ways. *spread* (`stoker.service.padding`) moves a
real vector by the difference of two others, drawn from everywhere: sparser than text and of three
times its intrinsic dimension, so harder for every engine. *local* (`local_pads`) moves it by a
difference of two neighbours that lie near it: intrinsic dimension and hit curve come out as those
of text. Other dimensions are made from the
real ones: fewer by their principal components, more by a fixed random map whose output keeps inner
products, so that the local structure stays that of text. `alike` checks it: intrinsic dimension,
distances to neighbours, and a hit curve (how evenly answers fall on the vectors, which decides what
a cache can gain), of the real set beside those of the generated one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.service.padding import exact_top, nearest_rows, pad_neighbours

Vectors = NDArray[np.float32]

DATA: Final = (
    Path(__file__).resolve().parents[3] / "shared" / "data" / "vectors" / "docs_minilm_f16.npy"
)
K: Final = 10
SEED: Final = 7
REAL_DIM: Final = 384
_QUERY_NOISE: Final = np.float32(0.5)
_SAMPLE: Final = 1_000
PADS: Final = ("spread", "local")
_LOCAL_NEIGHBOURS: Final = 16
_PAD_ROWS: Final = 8_192
# A stream's epoch: after so many queries, so many of the ranks have new holders.
EPOCH_QUERIES: Final = 500
EPOCH_MOVES: Final = 0.05


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Vectors of one size.

    Attributes:
        vectors: float32, shape (count, dim), unit length; a memory map.
        key: Names the files that belong to it.
    """

    vectors: Vectors
    key: str

    @property
    def count(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])


@dataclasses.dataclass(frozen=True)
class Questions:
    """Queries and their exact nearest vectors; ``truth`` is int64, shape (n, 10)."""

    queries: Vectors
    truth: NDArray[np.int64]

    def __getitem__(self, part: slice) -> Questions:
        return Questions(self.queries[part], self.truth[part])


def real_vectors(dim: int) -> Vectors:
    """The real vectors in ``dim`` dimensions, unit length."""
    if not DATA.exists():
        raise SystemExit(f"{DATA} is missing: the benchmark runs on real vectors")
    real = np.load(DATA).astype(np.float32)
    if dim < REAL_DIM:
        centred = real - real.mean(axis=0)
        values, axes = np.linalg.eigh(np.cov(centred.T))
        real = real @ axes[:, np.argsort(-values)[:dim]].astype(np.float32)
    elif dim > REAL_DIM:
        rng = np.random.default_rng(SEED)
        # Orthonormal rows: inner products, and so all neighbourhoods, are kept exactly; the small
        # noise gives the added dimensions something of their own.
        rows = np.linalg.qr(rng.normal(size=(dim, REAL_DIM)))[0].T.astype(np.float32)
        noise = rng.normal(size=(len(real), dim)).astype(np.float32)
        real = real @ rows + np.float32(0.1 / np.sqrt(dim)) * noise
    unit: Vectors = (real / np.linalg.norm(real, axis=1, keepdims=True)).astype(np.float32)
    return unit


def corpus(count: int, dim: int, work: Path, pads: str = "spread") -> Corpus:
    """Return ``count`` vectors, made once and kept in ``work``; ``pads`` is one of `PADS`."""
    key = str(count) if dim == REAL_DIM else f"{count}x{dim}"
    if pads != "spread":
        key += f"-{pads}"
    file = work / f"vectors-{key}.npy"
    if not file.exists():
        real = real_vectors(dim)
        if pads == "local":
            made = local_pads(real[:count], count)
        else:
            made = pad_neighbours(real[:count], count, seed=SEED)[0]
        unfinished = work / f".vectors-{key}.npy"
        np.save(unfinished, made)
        unfinished.rename(file)
    return Corpus(np.load(file, mmap_mode="r"), key)


def local_pads(real: Vectors, total: int) -> Vectors:
    """Return ``real`` followed by generated vectors, ``total`` rows in all.

    A generated one is a real one, moved by 0.6 to 1.0 of the difference of two vectors out of its
    neighbourhood: a neighbour of a neighbour, and a neighbour of that. Such differences lie in the
    few directions in which the data varies there. 19,302 of them, beside as many real ones:
    intrinsic dimension 8.2 and 7.5, cosine distance to the nearest 0.28 and 0.26, share of answers
    on the most answered 1, 5, 20 % of the vectors .055 .188 .504 and .048 .180 .499.
    """
    count = len(real)
    if total <= count:
        return real
    rng = np.random.default_rng(SEED)
    near = nearest_rows(real, min(_LOCAL_NEIGHBOURS, count - 1))
    out = np.empty((total, real.shape[1]), np.float32)
    out[:count] = real
    for start in range(count, total, _PAD_ROWS):
        rows = min(_PAD_ROWS, total - start)
        base = rng.integers(count, size=rows)
        one = base
        for _ in range(2):
            one = near[one, rng.integers(near.shape[1], size=rows)]
        two = near[one, rng.integers(near.shape[1], size=rows)]
        moved = rng.uniform(0.6, 1.0, size=(rows, 1)).astype(np.float32)
        made = real[base] + moved * (real[one] - real[two])
        out[start : start + rows] = made / np.linalg.norm(made, axis=1, keepdims=True)
    return out


def questions(corpus: Corpus, count: int, work: Path) -> Questions:
    """Queries near vectors drawn uniformly, made once and kept."""
    file = work / f"truth-{corpus.key}-{count}.npz"
    if not file.exists():
        rng = np.random.default_rng(SEED + 1)
        asked = _near(corpus, rng.integers(0, corpus.count, count), rng)
        _keep(file, asked, exact_top(corpus.vectors, asked, K))
    kept = np.load(file)
    return Questions(kept["queries"], kept["truth"])


def skewed_stream(corpus: Corpus, learnt: int, asked: int, work: Path) -> tuple[Vectors, Questions]:
    """A drifting Zipf stream: the earlier stretch (queries alone) and the one that is measured.

    A query is near the vector that holds a rank, the rank r drawn with weight 1/r (Zipf 1.0). The
    hot set moves: after every `EPOCH_QUERIES` queries, `EPOCH_MOVES` of all ranks, hot ones and
    cold ones alike, change holders among themselves at random: after 2,000 queries about a fifth of
    any hot set is gone, the hottest included.
    """
    file = work / f"stream-{corpus.key}-{learnt}-{asked}.npz"
    if not file.exists():
        rng = np.random.default_rng(SEED + 2)
        holders = rng.permutation(corpus.count)
        weights = np.cumsum(1.0 / np.arange(1, corpus.count + 1))
        chosen = []
        for _ in range(0, learnt + asked, EPOCH_QUERIES):
            ranks = np.searchsorted(weights, rng.random(EPOCH_QUERIES) * weights[-1])
            chosen.append(holders[np.minimum(ranks, corpus.count - 1)])
            moved = rng.choice(corpus.count, max(2, int(corpus.count * EPOCH_MOVES)), False)
            holders[moved] = holders[rng.permutation(moved)]
        stream = _near(corpus, np.concatenate(chosen)[: learnt + asked], rng)
        later = stream[learnt:]
        _keep(file, stream, exact_top(corpus.vectors, later, K))
    kept = np.load(file)
    return kept["queries"][:learnt], Questions(kept["queries"][learnt:], kept["truth"])


def _near(corpus: Corpus, rows: NDArray[np.int64], rng: np.random.Generator) -> Vectors:
    base = np.asarray(corpus.vectors[rows])
    noise = rng.normal(size=base.shape).astype(np.float32) / np.float32(np.sqrt(corpus.dim))
    asked = base + _QUERY_NOISE * noise
    unit: Vectors = (asked / np.linalg.norm(asked, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _keep(file: Path, queries: Vectors, truth: NDArray[np.int64]) -> None:
    unfinished = file.with_name(f".{file.name}")
    np.savez(unfinished, queries=queries, truth=truth)
    unfinished.rename(file)


def facts(corpus: Corpus) -> dict[str, Any]:
    """What the vectors are, and how alike the real and the generated ones are."""
    real = real_vectors(corpus.dim)
    found: dict[str, Any] = {
        "count": corpus.count,
        "dim": corpus.dim,
        "real": min(corpus.count, len(real)),
    }
    if corpus.count > len(real):
        # As many generated ones as real ones, or density would differ for that reason alone.
        generated = np.asarray(corpus.vectors[len(real) : 2 * len(real)])
        size = min(len(real), len(generated))
        found["real_set"] = local_structure(real[:size])
        found["generated_set"] = local_structure(generated[:size])
    return found


def local_structure(vectors: Vectors) -> dict[str, Any]:
    """Intrinsic dimension, neighbour distances and the hit curve of a set.

    The intrinsic dimension is the two-nearest-neighbour estimate (Facco et al., Scientific Reports
    7, 2017). The hit curve asks as `questions` does and says which share of all answers falls on
    the most answered 1, 5 and 20 % of the vectors.
    """
    rng = np.random.default_rng(SEED)
    rows = rng.choice(len(vectors), min(_SAMPLE, len(vectors)), replace=False)
    scores = np.sort(vectors[rows] @ vectors.T, axis=1)[:, ::-1]
    # The first is the vector itself.
    near = np.sqrt(np.maximum(2 - 2 * scores[:, 1:3], 0))
    ratio = near[:, 1] / np.maximum(near[:, 0], 1e-9)
    ratio = ratio[(ratio > 1) & np.isfinite(ratio)]
    asked = _near(Corpus(vectors, ""), rng.integers(0, len(vectors), 4 * _SAMPLE), rng)
    hits = np.bincount(exact_top(vectors, asked, K).ravel(), minlength=len(vectors))
    falling = np.cumsum(np.sort(hits)[::-1]) / hits.sum()
    return {
        "intrinsic_dimension": float(len(ratio) / np.log(ratio).sum()),
        "distance_1st": float(np.median(1 - scores[:, 1])),
        "distance_10th": float(np.median(1 - scores[:, 10])),
        "hit_curve": {
            str(share): float(falling[max(0, int(len(vectors) * share) - 1)])
            for share in (0.01, 0.05, 0.2)
        },
    }
