"""Settings of the service room: each one's default and reason, and what does not go together.

How they are read, beside those of the other rooms, is in `service.configuration`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.errors import ConfigError

# Thirty years; the system's waits overflow not far above, inside a thread and long after the start.
_SECONDS_MAX = 1e9
REFRESH_S_MAX = 0.5
"""So that a change is followed within a second: it may miss the round that runs, waits so long for
the next one, and is shown when that has ended."""


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ServiceSettings:
    """What the running service does. Each field says its default's reason and its unit."""

    state_dir: str = dataclasses.field(
        default="",
        metadata={
            "help": "folder of heat, events and receipts; empty means `state` inside the index "
            "folder, so that one folder is all there is to keep"
        },
    )
    writes: Literal["auto", "on", "off"] = dataclasses.field(
        default="auto",
        metadata={
            "help": "document writes: auto takes them unless another process writes to the index "
            "or it is a bare segment, and says so; on fails then; off reads only"
        },
    )
    host: str = dataclasses.field(
        default="127.0.0.1",
        metadata={"help": "address to listen on; loopback, so that nothing is open by accident"},
    )
    port: int = dataclasses.field(
        default=8080,
        metadata={"help": "TCP port; 0 takes a free one and prints it; 8080 is the usual one"},
    )
    auth: Literal["auto", "required", "off"] = dataclasses.field(
        default="auto",
        metadata={
            "help": "bearer keys: auto asks for them unless the address is loopback, where a "
            "laptop's first try should need none; required always; off never"
        },
    )
    api_keys: Mapping[str, str] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "tenant = key, one bearer key per tenant; empty by default, since a built-in "
            "key would be everybody's; TOML table, or tenant=key,tenant=key in the environment",
            "secret": True,
        },
    )
    operator_key: str = dataclasses.field(
        default="",
        metadata={
            "help": "bearer key that may act for every tenant and start warm-ups; empty by "
            "default, since with it one key opens everything",
            "secret": True,
        },
    )
    tenant_default: str = dataclasses.field(
        default="default",
        metadata={"help": "tenant of requests that name none, while no key is asked for"},
    )
    body_bytes_max: int = dataclasses.field(
        default=32 << 20,
        metadata={"help": "largest request body, bytes; 32 MiB carries 10,000 vectors of 384 d"},
    )
    bodies_bytes_max: int = dataclasses.field(
        default=128 << 20,
        metadata={
            "help": "bytes of request bodies that may be worked on at once, of searches and of "
            "writes each; beyond it 429; four of the longest, as many as are written at once, "
            "since parsed they take several times as much"
        },
    )
    batch_max: int = dataclasses.field(
        default=10_000,
        metadata={"help": "most documents or events in one request; bounds the time of one write"},
    )
    k_max: int = dataclasses.field(
        default=1_000,
        metadata={"help": "largest k of a search; each result is read and sent, so it is bounded"},
    )
    search_threads: int = dataclasses.field(
        default=0,
        metadata={
            "help": "threads that search; 0 means 2 per CPU (a thread waiting for a page "
            "leaves its CPU to the other), at most 32"
        },
    )
    searches_queued_max: int = dataclasses.field(
        default=64,
        metadata={
            "help": "searches that may wait for a thread; more are answered 429, because "
            "a long queue only makes every answer late"
        },
    )
    writes_queued_max: int = dataclasses.field(
        default=16,
        metadata={"help": "document and event writes that may be in flight; more are answered 429"},
    )
    deadline_ms_default: int = dataclasses.field(
        default=2_000,
        metadata={"help": "deadline of a search that states none, ms; a user waits no longer"},
    )
    deadline_ms_max: int = dataclasses.field(
        default=60_000,
        metadata={"help": "longest deadline a request may ask for, ms; bounds what it holds"},
    )
    connection_idle_s: float = dataclasses.field(
        default=75.0,
        metadata={
            "help": "how long a connection may wait for its client, s: for a whole request, and "
            "until an answer is taken; above the 60 of usual load balancers, so that they close "
            "first"
        },
    )
    connection_age_s: float = dataclasses.field(
        default=300.0,
        metadata={
            "help": "age above which a connection ends with its next answer, s, each at another "
            "within a tenth of it, so that not all end at once: behind a balancer of connections, "
            "as a Kubernetes Service is, a client's would stay where they are, and a replica that "
            "came back would get none; 300, since one in five minutes is cheap"
        },
    )
    connections_max: int = dataclasses.field(
        default=1_000,
        metadata={
            "help": "connections open at once; more are answered 429; each may hold two buffers of "
            "64 KiB, so that these bound 128 MiB; lower where the process may open fewer files"
        },
    )
    write_deadline_s: float = dataclasses.field(
        default=30.0,
        metadata={"help": "how long a write may wait for the disk or the broker, s"},
    )
    retry_after_s: int = dataclasses.field(
        default=1,
        metadata={"help": "Retry-After of 429 and 503 answers, s; a full queue drains in about 1"},
    )
    drain_s: float = dataclasses.field(
        default=20.0,
        metadata={
            "help": "after SIGTERM, how long running requests may finish, s; under the 30 s "
            "that orchestrators wait before they kill"
        },
    )
    drain_notice_s: float = dataclasses.field(
        default=0.0,
        metadata={
            "help": "after SIGTERM, seconds between closing /readyz and closing the port, so that "
            "a load balancer can look away first; 0, because a laptop has none"
        },
    )
    ready_requires_warm: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "whether /readyz waits for the warm-up's receipt; traffic on a cold "
            "replica is the pain that Stoker ends"
        },
    )
    warm: Literal["auto", "none", "all"] = dataclasses.field(
        default="auto",
        metadata={
            "help": "warm-up at start: auto loads by heat within the budget, none loads "
            "nothing, all loads everything that fits"
        },
    )
    warm_deadline_s: float = dataclasses.field(
        default=60.0,
        metadata={
            "help": "longest automatic warm-up, s; then readiness opens with what is there, "
            "before a start-up probe kills the pod"
        },
    )
    refresh_s: float = dataclasses.field(
        default=0.5,
        metadata={
            "help": "how often a read-only server looks for what the writing process changed, s; "
            "at most 0.5, so that no earlier answer is reused a second after a change ended it; "
            "looking costs one small read"
        },
    )
    placement: Literal["off", "observe", "act"] = dataclasses.field(
        default="observe",
        metadata={
            "help": "the arena on live searches: observe compares policies and measures entropy; "
            "act lets the session forecast compete too, for twice the CPU, and loads ahead "
            "what the acting policy wants, into free room; off spares the CPU"
        },
    )
    placement_cpu_ratio_max: float = dataclasses.field(
        default=0.02,
        metadata={
            "help": "share of one core for that; requests beyond it are skipped and counted; 0.02, "
            "so that it stays below 3 % with what cannot be measured"
        },
    )
    heat_wait_s: float = dataclasses.field(
        default=10.0,
        metadata={
            "help": "where there is no snapshot of the heat, how long the first warm-up waits for "
            "it to be rebuilt from the log, s; a million events take about that. A log that cannot "
            "be reached is not waited for, once a few tries have shown it"
        },
    )
    embed_model: str = dataclasses.field(
        default="",
        metadata={
            "help": "embedding model for text: a local folder, a hub name, 'bundled' for the "
            "packaged one, or 'off'; empty takes the one that the index was built with, since "
            "vectors of two models cannot be compared"
        },
    )
    event_log: Literal["embedded", "kafka"] = dataclasses.field(
        default="embedded",
        metadata={
            "help": "where events are kept: a durable log in the state folder, which needs "
            "nothing else running, or kafka"
        },
    )
    kafka_bootstrap: str = dataclasses.field(
        default="",
        metadata={"help": "HOST:PORT[,HOST:PORT] of the Kafka brokers; needed by event_log=kafka"},
    )
    kafka_client: Literal["kafka-python", "confluent"] = dataclasses.field(
        default="kafka-python",
        metadata={
            "help": "library that talks to the brokers; kafka-python is always there, confluent "
            "(an extra) is several times faster"
        },
    )
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = (
        dataclasses.field(
            default="PLAINTEXT",
            metadata={"help": "how to talk to the brokers; Kafka's own default, for a first try"},
        )
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = dataclasses.field(
        default="SCRAM-SHA-512",
        metadata={"help": "how to log in to the brokers; the strongest that they commonly have"},
    )
    kafka_sasl_username: str = dataclasses.field(
        default="", metadata={"help": "user of the brokers; empty, since PLAINTEXT needs none"}
    )
    kafka_sasl_password: str = dataclasses.field(
        default="",
        metadata={
            "help": "password of the brokers' user; empty, since PLAINTEXT needs none",
            "secret": True,
        },
    )
    kafka_tls_ca_file: str = dataclasses.field(
        default="",
        metadata={"help": "PEM file of the authorities to trust; empty means the system's own"},
    )
    kafka_tls_cert_file: str = dataclasses.field(
        default="",
        metadata={"help": "PEM file of our certificate, where brokers ask for one; most do not"},
    )
    kafka_tls_key_file: str = dataclasses.field(
        default="", metadata={"help": "PEM file of that certificate's key; goes with it"}
    )
    kafka_compression: Literal["none", "gzip", "lz4", "snappy", "zstd"] = dataclasses.field(
        default="lz4",
        metadata={"help": "compression of what we produce; lz4 halves JSON at next to no time"},
    )
    kafka_replication_factor: int = dataclasses.field(
        default=-1,
        metadata={"help": "replicas of topics that we make; -1 takes the cluster's own default"},
    )
    kafka_spool_bytes_max: int = dataclasses.field(
        default=1 << 30,
        metadata={
            "help": "bytes that acknowledged events may take on this disk while the brokers are "
            "away; 1 GiB holds about two million; beyond it events are refused, never dropped"
        },
    )
    event_topic: str = dataclasses.field(
        default="stoker.events.v1",
        metadata={"help": "topic (or local log) of the events; the version is in the name"},
    )
    event_partitions: int = dataclasses.field(
        default=8,
        metadata={"help": "partitions of a topic that Stoker creates; bounds parallel consumers"},
    )
    event_retention_s: float = dataclasses.field(
        default=7 * 86_400.0,
        metadata={
            "help": "age at which events go, s; a week holds a weekly rhythm. At most "
            "prefetch.heat_silence_s_max: what a new replica reads that is older would be taken "
            "for another clock's, and count as now"
        },
    )
    event_retention_bytes: int = dataclasses.field(
        default=4 << 30,
        metadata={"help": "bytes of a partition above which the oldest events go; bounds the disk"},
    )
    event_queue_max: int = dataclasses.field(
        default=10_000,
        metadata={
            "help": "events of answered searches that may wait to be written; beyond it they "
            "are dropped and counted, because a search never waits for its event"
        },
    )
    event_bytes_max: int = dataclasses.field(
        default=1 << 20,
        metadata={
            "help": "longest event that is taken, bytes; a longer one becomes a dead letter with "
            "the reason and a hash; 1 MiB, what brokers take by default; at most 8 MiB"
        },
    )
    event_dedup_s: float = dataclasses.field(
        default=86_400.0,
        metadata={
            "help": "age in the log up to which event ids are remembered, s: an event that is sent "
            "again within it counts once; a day, so that what waited for a broker over night, or "
            "is replayed by hand, is known; the newest 65,536 are, whatever their age"
        },
    )
    event_dedup_bytes: int = dataclasses.field(
        default=64 << 20,
        metadata={
            "help": "bytes that remembered event ids may take, whatever their age: 20 an id, and "
            "8 in each snapshot; 64 MiB are 3.3 million ids, a day of 38 events a second; 0 "
            "remembers none, at least 2 MiB otherwise"
        },
    )
    event_group: str = dataclasses.field(
        default="",
        metadata={
            "help": "consumer group of this replica's heat; empty makes one per host and state "
            "folder, so that every replica sees all events; one name per replica keeps the group "
            "where host names change"
        },
    )
    heat_topic: str = dataclasses.field(
        default="auto",
        metadata={
            "help": "compacted topic of the heat, from which a new replica starts instead of "
            "reading all events; auto is stoker.heat.v1 with event_log=kafka and none with the "
            "embedded log, which lies beside the snapshot anyway; off is none"
        },
    )
    heat_topic_s: float = dataclasses.field(
        default=300.0,
        metadata={
            "help": "seconds between publications of the heat, 230 bytes a key; a new replica "
            "reads the events of at most so long, and of one snapshot_s, itself"
        },
    )
    snapshot_s: float = dataclasses.field(
        default=30.0,
        metadata={
            "help": "seconds between snapshots of heat and offsets; a crash replays at most "
            "this much of the log"
        },
    )
    log_level: Literal["debug", "info", "warning", "error"] = dataclasses.field(
        default="info",
        metadata={"help": "least severe log line that is written; info has one line per decision"},
    )
    log_format: Literal["auto", "json", "text"] = dataclasses.field(
        default="auto",
        metadata={
            "help": "auto writes text to a terminal and JSON lines to anything else, "
            "since people read the one and collectors the other"
        },
    )

    def __post_init__(self) -> None:
        for name in (
            "body_bytes_max", "bodies_bytes_max", "batch_max", "k_max", "searches_queued_max",
            "writes_queued_max", "connections_max", "deadline_ms_default", "deadline_ms_max",
            "retry_after_s", "event_partitions", "event_queue_max", "event_bytes_max",
            "event_retention_bytes", "kafka_spool_bytes_max",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"service.{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "connection_idle_s",
            "connection_age_s",
            "write_deadline_s",
            "drain_s",
            "snapshot_s",
            "warm_deadline_s",
            "event_retention_s",
            "heat_topic_s",
            "refresh_s",
        ):
            most = REFRESH_S_MAX if name == "refresh_s" else _SECONDS_MAX
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(
                    f"service.{name} is {getattr(self, name)}; it must be above 0 and at most "
                    f"{most:g}"
                )
        if self.placement not in ("off", "observe", "act"):
            raise ConfigError(
                f"service.placement is {self.placement!r}; it must be off, observe or act"
            )
        if not 0.0 < self.placement_cpu_ratio_max <= 1.0:
            raise ConfigError(
                f"service.placement_cpu_ratio_max is {self.placement_cpu_ratio_max}; it must be "
                "above 0 and at most 1"
            )
        for name in ("drain_notice_s", "heat_wait_s"):
            if not 0 <= getattr(self, name) <= _SECONDS_MAX:
                raise ConfigError(
                    f"service.{name} is {getattr(self, name)}; it must lie in 0..{_SECONDS_MAX:g}"
                )
        if self.event_bytes_max > 8 << 20:
            raise ConfigError(
                f"service.event_bytes_max is {self.event_bytes_max}; topics take at most "
                f"{8 << 20} bytes"
            )
        if self.event_dedup_bytes and self.event_dedup_bytes < 2 << 20:
            raise ConfigError(
                f"service.event_dedup_bytes is {self.event_dedup_bytes}; it must be 0, or at least "
                f"{2 << 20}"
            )
        if not 0 < self.event_dedup_s <= _SECONDS_MAX:
            raise ConfigError(
                f"service.event_dedup_s is {self.event_dedup_s}; it must lie above 0 and at most "
                f"at {_SECONDS_MAX:g}"
            )
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"service.port is {self.port}; it must lie in 0..65535")
        if not 0 <= self.search_threads <= 256:
            raise ConfigError(
                f"service.search_threads is {self.search_threads}; it must lie in 0..256"
            )
        if self.deadline_ms_default > self.deadline_ms_max:
            raise ConfigError(
                f"service.deadline_ms_default ({self.deadline_ms_default}) is above "
                f"service.deadline_ms_max ({self.deadline_ms_max}); lower the first, or raise "
                "the second"
            )
        if self.body_bytes_max > self.bodies_bytes_max:
            raise ConfigError(
                f"service.body_bytes_max ({self.body_bytes_max}) is above "
                f"service.bodies_bytes_max ({self.bodies_bytes_max}), so that one body could never "
                "be taken; raise the second, or lower the first"
            )
        if self.event_log == "kafka" and not self.kafka_bootstrap:
            raise ConfigError(
                "service.event_log is kafka but service.kafka_bootstrap is empty; "
                "give HOST:PORT of a broker, or set service.event_log to embedded"
            )
        if self.event_log == "embedded" and self.kafka_bootstrap:
            raise ConfigError(
                "service.kafka_bootstrap is set but service.event_log is embedded, so the broker "
                "would never be used; set service.event_log to kafka, or remove the other"
            )
        self._check_auth()

    def _check_auth(self) -> None:
        if self.keys_required and not self.api_keys and not self.operator_key:
            raise ConfigError(
                f"service.host is {self.host} and service.auth is {self.auth}, so requests need a "
                "bearer key, but service.api_keys is empty; add a key per tenant, listen on "
                "127.0.0.1, or set service.auth to off on purpose"
            )
        if not self.tenant_default:
            raise ConfigError(
                "service.tenant_default is empty; name the tenant of keyless requests"
            )
        if "" in self.api_keys:
            raise ConfigError("service.api_keys has a key without a tenant; write tenant = key")
        keys = {f"service.api_keys.{tenant}": key for tenant, key in self.api_keys.items()}
        if self.operator_key:
            keys["service.operator_key"] = self.operator_key
        for name, key in keys.items():
            if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"{name} has {len(key)} characters; a bearer key has at least 16 printable "
                    "ASCII ones without a space, so that it cannot be guessed and fits a header"
                )
        if len(set(keys.values())) < len(keys):
            raise ConfigError(
                f"one key stands for two of {', '.join(keys)}; a key must name its tenant"
            )

    @property
    def keys_required(self) -> bool:
        """Whether a request must carry a bearer key."""
        if self.auth == "auto":
            return bool(self.api_keys) or not is_loopback(self.host)
        return self.auth == "required"
