"""The small size of `bench_streams.py`: it runs, prints, and never fails on time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_streams.py")


def test_events_through_decode_and_heat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("bench_streams", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_streams", bench)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench.structlog, "configure", lambda **_: None)
    report = bench.run(5_000, seed=1, kafka=None, with_kafka=False)
    with capsys.disabled():
        print(f"\n{bench.render(report)}")
    assert [row["name"] for row in report["rows"]][:3] == [
        "memory: decode, an object per event",
        "memory: decode, columns",
        "memory: decode, heat",
    ]
    assert len(report["rows"]) == 7
