"""`stoker bench coldstart --small`: real replicas, structure and invariants, never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("bench")
    command = [
        *(sys.executable, "-m", "stoker", "bench", "coldstart", "--small", "--json"),
        *("--out", str(out), "--methods", "none,last-blocks,all,stoker"),
        *("--scenarios", "restart,scale-out,rebuild,in-traffic"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


def _row(document: dict[str, Any], scenario: str, method: str) -> dict[str, Any]:
    (found,) = [part for part in document["scenarios"] if part["name"] == scenario]
    (row,) = [part for part in found["methods"] if part["method"] == method]
    return row  # type: ignore[no-any-return]


def test_every_scenario_and_method_is_there_and_right(run: tuple[dict[str, Any], Path]) -> None:
    document, _ = run
    assert [part["name"] for part in document["scenarios"]] == [
        "restart", "scale-out", "rebuild", "in-traffic",
    ]  # fmt: skip
    for part in document["scenarios"]:
        methods = [row["method"] for row in part["methods"]]
        gated = part["name"] != "in-traffic"
        assert methods == ["none", *(["last-blocks"] if gated else []), "all", "stoker"]
        assert part["steady_p99_ms"] > 0
        for row in part["methods"]:
            assert row["recall"]["low"] >= 0.9, row["method"]
            assert row["starts"] == 1
            assert 0 < row["opened_s"]["median"] <= row["ready_s"]["median"]
            if gated:
                assert row["begins_s"]["median"] >= row["ready_s"]["median"]
                assert row["first_answer_s"]["median"] > row["begins_s"]["median"]
                assert row["loading_p99_ms"] is None
            elif row["method"] != "none":  # whose start serves both: it is ready when it is open
                assert row["begins_s"] == row["opened_s"]


def test_bytes_keep_to_the_budget_and_everything_is_everything(
    run: tuple[dict[str, Any], Path],
) -> None:
    document, _ = run
    total = document["index_bytes"]
    for name in ("restart", "scale-out", "rebuild"):
        assert _row(document, name, "none")["load_bytes"]["median"] == 0
        assert _row(document, name, "none")["reading_ratio"]["median"] > 0
        for method in ("last-blocks", "stoker"):
            # Pages that came with opening need no reading; the ids come with the upper levels.
            assert _row(document, name, method)["load_bytes"]["median"] <= 0.2 * total + 65_536
        assert _row(document, name, "all")["load_bytes"]["median"] > 0.5 * total
        assert _row(document, name, "all")["reading_ratio"]["median"] == 0


def test_heat_made_from_the_log_is_the_snapshots(run: tuple[dict[str, Any], Path]) -> None:
    document, _ = run
    known = {name: _row(document, name, "stoker")["heat_keys"] for name in ("restart", "rebuild")}
    assert known["restart"] == known["rebuild"] > 0
    assert _row(document, "scale-out", "stoker")["heat_keys"] == known["restart"]


def test_goals_data_and_plots_are_written_and_what_was_generated_is_said(
    run: tuple[dict[str, Any], Path],
) -> None:
    document, out = run
    assert {goal["volume"] for goal in document["goals"]} <= {
        "restart", "scale-out", "rebuild", "in-traffic",
    }  # fmt: skip
    assert sum("first 0.8 s after ready" in goal["name"] for goal in document["goals"]) == 3
    assert "GENERATED" in document["facts"]["vectors"]
    assert "generated" in document["facts"]["requests"]
    assert "GENERATED" in document["facts"]["arrivals"]
    assert "host's cache" in document["facts"]
    assert json.loads((out / "coldstart.json").read_text()) == document
    text = (out / "coldstart.md").read_text()
    assert "## rebuild: the index was rebuilt" in text
    if "plots" not in document["facts"]:  # matplotlib is there
        for name in ("coldstart-latency.png", "coldstart-slo.png"):
            assert (out / name).read_bytes().startswith(PNG)
            assert f"![{name}]({name})" in text
