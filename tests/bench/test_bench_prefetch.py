"""The small sizes of the prefetch benchmarks: they run, print, and never fail on time."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from stoker.prefetch.traces import Trace

HERE = Path(__file__).parent


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def talk(requests: int) -> Trace:
    """Sessions of three turns on topics of eight passages, some of them popular; four days."""
    rng = np.random.default_rng(3)
    keys = [
        (int(topic) * 8 + rng.permutation(8)[:4])
        for topic in np.repeat(rng.zipf(1.3, requests // 3 + 1) % 60, 3)[:requests]
    ]
    times = np.sort(rng.random(requests)) * 4 * 86400.0
    _, numbers = np.unique(np.concatenate(keys), return_inverse=True)
    return Trace(
        numbers.astype(np.int64),
        np.repeat(times, 4),
        np.repeat(np.arange(requests) // 3, 4),
        np.repeat(np.arange(requests), 4),
        int(numbers.max()) + 1,
    )


def test_placement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("bench_prefetch_placement", monkeypatch)
    trace = talk(600)
    rows = bench.compare(trace, "20,60")
    parts = bench.ablation(trace, "20")
    with capsys.disabled():
        print(f"\n{bench.render('generated sessions', trace, rows)}")
        print(bench.render_ablation(parts, "20"))
    assert [row["capacity"] for row in rows] == [20, 60]
    assert all(row["stoker"] > row["all"]["lru"] for row in rows)
    assert len(parts) == len(bench.PARTS)
    told = [bench.foretold(trace, "20", period_s=period) for period in (None, 86400.0, 21600.0)]
    nothing, day, hours = (row["hit_ratios"][0] for row in told)
    assert 0.0 < nothing < 1.0
    assert day < hours < 1.0
    ends = bench.foretold(trace, "20", period_s=None, ends_told=True)["hit_ratios"][0]
    assert nothing < ends < 1.0
    table = bench.misses(trace, 20)
    assert sum(row["all"] for row in table) == pytest.approx(1.0)
    assert all(row["stoker"] <= row["all"] >= row["belady"] for row in table)
    assert table[0]["all"] == pytest.approx(trace.footprint / len(trace))
    assert table[2]["stoker"] > 0.0
    draws = bench.sampled(trace, "20", samples=1)
    assert all(0.0 < row["hit_ratios"][0] < 1.0 for row in draws)
    with capsys.disabled():
        print(bench.render_misses({20: table}))
        print(bench.render_ablation(draws, "20"))


def test_heat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("bench_prefetch_heat", monkeypatch)
    rows = bench.worth(bench.events_of(talk(600)))
    for row in bench.calibration(talk(600)):
        assert 0.0 <= row["predicted"] <= 1.0
        assert 0.0 <= row["measured"] <= 1.0
    assert max(bench.entropy_error(20_000, seed=1).values()) < 1e-9
    sizes = bench.size(5_000, 6, seed=1)
    tail = bench.tail(5_000, keys_max=500, events=4_000, tail_ratio=0.5, seed=1)
    with capsys.disabled():
        print(f"\n{bench.render_worth(rows)}\n{sizes}\n{tail}")
    assert tail["keys"] <= 500 < tail["distinct"]
    assert all(0.0 <= share <= 1.0 for row in rows for share in row["coverage"])
    assert sizes["edges"] > 25_000


def test_tiers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    bench = load("bench_prefetch_tiers", monkeypatch)
    rows = bench.compare("jobs:1", accesses=3_000, gpu_room=20, host_room=60)
    with capsys.disabled():
        print(f"\n{bench.render('jobs:1', rows)}")
    shares = {row["policy"]: row["share"] for row in rows}
    assert list(shares)[4:] == ["counted", "told the law", "told the law and the job"]
    assert shares["lru"] == 0.0 < shares["told the law"] < shares["oracle"] == 1.0


@pytest.mark.parametrize("shards", [1, 2, 7, 64])
def test_near_vectors_share_a_shard_in_every_process(
    monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    load("bench_prefetch_heat", monkeypatch)  # it imports these two
    load("bench_prefetch_topics", monkeypatch)
    feature_shard = load("bench_prefetch_ablation", monkeypatch).feature_shard
    rng = np.random.default_rng(shards)
    vectors = rng.standard_normal((200, 16)).astype("f4")
    found = feature_shard(vectors, shards)
    assert ((found >= 0) & (found < shards)).all()
    np.testing.assert_array_equal(found, feature_shard(vectors * np.float32(37.5), shards))
    np.testing.assert_array_equal(found[7:9], feature_shard(vectors[7:9], shards))
    close = vectors + 0.01 * rng.standard_normal(vectors.shape).astype("f4")
    assert (feature_shard(close, shards) == found).mean() > 0.85


def test_ablation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    heat = load("bench_prefetch_heat", monkeypatch)
    load("bench_prefetch_topics", monkeypatch)
    bench = load("bench_prefetch_ablation", monkeypatch)
    events = heat.events_of(talk(600))
    rows = bench.warm_sets(events)
    table = bench.regimes({"talk": talk(600)}, share=0.2)
    with capsys.disabled():
        print(f"\n{bench.render(rows)}\n{table}")
    assert all(0.0 <= share <= 1.0 for row in rows for share in row["coverage"])
    assert table[0]["regime"] in {"PIN", "EVICT", "SHARD"}
    near = bench.together(np.random.default_rng(2).standard_normal((300, 8)).astype("f4"), 4)
    assert near["near together"] > near["by chance"]


def test_topics(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    heat = load("bench_prefetch_heat", monkeypatch)
    bench = load("bench_prefetch_topics", monkeypatch)
    turns = [
        dataclasses.replace(event, query=f"Where is {' or '.join(event.chunk_ids)} in Paris?")
        for event in heat.events_of(talk(600))[:120]
    ]
    rows = bench.run({"talk": turns})
    with capsys.disabled():
        print(f"\n{bench.render(rows)}")
    assert {row["kind"] for row in rows} >= {"terms"}
    for row in rows:
        shares = [*row["warm"].values(), row["known"], *row["foreseen"], row["named"]]
        assert all(0.0 <= share <= 1.0 for share in shares)
    # A question that names its passages foresees them.
    by_demand, by_nodes = rows[0]["foreseen"]
    assert by_nodes > by_demand > 0.0


def test_live_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    load("served_process", monkeypatch)
    bench = load("bench_service_placement", monkeypatch)
    monkeypatch.setattr(bench, "MODES", ("off", "observe"))
    results = bench.run(500, 20, 0.0)
    assert list(results) == ["off", "observe"]
    assert results["off"]["accesses"] == results["off"]["skipped"] == 0
    assert all(row["p99_ms"] >= row["p50_ms"] > 0.0 for row in results.values())


def test_predicted_and_measured_of_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load("served_process", monkeypatch)
    bench = load("bench_service_receipt", monkeypatch)
    monkeypatch.setattr(bench, "CASES", (bench.Case(800, 40, 1.0, 0.2),))
    assert bench.main(["--windows", "1", "--learnt", "60", "--followed", "110"]) == 0
    assert "largest error of 1 windows: 0.0" in capsys.readouterr().out
