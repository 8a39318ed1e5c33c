"""Feeds invented bytes to the reader of every file: ``python tests/fault/fuzz_readers.py NAME``.

Options after the name go to libFuzzer (``-max_total_time=60``, a corpus folder); ``--replay`` and
files give just those to the reader, for which atheris is not needed. A reader may answer, or refuse
with one of our errors; anything else, a crash of native code above all, is a find. Checksums are
made right first: otherwise nothing behind them would ever be reached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

try:
    import atheris
except ModuleNotFoundError:  # The corpus can be replayed without it.
    atheris = None

from stoker.errors import StokerError
from stoker.index.documents import DocumentStore
from stoker.index.filter_index import FilterIndex
from stoker.index.filters import flatten, matches, parse_filter
from stoker.index.foreign import read_foreign
from stoker.index.generation import Generation, SegmentEntry, dead_path, read_current
from stoker.index.hnswlib_file import read_hnswlib
from stoker.index.ids import IdLayout, IdTable
from stoker.index.manifest import FILES, NAME, Manifest
from stoker.index.paged_file import HEADER_BYTES, PagedFile, PagedFileInfo
from stoker.index.segment import Segment
from stoker.index.settings import IndexSettings
from stoker.index.view import stored_dead
from stoker.kernels import _core
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.snapshot import DIGEST_BYTES, MAGIC

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "segment-v5"
SCRATCH = Path(
    tempfile.mkdtemp(prefix="stoker-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
)
HEAT = PrefetchSettings(heat_keys_max=15, heat_tail_buckets=16, graph_edges_per_key_max=4)
FILTERS = [
    parse_filter(expression)
    for expression in (
        {},
        {"lang": "en"},
        {"n": {"gte": 1, "lt": 4}},
        {"not": {"tag": {"in": ["a", 1, True]}}},
        {"when": {"gt": "2020-01-01"}},
        {"tenant": "default", "n": {"exists": True}},
    )
]


def put(name: str, data: bytes) -> Path:
    path = SCRATCH / name
    path.write_bytes(data)
    return path


def fuzz_hnswlib(data: bytes) -> None:
    graph = read_hnswlib(put("graph.hnsw", data))
    graph.check()
    assert graph.vectors is not None
    for node in range(min(graph.count, 8)):
        links = graph.level0[node, : graph.level0_counts[node]]
        assert (links < graph.count).all()
        float(graph.vectors[node].sum())


def fuzz_npy(data: bytes) -> None:
    vectors = read_foreign(put("vectors.npy", b"\x93NUMPY" + data), format="npy").vectors
    float(np.asarray(vectors[:8], np.float64).sum())


def fuzz_vecs(data: bytes) -> None:
    for kind in ("fvecs", "bvecs"):
        with contextlib.suppress(StokerError):
            vectors = read_foreign(put(f"vectors.{kind}", data), format=kind).vectors
            float(np.asarray(vectors[:8], np.float64).sum())


def fuzz_dead(data: bytes) -> None:
    """The checksum in CURRENT is that of ``data``."""
    entry = SegmentEntry("s00000000", "plain", 300, 0, zlib.crc32(data))
    generation = Generation(1, 0, 4, "l2", "int", "float32", 16, 200, (entry,))
    path = dead_path(SCRATCH, 1, entry.name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    dead = stored_dead(SCRATCH, generation, entry)
    assert dead is None or not len(dead) or dead.max() < entry.count


def fuzz_heat(data: bytes) -> None:
    body = MAGIC + data
    digest = hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
    graph = HeatGraph.from_snapshot(body + digest, HEAT)
    graph.check()
    graph.to_snapshot()


def fuzz_current(data: bytes) -> None:
    body = data.split(b"\n")[0]
    put("CURRENT", body + b"\n%08x\n" % zlib.crc32(body))
    read_current(SCRATCH)


def fuzz_filters(data: bytes) -> None:
    body = b"STKRFLT1" + data
    index = FilterIndex.from_bytes(body + zlib.crc32(body).to_bytes(4, "little"), "fuzz")
    if index.count > 1 << 20:
        return  # A bitmap of everything would be right, and slow.
    for node in FILTERS:
        rows = index.select(node)
        assert not len(rows) or rows.max() < index.count


def fuzz_expression(data: bytes) -> None:
    try:
        node = parse_filter(json.loads(data))
    except (ValueError, RecursionError):
        return
    rows = [flatten("default", {"lang": "en", "n": n, "when": "2021-02-03"}) for n in range(3)]
    index = FilterIndex.build(enumerate(rows), len(rows))
    assert list(index.select(node)) == [row for row in range(3) if matches(node, rows[row])]


def fuzz_documents(data: bytes) -> None:
    for leftover in SCRATCH.glob("documents.db*"):
        leftover.unlink()
    path = put("documents.db", data)
    store = DocumentStore.open(path, dim=4, writable=False)
    try:
        store.damage()
        for change in store.changes(0):
            store.documents(change.tenant, [change.id])
    finally:
        store.close()


def fuzz_manifest(data: bytes) -> None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(body, dict):
        return
    body.pop("crc32c", None)
    try:
        body["crc32c"] = _manifest_crc(body)
        put(NAME, json.dumps(body).encode())
    except (ValueError, RecursionError, UnicodeEncodeError):
        return
    Manifest.read(SCRATCH)


def _manifest_crc(body: dict[str, Any]) -> int:
    raw = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return int(_core.crc32c(np.frombuffer(raw, np.uint8)))


def sealed_pages(path: Path, info: PagedFileInfo, pages: np.ndarray) -> PagedFileInfo:
    """Write a paged file whose every checksum is right."""
    table = np.ascontiguousarray(_core.crc32c_pages(pages)).astype("<u4")
    crc = int(_core.crc32c(table.view(np.uint8)))
    info = dataclasses.replace(info, page_count=len(pages), table_crc=crc)
    path.write_bytes(info.pack() + pages.tobytes() + table.tobytes())
    return info


def fuzz_paged(data: bytes) -> None:
    """The header's numbers come from ``data``, with a right checksum of their own."""
    head = bytearray(HEADER_BYTES)
    head[: min(len(data), 64)] = data[:64]
    head[:12] = b"STOKERSG" + b"\x01\x00\x05\x00"
    body = np.frombuffer(bytes(head[:-4]), np.uint8)
    head[-4:] = int(_core.crc32c(body)).to_bytes(4, "little")
    path = put("ids.stk", bytes(head) + data[64:])
    file = PagedFile(path, kind="ids")
    file.damaged_pages()
    file.read_bytes()


