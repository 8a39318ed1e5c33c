"""What each ordering of rows gains: as inserted, by graph locality, by heat, by both.

One graph is sealed four times, with the same links, codes and heat; only the order of the rows
differs, so pages hold other rows together.
"""

from __future__ import annotations

import shutil
from typing import Any, Final

import numpy as np
from engine_job import Job
from engine_parts import Stream
from engine_run import Bench, say

from stoker.index.hnswlib_file import read_hnswlib
from stoker.index.row_order import ORDERINGS
from stoker.index.seal import seal_graph

SHARES: Final = (0.1, 0.2)
_TOUCHED_QUERIES: Final = 200


def ordering(bench: Bench, stream: Stream, *, settle: int, seconds_max: float) -> dict[str, Any]:
    """Seal; measure pages touched by single queries, and hit ratios under 10 and 20 % budgets."""
    kept = np.load(stream.heat)
    heat = np.zeros(bench.corpus.count, np.float32)
    heat[kept["ids"]] = kept["weights"]
    source = bench.folder("hnswlib") / "index.bin"
    found: dict[str, Any] = {}
    place = bench.work / f"ordering-{bench.corpus.key}"
    shutil.rmtree(place, ignore_errors=True)  # sealed by what the heat is now
    for name in reversed(ORDERINGS):
        folder = place / name.replace("+", "-")
        folder.mkdir(parents=True)
        say(f"ordering: sealing by {name}")
        graph = read_hnswlib(source, dim=bench.corpus.dim)
        seal_graph(
            folder / "index",
            graph,
            bench.corpus.vectors,
            np.arange(bench.corpus.count),
            metric="ip",
            heat=heat,
            source_rows=graph.labels.astype(np.int64),
            ordering=name,
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
