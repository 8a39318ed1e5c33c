"""Shows on the metrics page what an engine's parts count themselves, when it is asked for."""

from __future__ import annotations

import threading
import time

from prometheus_client import Counter

from stoker.prefetch.receipt import Receipt
from stoker.service.engine_parts import Parts
from stoker.service.metrics import Metrics
from stoker.service.placement_wiring import LivePlacement


class ShownParts:
    """Brings metrics up to date from the parts. Safe from several threads."""

    def __init__(self, parts: Parts, metrics: Metrics) -> None:
        self._parts = parts
        self._metrics = metrics
        self._counted: dict[str, float] = {}
        self._lock = threading.Lock()

    def update(self) -> None:
        """Bring everything up to date that is only known when asked."""
        metrics, parts = self._metrics, self._parts
        residency = parts.index.resident()
        for kind in residency.kinds:
            metrics.resident_bytes.labels(kind.kind).set(kind.resident_bytes)
            metrics.size_bytes.labels(kind.kind).set(kind.pages * kind.page_bytes)
            metrics.damaged_pages.labels(kind.kind).set(kind.quarantined)
        metrics.documents.set(parts.index.count)
        metrics.generation.set(parts.index.generation)
        with self._lock:  # one reader at a time moves the counters
            if parts.publisher is not None:
                sent = parts.publisher.stats()
                self._advance(metrics.events_published, "published", sent.written)
                self._advance(metrics.events_dropped, "dropped", sent.dropped + sent.refused)
            if parts.heat is not None:
                read = parts.heat.stats()
                self._advance(metrics.events_applied, "applied", read.events)
                self._advance(metrics.dead_letters, "refused", read.refused)
                self._advance(metrics.duplicate_events, "duplicates", read.duplicates)
                self._advance(
                    metrics.false_duplicate_events, "false duplicates", read.false_duplicates
                )
                metrics.remembered_ids.set(read.ids.count)
                metrics.remembered_ids_age.set(read.ids.span_s)
                metrics.event_lag.set(read.lag)
                metrics.event_lag_age.set(read.lag_age_s)
                metrics.heat_keys.set(parts.heat.sink.key_count)
            if parts.placement is not None:
                self._show_placement(parts.placement)
            if parts.kv is not None:
                parts.kv.show(metrics, self._advance, time_s=time.time())

    def note_receipt(self, receipt: Receipt) -> None:
        """Show how a warm-up ended, or what was measured after it."""
        metrics = self._metrics
        if receipt.measured_hit_ratio is not None:
            metrics.measured_hit_ratio.set(receipt.measured_hit_ratio)
            return
        metrics.measured_hit_ratio.set(-1)
        metrics.warm_seconds.set(receipt.seconds)
        metrics.loaded_bytes.labels("host").inc(receipt.bytes_read)
        metrics.predicted_hit_ratio.set(receipt.predicted_hit_ratio)

    def _show_placement(self, placement: LivePlacement) -> None:
        metrics, report = self._metrics, placement.report()
        for name in placement.policies:
            metrics.policy_acting.labels(name).set(report.acting == name)
        self._advance(metrics.policy_switches, "switches", report.switches)
        self._advance(metrics.placement_accesses, "placement accesses", report.accesses)
        self._advance(metrics.placement_hits, "placement hits", report.hits)
        self._advance(metrics.placement_skipped, "placement skipped", report.skipped)
        self._advance(metrics.placement_cpu, "placement cpu", report.cpu_s)
        for outcome, total in report.prefetch.items():
            counter = metrics.ahead_keys.labels(outcome)
            self._advance(counter, f"ahead {outcome}", total)
        self._advance(metrics.ahead_bytes, "ahead bytes", report.loaded_bytes)
        for regime, count in report.regimes.items():
            metrics.entropy_streams.labels(regime).set(count)
        for rank, bits in report.entropy_bits.items():
            metrics.entropy_bits.labels(rank).set(bits)
        self._advance(metrics.entropy_drifts, "drifts", report.drifts)
        state = report.cross_tier
        metrics.cross_tier.set(state.open)
        metrics.nvme_idle.set(state.nvme_idle_ratio)
        metrics.gpu_miss.set(-1 if state.gpu_miss_ratio is None else state.gpu_miss_ratio)

    def _advance(self, counter: Counter, name: str, total: float) -> None:
        """Bring a counter to a total that another part counts."""
        grown = total - self._counted.get(name, 0.0)
        if grown > 0:
            counter.inc(grown)
            self._counted[name] = total
