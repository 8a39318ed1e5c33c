"""What we use of kafka-python that it promises to nobody: there, or missed with what to do."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import kafka
import pytest
from kafka.coordinator.consumer import ConsumerCoordinator

from stoker.errors import ConfigError
from stoker.service import kafka_group
from stoker.service.kafka_group import KafkaGroupConsumer, joins_of
from stoker.service.kafka_options import KafkaOptions
from stoker.service.kafka_wiring import open_kafka
from stoker.service.settings import ServiceSettings

CALLS = kafka_group._JOIN_CALLS


def test_the_installed_client_tells_of_its_joins() -> None:
    """By its own objects, made without a broker: a version that renames them fails here."""
    client = kafka.KafkaConsumer.__new__(kafka.KafkaConsumer)
    assert "_coordinator" in kafka.KafkaConsumer.__init__.__code__.co_names
    client._coordinator = ConsumerCoordinator.__new__(ConsumerCoordinator)
    assert joins_of(client) is client._coordinator
    client._coordinator.request_rejoin()
    assert client._coordinator.rejoin_needed is True


@pytest.mark.parametrize("missing", [*CALLS, "_coordinator"])
def test_a_client_that_does_not_is_refused_by_name_and_closed(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[dict[str, Any]] = []
    client = SimpleNamespace(
        subscribe=lambda *_, **__: pytest.fail("it must not join"),
        close=lambda **options: closed.append(options),
        _coordinator=SimpleNamespace(**{name: lambda: True for name in CALLS if name != missing}),
    )
    if missing == "_coordinator":
        del client._coordinator
    monkeypatch.setattr(kafka_group, "made", lambda *_, **__: client)
    with pytest.raises(ConfigError, match=r"kafka-python \d.*joins.*kafka-python>=.*confluent"):
        KafkaGroupConsumer(KafkaOptions("127.0.0.1:1"), "t", "g")
    assert len(closed) == 1


@pytest.mark.parametrize("missing", ["AsyncConsumerRebalanceListener", "KafkaConsumer"])
def test_a_client_without_what_is_imported_of_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kafka_log", "kafka_group"):
        monkeypatch.delitem(sys.modules, f"stoker.service.{name}", raising=False)
    monkeypatch.delattr(kafka, missing)
    settings = ServiceSettings(event_log="kafka", kafka_bootstrap="127.0.0.1:1")
    with pytest.raises(ConfigError, match=f"{missing}.*kafka-python>=.*confluent"):
        open_kafka(settings)
    monkeypatch.undo()
    importlib.import_module("stoker.service.kafka_log")
    open_kafka(settings).close()
