"""From what a user has to an index: read, embed what has no vector, build, keep the texts.

Passages stream: their vectors go to a file and their texts to another, so that memory is needed
for the graph that is built and not for a second copy of everything.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError, StokerError, UnavailableError
from stoker.index.folder_lock import lock_folder, remove_abandoned
from stoker.service.passages import Passage, ReadReport
from stoker.service.readers import ReadLimits, read_paths
from stoker.service.readers_rows import RowLimits, open_matrix, read_ids

if TYPE_CHECKING:
    from stoker.index.build import BuildReport
    from stoker.index.documents import DocumentStore

_BATCH_ROWS = 1_024
_TENANT = "default"

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); a total of 0 means that it is not known yet."""


class TextEmbedder(Protocol):
    """What turns text into unit vectors; `stoker.service.embedding.Embedder` is one."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


@dataclasses.dataclass(frozen=True)
class IndexPlan:
    """What to index, and how.

    Attributes:
        paths: Files and folders; see `stoker.service.readers`.
        output: Folder of the new index; must not exist, or be empty.
        vectors_path: `.npy` with a ready vector for each passage, by ``vector_ids_path``.
        vector_ids_path: One id a line, in the order of the vectors' rows.
        metric, m, ef_construction, threads: As `stoker.build`.
    """

    paths: tuple[Path, ...]
    output: Path
    vectors_path: Path | None = None
    vector_ids_path: Path | None = None
    metric: Literal["ip", "cosine", "l2"] = "cosine"
    m: int | None = None
    ef_construction: int = 200
    threads: int | None = None
    limits: ReadLimits = dataclasses.field(default_factory=ReadLimits)


@dataclasses.dataclass(frozen=True)
class IndexReport:
    """What was made.

    Attributes:
        embedded: Passages whose vector was computed, or found in the embedding cache.
        unused_vectors: Rows of the ready vectors that no passage asked for.
    """

    read: ReadReport
    build: BuildReport
    embedded: int
    unused_vectors: int
    read_s: float
    build_s: float


def build_index(
    plan: IndexPlan,
    *,
    embedder: Callable[[], TextEmbedder],
    progress: Progress | None = None,
) -> IndexReport:
    """Read, embed and build; the index appears at ``plan.output`` by one rename, or not at all.

    Args:
        embedder: Called once, when the first passage without a vector is met.

    Raises:
        InputError: bad input (names file and line), or something is at ``plan.output``.
        UnavailableError: a library or the model is missing, or the disk is full.
    """
    from stoker.index.collection_build import build_collection

    report = progress or (lambda what, done, total: None)
    output = plan.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; an index is never overwritten")
    started = time.monotonic()
    scratch, held = _scratch_beside(output)
    try:
        read = ReadReport()
        spool = _Spool(scratch, embedder, _ready_vectors(plan), report)
        try:
            spool.take(read_paths(plan.paths, report=read, limits=plan.limits))
            vectors = spool.finish()
        finally:
            spool.close()
        read_s = time.monotonic() - started
        built = build_collection(
            output,
            vectors,
            spool.ids,
            metric=plan.metric,
            m=plan.m,
            ef_construction=plan.ef_construction,
            threads=plan.threads,
            progress=progress,
            documents=spool.write_documents if spool.text_count else None,
        )
    except OSError as error:
        if isinstance(error, StokerError):
            raise
        raise UnavailableError(
            f"{error.filename or scratch}: {error.strerror or error}; nothing was indexed"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)
    return IndexReport(
        read=read,
        build=built,
        embedded=spool.embedded,
        unused_vectors=spool.unused_vectors,
        read_s=read_s,
        build_s=time.monotonic() - started - read_s,
    )


def _scratch_beside(output: Path) -> tuple[Path, int]:
    """Make a folder for what is read, and remove those that killed processes left beside it.

    Returns:
        The folder, and a descriptor of it: as long as that is open, nobody takes it for a left one.
    """
    prefix = f".{output.name}.input."
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(output.parent, f"{glob.escape(prefix)}*")
        # Locked before it has the name by which the left ones are known.
        apart = tempfile.mkdtemp(prefix=f".{output.name}.unlocked.", dir=output.parent)
        held = lock_folder(Path(apart))
        scratch = output.parent / f"{prefix}{apart.rpartition('.')[2]}"
        os.rename(apart, scratch)
        return scratch, held
    except OSError as error:
        raise UnavailableError(
            f"{output.parent}: {error.strerror or error}; name an output in a folder that can be "
            "written"
        ) from error


@dataclasses.dataclass
class _ReadyVectors:
    """Vectors that were computed elsewhere, by id."""

    path: Path
    matrix: NDArray[Any]
    rows: dict[str, int]
    used: int = 0

    def take(self, passage: Passage) -> Passage:
        row = self.rows.get(passage.id)
        if row is None:
            raise InputError(f"{passage.origin}: {self.path} has no vector of id {passage.id!r}")
        if passage.vector is not None:
            raise InputError(f"{passage.origin}: id {passage.id!r} has a vector of its own already")
        vector = np.asarray(self.matrix[row], dtype=np.float32)
        if not np.isfinite(vector).all() or not vector.any():
            raise InputError(f"{self.path} row {row}: vector is not finite or all zeros")
        self.used += 1
        return dataclasses.replace(passage, vector=vector)


def _ready_vectors(plan: IndexPlan) -> _ReadyVectors | None:
    if plan.vectors_path is None:
        return None
    limits: RowLimits = plan.limits.rows
    path = plan.vectors_path
    ids_path = plan.vector_ids_path or path.with_name("ids.txt")
    try:
        matrix = open_matrix(path, limits=limits)
        ids = read_ids(ids_path, len(matrix), limits=limits)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror or error}") from error
    rows = {chunk_id: row for row, chunk_id in enumerate(ids)}
    if len(rows) != len(ids):
        raise InputError(f"{ids_path}: an id comes twice")
    return _ReadyVectors(path, matrix, rows)


class _Spool:
    """Takes passages in batches; vectors and texts go to files, ids stay in memory."""

    def __init__(
        self,
        folder: Path,
        embedder: Callable[[], TextEmbedder],
        ready: _ReadyVectors | None,
        progress: Progress,
    ) -> None:
        self._vectors_path = folder / "vectors.f32"
        self._texts_path = folder / "texts.jsonl"
        self._vectors: IO[bytes] = self._vectors_path.open("wb")
        self._texts: IO[str] = self._texts_path.open("w", encoding="utf-8")
        self._make_embedder = embedder
        self._embedder: TextEmbedder | None = None
        self._ready = ready
        self._progress = progress
        self._dim = 0
        self.ids: list[str] = []
        self.embedded = 0
        self.text_count = 0

    @property
    def unused_vectors(self) -> int:
        return 0 if self._ready is None else len(self._ready.rows) - self._ready.used

    def take(self, passages: Iterator[Passage]) -> None:
        batch: list[Passage] = []
        for passage in passages:
            batch.append(passage if self._ready is None else self._ready.take(passage))
            if len(batch) == _BATCH_ROWS:
                self._write(batch)
                batch = []
        if batch:
            self._write(batch)

    def _write(self, batch: Sequence[Passage]) -> None:
        bare = [passage for passage in batch if passage.vector is None]
        computed: Iterator[NDArray[np.float32]] = iter(())
        if bare:
            if self._embedder is None:
                self._embedder = self._make_embedder()
            computed = iter(self._embedder.embed([passage.text for passage in bare]))
            self.embedded += len(bare)
        for passage in batch:
            vector = next(computed) if passage.vector is None else passage.vector
            self._dim = self._dim or len(vector)
            if len(vector) != self._dim:
                raise InputError(
                    f"{passage.origin}: vector has {len(vector)} numbers, expected {self._dim}"
                )
            self._vectors.write(np.ascontiguousarray(vector, dtype="<f4").tobytes())
            self.ids.append(passage.id)
            row = {"id": passage.id, "text": passage.text, "metadata": dict(passage.metadata)}
            self._texts.write(json.dumps(row) + "\n")
            self.text_count += 1
        self._progress("read" if not bare else "read and embed", len(self.ids), 0)

    def finish(self) -> NDArray[np.float32]:
        """Return all vectors as a memory map, float32, shape (n, dim)."""
        self._vectors.flush()
        self._texts.flush()
        return np.memmap(
            self._vectors_path, dtype="<f4", mode="r", shape=(len(self.ids), self._dim)
        )

    def close(self) -> None:
        self._vectors.close()
        self._texts.close()

    def write_documents(self, store: DocumentStore) -> None:
        """Write texts and metadata to the collection's store."""
        from stoker.index.document_values import Change

        batch: list[Change] = []
        with self._texts_path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                text = row["text"] or None
                batch.append(Change(0, _TENANT, row["id"], False, text, row["metadata"], None))
                if len(batch) == _BATCH_ROWS:
                    store.write(batch)
                    batch = []
        if batch:
            store.write(batch)


def default_cache_path() -> Path:
    """Return where embeddings are cached: the user's cache folder, as XDG has it."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "stoker", "embeddings.sqlite")
