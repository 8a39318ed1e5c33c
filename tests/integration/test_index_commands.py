"""`stoker import`, `verify` and `repair` as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from stoker.service.cli import main


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command sends logs to this test's standard error, which the next test does not have."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    vectors = np.random.default_rng(0).standard_normal((150, 16)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    np.save(tmp_path / "ids.npy", np.array([f"d{i}" for i in range(150)]))
    target = tmp_path / "index"
    code = main(
        [
            "import",
            str(tmp_path / "v.npy"),
            str(target),
            "--metric=cosine",
            f"--ids={tmp_path / 'ids.npy'}",
        ]
    )
    said = capsys.readouterr().out
    assert code == 0
    assert "150 vectors of 16 dimensions (cosine) from npy; linked anew" in said
    return target


def test_a_whole_index_verifies(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(index)]) == 0
    assert "whole (1 segments" in capsys.readouterr().out
    assert main(["repair", str(index)]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_damage_is_listed_and_repaired(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = index / "segments" / "s00000000" / "links.stk"
    data = bytearray(links.read_bytes())
    data[4096 + 17] ^= 1
    links.write_bytes(bytes(data))
    assert main(["verify", str(index)]) == 5
    said = capsys.readouterr().out
    assert "segments/s00000000/links.stk, page 0: the page fails its checksum" in said
    assert main(["verify", str(index), "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["damage"][0]["page"] == 0
    assert not found["whole"]
    assert main(["repair", str(index), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["whole"], report["rows_from_segments"], report["rows_lost"]) == (True, 150, 0)
    assert main(["verify", str(index)]) == 0


def test_lost_documents_show_in_the_exit_code(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (index / "segments" / "s00000000" / "vectors.stk").write_bytes(b"")
    assert main(["repair", str(index)]) == 1
    said = capsys.readouterr().out
    assert "lost 150" in said
    assert "lost: default/d" in said


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_what_is_no_index_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path / "none")]) == 3
    assert "no such folder" in capsys.readouterr().err


def test_an_import_without_a_metric_says_what_to_pass(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["import", str(tmp_path / "v.npy"), str(tmp_path / "other")]
    assert main(arguments) == 3
    assert "pass the metric" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "v.npy"), str(index), "--metric=l2"]) == 3
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY\x01\x00")
    assert main([*arguments, "--metric=l2"]) == 5
