"""What calibration says of searches for one k, out of what it measured of a few.

Recall of ten neighbors says nothing of a hundred where few rows are near everything, or no link
leads to most: see `stoker.index.calibration` for which k are measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stoker.index.calibrated import PER_WIDTH, Calibration, KTable

# How much greater a share must be lost of a hundred than of ten for recall to fall with k.
_FALLS: Final = 0.02
# What is then taken for lost of the neighbors beyond, over what is of the tenth to the hundredth.
_LOST_BEYOND: Final = 3.0


def for_k(calibration: Calibration, k: int) -> Calibration:
    """Return what is known of searches for ``k`` neighbors, widths and all.

    Between two that were measured, walks count as reaching what the worse of both reached at as
    many times k (but for less than ten at the same width): where recall drops between them, nobody
    knows at which. Beyond the last, what is promised is that walks find what they found of the
    last, which is a smaller share of more. In the mean they are taken to find the same share of
    more, unless it fell from ten to the last: then three times as large a share of what comes after
    it is taken for lost. Widths of walks that nobody measured are in proportion. A scan loses at
    most as many rows as for the next k that was measured, and beyond those no greater share, since
    it keeps twice as many rows as are asked for and more.
    """
    if not calibration.by_k:
        return calibration
    tables = sorted(
        [_own_table(calibration), *calibration.by_k],
        key=lambda table: table.k,
    )
    below = [table for table in tables if table.k <= k] or tables[:1]
    above = [table for table in tables if table.k >= k] or tables[-1:]
    around = (below[-1], above[0])
    if k in (around[0].k, around[1].k):
        chosen = around[0] if around[0].k == k else around[1]
        return dataclasses.replace(
            calibration,
            k=k,
            queries=chosen.queries,
            ef=chosen.ef,
            by_k=(),
            scan=chosen.scan,
            losses=calibration.losses if k == calibration.k else (),
            coarse_losses=calibration.coarse_losses if k == calibration.k else (),
            **_listed(chosen.recall),
        )
    scale = max(k / calibration.k, 1.0)
    # Widths over how many times ten neighbors are asked for.
    spaces = [np.array(t.ef) / max(t.k / calibration.k, 1.0) for t in around]
    # `numpy.union1d` and `numpy.unique` would import `numpy.ma`: 10 ms of a cold start.
    grid = np.array(sorted(set().union(*(space.tolist() for space in spaces))))
    grid = grid[grid >= max(space[0] for space in spaces)]
    scaled = np.maximum(np.ceil(grid * scale), k).astype(int)
    first = np.flatnonzero(np.diff(scaled, prepend=-1))
    ef = scaled[first]
    grid = grid[first]
    lists = {}
    for name in PER_WIDTH:
        values = [_at_widths(t, name, s, grid) for t, s in zip(around, spaces, strict=True)]
        worse = np.minimum(*values) if len(values[0]) and len(values[1]) else np.empty(0)
        lists[name] = tuple(float(value) for value in worse.ravel())
    if k > tables[-1].k:
        lists = _beyond(calibration, tables[-1], k, grid, lists)
    return dataclasses.replace(
        calibration,
        k=k,
        queries=min(table.queries for table in around),
        ef=tuple(int(width) for width in ef),
        by_k=(),
        losses=(),
        coarse_losses=(),
        scan=tuple(
            min(low, max(1.0 - (1.0 - high) * max(around[1].k / k, 1.0), 0.0))
            for low, high in zip(around[0].scan, around[1].scan, strict=False)
        ),
        **_listed(lists),
    )


def _own_table(calibration: Calibration) -> KTable:
    lists = {name: getattr(calibration, name) for name in PER_WIDTH}
    return KTable(calibration.k, calibration.queries, calibration.ef, lists, calibration.scan)


def _beyond(
    calibration: Calibration,
    last: KTable,
    k: int,
    grid: NDArray[np.float64],
    lists: Mapping[str, tuple[float, ...]],
) -> dict[str, tuple[float, ...]]:
    """The same for more neighbors than any table is of; see `for_k`."""
    ten = _own_table(calibration)
    space = np.array(last.ef) / max(last.k / calibration.k, 1.0)
    found: dict[str, tuple[float, ...]] = {}
    for name, values in lists.items():
        # The walk is as many times wider than for the last k as there are more neighbors.
        wide = _at_widths(last, name, space, grid * (k / last.k)).ravel()
        at_least = wide * (last.k / k)
        of_ten = _at_widths(ten, name, np.array(calibration.ef), grid).ravel()
        if values and not name.endswith("_low"):
            at_least = np.maximum(_mean_beyond(np.array(values), of_ten, last.k, k), at_least)
        found[name] = tuple(float(value) for value in at_least) if values else ()
    return found


def _mean_beyond(
    means: NDArray[np.float64], of_ten: NDArray[np.float64], last: int, k: int
) -> NDArray[np.float64]:
    """Mean recall of ``k`` neighbors, out of that of the ``last`` k measured and of ten.

    Args:
        means: Shape (n,): of the last.
        of_ten: Likewise; empty where nobody knows.
    """
    if not len(of_ten) or last <= 10:
        return means
    # Of those beyond the tenth. Where more are lost there than of ten, it may be all from some
    # rank on; how many more, one measurement does not tell.
    lost = (1.0 - means) * (last / (last - 10))
    falls = lost > 1.0 - of_ten + _FALLS
    beyond = np.where(falls, np.minimum(_LOST_BEYOND * lost, 1.0), 1.0 - means)
    shares: NDArray[np.float64] = (means * last + (1.0 - beyond) * (k - last)) / k
    return shares


def _at_widths(
    table: KTable, name: str, widths: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A field of ``table``, whose widths these are, at those ``wanted``: a row for each band."""
    values = np.reshape(table.recall.get(name, ()), (-1, len(widths)))
    return values[:, np.maximum(np.searchsorted(widths, wanted, "right") - 1, 0)]


def _listed(lists: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    """Fields of `PER_WIDTH` for a calibration: those that are missing are empty."""
    return {name: lists.get(name, ()) for name in PER_WIDTH}
