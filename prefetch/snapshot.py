"""A versioned, checksummed container for named arrays and plain values.

Layout, little-endian: magic (8 bytes), version (u32), header length (u32), header (JSON: kind, the
plain values, and name, dtype, shape of each array in order), the arrays' bytes, BLAKE2b-16 of all
that went before. Equal state gives equal bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.errors import CorruptError

MAGIC = b"STKRSNAP"
VERSION = 1
_HEAD = struct.Struct("<8sII")
DIGEST_BYTES = 16


class SnapshotCorrupt(CorruptError):
    """Snapshot bytes are not what was written: start from the log or from an older snapshot."""


def pack(kind: str, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return one snapshot.

    Args:
        kind: What it is a snapshot of; `unpack` refuses another kind.
        values: Plain JSON data.
        arrays: Numeric arrays of any shape.
    """
    flat = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = orjson.dumps(
        {
            "kind": kind,
            "values": dict(values),
            "arrays": [
                [name, array.dtype.newbyteorder("<").str, list(array.shape)]
                for name, array in flat.items()
            ],
        },
        option=orjson.OPT_SORT_KEYS,
    )
    parts = [_HEAD.pack(MAGIC, VERSION, len(header)), header]
    parts += [
        array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in flat.values()
    ]
    body = b"".join(parts)
    return body + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def kind_of(data: bytes) -> str | None:
    """Return what the bytes claim to be a snapshot of, unchecked; None where that is unreadable."""
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        return None
    header_bytes = _HEAD.unpack_from(data)[2]
    try:
        kind = orjson.loads(data[_HEAD.size : _HEAD.size + header_bytes])["kind"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return str(kind)


def unpack(kind: str, data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the values and (writable) arrays of a snapshot.

    Raises:
        SnapshotCorrupt: wrong magic, version, kind, length or checksum; says which and where.
    """
    if len(data) < _HEAD.size + DIGEST_BYTES:
        raise SnapshotCorrupt(f"snapshot of {len(data)} bytes is cut short")
    magic, version, header_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotCorrupt(f"snapshot starts with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise SnapshotCorrupt(f"snapshot version {version}, expected {VERSION}")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise SnapshotCorrupt(f"snapshot of {len(data)} bytes fails its checksum")
    try:
        return _parse(kind, body, header_bytes)
    except SnapshotCorrupt:
        raise
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise SnapshotCorrupt(
            f"snapshot of {len(data)} bytes has no such header: {error!r}"
        ) from error


def _parse(
    kind: str, body: bytes, header_bytes: int
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    header = orjson.loads(body[_HEAD.size : _HEAD.size + header_bytes])
    if header["kind"] != kind:
        raise SnapshotCorrupt(f"snapshot is of {header['kind']!r}, expected {kind!r}")
    arrays: dict[str, NDArray[Any]] = {}
    offset = _HEAD.size + header_bytes
    for name, dtype, shape in header["arrays"]:
        kind_of = np.dtype(dtype)
        count = math.prod(int(size) for size in shape)
        end = offset + count * kind_of.itemsize
        if kind_of.kind not in "biuf" or not all(size >= 0 for size in shape):
            raise SnapshotCorrupt(f"snapshot array {name!r} is of {dtype}, shape {shape}")
        if end > len(body):
            raise SnapshotCorrupt(f"snapshot array {name!r} ends at {end} of {len(body)} bytes")
        array = np.frombuffer(body, kind_of, count, offset).reshape(shape)
        arrays[name] = array.astype(kind_of.newbyteorder("="), copy=True)
        offset = end
    if offset != len(body):
        raise SnapshotCorrupt(f"snapshot has {len(body) - offset} bytes too many")
    values = header["values"]
    if not isinstance(values, dict):
        raise SnapshotCorrupt(f"snapshot values are {type(values).__name__}, expected an object")
    return values, arrays
