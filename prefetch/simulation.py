"""Run placement policies over a recorded trace, in time order and from the past alone.

Keys are equal-sized units. A request's keys are taken one after the other; what our own policy
loads ahead at a request's end counts as a hit only for a later time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.placement import StokerPolicy
from stoker.prefetch.references import COMPARED, REFERENCES, reference, require
from stoker.prefetch.traces import NO_SESSION, Trace

STOKER = "stoker"
BELADY = "belady"
_CAPACITY_MAX = 1 << 40
_CHUNK = 1 << 16  # accesses that are Python objects at a time: a long trace stays small


@dataclass(frozen=True)
class Outcome:
    """One policy on one trace at one capacity; counts are of the measured part.

    Attributes:
        accesses: Measured accesses.
        hits: Of those, hits.
        loads_demand: Misses: units read because they were asked for.
        loads_ahead: Units read ahead.
        hit_ratio: ``hits / accesses``.
        belady_share: ``hit_ratio`` over that of Belady's policy; None where that was not run.
        bytes_demand: ``loads_demand`` times the size of a unit.
        bytes_ahead: ``loads_ahead`` times the size of a unit.
        prefetch: What became of the units read ahead, over the whole trace.
        switches: Changes of the acting policy with their evidence (our own policy only).
        seconds: How long the run took.
    """

    policy: str
    capacity: int
    accesses: int
    hits: int
    loads_demand: int
    loads_ahead: int
    hit_ratio: float
    belady_share: float | None
    bytes_demand: int
    bytes_ahead: int
    prefetch: dict[str, int] = field(default_factory=dict)
    switches: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def parse_capacities(text: str, footprint: int) -> list[int]:
    """Return capacities from "100,5%": numbers of keys, or shares of the footprint.

    Raises:
        InputError: not a number, or below one key.
    """
    capacities = []
    for word in text.split(","):
        word = word.strip()
        try:
            value = float(word[:-1]) / 100.0 * footprint if word.endswith("%") else float(int(word))
        except (ValueError, OverflowError) as error:
            raise InputError(f"capacity {word!r}: expected a number or a percentage") from error
        if not math.isfinite(value) or value <= 0.0 or not (word.endswith("%") or value >= 1.0):
            raise InputError(f"capacity {word!r} must be above 0")
        if value > _CAPACITY_MAX:
            raise InputError(f"capacity {word!r} must be at most {_CAPACITY_MAX:,} keys")
        capacities.append(max(1, int(value)))
    return capacities


def parse_policies(text: str) -> list[str]:
    """Return policy names from "stoker,lru" or "all" (ours, those compared with, Belady)."""
    names: list[str] = []
    for word in text.split(","):
        chosen = [STOKER, *COMPARED, BELADY] if word.strip() == "all" else [word.strip()]
        for name in chosen:
            if name != STOKER and name not in REFERENCES:
                raise InputError(
                    f"policy {name!r}, expected one of stoker, {', '.join(REFERENCES)}, all"
                )
            if name not in names:
                names.append(name)
    return names


def measured_mask(trace: Trace, warm_until: str | None) -> NDArray[np.bool_]:
    """Return which accesses are measured.

    Args:
        trace: The trace.
        warm_until: None measures all. Else seconds since the trace's start ("86400", also "2d",
            "12h", "30m"), a share of its accesses ("50%"), or, where the trace has no times, a
            number of accesses.
    """
    count = len(trace)
    if warm_until is None:
        return np.ones(count, dtype=bool)
    word = warm_until.strip()
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    try:
        scale = 0.01 if word.endswith("%") else units.get(word[-1:], 0.0)
        value = float(word[:-1]) * scale if scale else float(word)
    except ValueError as error:
        raise InputError(f"--warm-until {warm_until!r}: expected seconds or a share") from error
    if not 0.0 <= value < math.inf:
        raise InputError(f"--warm-until {warm_until!r} must be at least 0")
    if word.endswith("%"):
        return np.asarray(np.arange(count) >= value * count)
    if trace.times_s is None:
        if scale:
            raise InputError(f"--warm-until {warm_until!r}: this trace has no times")
        return np.asarray(np.arange(count) >= value)
    return np.asarray(trace.times_s >= trace.times_s[0] + value)


def run_stoker(trace: Trace, capacity: int) -> tuple[NDArray[np.bool_], list[int], StokerPolicy]:
    """Run our own policy; return hits, loads ahead per access index, and the policy."""
    policy = StokerPolicy(capacity)
    hits = np.zeros(len(trace), dtype=bool)
    ahead: list[int] = []
    if trace.sessions is None or trace.times_s is None:
        access = policy.access
        for at, (key,) in _rows(trace.keys):
            decision = access(key)
            hits[at] = decision.hit
            ahead += [at] * len(decision.ahead)
        return hits, ahead, policy
    ends = np.diff(trace.requests, append=-1) != 0
    for at, (key, number, time_s, end) in _rows(trace.keys, trace.sessions, trace.times_s, ends):
        session = None if number == NO_SESSION else number
        decision = policy.access(key, session=session, time_s=time_s)
        hits[at] = decision.hit
        ahead += [at] * len(decision.ahead)
        if end:
            ahead += [at for move in policy.close_request() if move.ahead]
    return hits, ahead, policy


def _rows(*columns: NDArray[Any]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (index, values) of columns of one length, as Python's own numbers."""
    for start in range(0, len(columns[0]), _CHUNK):
        part = [column[start : start + _CHUNK].tolist() for column in columns]
        yield from enumerate(zip(*part, strict=True), start)


