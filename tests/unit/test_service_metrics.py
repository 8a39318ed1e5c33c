"""The service's page lists exactly the metrics that a server shows."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.service.metrics import Metrics


def test_the_page_and_the_registry_agree(repository: Path) -> None:
    section = (repository / "service" / "README.md").read_text().partition("## Metrics")[2]
    rows = re.findall(r"^\| `(stoker_[a-z0-9_]+)` \| (\w+) \|", section, flags=re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert set(dict(rows)) == Metrics().names()
    kinds = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric.type
        for metric in Metrics().registry.collect()
        if metric.name.startswith("stoker_")
    }
    assert dict(rows) == kinds


def test_a_page_can_be_read_before_anything_happened() -> None:
    page = Metrics().page().decode()
    assert "stoker_prefetch_measured_hit_ratio -1.0" in page
    assert "process_resident_memory_bytes" in page


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    one, other = Metrics(), Metrics()
    one.events_accepted.inc(3)
    assert "stoker_service_accepted_events_total 3.0" in one.page().decode()
    assert "stoker_service_accepted_events_total 0.0" in other.page().decode()
