"""Foreign indexes and vector files: what is taken, what is linked anew, what is refused and why."""

from __future__ import annotations

import datetime
import decimal
import math
import os
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
import pytest

from stoker.errors import CorruptError, InputError, StokerError
from stoker.index.collection import Collection
from stoker.index.foreign import ForeignIndex, detect_format, import_foreign, read_foreign
from stoker.index.foreign_faiss import read_faiss

faiss = pytest.importorskip("faiss")
usearch_index = pytest.importorskip("usearch.index")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

DIM = 8
COUNT = 300


@pytest.fixture(scope="module")
def points() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((COUNT, DIM)).astype(np.float32)


def check_import(
    tmp_path: Path, foreign: ForeignIndex, points: np.ndarray, ids: Any, *, metric: str
) -> Any:
    """Import, then find each vector by itself under the id that it had."""
    target = tmp_path / "imported"
    report = import_foreign(target, foreign, metric=metric, m=8, ef_construction=60, threads=1)
    assert report.count == len(points)
    with Collection(target) as collection:
        assert collection.metric == metric
        hits = collection.search(points, 1, ef=80)
        found = sum(a == b for a, b in zip(hits.ids[:, 0].tolist(), list(ids), strict=True))
        assert found >= 0.97 * len(points)
    return report


@pytest.mark.parametrize("format", [None, "hnswlib", "faiss", "usearch", "npy", "parquet", "fvecs"])
def test_what_is_no_file_is_refused_by_name_and_not_waited_for(
    format: str | None, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(InputError, match=f"{path}.*found a pipe, device or socket"):
            read_foreign(path, format=format)
    with pytest.raises(InputError, match=str(tmp_path)):
        read_foreign(tmp_path, format=format)


def test_hnswlib_graph_is_taken(tmp_path: Path, points: np.ndarray) -> None:
    path = tmp_path / "index.bin"
    ids = np.arange(COUNT) * 3 + 7
    index = hnswlib.Index(space="l2", dim=DIM)
    index.init_index(COUNT, M=8, ef_construction=60)
    index.add_items(points, ids, num_threads=1)
    index.save_index(str(path))
    assert detect_format(path) == "hnswlib"
    foreign = read_foreign(path)
    report = check_import(tmp_path, foreign, points, ids, metric="l2")
    assert (report.format, report.graph) == ("hnswlib", "taken")
    with pytest.raises(InputError, match="does not say how its vectors are compared"):
        import_foreign(tmp_path / "other", foreign)


def test_hnswlib_deletes_are_left_out(tmp_path: Path, points: np.ndarray) -> None:
    path = tmp_path / "index.bin"
    index = hnswlib.Index(space="ip", dim=DIM)
    index.init_index(COUNT, M=8, ef_construction=60)
    index.add_items(points, np.arange(COUNT))
    index.mark_deleted(0)
    index.save_index(str(path))
    report = import_foreign(tmp_path / "c", read_foreign(path), metric="cosine")
    assert (report.graph, report.count) == ("built", COUNT - 1)
    assert "1 deleted vectors were left out" in report.notes[0]


def test_a_graph_of_more_links_than_are_taken_is_linked_anew(
    tmp_path: Path, points: np.ndarray
) -> None:
    path = tmp_path / "index.bin"
    index = hnswlib.Index(space="l2", dim=DIM)
    index.init_index(COUNT, M=200, ef_construction=60)
    index.add_items(points, num_threads=1)
    index.save_index(str(path))
    report = check_import(tmp_path, read_foreign(path), points, range(COUNT), metric="l2")
    assert report.graph == "built"
    assert "200 neighbors a node" in report.notes[0]


@pytest.mark.parametrize("kind", ["flat", "idmap", "cosine"])
def test_faiss_hnsw_graph_is_taken(tmp_path: Path, points: np.ndarray, kind: str) -> None:
    path = tmp_path / "index.faiss"
    ids = np.arange(COUNT)
    index = faiss.IndexHNSWFlat(DIM, 8)
    if kind == "idmap":
        ids = np.arange(COUNT) + 10**12
        index = faiss.IndexIDMap2(index)
        index.add_with_ids(points, ids)
    else:
        index.add(points)
    faiss.write_index(index, str(path))
    assert detect_format(path) == "faiss"
    foreign = read_foreign(path)
    assert foreign.graph is not None
    assert foreign.metric == "l2"
    metric = "cosine" if kind == "cosine" else "l2"
    report = check_import(tmp_path, foreign, points, ids, metric=metric)
    assert report.graph == ("built" if kind == "cosine" else "taken")
    if kind == "cosine":
        assert "linked anew for cosine" in report.notes[0]


@pytest.mark.parametrize("kind", ["flat_ip", "fp16", "ivf", "hnsw_fp16"])
def test_other_faiss_vectors_are_taken(tmp_path: Path, points: np.ndarray, kind: str) -> None:
    path = tmp_path / "index.faiss"
    qtype = faiss.ScalarQuantizer.QT_fp16
    index: Any = {
        "flat_ip": lambda: faiss.IndexFlatIP(DIM),
        "fp16": lambda: faiss.IndexScalarQuantizer(DIM, qtype),
        "ivf": lambda: faiss.IndexIVFFlat(faiss.IndexFlatL2(DIM), DIM, 4),
        "hnsw_fp16": lambda: faiss.IndexHNSWSQ(DIM, qtype, 8),
    }[kind]()
    ids = np.arange(COUNT)
    index.train(points)
    if kind == "ivf":
        ids = np.random.default_rng(1).permutation(10_000)[:COUNT]
        index.add_with_ids(points, ids)
    else:
        index.add(points)
    faiss.write_index(index, str(path))
    foreign = read_foreign(path)
    assert foreign.metric == ("ip" if kind == "flat_ip" else "l2")
    report = check_import(tmp_path, foreign, points, ids, metric="l2")
    assert report.graph == ("taken" if kind == "hnsw_fp16" else "built")


@pytest.mark.parametrize(
    ("factory", "metric", "graph"),
    [
        ("L2norm,Flat", "cosine", "built"),
        ("L2norm,HNSW8", "cosine", "taken"),
        ("L2norm,IVF4,Flat", "cosine", "built"),
        ("PQ4x4,RFlat", "l2", "built"),
        ("IDMap,IVF4,Flat", "l2", "built"),
        ("IDMap2,L2norm,Flat", "cosine", "built"),
    ],
)
def test_faiss_vectors_inside_others_are_taken(
    tmp_path: Path, points: np.ndarray, factory: str, metric: str, graph: str
) -> None:
    path = tmp_path / "index.faiss"
    index = faiss.index_factory(DIM, factory)
    index.train(points)
    ids = np.arange(COUNT)
    if factory.startswith("IDMap"):
        ids = np.random.default_rng(1).permutation(10_000)[:COUNT]
        index.add_with_ids(points, ids)
    else:
        index.add(points)
    faiss.write_index(index, str(path))
    foreign = read_foreign(path)
    assert foreign.metric == metric
    report = check_import(tmp_path, foreign, points, ids, metric=metric)
    assert report.graph == graph


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: faiss.IndexPQ(DIM, 4, 4), "IndexPQ does not keep the vectors"),
        (lambda: faiss.IndexLSH(DIM, 16), "does not keep the vectors"),
        (
            lambda: faiss.IndexScalarQuantizer(DIM, faiss.ScalarQuantizer.QT_8bit),
            "its vectors are quantised to 8 bytes of 8 dimensions",
        ),
        (lambda: faiss.IndexFlat(DIM, faiss.METRIC_L1), "has no counterpart"),
        (
            lambda: faiss.IndexPreTransform(faiss.PCAMatrix(DIM, 4), faiss.IndexFlatL2(4)),
            "does not keep the vectors",
        ),
    ],
)
def test_what_faiss_no_longer_has_is_refused(
    tmp_path: Path, points: np.ndarray, make: Any, reason: str
) -> None:
    path = tmp_path / "index.faiss"
    index = make()
    index.train(points)
    index.add(points)
    faiss.write_index(index, str(path))
    with pytest.raises(InputError, match=reason):
        read_foreign(path)


