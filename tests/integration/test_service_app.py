"""The HTTP layer around a stub engine: problems, keys, limits, threads, draining."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse, web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from stoker.errors import CapacityError, CorruptError, UnavailableError
from stoker.service import connections
from stoker.service.answers import (
    Completeness,
    Readiness,
    ReuseDecision,
    SearchAnswer,
    SearchResult,
    Timings,
    WarmupStatus,
)
from stoker.service.app import make_app, search_thread_count, serve
from stoker.service.configuration import StokerConfig
from stoker.service.connections import ProblemRunner
from stoker.service.metrics import Metrics
from stoker.service.problems import DeadlinePassed, WarmupIdle, WarmupRunning
from stoker.service.refusals import Refusals
from stoker.service.settings import ServiceSettings
from stoker.service.turns import Callers

KEY_A = "key-of-tenant-a-0123456789"
KEY_B = "key-of-tenant-b-0123456789"
KEY_OPERATOR = "key-of-operator-0123456789"
AUTHORIZED = f"\r\nAuthorization: Bearer {KEY_A}".encode()


class StubEngine:
    """Does what the test says; refuses to be called on the event loop's thread."""

    def __init__(self, **service: Any) -> None:
        self.config = StokerConfig(service=ServiceSettings(**service))
        self.metrics = Metrics()
        self.draining = False
        self.callers = Callers()
        self.generation = 7
        self.loop_thread = threading.get_ident()
        self.calls: list[Any] = []
        self.event_ids: list[str | None] = []
        self.act: Callable[[], None] = lambda: None
        self.ready = Readiness(True, (), {"text": "on"})
        self.status = WarmupStatus("none")

    def _in_a_thread(self, *call: Any) -> None:
        assert threading.get_ident() != self.loop_thread, "blocking work on the event loop"
        self.calls.append(call)
        self.act()

    def search(self, request: Any, *, tenant: str, left_s: float, **more: Any) -> SearchAnswer:
        self._in_a_thread("search", request, tenant, left_s)
        self.event_ids.append(more["event_id"])
        return SearchAnswer(
            results=(SearchResult("x", 0.5, "text", {"n": 1}),),
            completeness=Completeness(1.0, 0.9, 0.95, 1.0, deadline_hit=False),
            reuse=ReuseDecision("off", "x"),
            pages_read=0,
            bytes_read=0,
            timings=Timings(1.0),
            generation=7,
            tenant=tenant,
            request_id=more["request_id"],
        )

    def upsert(self, tenant: str, documents: Any, *, left_s: float) -> int:
        self._in_a_thread("upsert", tenant, documents)
        return len(documents)

    def delete(self, tenant: str, document_id: str) -> int:
        self._in_a_thread("delete", tenant, document_id)
        return 1

    def append_events(self, events: Any) -> None:
        self._in_a_thread("events", events)

    def explain_placement(self, tenant: str, document_id: str) -> dict[str, Any]:
        self._in_a_thread("placement", tenant, document_id)
        return {"policy": "stub"}

    def metrics_page(self) -> bytes:
        self._in_a_thread("metrics")
        return self.metrics.page()

    def readiness(self) -> Readiness:
        return self.ready

    def warm_status(self) -> WarmupStatus:
        return self.status

    def start_warm(self, request: Any) -> None:
        if self.status.state == "running":
            raise WarmupRunning("a warm-up runs already")
        self.status = WarmupStatus("running", {"stage": 0})

    def steer_warm(self, action: str) -> None:
        if self.status.state != "running":
            raise WarmupIdle(f"no warm-up runs: nothing to {action}")
        self.status = WarmupStatus("running", {"stage": 0, "paused": action == "pause"})

    def wait_warm(self, timeout_s: float) -> None:
        self._in_a_thread("wait", timeout_s)
        self.status = WarmupStatus("done", receipt={"state": "complete"})


Start = Callable[..., Any]


