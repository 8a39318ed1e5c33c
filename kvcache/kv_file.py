"""One KV entry as one safetensors file: checksummed, published whole or not at all.

Nothing is ever unpickled. The header names the format, model, tenant, chunk and the checksum of
the payload; a file that does not match is refused by name, never half believed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError, UnavailableError
from stoker.kvcache.language_model import Kv
from stoker.kvcache.settings import STORAGES

FORMAT = "stoker-kv-1"
_GROUP = 32  # values that share one scale in int4
_HEADER_BYTES_MAX = 1 << 20
_HALF_MAX = 65504.0  # of float16
# Bytes of a number, as safetensors names them.
_NUMBER_BYTES = {"F32": 4, "F16": 2, "I32": 4, "I8": 1, "U8": 1, "F64": 8, "I64": 8}


# What a header of other content than ours makes its reader raise.
_DAMAGE = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


class KvCorrupt(CorruptError):
    """A KV file is damaged or of another format; it is removed and computed again."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvHeader:
    """What a file says of itself, without its payload.

    Attributes:
        tenant: Whose it is.
        chunk_id: Which passage.
        model_id: Which model computed it.
        tokens: How many tokens.
        storage: How the numbers are kept.
        error_ratio: Root mean square error of storage over that of the numbers; 0 for float32.
        file_bytes: Size of the file.
        memory_bytes: Bytes once loaded (float32).
    """

    tenant: str
    chunk_id: str
    model_id: str
    tokens: int
    storage: str
    error_ratio: float
    file_bytes: int
    memory_bytes: int


