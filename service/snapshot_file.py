"""One file that holds a state and the offsets that it includes, together or not at all.

Layout, little-endian: magic `STOKSNP1`, version u32, header length u32, body length u64, CRC-32 of
header and body u32, then the header (JSON: offsets, counts) and the body: the event ids seen, as
many bytes as the header says (`service.event_ids`), and the sink's own bytes. Version 1 has the
ids' names in the header, or none, and no bytes of them. Replaced as a whole: a crash at any point
leaves the old snapshot or the new one.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, Final

import orjson

from stoker.errors import CorruptError
from stoker.service.whole_file import replace_file

MAGIC: Final = b"STOKSNP1"
VERSION: Final = 2
_VERSION_PLAIN: Final = 1
_PREFIX: Final = struct.Struct("<8sIIQI")


def write_snapshot(path: Path, header: dict[str, Any], body: bytes) -> None:
    """Replace the snapshot; durable when it returns.

    Args:
        header: Plain values; of bytes only ``seen``, if it is there.
        body: The sink's.

    Raises:
        OSError: it could not be written; the old snapshot is still there.
    """
    seen, version = header.get("seen"), _VERSION_PLAIN
    if isinstance(seen, bytes):
        header, version = {**header, "seen": {"bytes": len(seen)}}, VERSION
    else:
        seen = b""
    head = orjson.dumps(header)
    checksum = zlib.crc32(body, zlib.crc32(seen, zlib.crc32(head)))
    prefix = _PREFIX.pack(MAGIC, version, len(head), len(seen) + len(body), checksum)
    replace_file(path, prefix, head, seen, body)


def read_snapshot(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Read the snapshot back as (header, body); None where there is none.

    Raises:
        CorruptError: the file is not a whole snapshot of a known version; names file and offset.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _PREFIX.size:
        raise CorruptError(
            f"{path}: offset {len(data)}: expected {_PREFIX.size} bytes of prefix, the file ends"
        )
    magic, version, head_length, body_length, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise CorruptError(f"{path}: offset 0: expected magic {MAGIC!r}, found {magic!r}")
    if version not in (_VERSION_PLAIN, VERSION):
        raise CorruptError(
            f"{path}: offset 8: expected version {_VERSION_PLAIN} or {VERSION}, found {version}"
        )
    whole = _PREFIX.size + head_length + body_length
    if len(data) != whole:
        raise CorruptError(
            f"{path}: offset {min(len(data), whole)}: expected {whole} bytes in all, "
            f"found {len(data)}"
        )
    found = zlib.crc32(memoryview(data)[_PREFIX.size :])
    if found != checksum:
        raise CorruptError(
            f"{path}: offset {_PREFIX.size}: expected CRC {checksum:08x}, found {found:08x}"
        )
    split = _PREFIX.size + head_length
    try:
        header = orjson.loads(data[_PREFIX.size : split])
    except orjson.JSONDecodeError as error:
        raise CorruptError(f"{path}: offset {_PREFIX.size}: header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptError(f"{path}: offset {_PREFIX.size}: header is no JSON object")
    if version == _VERSION_PLAIN:
        return header, data[split:]
    try:
        length = int(header["seen"]["bytes"])
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: offset {_PREFIX.size}: header names no ids") from error
    if not 0 <= length <= body_length:
        raise CorruptError(
            f"{path}: offset {_PREFIX.size}: header names {length} bytes of ids, the body has "
            f"{body_length}"
        )
    header["seen"] = data[split : split + length]
    return header, data[split + length :]
