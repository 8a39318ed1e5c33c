"""The SDK for threads: `stoker.Client`; for asyncio there is `service.async_client`.

Both keep connections open, retry what may be retried within one deadline (`service.wire` has the
rules), return typed records and raise the classes of `stoker.errors`. This one stands on the
standard library's `http.client`: it needs connection reuse and a time limit per read, and no more,
so a further dependency would not pay.
"""

from __future__ import annotations

import http.client
import select
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
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
        self._idle: list[tuple[float, ServerUrl, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        self._closed = False

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
        try:
            if connection.sock is None:
                connection.timeout = turn.share_s(left_s)
                connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(attempts.left_s())
            sent[0] = True
            connection.request(
                call.method,
                server.prefix + call.path,
                body=call.body,
                headers=self._call_headers(call),
            )
            response = connection.getresponse()
            parts = []
            while True:
                if connection.sock is not None:
                    connection.sock.settimeout(attempts.left_s())
                part = response.read1(_READ_BYTES)
                if not part:
                    break
                parts.append(part)
            if response.length:  # `read1` takes the end of the connection for the answer's
                raise http.client.IncompleteRead(b"", response.length)
        except BaseException:
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
        return Reply(response.status, headers, b"".join(parts))

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


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Tell whether the other side has neither closed a connection nor sent anything unasked."""
    if connection.sock is None:
        return False
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return not waiting.poll(0)