class Server(TestServer):
    """A test's server on the connections that a real one has."""

    async def _make_runner(self, **options: Any) -> web.AppRunner:
        return ProblemRunner(self.app, keepalive_timeout=75.0, **options)


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    clients: list[TestClient[Any, Any]] = []

    async def make(**service: Any) -> tuple[TestClient[Any, Any], StubEngine]:
        engine = StubEngine(**service)
        app = make_app(engine, engine.config.service)  # type: ignore[arg-type]
        client = TestClient(Server(app))
        await client.start_server()
        clients.append(client)
        return client, engine

    yield make
    for client in clients:
        await client.close()


async def problem(response: ClientResponse, status: int, kind: str) -> dict[str, Any]:
    body = await response.json(content_type="application/problem+json")
    assert response.status == status, body
    assert body["type"] == f"urn:stoker:problem:{kind}"
    assert body["status"] == status
    assert body["detail"]
    assert body["action"]
    assert body["request_id"] == response.headers["X-Request-Id"]
    return dict(body)


JSON = {"Content-Type": "application/json"}
SEARCH = {"text": "how", "k": 1}
EVENT = {
    "specversion": "1.0",
    "id": "e",
    "source": "/t",
    "type": "stoker.result.used.v1",
    "time": "2026-01-31T12:00:00Z",
    "data": {"tenant": "a", "chunk_ids": ["x"]},
}


async def test_answers(start: Start) -> None:
    client, engine = await start()
    response = await client.post("/v1/search", json=SEARCH | {"tenant": "t", "deadline_ms": 500})
    body = await response.json()
    assert response.status == 200
    assert body["results"] == [{"id": "x", "score": 0.5, "text": "text", "metadata": {"n": 1}}]
    assert body["tenant"] == "t"
    assert 0 < engine.calls[0][3] <= 0.5
    documents = {"documents": [{"id": "x", "text": "y"}]}
    body = await (await client.post("/v1/documents", json=documents)).json()
    assert (body["count"], body["tenant"], body["generation"]) == (1, "default", 7)
    body = await (await client.delete("/v1/documents/a%2Fb%3F?tenant=t")).json()
    assert body["count"] == 1
    assert engine.calls[-1] == ("delete", "t", "a/b?")
    for body, content_type in (
        (EVENT, "application/json"),
        ([EVENT], "application/json"),
        (EVENT, "application/cloudevents+json"),
        ([EVENT], "application/cloudevents-batch+json; charset=utf-8"),
    ):
        response = await client.post(
            "/v1/events", data=json.dumps(body), headers={"Content-Type": content_type}
        )
        assert response.status == 202, content_type
        assert (await response.json())["accepted"] == 1
    assert (await client.get("/livez")).status == 200
    page = await (await client.get("/metrics")).text()
    assert (
        'stoker_service_requests_total{method="POST",route="/v1/search",status="200"} 1.0' in page
    )
    # An id never becomes a label.
    assert "a/b" not in page


async def test_a_request_keeps_its_id(start: Start) -> None:
    client, _ = await start()
    response = await client.get("/livez", headers={"X-Request-Id": "mine-1"})
    assert response.headers["X-Request-Id"] == "mine-1"
    response = await client.get("/livez", headers={"X-Request-Id": "a b;c"})
    assert response.headers["X-Request-Id"] != "a b;c"


