"""A real server in its own process, over a real index: the API document, the SDK, start and end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest
import yaml
from served import DIM, ONCE, Server, build, vectors, warmed

from stoker.errors import InputError, UnavailableError
from stoker.index.collection import Collection
from stoker.service import routes_health
from stoker.service.async_client import AsyncClient
from stoker.service.client import Client
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.problems import (
    KeyMissing,
    RequestError,
    ServerUnreachable,
    TenantForbidden,
)
from stoker.service.streams import EVENTS_TOPIC
from stoker.service.wire import Document, RetryPolicy, text_call

KEY_A = "key-of-tenant-a-0123456789"
KEY_B = "key-of-tenant-b-0123456789"
KEY_OPERATOR = "key-of-operator-0123456789"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("index") / "collection")


@pytest.fixture(scope="module")
def server(index: Path) -> Iterator[Server]:
    server = Server(index)
    with server.client() as client:
        client.wait_ready(60)
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def start(*arguments: str, path: Path | None = None, **environment: str) -> Server:
        target = path if path is not None else build(tmp_path / "collection", 60)
        servers.append(Server(target, *arguments, **environment))
        return servers[-1]

    yield start
    for server in servers:
        server.stop(signal.SIGKILL)


# -- the API document ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(routes_health.openapi_json())
    return loaded


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)


def test_the_document_is_served(server: Server, document: dict[str, Any]) -> None:
    path = Path(routes_health.__file__).with_name("openapi.yaml")
    assert yaml.safe_load(path.read_text()) == document
    with server.client() as client:
        assert json.loads(client._run(text_call("/openapi.json"))) == document


class Contract:
    """Sends a request and holds the answer to what the document says of it."""

    def __init__(self, server: Server, document: dict[str, Any]) -> None:
        self.server = server
        self.document = document
        self.seen: set[tuple[str, str, str]] = set()

    def send(
        self, method: str, path: str, body: Any = None, *, template: str = "", raw: bytes = b"",
        content_type: str = "application/json", headers: dict[str, str] | None = None,
    ) -> Any:  # fmt: skip
        import http.client

        host = self.server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        data = raw or (None if body is None else json.dumps(body).encode())
        sent = dict(headers or {})
        if data is not None:
            sent["Content-Type"] = content_type
        connection.request(method, path, body=data, headers=sent)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        self.check(template or path, method.lower(), response, text)
        if data is not None and response.status < 300:
            self.check_request(template or path, method.lower(), content_type, json.loads(data))
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def check(self, template: str, method: str, response: Any, text: bytes) -> None:
        operation = self.document["paths"][template][method]
        status = str(response.status)
        assert status in operation["responses"], f"{method} {template}: {status} is not documented"
        answer = self.resolved(operation["responses"][status])
        content_type = response.headers["Content-Type"].partition(";")[0]
        assert content_type in answer["content"], content_type
        for name, header in answer.get("headers", {}).items():
            if self.resolved(header).get("required"):
                assert name in response.headers, f"{status} of {template} lacks {name}"
        if "json" in content_type:
            self.validate(answer["content"][content_type]["schema"], json.loads(text))
        self.seen.add((method, template, status))

    def check_request(self, template: str, method: str, content_type: str, body: Any) -> None:
        operation = self.document["paths"][template][method]
        self.validate(operation["requestBody"]["content"][content_type]["schema"], body)

    def resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            found: Any = self.document
            for part in node["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            node = found
        return node

    def validate(self, schema: dict[str, Any], value: Any) -> None:
        whole = {"allOf": [schema], "components": self.document["components"]}
        jsonschema.Draft202012Validator(whole).validate(value)


EVENT = {
    "specversion": "1.0",
    "id": "e-1",
    "source": "/test",
    "type": "stoker.result.used.v1",
    "time": "2026-01-31T12:00:00Z",
    "data": {"tenant": "default", "chunk_ids": ["c1"]},
}


def test_live_answers_keep_to_the_document(server: Server, document: dict[str, Any]) -> None:
    contract = Contract(server, document)
    vector = vectors(1)[0].tolist()
    send = contract.send
    found = send("POST", "/v1/search", {"vector": vector, "k": 3, "session": "s"})
    assert found["results"][0]["id"] == "c0"
    send("POST", "/v1/search", {"text": "x"})  # 501: no model
    send("POST", "/v1/search", {"vector": vector, "k": 0})
    send("POST", "/v1/search", {"vector": vector, "filters": {"a": {"like": 1}}})
    send("POST", "/v1/search", raw=b"{")
    send("POST", "/v1/search", {"vector": vector}, content_type="text/plain")
    written = {"id": "n", "text": "t", "vector": vector, "metadata": {"lang": "en", "n": [1, 2]}}
    assert send("POST", "/v1/documents", {"documents": [written]})["count"] == 1
    found = send("POST", "/v1/search", {"vector": vector, "k": 3, "filters": {"lang": "en"}})
    assert [(r["id"], r["text"]) for r in found["results"]] == [("n", "t")]
    send("POST", "/v1/documents", {"documents": []})
    send("POST", "/v1/documents", {"documents": [written | {"vector": [1]}]})
    delete = "/v1/documents/{id}"
    assert send("DELETE", "/v1/documents/n", template=delete)["count"] == 1
    assert send("DELETE", "/v1/documents/n", template=delete)["count"] == 0
    send("DELETE", f"/v1/documents/{'x' * 513}", template=delete)
    for body, content_type in (
        (EVENT, "application/cloudevents+json"),
        ([EVENT], "application/cloudevents-batch+json"),
        (EVENT, "application/json"),
    ):
        assert send("POST", "/v1/events", body, content_type=content_type)["accepted"] == 1
    send("POST", "/v1/events", [EVENT | {"type": "x"}])
    with server.client() as client:
        warmed(client)
    assert send("GET", "/v1/warmup")["state"] == "done"
    send("POST", "/v1/warmup", {"budget_bytes": -1})
    assert send("POST", "/v1/warmup", {"wait": True})["receipt"]["state"] == "complete"
    send("PATCH", "/v1/warmup", {"action": "reprioritise"})  # 409: none runs
    send("PATCH", "/v1/warmup", {"action": "stop"})
    send("POST", "/v1/warmup", {"everything": True})
    assert send("GET", "/v1/log-level")["level"] == "info"
    assert send("PUT", "/v1/log-level", {"level": "debug"})["level"] == "debug"
    for body in ({"level": "trace"}, {}, {"level": "info", "logger": "x"}):
        send("PUT", "/v1/log-level", body)
    assert send("PUT", "/v1/log-level", {"level": "info"})["level"] == "info"
    placement = "/v1/placement/{id}"
    why = send("GET", "/v1/placement/c0", template=placement)
    assert (why["id"], why["tenant"]) == ("c0", "default")
    send("GET", "/v1/placement/c0?tennant=a", template=placement)
    send("GET", f"/v1/placement/{'x' * 513}", template=placement)
    send("GET", "/livez")
    assert send("GET", "/readyz")["ready"]
    assert b"stoker_service_requests_total" in send("GET", "/metrics")
    send("GET", "/openapi.json")
    operations = {
        (method, path)
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert {(method, path) for method, path, _ in contract.seen} == operations


# -- the SDK -------------------------------------------------------------------------------


def test_refusals_speak_of_the_callers_own_members(server: Server) -> None:
    """The index names rows of its arguments, and the filter that the server has put around."""
    vector = vectors(1)[0].tolist()
    with server.client() as client:
        for filters, text in (
            ({"a": [[1]]}, "filters.a: expected"),
            ({"a": {"$gt": 1}}, "filters.a.$gt: unknown operator"),
            ({"a": None}, "filters.a: expected"),
        ):
            with pytest.raises(RequestError, match=re.escape(text)) as caught:
                client.search(vector=vector, filters=filters)
            assert caught.value.where == "/filters"
        documents = [Document("p", vector=vector), Document("q", vector=vector)]
        for odd, member in (
            ({"metadata": {"tenant": "other"}}, "metadata"),
            ({"metadata": {"x": "y" * 5_000_000}}, "metadata"),
        ):
            with pytest.raises(RequestError, match=f"^{member}: ") as caught:
                client.upsert([documents[0], dataclasses.replace(documents[1], **odd)])
            assert caught.value.where == f"/documents/1/{member}"
        found = client.search(vector=vector, k=50)
        assert not {"p", "q"} & {result.id for result in found.results}


def test_the_client_against_a_server(server: Server) -> None:
    with server.client() as client:
        answer = client.search(vector=vectors(3)[2], k=2, session="s-1", route="test")
        assert answer.results[0].id == "c2"
        assert answer.results[0].score == pytest.approx(1.0, abs=0.02)
        assert 0 <= answer.completeness.recall_bound <= 1
        assert answer.timings.total_ms > 0
        # The same connection serves again, also after an error.
        with pytest.raises(RequestError) as caught:
            client.search(vector=[1.0, 2.0])
        assert caught.value.where == "/vector"
        assert caught.value.problem is not None
        assert caught.value.problem.status == 400
        assert isinstance(caught.value, InputError)
        with pytest.raises(UnavailableError, match=r"service\.embed_model") as off:
            client.search("text")
        assert not off.value.problem.retriable  # type: ignore[attr-defined]
        written = client.upsert([Document("sdk/1 ?", "text", vectors(1, 9)[0], {"n": 1})])
        assert written.count == 1
        found = client.search(vector=vectors(1, 9)[0], k=1, filters={"n": 1})
        assert (found.results[0].id, found.results[0].metadata) == ("sdk/1 ?", {"n": 1})
        assert client.delete("sdk/1 ?").count == 1
        assert client.mark_used(["c1", "c2"], session="s-1").accepted == 1
        assert client.ready().ready
        assert warmed(client).receipt is not None
        assert "stoker_index_live_documents" in client.metrics()
        assert len(client._idle) == 1


def test_one_client_serves_several_threads(server: Server) -> None:
    queries = vectors(24, 5)
    wrong: list[Any] = []
    with server.client() as client:
        expected = [[r.id for r in client.search(vector=query, k=3).results] for query in queries]

        def ask(offset: int) -> None:
            for i in range(offset, len(queries), 4):
                found = [r.id for r in client.search(vector=queries[i], k=3).results]
                if found != expected[i]:
                    wrong.append((i, found, expected[i]))

        threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


async def test_the_async_client_against_a_server(server: Server) -> None:
    async with AsyncClient(server.url, retries=ONCE, deadline_s=60.0) as client:
        answers = await asyncio.gather(
            *(client.search(vector=vector, k=1) for vector in vectors(8))
        )
        assert [answer.results[0].id for answer in answers] == [f"c{i}" for i in range(8)]
        with pytest.raises(RequestError):
            await client.search(vector=[1.0])
        assert (await client.upsert([{"id": "a/b", "vector": vectors(1)[0]}])).count == 1
        assert (await client.delete("a/b")).count == 1
        assert (await client.mark_used(["c1"])).accepted == 1
        assert (await client.ready()).ready
        assert (await client.warmup()).state in ("done", "running")
        assert "stoker_" in await client.metrics()


async def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as free:
        # Held for as long as it is asked: a port let go of is another's, or the asker's own.
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url, retries=ONCE) as client:
            with pytest.raises(ServerUnreachable, match=url) as caught:
                client.ready()
            assert caught.value.action
        async with AsyncClient(url, retries=RetryPolicy(2, 0.001, 0.001)) as client:
            with pytest.raises(ServerUnreachable):
                await client.ready()
    client = Client(url)
    client.close()
    with pytest.raises(ServerUnreachable, match="closed"):
        client.ready()


# -- keys and tenants ----------------------------------------------------------------------


def test_tenants_are_kept_apart_by_their_keys(started: Any) -> None:
    server = started(
        STOKER_SERVICE_API_KEYS=f"a={KEY_A},b={KEY_B}",
        STOKER_SERVICE_OPERATOR_KEY=KEY_OPERATOR,
    )
    vector = vectors(1, 3)[0]
    with server.client(key=KEY_A) as a, server.client(key=KEY_B) as b, server.client() as none:
        a.wait_ready(60)
        a.upsert([Document("same", "a's", vector), Document("only-a", "a's", vector)])
        b.upsert([Document("same", "b's", vector)])
        assert {r.text for r in a.search(vector=vector).results} == {"a's"}
        assert [r.text for r in b.search(vector=vector).results] == ["b's"]
        trick = b.search(vector=vector, filters={"or": [{"tenant": "a"}, {"tenant": "b"}]})
        assert [r.text for r in trick.results] == ["b's"]
        assert b.delete("only-a").count == 0
        assert len(a.search(vector=vector).results) == 2
        with pytest.raises(KeyMissing):
            none.search(vector=vector)
        with server.client(key=KEY_A, tenant="b") as wrong, pytest.raises(TenantForbidden):
            wrong.search(vector=vector)
        with pytest.raises(TenantForbidden):
            a.start_warmup()
        assert KEY_A not in repr(a)
    with server.client(key=KEY_OPERATOR, tenant="b") as operator:
        warmed(operator)
        assert operator.start_warmup(wait=True, deadline_s=30).state == "done"
        assert [r.text for r in operator.search(vector=vector).results] == ["b's"]
    assert server.stop() == 0
    for key in (KEY_A, KEY_B, KEY_OPERATOR):
        assert key not in server.log() + str(server.lines)


# -- start and end -------------------------------------------------------------------------


def test_a_restart_keeps_documents_heat_and_receipt(started: Any) -> None:
    server = started()
    with server.client() as client:
        client.wait_ready(60)
        for _ in range(5):
            client.search(vector=vectors(1)[0], k=3, session="s")
        client.upsert([Document("new", "kept", vectors(1, 4)[0])])
        client.delete("c5")
    assert server.stop() == 0, server.log()
    assert [line["event"] for line in server.lines if line["event"] != "warmup"] == [
        "listening",
        "parts",
        "stopped",
    ]
    state = server.index / "state"
    assert {"heat.snapshot", "receipt.json", "events"} <= {p.name for p in state.iterdir()}
    again = started(path=server.index)
    receipt = again.line("warmup")["receipt"]
    assert receipt["heat_keys"] >= 3
    with again.client() as client:
        assert client.ready().ready
        assert client.search(vector=vectors(1, 4)[0], k=1).results[0].text == "kept"
        assert "c5" not in {r.id for r in client.search(vector=vectors(6)[5], k=20).results}


def test_sigterm_lets_running_requests_finish(started: Any) -> None:
    server = started("--warm", "none")
    answers: list[Any] = []
    errors: list[Exception] = []
    begun = threading.Semaphore(0)

    def write(worker: int) -> None:
        with server.client() as client:
            for i in range(10_000):
                try:
                    client.upsert([Document(f"w{worker}-{i}", None, vectors(1, i + 1)[0])])
                except ServerUnreachable as error:
                    errors.append(error)
                    return
                answers.append(f"w{worker}-{i}")
                begun.release()

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        assert begun.acquire(timeout=60)
    assert server.stop() == 0, server.log()
    for thread in threads:
        thread.join(60)
    log = [json.loads(line) for line in server.log().splitlines()]
    (finished,) = [line for line in log if line["event"] == "service.drain_finished"]
    assert finished["finished"]
    assert len(errors) == 3
    with Collection(server.index) as collection:
        assert collection.contains(answers).all()


_HANGS = """
import sys, threading
from stoker.service.cli import main
from stoker.service.engine import Engine

