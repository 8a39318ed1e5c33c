"""The script of all tests: which files its groups run, and what it makes of a group that fails.

A script stands in for pytest, and the script runs in a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("waiting", "property", "rest", "bench", "unit", "fuzzers", "fault")

# Says what it was given, and ends as the variable of its group's name says.
PYTEST = """#!/usr/bin/env bash
for argument in "$@"; do [[ $argument == cache_dir=* ]] && group=${argument##*/}; done
printf 'given %s %s\\n' "${group:-alone}" "$*"
end=end_${group:-alone}
[[ ${!end:-0} == killed ]] && kill -9 $$
exit "${!end:-0}"
"""


def run(folder: Path, *options: str, **ends: str) -> tuple[int, dict[str, list[str]], list[str]]:
    """Return the exit status, what each group was given, and the lines that name what failed."""
    folder.mkdir(exist_ok=True)
    (folder / ".ci").mkdir(exist_ok=True)
    shutil.copy(ROOT / ".ci/test", folder / ".ci/test")
    if not (folder / "tests").exists():
        (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / "venv/bin/pytest").write_text(PYTEST)
    (folder / "venv/bin/pytest").chmod(0o755)
    done = subprocess.run(
        [folder / ".ci/test", *options],
        env=os.environ | {"VENV": "venv"} | {f"end_{name}": end for name, end in ends.items()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    given = [line.split()[1:] for line in lines if line.startswith("given ")]
    return (
        done.returncode,
        {name: arguments for name, *arguments in given},
        [line for line in lines if line.startswith("FAILED")],
    )


def test_every_test_file_is_in_one_group(tmp_path: Path) -> None:
    code, given, failed = run(tmp_path / "all")
    assert (code, failed) == (0, [])
    assert sorted(given) == sorted(GROUPS)
    ran: Counter[Path] = Counter()
    for arguments in given.values():
        left_out = [ROOT / one.partition("=")[2] for one in arguments if "--ignore=" in one]
        for name in arguments:
            path = ROOT / name
            if name.startswith("tests/"):
                assert path.exists(), name
            if name.split("/")[0] != "tests":
                continue
            for file in [path] if path.is_file() else path.rglob("*.py"):
                if not any(file.is_relative_to(one) for one in left_out):
                    ran[file] += 1
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name.startswith("test_")]
    assert {path.name: ran[path] for path in files if ran[path] != 1} == {}
    assert len(files) > 200


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ({"unit": "1"}, 1, ["FAILED: tests: unit (exit status 1)"]),
        ({"waiting": "2", "fault": "1"}, 2, ["FAILED: tests: waiting (exit status 2)",
                                             "FAILED: tests: fault (exit status 1)"]),
        *(
            ({name: "killed"}, 137, [f"FAILED: tests: {name} (exit status 137)"])
            for name in GROUPS
        ),
        (dict.fromkeys(GROUPS, "5"), 5, []),
        ({"rest": "5", "property": "5"}, 0, []),
        ({"rest": "5", "property": "1"}, 1, ["FAILED: tests: property (exit status 1)"]),
    ],
)  # fmt: skip
def test_a_group_that_fails_fails_the_run_and_is_named_last(
    tmp_path: Path, ends: dict[str, str], code: int, said: list[str]
) -> None:
    found, given, failed = run(tmp_path / "all", "-x", **ends)
    assert (found, failed) == (code, said)
    assert all(arguments[-1] == "-x" for arguments in given.values()), "options go to all"


def test_with_a_path_there_is_one_process(tmp_path: Path) -> None:
    code, given, _ = run(tmp_path / "all", "tests/unit", "-x", alone="3")
    assert (code, given) == (3, {"alone": ["tests/unit", "-x"]})
