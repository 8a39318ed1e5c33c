"""The directions that a segment's coarse codes keep, chosen by where its vectors vary.

Vectors of text vary in some directions much more than in others, and queries lie as vectors do, so
an error costs most there. 2 bits for every dimension alike are then badly spent: of 384 dimensions
of documentation, 6 bits of the 32 strongest directions, 4 of the next and 2 of some more tell
neighbors apart far better in a few bytes more.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import stoker.kernels._core as _core

# A query's way into the basis is one product with it, which grows as the square.
_DIM_MAX: Final = 1_024
# Fewer vectors than this a dimension say little of where others vary.
_SAMPLE_FACTOR: Final = 4
# Mean square error of a uniform code of a normal coordinate, over its variance, and the width of
# its cells over its deviation, of 6, 4 and 2 bits (Max, IRE Transactions on Information Theory 6,
# 1960, table II; of 6 bits by the same method).
_FINE_ERROR: Final = 0.00104
_WIDE_ERROR: Final = 0.01154
_NARROW_ERROR: Final = 0.1188
_FINE_STEP: Final = 0.1041
_WIDE_STEP: Final = 0.3352
_NARROW_STEP: Final = 0.9957
_WIDE_DIMS: Final = 64
_NARROW_DIMS: Final = 128
# A basis has to be worth its bytes and the query's time.
_ERROR_MAX: Final = 0.8
_BLOCK_BYTES: Final = 32
# The two numbers that end a record, and the places that they take of a block of each kind.
_NUMBER_BYTES: Final = 8
_WIDE_TAKEN: Final = 2 * _NUMBER_BYTES
_NARROW_TAKEN: Final = 4 * _NUMBER_BYTES
# Numbers of directions that may have 6 bits.
_FINE_DIMS: Final = (0, 32, 64)
_STEP_BYTES: Final = 4
_VALUE_BYTES: Final = 2
# Of a record of 4-bit codes, at most so much: else those serve as well.
_SHARE_MAX: Final = 0.75


class BasisLayout(NamedTuple):
    """What a manifest says of the basis in transform.stk.

    Attributes:
        directions: In all; 0 where there is no basis.
        wide_blocks: Blocks of codes with 4 bits.
        fine: The first directions, which have 6 bits.
        blocks: Blocks of a code that ends with the record's numbers; 0 where they follow it.
    """

    directions: int
    wide_blocks: int
    fine: int
    blocks: int

    @property
    def step_count(self) -> int:
        """Widths of cells that are stored: without `blocks` one for each kind of block."""
        return self.directions if self.blocks else 2


class _Split(NamedTuple):
    """How a code's bits fall on the directions, the strongest first.

    Attributes:
        wide_blocks: Blocks of 4 bits.
        fine: Directions of 6 bits, which take a place of each kind.
        wide: Directions of 4 bits and more.
        kept: Directions in all.
    """

    wide_blocks: int
    fine: int
    wide: int
    kept: int


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
    blocks = _blocks(dim)
    plain = _NARROW_ERROR * variances.sum() ** 2 / dim
    splits = _splits(dim, blocks)
    errors = [_expected_error(variances, split) for split in splits]
    split = splits[int(np.argmin(errors))]
    if not min(errors) < _ERROR_MAX * plain:
        return None
    rng = np.random.default_rng(seed)
    rows = np.empty((split.kept, dim), np.float32)
    steps = np.empty(split.kept, np.float32)
    # A coordinate's deviation over |x| / sqrt(dim) is measured in each group.
    unit = variances.sum() / dim
    for start, stop, step in (
        (0, split.fine, 4 * _FINE_STEP),
        (split.fine, split.wide, _WIDE_STEP),
        (split.wide, split.kept, _NARROW_STEP),
    ):
        if stop > start:
            turn = np.linalg.qr(rng.normal(size=(stop - start, stop - start)))[0]
            rows[start:stop] = turn @ axes[:, start:stop].T
            variance = max(variances[start:stop].mean(), 1e-6 * unit) / unit
            steps[start:stop] = step * np.sqrt(variance)
    return _core.CoarseBasis(
        wide_blocks=split.wide_blocks,
        fine=split.fine,
        blocks=blocks,
        steps=steps,
        rows=rows.astype("<f2").view(np.uint16),
    )


def _blocks(dim: int) -> int:
    """Blocks of a code that ends with its record's two numbers; 0 for plain codes' and the numbers.

    One more than plain codes have, so that for 384 dimensions a record is two lines of a cache and,
    with the links, just under a tenth of an index of float32 vectors.
    """
    blocks = -(-dim // _NARROW_DIMS) + 1
    return blocks if _BLOCK_BYTES * blocks <= _SHARE_MAX * _core.code_record_bytes(dim) else 0


def _splits(dim: int, blocks: int) -> list[_Split]:
    """Every way to spend a code's bits."""
    found = []
    in_all = blocks or -(-dim // _NARROW_DIMS)
    for wide_blocks in range(1, in_all + 1):
        wide = _WIDE_DIMS * wide_blocks
        narrow = _NARROW_DIMS * (in_all - wide_blocks)
        if blocks and narrow:
            narrow -= _NARROW_TAKEN
        elif blocks:
            wide -= _WIDE_TAKEN
        wide = min(wide, dim)
        for fine in _FINE_DIMS:
            if fine <= min(wide, narrow) and (blocks or not fine):
                kept = min(wide + narrow - fine, dim)
                found.append(_Split(wide_blocks, fine, wide, kept))
    return found


def _expected_error(variances: NDArray[np.float64], split: _Split) -> float:
    """Mean square error of a product with a query that varies as the vectors do."""
    error = float((variances[split.kept :] ** 2).sum())
    for start, stop, share in (
        (0, split.fine, _FINE_ERROR),
        (split.fine, split.wide, _WIDE_ERROR),
        (split.wide, split.kept, _NARROW_ERROR),
    ):
        if stop > start:
            error += share * float(variances[start:stop].sum()) ** 2 / (stop - start)
    return error


def coarse_record_bytes(basis: Any | None, dim: int) -> int:
    """Bytes of a record of coarse codes in ``basis``, or of plain ones."""
    if basis is not None and basis.blocks:
        return _BLOCK_BYTES * int(basis.blocks)
    return int(_core.coarse_record_bytes(dim))


def basis_bytes(basis: Any | None) -> bytes:
    """What transform.stk holds of it behind the centre."""
    if basis is None:
        return b""
    steps = basis.steps if basis.blocks else basis.steps[[0, -1]]
    return bytes(steps.astype("<f4").tobytes() + basis.rows.astype("<u2").tobytes())


def basis_size(layout: BasisLayout, dim: int) -> int:
    """Bytes of `basis_bytes`; 0 where there is no basis."""
    if not layout.directions:
        return 0
    return _STEP_BYTES * layout.step_count + _VALUE_BYTES * layout.directions * dim


def basis_memory(layout: BasisLayout, dim: int) -> int:
    """Bytes that it takes in memory: as stored, and rounded to a byte a number for queries."""
    return basis_size(layout, dim) + layout.directions * dim


def basis_of(data: NDArray[np.uint8], layout: BasisLayout, dim: int) -> Any | None:
    """Return the basis that `basis_bytes` wrote, None where there is none.

    Raises:
        CorruptError: it cannot be one of vectors of ``dim`` dimensions (when it is used).
    """
    directions = layout.directions
    if not directions:
        return None
    size = _STEP_BYTES * layout.step_count
    steps = data[:size].view("<f4")
    if not layout.blocks:
        wide = min(_WIDE_DIMS * layout.wide_blocks, directions)
        steps = np.repeat(steps, [wide, directions - wide])
    return _core.CoarseBasis(
        wide_blocks=layout.wide_blocks,
        fine=layout.fine,
        blocks=layout.blocks,
        steps=np.ascontiguousarray(steps, np.float32),
        rows=np.ascontiguousarray(data[size:].view("<u2").reshape(directions, dim), np.uint16),
    )
