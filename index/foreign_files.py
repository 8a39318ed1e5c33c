"""Reads plain vector files: .npy, .fvecs and .bvecs by mapping, Parquet by streaming."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError
from stoker.index.document_values import check_id
from stoker.index.filters import check_metadata
from stoker.index.foreign import ForeignBody, ForeignIndex
from stoker.index.generation import storage_error

_ROWS_STEP: Final = 8_192
_DIM_MAX: Final = 4_096
# What numpy raises on a header that is none; it hands it to Python's own parser.
_NPY_REFUSALS: Final = (
    ValueError,
    TypeError,
    EOFError,
    SyntaxError,
    OverflowError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)


def read_npy(path: Path) -> ForeignIndex:
    """Map a .npy file of shape (n, dim).

    Raises:
        InputError: not two dimensions, or not numbers.
        CorruptError: truncated, longer than its array, or not a .npy file.
    """
    try:
        vectors = np.lib.format.open_memmap(path, mode="r")
        file_bytes = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except _NPY_REFUSALS as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        # Whole, and of no use: what it would unpickle may do anything.
        if "Python objects" in said:
            raise InputError(f"{path}: expected numbers, found Python objects") from error
        raise CorruptError(f"{path}: not a whole .npy file: {said}") from error
    if vectors.ndim != 2:
        raise InputError(f"{path}: expected shape (n, dim), found {vectors.shape}")
    if vectors.dtype.kind not in "fiu":
        raise InputError(f"{path}: expected numbers, found {vectors.dtype}")
    rest = file_bytes - vectors.offset - vectors.nbytes
    if rest:
        raise CorruptError(
            f"{path}: at byte {file_bytes - rest}: expected the end of its one array, found {rest} "
            "bytes more"
        )
    return ForeignIndex("npy", vectors, None, None)


def read_vecs(path: Path, kind: str) -> ForeignIndex:
    """Map a .fvecs or .bvecs file: each row a little-endian i32 dimension, then its values.

    Raises:
        CorruptError: a row's dimension differs from the first one's, or the file ends inside a row.
    """
    value_bytes = 4 if kind == "fvecs" else 1
    try:
        raw: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
            if path.stat().st_size
            else np.empty(0, np.uint8)
        )
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if raw.size < 4:
        raise CorruptError(f"{path}: at byte 0: expected a dimension, found {raw.size} bytes")
    dim = int(raw[:4].view("<i4")[0])
    row_bytes = 4 + dim * value_bytes
    if not 1 <= dim <= _DIM_MAX:
        raise CorruptError(f"{path}: at byte 0: expected a dimension up to {_DIM_MAX}, found {dim}")
    if raw.size % row_bytes:
        raise CorruptError(
            f"{path}: at byte {raw.size // row_bytes * row_bytes}: expected a row of {row_bytes} "
            f"bytes, found {raw.size % row_bytes}"
        )
    rows = raw.reshape(-1, row_bytes)
    for start in range(0, len(rows), _ROWS_STEP):
        dims = np.ascontiguousarray(rows[start : start + _ROWS_STEP, :4]).view("<i4")[:, 0]
        odd = np.flatnonzero(dims != dim)
        if odd.size:
            row = start + int(odd[0])
            raise CorruptError(
                f"{path}: at byte {row * row_bytes}: expected dimension {dim}, as in row 0, found "
                f"{int(dims[int(odd[0])])}"
            )
    values = rows[:, 4:]
    vectors: NDArray[Any] = values.view("<f4") if kind == "fvecs" else values
    return ForeignIndex(kind, vectors, None, "l2", notes=("compared by L2, as such files are",))


def read_parquet(
    path: Path, *, vector_column: str, id_column: str, text_column: str
) -> ForeignIndex:
    """Stream a Parquet file's vectors into a temporary file, and map that.

    Every other column becomes metadata, where filters can use its values.

    Raises:
        InputError: pyarrow is not installed, a column is missing or of a wrong type, a vector is
            missing or of another length; names the row.
        CorruptError: pyarrow cannot read the file.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            f"{path}: reading Parquet needs pyarrow: pip install 'stoker[formats]'"
        ) from error
    with _reading(path, pyarrow):
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    names = file.schema_arrow.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{path}: it has several columns named {', '.join(map(repr, twice))}")
    if vector_column not in names:
        raise InputError(
            f"{path}: expected a column {vector_column!r} of vectors, found {', '.join(names)}; "
            "name it with --vector-column"
        )
    vectors = _spooled_vectors(path, file, pyarrow, vector_column)
    ids = _ids(path, file, pyarrow, id_column) if id_column in names else None
    kept = [name for name in names if name not in (vector_column, id_column)]
    notes = []
    reserved = [name for name in kept if not _can_name(name)]
    if reserved:
        shown = ", ".join(name or "''" for name in sorted(reserved))
        notes.append(f"columns {shown} were left out: filters reserve these names")
        kept = [name for name in kept if name not in reserved]
    odd = [name for name in kept if _is_unkept(pyarrow, file.schema_arrow.field(name).type)]
    if odd:
        notes.append(f"columns {', '.join(odd)} were left out: metadata cannot hold their type")
        kept = [name for name in kept if name not in odd]

    def bodies() -> Iterator[ForeignBody]:
        row = 0
        for batch in _batches(path, file, pyarrow, kept):
            with _reading(path, pyarrow):
                part = batch.to_pylist()
            for values in part:
                text = values.pop(text_column, None)
                document_id = row if ids is None else ids[row]
                yield ForeignBody(
                    check_id(document_id, f"{path}: row {row}"),
                    None if text is None else str(text),
                    _metadata(values),
                )
                row += 1

    return ForeignIndex(
        "parquet", vectors, ids, None, notes=tuple(notes), bodies=bodies if kept else None
    )


