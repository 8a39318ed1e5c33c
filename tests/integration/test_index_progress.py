"""Builds show how far they are, and use every core."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
import pytest

from stoker.index.build import build_segment

ROWS = 2_500


def run_on_a_terminal(arguments: list[str]) -> str:
    """Run the command with standard error on a terminal; return what it drew there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-m", "stoker", *arguments],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env=environment,
    ) as process:
        os.close(theirs)
        drawn = bytearray()
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError as error:  # how a terminal says that its last user has gone
                if error.errno != errno.EIO:
                    raise
                break
            if not part:
                break
            drawn += part
    os.close(ours)
    assert process.returncode == 0, drawn.decode(errors="replace")
    return drawn.decode(errors="replace")


@pytest.mark.parametrize("command", ["import", "index"])
def test_a_terminal_sees_the_steps_and_a_bar(command: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).standard_normal((ROWS, 8)).astype(np.float32)
    output = str(tmp_path / "out")
    if command == "import":
        np.save(tmp_path / "v.npy", vectors)
        arguments = ["import", str(tmp_path / "v.npy"), output, "--metric=l2"]
    else:
        with (tmp_path / "rows.jsonl").open("w") as file:
            for number, vector in enumerate(vectors.round(3).tolist()):
                file.write(json.dumps({"id": number, "text": "t", "vector": vector}) + "\n")
        arguments = ["index", str(tmp_path / "rows.jsonl"), "--output", output, "--metric=l2"]
    drawn = run_on_a_terminal(arguments)
    # Bars are drawn ten times a second, so short steps may not show; the last one always does.
    assert "calibrate" in drawn
    assert "1/1" in drawn
    assert "━" in drawn


def test_all_cores_link_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    real = hnswlib.Index.add_items

    def watched(self: Any, *args: Any, num_threads: int = -1, **values: Any) -> Any:
        used.append(num_threads)
        return real(self, *args, num_threads=num_threads, **values)

    monkeypatch.setattr(hnswlib.Index, "add_items", watched)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    vectors = np.eye(60, dtype=np.float32)
    seen: list[tuple[str, int, int]] = []
    build_segment(tmp_path / "a", vectors, progress=lambda *step: seen.append(step))
    assert used == [5]
    build_segment(tmp_path / "b", vectors, threads=3)
    assert used == [5, 3]
    # Every step that was begun came to its end.
    ends = {what: (done, total) for what, done, total in seen}
    assert "link" in ends
    assert all(done == total for done, total in ends.values()), ends
