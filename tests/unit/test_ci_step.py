"""`.ci/step`, which runs every set-up command: what it says of one at work, failed, out of disk."""

import os
import subprocess
from pathlib import Path

import pytest

STEP = Path(__file__).parents[2] / ".ci" / "step"


def run(folder: Path, script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", str(STEP), str(folder / "log"), "a step", "bash", "-c", script]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


def disk_with(folder: Path, free_mb: int) -> str:
    """A PATH on which `df` finds `free_mb` on every disk."""
    df = folder / "df"
    df.write_text(f"#!/bin/sh\necho header\necho /dev/disk 9999 1 {free_mb} 99% /\n")
    df.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_step_that_works_says_so_and_keeps_its_output_in_the_log(tmp_path: Path) -> None:
    done = run(tmp_path, "echo quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "== a step" in done.stdout
    assert "done in" in done.stdout
    assert "quiet" not in done.stdout
    assert (tmp_path / "log").read_text() == "quiet\n"


@pytest.mark.parametrize("code", [1, 3, 77])
def test_a_failure_shows_the_end_of_the_log_and_keeps_the_exit_code(
    tmp_path: Path, code: int
) -> None:
    failed = run(tmp_path, f"echo the reason; exit {code}")
    assert failed.returncode == code
    assert "the reason" in failed.stderr
    assert str(tmp_path / "log") in failed.stderr
    assert "disk was full" not in failed.stderr


def test_a_failure_on_a_full_disk_names_the_disk(tmp_path: Path) -> None:
    broken = "echo connection broken; exit 1"
    failed = run(tmp_path, broken, PATH=disk_with(tmp_path, 3), STEP_GROWS=str(tmp_path))
    assert failed.returncode == 1
    assert "The disk was full: 3 MB" in failed.stderr
    assert str(tmp_path) in failed.stderr
    assert "Free some space" in failed.stderr


def test_little_room_is_told_beforehand_and_is_no_failure(tmp_path: Path) -> None:
    path = disk_with(tmp_path, 2_000)
    little = run(tmp_path, "true", PATH=path, STEP_GROWS=str(tmp_path), STEP_NEEDS_MB="9000")
    assert little.returncode == 0
    assert "2000 MB are free" in little.stdout
    assert "may need 9000 MB" in little.stdout
    enough = run(tmp_path, "true", PATH=path, STEP_GROWS=str(tmp_path), STEP_NEEDS_MB="1000")
    assert enough.returncode == 0
    assert "are free" not in enough.stdout