@contextlib.contextmanager
def _reading(path: Path, pyarrow: Any) -> Iterator[None]:
    """Say of what pyarrow raises while it reads that the file is damaged."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise CorruptError(f"{path}: not a whole Parquet file: {error}") from error


def _batches(path: Path, file: Any, pyarrow: Any, columns: list[str]) -> Iterator[Any]:
    batches = file.iter_batches(_ROWS_STEP, columns=columns)
    while True:
        with _reading(path, pyarrow):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _can_name(column: str) -> bool:
    """Whether metadata may have a field of this name."""
    try:
        check_metadata({column: None}, "columns")
    except InputError:
        return False
    return True


def _is_unkept(pyarrow: Any, kind: Any) -> bool:
    """Whether a column's values are nothing that `_metadata` keeps."""
    types = pyarrow.types
    return bool(
        types.is_decimal(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_duration(kind)
        or types.is_interval(kind)
        or types.is_null(kind)
    )


def _spooled_vectors(path: Path, file: Any, pyarrow: Any, column: str) -> NDArray[np.float32]:
    dim, row = 0, 0
    # Unlinked while mapped: the space goes back when the process no longer looks at it.
    descriptor, name = tempfile.mkstemp(prefix="stoker-import-", suffix=".f32")
    with contextlib.ExitStack() as stack:
        spool = stack.enter_context(os.fdopen(descriptor, "wb"))
        stack.callback(os.unlink, name)
        for batch in _batches(path, file, pyarrow, [column]):
            values, dim = _numbers(f"{path}: column {column!r}", batch.column(0), pyarrow, dim, row)
            try:
                spool.write(values.astype("<f4").tobytes())
            except OSError as error:
                raise storage_error(Path(name), error) from error
            row += len(batch)
        try:
            spool.flush()
        except OSError as error:
            raise storage_error(Path(name), error) from error
        if row == 0:
            raise InputError(f"{path}: it has no rows")
        mapped: NDArray[np.float32] = np.memmap(name, dtype="<f4", mode="r", shape=(row, dim))
        return mapped


def _numbers(
    place: str, array: Any, pyarrow: Any, dim: int, first_row: int
) -> tuple[NDArray[Any], int]:
    """Return a batch's numbers, one vector after the other, and how many a vector has.

    Args:
        place: File and column, for messages.
        array: Of lists.
        pyarrow: The module.
        dim: Numbers of each vector; 0 takes the first one's.
        first_row: Row of the file that the batch starts with.
    """
    types = pyarrow.types
    kind = array.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        raise InputError(f"{place}: expected lists, found {kind}")
    values = array.flatten()
    if not types.is_floating(values.type) and not types.is_integer(values.type):
        raise InputError(f"{place}: expected lists of numbers, found {kind}")
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    dim = dim or (int(lengths[0]) if len(lengths) and lengths[0] == lengths[0] else 0)
    odd = np.flatnonzero(~(lengths == dim))
    if odd.size == 0 and dim and values.null_count:
        odd = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) // dim
    if odd.size or (dim == 0 and len(array)):
        at = first_row + (int(odd[0]) if odd.size else 0)
        raise InputError(f"{place}: row {at}: expected {dim or 'some'} numbers and no null")
    return values.to_numpy(zero_copy_only=False), dim


def _ids(path: Path, file: Any, pyarrow: Any, column: str) -> NDArray[Any]:
    found: list[Any] = []
    for batch in _batches(path, file, pyarrow, [column]):
        with _reading(path, pyarrow):
            found += batch.column(0).to_pylist()
    missing = next((row for row, value in enumerate(found) if value is None), None)
    if missing is not None:
        raise InputError(f"{path}: column {column!r}: row {missing} has no id")
    if found:
        check_id(found[0], f"{path}: column {column!r}: row 0")
    if found and isinstance(found[0], int):
        try:
            return np.array(found, dtype=np.int64)
        except OverflowError as error:
            raise InputError(
                f"{path}: column {column!r}: id {max(found)} does not fit a signed 64-bit integer"
            ) from error
    ids = np.empty(len(found), dtype=object)
    ids[:] = found
    return ids


def _metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what filters can hold, inside lists and objects too."""
    found = ((name, _kept(value)) for name, value in values.items())
    return {name: value for name, value in found if value is not None}


def _kept(value: Any) -> Any:
    """Return a value as metadata holds it, None where it cannot; dates become ISO 8601 text."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, dict):
        return _metadata({str(name): item for name, item in value.items()})
    if isinstance(value, list | tuple):
        return [_kept(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if isinstance(value, str | int | bool) else None
