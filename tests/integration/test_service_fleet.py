"""A fleet that is restarted replica by replica, under traffic: nobody notices.

Three servers over one index (one of them writes) and one event log. Clients ask through a relay
that does what a Kubernetes Service does: a new connection goes to the next of the replicas that are
ready, stays with it until one side ends it, and for a while still comes to one that has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import http.client
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import ONCE, Server, build, vectors, warmed

from stoker.errors import UnavailableError
from stoker.prefetch.events import decode
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.async_client import AsyncClient
from stoker.service.client import Client
from stoker.service.consume import ConsumeOptions
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.engine_opening import HEAT_NAME
from stoker.service.event_wiring import consumer_group
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.settings import ServiceSettings
from stoker.service.streams import EVENTS_TOPIC
from stoker.service.wire import Document, RetryPolicy

QUERIES = vectors(40, seed=3)
K = 5
LATE = 6  # connections that still come to a replica after it has said that it leaves
THINK_S = 0.005  # between two questions: they shall not take the processors from what is tested
PATIENT = RetryPolicy(retries_max=8, backoff_s=0.01, backoff_s_max=0.05)

# Its warm-up begins, and its notice before the port closes ends, when somebody has opened the other
# end of a pipe: not after some time, which on a busy machine may be too short.
_GATED = """
import asyncio, os, sys
from stoker.service import app
from stoker.service.cli import main
from stoker.service.engine import Engine

demand = Engine._demand_for_warmup

def wait():
    with open(os.environ["GATE"]):
        pass

def gated(self):
    wait()
    return demand(self)

async def notice(settings):
    await asyncio.to_thread(wait)