async def test_every_refusal_is_a_problem_document(start: Start) -> None:
    client, _ = await start(body_bytes_max=200)
    await problem(await client.get("/nothing"), 404, "not-found")
    response = await client.put("/v1/search", json=SEARCH)
    body = await problem(response, 405, "method-not-allowed")
    assert response.headers["Allow"] == body["where"] == "POST"
    body = await problem(await client.post("/v1/search", data=b"{"), 400, "bad-input")
    assert body["where"] == "body"
    response = await client.post("/v1/search", json={"text": "x", "kk": 1})
    body = await problem(response, 400, "bad-input")
    assert body["where"] == "/kk"
    response = await client.post("/v1/search", json={"text": "x" * 500})
    body = await problem(response, 413, "body-too-large")
    assert "service.body_bytes_max" in body["detail"]
    response = await client.post("/v1/search", data="a=1", headers={"Content-Type": "text/plain"})
    await problem(response, 415, "media-type")
    await problem(await client.delete(f"/v1/documents/{'x' * 513}"), 400, "bad-input")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (CorruptError("/srv/index/links.stk: page 3"), 500, "corrupt"),
        (CapacityError("too much"), 503, "capacity"),
        (UnavailableError("closed"), 503, "unavailable"),
        (DeadlinePassed("late"), 504, "deadline-passed"),
        (ZeroDivisionError("secret"), 500, "server-fault"),
    ],
)
async def test_errors_of_the_engine(start: Start, error: Exception, status: int, kind: str) -> None:
    client, engine = await start()

    def act() -> None:
        raise error

    engine.act = act
    response = await client.post("/v1/search", json=SEARCH)
    body = await problem(response, status, kind)
    assert "secret" not in str(body)
    assert ("Retry-After" in response.headers) is (status == 503)
    page = await (await client.get("/livez")).text()
    assert page


