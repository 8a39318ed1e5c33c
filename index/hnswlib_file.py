"""Reads the file that hnswlib 0.8 writes with ``save_index``, without loading it.

The file, all little-endian:

=========  ======================================================================
bytes      what
=========  ======================================================================
0-96       header, see `_HEADER`
96-        one record a node: u16 link count, u8 flags (1 = deleted), u8 zero,
           ``m0`` u32 links, ``dim`` float32, u64 label
then       one entry a node: u32 length of its upper lists (0 on level 0), then per
           level above 0 a u16 count, two zero bytes and ``m`` u32 links
=========  ======================================================================

The file carries no checksum, no metric and no magic: everything that can be checked is, before
anything follows a link, so that a damaged file is an error and not a crash.
"""

from __future__ import annotations

import bisect
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError
from stoker.index.hnsw_graph import LEVELS_MAX, GraphError, HnswGraph, UpperLevel

_HEADER: Final = np.dtype(
    [
        ("offset_level0", "<u8"),
        ("elements_max", "<u8"),
        ("count", "<u8"),
        ("record_bytes", "<u8"),
        ("label_offset", "<u8"),
        ("data_offset", "<u8"),
        ("max_level", "<i4"),
        ("entry_point", "<u4"),
        ("m_upper", "<u8"),
        ("m0", "<u8"),
        ("m", "<u8"),
        ("level_factor", "<f8"),
        ("ef_construction", "<u8"),
    ]
)
_M_MAX: Final = 10_000  # hnswlib's own cap.
_NO_NODE: Final = 0xFFFFFFFF


class HnswlibFileError(CorruptError):
    """The file is not what hnswlib 0.8 writes; build it again or import the vectors."""


def _fail(path: Path, offset: int, expected: str, found: object) -> HnswlibFileError:
    return HnswlibFileError(f"{path}: at byte {offset}: expected {expected}, found {found}")


def read_hnswlib(path: str | os.PathLike[str], *, dim: int | None = None) -> HnswGraph:
    """Map an hnswlib index file and check all of it but the vectors' values.

    Level-0 links and vectors stay in the file (strided views over a read-only map); levels,
    counts, labels and upper lists are copied, about 12 bytes a node.

    Args:
        path: A file from ``hnswlib.Index.save_index``, float32 vectors.
        dim: Dimensions that the caller expects; None takes what the file has.

    Returns:
        A checked graph whose ``labels`` are the ids given to ``add_items``. A cosine index holds
        normalised vectors; the metric itself is not in the file.

    Raises:
        HnswlibFileError: truncated, too long, or any value impossible; names byte and expectation.
        InputError: no such file, or the vectors have other dimensions than ``dim``.

    Source: the layout written by hnswlib 0.8.0 (nmslib/hnswlib, Apache-2.0), re-implemented.
    """
    path = Path(path)
    try:
        file_bytes = path.stat().st_size
        if not path.is_file():
            raise InputError(f"{path}: expected an hnswlib file, found a folder")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if file_bytes < _HEADER.itemsize:
        raise _fail(path, 0, f"a header of {_HEADER.itemsize} bytes", f"{file_bytes} bytes")
    try:
        raw: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise InputError(f"{path}: cannot be mapped: {error.strerror}") from error
    header = raw[: _HEADER.itemsize].view(_HEADER)[0]
    file_dim = _check_header(path, header, file_bytes)
    if dim is not None and dim != file_dim:
        raise InputError(f"{path}: expected vectors of {dim} dimensions, found {file_dim}")
    return _read_body(path, raw, header, file_dim)


def _check_header(path: Path, header: np.void, file_bytes: int) -> int:
    """Check every header field against the others and the file's size; return dim."""
    value = {name: int(header[name]) for name in _HEADER.names or () if name != "level_factor"}
    fields: Any = _HEADER.fields or {}
    at = {name: int(fields[name][1]) for name in value}

    def expect(name: str, wanted: int) -> None:
        if value[name] != wanted:
            raise _fail(path, at[name], f"{name} = {wanted}", value[name])

    m, count = value["m"], value["count"]
    if not 1 <= m <= _M_MAX:
        raise _fail(path, at["m"], f"m from 1 to {_M_MAX}", m)
    expect("m_upper", m)
    expect("m0", 2 * m)
    expect("offset_level0", 0)
    expect("data_offset", 4 + 4 * value["m0"])
    vector_bytes = value["label_offset"] - value["data_offset"]
    if vector_bytes < 4 or vector_bytes % 4 or vector_bytes > 4 * 65_536:
        raise _fail(
            path, at["label_offset"], "1 to 65536 float32 before the label", f"{vector_bytes} bytes"
        )
    expect("record_bytes", value["label_offset"] + 8)
    if count > value["elements_max"] or count >= _NO_NODE:
        raise _fail(path, at["count"], f"at most {value['elements_max']} elements", count)
    least = _HEADER.itemsize + count * (value["record_bytes"] + 4)
    if file_bytes < least:
        raise _fail(path, at["count"], f"a file of at least {least} bytes", f"{file_bytes} bytes")
    if count == 0:
        expect("max_level", -1)
        expect("entry_point", _NO_NODE)
    elif not 0 <= value["max_level"] <= LEVELS_MAX:
        raise _fail(path, at["max_level"], f"a level from 0 to {LEVELS_MAX}", value["max_level"])
    elif value["entry_point"] >= count:
        raise _fail(path, at["entry_point"], f"a node below {count}", value["entry_point"])
    return vector_bytes // 4


