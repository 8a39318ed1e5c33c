"""Engines that are made for indexes larger than memory: DiskANN and LanceDB."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from engine_peer import EF_CONSTRUCTION, M, Peer, Vectors
from numpy.typing import NDArray

_DEGREE = 64
_BEAM = 4
# Of the earlier queries, those that DiskANN chooses its cache by; it asks them while it opens.
_SAMPLE_QUERIES = 2_000
_OWN_SAMPLE = 500


class DiskannPeer(Peer):
    """DiskANN's static disk index: a quantised copy in memory, nodes on disk and cached.

    Codes take a quarter of a byte a dimension. The cache is chosen by sample queries; where
    earlier queries of a stream are known, they are those, so that it knows what others know.
    Vectors are of unit length, so squared distance orders as inner product does.
    """

    name = "diskannpy"
    package = "diskannpy"
    distribution = "diskannpy"
    efforts = (10, 12, 15, 20, 25, 30, 40, 50, 65, 80, 100, 130, 170, 220, 300)
    cold_modes = ("disk",)
    budget_mode = "disk"

    def build(self, folder: Path, vectors: Vectors) -> None:
        import diskannpy

        count, dim = vectors.shape
        threads = len(os.sched_getaffinity(0))
        diskannpy.build_disk_index(
            data=np.ascontiguousarray(vectors, np.float32),
            distance_metric="l2",
            index_directory=str(folder),
            complexity=100,
            graph_degree=_DEGREE,
            search_memory_maximum=(dim // 4 + 0.5) * count / 1e9,
            build_memory_maximum=16.0,
            num_threads=threads,
        )
        for name in ("ann_vectors.bin", "ann_mem.index.data"):
            # Copies of the input: the index on disk has the vectors beside their links.
            (folder / name).unlink(missing_ok=True)

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        import diskannpy

        self._samples = tempfile.TemporaryDirectory(dir=folder.parent)
        place = Path(self._samples.name)
        for file in folder.iterdir():
            if file.name != "done":
                (place / file.name).symlink_to(file)
        dim = int(np.fromfile(folder / "ann_sample_data.bin", np.int32, 2)[1])
        if self.earlier is None:
            # Of its own sample, which has thousands; all of them take minutes on a slow disk.
            known = np.fromfile(
                folder / "ann_sample_data.bin", np.float32, _OWN_SAMPLE * dim, offset=8
            ).reshape(-1, dim)
        else:
            known = np.ascontiguousarray(self.earlier[-_SAMPLE_QUERIES:], np.float32)
        (place / "ann_sample_data.bin").unlink()
        with (place / "ann_sample_data.bin").open("wb") as out:
            np.array(known.shape, np.int32).tofile(out)
            known.tofile(out)
        node_bytes = 4 * dim + 4 * _DEGREE + 4
        nodes = memory_bytes // node_bytes
        count = int(np.fromfile(folder / "ann_pq_compressed.bin", np.int32, 1)[0])
        if mode == "resident":
            nodes = count
        # With one context it never returns from loading; searches take one thread all the same.
        self.index = diskannpy.StaticDiskIndex(str(place), 2, min(nodes, count))

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        if len(queries) == 1:
            return np.asarray(
                self.index.search(queries[0], k, max(effort, k), _BEAM).identifiers
            ).reshape(1, -1)
        found = self.index.batch_search(queries, k, max(effort, k), threads, _BEAM)
        return np.asarray(found.identifiers)

    @classmethod
    def extra_bytes(cls, folder: Path) -> int:
        # Its codes: the cache alone is given the budget, which is in its favour.
        return (folder / "ann_pq_compressed.bin").stat().st_size


class LancePeer(Peer):
    """LanceDB's IVF_HNSW_SQ, its index cache given the budget; it searches on threads of its own.

    An effort is the place of a setting in `_KNOBS`: partitions probed (in per mille of all), width
    of the walk in each, and how many times the answer's size is fetched to be ranked exactly.
    """

    name = "lancedb"
    package = "lancedb"
    distribution = "lancedb"
    cold_modes = ("opened",)
    own_threads = True
    budget_mode = "opened"
    _KNOBS: ClassVar[tuple[tuple[int, int, int], ...]] = (
        (100, 16, 0),
        (200, 16, 0),
        (300, 16, 0),
        (200, 32, 2),
        (300, 32, 2),
        (500, 32, 2),
        (700, 48, 2),
        (1000, 48, 2),
        (1000, 96, 4),
    )
    efforts = tuple(range(1, len(_KNOBS) + 1))
    _BUFFERS_BYTES: ClassVar[int] = 96 << 20
    _PARTITION_ROWS: ClassVar[int] = 8_192

    def prepare(self) -> None:
        os.environ.setdefault("LANCE_LOG", "error")
        super().prepare()

    def _partitions(self, rows: int) -> int:
        return max(1, rows // self._PARTITION_ROWS)

    def build(self, folder: Path, vectors: Vectors) -> None:
        import lancedb
        import pyarrow as pa

        count, dim = vectors.shape
        schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), dim))])

        def batches() -> Any:
            for start in range(0, count, 8_192):
                part = np.ascontiguousarray(vectors[start : start + 8_192])
                ids = pa.array(range(start, start + len(part)), pa.int64())
                rows = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), dim)
                yield pa.record_batch([ids, rows], schema=schema)

        table = lancedb.connect(str(folder)).create_table(
            "vectors", pa.RecordBatchReader.from_batches(schema, batches())
        )
        table.create_index(
            metric="dot",
            index_type="IVF_HNSW_SQ",
            num_partitions=self._partitions(count),
            m=M,
            ef_construction=EF_CONSTRUCTION,
        )

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        import lancedb

        session = None
        if memory_bytes:
            session = lancedb.Session(
                index_cache_size_bytes=memory_bytes, metadata_cache_size_bytes=4 << 20
            )
        self.table = lancedb.connect(str(folder), session=session).open_table("vectors")
        self.count = self.table.count_rows()

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        share, width, refine = self._KNOBS[effort - 1]
        probes = max(1, self._partitions(self.count) * share // 1_000)
        answers = np.full((len(queries), k), -1, np.int64)
        for row, query in enumerate(queries):
            asked: Any = self.table.search(query)
            asked = asked.distance_type("dot").limit(k).nprobes(probes).ef(width)
            if refine:
                asked = asked.refine_factor(refine)
            ids = asked.select(["id", "_distance"]).to_arrow()["id"].to_numpy()
            answers[row, : len(ids)] = ids
        return answers

    @classmethod
    def extra_bytes(cls, folder: Path) -> int:
        # Its buffers grow to about this beside its cache; a process that lacks it is killed.
        return cls._BUFFERS_BYTES