def _quantized(
    array: NDArray[np.float32], storage: str
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """Return what is stored and what it reads back as."""
    if storage == "float32":
        return {"": array}, array
    if storage == "float16":
        # What is too large for it is kept as its largest, not as infinity: the error says so.
        half = np.clip(array, -_HALF_MAX, _HALF_MAX).astype(np.float16)
        return {"": half}, half.astype(np.float32)
    levels = 127 if storage == "int8" else 7
    group = array.shape[-1] if storage == "int8" else min(_GROUP, array.shape[-1])
    if array.shape[-1] % group or (storage == "int4" and array.shape[-1] % 2):
        raise InputError(f"head_dim: expected a multiple of {group}, found {array.shape[-1]}")
    grouped = array.reshape(*array.shape[:-1], array.shape[-1] // group, group)
    scale = np.abs(grouped).max(axis=-1, keepdims=True) / levels
    scale = np.where(scale == 0, 1.0, scale).astype(np.float32)
    whole = np.clip(np.rint(grouped / scale), -levels, levels).astype(np.int8)
    back = (whole * scale).astype(np.float32).reshape(array.shape)
    flat = whole.reshape(array.shape)
    if storage == "int4":
        nibbles = (flat + 8).astype(np.uint8)
        flat = (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).astype(np.uint8)
    return {"": flat, ".scale": scale[..., 0]}, back


def _restored(parts: dict[str, NDArray[Any]], name: str, storage: str) -> NDArray[np.float32]:
    stored = parts[name]
    if storage in ("float32", "float16"):
        plain: NDArray[np.float32] = stored.astype(np.float32, copy=False)
        return plain
    if storage == "int4":
        low, high = (stored & 15).astype(np.int8) - 8, (stored >> 4).astype(np.int8) - 8
        stored = np.stack([low, high], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])
    scale = parts[f"{name}.scale"][..., None]
    groups = scale.shape[-2]
    grouped = stored.reshape(*stored.shape[:-1], groups, stored.shape[-1] // groups)
    whole: NDArray[np.float32] = (grouped * scale).astype(np.float32).reshape(stored.shape)
    return whole


def _checksum(tensors: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def layer_checksum(token_ids: NDArray[np.int32], parts: dict[str, NDArray[Any]]) -> str:
    """Return the checksum of one layer's arrays, bound to the tokens that they are of."""
    return _checksum({"token_ids": token_ids, **parts})[:16]


def restored_layer(parts: dict[str, NDArray[Any]], name: str, storage: str) -> NDArray[np.float32]:
    """Return one layer's numbers as float32, from arrays without the layers' axis."""
    return _restored(parts, name, storage)


def write_kv(
    path: Path, kv: Kv, *, tenant: str, chunk_id: str, model_id: str, storage: str = "float32"
) -> KvHeader:
    """Publish one entry: written apart, synced, renamed, the folder synced.

    Returns when it is durable. A crash before that leaves a ``.tmp-`` file, which is not an entry.

    Raises:
        InputError: an unknown ``storage``, arrays that do not belong together, or numbers that are
            not finite: they would make every answer after them nonsense.
        OSError: the disk is full or fails; the entry is then not there.
    """
    safetensors = _safetensors()
    if storage not in STORAGES:
        raise InputError(f"storage: expected one of {', '.join(STORAGES)}, found {storage!r}")
    if kv.keys.shape != kv.values.shape or kv.keys.shape[2] != len(kv.token_ids) or kv.start:
        raise InputError(
            f"expected keys and values of {len(kv.token_ids)} tokens from position 0, found "
            f"{kv.keys.shape}, {kv.values.shape} from {kv.start}"
        )
    for name, array in (("keys", kv.keys), ("values", kv.values)):
        if not np.isfinite(array).all():
            raise InputError(f"{name}: expected finite numbers, found others")
    tensors: dict[str, NDArray[Any]] = {"token_ids": np.ascontiguousarray(kv.token_ids)}
    wrong = total = 0.0
    for name, array in (("keys", kv.keys), ("values", kv.values)):
        parts, back = _quantized(array, storage)
        tensors |= {name + suffix: np.ascontiguousarray(part) for suffix, part in parts.items()}
        if back is not array:
            wide = array.astype(np.float64)  # squares of large numbers are beyond float32
            wrong += float(np.sum((back - wide) ** 2))
            total += float(np.sum(wide**2))
    error_ratio = (wrong / total) ** 0.5 if total else 0.0
    metadata = {
        "format": FORMAT,
        "tenant": tenant,
        "chunk_id": chunk_id,
        "model_id": model_id,
        "tokens": str(len(kv.token_ids)),
        "storage": storage,
        "error_ratio": repr(error_ratio),
        "memory_bytes": str(kv.nbytes),
        "checksum": _checksum(tensors),
        # Files of before have none: they are read whole. A layer can be believed without the rest.
        "layer_checksums": ",".join(
            layer_checksum(
                tensors["token_ids"],
                {name: array[number] for name, array in tensors.items() if name != "token_ids"},
            )
            for number in range(len(kv.keys))
        ),
    }
    payload = safetensors.save(tensors, metadata=metadata)
    scratch = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        with scratch.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.rename(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    sync_folder(path.parent)
    return KvHeader(
        tenant, chunk_id, model_id, len(kv.token_ids), storage, error_ratio, len(payload), kv.nbytes
    )


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_header(path: Path) -> KvHeader:
    """Read what a file says of itself; the payload is not looked at.

    Raises:
        KvCorrupt: not a file of this format, or shorter than its header says.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise KvCorrupt(f"{path.name}: expected a header of 8 bytes, found {len(head)}")
        (length,) = struct.unpack("<Q", head)
        if not 2 <= length <= min(_HEADER_BYTES_MAX, size - 8):
            raise KvCorrupt(f"{path.name}: expected a header within {size} bytes, found {length}")
        text = file.read(length)
    try:
        document = json.loads(text)
        metadata = document.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise KvCorrupt(f"{path.name}: expected {FORMAT}, found {metadata['format']!r}")
        end = max(_end_of(entry) for entry in document.values())
        if 8 + length + end != size:
            raise KvCorrupt(f"{path.name}: expected {8 + length + end} bytes, found {size}")
        for name in ("tenant", "chunk_id", "model_id"):
            metadata[name].encode()
        tokens, storage = int(metadata["tokens"]), metadata["storage"]
        if storage not in STORAGES or document["token_ids"]["shape"] != [tokens]:
            raise KvCorrupt(f"{path.name}: expected {tokens} tokens as {storage!r}, found others")
        numbers = math.prod(document["keys"]["shape"]) * (2 if storage == "int4" else 1)
        return KvHeader(
            tenant=metadata["tenant"], chunk_id=metadata["chunk_id"],
            model_id=metadata["model_id"], tokens=tokens,
            storage=storage, error_ratio=float(metadata["error_ratio"]),
            file_bytes=size, memory_bytes=4 * tokens + 2 * 4 * numbers,
        )  # fmt: skip
    except _DAMAGE as error:
        raise KvCorrupt(f"{path.name}: expected a KV header, found damage: {error}") from error


def _end_of(entry: dict[str, Any]) -> int:
    """Return where an array ends in a payload; a shape that fills other bytes is damage."""
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"{start}, {end} and {shape} are no places and sizes")
    if end - start != math.prod(shape) * _NUMBER_BYTES[entry["dtype"]]:
        raise ValueError(f"{end - start} bytes are no array of {entry['dtype']} of {shape}")
    return int(end)


def read_kv(path: Path) -> Kv:
    """Read one entry and check every byte of it.

    Raises:
        KvCorrupt: the checksum, a shape or the format does not fit.
        OSError: the file cannot be read.
    """
    safetensors = _safetensors()
    header = read_header(path)
    payload = path.read_bytes()
    try:
        tensors: dict[str, NDArray[Any]] = safetensors.load(payload)
        (length,) = struct.unpack("<Q", payload[:8])
        metadata = json.loads(payload[8 : 8 + length])["__metadata__"]
        found = _checksum(tensors)
        if found != metadata["checksum"]:
            raise KvCorrupt(f"{path.name}: expected checksum {metadata['checksum']}, found {found}")
        kv = Kv(
            tensors["token_ids"].astype(np.int32, copy=False),
            _restored(tensors, "keys", header.storage),
            _restored(tensors, "values", header.storage),
        )
    except KvCorrupt:
        raise
    except Exception as error:  # whatever a hostile file makes the parser raise
        raise KvCorrupt(f"{path.name}: expected a KV payload, found damage: {error}") from error
    if kv.keys.shape != kv.values.shape or kv.keys.ndim != 4:
        raise KvCorrupt(f"{path.name}: expected equal 4-d arrays, found {kv.keys.shape}")
    if not kv.keys.shape[2] == len(kv.token_ids) == header.tokens:
        raise KvCorrupt(f"{path.name}: expected {header.tokens} tokens, found {kv.keys.shape[2]}")
    return kv


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise UnavailableError(
            "expected the package safetensors, found none: install stoker[models]"
        ) from error
    return safetensors.numpy
