"""What the document store holds: changes and documents, and the checks of a caller's values."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.index.arguments import said
from stoker.index.filters import check_metadata, flatten

DocumentId = int | str
DEFAULT_TENANT: Final = "default"
SEPARATOR: Final = "\x1f"
"""Stands between tenant and id where both share one name; no name contains it."""

_TEXT_BYTES_MAX: Final = 16 << 20
_METADATA_BYTES_MAX: Final = 64 << 10
DOCUMENT_ID_BYTES_MAX: Final = 383  # With a tenant and the separator, 512: what a segment takes.
TENANT_BYTES_MAX: Final = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One document's newest change.

    Attributes:
        change_offset: Rising, from 1; 0 while not yet written.
        deleted: Whether it took the document away; the fields below are then empty.
        metadata: A JSON object.
        vector: float32, shape (dim,), or None where it was not asked for or not kept.
    """

    change_offset: int
    tenant: str
    id: DocumentId
    deleted: bool
    text: str | None
    metadata: Mapping[str, Any]
    vector: NDArray[np.float32] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A document as it stands: text, metadata and the change that wrote it."""

    tenant: str
    id: DocumentId
    text: str | None
    metadata: Mapping[str, Any]
    change_offset: int


def check_id(value: object, place: str) -> DocumentId:
    """Return ``value`` as a plain int or str.

    Raises:
        InputError: not an int64, or text that is empty, too long or not printable as UTF-8.
    """
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if -(1 << 63) <= value < 1 << 63:
            return value
        raise InputError(f"{place}: expected an integer of 64 bits, found {said(value)}")
    if isinstance(value, str):
        return _check_name(str(value), place, DOCUMENT_ID_BYTES_MAX)
    raise InputError(f"{place}: expected int or str, found {type(value).__name__}")


def check_names(ids: Any) -> None:
    """Refuse the first of the text ids given to a build that no document could have.

    A segment takes longer ones, with a tenant in front: such an id would be a row that no answer
    can name, or another tenant's document. What is no text is checked where it is stored.

    Raises:
        InputError: names the entry.
    """
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return
    if not isinstance(ids, Iterable):
        raise InputError(f"ids: expected a list, found one {type(ids).__name__}")
    for number, value in enumerate(ids):
        if isinstance(value, str):
            check_id(value, f"ids: entry {number}")


def check_tenant(value: object) -> str:
    """Return ``value`` if it can name a tenant.

    Raises:
        InputError: not text, empty, or too long.
    """
    if not isinstance(value, str):
        raise InputError(f"tenant: expected str, found {type(value).__name__}")
    return _check_name(value, "tenant", TENANT_BYTES_MAX)


def _check_name(value: str, place: str, bytes_max: int) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: expected text that UTF-8 can hold: {error}") from error
    if not 1 <= size <= bytes_max or SEPARATOR in value or "\x00" in value:
        raise InputError(
            f"{place}: expected 1 to {bytes_max} bytes without NUL and unit separator, "
            f"found {value[:40]!r} ({size} bytes)"
        )
    return value


def check_text(text: str | None, place: str) -> None:
    """Refuse text that is no str, too long, or not UTF-8.

    Raises:
        InputError: naming ``place``.
    """
    if text is None:
        return
    if not isinstance(text, str):
        raise InputError(f"{place}: expected str, found {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: expected text that UTF-8 can hold: {error}") from error
    if size > _TEXT_BYTES_MAX:
        raise InputError(f"{place}: expected at most {_TEXT_BYTES_MAX} bytes, found {size}")


def encode_metadata(metadata: Mapping[str, Any], tenant: str, place: str) -> str:
    """Return ``metadata`` as JSON after checking that filters can hold it.

    Raises:
        InputError: no JSON object, a reserved key, too long; names ``place``.
    """
    if not isinstance(metadata, Mapping):
        raise InputError(f"{place}: expected an object, found {type(metadata).__name__}")
    check_metadata(metadata, place)
    try:
        flatten(tenant, metadata)
        encoded = orjson.dumps(dict(metadata), option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError) as error:
        raise InputError(f"{place}: cannot be JSON: {error}") from error
    if len(encoded) > _METADATA_BYTES_MAX:
        raise InputError(
            f"{place}: expected at most {_METADATA_BYTES_MAX} bytes as JSON, found {len(encoded)}"
        )
    return encoded.decode()


def row_crc(tenant: str, document_id: DocumentId, text: str | None, metadata: str | None) -> int:
    """Return the CRC-32 that a stored document row carries."""
    head = f"{tenant}\x1f{document_id!r}\x1f{metadata or ''}\x1f".encode()
    return zlib.crc32((text or "").encode(), zlib.crc32(head))
