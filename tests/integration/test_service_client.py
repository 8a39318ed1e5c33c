"""The SDK against servers that break off, and against what cannot be sent at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import http.server
import json
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stoker.errors import CapacityError, InputError
from stoker.service.async_client import AsyncClient
from stoker.service.client import Client
from stoker.service.problems import AnswerTooLarge, DeadlinePassed, ServerUnreachable
from stoker.service.wire import RetryPolicy

READY = json.dumps({"ready": True}).encode()
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(READY), READY)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (
    len(READY),
    READY,
)
QUICK = RetryPolicy(retries_max=2, backoff_s=0.001, backoff_s_max=0.001)


class Scripted:
    """A server that gives each connection the next of its answers, and hangs up after it."""

    def __init__(self, *answers: bytes) -> None:
        self.requests: list[bytes] = []
        self.heads: list[bytes] = []
        self.hung_up = threading.Semaphore(0)
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as incoming:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += incoming.readline()
                length = [
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ]
                self.heads.append(head)
                self.requests.append(incoming.read(length[0]) if length else b"")
                with contextlib.suppress(OSError):  # a client may hang up before it has read all
                    connection.sendall(answer)
            self.hung_up.release()

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    made: list[Scripted] = []

    def make(*answers: bytes) -> Scripted:
        made.append(Scripted(*answers))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize(
    "broken",
    [WHOLE[:-5], WHOLE[: -len(READY)], CHUNKED, CHUNKED[:-9], b""],
    ids=["in the body", "before the body", "before the last chunk", "in a chunk", "at once"],
)
def test_an_answer_that_breaks_off_is_asked_for_again(
    scripted: Callable[..., Scripted], broken: bytes
) -> None:
    server = scripted(broken, WHOLE)
    with Client(server.url, retries=QUICK) as client:
        assert client.ready().ready
    other = scripted(broken, WHOLE)

    async def ask() -> bool:
        async with AsyncClient(other.url, retries=QUICK) as client:
            return (await client.ready()).ready

    assert asyncio.run(ask())


def test_a_kept_connection_that_the_server_has_closed_is_not_asked(
    scripted: Callable[..., Scripted],
) -> None:
    """As after its restart. Only after the send would it show, too late to know what was done."""
    server = scripted(WHOLE, WHOLE)
    with Client(server.url, retries=RetryPolicy(retries_max=0)) as client:
        assert client.ready().ready
        assert len(client._idle) == 1
        assert server.hung_up.acquire(timeout=60)
        assert client.ready().ready


def test_one_try_finds_out_about_all_kept_connections(scripted: Callable[..., Scripted]) -> None:
    """Behind a balancer they may all lead to a server that is gone, and tell nothing of it."""
    server = scripted(b"", WHOLE)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = Client(server.url, retries=QUICK)
        for _ in range(5):
            connection = http.client.HTTPConnection("127.0.0.1", deaf.getsockname()[1])
            connection.connect()
            client._give(client._servers.all[0], connection)
        first = http.client.HTTPConnection(server.url.removeprefix("http://"))
        first.connect()
        client._give(client._servers.all[0], first)  # the last one given is the first one taken
        assert client.ready().ready
        client.close()


def test_another_place_is_said_and_not_gone_to(scripted: Callable[..., Scripted]) -> None:
    """A redirected POST would arrive as a GET, and the key at a server that nobody has named."""
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/x\r\nContent-Length: 0\r\n\r\n"
    server = scripted(moved, moved)
    said = r"it points to 'http://127.0.0.1:1/x'"
    with Client(server.url) as client, pytest.raises(ServerUnreachable, match=said):
        client.search("a")

    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            await client.search("a")

    with pytest.raises(ServerUnreachable, match=said):
        asyncio.run(ask())


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX-Slow: ", WHOLE[: -len(READY)]])
@pytest.mark.parametrize("end", [b"", b"Connection: close\r\n"])
def test_a_server_that_drips_is_waited_for_within_the_deadline(start: bytes, end: bytes) -> None:
    """Each byte came in time, and the call would not have ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        outcome: list[BaseException | None] = [None]

        def ask() -> None:
            try:
                with Client(url, retries=RetryPolicy(retries_max=0), deadline_s=0.2) as client:
                    client.ready()
            except BaseException as error:
                outcome[0] = error

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        listener.settimeout(30.0)
        connection, _ = listener.accept()
        with connection:
            head, _, rest = start.partition(b"\r\n")
            connection.sendall(head + b"\r\n" + end + rest)
            while asking.is_alive():  # as long as it would be waited for
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
                asking.join(0.02)
    assert isinstance(outcome[0], DeadlinePassed), outcome


