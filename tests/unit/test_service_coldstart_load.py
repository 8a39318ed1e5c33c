"""The cold-start benchmark's pieces: schedules, drift, page lists, time-to-SLO, goals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError, InputError, UnavailableError
from stoker.service.coldstart import page_lists, workload
from stoker.service.coldstart.bench_options import BenchOptions, small
from stoker.service.coldstart.bench_report import markdown, to_document
from stoker.service.coldstart.load_job import KINDS, LoadJob, LoadRecord
from stoker.service.coldstart.load_run import Start, start_replica
from stoker.service.coldstart.page_cache import CacheDrop
from stoker.service.coldstart.page_trace import PageTrace, page_keys, pages_of
from stoker.service.coldstart.slo import figures, goals, harm, time_to_slo, windows, worst_window

MIB = 1 << 20


def test_a_schedule_keeps_bursts_in_proportion_and_repeats_a_short_recording() -> None:
    plan = workload.schedule(
        np.array([10.0, 11.0, 11.0, 20.0]), count=3, seconds=2.0, origin="file"
    )
    assert plan.arrivals_s.tolist() == pytest.approx([0.0, 0.2, 0.2])
    assert plan.speed == pytest.approx(5.0)
    again = workload.schedule(np.array([0.0, 1.0]), count=5, seconds=5.0, origin="file")
    assert again.arrivals_s.tolist() == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    with pytest.raises(InputError, match="nothing to speed up"):
        workload.schedule(np.zeros(3), count=2, seconds=1.0, origin="file")


def test_arrivals_are_read_from_csv_text_and_recordings(tmp_path: Path) -> None:
    csv = tmp_path / "azure.csv"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert workload.read_arrivals(csv).tolist() == pytest.approx([0.0, 4.314579])
    text = tmp_path / "times.txt"
    text.write_text("5\n3.5\n4\n")
    assert workload.read_arrivals(text).tolist() == [0.0, 0.5, 1.5]
    trace = tmp_path / "0_trace.jsonl"
    rows = [
        {"timestamp": str(time), "hash_ids": {"passages_ids": passages}, "session_id": "s"}
        for time, passages in ((7, [3, 1]), (0, [2]), (9, []))
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert workload.read_arrivals(trace).tolist() == [0.0, 7.0, 9.0]
    requests = workload.read_requests(trace, 100)
    assert requests.passages.tolist() == [2, 3]  # without passages there is nothing to ask for
    assert requests.sessions == ["s", "s"]
    assert len(requests.part(1, 2)) == 1
    (tmp_path / "one.txt").write_text("1\n")
    with pytest.raises(InputError, match="at least 2 arrivals"):
        workload.read_arrivals(tmp_path / "one.txt")
    with pytest.raises(InputError, match="no such file"):
        workload.read_arrivals(tmp_path / "nowhere")


def test_generated_traffic_is_skewed_ordered_and_follows_from_its_seed() -> None:
    one = workload.generated_requests(2_000, 500, seed=3)
    two = workload.generated_requests(2_000, 500, seed=3)
    assert (one.passages == two.passages).all()
    assert (np.diff(one.times_s) >= 0).all()
    counts = np.sort(np.bincount(one.passages, minlength=500))[::-1]
    assert counts[:50].sum() > 0.3 * counts.sum()  # a tenth of the passages
    assert len(set(one.sessions)) < len(one)


def test_drift_moves_popularity_to_passages_that_were_nobodys() -> None:
    before = np.arange(50)
    after = np.array([1, 1, 1, 2, 60, 60])
    moved = workload.drifted(after, before, 200, ratio=1.0, seed=1)
    assert sorted(np.unique(moved, return_counts=True)[1].tolist()) == [1, 2, 3]
    assert not set(moved.tolist()) & {*before.tolist(), 60}
    assert (workload.drifted(after, before, 200, ratio=0.0, seed=1) == after).all()


def test_queries_lie_near_their_passages() -> None:
    real = workload.generated_vectors(300, 32, seed=1)
    passages = np.arange(0, 300, 3)
    queries = workload.query_vectors(passages, real, seed=2)
    assert (np.argmax(queries @ real.T, axis=1) == passages).mean() > 0.8
    assert np.linalg.norm(queries, axis=1) == pytest.approx(1.0, abs=1e-5)


def _trace(*queries: list[tuple[str, int]]) -> PageTrace:
    rows = [(KINDS.index(k), u, n) for n, pages in enumerate(queries) for k, u in pages]
    kinds, units, numbers = zip(*rows, strict=True)
    return PageTrace(
        np.array(kinds, np.uint8), np.array(units, np.uint32), np.array(numbers, np.int64)
    )


def _named(keys: np.ndarray) -> list[tuple[str, int]]:
    kinds, units = pages_of(keys)
    return [(KINDS[kind], int(unit)) for kind, unit in zip(kinds, units, strict=True)]


def test_page_lists_of_a_recording() -> None:
    trace = _trace([("links", 1), ("codes", 4)], [("links", 2)], [("links", 1), ("refine", 0)])
    assert _named(page_lists.most_recent(trace)) == [
        ("refine", 0), ("links", 1), ("links", 2), ("codes", 4),
    ]  # fmt: skip
    assert _named(page_lists.most_needed(trace)) == [
        ("links", 1), ("codes", 4), ("links", 2), ("refine", 0),
    ]  # fmt: skip
    pages = {"upper": 1, "links": 2, "codes": 1, "vectors": 1}
    assert _named(page_lists.sequential(pages)) == [
        ("upper", 0), ("codes", 0), ("links", 0), ("links", 1), ("vectors", 0),
    ]  # fmt: skip
    keys = page_keys(np.array([4, 0], np.uint8), np.array([2**32 - 1, 7], np.uint32))
    assert _named(keys) == [("vectors", 2**32 - 1), ("upper", 7)]


@pytest.mark.skipif(
    importlib.util.find_spec("libcachesim") is None, reason="needs libcachesim, not installed"
)
def test_w_tinylfu_holds_what_is_asked_for_often() -> None:
    hot = [[("links", 0)], [("links", 1)]]
    cold = [[("codes", number)] for number in range(300)]
    asked = [part for number in range(300) for part in (hot[number % 2], cold[number])]
    held = page_lists.w_tinylfu_content(_trace(*asked), 10)
    assert 0 < len(held) <= 10
    assert {("links", 0), ("links", 1)} <= set(_named(held))


def test_time_to_slo_is_the_start_of_the_last_good_stretch() -> None:
    arrivals = np.arange(0.0, 10.0, 0.01)
    latency = np.where(arrivals < 2.0, 0.5, 0.001)
    how = {"limit_s": 0.01, "window_s": 1.0, "end_s": 10.0}
    found = time_to_slo(latency, arrivals, **how)
    # A percent of a window of a hundred may be slow: one request, or 10 ms of the schedule.
    assert found == pytest.approx(2.0, abs=0.11)
    assert time_to_slo(np.full(1000, 0.001), arrivals, **how) == 0.0
    assert time_to_slo(np.full(1000, 0.5), arrivals, **how) is None
    late = np.where((arrivals > 5.0) & (arrivals < 5.1), 0.5, 0.001)
    assert time_to_slo(late, arrivals, **how) == pytest.approx(5.1, abs=0.11)
    steady = {"begin_s": 3.0, "window_s": 1.0, "end_s": 10.0}
    assert worst_window(latency, arrivals, **steady) == 0.001
    assert worst_window(late, arrivals, **steady) == 0.5
    assert windows(latency, arrivals, window_s=5.0, end_s=10.0) == [0.5, 0.001]


def _start(
    method: str, latency_s: np.ndarray, arrivals: np.ndarray, *, scenario: str = "restart",
    ready_s: float = 1.0, begins_s: float = 1.0, load_bytes: int = 0, repeat: int = 0,
) -> Start:  # fmt: skip
    count = len(arrivals)
    done = arrivals + begins_s + latency_s
    record = LoadRecord(
        opened_s=0.5, begins_s=begins_s, heat_s=0.0, ready_s=ready_s, load_bytes=load_bytes,
        load_pages=1, index_bytes=100 * MIB, priority="", heat_keys=1, receipt=None,
        page_hits=9, page_misses=1,
        read_latency_s=1e-4, done_s=done, begun_s=done, completeness=np.ones(count, np.float32),
        pages_read=(latency_s > 0.01).astype(np.int64), ids=np.full((count, 2), "a"),
        sample_s=np.array([0.5, 2.0]), sample_bytes=np.array([0, 7 * MIB]),
    )  # fmt: skip
    drop = CacheDrop(1, 1, 0, 0, "fadvise")
    return Start(scenario, method, repeat, record, 0.98, drop)


@pytest.fixture
def starts() -> tuple[list[Start], np.ndarray, BenchOptions]:
    """Three replicas of fixed latencies; a single slow turn hits one start of Stoker's only."""
    options = BenchOptions(seconds=10.0, window_s=1.0, rate=100.0, repeats=3)
    arrivals = np.arange(0.0, 10.0, 0.01)
    cold = np.where(arrivals < 3.0, 0.3, 0.001)
    found = []
    for repeat in range(3):
        ours = np.full(1000, 0.0012)
        ours[100 + 200 * repeat : 120 + 200 * repeat] = 0.4
        found += [
            _start("none", cold, arrivals, ready_s=0.5, begins_s=0.5, repeat=repeat),
            _start("oracle", np.full(1000, 0.001), arrivals, repeat=repeat, load_bytes=9 * MIB),
            _start("all", np.full(1000, 0.001), arrivals, ready_s=3.0, begins_s=3.0, repeat=repeat),
            _start("stoker", ours, arrivals, ready_s=1.2, begins_s=1.2, load_bytes=20 * MIB),
        ]
    return found, arrivals, options


