"""The server's connections: what comes before a route answers in problem documents too.

The HTTP library answers a request that it cannot read by itself, in plain text, and writes a
traceback of it. A client that has one way to read errors should not need a second one, and a port
scan must not fill the log. So its connection and its runner are ours from where they differ.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import structlog
from aiohttp import http_exceptions, web

from stoker.service.refusals import Refusals

log = structlog.get_logger(__name__)

REFUSALS: web.AppKey[Refusals] = web.AppKey("refusals", Refusals)


class OurFaults(logging.Filter):
    """Keeps what is no HTTP out of the error log: a port scan must not fill it with tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record of the HTTP library is about a fault of ours."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (http_exceptions.HttpProcessingError, web.RequestPayloadError)):
            return True
        # Its text quotes what was sent, which may be half of a header with a key.
        log.debug("service.request_malformed", reason=type(error).__name__)
        return False


class ProblemRunner(web.AppRunner):
    """Runs an application of `service.app` on connections that answer in problem documents."""

    def __init__(self, app: web.Application, *, keepalive_timeout: float, **options: Any) -> None:
        super().__init__(app, access_log=None, keepalive_timeout=keepalive_timeout, **options)
        self._keepalive_s = keepalive_timeout

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, self.app[REFUSALS], keepalive_s=self._keepalive_s)


class _Server(web.Server):
    """Makes a connection for each client."""

    def __init__(self, inner: web.Server, refusals: Refusals, *, keepalive_s: float) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await inner.request_handler(request)
            except web.HTTPException as answer:  # before any middleware: an unknown Expect
                return refusals.answer_outside(answer, request)

        super().__init__(handle, request_factory=inner.request_factory)
        self._refusals = refusals
        self._keepalive_s = keepalive_s

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._refusals, keepalive_s=self._keepalive_s)


class _Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_refusals",)

    def __init__(self, server: web.Server, refusals: Refusals, *, keepalive_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=keepalive_s,
            access_log=None,  # type: ignore[arg-type]
        )
        self._refusals = refusals

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, or a fault outside all routes; the connection ends with it.

        Raises:
            ConnectionError: an answer has begun, so that no other can be given.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        response = self._refusals.answer_outside(exc or TimeoutError(), request)
        response.force_close()
        return response
