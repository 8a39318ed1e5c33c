"""The SDK: `stoker.Client` for threads, `stoker.AsyncClient` for asyncio.

Both keep connections open, retry what may be retried within one deadline (`service.wire` has the
rules), return typed records and raise the classes of `stoker.errors`. The synchronous client
stands on the standard library's `http.client`: it needs connection reuse and a time limit per
read, and no more, so a further dependency would not pay. The asynchronous one uses aiohttp, which
the server brings anyway.
"""

from __future__ import annotations

import abc
import asyncio
import http.client
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

from stoker.errors import InputError, UnavailableError
from stoker.service.answers import (
    EventsAnswer,
    Readiness,
    SearchAnswer,
    WarmupAction,
    WarmupStatus,
    WriteAnswer,
)
from stoker.service.problems import ServerUnreachable, ServiceError
from stoker.service.wire import (
    Attempts,
    Call,
    Document,
    ReadyWait,
    Reply,
    RetryPolicy,
    delete_call,
    events_call,
    failure_of,
    ready_call,
    search_call,
    start_warmup_call,
    steer_warmup_call,
    text_call,
    upsert_call,
    used_event,
    warmup_call,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8080"
_USER_AGENT = "stoker-sdk/1"
_IDLE_S_MAX = 15.0
_READ_BYTES = 1 << 16
# Of the client's deadline, for the server; the rest is for its answer to come back in.
_SEARCH_SHARE = 0.9


class _Base(abc.ABC):
    """Where the server is, who asks, and how patiently."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        tenant: str | None = None,
        deadline_s: float = 10.0,
        retries: RetryPolicy | None = None,
    ) -> None:
        """Point at a server; nothing is sent yet.

        Args:
            url: Scheme, host, port and, behind a proxy, a path prefix.
            key: Bearer key of the tenant; None where the server asks for none.
            tenant: Whose documents; None takes the key's, or the server's default.
            deadline_s: How long a call may take in all, retries and waits included.
            retries: None takes `RetryPolicy()`.

        Raises:
            InputError: ``url`` is no http or https URL, ``key`` does not fit a header, or
                ``deadline_s`` is not above 0.
        """
        if not deadline_s > 0:
            raise InputError(f"deadline_s must be above 0, found {deadline_s}")
        self.url = url.rstrip("/")
        self.tenant = tenant
        self.deadline_s = deadline_s
        self._parts = _split_url(url)
        self._prefix = self._parts.path.rstrip("/")
        self._retries = RetryPolicy() if retries is None else retries
        self._headers = {"User-Agent": _USER_AGENT, "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {_checked_key(key)}"
        self._begin()

    @abc.abstractmethod
    def _begin(self) -> None:
        """Make what this kind of client keeps between calls."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, tenant={self.tenant!r})"  # never the key

    def _attempts(self, call: Call[Any], deadline_s: float | None) -> Attempts:
        return Attempts(
            self._retries,
            idempotent=call.idempotent,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
        )

    def _call_headers(self, call: Call[Any]) -> dict[str, str]:
        if call.body is None:
            return self._headers
        return {**self._headers, "Content-Type": call.content_type}

    def _unreachable(self, error: BaseException) -> ServerUnreachable:
        failure = ServerUnreachable(
            f"{self.url}: {error or type(error).__name__}",
            where=self.url,
            action="check that the server runs and that the URL is right",
        )
        failure.__cause__ = error
        return failure

    def _search(self, deadline_ms: int | None, members: Mapping[str, Any]) -> Call[SearchAnswer]:
        if deadline_ms is None:
            deadline_ms = max(1, int(self.deadline_s * 1e3 * _SEARCH_SHARE))
        return search_call(tenant=self.tenant, deadline_ms=deadline_ms, **members)

    def _warmup_patience(self, deadline_s: float | None, wait: bool) -> float | None:
        return deadline_s + self.deadline_s if wait and deadline_s is not None else None


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port  # looked at, it is checked
    except ValueError as error:
        raise InputError(f"url: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise InputError(f"url: expected http://HOST:PORT or https://HOST:PORT, found {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        # Not shown: a password may be in it.
        raise InputError("url: expected no user, query or fragment; a key is given as `key`")
    return parts


def _checked_key(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"key: expected printable ASCII without a space, found {len(key)} characters of which "
            "some are not (a line's end, perhaps)"
        )
    return key


class Client(_Base):
    """A client for programs with threads; several threads may share one."""

    def _begin(self) -> None:
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
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
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

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
        while True:
            wait_s = 0.0
            sent = [False]
            try:
                reply = self._exchange(call, attempts, sent)
            except TimeoutError:
                attempts.left_s()  # raises the deadline's own error if that is what it was
                wait_s = attempts.wait_s(self._unreachable(TimeoutError("timed out")), sent=sent[0])
            except (OSError, http.client.HTTPException) as error:
                wait_s = attempts.wait_s(self._unreachable(error), sent=sent[0])
            else:
                if reply.status < 400 or call.path == "/readyz":
                    return call.read(reply)
                failure, retry_after_s = failure_of(reply)
                wait_s = attempts.wait_s(failure, sent=True, retry_after_s=retry_after_s)
            time.sleep(wait_s)

    def _exchange(self, call: Call[Any], attempts: Attempts, sent: list[bool]) -> Reply:
        connection = self._take(attempts.left_s())
        try:
            if connection.sock is None:
                connection.connect()
            sent[0] = True
            connection.request(
                call.method,
                self._prefix + call.path,
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
            self._give(connection)
        return Reply(response.status, headers, b"".join(parts))

    def _take(self, timeout_s: float) -> http.client.HTTPConnection:
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise ServerUnreachable("this client is closed", action="make a new Client")
            while self._idle:
                since, connection = self._idle.pop()
                # A connection that idled long may have been closed by the other side, which only
                # shows after the request is sent, when it is too late to know what was done.
                if now - since < _IDLE_S_MAX and connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                    return connection
                connection.close()
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def _give(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < 32:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()


class AsyncClient(_Base):
    """A client for asyncio; use it within one event loop, as an async context manager."""

    def _begin(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def search(
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
        """Find the nearest documents; see `Client.search`."""
        members = dict(
            text=text, vector=vector, k=k, filters=filters, recall_target=recall_target,
            session=session, route=route, include_text=include_text,
            include_metadata=include_metadata,
        )  # fmt: skip
        return await self._run(self._search(deadline_ms, members))

    async def upsert(
        self, documents: Sequence[Document | Mapping[str, Any]], *, deadline_s: float | None = None
    ) -> WriteAnswer:
        """Write documents; see `Client.upsert`."""
        return await self._run(upsert_call(documents, self.tenant), deadline_s)

    async def delete(self, document_id: str) -> WriteAnswer:
        """Delete one document; see `Client.delete`."""
        return await self._run(delete_call(document_id, self.tenant))

    async def send_events(self, events: Sequence[Mapping[str, Any]]) -> EventsAnswer:
        """Send CloudEvents; see `Client.send_events`."""
        return await self._run(events_call(events))

    async def mark_used(
        self,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        route: str | None = None,
    ) -> EventsAnswer:
        """Tell the server which results were really used."""
        event = used_event(chunk_ids, tenant=self.tenant, session=session, route=route)
        return await self.send_events([event])

    async def warmup(self) -> WarmupStatus:
        """Return the state of the warm-up; see `Client.warmup`."""
        return await self._run(warmup_call())

    async def start_warmup(
        self,
        *,
        budget_bytes: int | None = None,
        deadline_s: float | None = None,
        everything: bool = False,
        wait: bool = False,
    ) -> WarmupStatus:
        """Start a warm-up; see `Client.start_warmup`."""
        return await self._run(
            start_warmup_call(budget_bytes, deadline_s, everything=everything, wait=wait),
            self._warmup_patience(deadline_s, wait),
        )

    async def steer_warmup(self, action: WarmupAction) -> WarmupStatus:
        """Steer the warm-up that runs; see `Client.steer_warmup`."""
        return await self._run(steer_warmup_call(action))

    async def ready(self) -> Readiness:
        """Return whether traffic should come, and what is waited for."""
        return await self._run(ready_call())

    async def wait_ready(self, timeout_s: float) -> Readiness:
        """Return once the server is ready; see `Client.wait_ready`."""
        waiting = ReadyWait(timeout_s, where=self.url)
        while True:
            left_s = waiting.left_s()
            try:
                readiness = await self._run(ready_call(), left_s)
                if waiting.ends_with(readiness):
                    return readiness
            except UnavailableError as error:
                waiting.note(str(error))
            await asyncio.sleep(waiting.pause_s())

    async def metrics(self) -> str:
        """Return the metrics page, in Prometheus' text form."""
        return await self._run(text_call("/metrics"))

    async def close(self) -> None:
        """Close the kept connections."""
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, call: Call[T], deadline_s: float | None = None) -> T:
        import aiohttp

        attempts = self._attempts(call, deadline_s)
        while True:
            failure: ServiceError
            sent, retry_after_s = True, 0.0
            try:
                reply = await self._exchange(call, attempts)
            except aiohttp.ClientConnectorError as error:
                failure, sent = self._unreachable(error), False
            except TimeoutError as error:
                attempts.left_s()
                failure = self._unreachable(error)
            except (aiohttp.ClientError, OSError) as error:
                failure = self._unreachable(error)
            else:
                if reply.status < 400 or call.path == "/readyz":
                    return call.read(reply)
                failure, retry_after_s = failure_of(reply)
            await asyncio.sleep(attempts.wait_s(failure, sent=sent, retry_after_s=retry_after_s))

    async def _exchange(self, call: Call[Any], attempts: Attempts) -> Reply:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession()
        if self._session.closed:
            raise ServerUnreachable("this client is closed", action="make a new AsyncClient")
        async with self._session.request(
            call.method,
            self._request_url(call),
            data=call.body,
            headers=self._call_headers(call),
            timeout=aiohttp.ClientTimeout(total=attempts.left_s()),
        ) as response:
            body = await response.read()
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, body)

    def _request_url(self, call: Call[Any]) -> Any:
        from yarl import URL

        # encoded: a document id may hold an escaped slash, which must stay one.
        return URL(self.url + call.path, encoded=True)
