"""Reads faiss index files through faiss itself: HNSW with its graph, flat and IVF vectors."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError
from stoker.index.foreign import ForeignIndex
from stoker.index.hnsw_graph import GraphError, HnswGraph, UpperLevel

_HNSW: Final = ("IndexHNSWFlat", "IndexHNSWSQ", "IndexHNSWCagra", "IndexHNSW")
_NEIGHBORS_MAX: Final = 20_000
# Of every index that faiss calls binary; the others begin with "I" too.
_BINARY_MAGIC: Final = b"IB"
# faiss has one limit for the whole process.
_LIMIT_LOCK: Final = threading.Lock()


def read_faiss(path: Path) -> ForeignIndex:
    """Read an index that ``faiss.write_index`` wrote.

    Taken: flat, IVF-flat and HNSW indexes with full or half-precision vectors, also inside an
    id map, behind "L2norm" (then compared by cosine), or kept to refine quantised ones. The graph
    of an HNSW index is taken as it is.

    Raises:
        InputError: faiss is not installed, the file cannot be opened, or it keeps no original
            vectors; says which part.
        CorruptError: faiss cannot read the file, or its graph is impossible.
    """
    try:
        import faiss
    except ImportError as error:
        raise InputError(
            f"{path}: reading a faiss index needs faiss: pip install 'stoker[cpu]'"
        ) from error
    binary = False
    try:
        with path.open("rb") as file:
            binary = file.read(len(_BINARY_MAGIC)) == _BINARY_MAGIC
        with _no_array_beyond(faiss, path.stat().st_size):
            index = faiss.read_index(str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (RuntimeError, MemoryError) as error:
        if binary:
            raise InputError(
                f"{path}: a faiss index of binary codes; their vectors are not in the file"
            ) from error
        first = str(error).splitlines()[-1] if str(error) else "unreadable"
        raise CorruptError(f"{path}: faiss cannot read it: {first[:300]}") from error
    return _taken(path, faiss, index)


@contextlib.contextmanager
def _no_array_beyond(faiss: Any, file_bytes: int) -> Iterator[None]:
    """Refuse arrays and lists longer than the file they come from: faiss makes room beforehand.

    Versions without such limits (before 1.15) believe what the file says.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_LIMIT_LOCK)
        for limit in ("deserialization_vector_byte_limit", "deserialization_loop_limit"):
            if hasattr(faiss, f"set_{limit}"):
                put = getattr(faiss, f"set_{limit}")
                stack.callback(put, getattr(faiss, f"get_{limit}")())
                put(max(1, file_bytes))
        yield


def _taken(path: Path, faiss: Any, index: Any) -> ForeignIndex:
    kind = type(index).__name__
    if kind in ("IndexIDMap", "IndexIDMap2"):
        return _mapped(path, faiss, index)
    if kind == "IndexPreTransform" and _only_normalizes(faiss, index):
        return _around(index, _taken(path, faiss, faiss.downcast_index(index.index)), "cosine")
    metric = _metric(path, faiss, index)
    if kind == "IndexRefineFlat":
        # The quantised index in front is a way to them; these are the vectors as they were given.
        refine = faiss.downcast_index(index.refine_index)
        if type(refine).__name__ in ("IndexFlat", "IndexFlatL2", "IndexFlatIP"):
            return _around(index, _taken(path, faiss, refine), metric)
    if kind in ("IndexFlat", "IndexFlatL2", "IndexFlatIP"):
        return ForeignIndex(f"faiss {kind}", _flat(path, faiss, index), None, metric, owner=index)
    if kind == "IndexScalarQuantizer":
        return ForeignIndex(
            f"faiss {kind}", _dequantized(path, faiss, index), None, metric, owner=index
        )
    if kind == "IndexIVFFlat":
        vectors, ids = _inverted_lists(path, faiss, index)
        note = "linked anew: an IVF index has no graph"
        return ForeignIndex(f"faiss {kind}", vectors, ids, metric, notes=(note,), owner=index)
    if kind in _HNSW:
        return _hnsw(path, faiss, index, metric)
    raise InputError(
        f"{path}: {kind} does not keep the vectors as they were given (quantised or transformed), "
        "or not in a way that is known here, so they cannot be taken; export the original vectors "
        "as .npy and import those"
    )


