"""Whether rows are about as long, so that codes need not tell what they have along their mean.

For such rows the length of the way from their mean tells it; see `Quantizer::row_length2`. Without
that, inner products with a query in the mean's direction are estimated with an error far above what
sets such rows apart.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Share of a mean row's squared length, at least, that the rows' mean has: a smaller one shortens no
# query by more than a two-hundredth, and what numbers are rounded to would count for more.
_MEAN_MIN: Final = 0.01
# And at most: what sets rows apart would be what their scores are rounded to.
_MEAN_MAX: Final = 0.9998
# Share of the mean squared way from the mean, at most, by which squared lengths fall short of the
# longest in the mean. Codes' errors are taken to be larger by that.
_SHORT_MAX: Final = 0.1
# Squared lengths that floats can be multiplied with.
_LENGTH2_MIN: Final = 1e-20
LENGTH2_MAX: Final = 1e20


def common_length2(
    metric: str, centre: NDArray[np.float32], lengths2: NDArray[np.float64]
) -> float:
    """Return the rows' squared length as records are to state it; 0 where they have none.

    Args:
        metric: "ip", "cosine" or "l2".
        centre: float32, shape (dim,): the rows' mean.
        lengths2: float64, shape (n,): the squared lengths of a sample of them.
    """
    if metric == "l2" or len(lengths2) == 0:
        return 0.0
    mean2 = float(np.square(centre, dtype=np.float64).sum())
    length2 = 1.0 if metric == "cosine" else float(lengths2.max())
    typical = float(lengths2.mean())
    usable = (
        _LENGTH2_MIN < length2 < LENGTH2_MAX
        and _MEAN_MIN * typical <= mean2 <= _MEAN_MAX * typical
        and length2 - typical <= _SHORT_MAX * (typical - mean2)
    )
    return length2 if usable else 0.0
