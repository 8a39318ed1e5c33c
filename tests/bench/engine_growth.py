"""How the time of a query grows with the number of vectors, everything resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from engine_data import REAL_DIM, corpus, questions
from engine_figures import speed_at
from engine_run import Bench, say

_QUERIES = 1_000


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Read "100000,1000000,3000000x128" as (count, dimension) pairs.

    Raises:
        ValueError: not such a list.
    """
    sizes = []
    for part in text.split(","):
        count, _, dim = part.partition("x")
        sizes.append((int(count), int(dim) if dim else REAL_DIM))
    return sizes


def growth(
    sizes: list[tuple[int, int]], peers: list[str], work: Path, repeats: int, pads: str
) -> Any:
    """Measure every size, then fit the microseconds per query of each dimension to a + b log2 n.

    Queries a second are read off at equal recall, so that a larger set pays for the wider walk
    that it needs. ``exponent`` is the slope of log(time) over log(n): 0 is constant, 1 linear.
    """
    rows: list[dict[str, Any]] = []
    for count, dim in sizes:
        vectors = corpus(count, dim, work, pads)
        asked = questions(vectors, _QUERIES, work)
        bench = Bench(work, vectors, peers)
        for peer in peers:
            built_s = bench.build(peer)
            say(f"growth: {peer}, {count:,} x {dim}")
            run = bench.run(bench.job("warm", peer, repeats=repeats), asked)
            if "error" in run:
                rows.append({"peer": peer, "count": count, "dim": dim, "error": run["error"]})
                continue
            row = {"peer": peer, "count": count, "dim": dim, "build_s": built_s}
            for target in (0.95, 0.99):
                speed = speed_at(run["rows"], target, "single")
                row[f"us_{target}"] = 1e6 / speed if speed else None
            row["peak_rss_bytes"] = run["memory"]["peak_rss_bytes"]
            row["machine"] = run["machine"]
            rows.append(row)
    return {"rows": rows, "fits": fits(rows)}


def fits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit each engine and dimension that has three sizes or more."""
    found = []
    for key in ("us_0.95", "us_0.99"):
        groups: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for row in rows:
            if row.get(key):
                groups.setdefault((row["peer"], row["dim"]), []).append((row["count"], row[key]))
        for (peer, dim), points in groups.items():
            if len(points) < 3:
                continue
            n, us = (np.array(column, np.float64) for column in zip(*points, strict=True))
            slope, start = np.polyfit(np.log2(n), us, 1)
            left = us - (start + slope * np.log2(n))
            spread = float(((us - us.mean()) ** 2).sum())
            found.append(
                {
                    "peer": peer,
                    "dim": dim,
                    "what": key,
                    "us_at_start": float(start),
                    "us_per_doubling": float(slope),
                    "r2": 1 - float((left**2).sum()) / spread if spread else 1.0,
                    "exponent": float(np.polyfit(np.log(n), np.log(us), 1)[0]),
                }
            )
    return found