async def test_no_bytes_of_a_client_are_a_fault_of_ours(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sends what makes no sense is told so, always in a problem document.

    The error log is for our own faults, and the metrics know of what never came to a route.
    """
    client, _ = await start(api_keys={"a": KEY_A})
    post = b"POST /v1/search HTTP/1.1"
    packed = b"\r\nContent-Encoding: gzip" + AUTHORIZED
    chunked = b"\r\nTransfer-Encoding: chunked" + AUTHORIZED
    for head, body, status in (
        (post + b"\r\nAuthorization: Bearer \xff\xfe\xc3\x28", b"", 401),
        (post + b"\r\nAuthorization: \xff", b"", 401),
        (post + packed, b"no gzip", 400),
        (post + b"\r\nContent-Type: \xff/\xff" + AUTHORIZED, b"{}", 415),
        (post + b"\r\nContent-Length: 5" + AUTHORIZED, b"{}", 400),
        (post + b"\r\nContent-Length: -1" + AUTHORIZED, b"", 400),
        (post + b"\r\nContent-Length: five" + AUTHORIZED, b"", 400),
        (post + b"\r\nTransfer-Encoding: upside-down" + AUTHORIZED, b"", 400),
        (post + b"\r\nExpect: a-miracle" + AUTHORIZED, b"", 400),
        (post + chunked + b"\r\nHost: a\r\n\r\nzz\r\n{}\r\n0", None, 400),
        (b"DELETE /v1/documents/x?tennant=a HTTP/1.1" + AUTHORIZED, b"", 400),
        (b"DELETE /v1/documents/%00 HTTP/1.1" + AUTHORIZED, b"", 400),
        (b"NO HTTP AT ALL", b"", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"", 400),
        (b"GET /livez HTTP/7.7", b"", 400),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1", b"", 400),
        (b"GET http://[::1/livez HTTP/1.1", b"", 400),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 10_000, b"", 400),
        (b"GET /livez HTTP/1.1\r\nno header", b"", 400),
        (b"GET /livez HTTP/1.1\r\n" + b"\r\n".join(b"X%d: 1" % i for i in range(200)), b"", 400),
    ):
        length = b"\r\nContent-Length: %d" % len(body) if body else b""
        end = b"" if body is None else length + b"\r\nHost: a\r\nConnection: close"
        answer = await exchange(client, head + end + b"\r\n\r\n" + (body or b""))
        first, _, rest = answer.partition(b"\r\n")
        assert first.split()[1:2] == [b"%d" % status], (head, answer)
        assert b"\r\nContent-Type: application/problem+json\r\n" in answer, (head, answer)
        found = json.loads(rest.partition(b"\r\n\r\n")[2])
        assert found["status"] == status
        assert all(found[name] for name in ("type", "title", "detail", "where", "action"))
        assert f"\r\nX-Request-Id: {found['request_id']}\r\n".encode() in answer
    assert [record.getMessage() for record in caplog.records] == []
    page = await (await client.get("/metrics")).text()
    assert 'requests_total{method="other",route="unmatched",status="400"}' in page


async def test_a_body_that_becomes_unreadable_is_answered_then(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Not when the time for a body is up: the first parts are taken, then one is none."""
    client, engine = await start(write_deadline_s=1e6)
    assert client.server is not None
    assert client.server.port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    head = b"POST /v1/search HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{ \r\n")
    while 'body_bytes{lane="search"} 2.0' not in await page_of(client, engine):
        pass
    writer.write(b"zz\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    found = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert found["where"] == "body"
    assert "chunk size" in found["detail"]
    writer.close()
    await writer.wait_closed()
    assert [record.getMessage() for record in caplog.records] == []


async def exchange(client: TestClient[Any, Any], sent: bytes) -> bytes:
    """Send bytes on a connection of their own, and return all that comes until it is closed."""
    assert client.server is not None
    assert client.server.port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_what_would_be_passed_over_is_refused(start: Start) -> None:
    """Who names a tenant where none is read would be answered for, or would change, another's."""
    client, engine = await start()
    for path, body in (
        ("/v1/search?tenant=other", SEARCH),
        ("/v1/documents?tenant=other", {"documents": [{"id": "x", "text": "y"}]}),
        ("/v1/events?tenant=other", EVENT),
    ):
        found = await problem(await client.post(path, json=body), 400, "bad-input")
        assert "'tenant'" in found["detail"]
        assert found["where"] == "query"
    response = await client.delete("/v1/documents/x?tenant=a&tenant=b")
    assert (await problem(response, 400, "bad-input"))["where"] == "query"
    assert engine.calls == []


async def test_packed_bodies_that_are_not_read_here_are_told_so(
    start: Start,
) -> None:
    client, _ = await start()
    unread = ContentEncodingError("Can not decode content-encoding: brotli (br). Please install x")
    for encoding in ("rot13", "gzip, gzip"):
        response = await client.post(
            "/v1/search", data=b"x", headers=JSON | {"Content-Encoding": encoding}
        )
        body = await problem(response, 415, "media-type")
        assert (body["where"], encoding in body["detail"]) == ("Content-Encoding", True)
    # What the HTTP library knows and cannot unpack without a package, it refuses by itself.
    refusals = Refusals(Metrics(), retry_after_s=1)
    answer = refusals.answer_outside(unread, make_mocked_request("UNKNOWN", "/"))
    assert isinstance(answer.body, bytes)
    body = json.loads(answer.body)
    assert (answer.status, body["where"]) == (415, "Content-Encoding")
    assert body["detail"].endswith("found brotli (br)")


async def test_bodies_share_a_bound(start: Start) -> None:
    """One that does not fit beside the others is refused, as long as they are worked on."""
    client, engine = await start(body_bytes_max=1000, bodies_bytes_max=1000, retry_after_s=3)
    running, go = threading.Event(), threading.Event()

    def act() -> None:
        running.set()
        go.wait()

    engine.act = act
    documents = {"documents": [{"id": "x", "text": "y" * 600}]}
    first = asyncio.create_task(client.post("/v1/documents", json=documents))
    await asyncio.to_thread(running.wait)
    engine.act = lambda: None
    held = len(json.dumps(documents))
    assert f'stoker_service_body_bytes{{lane="write"}} {held}.0' in await page_of(client, engine)

    async def unannounced() -> AsyncIterator[bytes]:
        yield json.dumps(documents).encode()

    for data in (json.dumps(documents), unannounced()):
        response = await client.post(
            "/v1/documents", data=data, headers={"Content-Type": "application/json"}
        )
        body = await problem(response, 429, "bodies-full")
        assert "service.bodies_bytes_max" in body["detail"]
        assert response.headers["Retry-After"] == "3"
    # Searches have room of their own, and what is too long alone is told so.
    response = await client.post("/v1/search", json={"text": "x" * 600})
    assert response.status == 200
    response = await client.post("/v1/documents", data=b" " * 2000, headers=JSON)
    await problem(response, 413, "body-too-large")
    go.set()
    assert (await first).status == 200
    response = await client.post("/v1/documents", json=documents)
    assert response.status == 200
    page = await page_of(client, engine)
    assert 'stoker_service_body_bytes{lane="write"} 0.0' in page
    assert 'stoker_service_refused_requests_total{reason="bodies-full"} 2.0' in page


async def test_a_connection_too_many_is_told_so(start: Start) -> None:
    client, _ = await start(connections_max=2, retry_after_s=3)
    assert client.server is not None
    assert client.server.port is not None
    get = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    kept = []
    for count in (1, 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        writer.write(get)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        page = await reader.readexactly(int(length[1]))
        assert b"stoker_service_open_connections %d.0" % count in page
        kept.append(writer)
    answer = await exchange(client, get)
    assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nRetry-After: 3\r\n" in answer
    found = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert found["type"] == "urn:stoker:problem:too-many-requests"
    assert "service.connections_max" in found["detail"]
    # Whoever asks whether it lives would end it, and with it what the others have.
    live = await exchange(client, b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    assert live.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(live.partition(b"\r\n\r\n")[2]) == {"live": True}
    kept[0].close()
    await kept[0].wait_closed()
    counted = b""
    while not counted.startswith(b"HTTP/1.1 200"):  # until the server knows of it too
        counted = await exchange(client, get.replace(b"Host: a", b"Host: a\r\nConnection: close"))
    assert b'requests_total{method="other",route="unmatched",status="429"}' in counted
    kept[1].close()
    await kept[1].wait_closed()


async def test_who_goes_on_sending_behind_an_answer_is_cut_off(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it away, without end, takes the event loop's time from all others."""
    monkeypatch.setattr("stoker.service.connections._LINGER_S", 0.1)
    client, _ = await start(body_bytes_max=100_000)
    assert client.server is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    writer.write(
        b"POST /v1/search HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )

    async def send() -> None:
        while True:
            writer.write(b"10000\r\n" + bytes(65_536) + b"\r\n")
            await writer.drain()

    sending = asyncio.create_task(send())
    answer = await reader.readuntil(b"\r\n\r\n")  # while it still sends
    assert answer.startswith(b"HTTP/1.1 413 ")
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(sending, 60.0)
    writer.transport.abort()


async def test_a_packed_body_counts_unpacked(start: Start) -> None:
    client, _ = await start(body_bytes_max=100_000)
    for size, status in ((1_000, 200), (50_000_000, 413)):
        packed = gzip.compress(b'{"documents": [{"id": "x", "text": "%s"}]}' % (b"y" * size))
        headers = JSON | {"Content-Encoding": "gzip"}
        response = await client.post("/v1/documents", data=packed, headers=headers)
        assert response.status == status


async def test_keys_decide_the_tenant(start: Start) -> None:
    client, engine = await start(api_keys={"a": KEY_A, "b": KEY_B}, operator_key=KEY_OPERATOR)

    def auth(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    for headers in ({}, auth("wrong"), {"Authorization": f"Basic {KEY_A}"}, auth("")):
        response = await client.post("/v1/search", json=SEARCH, headers=headers)
        body = await problem(response, 401, "key-missing")
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert KEY_A not in str(body)
    response = await client.post("/v1/search", json=SEARCH, headers=auth(KEY_A))
    assert (await response.json())["tenant"] == "a"
    response = await client.post("/v1/search", json=SEARCH | {"tenant": "b"}, headers=auth(KEY_A))
    await problem(response, 403, "tenant-forbidden")
    response = await client.delete("/v1/documents/x?tenant=b", headers=auth(KEY_A))
    await problem(response, 403, "tenant-forbidden")
    response = await client.get("/v1/placement/x?tenant=b", headers=auth(KEY_A))
    await problem(response, 403, "tenant-forbidden")
    response = await client.post("/v1/events", json=[EVENT], headers=auth(KEY_B))
    body = await problem(response, 403, "tenant-forbidden")
    assert body["where"] == "/0/data/tenant"
    response = await client.post("/v1/events", json=[EVENT], headers=auth(KEY_A))
    assert response.status == 202
    # Warm-ups are the operator's, who may act for every tenant.
    response = await client.post("/v1/warmup", headers=auth(KEY_A))
    await problem(response, 403, "tenant-forbidden")
    assert (await client.post("/v1/warmup", headers=auth(KEY_OPERATOR))).status == 202
    response = await client.patch("/v1/warmup", headers=auth(KEY_A), json={"action": "cancel"})
    await problem(response, 403, "tenant-forbidden")
    # So is the log's level, even to see.
    body = {"level": "error"}
    for headers, status, kind in (
        ({}, 401, "key-missing"),
        (auth(KEY_A), 403, "tenant-forbidden"),
    ):
        response = await client.put("/v1/log-level", headers=headers, json=body)
        await problem(response, status, kind)
        await problem(await client.get("/v1/log-level", headers=headers), status, kind)
    response = await client.get("/v1/log-level", headers=auth(KEY_OPERATOR))
    assert (await response.json())["level"] != "error"
    response = await client.post(
        "/v1/search", json=SEARCH | {"tenant": "b"}, headers=auth(KEY_OPERATOR)
    )
    assert (await response.json())["tenant"] == "b"
    # Probes and metrics need no key; nothing else is open.
    for path in ("/livez", "/readyz", "/metrics", "/openapi.json"):
        assert (await client.get(path)).status == 200
    await problem(await client.get("/v1/warmup"), 401, "key-missing")
    await problem(await client.get("/nothing"), 401, "key-missing")
    assert all(call[2] in ("a", "b") for call in engine.calls if call[0] == "search")


async def test_a_full_queue_is_429_with_retry_after(start: Start) -> None:
    client, engine = await start(search_threads=1, searches_queued_max=1, retry_after_s=3)
    running, go = threading.Event(), threading.Event()

    def act() -> None:
        running.set()
        go.wait()

    engine.act = act
    body = SEARCH | {"deadline_ms": 60_000}
    first = asyncio.create_task(client.post("/v1/search", json=body))
    await asyncio.to_thread(running.wait)
    second = asyncio.create_task(client.post("/v1/search", json=body))
    # The second request waits in the queue once the lane counts two.
    while 'pending_requests{lane="search"} 2.0' not in await page_of(client, engine):
        pass
    for response in (
        await client.post("/v1/search", json=body),
        await client.get("/v1/placement/x"),
    ):
        await problem(response, 429, "too-many-requests")
        assert response.headers["Retry-After"] == "3"
    # The loop is free meanwhile.
    assert (await client.get("/livez")).status == 200
    go.set()
    assert [(await task).status for task in (first, second)] == [200, 200]


async def page_of(client: TestClient[Any, Any], engine: StubEngine) -> str:
    act, engine.act = engine.act, lambda: None
    try:
        return await (await client.get("/metrics")).text()
    finally:
        engine.act = act


async def test_a_placement_that_is_asked_for_is_looked_up_in_a_lane(start: Start) -> None:
    """In its bounds, and not where warm-ups are waited for, which may take minutes."""
    client, engine = await start()
    response = await client.get("/v1/placement/x")
    assert (await response.json())["policy"] == "stub"
    assert engine.calls == [("placement", "default", "x")]
    client, engine = await start(deadline_ms_default=20)
    go = threading.Event()
    engine.act = lambda: (go.wait(), None)[1]
    response = await client.get("/v1/placement/x")
    await problem(response, 504, "deadline-passed")
    go.set()


async def test_a_search_past_its_deadline_is_504(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.admission._RETURN_S", 0.0)
    client, engine = await start()
    go = threading.Event()
    engine.act = lambda: (go.wait(), None)[1]
    response = await client.post("/v1/search", json=SEARCH | {"deadline_ms": 20})
    body = await problem(response, 504, "deadline-passed")
    assert body["where"] == "deadline_ms"
    go.set()


async def test_a_body_that_never_arrives_is_given_up(start: Start) -> None:
    client, _ = await start(write_deadline_s=0.05)

    async def forever() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    task = client.post("/v1/search", data=forever(), headers={"Content-Type": "application/json"})
    response = await task
    await problem(response, 400, "bad-input")


async def test_an_answer_that_nobody_takes_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that stops reading holds the answer's memory for as long as it likes."""
    client, engine = await start(connection_idle_s=0.05)
    engine.metrics_page = lambda: b"x" * (64 << 20)  # type: ignore[method-assign]
    server = client.server
    assert server is not None
    lost = asyncio.Event()
    handler: Any = server.handler
    note_lost = handler.connection_lost
    monkeypatch.setattr(handler, "connection_lost", lambda *args: (note_lost(*args), lost.set()))
    with socket.create_connection(("127.0.0.1", server.port)) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(lost.wait(), 20)
    # The next one is served as ever.
    assert (await client.get("/livez")).status == 200


async def test_readiness_and_warm_ups(start: Start) -> None:
    client, engine = await start()
    engine.ready = Readiness(False, ("warm-up",), {"text": "off: x"})
    response = await client.get("/readyz")
    assert response.status == 503
    assert response.headers["Retry-After"] == "1"
    assert (await response.json()) == {
        "ready": False,
        "waiting_for": ["warm-up"],
        "parts": {"text": "off: x"},
    }
    body = await (await client.get("/v1/warmup")).json()
    assert body["state"] == "none"
    response = await client.post("/v1/warmup")
    assert (response.status, (await response.json())["state"]) == (202, "running")
    response = await client.post("/v1/warmup", json={"budget_bytes": 5})
    await problem(response, 409, "warmup-running")
    assert response.headers["Retry-After"]
    response = await client.patch("/v1/warmup", json={"action": "pause"})
    assert response.status == 200
    assert (await response.json())["progress"]["paused"] is True
    for wrong in ({}, {"action": "stop"}, {"action": ["pause"]}, {"action": "pause", "x": 1}, []):
        await problem(await client.patch("/v1/warmup", json=wrong), 400, "bad-input")
    engine.status = WarmupStatus("none")
    response = await client.patch("/v1/warmup", json={"action": "cancel"})
    await problem(response, 409, "warmup-idle")
    assert "Retry-After" not in response.headers
    response = await client.post("/v1/warmup", json={"wait": True, "deadline_s": 5})
    assert response.status == 200
    assert (await response.json())["receipt"] == {"state": "complete"}


async def test_callers_are_those_that_wait_for_more_than_a_warm_up(start: Start) -> None:
    client, engine = await start()
    counted: list[int] = []
    engine.act = lambda: counted.append(engine.callers.count)
    assert (await client.post("/v1/search", json=SEARCH)).status == 200
    assert (await client.delete("/v1/documents/x")).status == 200
    await problem(await client.post("/v1/search", json={"k": 0}), 400, "bad-input")
    assert counted == [1, 1]
    assert (engine.callers.count, engine.callers.gaps) == (0, 3)
    assert (await client.get("/metrics")).status == 200
    assert (await client.post("/v1/warmup", json={"wait": True, "deadline_s": 5})).status == 200
    assert counted == [1, 1, 0, 0]
    assert (engine.callers.count, engine.callers.gaps) == (0, 3)


async def test_while_draining_connections_are_closed_after_their_answer(start: Start) -> None:
    client, engine = await start()
    response = await client.get("/livez")
    assert response.headers.get("Connection") != "close"
    engine.draining = True
    response = await client.get("/livez")
    assert response.headers.get("Connection") == "close"


async def test_an_old_connection_ends_with_its_next_answer(start: Start) -> None:
    """So that connections come to a replica that is back, and not only where they have been."""
    client, _ = await start(connection_age_s=1e-9)
    response = await client.get("/livez")
    assert (response.status, response.headers.get("Connection")) == (200, "close")
    client, _ = await start(connection_age_s=1e9)
    assert (await client.get("/livez")).headers.get("Connection") != "close"


async def test_connections_of_one_age_do_not_all_end_with_one_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections._Connection, "age_s", 100.0)
    client, _ = await start(connection_age_s=100.0)
    get = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    ended = []
    for _ in range(20):
        assert client.server is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        writer.write(get)
        ended.append(b"Connection: close" in await reader.readuntil(b"\r\n\r\n"))
        writer.close()
        await writer.wait_closed()
    assert sum(ended) == 10


async def test_the_tries_of_one_search_are_one_event(start: Start) -> None:
    """A client that lost the answer asks again: by the same id, and for the same."""
    client, engine = await start()
    for request_id, k in (("a", 3), ("a", 3), ("a", 4), ("b", 3), ("", 3), ("", 3)):
        headers = {"X-Request-Id": request_id} if request_id else {}
        body = {"vector": [1.0], "k": k}
        assert (await client.post("/v1/search", json=body, headers=headers)).status == 200
    first, again, other_body, other_id, *without = engine.event_ids
    assert first == again
    assert len({first, other_body, other_id}) == 3
    assert without == [None, None]


async def test_a_request_that_is_still_arriving_is_answered_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of its body is there when the server is told to stop, and the port closes."""
    monkeypatch.setattr("stoker.service.app._CUT_OFF_S", 0.0)
    stop_listening, closed = web.TCPSite.stop, asyncio.Event()

    async def stop_and_tell(site: web.TCPSite) -> None:
        await stop_listening(site)
        closed.set()

    monkeypatch.setattr(web.TCPSite, "stop", stop_and_tell)
    engine, stop = StubEngine(port=0), asyncio.Event()
    engine.start = lambda: None  # type: ignore[attr-defined]
    engine.close = lambda idle: None  # type: ignore[attr-defined]
    ports: asyncio.Queue[int] = asyncio.Queue()
    serving = asyncio.create_task(
        serve(
            engine,  # type: ignore[arg-type]
            engine.config.service,
            listening=lambda _host, port: ports.put_nowait(port),
            stop=stop,
        )
    )
    port = await asyncio.wait_for(ports.get(), 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"vector": [1.0]}'
    writer.write(
        b"POST /v1/search HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    # It has been taken up.
    assert b"100" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    writer.write(body[:5])
    stop.set()
    await asyncio.wait_for(closed.wait(), 20)
    for _ in range(20):  # turns of the loop, in which an end that does not wait would come
        await asyncio.sleep(0)
    writer.write(body[5:])
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert b"Connection: close" in answer
    writer.close()
    await writer.wait_closed()
    assert await asyncio.wait_for(serving, 20)


async def test_a_large_body_is_parsed_aside(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client, engine = await start()
    parsed = []

    from stoker.service import routes_documents

    original = routes_documents.parse_documents

    def note(raw: bytes, settings: ServiceSettings) -> Any:
        parsed.append(threading.get_ident() == engine.loop_thread)
        return original(raw, settings)

    monkeypatch.setattr(routes_documents, "parse_documents", note)
    for size in (10, 200_000):
        body = {"documents": [{"id": "x", "text": "y" * size}]}
        assert (await client.post("/v1/documents", json=body)).status == 200
    assert parsed == [True, False]


def test_the_number_of_search_threads() -> None:
    assert search_thread_count(ServiceSettings(search_threads=3)) == 3
    assert 2 <= search_thread_count(ServiceSettings()) <= 32