def fuzz_ids(data: bytes) -> None:
    if len(data) < 4:
        return
    kind = "str" if data[0] & 1 else "int"
    dtype = "<u8" if kind == "str" else ("<u4", "<i8")[data[0] >> 1 & 1]
    count, text = data[1] % 16, int.from_bytes(data[2:4], "little") % 64
    stream = data[4:]
    pages = np.zeros((max(1, -(-len(stream) // 4096)), 4096), np.uint8)
    pages.reshape(-1)[: len(stream)] = np.frombuffer(stream, np.uint8)
    info = PagedFileInfo("ids", 4096, len(pages), len(stream), 1, 0, 0)
    path = SCRATCH / "table.stk"
    sealed_pages(path, info, pages)
    table = IdTable(path, IdLayout(kind, dtype, text if kind == "str" else 0), count)
    table.ids_at(np.arange(-1, count))
    table.rows_of(["chunk-1", 7, "", 2**70])


def fuzz_segment(data: bytes) -> None:
    """One page of one file of a real segment is ``data``, and every checksum fits."""
    if len(data) < 4:
        return
    part = list(FILES)[data[0] % len(FILES)]
    folder = SCRATCH / "segment"
    if not folder.exists():
        shutil.copytree(GOLDEN, folder)
    file = PagedFile(GOLDEN / FILES[part], kind=part)
    pages = file.read(0, file.info.page_count, file.checksums()).copy()
    page = data[1] % len(pages)
    start = int.from_bytes(data[2:4], "little") % pages.shape[1]
    fresh = np.frombuffer(data[4:], np.uint8)[: pages.shape[1] - start]
    pages[page, start : start + len(fresh)] = fresh
    info = sealed_pages(folder / FILES[part], file.info, pages)
    body = json.loads((GOLDEN / NAME).read_bytes())
    body.pop("crc32c")
    body["file_crcs"][part] = info.table_crc
    body["crc32c"] = _manifest_crc(body)
    (folder / NAME).write_bytes(json.dumps(body).encode())
    try:
        settings = IndexSettings(navigation_bits=2 if data[0] & 0x80 else 4)
        with Segment.open(folder, memory_bytes=0, settings=settings) as segment:
            queries = np.zeros((2, segment.dim), np.float32)
            queries[1] = 3.0
            # Without a width the first query scans groups of near rows.
            ef = None if data[0] & 0x40 else 50
            hits = segment.search(queries, 5, ef=ef, recall_target=0.95 if ef is None else 0.999)
            assert (hits.rows < segment.count).all()
            segment.ids_at(hits.rows)
            segment.vectors(np.arange(min(segment.count, 4)))
            segment.load_units("links", np.arange(1, dtype=np.uint32))
    finally:
        shutil.copy(GOLDEN / FILES[part], folder / FILES[part])


READERS: dict[str, Callable[[bytes], None]] = {
    "hnswlib": fuzz_hnswlib,
    "npy": fuzz_npy,
    "vecs": fuzz_vecs,
    "dead": fuzz_dead,
    "heat": fuzz_heat,
    "current": fuzz_current,
    "filters": fuzz_filters,
    "expression": fuzz_expression,
    "documents": fuzz_documents,
    "manifest": fuzz_manifest,
    "paged": fuzz_paged,
    "ids": fuzz_ids,
    "segment": fuzz_segment,
}


def instrument() -> None:
    """Have the fuzzer see which branches of our readers its inputs reach.

    Function by function: its import hook does not see modules of an editable installation.
    """
    seen: set[int] = set()
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("stoker.index"):
            continue
        for value in list(vars(module).values()):
            members = vars(value).values() if isinstance(value, type) else [value]
            for member in members:
                function = getattr(member, "__func__", getattr(member, "fget", member))
                code = getattr(function, "__code__", None)
                if code is None or "index" not in code.co_filename or id(code) in seen:
                    continue
                atheris.instrument_func(function)
                seen.add(id(function.__code__))


def once(name: str, data: bytes) -> None:
    """Give ``data`` to one reader; our own errors are answers."""
    with contextlib.suppress(StokerError):
        READERS[name](data)


if __name__ == "__main__":
    chosen, *options = sys.argv[1:]
    try:
        if options[:1] == ["--replay"]:
            for name in options[1:]:
                print(name, flush=True)  # The last one printed is the one that broke something.
                once(chosen, Path(name).read_bytes())
        else:
            instrument()
            atheris.Setup([sys.argv[0], *options], lambda data: once(chosen, data))
            atheris.Fuzz()
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