def _around(index: Any, inner: ForeignIndex, metric: str | None) -> ForeignIndex:
    """Return what ``index`` holds inside, compared by ``metric``."""
    return dataclasses.replace(
        inner,
        format=f"faiss {type(index).__name__} of {inner.format.removeprefix('faiss ')}",
        metric=metric,
        owner=(index, inner.owner),
    )


def _mapped(path: Path, faiss: Any, index: Any) -> ForeignIndex:
    """Return what an id map holds inside, under its ids."""
    inner = _taken(path, faiss, faiss.downcast_index(index.index))
    ids = faiss.vector_to_array(index.id_map).astype(np.int64)
    if ids.size != len(inner.vectors):
        raise CorruptError(
            f"{path}: {type(index).__name__}: {ids.size} ids of {len(inner.vectors)} vectors"
        )
    if inner.ids is not None:
        # An index with ids of its own was given numbers; they are places in this map.
        places = np.asarray(inner.ids)
        if places.size and not 0 <= places.min() <= places.max() < ids.size:
            raise InputError(
                f"{path}: {type(index).__name__}: the ids inside are not places in its map"
            )
        ids = ids[places]
    return dataclasses.replace(_around(index, inner, inner.metric), ids=ids)


def _only_normalizes(faiss: Any, index: Any) -> bool:
    """Whether vectors are only brought to unit length: then they can be compared by cosine."""
    steps = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
    return bool(steps) and all(
        isinstance(step, faiss.NormalizationTransform) and step.norm == 2.0 for step in steps
    )


def _metric(path: Path, faiss: Any, index: Any) -> str:
    if index.metric_type == faiss.METRIC_INNER_PRODUCT:
        return "ip"
    if index.metric_type == faiss.METRIC_L2:
        return "l2"
    raise InputError(
        f"{path}: faiss metric {index.metric_type} has no counterpart; L2 and inner product have"
    )


def _check_codes(path: Path, index: Any, value_bytes: int) -> tuple[int, int]:
    """Return (count, dim) of what an index keeps in one array; it must be as long as they say."""
    count, dim, found = int(index.ntotal), int(index.d), int(index.codes.size())
    if count < 0 or dim < 1 or found != count * dim * value_bytes:
        raise CorruptError(
            f"{path}: it states {count} vectors of {dim} dimensions and holds {found} bytes of them"
        )
    return count, dim


def _flat(path: Path, faiss: Any, index: Any) -> NDArray[np.float32]:
    """Return a view of a flat index's own memory."""
    count, dim = _check_codes(path, index, 4)
    if count == 0:
        return np.empty((0, dim), dtype=np.float32)
    values: NDArray[np.float32] = faiss.rev_swig_ptr(index.get_xb(), count * dim)
    return values.reshape(count, dim)


def _dequantized(path: Path, faiss: Any, index: Any) -> NDArray[np.float16]:
    """Return half-precision vectors; coarser codes have lost the original."""
    if index.sq.qtype != faiss.ScalarQuantizer.QT_fp16:
        raise InputError(
            f"{path}: its vectors are quantised to {index.sq.code_size} bytes of {index.d} "
            "dimensions; the originals are not in the file. Half precision could be taken"
        )
    count, dim = _check_codes(path, index, 2)
    if count == 0:
        return np.empty((0, dim), dtype=np.float16)
    codes = faiss.rev_swig_ptr(index.codes.data(), count * dim * 2)
    halves: NDArray[np.float16] = codes.view("<f2").reshape(count, dim)
    return halves


