"""Read recorded accesses in the formats that people have, as arrays.

Compressed files (gzip, xz) are told by their first bytes. Keys are numbered 0, 1, 2, ... in the
order of their first access; what they were called is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.events import EventError, decode

NO_SESSION = -1


class Lines(Protocol):
    """An open file of bytes, compressed or not."""

    def __iter__(self) -> Iterator[bytes]: ...
    def read(self) -> bytes: ...


_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\x00"
# Taken for integers or lines, they would give figures of nothing.
_NOT_READ = {
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd.*", re.DOTALL),
    "bzip2": re.compile(rb"BZh[1-9]1AY&SY"),
    "zip": re.compile(rb"PK\x03\x04.*", re.DOTALL),
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Trace:
    """Accesses in the order in which they happened.

    Attributes:
        keys: int64, shape (n,): key numbers, ``0 <= key < footprint``.
        times_s: float64, shape (n,), rising, seconds; None where the trace has no times.
        sessions: int64, shape (n,), session numbers or NO_SESSION; None where there are none.
        requests: int64, shape (n,), rising: which request an access belongs to.
        footprint: How many different keys there are.
    """

    keys: NDArray[np.int64]
    times_s: NDArray[np.float64] | None
    sessions: NDArray[np.int64] | None
    requests: NDArray[np.int64]
    footprint: int

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class _Request:
    time_s: float
    session: str | None
    keys: list[Any]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Lines]:
    """Open a recording, packed or not: its first bytes tell, and not its name.

    Raises:
        InputError: it cannot be read, is damaged, or is packed in a way that is not read; also
            from within the block.
    """
    with contextlib.ExitStack() as stack:
        try:
            # One that nobody writes to would be waited for, and /dev/zero has no end.
            if path.exists() and not path.is_file() and not path.is_dir():
                raise InputError(f"cannot read {path}: it is no file but a pipe, device or socket")
            file = stack.enter_context(path.open("rb"))
            magic = file.read(10)
            file.seek(0)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        for name, first in _NOT_READ.items():
            if first.fullmatch(magic):
                raise InputError(
                    f"{path} is packed with {name}, which is not read: unpack it first"
                )
        try:
            if magic.startswith(_GZIP_MAGIC):
                yield stack.enter_context(gzip.open(file))
            elif magic.startswith(_XZ_MAGIC):
                yield stack.enter_context(lzma.open(file))
            else:
                yield file
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: damaged compressed data: {error}") from error


def _lines(file: Lines) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of lines that are not blank; a byte order mark is left out."""
    for number, line in enumerate(file, start=1):
        if number == 1 and line.startswith(_BYTE_ORDER_MARK):
            line = line[len(_BYTE_ORDER_MARK) :]
        if line.strip():
            yield number, line


def _json_requests(
    file: Lines, path: Path, kind: str, request_of: Callable[[Any], _Request]
) -> Iterator[_Request]:
    for number, line in _lines(file):
        try:
            row = orjson.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"expected an object, found {type(row).__name__}")
            request = request_of(row)
        except orjson.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON: {error}") from error
        except KeyError as error:
            raise InputError(
                f"{path}, line {number}: not a {kind} request: {error} is missing"
            ) from error
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: not a {kind} request: {error}") from error
        if not math.isfinite(request.time_s):
            raise InputError(f"{path}, line {number}: timestamp {request.time_s} is no time")
        yield request


