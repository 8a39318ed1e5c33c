"""The SDK for asyncio: `stoker.AsyncClient`, on aiohttp, which the server brings anyway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from stoker.errors import InputError, UnavailableError
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

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")


class AsyncClient(ClientBase):
    """A client for asyncio; use it within one event loop, as an async context manager."""

    def _begin(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

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
        """Close the kept connections; it can be called twice."""
        self._closed = True
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
        turn = self._servers.turn(call)
        while True:
            failure: ServiceError
            sent, retry_after_s = True, 0.0
            try:
                reply = await self._exchange(call, turn, attempts)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                failure, sent = self._unreachable(turn.server, error), False
            except (aiohttp.ClientError, OSError) as error:
                failure = self._unreachable(turn.server, error)
            else:
                if reply.status < 400 or call.path == "/readyz":
                    turn.answered()
                    return call.read(reply)
                failure, retry_after_s = failure_of(reply)
            elsewhere = turn.failed(failure)
            await asyncio.sleep(
                attempts.wait_s(
                    failure, sent=sent, retry_after_s=retry_after_s, elsewhere=elsewhere
                )
            )

    async def _exchange(self, call: Call[Any], turn: ServerTurn, attempts: Attempts) -> Reply:
        import aiohttp

        if self._closed:
            raise ServerUnreachable("this client is closed", action="make a new AsyncClient")
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._session, self._loop = aiohttp.ClientSession(), loop
        if self._loop is not loop:  # its connections hang on the other one
            raise InputError(
                "this AsyncClient was used in another event loop (each asyncio.run has its own); "
                "make one for each"
            )
        left_s = attempts.left_s()
        async with self._session.request(
            call.method,
            self._request_url(turn.server, call),
            data=call.body,
            headers=self._call_headers(call),
            allow_redirects=False,  # as the other client: a POST would arrive as a GET
            timeout=aiohttp.ClientTimeout(total=left_s, sock_connect=turn.share_s(left_s)),
        ) as response:
            body = self._body(turn.server, response.content_length)
            async for part in response.content.iter_any():  # unpacked, where it came packed
                body.add(part)
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, body.whole())

    def _request_url(self, server: ServerUrl, call: Call[Any]) -> Any:
        from yarl import URL

        # encoded: a document id may hold an escaped slash, which must stay one.
        return URL(server.url + call.path, encoded=True)
