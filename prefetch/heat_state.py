"""The heat graph's state as bytes, and back.

Version 2 has neither tail nor newest accesses, version 3 a tail, version 4 the newest accesses and
perhaps a tail, version 5 topics, the rest as in 4, version 6 clocks with offsets to the heat's
time, and perhaps all of that. The oldest that holds what there is is written:
an older Stoker reads what it can, and refuses the rest by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.coverage_curve import RecentAccesses
from stoker.prefetch.heat_clock import HEAT_S_MAX, NEVER
from stoker.prefetch.heat_tables import EDGE_BLOCK, HeatTables
from stoker.prefetch.rank_tracker import RankTracker
from stoker.prefetch.snapshot import SnapshotCorrupt, kind_of, pack, unpack
from stoker.prefetch.tail_sketch import TailSketch

_KIND = "heat graph 2"
_KIND_TAIL = "heat graph 3"
_KIND_RECENT = "heat graph 4"
_KIND_TOPICS = "heat graph 5"
_KIND_CLOCKS = "heat graph 6"
_LATER = (_KIND_TAIL, _KIND_RECENT, _KIND_TOPICS, _KIND_CLOCKS)
# In the order in which they are written.
_ARRAYS = (
    *("count_parts", "count_landmarks", "last", "deleted", "rank", "tracker_x"),
    *("tracker_residual", "edge_targets", "edge_weights", "loose_tails", "loose_heads"),
    *("loose_times", "tail", "recent_numbers", "recent_times", "recent_runs"),
    *("recent_amounts", "recent_kinds", "topics"),
)


def to_snapshot(graph: HeatTables) -> bytes:
    """Return the whole state; equal state gives equal bytes."""
    count = len(graph._keys)
    values: dict[str, Any] = {
        "keys": [list(key) for key in graph._keys],
        "sessions": [list(session) for session in graph._sessions.items()],
        **graph._clock.to_values(),
        "events_applied": graph.events_applied,
        "edge_landmark": None if graph._edges.landmark == NEVER else graph._edges.landmark,
        "tracked": graph._tracker is not None,
        "half_lives": [graph.settings.heat_decay, graph.settings.heat_half_life_s],
    }
    arrays: dict[str, NDArray[Any]] = {
        "count_parts": graph._counts.parts[:, :count],
        "count_landmarks": graph._counts.landmarks,
        "last": graph._last[:count],
        "deleted": graph._deleted[:count],
        "rank": graph._rank,
        "tracker_x": np.empty(0) if graph._tracker is None else graph._tracker.x,
        "tracker_residual": np.empty(0) if graph._tracker is None else graph._tracker.residual,
        "edge_targets": graph._edges.targets[:count],
        "edge_weights": graph._edges.weights[:count],
        "loose_tails": graph._loose[0],
        "loose_heads": graph._loose[1],
        "loose_times": graph._loose[2],
    }
    kind = _KIND
    if graph._tail is not None:
        kind = _KIND_TAIL
        values["tail"], arrays["tail"] = graph._tail.to_state()
    recent = graph._recent
    if len(recent):
        kind = _KIND_RECENT
        arrays |= _packed(recent)
    if graph.topics is not None:
        kind = _KIND_TOPICS
        arrays["topics"] = np.frombuffer(graph.topics.to_bytes(), np.uint8)
    if not graph._clock.is_plain:
        kind = _KIND_CLOCKS
    return write_snapshot(kind, values, arrays)


def _packed(recent: RecentAccesses) -> dict[str, NDArray[Any]]:
    """The newest accesses in about a quarter of their bytes, which a cold start has to read.

    A search is one moment for all of its chunks, so times are written once a run; and there are few
    amounts, so each access has the place of its own in a table.
    """
    times = recent.times_s
    starts = np.flatnonzero(np.append(True, times[1:] != times[:-1]))
    amounts, kinds = np.unique(recent.amounts, return_inverse=True)
    return {
        "recent_numbers": recent.numbers.astype(np.int32),
        "recent_times": times[starts],
        "recent_runs": np.diff(np.append(starts, len(times))).astype(np.uint32),
        "recent_amounts": amounts,
        "recent_kinds": kinds.astype(np.uint8 if len(amounts) <= 256 else np.uint32),
    }


def _unpack(recent: RecentAccesses, arrays: Mapping[str, NDArray[Any]]) -> None:
    numbers, kinds, runs = (arrays[f"recent_{name}"] for name in ("numbers", "kinds", "runs"))
    times, amounts = arrays["recent_times"], arrays["recent_amounts"]
    timed = int(runs.sum()) if len(runs) == len(times) else -1
    if not len(numbers) == len(kinds) == timed or int(kinds.max(initial=0)) >= len(amounts):
        raise SnapshotCorrupt(
            f"heat snapshot has {len(numbers)} newest accesses, {len(kinds)} amounts and "
            f"{timed} times of them"
        )
    recent.add(
        numbers.astype(np.int64),
        np.repeat(times, runs),
        amounts[kinds],
        np.ones(len(numbers), dtype=bool),
    )


def write_snapshot(kind: str, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """Pack a state that `read_snapshot` gave; the same state gives the same bytes."""
    return pack(kind, values, {name: arrays[name] for name in _ARRAYS if name in arrays})


def read_snapshot(data: bytes) -> tuple[str, dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the kind, the plain values and the arrays of a snapshot.

    Raises:
        SnapshotCorrupt: the bytes are damaged, or no heat graph's.
    """
    claimed = kind_of(data)
    kind = claimed if claimed in _LATER else _KIND
    return kind, *unpack(kind, data)


