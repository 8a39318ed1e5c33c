"""Rows as passages: JSONL (plain or gzip), Parquet, and `.npy` matrices; all streamed."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.errors import InputError, UnavailableError
from stoker.index.document_values import (
    DEFAULT_TENANT,
    DOCUMENT_ID_BYTES_MAX,
    encode_metadata,
)
from stoker.service.passages import Passage, ReadReport, text_digest

_FLOAT_MAX = float(np.finfo(np.float32).max)
_PART_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """Bounds of one row; each is there so that one bad row cannot take the memory.

    Attributes:
        line_bytes_max: Longest JSONL line, after decompression (a 4,096-d vector is about 90 KB).
        text_bytes_max: Longest text of one passage.
        id_bytes_max: Longest id.
        dim_max: Most numbers in one vector.
        block_rows: Rows of Parquet and `.npy` held at a time.
    """

    line_bytes_max: int = 16 << 20
    text_bytes_max: int = 4 << 20
    id_bytes_max: int = DOCUMENT_ID_BYTES_MAX
    dim_max: int = 65_536
    block_rows: int = 1_024


def read_jsonl(
    path: Path, *, limits: RowLimits, skipped: ReadReport | None = None
) -> Iterator[Passage]:
    """Yield the passages of a JSONL file: ``id``, ``text``, ``metadata``, optional ``vector``.

    Other keys are kept in the metadata. Blank lines are allowed.

    Args:
        skipped: Where bad rows are counted; without it the first one raises.

    Raises:
        InputError: a row is malformed, or the gzip data is damaged; names file and line.
        OSError: the file cannot be opened.
    """
    for number, line in _lines(path, limits):
        origin = f"{path}:{number}"
        try:
            row = _parse(line, limits)
            if row is not None:
                yield passage_of(row, origin=origin, limits=limits)
        except InputError as error:
            if skipped is None:
                raise InputError(f"{origin}: {error}") from error
            skipped.skip(origin, str(error))


def _lines(path: Path, limits: RowLimits) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number from 1, line); None for a line over the bound, which is read past."""
    number = 0
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(path.open("rb"))
        file: IO[bytes] = plain
        if path.name.lower().endswith(".gz"):
            file = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=plain)))
        try:
            while line := file.readline(limits.line_bytes_max + 1):
                number += 1
                if len(line) <= limits.line_bytes_max or line.endswith(b"\n"):
                    yield number, line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(limits.line_bytes_max)
                yield number, None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip data after line {number}: {error}") from error


def _parse(line: bytes | None, limits: RowLimits) -> Mapping[str, Any] | None:
    if line is None:
        raise InputError(f"line is longer than line_bytes_max = {limits.line_bytes_max} bytes")
    stripped = line.removeprefix(b"\xef\xbb\xbf").strip()
    if not stripped:
        return None
    try:
        row = orjson.loads(stripped)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error}") from error
    except RecursionError as error:  # pragma: no cover - orjson has its own bound
        raise InputError("JSON is nested too deeply") from error
    if not isinstance(row, dict):
        raise InputError(f"expected a JSON object, found {type(row).__name__}")
    return row


def passage_of(row: Mapping[str, Any], *, origin: str, limits: RowLimits) -> Passage:
    """Check one row and make it a passage.

    Raises:
        InputError: what is wrong with which key (without the place, which the caller knows).
    """
    chunk_id = checked_id(row.get("id"), limits)
    text = row.get("text", "")
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise InputError(f"`text` must be a string, found {type(text).__name__}")
    if len(text.encode("utf-8", "surrogatepass")) > limits.text_bytes_max:
        raise InputError(f"`text` is longer than text_bytes_max = {limits.text_bytes_max} bytes")
    raw = row.get("vector")
    vector = None if raw is None else checked_vector(raw, limits)
    if vector is None and not text.strip():
        raise InputError("row has neither a `text` nor a `vector`")
    metadata = _metadata(row)
    metadata["content_hash"] = text_digest(text)
    metadata.setdefault("source", origin.rsplit("/", 1)[-1].split(":")[0].split(" row ")[0])
    return Passage(id=chunk_id, text=text, metadata=metadata, origin=origin, vector=vector)


