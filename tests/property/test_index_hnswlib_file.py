"""`read_hnswlib` against hnswlib itself, and against files that were damaged on purpose."""

from __future__ import annotations

from pathlib import Path

import hnswlib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError
from stoker.index.hnsw_graph import HnswGraph
from stoker.index.hnswlib_file import read_hnswlib

QUICK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def write_index(
    path: Path, count: int, dim: int, m: int, seed: int, deleted: int = 0
) -> tuple[hnswlib.Index, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, dim), dtype=np.float32)
    labels = rng.permutation(10 * count + 1)[:count] + 5
    index = hnswlib.Index(space="l2", dim=dim)
    index.init_index(max_elements=count + 3, M=m, ef_construction=40, random_seed=seed)
    if count:
        index.add_items(vectors, labels, num_threads=1)
    for label in labels[:deleted]:
        index.mark_deleted(int(label))
    index.save_index(str(path))
    return index, vectors


def walk(graph: HnswGraph, query: NDArray[np.float32], ef: int) -> NDArray[np.int64]:
    """The slow, obvious best-first search (Malkov & Yashunin, algorithms 2 and 5)."""
    assert graph.vectors is not None

    def distance(node: int) -> float:
        assert graph.vectors is not None
        with np.errstate(all="ignore"):  # A flipped bit can make a number enormous.
            return float(((graph.vectors[node] - query) ** 2).sum())

    entry = graph.entry_point
    for upper in reversed(graph.upper):
        at = {int(node): row for row, node in enumerate(upper.nodes)}
        moved = True
        while moved:
            moved = False
            row = at[entry]
            for other in upper.links[row, : upper.counts[row]]:
                if distance(int(other)) < distance(entry):
                    entry, moved = int(other), True
    found = {entry: distance(entry)}
    open_nodes = {entry}
    while open_nodes:
        node = min(open_nodes, key=lambda n: found[n])
        open_nodes.discard(node)
        kept = sorted(found.values())[:ef]
        if found[node] > kept[-1]:
            break
        for other in graph.level0[node, : graph.level0_counts[node]]:
            if int(other) not in found:
                found[int(other)] = distance(int(other))
                open_nodes.add(int(other))
    best = sorted(found, key=lambda n: found[n])
    return np.array([n for n in best if not graph.deleted[n]], dtype=np.int64)


@QUICK
@given(
    count=st.integers(0, 300),
    dim=st.integers(1, 24),
    m=st.integers(2, 12),
    seed=st.integers(1, 2**16),
)
def test_graph_holds_what_hnswlib_holds(
    tmp_path: Path, count: int, dim: int, m: int, seed: int
) -> None:
    path = tmp_path / "index.bin"
    index, _ = write_index(path, count, dim, m, seed)
    graph = read_hnswlib(path, dim=dim)
    assert (graph.count, graph.dim, graph.m, graph.m0) == (count, dim, m, 2 * m)
    assert sorted(graph.labels.tolist()) == sorted(index.get_ids_list())
    if count:
        stored = np.array(index.get_items(graph.labels), dtype=np.float32)
        assert graph.vectors is not None
        np.testing.assert_array_equal(graph.vectors, stored)
        assert int((graph.levels == graph.max_level).sum()) >= 1


def test_a_walk_finds_what_hnswlib_finds(tmp_path: Path) -> None:
    path = tmp_path / "index.bin"
    index, vectors = write_index(path, 600, 12, 6, seed=7, deleted=50)
    graph = read_hnswlib(path)
    assert int(graph.deleted.sum()) == 50
    assert not np.shares_memory(graph.labels, graph.level0)
    index.set_ef(60)
    same = 0
    for query in vectors[::40] + 0.01:
        labels, _ = index.knn_query(query, k=5)
        mine = graph.labels[walk(graph, query, 60)[:5]]
        same += len(set(labels[0].tolist()) & set(mine.tolist()))
    assert same >= 0.97 * 5 * 15


def test_vectors_and_links_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "index.bin"
    write_index(path, 100, 8, 4, seed=3)
    graph = read_hnswlib(path)
    assert graph.vectors is not None
    assert not graph.vectors.flags.owndata
    assert not graph.level0.flags.owndata
    assert not graph.vectors.flags.writeable


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "index.bin"
    if not path.exists():
        write_index(path, 80, 3, 3, seed=11)
    good = path.read_bytes()
    broken = bytearray(good)
    kind = data.draw(st.sampled_from(["cut", "grow", "flip", "words"]))
    if kind == "cut":
        del broken[data.draw(st.integers(0, len(good) - 1)) :]
    elif kind == "grow":
        broken += bytes(data.draw(st.binary(min_size=1, max_size=64)))
    elif kind == "flip":
        for _ in range(data.draw(st.integers(1, 8))):
            broken[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        word = 4 * data.draw(st.integers(0, len(good) // 4 - 1))
        value = data.draw(st.sampled_from([0, 1, 79, 80, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF]))
        broken[word : word + 4] = value.to_bytes(4, "little")
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(broken)
    try:
        graph = read_hnswlib(damaged)
    except CorruptError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert str(damaged) in message
        assert "expected" in message
        return
    assert kind in ("flip", "words")  # A change of length is always noticed.
    graph.check()
    assert graph.vectors is not None
    walk(graph, np.zeros(graph.dim, dtype=np.float32), 8)


@pytest.mark.parametrize("name", ["missing.bin", "."])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        read_hnswlib(tmp_path / name)


def test_another_dimension_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.bin"
    write_index(path, 10, 8, 4, seed=1)
    with pytest.raises(InputError, match="expected vectors of 9 dimensions, found 8"):
        read_hnswlib(path, dim=9)