def simulate(
    trace: Trace,
    *,
    policies: Sequence[str],
    capacities: Sequence[int],
    measured: NDArray[np.bool_],
    unit_bytes: int = 4096,
) -> list[Outcome]:
    """Run each policy at each capacity.

    Args:
        trace: What happened.
        policies: Names as `parse_policies` gives them.
        capacities: In keys, each at least 1.
        measured: Which accesses count, bool, shape (n,).
        unit_bytes: Size of a unit, for the byte figures.

    Raises:
        InputError: no access is measured.
        UnavailableError: a reference policy is asked for and `libcachesim` is not installed.
    """
    accesses = int(np.count_nonzero(measured))
    if accesses == 0:
        raise InputError("no access is left to measure; is --warm-until beyond the trace's end?")
    require(policies)  # before a long run, not after it
    outcomes = []
    for capacity in capacities:
        belady: float | None = None
        ordered = sorted(policies, key=lambda name: name != BELADY)
        done: dict[str, Outcome] = {}
        for name in ordered:
            started = time.perf_counter()
            prefetch: dict[str, int] = {}
            switches: list[dict[str, Any]] = []
            loads_ahead = 0
            if name == STOKER:
                hits, ahead, policy = run_stoker(trace, capacity)
                prefetch = policy.prefetch.to_dict()
                loads_ahead = int(np.count_nonzero(measured[ahead])) if ahead else 0
                switches = [vars(switch) for switch in policy.switches]
            else:
                hits = reference(name, capacity).run(trace.keys)
            count = int(np.count_nonzero(hits & measured))
            ratio = count / accesses
            if name == BELADY:
                belady = ratio
            done[name] = Outcome(
                policy=name,
                capacity=capacity,
                accesses=accesses,
                hits=count,
                loads_demand=accesses - count,
                loads_ahead=loads_ahead,
                hit_ratio=ratio,
                belady_share=ratio / belady if belady else None,
                bytes_demand=(accesses - count) * unit_bytes,
                bytes_ahead=loads_ahead * unit_bytes,
                prefetch=prefetch,
                switches=switches,
                seconds=time.perf_counter() - started,
            )
        outcomes += [done[name] for name in policies]
    return outcomes
