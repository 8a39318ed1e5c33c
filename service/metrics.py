"""Every metric of the service, in one place, with one registry per server.

Names are `stoker_<room>_<noun>_<unit>[_total]` in base units, and every label comes from a closed
set: a tenant, an id or a text is never a label. `service/README.md` documents them, and a test
compares the two.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From a warm in-memory search to a cold one on a slow volume.
_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
_PAGES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


class Metrics:
    """The instruments. Safe to use from several threads."""

    def __init__(self) -> None:
        registry = CollectorRegistry(auto_describe=True)
        self.registry = registry
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._add_requests()
        self._add_index()
        self._add_reuse()
        self._add_gate()
        self._add_prediction()
        self._add_events()
        self._add_heat()
        self._add_warm_ups()
        self._add_placement()
        self._add_entropy()
        self._add_tiers()

    def _add_requests(self) -> None:
        registry = self.registry
        self.requests = Counter(
            "stoker_service_requests_total",
            "HTTP requests answered, by path template, method and status",
            ("route", "method", "status"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "stoker_service_request_seconds",
            "Time from a request's first line to its answer, by path template",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "stoker_service_refused_requests_total",
            "Requests refused by reason: the problem kind of the answer",
            ("reason",),
            registry=registry,
        )
        self.pending = Gauge(
            "stoker_service_pending_requests",
            "Requests that run or wait for a thread, by lane",
            ("lane",),
            registry=registry,
        )
        self.connections = Gauge(
            "stoker_service_open_connections", "Connections of clients", registry=registry
        )
        self.body_bytes = Gauge(
            "stoker_service_body_bytes",
            "Bytes of request bodies that are being worked on, by lane",
            ("lane",),
            registry=registry,
        )
        self.ready = Gauge(
            "stoker_service_ready_state", "1 when /readyz is open, else 0", registry=registry
        )
        self.embed_seconds = Histogram(
            "stoker_service_embed_seconds",
            "Time to embed a query's text",
            buckets=_SECONDS,
            registry=registry,
        )

    def _add_index(self) -> None:
        registry = self.registry
        self.search_seconds = Histogram(
            "stoker_index_search_seconds",
            "Time of the index search alone, without waiting and embedding",
            buckets=_SECONDS,
            registry=registry,
        )
        self.search_pages = Histogram(
            "stoker_index_search_pages",
            "Pages that one search read from storage; 0 when all was resident",
            buckets=_PAGES,
            registry=registry,
        )
        self.read_bytes = Counter(
            "stoker_index_read_bytes_total",
            "Bytes that searches read from storage on demand",
            registry=registry,
        )
        self.resident_bytes = Gauge(
            "stoker_index_resident_bytes",
            "Bytes of the index resident in the page pool, by kind of page",
            ("kind",),
            registry=registry,
        )
        self.size_bytes = Gauge(
            "stoker_index_size_bytes",
            "Bytes of the index on storage, by kind of page",
            ("kind",),
            registry=registry,
        )
        self.damaged_pages = Gauge(
            "stoker_index_damaged_pages",
            "Pages that failed their checksum twice and are left out, by kind of page",
            ("kind",),
            registry=registry,
        )
        self.incomplete = Counter(
            "stoker_index_incomplete_answers_total",
            "Searches that did without something that they wanted: damaged, or not there in time",
            registry=registry,
        )
        self.documents = Gauge(
            "stoker_index_live_documents", "Documents that a search can find", registry=registry
        )
        self.generation = Gauge(
            "stoker_index_generation_number", "The generation that answers", registry=registry
        )
        self.written = Counter(
            "stoker_index_written_documents_total",
            "Documents written durably, by operation: upsert, delete",
            ("operation",),
            registry=registry,
        )

    def _add_reuse(self) -> None:
        registry = self.registry
        self.reuse = Counter(
            "stoker_kvcache_lookup_decisions_total",
            "Semantic lookup reuse decisions: reused, searched, off",
            ("decision",),
            registry=registry,
        )
        self.grouped = Counter(
            "stoker_kvcache_grouped_lookups_total",
            "Decisions on searches that came together with one that asks for the same",
            ("decision",),
            registry=registry,
        )
        self.groups = Gauge(
            "stoker_kvcache_lookup_groups",
            "Groups of searches that ask for the same, in the last window, all tenants",
            registry=registry,
        )

    def _add_events(self) -> None:
        registry = self.registry
        self.events_accepted = Counter(
            "stoker_service_accepted_events_total",
            "Events of clients made durable in the log",
            registry=registry,
        )
        self.events_published = Counter(
            "stoker_service_published_events_total",
            "Events of answered searches written to the log",
            registry=registry,
        )
        self.events_dropped = Counter(
            "stoker_service_dropped_events_total",
            "Events of answered searches dropped because the queue was full or the log was away",
            registry=registry,
        )

    def _add_heat(self) -> None:
        registry = self.registry
        self.event_lag = Gauge(
            "stoker_prefetch_lag_events",
            "Events in the log that the heat does not hold yet",
            registry=registry,
        )
        self.event_lag_age = Gauge(
            "stoker_prefetch_lag_age_seconds",
            "How old the oldest event that the heat does not hold yet may be; 0 without a lag",
            registry=registry,
        )
        self.events_applied = Counter(
            "stoker_prefetch_applied_events_total",
            "Events that the heat has taken in",
            registry=registry,
        )
        self.duplicate_events = Counter(
            "stoker_prefetch_duplicate_events_total",
            "Events left out because one of their tenant's with the same id had come before",
            registry=registry,
        )
        self.false_duplicate_events = Counter(
            "stoker_prefetch_false_duplicate_events_total",
            "Of those, how many are expected to be others with the same fingerprint; a fraction",
            registry=registry,
        )
        self.remembered_ids = Gauge(
            "stoker_prefetch_remembered_ids", "Event ids that are remembered", registry=registry
        )
        self.remembered_ids_age = Gauge(
            "stoker_prefetch_remembered_ids_age_seconds",
            "How far back the remembered event ids reach",
            registry=registry,
        )
        self.dead_letters = Counter(
            "stoker_prefetch_dead_letters_total",
            "Events refused by the schema and put aside with the reason",
            registry=registry,
        )
        self.heat_keys = Gauge(
            "stoker_prefetch_heat_keys", "Content keys that have heat", registry=registry
        )

    def _add_warm_ups(self) -> None:
        registry = self.registry
        self.warm_seconds = Gauge(
            "stoker_prefetch_warm_seconds", "Duration of the last warm-up", registry=registry
        )
        self.loaded_bytes = Counter(
            "stoker_prefetch_loaded_bytes_total",
            "Bytes read by warm-ups, by the tier that they went to",
            ("tier",),
            registry=registry,
        )
        self.predicted_hit_ratio = Gauge(
            "stoker_prefetch_predicted_hit_ratio",
            "Hit ratio that the last warm-up predicted",
            registry=registry,
        )
        self.measured_hit_ratio = Gauge(
            "stoker_prefetch_measured_hit_ratio",
            "Share of the accesses after the last warm-up that it served; -1 until measured",
            registry=registry,
        )
        self.measured_hit_ratio.set(-1)

    def _add_prediction(self) -> None:
        registry = self.registry
        self.expected_blocks = Gauge(
            "stoker_kvcache_expected_blocks",
            "Prefix blocks of the engine's folder, there or not, that the heat expects to be used",
            registry=registry,
        )
        self.engine_bytes = Gauge(
            "stoker_kvcache_engine_bytes",
            "Bytes of the engine's prefix blocks when their budget was last looked at",
            registry=registry,
        )
        self.evicted_blocks = Counter(
            "stoker_kvcache_evicted_blocks_total",
            "Prefix blocks of the engine's folder removed to keep its budget",
            registry=registry,
        )

    def _add_gate(self) -> None:
        # The label is the one model whose KV the server warms: named by a setting, never by a call.
        registry = self.registry
        self.gate_open = Gauge(
            "stoker_kvcache_gate_open_state",
            "1 while the model's stored passages may be reused at new places, else 0",
            ("model",),
            registry=registry,
        )
        self.gate_measured = Gauge(
            "stoker_kvcache_gate_measured_timestamp_seconds",
            "When that was last measured, in Unix time; 0 when never",
            ("model",),
            registry=registry,
        )
        self.gate_divergence = Gauge(
            "stoker_kvcache_gate_divergence_nats",
            "Mean KL divergence from full recompute that was measured",
            ("model",),
            registry=registry,
        )
        self.gate_agreement = Gauge(
            "stoker_kvcache_gate_agreement_ratio",
            "Share of positions with the same most likely token as full recompute",
            ("model",),
            registry=registry,
        )
        self.gate_loss_gain = Gauge(
            "stoker_kvcache_gate_loss_gain_ratio",
            "How much larger the next-token loss was than with full recompute",
            ("model",),
            registry=registry,
        )
        self.gate_measurements = Counter(
            "stoker_kvcache_gate_measurements_total",
            "Measurements of the model's chunk reuse, by outcome: allowed, refused, failed",
            ("model", "outcome"),
            registry=registry,
        )

    def _add_placement(self) -> None:
        registry = self.registry
        self.policy_acting = Gauge(
            "stoker_prefetch_policy_acting_state",
            "1 for the placement policy that acts, 0 for those that compete with it",
            ("policy",),
            registry=registry,
        )
        self.policy_switches = Counter(
            "stoker_prefetch_policy_switches_total",
            "Changes of the acting placement policy; the log has the evidence of each",
            registry=registry,
        )
        self.placement_accesses = Counter(
            "stoker_prefetch_placement_accesses_total",
            "Retrieved passages that the placement policies were compared on",
            registry=registry,
        )
        self.placement_hits = Counter(
            "stoker_prefetch_placement_hits_total",
            "Of those, the ones that the acting policy would have had in its room",
            registry=registry,
        )
        self.placement_skipped = Counter(
            "stoker_prefetch_placement_skipped_requests_total",
            "Searches that the policies did not see: their share of CPU was spent, or no gap came",
            registry=registry,
        )
        self.placement_cpu = Counter(
            "stoker_prefetch_placement_cpu_seconds_total",
            "CPU time of comparing placement policies and measuring entropy",
            registry=registry,
        )
        self.ahead_keys = Counter(
            "stoker_prefetch_ahead_keys_total",
            "Passages that the acting policy wanted ahead, by what became of them: useful, late, "
            "unused, polluting",
            ("outcome",),
            registry=registry,
        )
        self.ahead_bytes = Counter(
            "stoker_prefetch_ahead_bytes_total",
            "Bytes loaded ahead by the acting policy",
            registry=registry,
        )

    def _add_entropy(self) -> None:
        registry = self.registry
        self.entropy_streams = Gauge(
            "stoker_prefetch_entropy_streams",
            "Tenants, and routes of them, by what their access entropy asks for: pin, evict, shard",
            ("regime",),
            registry=registry,
        )
        self.entropy_bits = Gauge(
            "stoker_prefetch_entropy_bits",
            "Access entropy over tenants and routes: least, median, most",
            ("rank",),
            registry=registry,
        )
        self.entropy_drifts = Counter(
            "stoker_prefetch_entropy_drifts_total",
            "Times that a stream's entropy fell by more than 0.3 bit within a window",
            registry=registry,
        )

    def _add_tiers(self) -> None:
        registry = self.registry
        self.cross_tier = Gauge(
            "stoker_prefetch_cross_tier_state",
            "1 while the GPU misses over 12 % and NVMe is idle over 65 %, else 0",
            registry=registry,
        )
        self.gpu_miss = Gauge(
            "stoker_prefetch_gpu_miss_ratio",
            "GPU pages copied over asked for, last second; -1 without a GPU tier or demand for it",
            registry=registry,
        )
        self.gpu_miss.set(-1)
        self.nvme_idle = Gauge(
            "stoker_prefetch_nvme_idle_ratio",
            "Share of the last second in which no search waited for a read",
            registry=registry,
        )

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text form."""
        return generate_latest(self.registry)

    def names(self) -> set[str]:
        """Return the name of every metric of ours, as Prometheus shows it."""
        names = set()
        for metric in self.registry.collect():
            if metric.name.startswith("stoker_"):
                names.add(metric.name + ("_total" if metric.type == "counter" else ""))
        return names