def test_figures_are_of_each_requests_median_and_goals_follow(
    starts: tuple[list[Start], np.ndarray, BenchOptions],
) -> None:
    found, arrivals, options = starts
    (figure,) = figures(found, arrivals, options)
    assert figure.steady_p99_ms == pytest.approx(1.0)
    ours, none = figure.row("stoker"), figure.row("none")
    assert ours is not None
    assert none is not None
    assert ours.first_p99_ms == pytest.approx(1.2)
    assert ours.first_p99_runs_ms.low == pytest.approx(400.0)
    assert ours.slo_s == pytest.approx(1.2)
    assert ours.slo_bytes == 7 * MIB
    assert len([run for run in ours.slo_runs_s if run is not None and run > 2.0]) == 3
    assert none.slo_s == pytest.approx(3.5, abs=0.11)
    assert none.reading_ratio.median == pytest.approx(0.3)
    assert none.loading_p99_ms is None
    assert none.measured_hit_ratio.median == 0.9
    assert none.predicted_hit_ratio is None
    held = {check.name.split(":")[0]: check for check in goals([figure], 100 * MIB, options)}
    assert [check.held for check in held.values()] == [True, True]
    assert "1.20 ×" in held["first 10 s after ready"].text
    greedy = [
        dataclasses.replace(start, record=dataclasses.replace(start.record, load_bytes=30 * MIB))
        for start in found
    ]
    checks = goals(figures(greedy, arrivals, options), 100 * MIB, options)
    assert [check.held for check in checks] == [False, True]


