"""LMCache's prefetch calls over real loopback HTTP, against its interface as recorded.

Recorded from LMCache 0.5.6 (`/cache/prefetches`) and an earlier build (`/l2/prefetch`): 202 with
``request_id, chunks, status``; ``noop`` under one chunk; polls ``pending`` then ``completed`` once,
404 after that; 503 where no model is registered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.engine_warm import EngineWarmer
from stoker.service.kv_lmcache import LmcachePrefetch, PrefetchFenced

CHUNK = 4


class Server:
    """The recorded interface on a free port, in a loop and thread of its own."""

    def __init__(self, path: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.jobs: dict[str, int] = {}
        self.fail_with = 0
        self.app = web.Application()
        self.app.router.add_post(path, self.submit)
        self.app.router.add_get(path + "/{id}", self.poll)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.runner = web.AppRunner(self.app)
        self.port = asyncio.run_coroutine_threadsafe(self.listen(), self.loop).result(10)

    async def listen(self) -> int:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return int(self.runner.addresses[0][1])

    async def submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fail_with:
            return web.json_response({"detail": "no layout registered"}, status=self.fail_with)
        chunks = len(body["token_ids"]) // CHUNK
        if not chunks:
            return web.json_response({"chunks": 0, "status": "noop"}, status=202)
        name = f"warm-{len(self.bodies)}"
        self.jobs[name] = chunks
        answer = {"request_id": name, "chunks": chunks, "status": "submitted"}
        return web.json_response(answer, status=202)

    async def poll(self, request: web.Request) -> web.Response:
        chunks = self.jobs.pop(request.match_info["id"], None)
        if chunks is None:
            return web.json_response({"detail": "unknown"}, status=404)
        answer = {"status": "completed", "found_keys": chunks, "total_keys": chunks}
        return web.json_response(answer)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=["/cache/prefetches", "/l2/prefetch"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    running = Server(request.param)
    yield running
    running.close()


def client_of(server: Server) -> LmcachePrefetch:
    return LmcachePrefetch(
        f"http://127.0.0.1:{server.port}", model_name="m", world_size=2, cache_salt="acme"
    )


def test_a_prefetch_is_submitted_and_polled(server: Server) -> None:
    client = client_of(server)
    ticket = client.prefetch([1, 2, 3, 4, 5, 6, 7, 8, 9], lease_s=60, generation=1)
    assert server.bodies == [
        {"model_name": "m", "world_size": 2, "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9],
         "cache_salt": "acme"}
    ]  # fmt: skip
    assert client.pending() == [ticket]
    assert client.progress(ticket) == ("completed", 2, 2)
    assert client.pending() == []
    assert client.progress(ticket) == ("unknown", 0, 0)
    again = client.prefetch([1, 2, 3, 4], lease_s=60, generation=1)
    assert again != ticket
    client.release(again)
    client.release(again)
    assert client.pending() == []
    assert len(server.bodies) == 2, "the path is found once and kept"


def test_under_one_chunk_there_is_nothing_to_poll(server: Server) -> None:
    client = client_of(server)
    first = client.prefetch([1, 2], lease_s=60, generation=1)
    second = client.prefetch([3], lease_s=60, generation=1)
    assert first != second
    assert client.progress(first) == ("completed", 0, 0)
    assert client.pending() == []


def test_an_older_generation_never_reaches_the_engine(server: Server) -> None:
    client = client_of(server)
    client.prefetch([1, 2, 3, 4], lease_s=60, generation=7)
    with pytest.raises(PrefetchFenced, match="generation 7"):
        client.prefetch([1, 2, 3, 4], lease_s=60, generation=6)
    assert len(server.bodies) == 1


def test_refusals_are_errors_that_say_why(server: Server) -> None:
    client = client_of(server)
    server.fail_with = 503
    with pytest.raises(UnavailableError, match="503: no layout"):
        client.prefetch([1, 2, 3, 4], lease_s=60, generation=1)
    server.fail_with = 0
    assert client.prefetch([1, 2, 3, 4], lease_s=60, generation=1) == "warm-2"
    with pytest.raises(InputError, match="at most"):
        client.prefetch(range(1_000_001), lease_s=60, generation=1)


def test_nobody_there_and_nothing_known() -> None:
    other = Server("/elsewhere")
    client = client_of(other)
    with pytest.raises(UnavailableError, match="none of /cache/prefetches"):
        client.prefetch([1, 2, 3, 4], lease_s=60, generation=1)
    other.close()
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1"):
        client.prefetch([1, 2, 3, 4], lease_s=60, generation=1)


@pytest.mark.parametrize("url", ["", "https://h:1", "h:80", "http://", "http://h/?a=1"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError, match="http://host:port"):
        LmcachePrefetch(url, model_name="m")


def test_heat_becomes_prefetch_calls_under_a_rate_and_leases(server: Server) -> None:
    now = [0.0]
    warmer = EngineWarmer(
        client_of(server), tokens_per_s_max=8, tokens_burst=16, leases_max=3, lease_s=30,
        clock=lambda: now[0],
    )  # fmt: skip
    tokens = {("acme", name): [*range(8 * number, 8 * number + 8)] for number, name in
              enumerate("abcd")}  # fmt: skip
    heat = {key: weight for key, weight in zip(tokens, (4.0, 3.0, 2.0, 1.0), strict=True)}
    first = warmer.warm(heat, tokens.get, generation=1)
    assert (first.sent, first.rate_limited) == (2, 2)
    now[0] = 1.0
    second = warmer.warm(heat, tokens.get, generation=1)
    assert (second.sent, second.held, second.rate_limited) == (1, 2, 1)
    assert [body["token_ids"][0] for body in server.bodies] == [0, 8, 16]
    now[0] = 2.0
    third = warmer.warm(heat, tokens.get, generation=2)
    assert third.released == 3, "the documents changed: nothing of the old ones stays leased"
    assert third.sent == 1
    warmer.check()
    warmer.close()