class Endless:
    """A server that begins an answer and sends more of it for as long as it is read."""

    def __init__(self, head: bytes, part: bytes) -> None:
        self.sent_bytes = 0
        self.connections = 0
        self._head, self._part = head, part
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with contextlib.suppress(OSError), connection:
                    connection.recv(1 << 16)
                    connection.sendall(self._head)
                    while True:
                        self.sent_bytes += connection.send(self._part)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()


BLOCK = b"x" * 65_536
ENDLESS = {
    "until it hangs up": (b"HTTP/1.1 200 OK\r\n\r\n", BLOCK),
    "in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK),
    ),
    "of a length": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 50), BLOCK),
    "an error": (b"HTTP/1.1 500 Oops\r\n\r\n", BLOCK),
    "not ready": (b"HTTP/1.1 503 Later\r\n\r\n", BLOCK),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("sync", [True, False])
def test_an_answer_without_end_is_read_up_to_a_bound_and_asked_for_once(
    kind: str, sync: bool
) -> None:
    server = Endless(*ENDLESS[kind])
    bound = 1 << 20

    async def ask() -> None:
        async with AsyncClient(server.url, retries=QUICK, answer_bytes_max=bound) as client:
            await client.ready()

    def ask_with_threads() -> None:
        with Client(server.url, retries=QUICK, answer_bytes_max=bound) as client:
            client.ready()

    try:
        with pytest.raises(AnswerTooLarge, match=f"{server.url}.* at most {bound} bytes") as caught:
            ask_with_threads() if sync else asyncio.run(ask())
    finally:
        server.close()
    assert isinstance(caught.value, CapacityError)
    assert not caught.value.retriable
    assert server.connections == 1
    assert server.sent_bytes < bound + (32 << 20)  # and what the system's buffers hold


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("answer", [WHOLE, CHUNKED + b"0\r\n\r\n"])
def test_the_bound_itself_is_an_answer_and_a_byte_above_it_is_none(
    scripted: Callable[..., Scripted], answer: bytes, sync: bool
) -> None:
    async def ask(url: str, bound: int) -> bool:
        async with AsyncClient(url, answer_bytes_max=bound) as client:
            return (await client.ready()).ready

    for bound, fits in ((len(READY), True), (len(READY) - 1, False)):
        server = scripted(answer)
        with contextlib.nullcontext() if fits else pytest.raises(AnswerTooLarge):
            if sync:
                with Client(server.url, answer_bytes_max=bound) as client:
                    assert client.ready().ready
            else:
                assert asyncio.run(ask(server.url, bound))


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_a_packed_answer_counts_by_what_is_in_it(
    scripted: Callable[..., Scripted], kind: str
) -> None:
    packed = (gzip if kind == "gzip" else zlib).compress(bytes(64 << 20))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n"
    server = scripted(head % (kind.encode(), len(packed)) + packed)

    async def ask() -> None:
        async with AsyncClient(server.url, answer_bytes_max=1 << 20) as client:
            await client.ready()

    with pytest.raises(AnswerTooLarge):
        asyncio.run(ask())


class PortHandler(http.server.BaseHTTPRequestHandler):
    """Answers with the port that a connection comes from."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"ready": True, "parts": {"port": self.client_address[1]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


FORKING = """
import os, sys
from stoker.service.client import Client

client = Client(sys.argv[1])
first = client.ready().parts["port"]
client._lock.acquire()  # as another thread might hold them, just then
client._servers._lock.acquire()
child = os.fork()
if child == 0:
    os._exit(0 if client.ready().parts["port"] != first else 9)
client._lock.release()
client._servers._lock.release()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert client.ready().parts["port"] == first
sys.exit(code)
"""


def test_a_child_of_a_fork_makes_its_own_connections() -> None:
    """On a shared one each would read answers that the other has asked for."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), PortHandler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-P", "-c", FORKING, url]
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
        server.shutdown()


def test_a_client_of_another_loop_or_a_closed_one_says_so(
    scripted: Callable[..., Scripted],
) -> None:
    server = scripted(WHOLE)
    client = AsyncClient(server.url, retries=QUICK)
    with asyncio.Runner() as first:
        assert first.run(client.ready()).ready
        with pytest.raises(InputError, match="another event loop"), asyncio.Runner() as second:
            second.run(client.ready())
        first.run(client.close())
    unused = AsyncClient(server.url, retries=QUICK)

    async def close_and_ask() -> None:
        await unused.close()
        await unused.ready()

    with pytest.raises(ServerUnreachable, match="closed"):
        asyncio.run(close_and_ask())