Engine._demand_for_warmup = gated
app._notice = notice
sys.exit(main(sys.argv[1:]))
"""


class Relay:
    """Passes connections on to the replicas in `members`, by turns.

    Attributes:
        of_port: Which replica a client's connection went to, by the client's own port.
        arrived: For each replica, released once for every connection that went to it.
    """

    def __init__(self) -> None:
        self.members: list[Server] = []
        self.of_port: dict[int, Server] = {}
        self.arrived: dict[Server, threading.Semaphore] = {}
        self._turns = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        started = threading.Event()
        self._loop.call_soon(started.set)
        self._thread.start()
        started.wait()
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._connected, "127.0.0.1", 0), self._loop
        )
        self._server = listening.result(60)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def add(self, replica: Server) -> None:
        self.arrived[replica] = threading.Semaphore(0)
        self.members = [*self.members, replica]

    def remove(self, replica: Server) -> None:
        self.members = [member for member in self.members if member is not replica]

    def wait_late(self, replica: Server, count: int) -> None:
        """Wait until so many more connections have come to a replica."""
        arrived = self.arrived[replica]
        while arrived.acquire(blocking=False):
            pass
        for _ in range(count):
            assert arrived.acquire(timeout=60)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    async def _connected(self, incoming: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        members = self.members
        replica = members[next(self._turns) % len(members)]
        self.of_port[back.get_extra_info("peername")[1]] = replica
        self.arrived[replica].release()
        try:
            answers, out = await asyncio.open_connection(
                replica.listening["host"], replica.listening["port"]
            )
        except OSError:
            back.transport.abort()  # refused: the client's own would have been too
            return
        await asyncio.gather(self._pump(incoming, out), self._pump(answers, back))

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()
        except ConnectionError:
            sink.transport.abort()
        except asyncio.CancelledError:
            sink.transport.abort()
            raise


class NotingClient(Client):
    """Knows the port of the connection that its last try went by. For one thread."""

    port = 0

    def _take(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = super()._take(timeout_s)
        if connection.sock is None:
            connection.connect()
        self.port = connection.sock.getsockname()[1]
        return connection


@dataclasses.dataclass(frozen=True)
class Asked:
    """One search: its session, the replica that its last try went to, and what came of it."""

    session: str
    replica: Server | None
    found: list[str]
    error: Exception | None = None


class Asker(threading.Thread):
    """Asks one search after the other, each in a session of its own, until it is stopped."""

    def __init__(self, relay: Relay, name: str, *, keep: bool, retries: RetryPolicy) -> None:
        super().__init__(name=name, daemon=True)
        self.relay = relay
        self.keep = keep
        self.retries = retries
        self.asked: list[Asked] = []
        self.ended = threading.Event()

    @property
    def failures(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.error is not None]

    def query(self, number: int) -> Any:
        return QUERIES[number % len(QUERIES)]

    def run(self) -> None:
        client = self.client()
        for number in itertools.count():
            if self.ended.wait(THINK_S):
                break
            session, found, error = f"{self.name}-{number}", [], None
            try:
                answer = client.search(
                    vector=self.query(number), k=K, recall_target=1.0, session=session
                )
                found = [result.id for result in answer.results]
            except UnavailableError as failure:
                error = failure
            replica = self.relay.of_port.get(client.port)
            self.asked.append(Asked(session, replica, found, error))
            if not self.keep:
                client.close()
                client = self.client()
        client.close()

    def client(self) -> NotingClient:
        return NotingClient(self.relay.url, retries=self.retries, deadline_s=60.0)


class AsyncAsker(Asker):
    """The same with the SDK for asyncio, which keeps its connections."""

    def run(self) -> None:
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        async with AsyncClient(self.relay.url, retries=self.retries, deadline_s=60.0) as client:
            for number in itertools.count():
                await asyncio.sleep(THINK_S)
                if self.ended.is_set():
                    break
                session = f"{self.name}-{number}"
                answer = await client.search(
                    vector=self.query(number), k=K, recall_target=1.0, session=session
                )
                found = [result.id for result in answer.results]
                self.asked.append(Asked(session, None, found))


class Fleet:
    """The replicas, each with a state folder of its own, and the relay in front of them.

    Attributes:
        replicas: Those of now, by their number.
        started: All that were ever started, `replicas` among them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = build(folder / "collection")
        self.events = folder / "events"
        self.events.mkdir()
        self.replicas: list[Server] = []
        self.started: list[Server] = []
        for number in range(3):
            self.state(number).mkdir()
            # One log for all. Each follows it as a group of its own.
            (self.state(number) / "events").symlink_to(self.events)
            os.mkfifo(self.gate(number))
        self.relay = Relay()

    def come_up(self) -> None:
        """Start all replicas, and let each of them warm."""
        with ThreadPoolExecutor() as pool:
            self.replicas = list(pool.map(self.start, range(3)))
        for number, replica in enumerate(self.replicas):
            self.let_in(number, replica)

    def state(self, number: int) -> Path:
        return self.folder / f"state-{number}"

    def gate(self, number: int) -> Path:
        return self.folder / f"gate-{number}"

    def open_gate(self, number: int) -> None:
        """Wait until a replica stands at its gate, and let it through."""
        replica = self.replicas[number]
        while True:
            # Not one that blocks: it would for ever where the replica has ended.
            try:
                os.close(os.open(self.gate(number), os.O_WRONLY | os.O_NONBLOCK))
                return
            except OSError as error:
                if error.errno != errno.ENXIO:  # nobody there yet
                    raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = replica.process.wait(0.01)
                raise AssertionError(f"ended with {code} before its gate: {replica.log()}")

    def start(self, number: int) -> Server:
        replica = Server(
            self.index,
            *("--state-dir", str(self.state(number))),
            *("--set", "service.snapshot_s=0.2", "--set", "service.refresh_s=0.05"),
            *("--set", f"service.writes={'on' if number == 0 else 'off'}"),
            command=("-c", _GATED),
            GATE=str(self.gate(number)),
        )
        self.started.append(replica)
        return replica

    def let_in(self, number: int, replica: Server) -> None:
        """Let a replica warm; it gets traffic when it says that it is ready."""
        status, waiting = readyz(replica)
        assert (status, waiting) == (503, ["warm-up"])
        self.open_gate(number)
        while readyz(replica)[0] != 200:
            assert replica.process.poll() is None
        with replica.client() as client:
            assert warmed(client).state == "done"
        self.relay.add(replica)

    def restart(self, number: int) -> None:
        replica = self.replicas[number] = self.start(number)
        self.let_in(number, replica)
        heat_keys = replica.line("warmup")["receipt"]["heat_keys"]
        assert heat_keys > 0, "warmed without the heat of before"

    def terminate(self, number: int) -> Server:
        """End a replica as an orchestrator does."""
        replica = self.replicas[number]
        kept = connection_to(replica)
        assert search(kept) == (200, None)
        replica.process.send_signal(signal.SIGTERM)
        while (ready := readyz(replica))[0] == 200:  # refused would raise
            pass
        assert ready == (503, ["draining"])
        self.relay.wait_late(replica, LATE)
        assert search(kept) == (200, "close")
        kept.close()
        self.relay.remove(replica)
        self.open_gate(number)
        assert replica.stop(0) == 0, replica.log()  # it has been told
        (finished,) = [
            line
            for line in map(json.loads, replica.log().splitlines())
            if line["event"] == "service.drain_finished"
        ]
        assert finished["finished"]
        return replica

    def kill(self, number: int, noticing: Sequence[Asker]) -> Server:
        """End a replica without a word; who asks meanwhile notices before the relay does."""
        replica = self.replicas[number]
        replica.process.kill()
        replica.process.wait(60)
        while not any(asker.failures for asker in noticing):
            self.relay.wait_late(replica, 1)
        with pytest.raises(ConnectionRefusedError):
            readyz(replica)
        self.relay.remove(replica)
        replica.stop()
        return replica

    def end(self) -> None:
        """End all replicas at once, in order."""
        for replica in self.replicas:
            replica.process.send_signal(signal.SIGTERM)
        for number, replica in enumerate(self.replicas):
            self.open_gate(number)
            assert replica.stop(0) == 0, replica.log()

    def close(self) -> None:
        with contextlib.ExitStack() as ending:  # each of them, whatever the others say
            ending.callback(self.relay.close)
            for replica in self.started:
                ending.callback(replica.stop, signal.SIGKILL)


