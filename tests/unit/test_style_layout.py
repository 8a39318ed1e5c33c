"""STYLE, Layout: the rooms, what they may not contain, how long a module may grow."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOMS = {
    "service": "service",
    "prefetch": "prefetch",
    "index": "index",
    "kvcache": "kvcache",
    "kernels": "kernels/python",
}
MODULE_LINES_MAX = 800
BANNED_STEMS = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# Not text, so not read for paths.
BINARY_SUFFIXES = {".png", ".npy", ".npz", ".bin", ".zst", ".gz"}


@pytest.fixture(scope="module")
def tracked(repository: Path) -> list[Path]:
    """Return every tracked file, as a path relative to the root; links are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout
    paths = [Path(name) for name in listed.split("\0") if name]
    return [p for p in paths if (repository / p).is_file() and not (repository / p).is_symlink()]


def test_rooms_have_no_init_module(repository: Path) -> None:
    found = [
        str(path.relative_to(repository))
        for folder in ROOMS.values()
        for path in (repository / folder).rglob("__init__.py")
    ]
    assert not found, "\n".join(
        found
    )  # "a room with __init__.py shadows other people's packages of that name"


def test_rooms_have_a_readme(repository: Path) -> None:
    missing = [room for room in ROOMS if not (repository / room / "README.md").is_file()]
    assert not missing, "\n".join(missing)


def test_links_of_the_front_door_lead_to_the_rooms(repository: Path) -> None:
    links = {
        path.name: os.readlink(path)
        for path in (repository / "stoker").iterdir()
        if path.is_symlink()
    }
    assert links == {name: f"../{folder}" for name, folder in ROOMS.items()}


def test_no_module_is_too_long(repository: Path, tracked: list[Path]) -> None:
    long = {
        str(path): lines
        for path in tracked
        if path.suffix in {".py", ".cpp", ".hpp", ".h", ".cu"}
        and (lines := len((repository / path).read_text().splitlines())) > MODULE_LINES_MAX
    }
    assert long == {}, f"split what is over {MODULE_LINES_MAX} lines"


def test_modules_are_named_for_what_they_do(tracked: list[Path]) -> None:
    vague = [str(path) for path in tracked if path.stem in BANNED_STEMS]
    assert not vague, "\n".join(vague)


def test_root_holds_the_layout_and_nothing_else(tracked: list[Path]) -> None:
    folders = {path.parts[0] for path in tracked if len(path.parts) > 1}
    assert {f for f in folders if not f.startswith(".")} <= {
        *ROOMS,
        "compose",
        "stoker",
        "tests",
    }


def test_no_machine_path_in_tracked_text(repository: Path, tracked: list[Path]) -> None:
    # Put together here, so that this file does not find itself.
    roots = ["/" + name + "/" for name in ("tmp", "work", "farm", "root", "Users")]
    found = []
    for path in tracked:
        if path.suffix in BINARY_SUFFIXES or "golden" in path.parts:
            continue
        try:
            lines = (repository / path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, start=1)
            if any(root in line for root in roots)
        ]
    assert not found, "\n".join(found)