def checked_id(value: object, limits: RowLimits) -> str:
    """Return a usable chunk id, or raise `InputError`; whole numbers become their digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is None:
        raise InputError("`id` is missing")
    if not isinstance(value, str):
        raise InputError(f"`id` must be a string or a whole number, found {type(value).__name__}")
    if not value or len(value.encode("utf-8", "surrogatepass")) > limits.id_bytes_max:
        raise InputError(f"`id` must have 1 to {limits.id_bytes_max} bytes")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise InputError(f"`id` {value!r} has control characters")
    return value


def checked_vector(raw: object, limits: RowLimits) -> NDArray[np.float32]:
    """Return float32, shape (dim,), finite and not all zero, or raise `InputError`."""
    if not isinstance(raw, list | np.ndarray) or len(raw) == 0:
        raise InputError("`vector` must be a list of numbers, not empty")
    if len(raw) > limits.dim_max:
        raise InputError(f"`vector` has {len(raw)} numbers, at most {limits.dim_max} are allowed")
    if isinstance(raw, list) and not all(type(x) in (int, float) for x in raw):
        raise InputError("`vector` must hold numbers only")
    try:
        wide = np.asarray(raw, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError("`vector` must hold numbers only") from error
    if wide.ndim != 1:
        raise InputError(f"`vector` must have one dimension, found {wide.ndim}")
    usable = np.isfinite(wide) & (np.abs(wide) <= _FLOAT_MAX)
    if not usable.all():
        place = int(np.argmin(usable))
        raise InputError(f"`vector` is not finite as float32 at place {place}: {wide[place]}")
    if not wide.any():
        raise InputError("`vector` is all zeros; it has no direction")
    return wide.astype(np.float32)


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    given = row.get("metadata")
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise InputError(f"`metadata` is a string but not JSON: {error}") from error
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InputError(f"`metadata` must be an object, found {type(given).__name__}")
    metadata = {key: value for key, value in row.items() if key not in _COLUMNS}
    metadata.update(given)
    # Checked here as the index will: there the row's place is no longer known, and its texts are
    # embedded already.
    encode_metadata(metadata, DEFAULT_TENANT, "`metadata`")
    return metadata


_COLUMNS = frozenset({"id", "text", "metadata", "vector"})


def read_parquet(
    path: Path, *, limits: RowLimits, skipped: ReadReport | None = None
) -> Iterator[Passage]:
    """Yield the passages of a Parquet file with the columns of `read_jsonl`; needs pyarrow.

    Raises:
        InputError: a row or the file is malformed; names file and row (from 0).
        UnavailableError: pyarrow is not installed.
        OSError: the file cannot be opened.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise UnavailableError(
            f"{path}: reading Parquet needs pyarrow: pip install 'stoker[formats]'"
        ) from error
    number = 0
    try:
        with path.open("rb") as file, parquet.ParquetFile(file) as table:
            names = set(table.schema_arrow.names)
            if "id" not in names or not names & {"text", "vector"}:
                raise InputError(
                    f"{path}: needs a column `id` and `text` or `vector`, found {sorted(names)}"
                )
            for batch in table.iter_batches(batch_size=limits.block_rows):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    origin = f"{path} row {number}"
                    number += 1
                    try:
                        yield passage_of(row, origin=origin, limits=limits)
                    except InputError as error:
                        if skipped is None:
                            raise InputError(f"{origin}: {error}") from error
                        skipped.skip(origin, str(error))
    except (arrow.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: damaged Parquet at or after row {number}: {error}") from error


def read_npy(
    path: Path, *, limits: RowLimits, skipped: ReadReport | None = None
) -> Iterator[Passage]:
    """Yield the rows of a two-dimensional float matrix as passages without text.

    Ids are the lines of ``NAME.ids.txt`` or ``ids.txt`` beside it, else ``NAME.npy#row``.

    Raises:
        InputError: not a float32 or float16 matrix, a row that is not finite or is all zeros, or
            an id file of another length.
        OSError: the file cannot be opened.
    """
    matrix = open_matrix(path, limits=limits)
    ids = npy_ids(path, len(matrix), limits=limits)
    for start in range(0, len(matrix), limits.block_rows):
        block = np.asarray(matrix[start : start + limits.block_rows], dtype=np.float32)
        for place, vector in enumerate(block):
            number = start + place
            origin = f"{path} row {number}"
            problem = None
            if not np.isfinite(vector).all():
                problem = "vector is not finite"
            elif not vector.any():
                problem = "vector is all zeros; it has no direction"
            if problem is None:
                yield Passage(
                    id=ids[number] if ids else f"{path.name}#{number}",
                    text="",
                    metadata={"source": path.name},
                    origin=origin,
                    vector=vector.copy(),
                )
            elif skipped is None:
                raise InputError(f"{origin}: {problem}")
            else:
                skipped.skip(origin, problem)


def open_matrix(path: Path, *, limits: RowLimits) -> NDArray[Any]:
    """Map a `.npy` file read-only and check its type and shape.

    Returns:
        float16 or float32, shape (n, dim), n >= 1; numbers are not checked here.

    Raises:
        InputError: not an `.npy` file, pickled objects, or another type or shape.
        OSError: the file cannot be opened.
    """
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, TypeError) as error:
        raise InputError(f"{path}: not a readable .npy matrix: {error}") from error
    if not isinstance(matrix, np.ndarray):
        raise InputError(f"{path}: expected one .npy matrix, found an archive")
    if matrix.ndim != 2 or matrix.dtype.kind != "f" or matrix.dtype.itemsize not in (2, 4):
        raise InputError(
            f"{path}: expected float32 or float16 of shape (n, dim), found"
            f" {matrix.dtype} of shape {matrix.shape}"
        )
    if matrix.shape[0] == 0 or not 1 <= matrix.shape[1] <= limits.dim_max:
        raise InputError(f"{path}: shape {matrix.shape} is empty or wider than {limits.dim_max}")
    return matrix


def npy_ids(path: Path, rows: int, *, limits: RowLimits) -> list[str] | None:
    """Return the ids that lie beside a matrix, one a row, or None where there are none."""
    for beside in (path.with_suffix(".ids.txt"), path.with_name("ids.txt")):
        if beside.is_file():
            return read_ids(beside, rows, limits=limits)
    return None


def read_ids(path: Path, rows: int, *, limits: RowLimits) -> list[str]:
    """Read one id a line.

    Raises:
        InputError: not UTF-8, a bad id, or another number of lines than ``rows``.
        OSError: the file cannot be opened.
    """
    bytes_max = rows * (limits.id_bytes_max + 2)
    data = bytearray()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            data += part
            if len(data) > bytes_max:  # of a pipe nobody knows it before
                raise InputError(f"{path}: over {bytes_max} bytes are too many for {rows} ids")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
    if lines and not lines[-1]:
        lines.pop()
    if len(lines) != rows:
        raise InputError(f"{path}: has {len(lines)} ids for a matrix of {rows} rows")
    ids = []
    for number, line in enumerate(lines, start=1):
        try:
            ids.append(checked_id(line.rstrip("\r"), limits))
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from error
    return ids