def _inverted_lists(
    path: Path, faiss: Any, index: Any
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    lists, dim, count = index.invlists, int(index.d), int(index.ntotal)
    sizes = [int(lists.list_size(number)) for number in range(lists.nlist)]
    if sum(sizes) != count or lists.code_size != dim * 4:
        raise CorruptError(
            f"{path}: it states {count} vectors of {dim} dimensions; its lists hold {sum(sizes)} "
            f"of {lists.code_size} bytes"
        )
    vectors = np.empty((count, dim), dtype=np.float32)
    ids = np.empty(count, dtype=np.int64)
    done = 0
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        ids[done : done + size] = faiss.rev_swig_ptr(lists.get_ids(number), size)
        codes = faiss.rev_swig_ptr(lists.get_codes(number), size * dim * 4)
        vectors[done : done + size] = codes.view("<f4").reshape(size, dim)
        done += size
    order = np.argsort(ids, kind="stable")
    return vectors[order], ids[order]


def _hnsw(path: Path, faiss: Any, index: Any, metric: str) -> ForeignIndex:
    kind = type(index).__name__
    storage = faiss.downcast_index(index.storage)
    stored = _taken(path, faiss, storage)
    if stored.ids is not None or stored.graph is not None:
        raise InputError(f"{path}: {kind} over {type(storage).__name__} is not known")
    name = f"faiss {kind}"
    if kind == "IndexHNSWCagra" and index.base_level_only:
        note = "linked anew: the file has the base level of a CAGRA graph only"
        return ForeignIndex(name, stored.vectors, None, metric, notes=(note,), owner=index)
    graph = _graph(path, faiss, index.hnsw, len(stored.vectors), int(index.d))
    return ForeignIndex(name, stored.vectors, None, metric, graph, owner=index)


def _graph(path: Path, faiss: Any, hnsw: Any, count: int, dim: int) -> HnswGraph:
    """Turn faiss's arrays into ours; faiss ends short lists with -1."""
    heights = faiss.vector_to_array(hnsw.levels).astype(np.int64)
    offsets = faiss.vector_to_array(hnsw.offsets).astype(np.int64)
    neighbors = faiss.vector_to_array(hnsw.neighbors)
    starts = faiss.vector_to_array(hnsw.cum_nneighbor_per_level).astype(np.int64)
    highest = int(hnsw.max_level)
    if heights.size != count or offsets.size != count + 1 or count == 0:
        if count == 0 and heights.size == 0:
            return _empty(dim, int(starts[1]) if starts.size > 1 else 2)
        raise CorruptError(
            f"{path}: a graph of {heights.size} nodes over {count} vectors ({offsets.size} offsets)"
        )
    if (
        not 0 <= highest < starts.size - 1
        or heights.min() < 1
        or heights.max() != highest + 1
        or not np.array_equal(np.diff(offsets), starts[heights])
        or offsets[0] != 0
        or offsets[-1] != neighbors.size
        or (np.diff(starts) < 0).any()
    ):
        raise CorruptError(f"{path}: its graph's offsets do not fit its levels")
    m0 = int(starts[1])
    # What is said of levels that no node reaches is said of nothing, but of the first one.
    m = int(np.diff(starts)[1 : max(highest, 1) + 1].max()) if starts.size > 2 else m0
    if not (1 <= m0 <= _NEIGHBORS_MAX and 1 <= m <= _NEIGHBORS_MAX):
        raise CorruptError(f"{path}: its graph allows {m0} and {m} neighbors")

    def lists(nodes: NDArray[np.int64], level: int, width: int) -> NDArray[np.int32]:
        size = int(starts[level + 1] - starts[level])
        found = np.full((nodes.size, width), -1, dtype=np.int32)
        found[:, :size] = neighbors[(offsets[nodes] + starts[level])[:, None] + np.arange(size)]
        return found

    everyone = np.arange(count)
    level0 = lists(everyone, 0, m0)
    upper = []
    for level in range(1, highest + 1):
        nodes = np.flatnonzero(heights > level)
        links = lists(nodes, level, m)
        upper.append(
            UpperLevel(
                nodes.astype(np.uint32), _counts(links).astype(np.uint16), links.view(np.uint32)
            )
        )
    graph = HnswGraph(
        count=count,
        dim=dim,
        m=m,
        m0=m0,
        entry_point=int(hnsw.entry_point),
        max_level=highest,
        levels=(heights - 1).astype(np.uint8),
        level0_counts=_counts(level0).astype(np.uint16),
        level0=level0.view(np.uint32),
        upper=upper,
        labels=everyone.astype(np.uint64),
        vectors=None,
        deleted=np.zeros(count, dtype=np.bool_),
    )
    try:
        graph.check()
    except GraphError as error:
        raise CorruptError(f"{path}: {error}") from error
    return graph


def _counts(links: NDArray[np.int32]) -> NDArray[np.int64]:
    empty = links < 0
    first: NDArray[np.int64] = np.where(empty.any(axis=1), empty.argmax(axis=1), links.shape[1])
    return first


def _empty(dim: int, m0: int) -> HnswGraph:
    return HnswGraph(
        count=0,
        dim=dim,
        m=max(1, m0 // 2),
        m0=m0,
        entry_point=-1,
        max_level=-1,
        levels=np.empty(0, np.uint8),
        level0_counts=np.empty(0, np.uint16),
        level0=np.empty((0, m0), np.uint32),
        upper=[],
        labels=np.empty(0, np.uint64),
        vectors=None,
        deleted=np.empty(0, np.bool_),
    )
