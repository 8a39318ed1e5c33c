"""From starts to figures: latency from the due moment, time-to-SLO, windows, interference, goals.

Every start of a method sees the same requests at the same moments, so latencies are compared
request by request: a request that meets cold pages, or stands in a queue behind one that does, is
slow in every start; another program's turn on the processor hits a different one each time. So
percentiles are over the requests, of each one's median over the starts; the plain figures of single
starts are kept beside them.

Steady is measured in the same run, of the replica that has loaded everything, once it has. Time-to-
SLO is the first moment, since process start, from which on every window of N seconds holds its p99
within 1.5 times a steady window's. The p99 of a window of some hundred requests is about its second
or third slowest, so windows differ where nothing changes: a steady window is the worst of the
steady ones, or the steady replica itself would break what is asked of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.service.coldstart.bench_options import IN_TRAFFIC, METHOD_LABELS, BenchOptions
from stoker.service.coldstart.load_run import Start
from stoker.service.coldstart.summary import Check, Spread

Floats = NDArray[np.float64]

SLO_FACTOR = 1.5
FIRST_S = 60.0
ORACLE_FACTOR = 1.25
HARM_FACTOR = 1.1
WINDOW_REPORTED_S = 10.0
_STEP_S = 0.1
# Once everything is loaded, what still stood in a queue is let through before steadiness counts.
_SETTLED_S = 1.0


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """One method in one scenario, over all its starts.

    Attributes:
        opened_s, begins_s, first_answer_s, heat_s, ready_s: Since process start; the traffic begins
            at ``begins_s``.
        first_p99_ms: Of the requests due in the first minute after ready (in a shorter run: until
            its end), of each one's median latency over the starts.
        first_p99_runs_ms: The same of single starts.
        whole_p99_ms: Of all requests since the traffic began.
        windows_ms: p99 by windows of 10 s since the traffic began.
        loading_p99_ms, loaded_p99_ms: Of the requests due before and after ready; None without any.
        slo_s: Time-to-SLO since process start; None where it was never reached.
        slo_runs_s: The same of single starts; None likewise.
        slo_bytes: Read from the device until then; None without a time, -1 where nobody counts.
        load_bytes: Read by the loading itself.
        ready_bytes: Read from the device until ready, by the kernel's count.
        heat_keys: Chunks with heat that the warm-up knew, the least of the starts.
        pages_per_query: Read by the requests due after ready, the mean.
        reading_ratio: Share of the requests due after ready that read anything: the part of a
            tail that is the cold index and not the machine.
        predicted_hit_ratio: By the warm-up's receipt, the mean of the starts; None without one.
        served_ratio: What the receipt measured of that: the share of the answers after it that
            the warm-up's pages served, the mean of the starts; None where none came.
        measured_hit_ratio: Share of the looks at a record that found its page, after ready, also
            where an earlier search had read it: not what a receipt predicts.
    """

    scenario: str
    method: str
    starts: int
    opened_s: Spread
    begins_s: Spread
    first_answer_s: Spread
    heat_s: Spread
    ready_s: Spread
    first_p99_ms: float
    first_p99_runs_ms: Spread
    whole_p99_ms: float
    windows_ms: list[float]
    loading_p99_ms: float | None
    loaded_p99_ms: float | None
    slo_s: float | None
    slo_runs_s: list[float | None]
    slo_bytes: float | None
    load_bytes: Spread
    ready_bytes: Spread
    heat_keys: int
    recall: Spread
    pages_per_query: Spread
    reading_ratio: Spread
    predicted_hit_ratio: float | None
    served_ratio: float | None
    measured_hit_ratio: Spread
    cold: bool

    @property
    def label(self) -> str:
        """The method's name for a reader."""
        return METHOD_LABELS[self.method]


@dataclasses.dataclass(frozen=True)
class ScenarioFigures:
    """One scenario's rows and curves.

    Attributes:
        steady_p99_ms: What all are held against, and ``steady_of``, whose it is.
        slo_ms: What the p99 of a window may be for time-to-SLO.
        arrivals_s: When requests were due, since the traffic began.
        latency_ms: Method to each request's median latency.
    """

    name: str
    steady_p99_ms: float
    slo_ms: float
    steady_of: str
    rows: list[MethodRow]
    arrivals_s: Floats
    latency_ms: dict[str, Floats]

    def row(self, method: str) -> MethodRow | None:
        """Return a method's row, or None where it was not measured."""
        return next((row for row in self.rows if row.method == method), None)


def figures(
    starts: Sequence[Start], arrivals_s: Floats, options: BenchOptions
) -> list[ScenarioFigures]:
    """Condense the starts, scenario by scenario in the order in which they ran."""
    names = dict.fromkeys(start.scenario for start in starts)
    return [
        _scenario(name, [s for s in starts if s.scenario == name], arrivals_s, options)
        for name in names
    ]