def connection_to(replica: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(
        replica.listening["host"], replica.listening["port"], timeout=60
    )


def readyz(replica: Server) -> tuple[int, list[str]]:
    with contextlib.closing(connection_to(replica)) as connection:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, json.loads(response.read())["waiting_for"]


def search(connection: http.client.HTTPConnection) -> tuple[int, str | None]:
    body = json.dumps({"vector": QUERIES[0].tolist(), "k": K, "session": "by hand"})
    connection.request("POST", "/v1/search", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status, response.headers["Connection"]


def heat_of(state: Path) -> tuple[dict[Any, float], int]:
    """Return the heat of a state folder, brought up to the end of its log, and what that read."""
    log = EmbeddedLog(state / "events")
    keeper = HeatKeeper(
        log,
        topic=EVENTS_TOPIC,
        group=consumer_group(ServiceSettings(), state),
        snapshot_path=state / HEAT_NAME,
        options=ConsumeOptions(),
        settings=PrefetchSettings(),
    )
    keeper.start()
    assert keeper.wait_caught_up(60)
    records = keeper.stats().records
    assert keeper.stop(60)
    log.close()
    return keeper.demand(2e9), records


def events_of(folder: Path) -> dict[str, set[str]]:
    """Return the ids of the events in a log, by their session."""
    log = EmbeddedLog(folder)
    consumer = log.consumer(EVENTS_TOPIC, "check")
    found: dict[str, set[str]] = {}
    while records := consumer.poll(1_000, 0.0):
        for record in records:
            assert record.value is not None
            event = decode(record.value)
            found.setdefault(event.session or "", set()).add(event.id)
    consumer.close()
    log.close()
    return found


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Fleet]:
    """Bring a fleet up; none of its servers outlives it, nor a start that fails."""
    with contextlib.closing(Fleet(folder)) as fleet:
        fleet.come_up()
        yield fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running(tmp_path) as fleet:
        yield fleet


def test_a_fleet_that_does_not_come_up_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Server] = []

    def lose(fleet: Fleet, number: int, replica: Server) -> None:
        started.extend(fleet.started)
        replica.process.kill()
        replica.process.wait(60)
        fleet.open_gate(number)

    monkeypatch.setattr(Fleet, "let_in", lose)
    with pytest.raises(AssertionError, match="before its gate"), running(tmp_path):
        pass
    assert [replica.process.poll() for replica in started] == [-signal.SIGKILL] * 3


