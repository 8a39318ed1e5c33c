"""Read recorded accesses in the formats that people have, as arrays.

Compressed files (gzip, xz) are told by their first bytes. Keys are numbered 0, 1, 2, ... in the
order of their first access; what they were called is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
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
def _opened(path: Path) -> Iterator[Lines]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            magic = file.read(6)
            file.seek(0)
        except OSError as error:
            raise InputError(f"cannot read trace {path}: {error.strerror}") from error
        if magic.startswith(_GZIP_MAGIC):
            yield stack.enter_context(gzip.open(file))
        elif magic == _XZ_MAGIC:
            yield stack.enter_context(lzma.open(file))
        else:
            yield file


def _json_lines(file: Lines, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not JSON: {error}") from error


def _read_ragpulse(file: Lines, path: Path) -> Iterator[_Request]:
    for number, row in _json_lines(file, path):
        try:
            yield _Request(
                float(row["timestamp"]), str(row["session_id"]), row["hash_ids"]["passages_ids"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: not a RAGPulse request: {error}") from error


def _read_mooncake(file: Lines, path: Path) -> Iterator[_Request]:
    for number, row in _json_lines(file, path):
        try:
            yield _Request(float(row["timestamp"]) / 1e3, None, row["hash_ids"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: not a Mooncake request: {error}") from error


def _read_events(file: Lines, path: Path) -> Iterator[_Request]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
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
    rows = [request for request in requests if request.keys]
    rows.sort(key=lambda request: request.time_s)  # stable: equal times keep the file's order
    sizes = np.array([len(request.keys) for request in rows], dtype=np.int64)
    keys, footprint = _numbered([key for request in rows for key in request.keys])
    sessions: NDArray[np.int64] | None = None
    if any(request.session is not None for request in rows):
        numbers: dict[str, int] = {}
        per_request = [
            NO_SESSION if r.session is None else numbers.setdefault(r.session, len(numbers))
            for r in rows
        ]
        sessions = np.repeat(np.array(per_request, dtype=np.int64), sizes)
    times = np.repeat(np.array([request.time_s for request in rows], dtype=np.float64), sizes)
    return Trace(keys, times, sessions, np.repeat(np.arange(len(rows)), sizes), footprint)


def _numbered(names: list[Any]) -> tuple[NDArray[np.int64], int]:
    numbers: dict[Any, int] = {}
    keys = np.fromiter(
        (numbers.setdefault(name, len(numbers)) for name in names), np.int64, count=len(names)
    )
    return keys, len(numbers)


def _from_keys(keys: NDArray[np.int64], footprint: int) -> Trace:
    return Trace(keys, None, None, np.arange(len(keys)), footprint)


def _read_lines(file: Lines, path: Path) -> Trace:
    del path
    words = (line.split(None, 1) for line in file)
    names = [word[0] for word in words if word and word[0] != b"*"]
    return _from_keys(*_numbered(names))


def _read_integers(file: Lines, path: Path, dtype: str) -> Trace:
    data = file.read()
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InputError(f"{path}: {len(data)} bytes are no whole number of {size}-byte integers")
    values = np.frombuffer(data, dtype=dtype)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return _from_keys(rank[inverse], len(order))


_READERS: dict[str, Callable[[Lines, Path], Trace]] = {
    "ragpulse": lambda file, path: _from_requests(_read_ragpulse(file, path)),
    "mooncake": lambda file, path: _from_requests(_read_mooncake(file, path)),
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
    try:
        with _opened(path) as file:
            trace = reader(file, path)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged compressed data: {error}") from error
    if not len(trace):
        raise InputError(f"{path}: no accesses found in format {trace_format!r}")
    return trace
