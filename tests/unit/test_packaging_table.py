"""What is installed: the table of folders, the extras, and how the editable install reads."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

import stoker

ROOMS = {
    "service": "service",
    "index": "index",
    "prefetch": "prefetch",
    "kvcache": "kvcache",
    "kernels": "kernels/python",
}
HEAVY = {
    *("torch", "transformers", "sentence-transformers", "triton"),
    *("faiss-cpu", "faiss-gpu", "pyarrow", "matplotlib", "scipy", "confluent-kafka"),
}


@pytest.fixture(scope="module")
def document(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", entry)[0].lower() for entry in requirements}


def test_the_table_lists_the_front_door_and_the_rooms(
    document: dict[str, Any], repository: Path
) -> None:
    table = document["tool"]["scikit-build"]["wheel"]["force-include"]
    front = {
        f"stoker/{path.name}": f"stoker/{path.name}"
        for path in (repository / "stoker").iterdir()
        if path.is_file() and not path.is_symlink()
    }
    rooms = {folder: f"stoker/{room}" for room, folder in ROOMS.items()}
    assert table == front | rooms, "a file of stoker/ that is not listed would not be shipped"
    # Without this line the checkout's parent is put on sys.path by an editable install.
    assert document["tool"]["scikit-build"]["wheel"]["packages"] == []


def test_versions_agree(document: dict[str, Any], repository: Path) -> None:
    version = document["project"]["version"]
    assert stoker.__version__ == version
    assert f"## {version}" in (repository / "CHANGELOG.md").read_text()


def test_the_default_install_is_light(document: dict[str, Any]) -> None:
    project = document["project"]
    base = requirement_names(project["dependencies"])
    assert base & HEAVY == set()
    assert "kafka-python" in base
    extras = {name: requirement_names(v) for name, v in project["optional-dependencies"].items()}
    assert {"torch", "transformers", "sentence-transformers"} <= extras["models"]
    assert extras["cpu"] == {"faiss-cpu"}
    assert {"faiss-gpu", "triton"} <= extras["gpu"]
    # Both own the folder `faiss` and overwrite each other without a word.
    assert not any({"faiss-cpu", "faiss-gpu"} <= names for names in extras.values())


def test_every_requirement_has_a_lower_bound(document: dict[str, Any]) -> None:
    project = document["project"]
    entries = [
        *project["dependencies"],
        *itertools.chain.from_iterable(project["optional-dependencies"].values()),
    ]
    assert [entry for entry in entries if not re.search(r">=|==|~=", entry)] == []


def test_no_requirement_has_a_licence_that_binds_users(document: dict[str, Any]) -> None:
    """Walk what the default install and the packaged models bring in, as far as it is here."""
    project = document["project"]
    extras = project["optional-dependencies"]
    named = [extras[name] for name in ("models", "minilm", "entities")]
    waiting = [*requirement_names([*project["dependencies"], *itertools.chain(*named)])]
    seen: set[str] = set()
    bound = []
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        licence = " ".join(
            [
                metadata.get("License-Expression") or (metadata.get("License") or "")[:200],
                *(c for c in metadata.get_all("Classifier") or [] if c.startswith("License")),
            ]
        )
        if re.search(r"AGPL|Affero|NonCommercial|CC-BY-NC", licence):
            bound.append(f"{name}: {licence[:120]}")
        for entry in metadata.get_all("Requires-Dist") or []:
            if "extra ==" not in entry:
                waiting += requirement_names([entry])
    assert not bound, "\n".join(bound)
    assert len(seen) > len(project["dependencies"])


def test_type_information_is_there(repository: Path) -> None:
    assert (repository / "stoker" / "py.typed").is_file()
    stub = (repository / "kernels" / "python" / "_core.pyi").read_text()
    assert "def " in stub


def run_installed(script: str, folder: Path) -> str:
    """Run ``script`` in a fresh interpreter that sees the installation and not the checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    ).stdout.strip()


def test_the_installation_imports_from_anywhere(tmp_path: Path, repository: Path) -> None:
    printed = run_installed(
        """
        import stoker.service.settings as module
        print(module.__file__)
        """,
        tmp_path,
    )
    file = Path(printed)
    # Editable: the real file, not the link in stoker/. From a wheel: site-packages.
    assert file == repository / "service" / "settings.py" or "site-packages" in file.parts


def test_the_checkout_is_not_on_the_path(tmp_path: Path) -> None:
    for room in [*ROOMS, "tests", "compose"]:
        found = run_installed(
            f"""
            import importlib.util
            spec = importlib.util.find_spec({room!r})
            print(spec.origin if spec else None)
            """,
            tmp_path,
        )
        assert str(Path(__file__).resolve().parents[2]) not in found, room


def test_the_command_and_the_module_are_the_same(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = Path(sys.executable).with_name("stoker")
    outputs = [
        subprocess.run(
            [*line, "--help"],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        ).stdout
        for line in ([str(command)], [sys.executable, "-P", "-m", "stoker"])
    ]
    assert outputs[0].strip()
    assert "demo" in outputs[0]
    assert outputs[0] == outputs[1]
