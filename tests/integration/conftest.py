"""The broker that the integration tests talk to, one per session; what they share, importable."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def _load(path: Path) -> ModuleType:
    """Make a file of the tests importable: they are no package, so it has no import name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(path.stem, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


for _shared in ("served.py", "slow_broker.py", "topic_corpus.py"):
    _load(Path(__file__).with_name(_shared))


@pytest.fixture(scope="session")
def broker_session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A running broker, started once."""
    harness = _load(Path(__file__).resolve().parents[1] / "kafka_broker.py")
    try:
        broker = harness.start_broker(tmp_path_factory.mktemp("broker"), in_ci=IN_CI)
    except harness.BrokerUnavailable as error:
        if IN_CI:
            pytest.fail(str(error))
        pytest.skip(str(error))
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nbroker of the tests: {broker.name} at {broker.bootstrap}")
    yield broker
    broker.stop()


@pytest.fixture
def broker(broker_session: Any, request: pytest.FixtureRequest) -> Any:
    """The session's broker; a test marked `apache_kafka` skips where it is another one."""
    if request.node.get_closest_marker("apache_kafka") and not broker_session.is_apache:
        pytest.skip(f"needs Apache Kafka itself (Java and Maven); here is {broker_session.name}")
    return broker_session


def _needs_listener(broker: Any, name: str) -> None:
    """Skip where the broker is not one that we started: another has no listener of ours."""
    if not hasattr(broker, name):
        pytest.skip("the cluster that STOKER_TEST_KAFKA names has no listener of ours")


@pytest.fixture
def secure_broker(broker: Any) -> Any:
    """The broker with its listener that asks for a login over TLS: one that we started has it."""
    _needs_listener(broker, "secure_bootstrap")
    return broker


@pytest.fixture
def slow_broker(broker: Any) -> Iterator[Any]:
    """A proxy before the broker that holds back the answers it is told to; see `slow_broker`."""
    _needs_listener(broker, "behind_port")
    with sys.modules["slow_broker"].SlowBroker(broker.before_port, broker.behind_port) as slow:
        yield slow


@pytest.fixture
def restartable(broker: Any) -> Iterator[Any]:
    """A broker that a test may stop and kill; it runs again afterwards."""
    if not broker.can_restart:
        pytest.skip(f"{broker.name} is not ours to restart")
    yield broker
    if broker.process is None:
        broker.start()
    broker.resume()
    # kafka-python leaves the sockets of failed connections to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def topic_name() -> str:
    """A topic that no other test uses."""
    return f"test.{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["kafka-python", "confluent"])
def open_log(request: pytest.FixtureRequest, broker: Any) -> Iterator[Callable[..., Any]]:
    """Open a log on the broker with each client in turn; closed afterwards."""
    from stoker.service.kafka_options import KafkaOptions

    if request.param == "confluent":
        pytest.importorskip("confluent_kafka", reason="the confluent extra is not installed")
        from stoker.service.confluent_log import ConfluentLog as Log
    else:
        from stoker.service.kafka_log import KafkaLog as Log
    opened = []

    def open_one(**changes: Any) -> Any:
        defaults: dict[str, Any] = {
            "bootstrap": broker.bootstrap,
            "connect_timeout_s": 5.0,
            "request_timeout_s": 10.0,
            "session_timeout_s": 6.0,
        }
        log = Log(KafkaOptions(**{**defaults, **changes}))
        opened.append(log)
        return log

    yield open_one
    for log in opened:
        log.close()
