"""Takes over indexes and vector files of other libraries, without embedding anything again.

Where the file has an HNSW graph over the very vectors that it holds, the graph is taken as it is;
elsewhere the vectors are linked anew. What the file no longer has (vectors that were quantised
away, a transform's input) cannot be taken and is refused with that reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.arguments import checked_threads
from stoker.index.collection_build import M_MAX, M_MIN, Progress, collection_around
from stoker.index.document_values import DEFAULT_TENANT, Change, DocumentId, check_names
from stoker.index.documents import DocumentStore
from stoker.index.hnsw_graph import HnswGraph

FORMATS: Final = ("hnswlib", "faiss", "usearch", "npy", "parquet", "fvecs", "bvecs")
_DOCUMENTS_STEP: Final = 4_096

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class ForeignBody:
    """Text and metadata that came with a vector."""

    id: DocumentId
    text: str | None
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ForeignIndex:
    """What a foreign file holds.

    Attributes:
        format: One of `FORMATS`, with what was inside, as in "faiss IndexIVFFlat".
        vectors: shape (n, dim), of a type that `stoker.index.build.check_vectors` takes; often a
            view of the file or of ``owner``.
        ids: int64 or str in an object array, shape (n,), or None for row numbers.
        metric: The metric that the file states, None where it states none.
        graph: HNSW graph over ``vectors``, node i being row i; None where there is none to take.
        notes: What a user should know about what was taken.
        bodies: Gives the texts and metadata anew each time it is called; None without any.
        owner: Keeps memory alive that ``vectors`` looks into.
    """

    format: str
    vectors: NDArray[Any]
    ids: NDArray[Any] | None
    metric: str | None
    graph: HnswGraph | None = None
    notes: tuple[str, ...] = ()
    bodies: Callable[[], Iterator[ForeignBody]] | None = None
    owner: Any = None


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What an import made.

    Attributes:
        format: What the file was.
        graph: "taken" or "built".
        count: Vectors.
        dim: Dimensions.
        metric: How they are compared now.
        documents: Texts and metadata taken.
        notes: What a user should know.
        build: The build's own report, as plain data.
    """

    format: str
    graph: str
    count: int
    dim: int
    metric: str
    documents: int
    notes: tuple[str, ...]
    build: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def require_file(path: Path) -> None:
    """Return if there is a file, or nothing: a pipe would be waited for, and a device has no end.

    Raises:
        InputError: it is something else.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe, device or socket"
        raise InputError(f"{path}: cannot be read: expected a file, found {what}")


def detect_format(path: Path) -> str:
    """Tell a file's format by its first bytes and its name.

    Raises:
        InputError: no file, or nothing that we know; lists what we know.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if head[:6] == b"\x93NUMPY":
        return "npy"
    if head[:4] == b"PAR1":
        return "parquet"
    if path.suffix in (".fvecs", ".bvecs"):
        return path.suffix[1:]
    if head[:1] == b"I" and head[:4].isalnum():
        return "faiss"
    # usearch puts its vectors, and with them their number and size, in front of its name.
    rows = int.from_bytes(head[:4], "little") * int.from_bytes(head[4:8], "little")
    with path.open("rb") as file:
        for start in (0, 8 + rows, 16 + _product64(head)):
            if start < path.stat().st_size:
                file.seek(start)
                if file.read(7) == b"usearch":
                    return "usearch"
    if head[:8] == bytes(8) and len(head) == 64:
        return "hnswlib"
    raise InputError(
        f"{path}: its format is not known; it can be one of {', '.join(FORMATS)} (pass --format if "
        "it is)"
    )


def _product64(head: bytes) -> int:
    return int.from_bytes(head[:8], "little") * int.from_bytes(head[8:16], "little")


def read_foreign(
    path: Path | str,
    *,
    format: str | None = None,
    vector_column: str = "vector",
    id_column: str = "id",
    text_column: str = "text",
) -> ForeignIndex:
    """Read a foreign file, as far as possible by mapping it.

    Args:
        path: The file.
        format: One of `FORMATS`; None asks `detect_format`.
        vector_column: Parquet column of vectors.
        id_column: Parquet column of ids; row numbers are taken where there is none.
        text_column: Parquet column of text, where there is one.

    Raises:
        InputError: unknown format, a library that is not installed, or something that cannot be
            taken, with the reason.
        CorruptError: damaged.
    """
    path = Path(path)
    require_file(path)
    chosen = format or detect_format(path)
    if chosen == "hnswlib":
        return _from_hnswlib(path)
    if chosen == "faiss":
        from stoker.index.foreign_faiss import read_faiss

        return read_faiss(path)
    if chosen == "usearch":
        from stoker.index.foreign_usearch import read_usearch

        return read_usearch(path)
    from stoker.index.foreign_files import read_npy, read_parquet, read_vecs

    if chosen == "npy":
        return read_npy(path)
    if chosen == "parquet":
        return read_parquet(
            path, vector_column=vector_column, id_column=id_column, text_column=text_column
        )
    if chosen in ("fvecs", "bvecs"):
        return read_vecs(path, chosen)
    raise InputError(f"format: expected one of {', '.join(FORMATS)}, found {chosen!r}")