def _scenario(
    name: str, starts: Sequence[Start], arrivals_s: Floats, options: BenchOptions
) -> ScenarioFigures:
    groups: dict[str, list[Start]] = {}
    for start in starts:
        groups.setdefault(start.method, []).append(start)
    tables = {method: latencies(group, arrivals_s) for method, group in groups.items()}
    medians = {method: np.median(table, axis=0) for method, table in tables.items()}
    steady_of = "all" if "all" in groups else next(iter(groups))
    ready = median_of(groups[steady_of], lambda s: s.record.ready_s - s.record.begins_s)
    settled = min(max(ready, 0.0) + _SETTLED_S, options.seconds / 2)
    steady = p99(medians[steady_of][arrivals_s >= settled])
    worst = worst_window(
        medians[steady_of], arrivals_s, begin_s=settled, window_s=options.window_s,
        end_s=options.seconds,
    )  # fmt: skip
    limit = SLO_FACTOR * max(steady, worst)
    rows = [
        _row(name, group, tables[method], arrivals_s, limit, options)
        for method, group in groups.items()
    ]
    curves = {method: median * 1e3 for method, median in medians.items()}
    return ScenarioFigures(name, steady * 1e3, limit * 1e3, steady_of, rows, arrivals_s, curves)


def latencies(starts: Sequence[Start], arrivals_s: Floats) -> Floats:
    """Return seconds from the due moment to the answer: float64, shape (starts, requests)."""
    return np.array([s.record.done_s - (arrivals_s + s.record.begins_s) for s in starts])


def median_of(starts: Sequence[Start], value: Callable[[Start], float]) -> float:
    """Return the median over starts."""
    return float(np.median([value(start) for start in starts]))


def p99(values: Floats) -> float:
    """Return the 99th percentile; not-a-number of nothing."""
    return float(np.percentile(values, 99)) if len(values) else float("nan")


def worst_window(
    latency_s: Floats, arrivals_s: Floats, *, begin_s: float, window_s: float, end_s: float
) -> float:
    """Return the highest p99 of the windows between two moments, seconds; 0 where none fits."""
    worst = 0.0
    for begin in np.arange(begin_s, end_s - window_s + _STEP_S / 2, _STEP_S):
        first, last = np.searchsorted(arrivals_s, [begin, begin + window_s])
        if last > first:
            worst = max(worst, p99(latency_s[first:last]))
    return worst


def time_to_slo(
    latency_s: Floats, arrivals_s: Floats, *, limit_s: float, window_s: float, end_s: float
) -> float | None:
    """Return the first moment of traffic from which on every window holds; None if none does.

    Args:
        latency_s: float64, shape (n,).
        arrivals_s: float64, shape (n,), rising: due moments since the traffic began.
        limit_s: What the p99 of a window may be.
        window_s: Length of a window; windows begin every tenth of a second.
        end_s: The end of the traffic; no window reaches beyond.
    """
    begins = np.arange(0.0, max(end_s - window_s, 0.0) + _STEP_S / 2, _STEP_S)
    reached: float | None = None
    for begin in begins[::-1]:
        first, last = np.searchsorted(arrivals_s, [begin, begin + window_s])
        if last > first and p99(latency_s[first:last]) > limit_s:
            break
        reached = float(begin)
    return reached


def windows(latency_s: Floats, arrivals_s: Floats, *, window_s: float, end_s: float) -> list[float]:
    """Return the p99 of each whole or last window, seconds; not-a-number where nothing was due."""
    edges = np.arange(0.0, end_s, window_s)
    parts = [
        latency_s[slice(*np.searchsorted(arrivals_s, [edge, edge + window_s]))] for edge in edges
    ]
    return [p99(part) for part in parts]


def _row(
    scenario: str,
    starts: Sequence[Start],
    table: Floats,
    arrivals_s: Floats,
    limit_s: float,
    options: BenchOptions,
) -> MethodRow:
    def spread(value: Callable[[Start], float]) -> Spread:
        return Spread.of([value(start) for start in starts])

    median = np.median(table, axis=0)
    ready = median_of(starts, lambda s: s.record.ready_s - s.record.begins_s)
    begins = median_of(starts, lambda s: s.record.begins_s)
    first = (arrivals_s >= ready) & (arrivals_s < ready + FIRST_S)
    if not first.any():
        first = arrivals_s >= 0.0
    how: dict[str, Any] = {
        "limit_s": limit_s,
        "window_s": options.window_s,
        "end_s": options.seconds,
    }
    slo = time_to_slo(median, arrivals_s, **how)
    runs = [time_to_slo(row, arrivals_s, **how) for row in table]
    slo_s = None if slo is None else slo + begins
    loading, loaded = arrivals_s < ready, arrivals_s >= ready
    return MethodRow(
        scenario=scenario,
        method=starts[0].method,
        starts=len(starts),
        opened_s=spread(lambda s: s.record.opened_s),
        begins_s=spread(lambda s: s.record.begins_s),
        first_answer_s=spread(lambda s: float(s.record.done_s.min())),
        heat_s=spread(lambda s: s.record.heat_s),
        ready_s=spread(lambda s: s.record.ready_s),
        first_p99_ms=p99(median[first]) * 1e3,
        first_p99_runs_ms=Spread.of([p99(row[first]) * 1e3 for row in table]),
        whole_p99_ms=p99(median) * 1e3,
        windows_ms=[
            value * 1e3
            for value in windows(
                median, arrivals_s, window_s=WINDOW_REPORTED_S, end_s=options.seconds
            )
        ],
        loading_p99_ms=p99(median[loading]) * 1e3 if loading.any() else None,
        loaded_p99_ms=p99(median[loaded]) * 1e3 if loaded.any() else None,
        slo_s=slo_s,
        slo_runs_s=[
            None if run is None else run + start.record.begins_s
            for run, start in zip(runs, starts, strict=True)
        ],
        slo_bytes=None
        if slo_s is None
        else median_of(starts, lambda s: float(s.record.bytes_at(slo_s))),
        load_bytes=spread(lambda s: float(s.record.load_bytes)),
        ready_bytes=spread(lambda s: float(s.record.bytes_at(s.record.ready_s))),
        heat_keys=min(start.record.heat_keys for start in starts),
        recall=spread(lambda s: s.recall),
        pages_per_query=spread(lambda s: float(np.mean(_read(s, arrivals_s)))),
        reading_ratio=spread(lambda s: float(np.mean(_read(s, arrivals_s) > 0))),
        predicted_hit_ratio=_of_receipts(starts, "predicted_hit_ratio"),
        served_ratio=_of_receipts(starts, "measured_hit_ratio"),
        measured_hit_ratio=spread(_hit_ratio),
        cold=all(start.drop.cold for start in starts),
    )