@pytest.mark.parametrize(("metric", "dtype"), [("cos", "f32"), ("ip", "f16"), ("l2sq", "f64")])
def test_usearch_vectors_are_taken(
    tmp_path: Path, points: np.ndarray, metric: str, dtype: str
) -> None:
    path = tmp_path / "index.usearch"
    ids = np.arange(COUNT) + 50
    index = usearch_index.Index(ndim=DIM, metric=metric, dtype=dtype)
    index.add(ids, points)
    index.save(str(path))
    assert detect_format(path) == "usearch"
    foreign = read_foreign(path)
    assert foreign.metric == {"cos": "cosine", "ip": "ip", "l2sq": "l2"}[metric]
    check_import(tmp_path, foreign, points[np.asarray(foreign.ids) - 50], foreign.ids, metric="l2")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"metric": "cos", "dtype": "i8"}, "quantised to I8"),
        ({"metric": "haversine", "dtype": "f32", "ndim": 2}, "has no counterpart"),
        ({"metric": "cos", "dtype": "f32", "multi": True}, "several vectors per key"),
    ],
)
def test_what_usearch_cannot_give_is_refused(
    tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "index.usearch"
    index = usearch_index.Index(**{"ndim": DIM, **arguments})
    index.add(np.arange(4), np.ones((4, arguments.get("ndim", DIM)), dtype=np.float32))
    index.save(str(path))
    with pytest.raises(InputError, match=reason):
        read_foreign(path, format="usearch")


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
def test_npy_is_mapped(tmp_path: Path, points: np.ndarray, dtype: str) -> None:
    path = tmp_path / "vectors.npy"
    np.save(path, points.astype(dtype))
    foreign = read_foreign(path)
    assert isinstance(foreign.vectors, np.memmap)
    check_import(tmp_path, foreign, points, range(COUNT), metric="cosine")


def test_fvecs_and_bvecs_are_mapped(tmp_path: Path, points: np.ndarray) -> None:
    head = np.full((COUNT, 1), DIM, dtype="<i4")
    path = tmp_path / "v.fvecs"
    path.write_bytes(np.hstack([head, points.view("<i4")]).tobytes())
    foreign = read_foreign(path)
    assert foreign.metric == "l2"
    np.testing.assert_array_equal(foreign.vectors, points)
    check_import(tmp_path, foreign, points, range(COUNT), metric="l2")
    small = np.random.default_rng(2).integers(0, 256, (COUNT, DIM)).astype(np.uint8)
    path = tmp_path / "v.bvecs"
    path.write_bytes(np.hstack([head.view(np.uint8), small]).tobytes())
    np.testing.assert_array_equal(read_foreign(path).vectors, small)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data[:-1], "at byte 10764"),
        (lambda data: data[:36] + b"\x07" + data[37:], "at byte 36: expected dimension 8"),
        (lambda data: b"\xff\xff\xff\xff" + data[4:], "at byte 0"),
        (lambda data: b"", "at byte 0"),
    ],
)
def test_a_damaged_fvecs_names_the_byte(
    tmp_path: Path, points: np.ndarray, change: Any, place: str
) -> None:
    head = np.full((COUNT, 1), DIM, dtype="<i4")
    path = tmp_path / "v.fvecs"
    path.write_bytes(change(np.hstack([head, points.view("<i4")]).tobytes()))
    with pytest.raises(CorruptError, match=place):
        read_foreign(path)


