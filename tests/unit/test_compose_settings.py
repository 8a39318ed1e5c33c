"""compose/: every setting it makes exists and is valid, and every port, path and name fits."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.service import app, engine
from stoker.service.configuration import LoadedConfig, StokerConfig, load_config
from stoker.service.settings import ServiceSettings

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
# A version with at least two numbers: never `latest`, never only a major version.
PINNED = re.compile(r"[a-z0-9./_-]+:v?\d+\.\d+[\w.-]*")
# What the interpolation of docker compose asks of its environment.
GIVEN = {"STOKER_KEY": "0123456789abcdef0123", "DOCUMENTS": "./documents"}


class UniqueLoader(yaml.SafeLoader):
    """Refuse a key that is written twice, where the first would be lost without a word."""


def _unique(loader: UniqueLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value if key.tag != MERGE]
    assert len(keys) == len(set(keys)), f"a key twice at {node.start_mark}"
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


MERGE = "tag:yaml.org,2002:merge"
UniqueLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique)


def documents(path: Path) -> list[Any]:
    return list(yaml.load_all(path.read_text(), Loader=UniqueLoader))


def manifests() -> list[dict[str, Any]]:
    return [d for path in sorted((COMPOSE / "kubernetes").glob("*.yaml")) for d in documents(path)]


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [m for m in manifests() if m["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    (document,) = documents(COMPOSE / "docker-compose.yml")
    return dict(document)


def interpolated(value: Any) -> str:
    """Apply ``${NAME:-default}`` and ``${NAME:?message}`` as docker compose does."""

    def one(match: re.Match[str]) -> str:
        name, operator, rest = match["name"], match["operator"] or "", match["rest"] or ""
        if name in GIVEN:
            return GIVEN[name]
        assert not operator.endswith("?"), f"{name} must be given: {rest}"
        return rest if operator.endswith("-") else ""

    pattern = r"\$\{(?P<name>[A-Z_]+)(?:(?P<operator>:?[-?])(?P<rest>[^}]*))?\}"
    return re.sub(pattern, one, str(value))


def dockerfile_environment() -> dict[str, str]:
    text = (COMPOSE / "Dockerfile").read_text().replace("\\\n", " ")
    return dict(re.findall(r"\b(STOKER_[A-Z_]+)=(\S+)", text))


def container() -> dict[str, Any]:
    return dict(manifest("StatefulSet")["spec"]["template"]["spec"]["containers"][0])


def service_links() -> dict[str, str]:
    """Return what Kubernetes puts into a pod for Services, unless it is told not to."""
    links: dict[str, str] = {}
    for service in (m for m in manifests() if m["kind"] == "Service"):
        if service["spec"].get("clusterIP") == "None":
            continue
        name = service["metadata"]["name"].upper().replace("-", "_")
        port = str(service["spec"]["ports"][0]["port"])
        tcp = f"{name}_PORT_{port}_TCP"
        links |= {f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_SERVICE_PORT": port}
        links |= {f"{name}_PORT": f"tcp://10.0.0.1:{port}", tcp: f"tcp://10.0.0.1:{port}"}
        links |= {f"{tcp}_PROTO": "tcp", f"{tcp}_PORT": port, f"{tcp}_ADDR": "10.0.0.1"}
        for one in service["spec"]["ports"]:
            links[f"{name}_SERVICE_PORT_{one['name'].upper()}"] = str(one["port"])
    return links


def environments() -> dict[str, dict[str, str]]:
    """Return every environment that a Stoker process is given, by where it is written."""
    (stack,) = documents(COMPOSE / "docker-compose.yml")
    spec = manifest("StatefulSet")["spec"]["template"]["spec"]
    pod = service_links() if spec.get("enableServiceLinks", True) else {}
    pod |= manifest("ConfigMap")["data"]
    for entry in container()["env"]:
        # A secret's text is written by whoever deploys it.
        pod[entry["name"]] = entry.get("value", f"default={GIVEN['STOKER_KEY']}")
    environment = stack["services"]["stoker"]["environment"]
    return {
        "compose/docker-compose.yml": {k: interpolated(v) for k, v in environment.items()},
        "compose/kubernetes": {k: v for k, v in pod.items() if k.startswith("STOKER_")},
    }


def effective(where: str) -> LoadedConfig:
    return load_config(environment=dockerfile_environment() | environments()[where])


@pytest.fixture(params=["compose/docker-compose.yml", "compose/kubernetes"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_setting_exists_and_goes_with_the_others(where: str) -> None:
    loaded = effective(where)
    given = {k for k in environments()[where] if k.startswith("STOKER_")}
    assert len(given) > 8
    from_environment = {o.removeprefix("environment ") for o in loaded.origins.values()}
    assert given <= from_environment, "a name that sets nothing"


def test_names_are_the_typed_settings(where: str) -> None:
    known = {
        f"STOKER_{room.name}_{field.name}".upper()
        for room in dataclasses.fields(StokerConfig)
        for field in dataclasses.fields(getattr(StokerConfig(), room.name))
    }
    names = set(environments()[where]) | set(dockerfile_environment())
    assert {name for name in names if name.startswith("STOKER_")} <= known


def test_events_go_to_the_broker_of_the_stack(where: str) -> None:
    service = effective(where).config.service
    assert service.event_log == "kafka"
    assert service.kafka_bootstrap == "kafka:9092"
    assert service.event_topic == StokerConfig().service.event_topic
    copies = {"compose/docker-compose.yml": 1, "compose/kubernetes": 3}
    assert service.kafka_replication_factor == copies[where]
    # Each replica needs the whole heat: a group of its own, which its state folder names.
    assert service.event_group == ""


def test_the_server_listens_where_the_others_look(stack: dict[str, Any], where: str) -> None:
    service = effective(where).config.service
    assert service.host == "0.0.0.0"
    assert service.keys_required
    port = service.port
    text = (COMPOSE / "Dockerfile").read_text()
    assert f"EXPOSE {port}" in text
    assert f"http://127.0.0.1:{port}/readyz" in text
    assert stack["services"]["stoker"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert container()["ports"] == [{"name": "http", "containerPort": port}]
    for file, path in (
        ("prometheus/prometheus.yml", ("scrape_configs",)),
        ("collector/collector.yml", ("receivers", "prometheus", "config", "scrape_configs")),
    ):
        (node,) = documents(COMPOSE / file)
        for key in path:
            node = node[key]
        (job,) = node
        assert job["static_configs"] == [{"targets": [f"stoker:{port}"]}]
        assert job["metrics_path"] == "/metrics"


def test_paths_are_routes_of_the_server() -> None:
    openapi = next((COMPOSE.parent / "service").glob("**/openapi.*"))
    paths = set(yaml.safe_load(openapi.read_text())["paths"])
    probes = {
        container()[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "liveness", "readiness")
    }
    assert {*probes, "/metrics"} <= paths
    assert container()["readinessProbe"]["httpGet"]["path"] == "/readyz"


def seconds_to_end(service: ServiceSettings) -> float:
    """Return how long a server may take from SIGTERM to its end."""
    cut_off_s = 2 * app._CUT_OFF_S  # for its handler, and for its end after it was told
    return service.drain_notice_s + service.drain_s + cut_off_s + engine._STOP_S


def test_a_replica_that_opens_quickly_is_not_kept_waiting() -> None:
    """A readiness probe begins only when the start-up probe has passed."""
    assert container()["startupProbe"]["periodSeconds"] == 1
    assert container()["readinessProbe"]["periodSeconds"] <= 2


def test_one_replica_leaves_at_a_time_and_is_let_go_by_its_server_alone() -> None:
    spec = manifest("StatefulSet")["spec"]
    assert spec["podManagementPolicy"] == "OrderedReady"
    assert spec["updateStrategy"] == {"type": "RollingUpdate"}
    assert spec["minReadySeconds"] > 0
    assert spec["replicas"] > 1
    assert "lifecycle" not in container(), "a preStop hook would only come before the notice"


def test_a_warm_up_is_never_killed() -> None:
    service = effective("compose/kubernetes").config.service
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    for kind in ("startup", "liveness"):
        # /livez answers while the index is warmed; /readyz does not, and would kill it.
        assert container()[f"{kind}Probe"]["httpGet"]["path"] == "/livez"
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > service.warm_deadline_s
    assert pod["terminationGracePeriodSeconds"] > seconds_to_end(service)
    assert service.drain_notice_s > 0, "the endpoints need a moment to let go"
    (budget,) = [m for m in manifests() if m["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == 1


def test_compose_gives_time_to_drain_and_to_warm(stack: dict[str, Any]) -> None:
    service = effective("compose/docker-compose.yml").config.service
    grace = float(stack["services"]["stoker"]["stop_grace_period"].removesuffix("s"))
    assert grace > seconds_to_end(service)
    text = (COMPOSE / "Dockerfile").read_text()
    (start_period,) = re.findall(r"--start-period=(\d+)s", text)
    assert int(start_period) > service.warm_deadline_s


def test_memory_limits_hold_what_the_pools_may_take(stack: dict[str, Any], where: str) -> None:
    config = effective(where).config
    limits = {
        "compose/docker-compose.yml": stack["services"]["stoker"]["mem_limit"],
        "compose/kubernetes": container()["resources"]["limits"]["memory"],
    }
    gibibytes = int(re.sub(r"\D", "", limits[where]))
    pools = sum(
        getattr(room, field.name)
        for room in (config.index, config.kvcache)
        for field in dataclasses.fields(room)
        if field.name in {"memory_bytes", "memory_bytes_max", "kv_bytes_max", "delta_bytes_max"}
    )
    assert 0 < pools <= 0.75 * (gibibytes << 30), "the rest is for the process, models and requests"


def test_images_are_pinned(stack: dict[str, Any]) -> None:
    images = {name: service["image"] for name, service in stack["services"].items()}
    for _, name in re.findall(r"(FROM|ARG PYTHON=)\s*(\S+)", (COMPOSE / "Dockerfile").read_text()):
        if not name.startswith("$"):
            images[f"Dockerfile {name}"] = name
    images["kubernetes"] = container()["image"]
    assert {k: v for k, v in images.items() if not PINNED.fullmatch(v)} == {}
    assert len(images) >= 7
    assert images["kubernetes"] == images["stoker"] == f"stoker:{_version()}"


def _version() -> str:
    import stoker

    return stoker.__version__


def test_containers_are_unprivileged(stack: dict[str, Any]) -> None:
    service = stack["services"]["stoker"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    text = (COMPOSE / "Dockerfile").read_text()
    user = re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)[-1]
    assert user == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert f"--uid {pod['securityContext']['runAsUser']}" in text


def test_ports_are_open_on_loopback_only(stack: dict[str, Any]) -> None:
    published = [p for service in stack["services"].values() for p in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_no_secret_is_written_down(stack: dict[str, Any]) -> None:
    keys = stack["services"]["stoker"]["environment"]["STOKER_SERVICE_API_KEYS"]
    assert ":?" in keys, "a key must be given, or the stack does not start"
    assert not any(m["kind"] == "Secret" for m in manifests())


def test_what_is_mounted_is_there(stack: dict[str, Any]) -> None:
    named = set(stack["volumes"])
    for name, service in stack["services"].items():
        for mount in service.get("volumes", []):
            source = interpolated(mount).split(":")[0]
            if source.startswith("./") and source != GIVEN["DOCUMENTS"]:
                assert (COMPOSE / source).exists(), f"{name}: {mount}"
            elif not source.startswith("./"):
                assert source in named, f"{name}: {mount}"
    for service in stack["services"].values():
        assert set(service.get("depends_on", [])) <= set(stack["services"])


def test_commands_are_ours(stack: dict[str, Any]) -> None:
    """What the containers run is taken by the command line's own parser."""
    from stoker.service import cli

    lines = [stack["services"][name]["command"] for name in ("index", "stoker")]
    lines.append(container()["args"])
    (default,) = re.findall(r"^CMD (\[.*\])$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    lines.append(json.loads(default))
    for line in lines:
        module, _ = cli._parse(line)
        assert module is not None, line


def broker_settings(stack: dict[str, Any]) -> Iterator[str]:
    """Yield the broker's properties that its environment makes, as the image does it."""
    for name in stack["services"]["kafka"]["environment"]:
        if name.startswith("KAFKA_") and name != "KAFKA_HEAP_OPTS":
            yield name.removeprefix("KAFKA_").lower().replace("_", ".")


def test_the_broker_is_one_node_of_its_own_quorum(stack: dict[str, Any]) -> None:
    kafka = stack["services"]["kafka"]
    environment = kafka["environment"]
    assert environment["KAFKA_PROCESS_ROLES"] == "broker,controller"
    node = environment["KAFKA_NODE_ID"]
    assert environment["KAFKA_CONTROLLER_QUORUM_VOTERS"] == f"{node}@kafka:9093"
    listeners = dict(entry.split("://") for entry in environment["KAFKA_LISTENERS"].split(","))
    protocols = dict(
        e.split(":") for e in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    )
    advertised = dict(
        entry.split("://") for entry in environment["KAFKA_ADVERTISED_LISTENERS"].split(",")
    )
    assert set(listeners) == set(protocols)
    assert set(advertised) == set(listeners) - {environment["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert all(advertised[n].split(":")[1] == listeners[n].split(":")[1] for n in advertised)
    assert environment["KAFKA_INTER_BROKER_LISTENER_NAME"] in advertised
    # With one broker, a second copy of an internal topic can never be made.
    single = [name for name in environment if name.endswith(("REPLICATION_FACTOR", "MIN_ISR"))]
    assert single
    assert {environment[name] for name in single} == {"1"}
    assert set(kafka["healthcheck"]["test"]) >= {"--bootstrap-server", "kafka:9092"}
    assert all(re.fullmatch(r"[a-z.]+", name) for name in broker_settings(stack))
