"""The small size of `bench_engine.py`: every part runs, says what it found, never fails on time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stoker.index.row_order import ORDERINGS

SCRIPT = Path(__file__).with_name("bench_engine.py")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("bench_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.data
@pytest.mark.timeout(300)  # it seals one index after the other
def test_every_part(
    bench: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not sys.modules["engine_data"].DATA.exists():
        pytest.skip("the shared data folder is not here")
    # Each touched query opens an index of its own, and each share is a process.
    monkeypatch.setattr(sys.modules["engine_ordering"], "_TOUCHED_QUERIES", 30)
    monkeypatch.setattr(sys.modules["engine_ordering"], "SHARES", (0.2,))
    asked = "--count 1000 --queries 300 --repeats 1 --peers stoker,hnswlib --volumes own"
    budget = "--shares 0.5 --targets 0.9 --learnt 500 --settle 50 --seconds 1"
    growth = "--growth 250,500,1000 --growth-peers stoker"
    out = tmp_path / "out"
    assert bench.main([*f"{asked} {budget} {growth} --out".split(), str(out)]) == 0
    with capsys.disabled():
        print(f"\n{capsys.readouterr().out}")
    found = json.loads((out / "results.json").read_text())
    assert [row["recall"] for row in found["warm"]["stoker/1"]["rows"]][-1] > 0.99
    runs = found["cold"]["runs"]["stoker/cold/own"]
    assert all(run["recall"] > 0.9 for run in runs)
    # Nothing of the index was in memory, so answers came from the device.
    assert all(run["own"]["resident_bytes"] > 0 and run["bytes_in_all"] > 0 for run in runs)
    (moments,) = found["cold"]["moments"]["own"]
    assert moments["navigation"]["resident"]["codes"] == 1.0
    assert moments["settled_0.99"]["recall"] > 0.97
    (limited,) = found["budget"]["runs"]["stoker/skewed/0.9/0.5/own"]
    assert limited["own"]["resident_bytes"] <= found["budget"]["index_bytes"] / 2
    assert limited["recall"] > 0.85
    assert set(found["ordering"]) == set(ORDERINGS)
    for row in found["ordering"].values():
        assert row["touched"]["asked"] == 30
        assert row["limited"]["0.2"]["hit_ratio"] > 0
    assert all(run["bytes"] > 0 and run["write_s"] > 0 for run in found["sealing"])
    assert found["growth"]["fits"]
    assert "## Under a budget" in (out / "results.md").read_text()
