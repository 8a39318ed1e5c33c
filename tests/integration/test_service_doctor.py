"""`stoker doctor` in situations that are really broken, and in one that is whole."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.index.collection_build import build_collection
from stoker.service.configuration import StokerConfig
from stoker.service.doctor import Check, examine
from stoker.service.engine_opening import lock_state
from stoker.service.settings import ServiceSettings
from stoker.service.streams import TopicSpec

FILES_FEW = 200


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "index"
    build_collection(path, np.eye(8, dtype=np.float32), metric="cosine", threads=1)
    return path


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_FEW, FILES_FEW))


def doctor(*arguments: str, before: Any = None) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command; returns its exit code, and the checks by name."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stoker", "doctor", *arguments, "--json"],
        capture_output=True,
        text=True,
        env=clean,
        timeout=120,
        check=False,
        preexec_fn=before,
    )
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0), done.stderr
    return done.returncode, {check["name"]: check for check in answer["checks"]}


def states(config: StokerConfig, index: Path | None, **more: Any) -> dict[str, Check]:
    return {check.name: check for check in examine(config, index, **more)}


def service(**settings: Any) -> StokerConfig:
    return StokerConfig(service=ServiceSettings(**settings))


def test_where_all_is_well_it_says_so_and_leaves_nothing(index: Path) -> None:
    before = sorted(index.rglob("*"))
    code, checks = doctor(str(index))
    assert code == 0
    assert {check["state"] for check in checks.values()} <= {"ok", "warn", "skip"}
    assert {"index", "memory", "state folder", "disk space", "clock"} <= {
        name for name, check in checks.items() if check["state"] == "ok"
    }
    assert "8 documents" in checks["index"]["found"]
    assert sorted(index.rglob("*")) == before


def test_settings_that_do_not_load_are_its_first_finding(tmp_path: Path) -> None:
    file = tmp_path / "stoker.toml"
    file.write_text("[service]\nporrt = 1\n")
    code, checks = doctor("--config", str(file))
    assert code == 1
    assert list(checks) == ["configuration"]
    assert "service.port" in checks["configuration"]["found"]


def test_few_open_files_are_a_warning(index: Path) -> None:
    code, checks = doctor(str(index), before=few_files)
    assert code == 0
    assert checks["open files"]["state"] == "warn"
    assert "ulimit" in checks["open files"]["action"]


def test_an_index_that_is_damaged_or_not_there(index: Path, tmp_path: Path) -> None:
    (manifest,) = index.glob("segments/*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-40])
    code, checks = doctor(str(index))
    assert code == 1
    assert checks["index"]["state"] == "fail"
    assert str(manifest.parent.name) in checks["index"]["found"]
    code, checks = doctor(str(tmp_path / "nothing"))
    assert code == 1
    assert checks["index"]["state"] == "fail"


def test_a_state_folder_that_cannot_be_or_is_in_use(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = states(service(state_dir=str(tmp_path / "file" / "state")), index)
    assert found["state folder"].state == "fail"
    assert "service.state_dir" in found["state folder"].action
    found = states(service(state_dir=str(tmp_path / "file")), index)
    assert found["state folder"].state == "fail"
    lock = lock_state(tmp_path / "state")
    found = states(service(state_dir=str(tmp_path / "state")), index)
    assert found["state folder"].state == "warn"
    os.close(lock)
    found = states(service(state_dir=str(tmp_path / "state")), index)
    assert found["state folder"].state == "ok"


def test_a_clock_behind_what_was_written(index: Path) -> None:
    found = states(StokerConfig(), index, wall=lambda: time.time() - 86_400.0)
    if found["clock"].state == "ok":  # installed longer ago than a day
        (index / "state").mkdir()
        (index / "state" / "heat.snapshot").write_bytes(b"x")
        found = states(StokerConfig(), index, wall=lambda: time.time() - 86_400.0)
    assert found["clock"].state == "fail"


def test_a_model_that_is_none(index: Path, tmp_path: Path) -> None:
    found = states(service(embed_model=str(tmp_path)), index)
    assert found["text model"].state == "fail"
    assert states(service(embed_model="off"), index)["text model"].state == "skip"


def test_open_to_the_network_without_keys() -> None:
    assert states(service(host="0.0.0.0", auth="off"), None)["keys"].state == "warn"
    found = states(service(host="0.0.0.0", api_keys={"a": "k" * 20}), None)
    assert found["keys"].state == "ok"


def test_a_broker_that_is_away() -> None:
    found = states(service(event_log="kafka", kafka_bootstrap="127.0.0.1:1"), None)
    assert found["broker"].state == "fail"
    assert "127.0.0.1:1" in found["broker"].found
    assert not [name for name in found if name.startswith("topic")]


def test_topics_of_a_real_broker(open_log: Any, topic_name: str) -> None:
    log = open_log()
    config = service(
        event_log="kafka",
        kafka_client="confluent" if "Confluent" in type(log).__name__ else "kafka-python",
        kafka_bootstrap=log.options.bootstrap,
        event_topic=topic_name,
        event_partitions=3,
    )
    found = states(config, None)
    assert found["broker"].state == "ok"
    assert found[f"topic {topic_name}"].state == "warn", "a start makes it, and doctor does not"
    assert states(config, None)[f"topic {topic_name}"].state == "warn"
    log.ensure_topic(TopicSpec(topic_name, partition_count=2))
    topic = states(config, None)[f"topic {topic_name}"]
    assert topic.state == "fail"
    assert "event_partitions to 2" in topic.action


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.apache_kafka
@pytest.mark.parametrize("password", ["right", "wrong"])
def test_a_broker_that_asks_who_we_are(secure_broker: Any, password: str) -> None:
    harness = sys.modules["kafka_broker"]
    config = service(
        event_log="kafka",
        kafka_bootstrap=secure_broker.secure_bootstrap,
        kafka_security_protocol="SASL_SSL",
        kafka_sasl_mechanism="PLAIN",
        kafka_sasl_username=harness.SECURE_USER,
        kafka_sasl_password=harness.SECURE_PASSWORD if password == "right" else "wrong",
        kafka_tls_ca_file=str(secure_broker.ca_file),
    )
    found = states(config, None)["broker"]
    assert found.state == ("ok" if password == "right" else "fail")
    assert harness.SECURE_PASSWORD not in found.found
    gc.collect()  # or what kafka-python left open is found in a test that does not expect it
