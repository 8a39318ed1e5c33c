"""`stoker plan` over a real index and a saved heat."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from stoker.prefetch.events import SEARCH_PERFORMED, new_event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.plan import REASON_ALWAYS, REASON_WHOLE
from stoker.service.cli import main
from stoker.service.engine_opening import HEAT_NAME
from stoker.service.snapshot_file import write_snapshot


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    vectors = np.random.default_rng(0).standard_normal((600, 32)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    np.save(tmp_path / "ids.npy", np.array([f"d{i}" for i in range(600)]))
    target = tmp_path / "index"
    assert (
        main(
            [
                "import",
                str(tmp_path / "v.npy"),
                str(target),
                "--metric=cosine",
                f"--ids={tmp_path / 'ids.npy'}",
            ]
        )
        == 0
    )
    capsys.readouterr()
    return target


def save_heat(index: Path) -> None:
    graph = HeatGraph()
    now_s = time.time()
    graph.apply(
        [
            new_event(
                SEARCH_PERFORMED,
                tenant="default",
                chunk_ids=("d7", f"d{i % 5}"),
                session=f"s{i % 3}",
                time_s=now_s - 60.0 + i,
            )
            for i in range(40)
        ]
    )
    (index / "state").mkdir()  # as a server saves it: without PageRank
    write_snapshot(
        index / "state" / HEAT_NAME, {"time_s": now_s, "offsets": {}}, graph.to_snapshot()
    )


def test_plan_without_heat_says_so(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(index)]) == 0
    said = capsys.readouterr().out
    assert "no heat saved" in said
    assert "index/upper" in said


def test_plan_explains_a_chunk(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_heat(index)
    assert main(["plan", str(index), "--budget-mib", "0.06", "--explain", "d7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["heat_keys"] == 6
    upper = told["kinds"]["index/upper"]
    assert upper["planned"] == upper["offered"]
    assert told["planned_bytes"] <= max(told["limit_bytes"], upper["planned_bytes"])
    assert 0.0 < told["predicted_hit_ratio"] <= 1.0
    assert any(row["skipped"] for row in told["kinds"].values())
    heat = told["explain"]["heat"]
    assert heat["score"] > 0.85
    assert heat["advice"] == "load now into the fastest tier"
    assert heat["pagerank"] > 1 / 6  # d7 is in every search
    assert {chunk for chunk, _ in heat["leads_to"]} <= {f"d{i}" for i in range(5)}
    assert sum(share for _, share in heat["leads_to"]) == pytest.approx(1.0)
    assert any("is loaded in stage" in line for line in told["explain"]["pages"])
    assert main(["plan", str(index), "--explain", "d7"]) == 0
    assert "load now into the fastest tier" in capsys.readouterr().out
    assert main(["plan", str(index), "--explain", "nobody"]) == 0
    assert "no event has named it" in capsys.readouterr().out


def test_where_all_fits_the_order_is_the_files(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server reads then (`plan.py`): but not with less memory, or in a hurry."""
    save_heat(index)

    def reasons(*flags: str) -> set[str]:
        assert main(["plan", str(index), "--json", *flags]) == 0
        kinds = json.loads(capsys.readouterr().out)["kinds"]
        return {reason for row in kinds.values() for reason in row["reasons"]}

    everything = "--budget-mib=1000"
    assert reasons(everything) == {REASON_ALWAYS, REASON_WHOLE}
    assert REASON_WHOLE not in reasons("--budget-mib=0.06")
    assert REASON_WHOLE not in reasons(everything, "--bandwidth-mib-s=99", "--deadline-s=99")
    monkeypatch.setenv("STOKER_INDEX_MEMORY_BYTES", "65536")
    assert REASON_WHOLE not in reasons(everything)


def test_bad_arguments_are_refused(index: Path, tmp_path: Path) -> None:
    for budget in ("-1", "inf", "nan", "1e308"):
        assert main(["plan", str(index), "--budget-mib", budget]) == 3
    assert main(["plan", str(index), "--bandwidth-mib-s=1e300", "--deadline-s=1e300"]) == 0
    assert main(["plan", str(tmp_path / "missing")]) == 3