def _from_hnswlib(path: Path) -> ForeignIndex:
    from stoker.index.hnswlib_file import read_hnswlib

    graph = read_hnswlib(path)
    assert graph.vectors is not None
    if graph.count and int(graph.labels.max()) >= 1 << 63:
        raise InputError(
            f"{path}: label {int(graph.labels.max())} does not fit a signed 64-bit integer"
        )
    ids = graph.labels.astype(np.int64)
    if not graph.deleted.any():
        return ForeignIndex("hnswlib", graph.vectors, ids, None, graph)
    alive = np.flatnonzero(~graph.deleted)
    note = f"{graph.count - alive.size} deleted vectors were left out, so the rest is linked anew"
    return ForeignIndex("hnswlib", graph.vectors[alive], ids[alive], None, notes=(note,))


def _why_linked_anew(foreign: ForeignIndex, vectors: NDArray[Any], metric: str) -> str | None:
    """Say why the file's graph, if it has one, cannot be taken; None where it can."""
    from stoker.index.equal_rows import first_of_equals

    graph = foreign.graph
    if graph is None:
        return None
    if foreign.metric is not None and foreign.metric != metric:
        return f"the graph was made for {foreign.metric}: linked anew for {metric}"
    if not M_MIN <= graph.m <= M_MAX:
        return (
            f"its graph has up to {graph.m} neighbors a node, and {M_MIN} to {M_MAX} can be taken: "
            "linked anew"
        )
    first = first_of_equals(vectors, metric=metric, group_max=graph.m0)
    if first is None:
        return None
    copies = int(np.unique(first, return_counts=True)[1].max())
    return (
        f"a vector stands in it {copies} times, more than a node has links: walks would be "
        "caught among the copies, so all is linked anew"
    )


def import_foreign(
    target: Path | str,
    foreign: ForeignIndex,
    *,
    metric: str | None = None,
    m: int | None = None,
    ef_construction: int = 200,
    heat: Mapping[Any, float] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Make a collection of what ``foreign`` holds.

    Args:
        target: Folder to make; must not exist or be empty.
        foreign: From `read_foreign`.
        metric: "ip", "cosine" or "l2"; None takes what the file states.
        m: Neighbors, where the vectors are linked anew; None leaves it to `build_segment`.
        ef_construction: Candidates, likewise.
        heat: Weight by id: hot rows are sealed side by side.
        threads: Threads that link; None means all processors.
        progress: Called with (what, done, total).

    Raises:
        InputError: no metric is known, vectors are not finite (names the row), ids are given
            twice, or something is at ``target``.
    """
    from stoker.index.build import build_segment, check_vectors, heat_by_row
    from stoker.index.ids import normalize_ids
    from stoker.index.seal import BuildReport, seal_graph

    threads = checked_threads(threads)
    chosen = metric or foreign.metric
    if chosen is None:
        raise InputError(
            f"{foreign.format}: the file does not say how its vectors are compared; pass the "
            "metric (ip, cosine or l2) that they were made for"
        )
    vectors = check_vectors(foreign.vectors)
    if foreign.ids is not None:
        check_names(foreign.ids)
    ids = normalize_ids(foreign.ids, len(vectors))
    why_anew = _why_linked_anew(foreign, vectors, chosen)
    graph = foreign.graph if why_anew is None else None
    notes = foreign.notes if why_anew is None else (*foreign.notes, why_anew)

    def build(path: Path) -> BuildReport:
        if graph is None:
            return build_segment(
                path,
                vectors,
                ids,
                metric=chosen,
                m=m,
                ef_construction=ef_construction,
                heat=heat,
                threads=threads,
                progress=progress,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        return seal_graph(
            path,
            graph,
            vectors,
            ids,
            metric=chosen,
            heat=heat_by_row(heat, ids),
            builder=foreign.format,
            threads=threads,
            progress=progress,
        )

    written = [0]

    def documents(store: DocumentStore) -> None:
        assert foreign.bodies is not None
        written[0] = _write_bodies(store, foreign.bodies(), progress, len(vectors))

    report = collection_around(
        target,
        build,
        ef_construction=ef_construction,
        documents=None if foreign.bodies is None else documents,
    )
    log.info(
        "index.foreign_imported",
        path=str(target),
        format=foreign.format,
        rows=len(vectors),
        graph="taken" if graph is not None else "built",
    )
    return ImportReport(
        format=foreign.format,
        graph="taken" if graph is not None else "built",
        count=len(vectors),
        dim=int(vectors.shape[1]),
        metric=chosen,
        documents=written[0],
        notes=notes,
        build=dataclasses.asdict(report),
    )


def _write_bodies(
    store: DocumentStore, bodies: Iterator[ForeignBody], progress: Progress | None, total: int
) -> int:
    done = 0
    part: list[Change] = []

    def flush() -> None:
        nonlocal done
        if part:
            store.write(part)
            done += len(part)
            part.clear()
            if progress is not None:
                progress("documents", done, total)

    for body in bodies:
        part.append(Change(0, DEFAULT_TENANT, body.id, False, body.text, body.metadata, None))
        if len(part) == _DOCUMENTS_STEP:
            flush()
    flush()
    return done
