"""compose/: alerts and dashboard ask only for metrics and labels that the service has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from stoker.service.metrics import Metrics

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
# Labels that Prometheus adds when it scrapes, and what histograms carry.
SCRAPED = {"instance", "job", "le"}
# Metrics of the process itself and of the scrape.
OTHERS = {"up", "process_resident_memory_bytes"}


def dashboard() -> dict[str, Any]:
    return dict(json.loads((COMPOSE / "grafana" / "dashboards" / "stoker.json").read_text()))


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((COMPOSE / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield (where, query) with Grafana's variables filled in."""
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            yield f"panel {panel['title']!r}", text


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Map every series that the service can show to its own labels."""
    found: dict[str, set[str]] = {}
    for instrument in vars(Metrics()).values():
        for described in getattr(instrument, "describe", list)():
            own = set(instrument._labelnames)
            name = described.name
            if described.type == "counter":
                found[f"{name}_total"] = own
            elif described.type == "histogram":
                found |= {f"{name}{end}": own for end in ("_bucket", "_sum", "_count")}
            else:
                found[name] = own
    return found


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield (metric, labels matched) of every selector below ``node``."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
        return
    for attribute in ("expr", "lhs", "rhs", "args", "vector_selector", "param"):
        child = getattr(node, attribute, None)
        for one in child if isinstance(child, list) else [child]:
            if one is not None and not isinstance(one, str | int | float):
                yield from selectors(one)


def test_there_are_queries() -> None:
    assert len(list(queries())) > 30


def test_every_query_asks_for_what_exists(labels: dict[str, set[str]]) -> None:
    faults = []
    for where, text in queries():
        try:
            parsed = promql_parser.parse(text)
        except ValueError as error:
            faults.append(f"{where}: {text}: {error}")
            continue
        found = list(selectors(parsed))
        assert found, f"{where}: no metric in {text}"
        for metric, matched in found:
            if metric not in labels and metric not in OTHERS:
                faults.append(f"{where}: there is no metric {metric}")
            unknown = matched - labels.get(metric, set()) - SCRAPED
            if unknown:
                faults.append(f"{where}: {metric} has no label {', '.join(sorted(unknown))}")
        grouped = {
            label.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", text)
            for label in group.split(",")
        }
        own = set().union(*(labels.get(metric, set()) for metric, _ in found))
        if grouped - own - SCRAPED:
            faults.append(f"{where}: groups by {', '.join(sorted(grouped - own - SCRAPED))}")
    assert not faults, "\n".join(faults)


def test_counters_are_read_as_rates() -> None:
    naked = [
        f"{where}: {text}"
        for where, text in queries()
        for name in re.findall(r"\bstoker_\w+_total\b", text)
        if not re.search(rf"(?:rate|increase)\({name}", text)
    ]
    assert not naked, "\n".join(naked)


def test_every_metric_of_ours_is_on_the_dashboard(labels: dict[str, set[str]]) -> None:
    text = " ".join(query for _, query in queries())
    base = {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels}
    assert {name for name in base if name not in text} == set()


def test_panels_say_what_they_show() -> None:
    panels = [p for p in dashboard()["panels"] if p["type"] != "row"]
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["title"] and panel["description"] for panel in panels)
    source = yaml.safe_load(
        (COMPOSE / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    # No two panels overlap, and none is wider than the screen.
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        own = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


def test_alerts_say_what_to_do() -> None:
    text = (COMPOSE / "OBSERVABILITY.md").read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in text, f"{rule['alert']} is not in OBSERVABILITY.md"
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


def test_a_closed_gate_and_a_closed_server_are_alerts() -> None:
    """Both are states of 0 or 1 that say nothing by growing: each has an alert on the 0."""
    asked = {rule["alert"]: promql_parser.parse(rule["expr"]) for rule in rules()}
    for name, metric in (
        ("StokerNotReady", "stoker_service_ready_state"),
        ("StokerChunkGateClosed", "stoker_kvcache_gate_open_state"),
    ):
        compared = asked[name]
        assert isinstance(compared, promql_parser.BinaryExpr)
        assert (compared.lhs.name, str(compared.op), compared.rhs.val) == (metric, "==", 0.0)


def test_prometheus_reads_the_alerts_and_grafana_the_dashboards() -> None:
    prometheus = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())
    for name in prometheus["rule_files"]:
        assert (COMPOSE / "prometheus" / name).is_file()
    provider = yaml.safe_load(
        (COMPOSE / "grafana" / "provisioning" / "dashboards" / "stoker.yml").read_text()
    )["providers"][0]
    stack = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())["services"]["grafana"]
    targets = [mount.split(":")[1] for mount in stack["volumes"]]
    assert provider["options"]["path"] in targets
    home = stack["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder, _, name = home.rpartition("/")
    assert folder == provider["options"]["path"]
    assert (COMPOSE / "grafana" / "dashboards" / name).is_file()
