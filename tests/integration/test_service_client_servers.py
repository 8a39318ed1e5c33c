"""A client of two real servers: one of them goes while it is asked, and nobody notices."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ONCE, Server, build, vectors

from stoker.service.async_client import AsyncClient
from stoker.service.client import Client
from stoker.service.problems import FeatureOff, ServerUnreachable
from stoker.service.wire import Document

QUERIES = vectors(8, seed=3)
THREADS = 4
BEFORE = 15  # searches of each thread before a server goes, and as many after


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Server]]:
    """One that writes and one that reads, over the same documents."""
    index = build(tmp_path / "collection", 60)
    both = [Server(index, "--warm", "none")]
    try:
        both.append(Server(index, "--warm", "none", "--state-dir", str(tmp_path / "state")))
        for server in both:
            with server.client() as client:
                client.wait_ready(60)
        yield both
    finally:
        for server in both:
            server.stop(signal.SIGKILL)


@pytest.mark.parametrize(("leaves", "number"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_searches_go_on_while_a_server_leaves(
    pair: list[Server], leaves: int, number: signal.Signals
) -> None:
    """Without a single retry: the other server is asked within the same try."""
    half = threading.Barrier(THREADS + 1)
    failures: list[Exception] = []

    with Client([server.url for server in pair], retries=ONCE, deadline_s=60.0) as client:

        def ask() -> None:
            for at in range(2 * BEFORE):
                if at == BEFORE:
                    half.wait(60)
                try:
                    found = client.search(vector=QUERIES[at % len(QUERIES)], k=3)
                    assert len(found.results) == 3
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        half.wait(60)
        pair[leaves].process.send_signal(number)  # while they ask
        for thread in threads:
            thread.join(60)
        pair[leaves].stop(number)
        assert not failures
        assert len(client.search(vector=QUERIES[0], k=3).results) == 3


def test_writes_find_the_server_that_takes_them(pair: list[Server]) -> None:
    urls = [server.url for server in pair]
    with Client(urls, retries=ONCE, deadline_s=60.0) as client:
        for number in range(4):
            assert client.upsert([Document(f"n{number}", "t", QUERIES[number])]).count == 1
        assert client.delete("n0").count == 1
        pair[0].stop()
        with pytest.raises(ServerUnreachable):
            client.upsert([Document("n9", "t", QUERIES[0])])
        with Client(urls[1], retries=ONCE) as reader, pytest.raises(FeatureOff):
            reader.upsert([Document("n9", "t", QUERIES[0])])


def test_the_client_for_asyncio_does_the_same(pair: list[Server]) -> None:
    async def ask() -> None:
        urls = [server.url for server in pair]
        async with AsyncClient(urls, retries=ONCE, deadline_s=60.0) as client:
            assert (await client.upsert([Document("n", "t", QUERIES[0])])).count == 1

            async def search(count: int) -> None:
                for at in range(count):
                    found = await client.search(vector=QUERIES[at % len(QUERIES)], k=3)
                    assert len(found.results) == 3

            await search(4)
            pair[1].process.send_signal(signal.SIGKILL)
            await asyncio.gather(*(search(BEFORE) for _ in range(THREADS)))

    asyncio.run(ask())