def test_parquet_brings_ids_texts_and_metadata(tmp_path: Path, points: np.ndarray) -> None:
    path = tmp_path / "v.parquet"
    ids = [f"doc-{i}" for i in range(COUNT)]
    table = pyarrow.table(
        {
            "id": ids,
            "vector": list(points),
            "text": [f"text {i}" for i in range(COUNT)],
            "year": [2000 + i % 20 for i in range(COUNT)],
            "tenant": ["x"] * COUNT,
        }
    )
    parquet.write_table(table, path, row_group_size=64)
    assert detect_format(path) == "parquet"
    foreign = read_foreign(path)
    report = check_import(tmp_path, foreign, points, ids, metric="cosine")
    assert report.documents == COUNT
    assert "columns tenant were left out" in report.notes[0]
    with Collection(tmp_path / "imported", "rw") as collection:
        (document,) = collection.documents(["doc-3"])
        assert document is not None
        assert (document.text, document.metadata) == ("text 3", {"year": 2003})
        hits = collection.search(points[3], 50, filter={"year": 2003})
        assert hits.ids[0] == "doc-3"
        assert all(int(str(i).split("-")[1]) % 20 == 3 for i in hits.ids if i is not None)
        collection.upsert(["doc-3"], points[4:5], metadata=[{"year": 1}])
        collection.merge(full=True)
        collection.check()
        assert collection.count == COUNT


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"v": [1]}, "expected a column 'vector'"),
        ({"vector": [1, 2]}, "expected lists, found int64"),
        ({"vector": [[1.0, 2.0], [1.0]]}, "row 1: expected 2 numbers"),
        ({"vector": [[1.0, 2.0], None]}, "row 1: expected 2 numbers"),
        ({"vector": [["a"]]}, "expected lists of numbers"),
        ({"vector": [[1.0, 2.0]] * 9_000 + [[1.0, None]]}, "row 9000: expected 2 numbers"),
        ({"vector": [[1.0]], "id": [True]}, "row 0: expected int or str, found bool"),
        ({"vector": [[1.0]], "id": [1.5]}, "row 0: expected int or str, found float"),
        ({"vector": [[1.0]], "id": pyarrow.array([None], pyarrow.int64())}, "row 0 has no id"),
        (
            {"vector": [[1.0], [2.0]], "id": pyarrow.array([1, 2**64 - 1], pyarrow.uint64())},
            "id 18446744073709551615 does not fit",
        ),
    ],
)
def test_parquet_that_cannot_be_taken_is_refused(
    tmp_path: Path, columns: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "v.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(InputError, match=reason):
        read_foreign(path)


def test_parquet_metadata_is_kept_as_far_as_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    columns = {
        "vector": [[1.0, 2.0]],
        "when": [datetime.date(2020, 1, 2)],
        "inner": [{"at": datetime.datetime(2020, 1, 2), "n": math.nan, "tags": ["a", None]}],
        "price": [decimal.Decimal("1.5")],
        "": [1],
    }
    parquet.write_table(pyarrow.table(columns), path)
    report = import_foreign(tmp_path / "c", read_foreign(path), metric="l2")
    assert report.notes == (
        "columns '' were left out: filters reserve these names",
        "columns price were left out: metadata cannot hold their type",
    )
    with Collection(tmp_path / "c") as collection:
        (document,) = collection.documents([0])
    assert document is not None
    inner = {"at": "2020-01-02T00:00:00", "tags": ["a", None]}
    assert document.metadata == {"when": "2020-01-02", "inner": inner}


def test_parquet_of_columns_with_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    arrays = [pyarrow.array([[1.0]]), pyarrow.array([1]), pyarrow.array([2])]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["vector", "a", "a"]), path)
    with pytest.raises(InputError, match="several columns named 'a'"):
        read_foreign(path)


