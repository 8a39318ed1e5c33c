"""Condenses cold starts into one row a mode, holds the promises against it, says it in words.

Every word of the verdict follows from the numbers, in both directions: where Stoker is no better,
the sentence says that.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stoker.service.coldstart.job import MODE_ALL, MODE_LABELS, MODE_NONE, MODE_STOKER
from stoker.service.coldstart.measure import ColdRun
from stoker.service.coldstart.throttle import Volume

FIRST_QUERIES = 200
P99_RATIO_TO_NONE_MAX = 1 / 3
P99_RATIO_TO_ALL_MAX = 1.5
READY_BYTES_RATIO_MAX = 0.2
RECALL_LOSS_MAX = 0.01
RECALL_MIN = 0.95
# Start times differ from run to run: a difference of medians below half the range of the baseline's
# own starts says nothing, and neither does one of a few milliseconds.
_SLACK_S_MIN = 0.010


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median over repeats, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Condense at least one value."""
        return Spread(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class ModeRow:
    """One mode on one volume, over all repeats.

    Attributes:
        first_answer_s, ready_s: Since process start.
        p50_ms, p99_ms: Over the first `FIRST_QUERIES` queries after ready, of each query's
            median over the repeats. A query that is cold is so in every repeat; another
            program's turn on the processor hits a different query each time, and must not pass
            for a cold one.
        p99_runs_ms: The plain p99 of single cold starts, with what the machine did meanwhile.
        ready_bytes: Read from the device before ready; by the kernel's count where it has one.
        total_bytes: Read until the last of the first queries.
        pages_per_query: Mean pages read from the device per query.
        queries: How many these first queries are.
        first_completeness: What the first answer said of itself.
    """

    volume: Volume
    mode: str
    repeats: int
    first_answer_s: Spread
    ready_s: Spread
    p50_ms: float
    p99_ms: float
    p99_runs_ms: Spread
    ready_bytes: Spread
    total_bytes: Spread
    pages_per_query: Spread
    recall: Spread
    first_completeness: Spread
    index_bytes: int
    queries: int
    cold: bool

    @property
    def label(self) -> str:
        """The mode's name for a reader."""
        return MODE_LABELS[self.mode]

    @property
    def ready_ratio(self) -> float:
        """Share of the index's bytes that was read before ready."""
        return self.ready_bytes.median / self.index_bytes if self.index_bytes else 0.0


@dataclasses.dataclass(frozen=True)
class Check:
    """One promise on one volume: what it asks, what was measured, and whether it held."""

    volume: str
    name: str
    held: bool
    text: str


def summarise(runs: Sequence[ColdRun]) -> list[ModeRow]:
    """Return one row per volume and mode, in the order in which they first ran."""
    groups: dict[tuple[str, str], list[ColdRun]] = {}
    for run in runs:
        groups.setdefault((run.volume.name, run.record.mode), []).append(run)
    return [_row(group) for group in groups.values()]


def _row(runs: Sequence[ColdRun]) -> ModeRow:
    def spread(value: Callable[[ColdRun], float]) -> Spread:
        return Spread.of([value(run) for run in runs])

    return ModeRow(
        volume=runs[0].volume,
        mode=runs[0].record.mode,
        repeats=len(runs),
        first_answer_s=spread(lambda run: run.record.first_answer_s),
        ready_s=spread(lambda run: run.record.ready_s),
        p50_ms=percentile_ms(runs, 50),
        p99_ms=percentile_ms(runs, 99),
        p99_runs_ms=spread(lambda run: percentile_ms([run], 99)),
        ready_bytes=spread(_ready_bytes),
        total_bytes=spread(_total_bytes),
        pages_per_query=spread(lambda run: _mean(run.record.pages_read[measured(run)])),
        recall=spread(lambda run: run.recall),
        first_completeness=spread(lambda run: run.record.first_completeness),
        index_bytes=runs[0].record.index_bytes,
        queries=len(runs[0].record.latency_s[measured(runs[0])]),
        cold=all(run.drop.cold for run in runs),
    )


def measured(run: ColdRun) -> slice:
    """Return which queries count: the first `FIRST_QUERIES` that were asked after ready.

    What is answered before that is the first answer, which has figures of its own. Where fewer
    were asked, all modes leave one out, so that each has as many.
    """
    answered_s = run.record.answered_s
    early = sum(when <= run.record.ready_s for when in answered_s)
    return slice(early, early + min(FIRST_QUERIES, max(1, len(answered_s) - 1)))


def percentile_ms(runs: Sequence[ColdRun], percent: float) -> float:
    """Return a percentile over the first queries of their median latencies, in milliseconds."""
    latencies = np.array([run.record.latency_s[measured(run)] for run in runs])
    return float(np.percentile(np.median(latencies, axis=0), percent)) * 1e3


def _ready_bytes(run: ColdRun) -> float:
    record = run.record
    if record.ready_device_bytes >= 0:
        return float(record.ready_device_bytes)
    first = record.bytes_read[0] if record.mode == MODE_STOKER else 0
    return float(record.warm_bytes + first)


def _total_bytes(run: ColdRun) -> float:
    record = run.record
    if record.total_device_bytes >= 0:
        return float(record.total_device_bytes)
    return float(record.warm_bytes + sum(record.bytes_read))


def _mean(values: Sequence[int]) -> float:
    return float(np.mean(values)) if values else 0.0


def _half(spread: Spread) -> float:
    return (spread.high - spread.low) / 2


def checks(rows: Sequence[ModeRow]) -> list[Check]:
    """Hold the promises against the rows of each volume that has all three modes."""
    out: list[Check] = []
    for modes in _by_volume(rows):
        none, whole, ours = modes[MODE_NONE], modes[MODE_ALL], modes[MODE_STOKER]
        label = ours.volume.label
        to_none = _ratio(ours.p99_ms, none.p99_ms)
        to_all = _ratio(ours.p99_ms, whole.p99_ms)
        lag = ours.first_answer_s.median - none.first_answer_s.median
        loss = whole.recall.median - ours.recall.median
        # Until that answer both do the same, so what differs is the machine: the half-widths of
        # both ranges of starts.
        slack = max(_SLACK_S_MIN, _half(none.first_answer_s) + _half(ours.first_answer_s))
        out += [
            Check(
                label,
                "first answer no later than without warm-up",
                lag <= slack,
                f"{ours.first_answer_s.median:.3f} s against {none.first_answer_s.median:.3f} s"
                f" (together the starts vary by ±{slack * 1e3:.0f} ms)",
            ),
            Check(
                label,
                "p99 at most a third of no warm-up's",
                to_none <= P99_RATIO_TO_NONE_MAX,
                f"{ours.p99_ms:.2f} ms against {none.p99_ms:.2f} ms: {to_none:.2f} ×",
            ),
            Check(
                label,
                "p99 at most 1.5 × load-everything's",
                to_all <= P99_RATIO_TO_ALL_MAX,
                f"{ours.p99_ms:.2f} ms against {whole.p99_ms:.2f} ms: {to_all:.2f} ×",
            ),
            Check(
                label,
                "at most 20 % of the bytes read before ready",
                ours.ready_ratio <= READY_BYTES_RATIO_MAX,
                f"{ours.ready_ratio:.1%} of {ours.index_bytes / 2**20:.0f} MiB",
            ),
            Check(
                label,
                "recall@10 within 0.01 of fully loaded",
                loss <= RECALL_LOSS_MAX,
                f"{ours.recall.median:.4f} against {whole.recall.median:.4f}",
            ),
            Check(
                label,
                "recall@10 at least 0.95 of exact",
                ours.recall.median >= RECALL_MIN,
                f"{ours.recall.median:.4f}",
            ),
        ]
    return out


def verdicts(rows: Sequence[ModeRow]) -> list[str]:
    """Say in one sentence per volume what the rows show, good or bad."""
    out = []
    for modes in _by_volume(rows):
        none, whole, ours = modes[MODE_NONE], modes[MODE_ALL], modes[MODE_STOKER]
        out.append(
            f"On {ours.volume.label}, Stoker gave its first answer"
            f" {ours.first_answer_s.median:.2f} s after process start (no warm-up"
            f" {none.first_answer_s.median:.2f} s, load everything"
            f" {whole.first_answer_s.median:.2f} s) and was ready after"
            f" {ours.ready_s.median:.2f} s; the p99 of its first {ours.queries} queries after that"
            f" was {ours.p99_ms:.2f} ms,"
            f" {_times(ours.p99_ms, none.p99_ms)} without warm-up"
            f" ({none.p99_ms:.2f} ms) and"
            f" {_ratio(ours.p99_ms, whole.p99_ms):.2f} × that of load-everything,"
            f" after reading {ours.ready_ratio:.0%} of the index."
        )
    return out


def _times(ours: float, theirs: float) -> str:
    if ours <= 0 or theirs <= 0:
        return "not comparable with that"
    if theirs >= ours * 1.05:
        return f"{theirs / ours:.1f} times lower than"
    if ours >= theirs * 1.05:
        return f"{ours / theirs:.1f} times HIGHER than"
    return "about the same as"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("inf")


def _by_volume(rows: Sequence[ModeRow]) -> list[dict[str, ModeRow]]:
    volumes: dict[str, dict[str, ModeRow]] = {}
    for row in rows:
        volumes.setdefault(row.volume.name, {})[row.mode] = row
    wanted = {MODE_NONE, MODE_ALL, MODE_STOKER}
    return [modes for modes in volumes.values() if wanted <= set(modes)]


def to_json(rows: Sequence[ModeRow]) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    return [
        {**dataclasses.asdict(row), "label": row.label, "ready_ratio": row.ready_ratio}
        for row in rows
    ]