def test_a_fleet_restarts_and_nobody_notices(fleet: Fleet) -> None:
    relay = fleet.relay
    with Client(relay.url, retries=ONCE, deadline_s=60.0) as client:
        right = [
            [r.id for r in client.search(vector=q, k=K, recall_target=1.0).results] for q in QUERIES
        ]
    once = [
        Asker(relay, "kept", keep=True, retries=ONCE),
        Asker(relay, "kept-too", keep=True, retries=ONCE),
        Asker(relay, "fresh", keep=False, retries=ONCE),
    ]
    patient = [
        Asker(relay, "patient", keep=True, retries=PATIENT),
        Asker(relay, "patient-fresh", keep=False, retries=PATIENT),
        AsyncAsker(relay, "async", keep=True, retries=PATIENT),
    ]
    askers = [*once, *patient]
    for asker in askers:
        asker.start()
    for replica in fleet.replicas:
        relay.wait_late(replica, 2)
    for number in (0, 1):
        fleet.terminate(number)
        fleet.restart(number)
    # Not one has failed so far, with no retry allowed.
    assert not [failure for asker in askers for failure in asker.failures]
    killed = fleet.kill(2, noticing=once)
    fleet.restart(2)
    for asker in askers:
        asker.ended.set()
    for asker in askers:
        asker.join(60)
        assert not asker.is_alive()
    # What the killed one had in hand is lost, and nothing else; a retry hides even that.
    failures = [failure for asker in once for failure in asker.failures]
    assert {failure.replica for failure in failures} == {killed}
    assert not [failure for asker in patient for failure in asker.failures]
    answers = [asked for asker in askers for asked in asker.asked if asked.error is None]
    for asked in answers:
        number = int(asked.session.rpartition("-")[2])
        assert asked.found == right[number % len(QUERIES)], asked
    # Documents: the writer that came back writes, and the others see it.
    with fleet.replicas[0].client() as client:
        client.upsert([Document("new", "after the roll", QUERIES[0])])
    for replica in fleet.replicas[1:]:
        with replica.client() as client:
            while client.search(vector=QUERIES[0], k=1).results[0].id != "new":
                assert replica.process.poll() is None
    fleet.end()
    # Every answered search is one event, however often it was tried. Only what the killed replica
    # had answered and not yet written may be missing.
    events = events_of(fleet.events)
    for asked in answers:
        ids = events.get(asked.session, set())
        assert len(ids) == 1 or (not ids and asked.replica in (killed, None)), (asked, ids)
    # Each replica's own heat is what a new one makes of the whole log: nothing lost or twice.
    fresh = fleet.folder / "fresh"
    fresh.mkdir()
    (fresh / "events").symlink_to(fleet.events)
    whole, records = heat_of(fresh)
    for number in range(3):
        heat, read = heat_of(fleet.state(number))
        assert read < records, "began anew: the snapshot was not taken up"
        assert heat.keys() == whole.keys()
        assert heat == pytest.approx(whole, rel=1e-6)