@pytest.mark.parametrize("factory", ["BFlat", "BHNSW8", "BIVF2"])
def test_a_faiss_index_of_bits_is_refused_and_not_called_damaged(
    tmp_path: Path, factory: str
) -> None:
    index = faiss.index_binary_factory(64, factory)
    codes = np.random.default_rng(0).integers(0, 256, (90, 8), dtype=np.uint8)
    index.train(codes)
    index.add(codes)
    faiss.write_index_binary(index, str(tmp_path / "bits.faiss"))
    with pytest.raises(InputError, match="binary codes"):
        read_foreign(tmp_path / "bits.faiss")


def test_a_faiss_index_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """faiss itself only says that it could not, as of a damaged one."""
    with pytest.raises(InputError, match="cannot be read"):
        read_faiss(tmp_path)


def test_npy_with_more_behind_its_array_is_refused(tmp_path: Path, points: np.ndarray) -> None:
    path = tmp_path / "v.npy"
    with path.open("wb") as file:
        np.save(file, points)
        np.save(file, points)
    with pytest.raises(CorruptError, match="expected the end of its one array"):
        read_foreign(path)


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.zeros((2, 2, 2)), np.array([["a"]]), np.zeros((3, 2), object)],
)
def test_npy_of_another_shape_or_kind_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "v.npy"
    np.save(path, array)
    with pytest.raises(InputError):
        read_foreign(path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(np.nan, "not finite"), (1e300, "not finite"), (1e30, "too long for float32 distances")],
)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_vectors_that_cannot_be_compared_are_refused_by_row(
    tmp_path: Path, points: np.ndarray, value: float, reason: str, dtype: str
) -> None:
    bad = points.astype(np.float64)
    bad[17, 3] = value
    with np.errstate(over="ignore"):
        np.save(tmp_path / "v.npy", bad.astype(dtype))
    with pytest.raises(InputError, match=f"row 17 is {reason}"):
        import_foreign(tmp_path / "c", read_foreign(tmp_path / "v.npy"), metric="l2")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["npy", "parquet", "faiss"])
@pytest.mark.parametrize("seed", range(6))
def test_truncated_files_are_refused(
    tmp_path: Path, points: np.ndarray, kind: str, seed: int
) -> None:
    path = tmp_path / f"v.{kind}"
    if kind == "npy":
        np.save(path, points)
    elif kind == "parquet":
        parquet.write_table(pyarrow.table({"vector": list(points)}), path)
    else:
        index = faiss.IndexHNSWFlat(DIM, 8)
        index.add(points)
        faiss.write_index(index, str(path))
    data = path.read_bytes()
    path.write_bytes(data[: int(np.random.default_rng(seed).integers(8, len(data)))])
    with pytest.raises(StokerError):
        read_foreign(path, format=kind)


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.bin"
    path.write_bytes(b"something else entirely")
    with pytest.raises(InputError, match="its format is not known"):
        read_foreign(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_foreign(tmp_path / "none")
    with pytest.raises(InputError, match="format: expected one of"):
        read_foreign(path, format="zip")
