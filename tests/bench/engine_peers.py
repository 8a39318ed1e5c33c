"""The engines of the benchmark behind one small interface, each as its own documentation uses it.

A peer whose package is missing is named and left out of the table.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from engine_disk_peers import DiskannPeer, LancePeer
from engine_peer import EF_CONSTRUCTION, M, Peer, Vectors
from numpy.typing import NDArray

NAVIGATION: Final = ("upper", "links", "codes")


class StokerPeer(Peer):
    name = "stoker"
    package = "stoker"
    distribution = "stoker"
    cold_modes = ("cold", "warming", "navigation")
    told_modes = ("told",)
    budget_mode = "budget"

    def prepare(self) -> None:
        importlib.import_module("stoker.service.embedded")

    def build(self, folder: Path, vectors: Vectors) -> None:
        import stoker

        stoker.build(folder / "index", vectors, metric="ip", m=M, ef_construction=EF_CONSTRUCTION)

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        import stoker
        from stoker.index.settings import IndexSettings

        self.index = stoker.open(
            folder / "index",
            memory_bytes=memory_bytes or None,
            settings=IndexSettings(
                search_threads=self.threads,
                volume_iops=self.volume[0],
                volume_bytes_s=self.volume[1],
            ),
        )
        if mode == "resident":
            self.index.warm()
        elif mode == "navigation":
            self.index.warm(budget_bytes=self.navigation_bytes())
        elif mode == "warming":
            threading.Thread(target=self.index.warm, daemon=True).start()

    def navigation_bytes(self) -> int:
        """Bytes of upper layers, links and first codes."""
        kinds = self.index.resident().kinds
        return sum(e.pages * e.page_bytes for e in kinds if e.kind in NAVIGATION)

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        if effort and not self.target:
            return np.asarray(self.index.search(queries, k, ef=effort).ids)
        self.hits = self.index.search(
            queries, k, ef=effort or None, recall_target=self.target or None
        )
        return np.asarray(self.hits.ids)

    def warm_by(self, heat: dict[int, float]) -> bool:
        self.index.warm(heat=heat)
        return True

    def counters(self) -> dict[str, float]:
        hits, misses = self.index.page_counts()
        resident = self.index.resident()
        return {
            "page_hits": hits,
            "page_misses": misses,
            "resident_bytes": resident.resident_bytes,
            **{f"resident_{e.kind}": e.ratio for e in resident.kinds},
        }


class HnswlibPeer(Peer):
    name = "hnswlib"
    package = "hnswlib"
    distribution = "hnswlib"
    cold_modes = ("resident",)

    def build(self, folder: Path, vectors: Vectors) -> None:
        import hnswlib

        index = hnswlib.Index("ip", vectors.shape[1])
        index.init_index(len(vectors), M=M, ef_construction=EF_CONSTRUCTION)
        index.add_items(vectors)
        index.save_index(str(folder / "index.bin"))
        (folder / "dim").write_text(str(vectors.shape[1]))

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        import hnswlib

        self.index = hnswlib.Index("ip", int((folder / "dim").read_text()))
        self.index.load_index(str(folder / "index.bin"))

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        self.index.set_ef(max(effort, k))
        return np.asarray(self.index.knn_query(queries, k, num_threads=threads)[0])


class FaissPeer(Peer):
    name = "faiss-hnsw"
    package = "faiss"
    distribution = "faiss-cpu"
    cold_modes = ("resident", "mapped")
    budget_mode = "mapped"

    def build(self, folder: Path, vectors: Vectors) -> None:
        import faiss

        index = faiss.IndexHNSWFlat(vectors.shape[1], M, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = EF_CONSTRUCTION
        index.add(vectors)
        faiss.write_index(index, str(folder / "index.faiss"))

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        import faiss

        flags = faiss.IO_FLAG_MMAP_IFC if mode == "mapped" else 0
        self.index = faiss.read_index(str(folder / "index.faiss"), flags)

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        import faiss

        faiss.omp_set_num_threads(threads)
        return self.index.search(
            queries, k, params=faiss.SearchParametersHNSW(efSearch=max(effort, k))
        )[1]


class UsearchPeer(Peer):
    name = "usearch-f32"
    package = "usearch"
    distribution = "usearch"
    cold_modes: ClassVar[tuple[str, ...]] = ("resident", "view")
    budget_mode = "view"
    dtype: ClassVar[str] = "f32"

    def _make(self, dim: int) -> Any:
        from usearch.index import Index

        return Index(
            ndim=dim,
            metric="ip",
            dtype=self.dtype,
            connectivity=M,
            expansion_add=EF_CONSTRUCTION,
        )

    def build(self, folder: Path, vectors: Vectors) -> None:
        index = self._make(vectors.shape[1])
        index.add(np.arange(len(vectors)), vectors)
        index.save(str(folder / "index.usearch"))
        (folder / "dim").write_text(str(vectors.shape[1]))

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        self.index = self._make(int((folder / "dim").read_text()))
        path = str(folder / "index.usearch")
        if mode == "view":
            self.index.view(path)
        else:
            self.index.load(path)

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        self.index.expansion_search = max(effort, k)
        keys = self.index.search(queries, k, threads=threads).keys
        return np.asarray(keys).reshape(len(queries), -1)


class UsearchI8Peer(UsearchPeer):
    name = "usearch-i8"
    cold_modes: ClassVar[tuple[str, ...]] = ()
    budget_mode = ""
    dtype = "i8"


class GlassPeer(Peer):
    """pyglass: HNSW over 8-bit codes, re-ranked; it keeps no full index file, so only warm."""

    name = "pyglass"
    package = "glass"
    distribution = "pyglass-portable"

    def build(self, folder: Path, vectors: Vectors) -> None:
        import glass

        builder = glass.Index("HNSW", "IP", "FP32", R=2 * M, L=EF_CONSTRUCTION)
        builder.build(vectors).save(str(folder / "graph.glass"))
        np.save(folder / "vectors.npy", vectors)

    def open(self, folder: Path, mode: str, memory_bytes: int) -> None:
        import glass

        graph = glass.Graph()
        graph.load(str(folder / "graph.glass"))
        vectors = np.load(folder / "vectors.npy")
        self.searcher = glass.Searcher(graph, vectors, "IP", "SQ8U", "FP32")
        self.searcher.optimize(1)

    def search(self, queries: Vectors, k: int, effort: int, threads: int) -> NDArray[Any]:
        self.searcher.set_ef(max(effort, k))
        if len(queries) == 1:
            return np.asarray(self.searcher.search(queries[0], k)).reshape(1, -1)
        ids = self.searcher.batch_search(queries, k, threads)
        return np.asarray(ids[0] if isinstance(ids, tuple) else ids).reshape(len(queries), -1)


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        StokerPeer,
        HnswlibPeer,
        FaissPeer,
        UsearchPeer,
        UsearchI8Peer,
        GlassPeer,
        DiskannPeer,
        LancePeer,
    )
}