TAKEN = json.dumps({"accepted": 1, "request_id": "r"}).encode()
EVENTS = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
    len(TAKEN),
    TAKEN,
)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_hangs_costs_one_call_and_is_asked_last_then(
    scripted: Callable[..., Scripted], kind: type[Client | AsyncClient]
) -> None:
    patient = RetryPolicy(retries_max=0, backoff_s=300.0, backoff_s_max=600.0)
    server = scripted(EVENTS, EVENTS, EVENTS)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, and says nothing
        urls = [f"http://127.0.0.1:{deaf.getsockname()[1]}", server.url]
        if kind is Client:
            with Client(urls, retries=patient, deadline_s=0.2) as client:
                with pytest.raises(DeadlinePassed):
                    client.mark_used(["a"])
                client.deadline_s = 20.0
                assert [client.mark_used(["a"]).accepted for _ in range(3)] == [1, 1, 1]
            return

        async def ask() -> None:
            async with AsyncClient(urls, retries=patient, deadline_s=0.2) as client:
                with pytest.raises(DeadlinePassed):
                    await client.mark_used(["a"])
                client.deadline_s = 20.0
                for _ in range(3):
                    assert (await client.mark_used(["a"])).accepted == 1

        asyncio.run(ask())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_try_of_a_call_carries_its_id(
    scripted: Callable[..., Scripted], kind: type[Client | AsyncClient]
) -> None:
    """By it the server counts a search as one, whose answer was lost and which was tried again."""
    server = scripted(b"", WHOLE, WHOLE)
    if kind is Client:
        with Client(server.url, retries=QUICK) as client:
            for _ in range(2):
                client.ready()
    else:

        async def ask() -> None:
            async with AsyncClient(server.url, retries=QUICK) as client:
                for _ in range(2):
                    await client.ready()

        asyncio.run(ask())
    first, again, other = (
        next(line for line in head.lower().split(b"\r\n") if line.startswith(b"x-request-id"))
        for head in server.heads
    )
    assert first == again != other


def test_half_a_page_is_never_taken_for_the_page(scripted: Callable[..., Scripted]) -> None:
    server = scripted(WHOLE[:-5])
    with (
        Client(server.url, retries=RetryPolicy(retries_max=0)) as client,
        pytest.raises(ServerUnreachable),
    ):
        client.metrics()


def test_a_search_leaves_its_answer_time_to_come_back(scripted: Callable[..., Scripted]) -> None:
    """With the whole deadline, the server's partial answer would arrive just too late."""
    server = scripted(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n")
    with Client(server.url, deadline_s=10.0) as client, pytest.raises(InputError):
        client.search("how")
    assert json.loads(server.requests[0])["deadline_ms"] == 9_000


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "127.0.0.1:8080"},
        {"url": "http://"},
        {"url": "http://host:99999"},
        {"url": "http://host:0"},
        {"url": "http://host:port"},
        {"url": "http://[::1"},
        {"url": "http://host/?tenant=a"},
        {"url": "http://host/#top"},
        {"url": "http://user:password@host"},
        {"key": ""},
        {"key": "a key with spaces"},
        {"key": "read-from-a-file\n"},
        {"key": "k\r\nX-Other: 1"},
        {"key": "schlüssel-der-mandantin"},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
    ],
)
def test_what_cannot_be_used_is_said_when_the_client_is_made(
    kind: type[Client | AsyncClient], arguments: dict[str, Any]
) -> None:
    with pytest.raises(InputError) as caught:
        kind(**arguments)
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan"), np.float64("-inf")])
def test_what_is_no_number_is_never_sent_as_if_it_were_left_out(bad: Any) -> None:
    with Client("http://127.0.0.1:9") as client:
        for call, place in (
            (lambda: client.search("a", recall_target=bad), "/recall_target"),
            (lambda: client.search("a", filters={"price": {"lt": bad}}), "/filters/price/lt"),
            (lambda: client.search(vector=np.array([0, bad], np.float32)), "/vector/1"),
            (lambda: client.start_warmup(deadline_s=bad), "/deadline_s"),
            (
                lambda: client.upsert([{"id": "a", "text": "b", "metadata": {"n": [1, bad]}}]),
                "/documents/0/metadata/n/1",
            ),
        ):
            with pytest.raises(InputError, match=f"{place}: expected a finite number"):
                call()
