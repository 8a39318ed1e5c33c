"""The SDK: `stoker.Client` for threads, `stoker.AsyncClient` for asyncio.

Both keep connections open, retry what may be retried within one deadline (`service.wire` has the
rules), return typed records and raise the classes of `stoker.errors`. The synchronous client
stands on the standard library's `http.client`: it needs connection reuse and a time limit per
read, and no more, so a further dependency would not pay. The asynchronous one uses aiohttp, which
the server brings anyway.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from stoker.errors import InputError, UnavailableError
from stoker.service.answers import (
    EventsAnswer,
    Readiness,
    SearchAnswer,
    WarmupStatus,
    WriteAnswer,
)
from stoker.service.problems import NotReady, ServerUnreachable, ServiceError
from stoker.service.wire import (
    Attempts,
    Call,
    Document,
    Reply,
    RetryPolicy,
    delete_call,
    events_call,
    failure_of,
    ready_call,
    search_call,
    start_warmup_call,
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
_POLL_S = 0.05


class _Base:
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
            InputError: ``url`` is no http or https URL, or ``deadline_s`` is not above 0.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"url: expected http://HOST:PORT or https://HOST:PORT, found {url!r}")
        if not deadline_s > 0:
            raise InputError(f"deadline_s must be above 0, found {deadline_s}")
        self.url = url.rstrip("/")
        self.tenant = tenant
        self.deadline_s = deadline_s
        self._parts = parts
        self._prefix = parts.path.rstrip("/")
        self._retries = RetryPolicy() if retries is None else retries
        self._headers = {"User-Agent": _USER_AGENT, "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

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
            deadline_ms = max(1, int(self.deadline_s * 1e3))
        return search_call(tenant=self.tenant, deadline_ms=deadline_ms, **members)


class Client(_Base):
    """A client for programs with threads; several threads may share one."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        tenant: str | None = None,
        deadline_s: float = 10.0,
        retries: RetryPolicy | None = None,
    ) -> None:
        super().__init__(url, key=key, tenant=tenant, deadline_s=deadline_s, retries=retries)
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
            deadline_ms: When the server stops and answers with what it has; None takes the
                client's whole deadline.
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
        patience = None if deadline_s is None or not wait else deadline_s + self.deadline_s
        return self._run(
            start_warmup_call(budget_bytes, deadline_s, everything=everything, wait=wait), patience
        )

    def ready(self) -> Readiness:
        """Return whether traffic should come, and what is waited for."""
        return self._run(ready_call())

    def wait_ready(self, timeout_s: float) -> Readiness:
        """Return once the server is ready.

        Raises:
            NotReady: it is not, after ``timeout_s``; says what it waits for.
        """
        end = time.monotonic() + timeout_s
        reason = "no answer"
        while (left := end - time.monotonic()) > 0:
            try:
                readiness = self._run(ready_call(), left)
            except UnavailableError as error:
                reason = str(error)
            else:
                if readiness.ready:
                    return readiness
                reason = f"waiting for {', '.join(readiness.waiting_for)}"
            time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
        raise NotReady(f"not ready after {timeout_s:g} s: {reason}", where=self.url)

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

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        tenant: str | None = None,
        deadline_s: float = 10.0,
        retries: RetryPolicy | None = None,
    ) -> None:
        super().__init__(url, key=key, tenant=tenant, deadline_s=deadline_s, retries=retries)
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
        patience = None if deadline_s is None or not wait else deadline_s + self.deadline_s
        return await self._run(
            start_warmup_call(budget_bytes, deadline_s, everything=everything, wait=wait), patience
        )

    async def ready(self) -> Readiness:
        """Return whether traffic should come, and what is waited for."""
        return await self._run(ready_call())

    async def wait_ready(self, timeout_s: float) -> Readiness:
        """Return once the server is ready; see `Client.wait_ready`."""
        end = time.monotonic() + timeout_s
        reason = "no answer"
        while (left := end - time.monotonic()) > 0:
            try:
                readiness = await self._run(ready_call(), left)
            except UnavailableError as error:
                reason = str(error)
            else:
                if readiness.ready:
                    return readiness
                reason = f"waiting for {', '.join(readiness.waiting_for)}"
            await asyncio.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
        raise NotReady(f"not ready after {timeout_s:g} s: {reason}", where=self.url)

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