def test_harm_compares_the_same_requests(
    starts: tuple[list[Start], np.ndarray, BenchOptions],
) -> None:
    _, arrivals, options = starts
    slow = np.full(1000, 0.2)
    under = [
        _start("none", slow, arrivals, scenario="in-traffic", ready_s=0.5, begins_s=0.5),
        _start("stoker", slow * 1.2, arrivals, scenario="in-traffic", ready_s=2.5, begins_s=0.5),
    ]
    (figure,) = figures(under, arrivals, options)
    assert harm(figure) == pytest.approx((240.0, 200.0, 200))
    (check,) = goals([figure], 100 * MIB, options)
    assert not check.held
    assert "over 200 requests" in check.text


def test_the_report_says_what_was_found_and_what_was_left_out(
    starts: tuple[list[Start], np.ndarray, BenchOptions],
) -> None:
    found, arrivals, options = starts
    known = figures(found, arrivals, options)
    checks = goals(known, 100 * MIB, options)
    common = {
        "facts": {"disk": "own"}, "left_out": {"w-tinylfu": "not here"},
        "index_bytes": 100 * MIB, "options": options,
    }  # fmt: skip
    text = markdown(known, checks, **common)
    assert "* held: restart: first 10 s after ready" in text
    assert "left out: w-tinylfu: not here" in text
    assert "| Stoker |" in text
    document = to_document(known, checks, **common)
    assert [row["method"] for row in document["scenarios"][0]["methods"]] == [
        "none", "oracle", "all", "stoker",
    ]  # fmt: skip
    assert document["options"]["seconds"] == 10.0


def test_records_and_jobs_survive_their_files(
    tmp_path: Path, starts: tuple[list[Start], np.ndarray, BenchOptions]
) -> None:
    record = starts[0][0].record
    record.save(tmp_path / "r.npz")
    again = LoadRecord.load(tmp_path / "r.npz")
    assert (again.done_s == record.done_s).all()
    assert again.ids.tolist() == record.ids.tolist()
    assert again.bytes_at(1.0) == 7 * MIB
    assert again.bytes_at(0.1) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.npz"]
    job = LoadJob("heat", "i", "q", "r", gated=False)
    assert LoadJob.from_json(job.to_json()) == job


def test_impossible_options_are_named() -> None:
    with pytest.raises(ConfigError, match="budget_ratio"):
        BenchOptions(budget_ratio=0.0)
    with pytest.raises(ConfigError, match="scenarios"):
        BenchOptions(scenarios=("reboot",))
    with pytest.raises(ConfigError, match="window_s"):
        BenchOptions(seconds=1.0)
    assert small(BenchOptions()).count == 80


def test_a_replica_that_fails_or_hangs_is_an_error_with_its_words(tmp_path: Path) -> None:
    job = LoadJob("none", "nowhere", str(tmp_path / "no-queries.npz"), str(tmp_path / "r.npz"))
    with pytest.raises(UnavailableError, match="no-queries"):
        start_replica(job, timeout_s=60.0)
    os.mkfifo(job.queries_path)  # nobody writes: it never ends, however late its starter looks
    with pytest.raises(UnavailableError, match="longer than 0 s"):
        start_replica(job, timeout_s=0.001)
