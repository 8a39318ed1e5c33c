"""The server's connections: what comes before a route answers in problem documents too.

The HTTP library answers a request that it cannot read by itself, in plain text, and writes a
traceback of it. A client that has one way to read errors should not need a second one, and a port
scan must not fill the log. So its connection and its runner are ours from where they differ.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any, Final

import structlog
from aiohttp import http_exceptions, web

from stoker.service.problems import TooManyRequests
from stoker.service.refusals import Refusals

log = structlog.get_logger(__name__)

# Files of the process that are no connections: the index, the log, the state, libraries.
_FILES_KEPT: Final = 256
_CONNECTIONS_MIN: Final = 16
_REFUSED_S: Final = 1.0  # how long a refused client may take to send its request and read why
# How long what a client still sends is read away behind its answer, so that it gets to read that:
# some round trips. One that sends without end would else have the event loop busy for 10 s.
_LINGER_S: Final = 2.0
_SAID_AGAIN_S: Final = 60.0
_GOLDEN: Final = 0.6180339887498949
_LIVE: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n"
    b'Connection: close\r\n\r\n{"live":true}'
)
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

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


class OpenConnections:
    """How many connections are open, may be, and were made. Used from one event loop."""

    def __init__(self, count_max: int) -> None:
        self.count = 0
        self.made = 0
        self.count_max = count_max


class RequestsUnderWay:
    """How many requests have begun and are not answered. Used from one event loop.

    A context manager around each of them, from its first lines to its answer's last byte.
    """

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._none.set()

    async def drained(self) -> None:
        """Wait until there are none."""
        await self._none.wait()


CONNECTIONS: web.AppKey[OpenConnections] = web.AppKey("connections", OpenConnections)
UNDER_WAY: web.AppKey[RequestsUnderWay] = web.AppKey("under_way", RequestsUnderWay)


def connections_possible(wanted: int) -> int:
    """Return how many connections the process can have, at most ``wanted``.

    A connection is a file. The process's own limit is raised as far as the system lets it; where
    that is too low the bound is lowered, said in the log: without files no page could be read.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = min(wanted, max(_CONNECTIONS_MIN, soft - _FILES_KEPT))
    log.warning("service.connections_lowered", wanted=wanted, possible=possible, files_max=soft)
    return possible


class AcceptFaults:
    """A loop's handler of errors: that no connection could be accepted is said once a minute.

    The loop tries again each second, and brings a traceback for each place in its backlog.
    """

    def __init__(self) -> None:
        self._said_s = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what the loop could not."""
        error = context.get("exception")
        accepting = str(context.get("message", "")).startswith("socket.accept()")
        if not (accepting and isinstance(error, OSError) and error.errno in _OUT_OF_FILES):
            loop.default_exception_handler(context)
            return
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAID_AGAIN_S:
            self._said_s = now_s
            log.error("service.connections_unaccepted", reason=error.strerror)


class ProblemRunner(web.AppRunner):
    """Runs an application of `service.app` on connections that answer in problem documents."""

    def __init__(self, app: web.Application, *, keepalive_timeout: float, **options: Any) -> None:
        super().__init__(app, access_log=None, keepalive_timeout=keepalive_timeout, **options)
        self._keepalive_s = keepalive_timeout

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server, self.app[REFUSALS], self.app[CONNECTIONS], keepalive_s=self._keepalive_s
        )


class _Server(web.Server):
    """Makes a connection for each client, within the bound."""

    def __init__(
        self,
        inner: web.Server,
        refusals: Refusals,
        connections: OpenConnections,
        *,
        keepalive_s: float,
    ) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await inner.request_handler(request)
            except web.HTTPException as answer:  # before any middleware: an unknown Expect
                return refusals.answer_outside(answer, request)

        super().__init__(handle, request_factory=inner.request_factory)
        self._refusals = refusals
        self._open = connections
        self._keepalive_s = keepalive_s

    def __call__(self) -> web.RequestHandler | _RefusedConnection:  # type: ignore[override]
        if self._open.count >= self._open.count_max:
            return _RefusedConnection(self._refusals, self._open.count_max)
        return _Connection(self, self._refusals, self._open, keepalive_s=self._keepalive_s)


class _RefusedConnection(asyncio.Protocol):
    """A connection too many: its first bytes are answered with the reason, and it ends.

    Only whether the server lives is told all the same: who asks would end it else, and take from
    all the others what they have.
    """

    def __init__(self, refusals: Refusals, count_max: int) -> None:
        self._refusals = refusals
        self._count_max = count_max
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(_REFUSED_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        # What comes after the first bytes is read and dropped: to close over it would reset the
        # connection, and take the answer from the client.
        if self._answered:
            return
        self._answered = True
        self._transport.write(_LIVE if data.startswith(b"GET /livez ") else self._reason())
        self._transport.write_eof()

    def _reason(self) -> bytes:
        error = TooManyRequests(
            f"{self._count_max} connections are open, which is the limit "
            "(service.connections_max, or the files that the process may open)",
            where="connection",
            action="retry after the seconds in Retry-After; keep connections, and use fewer",
        )
        return self._refusals.bare_answer(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()


def connection_is_old(request: web.Request, age_s: float) -> bool:
    """Tell whether a request's connection has been open for about ``age_s``, by `age_factor`."""
    connection = request.protocol
    return isinstance(connection, _Connection) and connection.age_s > age_s * connection.age_factor


def age_factor(number: int) -> float:
    """Return by what a server's ``number``-th connection multiplies the age that it may have.

    Within 0.9 and 1.1, so that connections made together, as all are after a roll, do not end
    together. Multiples of the golden ratio modulo 1 lie evenly however many there are, which
    random numbers do not.
    """
    return 0.9 + 0.2 * (number * _GOLDEN % 1.0)


class _Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_counted", "_made_s", "_open", "_refusals", "age_factor")

    def __init__(
        self,
        server: web.Server,
        refusals: Refusals,
        connections: OpenConnections,
        *,
        keepalive_s: float,
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=keepalive_s,
            lingering_time=_LINGER_S,
            access_log=None,  # type: ignore[arg-type]
        )
        self._refusals = refusals
        self._open = connections
        self._counted = False
        self._made_s = time.monotonic()
        connections.made += 1
        self.age_factor = age_factor(connections.made)

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._made_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it in."""
        super().connection_made(transport)
        self._counted = True
        self._open.count += 1

    def data_received(self, data: bytes) -> None:
        """Tell a request that waits for the rest of its body that there is none.

        The library keeps what it could not read for the next request, and the present one waits.
        """
        super().data_received(data)
        request = self._current_request
        if request is None or not self._messages or request.content.is_eof():
            return
        error = getattr(self._messages[-1][0], "exc", None)
        if isinstance(error, http_exceptions.HttpProcessingError):
            said = error.message.partition("\n")[0].rstrip(":")  # then it quotes what was sent
            request.content.set_exception(web.RequestPayloadError(said))

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count it out."""
        if self._counted:
            self._counted = False
            self._open.count -= 1
        super().connection_lost(exc)

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
