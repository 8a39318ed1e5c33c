"""compose/: Apache Kafka takes the settings that the stack gives it, and starts with them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
# Prints the name of every property that the broker knows.
NAMES_PROGRAM = """
import org.apache.kafka.server.config.AbstractKafkaConfig;
public class Names {
    public static void main(String[] arguments) {
        AbstractKafkaConfig.CONFIG_DEF.names().forEach(System.out::println);
    }
}
"""

pytestmark = [pytest.mark.kafka, pytest.mark.apache_kafka]


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    """The tests' own broker; a test skips where Apache Kafka cannot be had."""
    if "kafka_broker" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "kafka_broker", ROOT / "tests/kafka_broker.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["kafka_broker"] = module
        spec.loader.exec_module(module)
    if not (shutil.which("java") and shutil.which("mvn")):
        pytest.skip("needs Apache Kafka itself: java or mvn is missing")
    return sys.modules["kafka_broker"]


@pytest.fixture(scope="module")
def broker_environment() -> dict[str, str]:
    stack = yaml.safe_load((ROOT / "compose" / "docker-compose.yml").read_text())
    return dict(stack["services"]["kafka"]["environment"])


def properties(environment: dict[str, str]) -> dict[str, str]:
    """Turn the environment into properties, as the broker's image does."""
    return {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in environment.items()
        if name.startswith("KAFKA_") and name != "KAFKA_HEAP_OPTS"
    }


def test_kafka_knows_every_property(
    harness: ModuleType, broker_environment: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "Names.java"
    program.write_text(NAMES_PROGRAM)
    printed = subprocess.run(
        ["java", "-cp", f"{harness.fetch_jars()}/*", str(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout.split()
    assert len(printed) > 100
    assert set(properties(broker_environment)) <= set(printed)


def test_the_image_is_the_kafka_that_is_tested(harness: ModuleType) -> None:
    stack = yaml.safe_load((ROOT / "compose" / "docker-compose.yml").read_text())
    assert stack["services"]["kafka"]["image"] == f"apache/kafka:{harness.KAFKA_VERSION}"


def test_kafka_starts_with_the_settings_of_the_stack(
    harness: ModuleType, broker_environment: dict[str, str], tmp_path: Path
) -> None:
    ports = {"9092": harness.free_port(), "9093": harness.free_port(), "9094": harness.free_port()}
    given = properties(broker_environment)
    for name, value in given.items():
        # The container's names and ports become loopback and free ones; nothing else changes.
        for port, free in ports.items():
            value = value.replace(f"kafka:{port}", f"127.0.0.1:{free}")
            value = value.replace(f"localhost:{port}", f"127.0.0.1:{free}")
            value = value.replace(f"//:{port}", f"//127.0.0.1:{free}")
        given[name] = value
    given["log.dirs"] = str(tmp_path / "data")

    class Stack(harness.ApacheKafka):  # type: ignore[name-defined, misc]
        """Apache Kafka with the stack's settings in place of the tests'."""

        def __init__(self) -> None:
            harness._Process.__init__(
                self, "the stack's Kafka", tmp_path, ports["9092"], is_apache=True
            )
            self.jars = harness.fetch_jars()
            self.properties = tmp_path / "server.properties"
            self.properties.write_text("".join(f"{k}={v}\n" for k, v in given.items()))

    broker: Any = Stack()
    tool = [*broker._java(), "kafka.tools.StorageTool", "format", "-c", str(broker.properties)]
    formatted = subprocess.run(
        [*tool, "-t", broker_environment["CLUSTER_ID"]],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert formatted.returncode == 0, formatted.stdout + formatted.stderr
    try:
        broker.start()  # returns when it answers
    finally:
        broker.stop()