def _of_receipts(starts: Sequence[Start], name: str) -> float | None:
    found = [s.record.receipt.get(name) for s in starts if s.record.receipt]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


def _hit_ratio(start: Start) -> float:
    looks = start.record.page_hits + start.record.page_misses
    return start.record.page_hits / looks if looks else 1.0


def _read(start: Start, arrivals_s: Floats) -> NDArray[np.int64]:
    """Return the pages that each request due after ready read; of all where none is."""
    after = arrivals_s >= start.record.ready_s - start.record.begins_s
    return start.record.pages_read[after] if after.any() else start.record.pages_read


def harm(figure: ScenarioFigures) -> tuple[float, float, int] | None:
    """Compare the requests that came while Stoker loaded with the same ones where nothing did.

    Returns:
        (p99 with the warm-up on, p99 with it off, how many requests), ms; None where one of the
        two was not measured or no request came meanwhile.
    """
    ours, none = figure.row("stoker"), figure.row("none")
    if ours is None or none is None:
        return None
    due = figure.arrivals_s < ours.ready_s.median - ours.begins_s.median
    if not due.any():
        return None
    return (
        p99(figure.latency_ms["stoker"][due]),
        p99(figure.latency_ms["none"][due]),
        int(due.sum()),
    )


def goals(found: Sequence[ScenarioFigures], index_bytes: int, options: BenchOptions) -> list[Check]:
    """Hold what is promised against the figures, scenario by scenario."""
    out: list[Check] = []
    span = f"first {min(FIRST_S, options.seconds):g} s"
    for figure in found:
        ours, oracle = figure.row("stoker"), figure.row("oracle")
        if ours is None:
            continue
        if figure.name == IN_TRAFFIC:
            out += _unharmed(figure)
            continue
        ratio = ours.first_p99_ms / figure.steady_p99_ms
        share = ours.load_bytes.median / index_bytes
        out.append(
            Check(
                figure.name,
                f"{span} after ready: p99 at most {SLO_FACTOR} × steady,"
                f" with at most {options.budget_ratio:.0%} of the bytes loaded",
                ratio <= SLO_FACTOR and share <= options.budget_ratio + 1e-3,
                f"{ours.first_p99_ms:.2f} ms against {figure.steady_p99_ms:.2f} ms: {ratio:.2f} ×,"
                f" with {share:.1%}",
            )
        )
        if oracle is not None and figure.name in ("restart", "scale-out"):
            out.append(_against_oracle(figure.name, ours, oracle))
    return out


def _unharmed(figure: ScenarioFigures) -> list[Check]:
    harmed = harm(figure)
    if harmed is None:
        return []
    on, off, count = harmed
    title = f"no harm: p99 while it loads at most {HARM_FACTOR} × the same requests' without"
    text = f"{on:.2f} ms against {off:.2f} ms over {count} requests"
    return [Check(figure.name, title, on <= HARM_FACTOR * off, text)]


def _against_oracle(name: str, ours: MethodRow, oracle: MethodRow) -> Check:
    title = f"time-to-SLO at most {ORACLE_FACTOR} × the oracle's"
    if ours.slo_s is None:
        return Check(name, title, False, "never reached")
    if oracle.slo_s is None:
        return Check(name, title, True, f"{ours.slo_s:.2f} s; the oracle never reached it")
    ratio = ours.slo_s / oracle.slo_s
    text = f"{ours.slo_s:.2f} s against {oracle.slo_s:.2f} s: {ratio:.2f} ×"
    return Check(name, title, ratio <= ORACLE_FACTOR, text)