def _key_list(value: Any) -> list[Any]:
    """Return a list of keys as it is; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"hash_ids: expected a list, found {type(value).__name__}")
    for key in value:
        if type(key) is not int and type(key) is not str:
            raise TypeError(f"hash_ids: expected numbers or names, found {type(key).__name__}")
    return value


def _ragpulse_request(row: Any) -> _Request:
    session = row["session_id"]
    return _Request(
        float(row["timestamp"]),
        None if session is None else str(session),
        _key_list(row["hash_ids"]["passages_ids"]),
    )


def _mooncake_request(row: Any) -> _Request:
    return _Request(float(row["timestamp"]) / 1e3, None, _key_list(row["hash_ids"]))


def _read_events(file: Lines, path: Path) -> Iterator[_Request]:
    for number, line in _lines(file):
        try:
            event = decode(line)
        except EventError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if event.type.startswith("stoker.search.") or event.type.startswith("stoker.result."):
            session = None if event.session is None else f"{event.tenant}\0{event.session}"
            yield _Request(
                event.time_s, session, [f"{event.tenant}\0{chunk}" for chunk in event.chunk_ids]
            )


def _from_requests(requests: Iterator[_Request]) -> Trace:
    numbers: dict[Any, int] = {}
    session_numbers: dict[str, int] = {}
    keys, sizes, sessions, times = array("q"), array("q"), array("q"), array("d")
    for request in requests:
        if request.keys:
            keys.extend([numbers.setdefault(key, len(numbers)) for key in request.keys])
            sizes.append(len(request.keys))
            times.append(request.time_s)
            name = request.session
            known = len(session_numbers)
            sessions.append(NO_SESSION if name is None else session_numbers.setdefault(name, known))
    # Stable: equal times keep the file's order.
    order = np.argsort(np.array(times), kind="stable")
    lengths = np.array(sizes, dtype=np.int64)
    starts = (np.cumsum(lengths) - lengths)[order]
    lengths = lengths[order]
    moved = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    sorted_keys = np.array(keys, dtype=np.int64)[moved + np.arange(len(moved))]
    per_request = np.array(sessions, dtype=np.int64)[order]
    return Trace(
        _by_first(sorted_keys)[0],
        np.repeat(np.array(times)[order], lengths),
        np.repeat(_sessions_by_first(per_request), lengths) if session_numbers else None,
        np.repeat(np.arange(len(lengths)), lengths),
        len(numbers),
    )


def _by_first(values: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Number values 0, 1, 2, ... in the order of their first; return also how many there are."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[inverse], len(first)


def _sessions_by_first(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    numbered = np.full(len(sessions), NO_SESSION, dtype=np.int64)
    known = sessions != NO_SESSION
    numbered[known] = _by_first(sessions[known])[0]
    return numbered


def _from_keys(keys: NDArray[np.int64], footprint: int) -> Trace:
    return Trace(keys, None, None, np.arange(len(keys)), footprint)


def _read_lines(file: Lines, path: Path) -> Trace:
    del path
    numbers: dict[bytes, int] = {}
    names = (line.split(None, 1)[0] for _, line in _lines(file))
    keys = np.fromiter(
        (numbers.setdefault(name, len(numbers)) for name in names if name != b"*"), np.int64
    )
    return _from_keys(keys, len(numbers))


def _read_integers(file: Lines, path: Path, dtype: str) -> Trace:
    data = file.read()
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InputError(f"{path}: {len(data)} bytes are no whole number of {size}-byte integers")
    return _from_keys(*_by_first(np.frombuffer(data, dtype=dtype)))


_READERS: dict[str, Callable[[Lines, Path], Trace]] = {
    "ragpulse": lambda file, path: _from_requests(
        _json_requests(file, path, "RAGPulse", _ragpulse_request)
    ),
    "mooncake": lambda file, path: _from_requests(
        _json_requests(file, path, "Mooncake", _mooncake_request)
    ),
    "events": lambda file, path: _from_requests(_read_events(file, path)),
    "lines": _read_lines,
    "int32be": lambda file, path: _read_integers(file, path, ">i4"),
    "int64be": lambda file, path: _read_integers(file, path, ">i8"),
}
FORMATS = tuple(_READERS)


def read_trace(path: Path, trace_format: str) -> Trace:
    """Read a whole trace into memory.

    Args:
        path: The file, plain or compressed with gzip or xz.
        trace_format: One of `FORMATS`: "ragpulse" and "mooncake" (JSON lines of those data sets),
            "events" (one CloudEvents envelope a line), "lines" (one key a line, ``*`` ignored),
            "int32be" and "int64be" (big-endian integers without a header).

    Raises:
        InputError: the file cannot be read, is damaged, or has no accesses; says where.
    """
    reader = _READERS.get(trace_format)
    if reader is None:
        raise InputError(f"trace format {trace_format!r}, expected one of {', '.join(FORMATS)}")
    with opened(path) as file:
        trace = reader(file, path)
    if not len(trace):
        raise InputError(f"{path}: no accesses found in format {trace_format!r}")
    return trace
