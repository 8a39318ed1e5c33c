"""Settings of the Kafka connection, in each client's spelling."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaTimeoutError

from stoker.errors import ConfigError
from stoker.service.kafka_log import KafkaLog
from stoker.service.kafka_options import KafkaOptions
from stoker.service.kafka_wiring import kafka_options, open_kafka
from stoker.service.settings import ServiceSettings
from stoker.service.streams import TopicSpec

SECURE: dict[str, Any] = {
    "bootstrap": "a:9093, b:9093",
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-256",
    "sasl_username": "user",
    "sasl_password": "hidden",
    "tls_ca_file": "ca.pem",
    "tls_cert_file": "cert.pem",
    "tls_key_file": "key.pem",
}


def test_a_secured_cluster_in_both_spellings() -> None:
    options = KafkaOptions(**SECURE)
    ours = options.kafka_python()
    assert ours["bootstrap_servers"] == ["a:9093", "b:9093"]
    assert ours["security_protocol"] == "SASL_SSL"
    assert ours["sasl_mechanism"] == "SCRAM-SHA-256"
    assert (ours["sasl_plain_username"], ours["sasl_plain_password"]) == ("user", "hidden")
    assert ours["ssl_cafile"] == "ca.pem"
    assert set(ours) <= set(KafkaConsumer.DEFAULT_CONFIG) & set(KafkaProducer.DEFAULT_CONFIG)
    theirs = options.librdkafka()
    assert theirs["bootstrap.servers"] == "a:9093,b:9093"
    assert theirs["security.protocol"] == "sasl_ssl"
    assert theirs["ssl.key.location"] == "key.pem"
    assert "hidden" not in repr(options)


def test_an_open_cluster_gets_no_credentials() -> None:
    options = KafkaOptions("localhost:9092")
    assert not [key for key in options.kafka_python() if key.startswith(("sasl", "ssl"))]
    assert not [key for key in options.librdkafka() if key.startswith(("sasl", "ssl"))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bootstrap": ""}, "HOST:PORT"),
        ({"bootstrap": "a,b:1"}, "HOST:PORT"),
        (
            {"security_protocol": "TLS"},
            "service.kafka_security_protocol: expected one of PLAINTEXT",
        ),
        ({"sasl_mechanism": "GSSAPI"}, "kafka_sasl_mechanism"),
        ({"compression": "rar"}, "kafka_compression"),
        ({"sasl_password": ""}, "needs service.kafka_sasl_username and service"),
        ({"tls_key_file": ""}, "go together"),
        ({"delivery_timeout_s": 15.0}, r"at least 0\.005 above"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KafkaOptions(**{**SECURE, **changes})


def test_a_topic_leaves_no_retention_to_the_brokers() -> None:
    options = KafkaOptions("localhost:9092")

    def configs(**changes: Any) -> dict[str, str]:
        spec = TopicSpec("t", **changes)
        return options.topic_configs(spec_fields=dataclasses.asdict(spec))

    plain = configs(retention_s=60.0, retention_bytes=None)
    assert plain["cleanup.policy"] == "delete"
    assert (plain["retention.ms"], plain["retention.bytes"]) == ("60000", "-1")
    assert configs(retention_s=None)["retention.ms"] == "-1"
    compacted = configs(compacted=True)
    assert compacted["cleanup.policy"] == "compact"
    assert "retention.ms" not in compacted
    assert compacted["segment.bytes"] == str(64 << 20)
    assert all(isinstance(value, str) for value in [*plain.values(), *compacted.values()])


@pytest.mark.parametrize(
    ("client", "log_class"), [("kafka-python", "KafkaLog"), ("confluent", "ConfluentLog")]
)
def test_the_setting_chooses_the_client_and_nothing_connects(client: Any, log_class: str) -> None:
    settings = ServiceSettings(
        event_log="kafka", kafka_bootstrap="127.0.0.1:1", kafka_client=client
    )
    if client == "confluent":
        pytest.importorskip("confluent_kafka", reason="the confluent extra is not installed")
    log = open_kafka(settings)
    assert type(log).__name__ == log_class
    log.close()
    assert kafka_options(settings).bootstrap == "127.0.0.1:1"


class Cluster:
    """An administration client whose brokers learn of a new topic only after a while."""

    def __init__(self, *known: dict[int, int]) -> None:
        self.known = iter(known)
        self.asked = 0

    def create_topics(self, topics: Any, **_: Any) -> dict[str, Any]:
        made: concurrent.futures.Future[None] = concurrent.futures.Future()
        made.set_result(None)
        return {topic.topic: made for topic in topics}

    def list_topics(self, name: str, **_: Any) -> Any:
        self.asked += 1
        leaders = {p: SimpleNamespace(leader=at) for p, at in next(self.known).items()}
        topics = {name: SimpleNamespace(partitions=leaders)} if leaders else {}
        return SimpleNamespace(topics=topics)


def test_a_new_topic_is_there_when_it_has_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for its offsets next is not to be told that there is no such topic."""
    module = pytest.importorskip("stoker.service.confluent_log", reason="no confluent extra")
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    log = module.ConfluentLog(KafkaOptions("127.0.0.1:1"))
    cluster = Cluster({}, {0: 1}, {0: 1, 1: -1}, {0: 1, 1: 2})
    monkeypatch.setattr(log, "_admin_client", lambda: cluster)
    log.ensure_topic(TopicSpec("t", partition_count=2))
    assert cluster.asked == 4


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    settings = ServiceSettings(
        event_log="kafka", kafka_bootstrap="127.0.0.1:1", kafka_client="confluent"
    )
    with pytest.raises(ConfigError, match=r"stoker\[confluent\]"):
        open_kafka(settings)


class HungProducer:
    """What `kafka-python` gives for a broker that hangs: each of its two waits takes its time."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.forced = False
        self._sender = self

    def close(self, timeout: float) -> None:
        self.clock[0] += timeout
        if not self.forced:
            raise KafkaTimeoutError("flush")

    def force_close(self) -> None:
        self.forced = True

    def join(self, timeout: float) -> None:
        self.clock[0] += timeout


def test_a_log_closes_in_its_time_where_the_broker_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server outlives the 30 s that orchestrators wait, and is killed."""
    clock = [100.0]
    monkeypatch.setattr("stoker.service.kafka_log.time.monotonic", lambda: clock[0])
    log = KafkaLog(KafkaOptions("127.0.0.1:1"))
    log._producer = producer = HungProducer(clock)
    log.close(3.0)
    assert producer.forced
    assert 100.0 < clock[0] <= 103.0
    assert log._producer is None


def test_a_log_closes_while_a_thread_is_inside_the_client() -> None:
    """It holds the lock, for as long as its request may take."""
    log = KafkaLog(KafkaOptions("127.0.0.1:1"))
    producer = HungProducer([0.0])
    log._producer = producer
    with log._lock:
        closing = threading.Thread(target=log.close, args=(0.01,))
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    assert producer.forced
