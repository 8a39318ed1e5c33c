"""`import stoker` where the native core is not: the source tree, not an installation."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = "import sys; sys.modules['stoker.kernels._core'] = None; import stoker; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_source_tree_without_its_native_core_says_what_to_do() -> None:
    assert run("print(stoker.__version__)").returncode == 0, "errors and version need no core"
    done = run("stoker.open")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "make setup" in last


def test_another_module_that_is_missing_is_named_as_it_is() -> None:
    done = run("sys.modules['numpy'] = None; stoker.open")
    assert done.returncode == 1
    assert "numpy" in done.stderr.strip().splitlines()[-1]
    assert "make setup" not in done.stderr
