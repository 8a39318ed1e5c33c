"""Reads usearch index files through usearch itself: keys and vectors; they are linked anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from stoker.errors import CorruptError, InputError
from stoker.index.foreign import ForeignIndex

_METRICS: Final = {"Cos": "cosine", "IP": "ip", "L2sq": "l2"}
_SCALARS: Final = {"F64": np.float32, "F32": np.float32, "F16": np.float16, "BF16": np.float32}
_KEYS_STEP: Final = 16_384


def read_usearch(path: Path) -> ForeignIndex:
    """Read an index that ``usearch.index.Index.save`` wrote.

    Raises:
        InputError: usearch is not installed, or the file keeps only quantised vectors, several per
            key, or compares them in a way that we do not.
        CorruptError: usearch cannot read the file.
    """
    try:
        from usearch.index import Index
    except ImportError as error:
        raise InputError(
            f"{path}: reading a usearch index needs usearch: pip install usearch"
        ) from error
    try:
        facts = Index.metadata(str(path))
        index = Index.restore(str(path), view=True) if facts else None
    except (RuntimeError, ValueError, MemoryError) as error:
        raise CorruptError(f"{path}: usearch cannot read it: {error}") from error
    if not facts or index is None:
        raise CorruptError(f"{path}: usearch cannot read it")
    metric_name, scalar_name = facts["kind_metric"].name, facts["kind_scalar"].name
    if metric_name not in _METRICS:
        raise InputError(
            f"{path}: metric {metric_name} has no counterpart; {', '.join(_METRICS)} have"
        )
    if scalar_name not in _SCALARS:
        raise InputError(
            f"{path}: its vectors are quantised to {scalar_name}; the originals are not in the file"
        )
    if index.multi:
        raise InputError(f"{path}: it has several vectors per key; here an id has one")
    count, dim = len(index), int(index.ndim)
    keys = np.array(index.keys[:count] if count else [], dtype=np.uint64)
    if count and int(keys.max()) >= 1 << 63:
        raise InputError(f"{path}: key {int(keys.max())} does not fit a signed 64-bit integer")
    vectors: Any = np.empty((count, dim), dtype=_SCALARS[scalar_name])
    for start in range(0, count, _KEYS_STEP):
        part = keys[start : start + _KEYS_STEP]
        found = index.get(part)
        if found is None or any(vector is None for vector in found):
            raise CorruptError(f"{path}: a key has no vector")
        vectors[start : start + _KEYS_STEP] = np.asarray(found)
    return ForeignIndex(
        f"usearch {scalar_name}",
        vectors,
        keys.astype(np.int64),
        _METRICS[metric_name],
        notes=("linked anew: a usearch graph is not read",),
    )