def _read_body(path: Path, raw: NDArray[np.uint8], header: np.void, dim: int) -> HnswGraph:
    count, m0, m = int(header["count"]), int(header["m0"]), int(header["m"])
    record_bytes = int(header["record_bytes"])
    record = np.dtype(
        {
            "names": ["links", "flags", "zero", "level0", "vector", "label"],
            "formats": ["<u2", "u1", "u1", ("<u4", (m0,)), ("<f4", (dim,)), "<u8"],
            "offsets": [0, 2, 3, 4, int(header["data_offset"]), int(header["label_offset"])],
            "itemsize": record_bytes,
        }
    )
    upper_start = _HEADER.itemsize + count * record_bytes
    records = raw[_HEADER.itemsize : upper_start].view(record)
    flags = np.array(records["flags"])
    odd = np.flatnonzero((flags > 1) | (records["zero"] != 0))
    if odd.size:
        row = int(odd[0])
        offset = _HEADER.itemsize + row * record_bytes + 2
        raise _fail(path, offset, "flags 0 or 1, then a zero byte", int(flags[row]))
    levels, upper = _read_upper(path, raw, upper_start, count, m, int(header["max_level"]))
    graph = HnswGraph(
        count=count,
        dim=dim,
        m=m,
        m0=m0,
        entry_point=int(header["entry_point"]) if count else -1,
        max_level=int(header["max_level"]),
        levels=levels,
        level0_counts=np.array(records["links"]),
        level0=records["level0"],
        upper=upper,
        labels=np.array(records["label"]),
        vectors=records["vector"],
        deleted=flags == 1,
    )
    try:
        graph.check()
    except GraphError as error:
        place = upper_start
        if error.level == 0 and error.row >= 0:
            place = _HEADER.itemsize + error.row * record_bytes
        raise HnswlibFileError(f"{path}: at or after byte {place}: {error}") from error
    return graph


def _read_upper(
    path: Path, raw: NDArray[np.uint8], start: int, count: int, m: int, max_level: int
) -> tuple[NDArray[np.uint8], list[UpperLevel]]:
    """Read the chain of upper lists, stepping only over the nodes that have some.

    Each entry's place depends on the length of the one before, so the chain cannot be sliced in
    one go; but entries of level-0 nodes are single zero words, so looking up the next word that
    is not zero skips whole runs of them.
    """
    levels = np.zeros(count, dtype=np.uint8)
    if (raw.size - start) % 4:
        raise _fail(path, start, "upper lists in whole words", f"{raw.size - start} bytes")
    words: NDArray[np.uint32] = raw[start:].view("<u4")
    filled = np.flatnonzero(words).tolist()
    step = m + 1
    nodes: list[int] = []
    places: list[int] = []
    heights: list[int] = []
    word, node, at = 0, 0, 0
    while node < count:
        at = bisect.bisect_left(filled, word, at)
        target = filled[at] if at < len(filled) else len(words)
        if target - word >= count - node:
            word += count - node
            node = count
            break
        node += target - word
        word = target
        if word >= len(words):
            raise _fail(path, start + 4 * word, f"the lists of node {node}", "the end of the file")
        length = int(words[word])
        height, rest = divmod(length, 4 * step)
        if rest or height > max_level:
            raise _fail(
                path,
                start + 4 * word,
                f"a multiple of {4 * step} up to level {max_level} for node {node}",
                length,
            )
        if word + 1 + height * step > len(words):
            raise _fail(path, start + 4 * word, f"{length} bytes of lists", "the end of the file")
        nodes.append(node)
        places.append(word + 1)
        heights.append(height)
        word += 1 + height * step
        node += 1
    if word != len(words):
        raise _fail(
            path, start + 4 * word, "the end of the file", f"{4 * (len(words) - word)} more"
        )
    all_nodes = np.array(nodes, dtype=np.uint32)
    all_places = np.array(places, dtype=np.int64)
    levels[all_nodes] = heights
    upper = []
    for level in range(1, max_level + 1):
        here = levels[all_nodes] >= level
        begin = all_places[here] + (level - 1) * step
        lists = words[begin[:, None] + np.arange(step)]
        odd = np.flatnonzero(lists[:, 0] > 0xFFFF)
        if odd.size:
            place = start + 4 * int(begin[int(odd[0])])
            raise _fail(path, place, f"at most {m} links", int(lists[int(odd[0]), 0]))
        upper.append(UpperLevel(all_nodes[here], lists[:, 0].astype(np.uint16), lists[:, 1:]))
    return levels, upper
