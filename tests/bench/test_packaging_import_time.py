"""How long `import stoker` and `stoker --help` take; it prints, and never fails on time."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNS = 7


def seconds(command: list[str]) -> list[float]:
    """Run ``command`` in fresh processes and return the wall time of each run."""
    took = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return took


def test_import_time(capsys: pytest.CaptureFixture[str]) -> None:
    python = [sys.executable, "-P"]
    rows = {
        "python alone": seconds([*python, "-c", "pass"]),
        "import stoker": seconds([*python, "-c", "import stoker"]),
        "stoker --help": seconds([str(Path(sys.executable).with_name("stoker")), "--help"]),
    }
    alone = statistics.median(rows["python alone"])
    with capsys.disabled():
        print(f"\n{platform.python_version()}, {platform.machine()}, median (range) of {RUNS} runs")
        for name, took in rows.items():
            middle, low, high = statistics.median(took), min(took), max(took)
            print(
                f"  {name:14} {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), "
                f"{(middle - alone) * 1e3:+.1f} ms over python alone"
            )
    assert all(len(took) == RUNS for took in rows.values())
