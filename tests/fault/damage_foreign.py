"""Reads damaged files of other libraries: ``python damage_foreign.py KIND FOLDER COUNT``.

Each is a whole file cut short, with bits turned, or with a number in its head that claims far more
than there is. It may be taken or refused by an error of ours; anything else ends this process, and
so does memory that grows by what a file only claims. Run apart from the tests: the libraries that
read most of these kinds are native code, and a limit on memory is the whole process's.
"""

from __future__ import annotations

import contextlib
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import StokerError
from stoker.index.foreign import read_foreign

DIM, COUNT = 8, 200
GROWTH_BYTES_MAX = 96 << 20
CLAIMS = (0, 1, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**40, 2**62, 2**63 - 1, 2**64 - 1)


def vectors() -> np.ndarray:
    """Return float32, shape (COUNT, DIM)."""
    return np.random.default_rng(5).standard_normal((COUNT, DIM)).astype(np.float32)


def write_faiss(factory: str, path: Path) -> None:
    import faiss

    index = faiss.index_factory(DIM, factory)
    index.train(vectors())
    if factory.startswith("IDMap"):
        index.add_with_ids(vectors(), np.arange(COUNT))
    else:
        index.add(vectors())
    faiss.write_index(index, str(path))


def write_usearch(dtype: str, path: Path) -> None:
    from usearch.index import Index

    index = Index(ndim=DIM, metric="l2sq", dtype=dtype)
    index.add(np.arange(COUNT), vectors())
    index.save(str(path))


def write_hnswlib(_: str, path: Path) -> None:
    import hnswlib

    index = hnswlib.Index(space="l2", dim=DIM)
    index.init_index(COUNT, M=8, ef_construction=60)
    index.add_items(vectors(), num_threads=1)
    index.save_index(str(path))


def write_npy(_: str, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, vectors())


def write_parquet(_: str, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "id": [f"doc-{i}" for i in range(COUNT)],
        "vector": list(vectors()),
        "text": ["some text"] * COUNT,
        "year": list(range(COUNT)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_vecs(kind: str, path: Path) -> None:
    head = np.full((COUNT, 1), DIM, dtype="<i4").view(np.uint8)
    values = vectors().view(np.uint8)[:, : DIM * (4 if kind == "fvecs" else 1)]
    path.write_bytes(np.hstack([head, values]).tobytes())


KINDS: dict[str, tuple[str, Callable[[str, Path], None], str]] = {
    "hnswlib": ("hnswlib", write_hnswlib, ""),
    "npy": ("npy", write_npy, ""),
    "parquet": ("parquet", write_parquet, ""),
    "fvecs": ("fvecs", write_vecs, "fvecs"),
    "bvecs": ("bvecs", write_vecs, "bvecs"),
    "usearch-f32": ("usearch", write_usearch, "f32"),
    "usearch-f16": ("usearch", write_usearch, "f16"),
    "faiss-flat": ("faiss", write_faiss, "Flat"),
    "faiss-half": ("faiss", write_faiss, "SQfp16"),
    "faiss-ivf": ("faiss", write_faiss, "IVF4,Flat"),
    "faiss-hnsw": ("faiss", write_faiss, "HNSW8"),
    "faiss-idmap": ("faiss", write_faiss, "IDMap,HNSW8"),
    "faiss-norm": ("faiss", write_faiss, "L2norm,Flat"),
    "faiss-refine": ("faiss", write_faiss, "PQ4x4,RFlat"),
}


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Return ``data`` with one to three things wrong, mostly in its head."""
    how = int(rng.integers(5))
    if how == 0:
        return data[: int(rng.integers(len(data)))]
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(min(400, len(data)) if rng.random() < 0.7 else len(data)))
        if how == 1:
            found[at] ^= 1 << int(rng.integers(8))
        elif how == 2:
            found[at] = int(rng.integers(256))
        else:
            claim = struct.pack("<Q", CLAIMS[int(rng.integers(len(CLAIMS)))])[
                : 4 if how == 3 else 8
            ]
            at = at // 4 * 4
            found[at : at + len(claim)] = claim
    return bytes(found[: len(data)])


def read(path: Path, kind: str) -> Any:
    """Look at all that an import would look at before it links."""
    foreign = read_foreign(path, format=kind)
    total = float(np.nansum(np.asarray(foreign.vectors[:64], dtype=np.float64)))
    return total, None if foreign.bodies is None else list(foreign.bodies())


def main() -> None:
    name, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, write, argument = KINDS[name]
    path = folder / f"whole.{kind}"
    write(argument, path)
    data = path.read_bytes()
    read(path, kind)  # What it takes when nothing is wrong: libraries, and memory of their own.
    path = folder / f"damaged.{kind}"
    for seed in range(count):
        print(seed, flush=True)  # The last one printed is the one that broke something.
        path.write_bytes(damaged(data, np.random.default_rng(seed)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with contextlib.suppress(StokerError):
            read(path, kind)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < GROWTH_BYTES_MAX, f"{grown} bytes for a file of {len(data)}"


if __name__ == "__main__":
    main()
