"""What each ordering of rows gains: as inserted, by graph locality, by heat, by both.

One graph is sealed four times, with the same links, codes and heat; only the order of the rows
differs, so pages hold other rows together. Levels are kept apart in all four, since the format
wants the nodes of a level to be a prefix. The orders that no caller can ask for are put in place
of the sealer's own, here and nowhere else.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from engine_job import Job
from engine_parts import Stream
from engine_run import Bench, say
from numpy.typing import NDArray

import stoker.index.seal as sealing
from stoker.index.hnswlib_file import read_hnswlib

Order = Callable[[Any, Any], NDArray[np.uint32]]
SHARES: Final = (0.1, 0.2)
_TOUCHED_QUERIES: Final = 200


def _by_level(sealer: Any, then: NDArray[Any]) -> NDArray[np.uint32]:
    graph = sealer.graph
    levels = max(graph.max_level, 0) - graph.levels.astype(np.int64)
    return np.lexsort((np.arange(graph.count), then, levels)).astype(np.uint32)


def as_inserted(sealer: Any, heat: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Levels, then the order of insertion."""
    return _by_level(sealer, np.zeros(sealer.graph.count))


def by_heat(sealer: Any, heat: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Levels, then falling heat, then the order of insertion."""
    return _by_level(sealer, -heat[sealer.rows])


_OWN: Final[Any] = sealing._Sealer._order


def by_locality(sealer: Any, heat: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Levels, then graph locality: the sealer's own order where nothing is known of heat."""
    return np.asarray(_OWN(sealer, None), np.uint32)


def by_both(sealer: Any, heat: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The sealer's own order."""
    return np.asarray(_OWN(sealer, heat), np.uint32)


ORDERS: Final[dict[str, Order]] = {
    "insertion": as_inserted,
    "locality": by_locality,
    "heat": by_heat,
    "heat + locality": by_both,
}


@contextlib.contextmanager
def _sealed_by(order: Order) -> Iterator[None]:
    sealing._Sealer._order = order
    try:
        yield
    finally:
        sealing._Sealer._order = _OWN


def ordering(bench: Bench, stream: Stream, *, settle: int, seconds_max: float) -> dict[str, Any]:
    """Seal; measure pages touched by single queries, and hit ratios under 10 and 20 % budgets."""
    kept = np.load(stream.heat)
    heat = np.zeros(bench.corpus.count, np.float32)
    heat[kept["ids"]] = kept["weights"]
    source = bench.folder("hnswlib") / "index.bin"
    found: dict[str, Any] = {}
    place = bench.work / f"ordering-{bench.corpus.key}"
    shutil.rmtree(place, ignore_errors=True)  # sealed by what the heat is now
    for name, order in ORDERS.items():
        folder = place / name.replace(" + ", "-")
        folder.mkdir(parents=True)
        say(f"ordering: sealing by {name}")
        graph = read_hnswlib(source, dim=bench.corpus.dim)
        with _sealed_by(order):
            sealing.seal_graph(
                folder / "index",
                graph,
                bench.corpus.vectors,
                np.arange(bench.corpus.count),
                metric="ip",
                heat=heat,
                source_rows=graph.labels.astype(np.int64),
            )
        touched = bench.run(
            Job("touched", "stoker", str(folder), target=0.95),
            stream.asked[settle : settle + _TOUCHED_QUERIES],
        )
        limited = {}
        for share in SHARES:
            job = Job(
                "budget",
                "stoker",
                str(folder),
                mode="budget",
                target=0.95,
                settle=settle,
                seconds_max=seconds_max,
                memory_bytes=int(share * bench.bytes_of("stoker")),
                heat=stream.heat,
            )
            limited[str(share)] = bench.cold(job, stream.asked)
        found[name] = {"touched": touched, "limited": limited}
        shutil.rmtree(folder)
    place.rmdir()
    return found
