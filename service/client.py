"""The SDK for threads: `stoker.Client`; for asyncio there is `service.async_client`.

Both keep connections open, retry what may be retried within one deadline (`service.wire` has the
rules), return typed records and raise the classes of `stoker.errors`. This one stands on the
standard library's `http.client`: it needs connection reuse and a time limit per read, and no more,
so a further dependency would not pay.
"""

from __future__ import annotations

import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from stoker.errors import UnavailableError
from stoker.service.answers import (
    EventsAnswer,
    Readiness,
    SearchAnswer,
    WarmupAction,
    WarmupStatus,
    WriteAnswer,
)
from stoker.service.client_base import ClientBase
from stoker.service.client_servers import ServerTurn, ServerUrl
from stoker.service.problems import ServerUnreachable, ServiceError
from stoker.service.wire import (
    Attempts,
    Call,
    Document,
    ReadyWait,
    Reply,
    delete_call,
    events_call,
    failure_of,
    ready_call,
    start_warmup_call,
    steer_warmup_call,
    text_call,
    upsert_call,
    used_event,
    warmup_call,
)

T = TypeVar("T")

_IDLE_S_MAX = 15.0
_READ_BYTES = 1 << 16


class Client(ClientBase):
    """A client for programs with threads; several threads may share one."""

    def _begin(self) -> None:
        self._closed = False
        self._idle: list[tuple[float, ServerUrl, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        _CLIENTS.add(self)

    def _begin_in_child(self) -> None:
        """Go on after a fork: the kept connections are the parent's, and a lock may be held.

        Two processes on one connection would read each other's answers.
        """
        idle, self._idle, self._lock = self._idle, [], threading.Lock()
        self._servers.begin_in_child()
        for _, _, connection in idle:
            connection.close()  # this process's end only

    def search(
        self,
        text: str | None = None,
        *,
        vector: Any = None,
        k: int = 10,
        filters: Mapping[str, Any] | None = None,
        recall_target: float | None = None,
        deadline_ms: int | None = None,
        session: str | None = None,
        route: str | None = None,
        include_text: bool = True,
        include_metadata: bool = True,
    ) -> SearchAnswer:
        """Find the ``k`` nearest documents to a text, or to a vector (shape (dim,), finite).

        Args:
            filters: Metadata key -> value, or list of values of which one must fit.
            recall_target: Recall that is asked for, in (0, 1]; None takes the server's default.
            deadline_ms: When the server stops and answers with what it has; None takes nine
                tenths of the client's deadline, so that such an answer still arrives.
            session: The user's session, for the events that say what is asked next.
            route: Your name for the kind of request.

        Raises:
            InputError: the server or the client refused the request; see ``where``, ``action``.
            CapacityError, UnavailableError: still so after the retries; later it may work.
        """
        members = dict(
            text=text, vector=vector, k=k, filters=filters, recall_target=recall_target,
            session=session, route=route, include_text=include_text,
            include_metadata=include_metadata,
        )  # fmt: skip
        return self._run(self._search(deadline_ms, members))

    def upsert(
        self, documents: Sequence[Document | Mapping[str, Any]], *, deadline_s: float | None = None
    ) -> WriteAnswer:
        """Write documents, replacing those of the same id; durable when this returns."""
        return self._run(upsert_call(documents, self.tenant), deadline_s)

    def delete(self, document_id: str) -> WriteAnswer:
        """Delete one document; durable when this returns. ``count`` is 0 where there was none."""
        return self._run(delete_call(document_id, self.tenant))

    def send_events(self, events: Sequence[Mapping[str, Any]]) -> EventsAnswer:
        """Send CloudEvents; durable in the server's log when this returns.

        An event without ``id`` or ``time`` is given them, so that a retry counts once.
        """
        return self._run(events_call(events))

    def mark_used(
        self,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        route: str | None = None,
    ) -> EventsAnswer:
        """Tell the server which results were really used."""
        event = used_event(chunk_ids, tenant=self.tenant, session=session, route=route)
        return self.send_events([event])

    def warmup(self) -> WarmupStatus:
        """Return the state of the warm-up, with the receipt of the last one."""
        return self._run(warmup_call())

    def start_warmup(
        self,
        *,
        budget_bytes: int | None = None,
        deadline_s: float | None = None,
        everything: bool = False,
        wait: bool = False,
    ) -> WarmupStatus:
        """Start a warm-up; with ``wait`` return when it is done.

        Args:
            budget_bytes: Bytes that it may load; None takes the server's setting.
            deadline_s: Seconds after which it loads no more; None takes the server's setting.
            everything: Load all that fits, not only what the heat asks for.
        """
        return self._run(
            start_warmup_call(budget_bytes, deadline_s, everything=everything, wait=wait),
            self._warmup_patience(deadline_s, wait),
        )

    def steer_warmup(self, action: WarmupAction) -> WarmupStatus:
        """Pause, resume, re-prioritise or cancel the warm-up that runs, from its next load on.

        "reprioritise" plans what is left by the server's heat as it is now. Raises `WarmupIdle`
        where none runs.
        """
        return self._run(steer_warmup_call(action))

    def ready(self) -> Readiness:
        """Return whether traffic should come, and what is waited for."""
        return self._run(ready_call())

    def wait_ready(self, timeout_s: float) -> Readiness:
        """Return once the server is ready.

        Raises:
            NotReady: it is not, after ``timeout_s``; says what it waits for.
        """
        waiting = ReadyWait(timeout_s, where=self.url)
        while True:
            left_s = waiting.left_s()
            try:
                readiness = self._run(ready_call(), left_s)
                if waiting.ends_with(readiness):
                    return readiness
            except UnavailableError as error:
                waiting.note(str(error))
            time.sleep(waiting.pause_s())

    def metrics(self) -> str:
        """Return the metrics page, in Prometheus' text form."""
        return self._run(text_call("/metrics"))

    def close(self) -> None:
        """Close the kept connections; calls that run finish."""
        self._closed = True
        self._drop_idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, call: Call[T], deadline_s: float | None = None) -> T:
        attempts = self._attempts(call, deadline_s)
        turn = self._servers.turn(call)
        while True:
            failure: ServiceError
            retry_after_s = 0.0
            sent = [False]
            try:
                reply = self._exchange(call, turn, attempts, sent)
            except TimeoutError:
                self._drop_idle(turn.server)
                failure = self._unreachable(turn.server, TimeoutError("timed out"))
            except (OSError, http.client.HTTPException) as error:
                self._drop_idle(turn.server)
                failure = self._unreachable(turn.server, error)
            else:
                if reply.status < 400 or call.path == "/readyz":
                    turn.answered()
                    return call.read(reply)
                failure, retry_after_s = failure_of(reply)
            elsewhere = turn.failed(failure)
            time.sleep(
                attempts.wait_s(
                    failure, sent=sent[0], retry_after_s=retry_after_s, elsewhere=elsewhere
                )
            )

    def _exchange(
        self, call: Call[Any], turn: ServerTurn, attempts: Attempts, sent: list[bool]
    ) -> Reply:
        server = turn.server
        left_s = attempts.left_s()
        connection = self._take(server)
        response: http.client.HTTPResponse | None = None
        try:
            if connection.sock is None:
                connection.timeout = turn.share_s(left_s)
                connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(attempts.left_s())
            # Every read has what is left, however slowly header or body drip in.
            connection.response_class = partial(_response, left_s=attempts.left_s)  # type: ignore[assignment]
            sent[0] = True
            connection.request(
                call.method,
                server.prefix + call.path,
                body=call.body,
                headers=self._call_headers(call),
            )
            response = connection.getresponse()
            body = self._body(server, response.length)
            while part := response.read1(_READ_BYTES):
                body.add(part)
            if response.length:  # `read1` takes the end of the connection for the answer's
                raise http.client.IncompleteRead(b"", response.length)
        except BaseException:
            if response is not None:  # It has the socket alone where the answer ends with it.
                response.close()
            connection.close()
            raise
        headers = {name.lower(): value for name, value in response.getheaders()}
        # `read1` leaves a response open that was read to its end; the connection could then not
        # be used again. This closes the response only, the connection stays.
        response.close()
        if response.will_close:
            connection.close()
        else:
            self._give(server, connection)
        return Reply(response.status, headers, body.whole())

    def _take(self, server: ServerUrl) -> http.client.HTTPConnection:
        """Return a kept connection, or one that is still to be made."""
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise ServerUnreachable("this client is closed", action="make a new Client")
            for at in reversed(range(len(self._idle))):
                if self._idle[at][1] is not server:
                    continue
                since, _, connection = self._idle.pop(at)
                # One that the other side has closed would only show it after the request is sent,
                # when it is too late to know what was done. One that idled long may be about to.
                if now - since < _IDLE_S_MAX and _is_open(connection):
                    return connection
                connection.close()
        host, port = server.parts.hostname, server.parts.port
        assert host is not None
        if server.parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port)

    def _drop_idle(self, server: ServerUrl | None = None) -> None:
        """Close the kept connections to a server, or all: what broke one has perhaps broken them.

        Each would cost a try, and a server that is gone without a word takes all with it.
        """
        with self._lock:
            idle = [one for one in self._idle if server is None or one[1] is server]
            self._idle = [one for one in self._idle if not (server is None or one[1] is server)]
        for _, _, connection in idle:
            connection.close()

    def _give(self, server: ServerUrl, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < 32:
                self._idle.append((time.monotonic(), server, connection))
                return
        connection.close()


def _response(
    sock: socket.socket, *arguments: Any, left_s: Callable[[], float], **options: Any
) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_TimedSocket(sock, left_s), *arguments, **options)  # type: ignore[arg-type]


class _TimedSocket:
    """What a response reads from: its connection's socket, with one deadline for all reads.

    A socket's own time limit is for each of them, so that a server that sends a byte now and then
    would be waited for without end.
    """

    def __init__(self, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._sock = sock
        self._left_s = left_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the file that `http.client` reads."""
        return io.BufferedReader(_TimedReads(self._sock, self._left_s))


class _TimedReads(io.RawIOBase):
    def __init__(self, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._sock = sock
        self._left_s = left_s
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


# All that are alive, for the child of a fork.
_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


def _begin_in_child() -> None:
    for client in list(_CLIENTS):
        client._begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Tell whether the other side has neither closed a connection nor sent anything unasked."""
    if connection.sock is None:
        return False
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return not waiting.poll(0)
