"""The documentation that every Python carries, as passages: docstrings and ``pydoc_data.topics``.

Nothing of the standard library is imported or run: sources are parsed with ``ast``, so reading
them has no side effects. (``builtins``, whose documentation has no source, is loaded in every
interpreter.) The order is fixed for one Python version: modules that many people ask about come
first, so that a time box that ends early still covers them, then the language topics, then the
rest by name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import UnavailableError
from stoker.service.chunking import split_words
from stoker.service.passages import Passage, text_digest

# Not documentation for users of the library: tests, bundled programs, generated build settings.
_FOLDERS_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages"}
    | {"turtledemo", "__pycache__", "ensurepip", "__phello__", "pydoc_data", "distutils"}
)
_MODULES_FIRST = (
    *("asyncio", "csv", "pathlib", "logging", "re", "datetime", "_pydatetime", "typing", "sqlite3"),
    *("json", "threading", "subprocess", "collections", "functools", "contextlib", "dataclasses"),
    *("enum", "unittest", "argparse", "concurrent", "multiprocessing", "queue", "socket", "ssl"),
    *("http", "urllib", "email", "xml", "tempfile", "shutil", "os", "random", "statistics"),
    *("decimal", "_pydecimal", "fractions", "zipfile", "tarfile", "gzip", "pickle", "copy"),
    *("inspect", "ast", "importlib", "traceback", "warnings", "configparser", "ipaddress", "uuid"),
    *("hmac", "secrets", "hashlib", "base64", "heapq", "bisect", "weakref", "types", "abc"),
    *("textwrap", "string", "difflib", "calendar", "zoneinfo", "pdb", "timeit", "tracemalloc"),
    *("doctest", "html", "locale", "selectors", "socketserver", "graphlib", "fileinput", "glob"),
    *("fnmatch", "shlex", "signal", "struct", "operator", "sched", "tomllib", "pprint", "platform"),
)
_WORDS_MIN = 4


def stdlib_passages(*, words: int = 70, root: Path | None = None) -> Iterator[Passage]:
    """Yield the standard library's documentation as passages of about ``words`` words.

    Args:
        words: Target length of a passage; long docstrings are split on paragraphs.
        root: The library's folder; the running interpreter's by default.

    Raises:
        UnavailableError: the interpreter carries no library sources (a zipped or stripped one).
    """
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    files = _source_files(folder)
    if not files:
        raise UnavailableError(
            f"no library sources (*.py) under {folder}; this Python was installed without them"
        )
    first = {name: place for place, name in enumerate(_MODULES_FIRST)}
    ranked = sorted(files, key=lambda item: (first.get(item[0].split(".")[0], 10_000), item[0]))
    head = [item for item in ranked if item[0].split(".")[0] in first]
    tail = [item for item in ranked if item[0].split(".")[0] not in first]
    seen: set[str] = set()
    yield from _fresh(_file_passages(head, words), seen)
    yield from _fresh(_builtin_passages(words), seen)
    yield from _fresh(_topic_passages(folder, words), seen)
    yield from _fresh(_file_passages(tail, words), seen)


def _fresh(passages: Iterator[Passage], seen: set[str]) -> Iterator[Passage]:
    """Drop passages whose text or id came before (inherited and copied docstrings)."""
    for passage in passages:
        digest = text_digest(passage.text)
        if digest in seen or passage.id in seen:
            continue
        seen.update((digest, passage.id))
        yield passage


def _source_files(folder: Path) -> list[tuple[str, Path]]:
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if any(part in _FOLDERS_SKIPPED or part.startswith("config-") for part in parts[:-1]):
            continue
        names = [*parts[:-1], parts[-1][:-3]]
        if names[-1] == "__init__":
            names.pop()
        if names:
            found.append((".".join(names), path))
    return sorted(found)


def _file_passages(files: list[tuple[str, Path]], words: int) -> Iterator[Passage]:
    for module, path in files:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # a template or a broken site file is not documentation
        yield from _cut(module, f"module {module}", ast.get_docstring(tree), module, words)
        yield from _node_passages(tree, module, module, words)


def _node_passages(node: ast.AST, name: str, module: str, words: int) -> Iterator[Passage]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            full = f"{name}.{child.name}"
            if not _private(child.name):
                doc = ast.get_docstring(child)
                yield from _cut(full, f"class {full}", doc, module, words)
                yield from _node_passages(child, full, module, words)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            full = f"{name}.{child.name}"
            if not _private(child.name):
                title = f"{full}({_arguments(child)})"
                yield from _cut(full, title, ast.get_docstring(child), module, words)
        elif isinstance(child, ast.If | ast.Try):
            yield from _node_passages(child, name, module, words)


def _private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args) if arg.arg not in ("self", "cls")]
    if args.vararg:
        names.append(f"*{args.vararg.arg}")
    names.extend(arg.arg for arg in args.kwonlyargs)
    if args.kwarg:
        names.append(f"**{args.kwarg.arg}")
    return ", ".join(names)


def _builtin_passages(words: int) -> Iterator[Passage]:
    for name, thing in sorted(vars(builtins).items()):
        if name.startswith("_") or not callable(thing) or not isinstance(thing.__doc__, str):
            continue
        if getattr(thing, "__module__", "builtins") != "builtins":
            continue  # `exit`, or what a debugger or a shell put there
        yield from _cut(
            name, f"built-in {name}", inspect.cleandoc(thing.__doc__), "builtins", words
        )
        if not isinstance(thing, type) or issubclass(thing, BaseException):
            continue
        for method, member in sorted(vars(thing).items()):
            doc = getattr(member, "__doc__", None)
            if not method.startswith("_") and isinstance(doc, str):
                full = f"{name}.{method}"
                yield from _cut(full, full, inspect.cleandoc(doc), "builtins", words)


def _topic_passages(folder: Path, words: int) -> Iterator[Passage]:
    """Read the language topics from the source's one assignment, without running it."""
    path = folder / "pydoc_data" / "topics.py"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        try:
            topics = ast.literal_eval(node.value)
        except ValueError:
            continue
        if isinstance(topics, dict):
            for topic, text in sorted(topics.items()):
                yield from _cut(f"topics/{topic}", f"topic {topic}", text, "topics", words)


def _cut(key: str, title: str, doc: str | None, module: str, words: int) -> Iterator[Passage]:
    if not doc:
        return
    for place, body in enumerate(split_words(doc, words=words)):
        if len(body.split()) < _WORDS_MIN:
            continue
        text = f"{title}: {body}"
        yield Passage(
            id=f"python/{key}#{place}",
            text=text,
            metadata={"source": "stdlib", "module": module, "content_hash": text_digest(text)},
            origin=f"standard library {key}",
        )
