"""Reads plain vector files: .npy, .fvecs and .bvecs by mapping, Parquet by streaming."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, InputError
from stoker.index.document_values import check_id
from stoker.index.filters import RESERVED_FIELDS
from stoker.index.foreign import ForeignBody, ForeignIndex

_ROWS_STEP: Final = 8_192
_DIM_MAX: Final = 4_096


def read_npy(path: Path) -> ForeignIndex:
    """Map a .npy file of shape (n, dim).

    Raises:
        InputError: not two dimensions, or not numbers.
        CorruptError: truncated or not a .npy file.
    """
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, OverflowError) as error:
        raise CorruptError(f"{path}: not a whole .npy file: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2:
        raise InputError(f"{path}: expected shape (n, dim), found {np.shape(vectors)}")
    if vectors.dtype.kind not in "fiu":
        raise InputError(f"{path}: expected numbers, found {vectors.dtype}")
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
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorruptError(f"{path}: not a whole Parquet file: {error}") from error
    names = file.schema_arrow.names
    if vector_column not in names:
        raise InputError(
            f"{path}: expected a column {vector_column!r} of vectors, found {', '.join(names)}; "
            "name it with --vector-column"
        )
    try:
        vectors = _spooled_vectors(path, file, pyarrow, vector_column)
        ids = _ids(path, file, id_column) if id_column in names else None
    except pyarrow.ArrowException as error:
        raise CorruptError(f"{path}: {error}") from error
    kept = [name for name in names if name not in (vector_column, id_column)]
    notes = []
    reserved = sorted(set(kept) & RESERVED_FIELDS)
    if reserved:
        notes.append(f"columns {', '.join(reserved)} were left out: filters reserve these names")
        kept = [name for name in kept if name not in reserved]

    def bodies() -> Iterator[ForeignBody]:
        row = 0
        for batch in file.iter_batches(_ROWS_STEP, columns=kept):
            for values in batch.to_pylist():
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


def _spooled_vectors(path: Path, file: Any, pyarrow: Any, column: str) -> NDArray[np.float32]:
    dim, row = 0, 0
    # Unlinked while mapped: the space goes back when the process no longer looks at it.
    descriptor, name = tempfile.mkstemp(prefix="stoker-import-", suffix=".f32")
    with contextlib.ExitStack() as stack:
        spool = stack.enter_context(os.fdopen(descriptor, "wb"))
        stack.callback(os.unlink, name)
        for batch in file.iter_batches(_ROWS_STEP, columns=[column]):
            array = batch.column(0)
            if not (
                pyarrow.types.is_list(array.type)
                or pyarrow.types.is_large_list(array.type)
                or pyarrow.types.is_fixed_size_list(array.type)
            ):
                raise InputError(f"{path}: column {column!r}: expected lists, found {array.type}")
            values = array.flatten()
            if not pyarrow.types.is_floating(values.type) and not pyarrow.types.is_integer(
                values.type
            ):
                raise InputError(
                    f"{path}: column {column!r}: expected lists of numbers, found {array.type}"
                )
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            dim = dim or (int(lengths[0]) if len(lengths) and lengths[0] == lengths[0] else 0)
            odd = np.flatnonzero(~(lengths == dim))
            if odd.size or values.null_count or dim == 0:
                at = row + (int(odd[0]) if odd.size else 0)
                raise InputError(
                    f"{path}: column {column!r}: row {at}: expected {dim or 'some'} numbers and no "
                    "null"
                )
            spool.write(values.to_numpy(zero_copy_only=False).astype("<f4").tobytes())
            row += len(array)
        spool.flush()
        if row == 0:
            raise InputError(f"{path}: it has no rows")
        mapped: NDArray[np.float32] = np.memmap(name, dtype="<f4", mode="r", shape=(row, dim))
        return mapped


def _ids(path: Path, file: Any, column: str) -> NDArray[Any]:
    found: list[Any] = []
    for batch in file.iter_batches(_ROWS_STEP, columns=[column]):
        found += batch.column(0).to_pylist()
    missing = next((row for row, value in enumerate(found) if value is None), None)
    if missing is not None:
        raise InputError(f"{path}: column {column!r}: row {missing} has no id")
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
    """Keep what filters can hold; dates and times become ISO 8601 text."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "isoformat"):
            kept[name] = value.isoformat()
        elif isinstance(value, str | int | float | bool | list | dict):
            if isinstance(value, float) and not np.isfinite(value):
                continue
            kept[name] = value
    return kept
