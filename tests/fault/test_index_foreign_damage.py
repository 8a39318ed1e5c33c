"""Damaged and hostile files of other libraries: no crash, no memory for what is only claimed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("faiss")
pytest.importorskip("usearch.index")
pytest.importorskip("pyarrow")

CHILD = Path(__file__).with_name("damage_foreign.py")


def kinds() -> list[str]:
    spec = importlib.util.spec_from_file_location("damage_foreign", CHILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.KINDS)


@pytest.mark.parametrize("kind", kinds())
def test_a_damaged_foreign_file_is_taken_or_refused(kind: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(CHILD), kind, str(tmp_path), "160"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    last = run.stdout.splitlines()[-1:]
    assert run.returncode == 0, f"{kind}: damage {last}\n{run.stderr[-2000:]}"
