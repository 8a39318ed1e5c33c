"""STYLE: events and metrics are named by rule and documented; what is public has a docstring."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "service": "service",
    "prefetch": "prefetch",
    "index": "index",
    "kvcache": "kvcache",
    "kernels": "kernels/python",
}
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
EVENT = re.compile(r"(?P<room>[a-z]+)\.[a-z0-9]+(?:_[a-z0-9]+)+")
METRIC = re.compile(r"stoker_(?:service|prefetch|index|kvcache|kernels)_[a-z0-9]+(?:_[a-z0-9]+)*")
METRIC_KINDS = {
    "Counter",
    "Gauge",
    "Histogram",
    "Summary",
    "Info",
    "CounterMetricFamily",
    "GaugeMetricFamily",
    "HistogramMetricFamily",
    "SummaryMetricFamily",
    "InfoMetricFamily",
}
BASE_UNITS_BROKEN = re.compile(r"_(?:ms|us|ns|milliseconds|kb|mb|gb|kib|mib|gib|percent)(?:_|$)")


@functools.cache
def sources() -> list[tuple[str, str, ast.Module]]:
    """Return (room, file, tree) of every module of ours, the front door included."""
    return list(_parsed())


def _parsed() -> Iterator[tuple[str, str, ast.Module]]:
    for room, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield room, str(path.relative_to(ROOT)), ast.parse(path.read_text())
    for path in sorted((ROOT / "stoker").glob("*.py")):
        yield "stoker", str(path.relative_to(ROOT)), ast.parse(path.read_text())


def handbook() -> str:
    """Return what operators read: what events and alerts mean."""
    return (ROOT / "compose" / "OBSERVABILITY.md").read_text()


def metric_pages() -> str:
    """Return where metrics are documented: the service's page, and the operators' handbook."""
    return (ROOT / "service" / "README.md").read_text() + handbook()


@dataclass(frozen=True)
class Call:
    room: str
    where: str
    node: ast.Call
    level: str


def log_calls() -> Iterator[Call]:
    """Yield every call of a structlog logger: `log.info(...)`, `self._log.warning(...)`."""
    for room, file, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value).rpartition(".")[2].lower().strip("_")
            if node.func.attr in LEVELS and owner in {"log", "logger"}:
                yield Call(room, f"{file}:{node.lineno}", node, node.func.attr)


def test_events_are_named_by_rule() -> None:
    faults = []
    for call in log_calls():
        first = call.node.args[0] if call.node.args else None
        if len(call.node.args) != 1 or not isinstance(first, ast.Constant):
            faults.append(f"{call.where}: one constant name, everything else as typed keys")
            continue
        named = EVENT.fullmatch(str(first.value))
        if not named or named["room"] != call.room:
            faults.append(f"{call.where}: {first.value!r} is not {call.room}.noun_verbed")
        faults += [
            f"{call.where}: {keyword.arg} is an f-string; give its parts as keys"
            for keyword in call.node.keywords
            if isinstance(keyword.value, ast.JoinedStr)
        ]
    assert not faults, "\n".join(faults)


def test_events_are_documented() -> None:
    text = handbook()
    names = {
        str(call.node.args[0].value)
        for call in log_calls()
        if call.node.args and isinstance(call.node.args[0], ast.Constant)
    }
    missing = sorted(name for name in names if f"`{name}`" not in text)
    assert not missing, "not in compose/OBSERVABILITY.md:\n" + "\n".join(missing)


def test_no_event_is_documented_that_is_never_logged() -> None:
    names = {
        str(call.node.args[0].value)
        for call in log_calls()
        if call.node.args and isinstance(call.node.args[0], ast.Constant)
    }
    section = handbook().partition("## Events")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([a-z]+\.[a-z0-9_]+)` \|", section, flags=re.MULTILINE))
    assert listed <= names, "\n".join(sorted(listed - names))


def test_events_are_listed_in_order_at_their_level() -> None:
    """A reader looks a name up by the alphabet, and sets an alarm on its level."""
    levels: dict[str, set[str]] = {}
    for call in log_calls():
        if call.node.args and isinstance(call.node.args[0], ast.Constant):
            level = "error" if call.level == "exception" else call.level
            levels.setdefault(str(call.node.args[0].value), set()).add(level)
    section = handbook().partition("## Events")[2]
    rows = re.findall(r"^\| `([a-z]+\.[a-z0-9_]+)` \| ([a-z, ]+) \|", section, flags=re.MULTILINE)
    assert [name for name, _ in rows] == sorted(name for name, _ in rows)
    assert {name: set(text.split(", ")) for name, text in rows} == levels


def test_the_largest_rooms_page_names_every_module() -> None:
    """With some eighty files, a newcomer finds one by its row or not at all."""
    page = (ROOT / "service" / "README.md").read_text()
    rows = re.findall(r"`([\w*]+\.py)`", page)
    files = {path.name for path in (ROOT / "service").glob("*.py")}
    unnamed = {name for name in files if not any(fnmatch(name, row) for row in rows)}
    assert not unnamed, f"no row in service/README.md: {', '.join(sorted(unnamed))}"
    gone = {row for row in rows if "*" not in row and not list((ROOT / "service").rglob(row))}
    assert not gone, f"named in service/README.md, and not there: {', '.join(sorted(gone))}"


def metrics() -> dict[str, tuple[str, str]]:
    """Return every metric of ours as Prometheus shows it: name to (kind, where)."""
    found = {}
    for _, file, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            kind = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0] if node.args else None
            if kind not in METRIC_KINDS or not isinstance(first, ast.Constant):
                continue
            name = str(first.value)
            if not name.startswith("stoker"):
                continue
            kind = kind.removesuffix("MetricFamily")
            if kind == "Counter":
                name = name.removesuffix("_total") + "_total"
            if kind == "Info":
                name = name.removesuffix("_info") + "_info"
            found[name] = (kind, f"{file}:{node.lineno}")
    return found


def test_there_are_metrics() -> None:
    assert metrics(), "no metric was found, so the tests below would prove nothing"


def test_metrics_are_named_by_rule() -> None:
    faults = [
        f"{where}: {name}"
        for name, (kind, where) in metrics().items()
        if not METRIC.fullmatch(name)
        or BASE_UNITS_BROKEN.search(name)
        or (kind != "Counter" and name.endswith("_total"))
    ]
    assert not faults, "\n".join(faults)


def test_metrics_are_documented() -> None:
    text = metric_pages()
    missing = sorted(name for name in metrics() if f"`{name}`" not in text)
    assert not missing, "not in service/README.md:\n" + "\n".join(missing)


def test_no_metric_is_documented_that_does_not_exist() -> None:
    pattern = r"`(stoker_(?:service|prefetch|index|kvcache|kernels)_[a-z0-9_]+)"
    listed = set(re.findall(pattern, metric_pages()))
    assert listed <= set(metrics()), "\n".join(sorted(listed - set(metrics())))


def is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in node.body)


def documented_methods() -> set[str]:
    """Return names of methods that a class documents; who overrides one need not say it again."""
    return {
        member.name
        for _, _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for member in node.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(member)
    }


def undocumented(file: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield f"{file}: the module"
    command = file.startswith("service/commands/")
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # A sub-command is documented by its module and by what --help prints.
        if node.name.startswith("_") or (command and node.name in {"add_parser", "run"}):
            continue
        if not ast.get_docstring(node):
            yield f"{file}:{node.lineno}: {node.name}"
        if not isinstance(node, ast.ClassDef):
            continue
        for member in node.body:
            if (
                isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
                and not member.name.startswith("_")
                and not ast.get_docstring(member)
                and member.name not in known
                and not is_stub(member)
                and not any(
                    "setter" in ast.unparse(d) or "overload" in ast.unparse(d)
                    for d in member.decorator_list
                )
            ):
                yield f"{file}:{member.lineno}: {node.name}.{member.name}"


def test_what_is_public_has_a_docstring() -> None:
    known = documented_methods()
    faults = [fault for _, file, tree in sources() for fault in undocumented(file, tree, known)]
    assert not faults, "\n".join(faults)


def test_a_docstring_begins_with_a_whole_sentence() -> None:
    faults = []
    for _, file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and not re.search(r"[.:?!]$", text.partition("\n\n")[0].strip()):
                    faults.append(f"{file}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not faults, "\n".join(faults)


def test_nothing_prints_but_the_command_line() -> None:
    found = [
        f"{file}:{node.lineno}"
        for _, file, tree in sources()
        if not file.startswith(("service/commands/", "service/demo/", "service/cli.py"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not found, "\n".join(found)