def restore(graph: HeatTables, data: bytes) -> None:
    """Fill an empty graph with what `to_snapshot` saved.

    A checksum says that bytes are as they were written, not by whom: parts of a heat topic come
    from other replicas. So what does not fit together is refused here, where the caller can start
    from the log, and not met by a later event.

    Raises:
        SnapshotCorrupt: the bytes are damaged, were written under other settings, or say what no
            graph can be. The graph is not to be used then.
    """
    _, values, arrays = read_snapshot(data)
    try:
        _fill(graph, values, arrays)
        _check(graph)
    except SnapshotCorrupt:
        raise
    except (ArithmeticError, InputError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise SnapshotCorrupt(f"heat snapshot does not fit together: {error!r}") from error


def _fill(graph: HeatTables, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    config = graph.settings
    if values["half_lives"] != [config.heat_decay, config.heat_half_life_s]:
        raise SnapshotCorrupt(
            f"heat snapshot has decay {values['half_lives']}, settings say "
            f"{[config.heat_decay, config.heat_half_life_s]}"
        )
    if arrays["edge_targets"].shape[1] != config.graph_edges_per_key_max:
        raise SnapshotCorrupt(
            f"heat snapshot has {arrays['edge_targets'].shape[1]} edges per key, settings say "
            f"{config.graph_edges_per_key_max}"
        )
    for tenant, chunk_id in values["keys"]:
        graph._table.add(tenant, chunk_id)
        graph._keys.append((tenant, chunk_id))
    count = len(graph._keys)
    graph._reserve(count)
    graph._counts.parts[:, :count] = arrays["count_parts"]
    graph._counts.landmarks = arrays["count_landmarks"]
    graph._last[:count] = arrays["last"]
    graph._deleted[:count] = arrays["deleted"]
    graph._rank = arrays["rank"]
    graph._edges.targets[:count] = arrays["edge_targets"]
    graph._edges.weights[:count] = arrays["edge_weights"]
    if values["edge_landmark"] is not None:
        graph._edges.landmark = float(values["edge_landmark"])
    if values["tracked"]:
        tracker = RankTracker(graph._edges, 0, damping=config.pagerank_damping)
        tracker.x, tracker.residual = arrays["tracker_x"], arrays["tracker_residual"]
        tracker.count = len(tracker.x)
        graph._tracker = tracker
    tails, heads = (
        arrays[f"loose_{n}"].astype(np.int64, casting="safe") for n in ("tails", "heads")
    )
    graph._loose = (tails, heads, arrays["loose_times"])
    for tenant, session, time_s, numbers in values["sessions"]:
        graph._sessions.load(tenant, session, time_s, numbers)
    graph._clock.load_values(values)
    graph.events_applied = int(values["events_applied"])
    if "recent_numbers" in arrays:
        _unpack(graph._recent, arrays)
    if "topics" in arrays and graph.topics is not None:
        graph.topics.restore(arrays["topics"].tobytes())
    if "tail" in arrays:
        graph._tail = TailSketch.from_state(
            values["tail"],
            arrays["tail"],
            half_life_s=config.heat_half_life_s,
            buckets=config.heat_tail_buckets,
        )


def _check(graph: HeatTables) -> None:
    """Raise InputError where what was filled in breaks an invariant; milliseconds at any size."""
    count = len(graph._keys)
    newest_s = graph._clock.newest_s
    recent, tracker = graph._recent, graph._tracker
    if len(graph._table) != count:
        raise InputError(f"{count} keys, of which {len(graph._table)} are different")
    rates = np.array(graph._counts.law.rates)
    landmarks = graph._counts.landmarks
    if landmarks.shape != rates.shape:
        raise InputError(f"{len(landmarks)} landmarks, expected {len(rates)}")
    if (landmarks > newest_s * rates).any() or graph._edges.landmark > newest_s * graph._edges.rate:
        raise InputError(f"landmarks {landmarks}, {graph._edges.landmark} are after all events")
    numbers = [number for *_, row in graph._sessions.items() for number in row]
    if len({len(part) for part in graph._loose}) > 1 or len(graph._loose[0]) >= EDGE_BLOCK:
        raise InputError(f"{[len(part) for part in graph._loose]} loose edges")
    if len(graph._rank) > count or (tracker is not None and tracker.count > count):
        raise InputError(f"more ranks than {count} keys")
    if tracker is not None and len(tracker.residual) != tracker.count:
        raise InputError(f"{len(tracker.residual)} residuals of {tracker.count} ranks")
    tracked = () if tracker is None else (tracker.x, tracker.residual)
    huge = float(np.finfo(np.float64).max)
    for name, found, least, most in (
        ("counts", (graph._counts.parts,), 0.0, huge),
        ("landmarks", (landmarks,), NEVER, huge),
        ("events", (np.array([graph.events_applied]),), 0, 1 << 62),
        ("times", (graph._last[:count], graph._deleted[:count]), NEVER, newest_s),
        ("ranks", (graph._rank, *tracked), -huge, huge),
        ("edges' heads", (graph._edges.targets[:count],), -1, count - 1),
        ("edges' weights", (graph._edges.weights[:count],), 0.0, huge),
        ("loose edges", graph._loose[:2], 0, count - 1),
        ("loose edges' times", (graph._loose[2],), -HEAT_S_MAX, newest_s),
        ("sessions' chunks", (np.array(numbers, dtype=np.int64),), 0, count - 1),
        ("newest accesses", (recent.numbers,), np.iinfo(np.int64).min, count - 1),
        ("newest accesses' times", (recent.times_s,), -HEAT_S_MAX, newest_s),
        ("newest accesses' amounts", (recent.amounts,), 0.0, huge),
    ):
        for array in found:
            # Written so that what is not a number fails.
            if array.size and not (array.min() >= least and array.max() <= most):
                raise InputError(
                    f"{name}: expected {least} to {most}, found {array.min()} to {array.max()}"
                )
