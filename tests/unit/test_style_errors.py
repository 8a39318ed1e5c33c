"""STYLE, Errors: one tree, five branches; nothing else is raised on purpose."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path

from stoker import errors

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["service", "prefetch", "index", "kvcache", "kernels/python"]
FIVE = {"ConfigError", "InputError", "CapacityError", "UnavailableError", "CorruptError"}
BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    return list(_parsed())


def _parsed() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def exception_classes() -> dict[str, tuple[str, list[str]]]:
    """Return every exception class of the rooms: name to (file, names of its bases)."""
    classes = {
        node.name: (file, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = BUILTIN | FIVE | {"StokerError"}
    found: dict[str, tuple[str, list[str]]] = {}
    while grown := {
        name: entry
        for name, entry in classes.items()
        if name not in found and any(base in known or base in found for base in entry[1])
    }:
        found |= grown
    return found


def test_the_tree_is_drawn_in_one_place() -> None:
    direct = {
        c.__name__ for c in errors.StokerError.__subclasses__() if c.__module__ == errors.__name__
    }
    assert direct == FIVE
    retriable = {name for name in FIVE if getattr(errors, name).retriable}
    assert retriable == {"CapacityError", "UnavailableError"}
    assert issubclass(errors.InputError, ValueError)


def test_every_error_of_a_room_grows_from_one_of_the_five() -> None:
    classes = exception_classes()

    def reaches_the_five(name: str) -> bool:
        return name in FIVE or any(reaches_the_five(b) for b in classes.get(name, ("", []))[1])

    # A base that only lends its attributes (never raised itself) may grow from the root.
    lending = {
        base for name, (_, bases) in classes.items() if reaches_the_five(name) for base in bases
    }
    stray = [
        f"{file}: {name}"
        for name, (file, _) in classes.items()
        # A private class is a signal between functions of one module.
        if not reaches_the_five(name) and name not in lending and not name.startswith("_")
    ]
    assert not stray, "\n".join(stray)


def test_errors_say_what_they_mean() -> None:
    classes = exception_classes()
    silent = [
        f"{file}: {node.name}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in classes and not ast.get_docstring(node)
    ]
    assert not silent, "\n".join(silent)


# Raised on purpose, these would escape `except StokerError`. The rest (StopIteration, TypeError,
# AttributeError of a module, AssertionError of check()) have a meaning of their own.
BARE = {
    "Exception",
    "BaseException",
    "ValueError",
    "RuntimeError",
    "KeyError",
    "IndexError",
    "OSError",
}


BUILDERS = {"__init__", "__post_init__", "__new__", "__call__"}


def raised(tree: ast.AST, private: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what public functions raise.

    A private function's ValueError is a signal to the function that catches it beside it, and the
    protocols of the language (`__getitem__`) ask for KeyError and the like.
    """
    for node in ast.iter_child_nodes(tree):
        hidden = private
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = private or (node.name.startswith("_") and node.name not in BUILDERS)
        if isinstance(node, ast.Raise) and node.exc is not None and not private:
            yield (
                node.lineno,
                ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc),
            )
        yield from raised(node, hidden)


def test_nothing_is_raised_beside_the_tree() -> None:
    found = [
        f"{file}:{line}: raise {name}"
        for file, tree in trees()
        for line, name in raised(tree)
        if name in BARE
    ]
    assert not found, "\n".join(found)


def test_nothing_is_swallowed() -> None:
    found = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                silent = all(isinstance(s, ast.Pass) for s in node.body)
                name = ast.unparse(node.type) if node.type else ""
                if not name or (silent and name in {"Exception", "BaseException"}):
                    found.append(f"{file}:{node.lineno}: except {name or 'everything'}")
    assert not found, "\n".join(found)


def test_errors_are_chained() -> None:
    """An error raised while another is handled names it (`from`), or it is lost in the logs."""
    found = [
        f"{file}:{node.lineno}"
        for file, tree in trees()
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler)
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.cause is None
    ]
    assert not found, "\n".join(found)
