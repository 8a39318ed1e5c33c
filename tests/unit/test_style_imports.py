"""STYLE, Dependency direction: service, then prefetch, index, kvcache, then kernels."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = {
    "service": "service",
    "prefetch": "prefetch",
    "index": "index",
    "kvcache": "kvcache",
    "kernels": "kernels/python",
}
MAY_IMPORT = {
    # The demo uses the front door as a user does: "" is `import stoker`.
    "service": {"service", "prefetch", "index", "kvcache", "kernels", "errors", "", "__version__"},
    "prefetch": {"prefetch", "kernels", "errors"},
    "index": {"index", "kernels", "errors"},
    "kvcache": {"kvcache", "kernels", "errors"},
    "kernels": {"kernels", "errors"},
}
# Clients of the outside stay at the edge of the system.
EDGE = {
    "aiohttp": {"service"},
    "kafka": {"service"},
    "confluent_kafka": {"service"},
    "prometheus_client": {"service"},
    "triton": {"kernels"},
}
# What `import stoker` may not pull in: native code, and everything that takes time to load.
HEAVY = {
    "aiohttp",
    "confluent_kafka",
    "faiss",
    "hnswlib",
    "kafka",
    "numpy",
    "orjson",
    "prometheus_client",
    "pyarrow",
    "pyroaring",
    "rich",
    "safetensors",
    "sentence_transformers",
    "structlog",
    "torch",
    "transformers",
    "triton",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "sqlite3",
    "ssl",
}


def modules() -> Iterator[tuple[str, Path]]:
    root = Path(__file__).resolve().parents[2]
    for room, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            yield room, path


class Imports(ast.NodeVisitor):
    """Collect the modules that a file imports anywhere, but under `if TYPE_CHECKING:`."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.relative: list[int] = []

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            self.relative.append(node.lineno)
        elif node.module == "stoker":
            self.found += [(node.lineno, f"stoker.{alias.name}") for alias in node.names]
        elif node.module:
            self.found.append((node.lineno, node.module))

    def visit_Call(self, node: ast.Call) -> None:
        # importlib.import_module("stoker.room.module") points in a direction too.
        name = ast.unparse(node.func)
        if name.endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            self.found.append((node.lineno, str(node.args[0].value)))
        self.generic_visit(node)


def faults(room: str, source: str) -> list[str]:
    """Return what the imports of ``source``, a module of ``room``, break."""
    imports = Imports()
    imports.visit(ast.parse(source))
    broken = [f"line {line}: a relative import" for line in imports.relative]
    for line, name in imports.found:
        first, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if first in FOLDERS:
            broken.append(f"line {line}: {name}: import it as stoker.{name}")
        elif first == "stoker" and target not in MAY_IMPORT[room]:
            broken.append(
                f"line {line}: {name}: {room} may not import {target or 'the front door'}"
            )
        elif first in EDGE and room not in EDGE[first]:
            broken.append(f"line {line}: {name} belongs to {', '.join(EDGE[first])}")
    return broken


def test_imports_point_one_way() -> None:
    root = Path(__file__).resolve().parents[2]
    found = [
        f"{path.relative_to(root)}: {fault}"
        for room, path in modules()
        for fault in faults(room, path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source", "count"),
    [
        ("index", "from stoker.kernels.pool import Pool\nfrom stoker.errors import InputError", 0),
        ("index", "from stoker.prefetch.plan import plan_warm", 1),
        ("prefetch", "def f():\n    from stoker.service.engine import Engine", 1),
        ("kvcache", "import importlib\nimportlib.import_module('stoker.index.search')", 1),
        ("kernels", "from . import pool", 1),
        ("index", "import kernels", 1),
        ("prefetch", "import stoker", 1),
        ("prefetch", "import aiohttp", 1),
        ("service", "import aiohttp, stoker.index.search", 0),
        (
            "index",
            "if TYPE_CHECKING:\n    from stoker.service.x import X",
            0,
        ),
    ],
)
def test_the_check_sees_what_it_should(room: str, source: str, count: int) -> None:
    assert len(faults(room, source)) == count


def imported_by(statement: str) -> set[str]:
    """Run ``statement`` in a fresh interpreter and return the modules that it brought in."""
    script = textwrap.dedent(
        f"""
        import sys
        before = set(sys.modules)
        {statement}
        import json
        print(json.dumps(sorted(set(sys.modules) - before)))
        """
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout))


def test_importing_stoker_loads_nothing_heavy() -> None:
    # A set of modules and not a time: the time is a matter of the machine (tests/bench prints it).
    loaded = imported_by("import stoker")
    rooms = {f"stoker.{room}" for room in FOLDERS}
    heavy = {name for name in loaded if name.partition(".")[0] in HEAVY}
    own = {name for name in loaded if any(name == r or name.startswith(r + ".") for r in rooms)}
    assert heavy == set()
    assert own == set()
    assert not any(name.endswith("_core") for name in loaded)


def test_help_of_the_command_loads_no_model_and_no_native_code() -> None:
    loaded = imported_by(
        "import contextlib, io, stoker.service.cli as cli\n"
        "        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "            cli.main(['--help'])"
    )
    banned = {"torch", "transformers", "sentence_transformers", "faiss", "hnswlib", "kafka"}
    assert {name for name in loaded if name.partition(".")[0] in banned} == set()
    assert "stoker.kernels._core" not in loaded


def test_public_names_resolve_and_are_documented() -> None:
    script = textwrap.dedent(
        """
        import stoker
        assert set(stoker._HOMES) <= set(stoker.__all__)
        assert set(stoker.__all__) <= set(dir(stoker))
        for name in stoker.__all__:
            value = getattr(stoker, name)
            assert name == "__version__" or value.__doc__, name
        try:
            stoker.no_such_name
        except AttributeError as error:
            assert "no_such_name" in str(error)
        else:
            raise AssertionError("an unknown name was found")
        """
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)
