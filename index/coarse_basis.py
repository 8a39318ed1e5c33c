"""The directions that a segment's coarse codes keep, chosen by where its vectors vary.

Vectors of text vary in some directions much more than in others, and queries lie as vectors do, so
an error costs most there. 2 bits for every dimension alike are then badly spent: of 384 dimensions
of documentation, 4 bits of the 128 strongest directions and 2 of the next 128 take the same bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core

# A query's way into the basis is one product with it, which grows as the square.
_DIM_MAX: Final = 1_024
# Fewer vectors than this a dimension say little of where others vary.
_SAMPLE_FACTOR: Final = 4
# Mean square error of a uniform code of a normal coordinate, over its variance, and the width of
# its cells over its deviation (Max, IRE Transactions on Information Theory 6, 1960, table II).
_WIDE_ERROR: Final = 0.01154
_NARROW_ERROR: Final = 0.1188
_WIDE_STEP: Final = 0.3352
_NARROW_STEP: Final = 0.9957
_WIDE_DIMS: Final = 64
_NARROW_DIMS: Final = 128
# A basis has to be worth its bytes and the query's time.
_ERROR_MAX: Final = 0.8
_STEPS_BYTES: Final = 8


def choose_basis(sample: NDArray[np.float32], centre: NDArray[np.float32], seed: int) -> Any | None:
    """Return the `_core.CoarseBasis` of vectors like these; None where plain codes do as well.

    Args:
        sample: float32, shape (n, dim): some of the vectors.
        centre: float32, shape (dim,): what coding subtracts.
        seed: Of the rotation inside each group of directions, so that its coordinates look alike.
    """
    count, dim = sample.shape
    if dim > _DIM_MAX or count < _SAMPLE_FACTOR * dim:
        return None
    centred = sample - centre
    values, axes = np.linalg.eigh((centred.T @ centred).astype(np.float64) / count)
    order = np.argsort(-values, kind="stable")
    variances, axes = np.maximum(values[order], 0.0), axes[:, order]
    blocks = -(-dim // _NARROW_DIMS)
    plain = _NARROW_ERROR * variances.sum() ** 2 / dim
    errors = [
        _expected_error(variances, *_split(dim, blocks, wide)) for wide in range(1, blocks + 1)
    ]
    wide_blocks = int(np.argmin(errors)) + 1
    if not errors[wide_blocks - 1] < _ERROR_MAX * plain:
        return None
    wide, kept = _split(dim, blocks, wide_blocks)
    rng = np.random.default_rng(seed)
    rows = np.empty((kept, dim), np.float32)
    for start, stop in ((0, wide), (wide, kept)):
        if stop > start:
            turn = np.linalg.qr(rng.normal(size=(stop - start, stop - start)))[0]
            rows[start:stop] = turn @ axes[:, start:stop].T
    # A coordinate's deviation over |x| / sqrt(dim), in each group.
    unit = variances.sum() / dim
    deviations = [
        float(np.sqrt(max(part.mean(), 1e-6 * unit) / unit)) if len(part) else 1.0
        for part in (variances[:wide], variances[wide:kept])
    ]
    return _core.CoarseBasis(
        wide_blocks=wide_blocks,
        wide_step=_WIDE_STEP * deviations[0],
        narrow_step=_NARROW_STEP * deviations[1],
        rows=rows.astype("<f2").view(np.uint16),
    )


def _split(dim: int, blocks: int, wide_blocks: int) -> tuple[int, int]:
    """Directions in wide blocks, and in all."""
    wide = min(_WIDE_DIMS * wide_blocks, dim)
    return wide, min(wide + _NARROW_DIMS * (blocks - wide_blocks), dim)


def _expected_error(variances: NDArray[np.float64], wide: int, kept: int) -> float:
    """Mean square error of a product with a query that varies as the vectors do."""
    strong, weak, lost = variances[:wide], variances[wide:kept], variances[kept:]
    error = _WIDE_ERROR * strong.sum() ** 2 / wide + float((lost**2).sum())
    if len(weak):
        error += _NARROW_ERROR * weak.sum() ** 2 / len(weak)
    return float(error)


def basis_bytes(basis: Any | None) -> bytes:
    """What transform.stk holds of it behind the centre."""
    if basis is None:
        return b""
    steps = np.array([basis.wide_step, basis.narrow_step], "<f4")
    return bytes(steps.tobytes() + basis.rows.astype("<u2").tobytes())


def basis_size(directions: int, dim: int) -> int:
    """Bytes of `basis_bytes`; 0 for no directions, which is no basis."""
    return _STEPS_BYTES + 2 * directions * dim if directions else 0


def basis_of(data: NDArray[np.uint8], wide_blocks: int, directions: int, dim: int) -> Any | None:
    """Return the basis that `basis_bytes` wrote, None where there is none.

    Raises:
        CorruptError: it cannot be one of vectors of ``dim`` dimensions (when it is used).
    """
    if not directions:
        return None
    steps = data[:_STEPS_BYTES].view("<f4")
    rows = data[_STEPS_BYTES:].view("<u2").reshape(directions, dim)
    return _core.CoarseBasis(
        wide_blocks=wide_blocks,
        wide_step=float(steps[0]),
        narrow_step=float(steps[1]),
        rows=np.ascontiguousarray(rows, np.uint16),
    )
