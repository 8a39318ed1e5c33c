"""What the engine is meant to reach, beside what a run found: one line a bar."""

from __future__ import annotations

import itertools
from typing import Any

from engine_figures import Rows, disk_of, middle, number, speed_at, table

Bar = tuple[str, str, float | None, bool]


def bars(results: dict[str, Any]) -> list[str]:
    """A table of those that the run can speak of."""
    found: list[Bar] = []
    if results.get("warm"):
        found += _warm(results["warm"])
    if results.get("cold"):
        found += _cold(results["cold"])
    if results.get("budget"):
        found += _budget(results["budget"])
    rows = [
        [name, wanted, number(value, 2), "-" if value is None else "yes" if met else "**no**"]
        for name, wanted, value, met in found
    ]
    return (
        ["## Against the bars", "", *table(["bar", "wanted", "found", "met"], rows)] if rows else []
    )


def _at_least(name: str, value: float | None, bound: float) -> Bar:
    return name, f">= {bound:g}", value, value is not None and value >= bound


def _at_most(name: str, value: float | None, bound: float) -> Bar:
    return name, f"<= {bound:g}", value, value is not None and value <= bound


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _warm(part: dict[str, Any]) -> list[Bar]:
    found = []
    for column, name in (("batch", "batches"), ("single", "one by one")):
        for target in (0.95, 0.99):
            speeds = {
                key.split("/")[0]: speed_at(run["rows"], target, column)
                for key, run in part.items()
                if key.endswith("/1") and "rows" in run
            }
            own = speeds.get("stoker")
            for wanted, others in (
                (2.0, ("hnswlib", "faiss-hnsw")),
                (1.0, ("usearch-f32", "usearch-i8", "pyglass")),
            ):
                best = max((speeds.get(other) or 0.0 for other in others), default=0.0)
                what = f"warm, {name}, {target}: speed over the best of {', '.join(others)}"
                found.append(_at_least(what, _ratio(own, best), wanted))
    one, two = (part.get(f"stoker/{threads}", {}).get("rows", []) for threads in (1, 2))
    for target in (0.95, 0.99):
        gain = _ratio(speed_at(two, target, "batch"), speed_at(one, target, "batch"))
        found.append(_at_least(f"warm, two threads over one, {target}", gain, 1.9))
    return found


def _cold(part: dict[str, Any]) -> list[Bar]:
    found = []
    for volume, runs in part["moments"].items():
        nav = "navigation"
        found.append(
            _at_most(f"{volume}: open to first answer, ms", middle(runs, "first_answer_ms"), 20)
        )
        share = middle(runs, nav, "share")
        found.append(_at_most(f"{volume}: navigation set, share of bytes", share, 0.15))
        bandwidth = part["device"].get(disk_of(volume), {}).get("sequential_mb_s")
        size, seconds = middle(runs, nav, "bytes"), middle(runs, nav, "seconds")
        ideal = size / 1e6 / bandwidth if size and bandwidth else None
        found.append(
            _at_most(f"{volume}: navigation set, time over bandwidth", _ratio(seconds, ideal), 1.3)
        )
        settled = "settled_0.95"
        for what, key, bound in (("rounds", "rounds_p50", 1.0), ("page reads", "pages_p50", 20.0)):
            value = middle(runs, settled, key)
            found.append(_at_most(f"{volume}: then {what} a query, median", value, bound))
        recall = middle(runs, settled, "recall")
        found.append(_at_least(f"{volume}: then recall@10", recall, 0.95))
    peers = {"usearch-f32/view": 10.0, "faiss-hnsw/mapped": 10.0, "diskannpy/disk": 1.0}
    # As opened, the same told of the volume's limits, and once its navigation set is there, which
    # opening then waits for.
    modes = ("cold", "told", "navigation")
    for volume, mode, peer in itertools.product(part["device"], modes, peers):
        if f"stoker/{mode}/{volume}" not in part["runs"]:
            continue
        own = _p99(part["runs"], f"stoker/{mode}", volume)
        ratio = _ratio(_p99(part["runs"], peer, volume), own)
        what = f"{volume}: p99 of the first 200, {peer} over {mode}"
        found.append(_at_least(what, ratio, peers[peer]))
    return found


def _p99(runs: dict[str, Rows], key: str, volume: str) -> float | None:
    return middle(runs.get(f"{key}/{volume}", []), "p99_ms")


def _budget(part: dict[str, Any]) -> list[Bar]:
    found = []
    speeds = {key: middle(runs, "qps") for key, runs in part["runs"].items()}
    for key, speed in speeds.items():
        peer, stream, target, share, volume = key.split("/")
        if peer != "stoker" or share == "1.0":
            continue
        place = f"{stream}, {target}, {float(share):.0%}, {volume}"
        rest = f"{stream}/{target}/{share}/{volume}"
        for other, bound in (("diskannpy", 2.0), ("lancedb", 1.0)):
            if f"{other}/{rest}" in speeds:
                ratio = _ratio(speed, speeds[f"{other}/{rest}"])
                found.append(_at_least(f"budget, {place}: speed over {other}", ratio, bound))
        resident = _ratio(speed, speeds.get(f"stoker/{stream}/{target}/1.0/{volume}"))
        if target == "0.95" and share == "0.2":
            found.append(_at_least(f"budget, {place}: of resident", resident, 0.9))
        if target == "0.95" and share == "0.1" and stream == "skewed":
            found.append(_at_least(f"budget, {place}: of resident", resident, 0.7))
    return found
