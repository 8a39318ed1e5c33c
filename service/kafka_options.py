"""How to reach a Kafka cluster: one set of settings, turned into each client's own spelling."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from stoker.errors import ConfigError
from stoker.service.streams import TopicSpec

SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
COMPRESSIONS: Final = ("none", "gzip", "lz4", "snappy", "zstd")
# What to do about a version of kafka-python that lacks what we use of it.
OTHER_CLIENT: Final = (
    "pip install 'kafka-python>=3.0.8,<4', or set service.kafka_client to confluent"
)
# How long a producer waits for more records before it sends; an append flushes anyway.
LINGER_S: Final = 0.005
# Bytes that a record's frame, key and headers may add to its value on the wire.
_FRAME_BYTES: Final = 64 << 10
# How long a client may not know of a topic or a partition that is new; theirs are five minutes.
_METADATA_AGE_MS: Final = 30_000


def check_cleanup_policy(spec: TopicSpec, found: str) -> None:
    """Refuse a topic that is there already and compacted otherwise than asked for.

    Args:
        found: Its `cleanup.policy`.

    Raises:
        ConfigError: a compacted topic would lose events, one that is not would grow for ever.
    """
    if ("compact" in found) != spec.compacted:
        raise ConfigError(
            f"Kafka topic {spec.name}: expected cleanup.policy "
            f"{'compact' if spec.compacted else 'delete'}, found {found}; change the topic, or "
            "name another"
        )


@dataclasses.dataclass(frozen=True)
class KafkaOptions:
    """One cluster and how to talk to it.

    Attributes:
        bootstrap: HOST:PORT[,HOST:PORT] of brokers.
        security_protocol: One of `SECURITY_PROTOCOLS`.
        sasl_mechanism: One of `SASL_MECHANISMS`; with a SASL protocol.
        sasl_username, sasl_password: Who we are; with a SASL protocol.
        tls_ca_file: PEM of the authorities to trust; empty means the system's.
        tls_cert_file, tls_key_file: PEM of our own certificate, where brokers ask for one.
        connect_timeout_s: How long a first connection may take before the log is unavailable.
        request_timeout_s: How long one request to a broker may take.
        delivery_timeout_s: How long an append may take to be acknowledged by all in-sync replicas.
        session_timeout_s: A member that was not heard of for so long loses its partitions.
        poll_interval_s_max: A member that did not poll for so long loses its partitions.
        compression: One of `COMPRESSIONS`, for what we produce.
        replication_factor: Of topics that we make; -1 takes the cluster's default.
        record_bytes_max: Longest value that this process sends or reads.
    """

    bootstrap: str
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "SCRAM-SHA-512"
    sasl_username: str = ""
    sasl_password: str = dataclasses.field(default="", repr=False)
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 15.0
    delivery_timeout_s: float = 30.0
    session_timeout_s: float = 15.0
    poll_interval_s_max: float = 300.0
    compression: str = "lz4"
    replication_factor: int = -1
    record_bytes_max: int = 8 << 20

    def __post_init__(self) -> None:
        if not self.bootstrap or any(
            not part.rpartition(":")[0] or not part.rpartition(":")[2].isdecimal()
            for part in self.brokers
        ):
            raise ConfigError(
                f"service.kafka_bootstrap: expected HOST:PORT[,HOST:PORT], found {self.bootstrap!r}"
            )
        for key, value, allowed in (
            ("kafka_security_protocol", self.security_protocol, SECURITY_PROTOCOLS),
            ("kafka_sasl_mechanism", self.sasl_mechanism, SASL_MECHANISMS),
            ("kafka_compression", self.compression, COMPRESSIONS),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"service.{key}: expected one of {', '.join(allowed)}, found {value!r}"
                )
        if self.sasl and not (self.sasl_username and self.sasl_password):
            raise ConfigError(
                f"service.kafka_security_protocol is {self.security_protocol}; it needs "
                "service.kafka_sasl_username and service.kafka_sasl_password"
            )
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError(
                "service.kafka_tls_cert_file and service.kafka_tls_key_file go together; one of "
                "them is empty"
            )
        if self.delivery_timeout_s < self.request_timeout_s + LINGER_S:
            raise ConfigError(
                f"delivery_timeout_s {self.delivery_timeout_s} must be at least {LINGER_S} "
                f"above request_timeout_s {self.request_timeout_s}"
            )

    @property
    def brokers(self) -> list[str]:
        """The brokers' addresses, one by one."""
        return [part.strip() for part in self.bootstrap.split(",")]

    @property
    def sasl(self) -> bool:
        """Whether we log in."""
        return self.security_protocol.startswith("SASL_")

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.security_protocol.endswith("SSL")

    @property
    def request_bytes_max(self) -> int:
        """Longest request: a longest value, its key and its frame."""
        return self.record_bytes_max + _FRAME_BYTES

    def kafka_python(self) -> dict[str, Any]:
        """Spell the connection for `kafka-python`."""
        options: dict[str, Any] = {
            "bootstrap_servers": self.brokers,
            "client_id": "stoker",
            "security_protocol": self.security_protocol,
            "bootstrap_timeout_ms": round(self.connect_timeout_s * 1000),
            "request_timeout_ms": round(self.request_timeout_s * 1000),
            "reconnect_backoff_max_ms": 1000,
            "metadata_max_age_ms": _METADATA_AGE_MS,
        }
        if self.sasl:
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.sasl_username
            options["sasl_plain_password"] = self.sasl_password
        if self.tls:
            options["ssl_cafile"] = self.tls_ca_file or None
            options["ssl_certfile"] = self.tls_cert_file or None
            options["ssl_keyfile"] = self.tls_key_file or None
        return options

    def librdkafka(self) -> dict[str, Any]:
        """Spell the connection for `confluent-kafka`."""
        options: dict[str, Any] = {
            "bootstrap.servers": ",".join(self.brokers),
            "client.id": "stoker",
            "security.protocol": self.security_protocol.lower(),
            "socket.timeout.ms": round(self.request_timeout_s * 1000),
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.interval.ms": _METADATA_AGE_MS,
        }
        if self.sasl:
            options["sasl.mechanism"] = self.sasl_mechanism
            options["sasl.username"] = self.sasl_username
            options["sasl.password"] = self.sasl_password
        for name, value in (
            ("ssl.ca.location", self.tls_ca_file),
            ("ssl.certificate.location", self.tls_cert_file),
            ("ssl.key.location", self.tls_key_file),
        ):
            if self.tls and value:
                options[name] = value
        return options

    def topic_configs(self, *, spec_fields: dict[str, Any]) -> dict[str, str]:
        """Spell a topic's retention and compaction as Kafka's topic settings, none left out."""
        retention_s = spec_fields["retention_s"]
        retention_bytes = spec_fields["retention_bytes"]
        configs = {
            "cleanup.policy": "compact" if spec_fields["compacted"] else "delete",
            "retention.ms": "-1" if retention_s is None else str(round(retention_s * 1000)),
            "retention.bytes": "-1" if retention_bytes is None else str(retention_bytes),
            "max.message.bytes": str(spec_fields["record_bytes_max"] + _FRAME_BYTES),
            # The broker's clock says when a record came, not any producer's.
            "message.timestamp.type": "LogAppendTime",
        }
        if spec_fields["compacted"]:
            del configs["retention.ms"], configs["retention.bytes"]
            if retention_s is not None:
                configs["delete.retention.ms"] = str(round(retention_s * 1000))
            configs["min.cleanable.dirty.ratio"] = "0.5"
            # What is in the newest segment is not compacted: by default that is a gigabyte.
            configs["segment.bytes"] = str(64 << 20)
        return configs
