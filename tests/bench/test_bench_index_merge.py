"""The small size of `bench_index_merge.py`: it runs, prints, and never fails on time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_index_merge.py")


def test_searches_while_merging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("bench_index_merge", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_index_merge", bench)
    monkeypatch.setattr(sys, "argv", ["bench_index_merge.py"])
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "IDLE_QUERIES_MIN", 200)
    monkeypatch.setattr(bench, "_CONTROL_S", 0.1)
    # Searches are timed for as long again before and after each merge. From 256 rows on, as here,
    # those run in a process of their own.
    report = bench.run(vectors=1_000, dim=32, rounds=2, share=0.3, seed=1, idle_first_s=0.2)
    with capsys.disabled():
        print(f"\n{bench.render(report)}")
    assert len(report["rounds"]) == 2
    assert report["write_amplification"] >= 1
    for row in report["rounds"]:
        assert row["computing_p99_ms"] > 0
        assert row["copying_p99_ms"] > 0
        searches = sum(phase["searches"] for phase in row["phases"].values())
        assert searches == row["searches_while_merging"]