def search(self, request, **more):
    print('{"event": "hanging"}', flush=True)
    threading.Event().wait()

Engine.search = search
sys.exit(main(sys.argv[1:]))
"""


def test_a_terminal_that_closes_ends_a_server_in_order(started: Any) -> None:
    # Ignored signals are inherited, by these tests too where `nohup` runs them.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        server = started("--set", "service.warm=none")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert server.stop(signal.SIGHUP) == 0
    assert server.lines[-1]["event"] == "stopped"


_OPENING = """
import sys, threading
from stoker.service import engine_opening
from stoker.service.cli import main

def open_engine(*_):
    print('opening', flush=True)
    threading.Event().wait()

engine_opening.open_engine = open_engine
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_that_is_still_opening_ends_in_order(tmp_path: Path) -> None:
    """The first process of a container ignores a SIGTERM that it does not handle."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _OPENING, "serve", str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "opening\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()


def test_a_search_that_hangs_does_not_keep_a_server_from_ending(tmp_path: Path) -> None:
    """As on a device that no longer answers: the thread never comes back, and SIGTERM must work."""
    server = Server(
        build(tmp_path / "collection", 20),
        "--set", "service.drain_s=0.1", "--warm", "none",
        command=("-c", _HANGS),
    )  # fmt: skip
    with server.client(deadline_s=1.0) as client, pytest.raises(UnavailableError):
        client.search(vector=vectors(1)[0])
    server.line("hanging")
    assert server.stop() == 0, server.log()
    log = [json.loads(line) for line in server.log().splitlines()]
    (drained,) = [line for line in log if line["event"] == "service.drain_finished"]
    assert not drained["finished"]
    assert server.lines[-1]["event"] == "stopped"
    # What it held is free for the next one.
    again = Server(server.index)
    with again.client() as client:
        assert client.search(vector=vectors(1)[0], k=1).results
    assert again.stop() == 0, again.log()


def test_without_its_broker_a_server_starts_answers_and_loses_no_event(started: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        server = started("--kafka", nobody, "--set", "service.heat_wait_s=0")
        with server.client() as client:
            assert client.wait_ready(60).parts["events"] == "on"
            for _ in range(20):
                assert client.search(vector=vectors(1)[0], k=1).results
            assert client.mark_used(["c1"]).accepted == 1
        assert server.stop() == 0
    # Said once, not for every event and every try.
    log = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    complaints = [line for line in log if line["level"] in ("warning", "error")]
    assert 1 <= len(complaints) <= 8, complaints
    spooled = EmbeddedLog(server.index / "state" / "spool")
    (offsets,) = spooled.offsets(EVENTS_TOPIC).values()
    assert offsets[1] - offsets[0] >= 21
    spooled.close()


@pytest.mark.kafka
def test_a_new_replica_is_warmed_by_what_another_was_asked(
    started: Any, broker: Any, topic_name: str, tmp_path: Path
) -> None:
    kafka = ("--kafka", broker.bootstrap, "--set", f"service.event_topic={topic_name}",
             "--set", "service.event_partitions=2", "--set", "service.heat_wait_s=60",
             "--set", f"service.heat_topic={topic_name}.heat")  # fmt: skip
    often = ("--set", "service.snapshot_s=0.2", "--set", "service.heat_topic_s=0.2")
    first = started(*kafka, *often, "--warm", "none")
    with first.client() as client:
        client.wait_ready(60)
        asked = {
            result.id
            for _ in range(3)
            for result in client.search(vector=vectors(1)[0], k=4).results
        }
        assert client.mark_used(["c1"]).accepted == 1
        while "stoker_prefetch_applied_events_total 4.0" not in client.metrics():
            assert first.process.poll() is None
    # The same vectors under the same ids, in another folder that has never seen an event.
    second = started(*kafka, path=build(tmp_path / "other", 60))
    receipt = second.line("warmup")["receipt"]
    assert receipt["heat_keys"] == len(asked | {"c1"})
    assert second.stop() == 0, second.log()
    # Once the heat is published, a third one starts from that.
    published = len(asked | {"c1"})
    with first.client() as client:
        while '"service.heat_published"' not in first.log():
            assert client.metrics()
    third = started(*kafka, path=build(tmp_path / "third", 60))
    assert third.line("warmup")["receipt"]["heat_keys"] == published
    log = [json.loads(line) for line in third.log().splitlines() if line.startswith("{")]
    (taken,) = [line for line in log if line["event"] == "service.heat_started_from_topic"]
    assert 1 <= taken["keys"] <= published  # what is newer it has read itself
    for server in (first, third):
        assert server.stop() == 0, server.log()


def test_a_second_server_on_one_folder_is_refused(started: Any) -> None:
    server = started()
    second = subprocess.run(
        [sys.executable, "-P", "-m", "stoker", "serve", str(server.index), "--port", "0"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert second.returncode == 4, second.stderr
    assert "in use by another server" in second.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["/no/such/index"], 3, "no such folder"),
        (["{index}", "--set", "service.prt=1"], 2, "did you mean service.port"),
        (["{index}", "--host", "0.0.0.0"], 2, "service.api_keys"),
        (
            ["{index}", "--port", "{used}"],
            4,
            "in use; stop what uses it, or set service.host",
        ),
        (["{index}", "--warm", "some"], 2, "invalid choice"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(
    tmp_path: Path, arguments: Sequence[str], code: int, words: str
) -> None:
    index = build(tmp_path / "collection", 20) if "{index}" in arguments else tmp_path
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        places = {"index": index, "used": used.getsockname()[1]}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stoker", "serve",
             *(argument.format(**places) for argument in arguments),
             "--set", "service.log_level=error"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if "choice" not in words:
        assert done.stderr.startswith("stoker: ")
        assert done.stderr.count("\n") == 1


def test_warm_and_inspect_commands(started: Any) -> None:
    server = started("--warm", "none")

    def run(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stoker", *arguments],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    code, out, _ = run("warm", "--url", server.url, "--show", "--json")
    assert (code, json.loads(out)["state"]) == (0, "none")
    code, out, err = run("warm", "--url", server.url, "--budget", "1MiB", "--deadline", "30")
    assert code == 0, err
    assert "state: done" in out
    assert "predicted hit ratio" in out
    code, out, err = run("inspect", str(server.index), "--checksums", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["documents"], facts["dim"], facts["metric"]) == (60, DIM, "cosine")
    assert facts["checksums"] == "every page is whole"
    assert facts["navigation_bits"] == 4
    assert facts["state"]["receipt"]["state"] == "complete"
    code, out, _ = run("inspect", str(server.index))
    assert code == 0
    assert "60 documents" in out
    code, _, err = run("warm", "--url", "http://127.0.0.1:1", "--show")
    assert code == 4
    assert err.count("\n") == 1
    code, _, err = run("warm", "--budget", "5 parsecs")
    assert code == 2
    assert "--budget" in err


def test_a_second_server_reads_what_the_first_writes(started: Any, tmp_path: Path) -> None:
    writer = started("--warm", "none")
    reader = started(
        "--warm", "none", "--state-dir", str(tmp_path / "state"),
        "--set", "service.refresh_s=0.05", path=writer.index,
    )  # fmt: skip
    assert "another process" in reader.line("parts")["parts"]["writes"]
    with writer.client() as write, reader.client() as read:
        write.upsert([Document("fresh", "seen by both", vectors(1, 8)[0])])
        with pytest.raises(UnavailableError, match="read-only"):
            read.upsert([Document("x", None, vectors(1)[0])])
        while read.search(vector=vectors(1, 8)[0], k=1).results[0].id != "fresh":
            assert reader.process.poll() is None
        assert read.search(vector=vectors(1, 8)[0], k=1).results[0].text == "seen by both"


def test_what_a_person_reads_at_the_terminal(tmp_path: Path) -> None:
    index = build(tmp_path / "collection", 60)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker", "serve", str(index), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "measured hit ratio" in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()
    text = "".join(lines)
    assert lines[0].startswith("stoker: listening on http://127.0.0.1:")
    assert f"(pid {process.pid})" in lines[0]
    assert "all parts on but text off" in lines[1]
    assert "stoker: warm\nWarm-up complete" in text
    assert "index/upper" in text
    assert lines[-1] == "stoker: stopped\n"
