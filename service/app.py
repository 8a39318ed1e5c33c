"""The HTTP server: what surrounds every request, and how the server starts and stops.

Around every request: an id, the tenant that its key belongs to, a clock, and one place that turns
errors into problem documents. The routes themselves are in `service.routes_*`.

Stopping: /readyz closes, then the port, then running requests finish within `service.drain_s`, and
the engine writes its snapshot. The event loop never does disk work, never searches, and parses only
what is small; all that runs in the lanes' threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import logging
import os
import re
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import structlog
from aiohttp import web

from stoker.errors import UnavailableError
from stoker.service import (
    routes_documents,
    routes_events,
    routes_health,
    routes_logging,
    routes_placement,
    routes_search,
    routes_warmup,
)
from stoker.service.admission import Lane
from stoker.service.body_budget import BodyBudget
from stoker.service.connections import (
    CONNECTIONS,
    REFUSALS,
    UNDER_WAY,
    AcceptFaults,
    OpenConnections,
    OurFaults,
    ProblemRunner,
    RequestsUnderWay,
    connection_is_old,
    connections_possible,
)
from stoker.service.engine import Engine
from stoker.service.problems import KeyMissing
from stoker.service.refusals import Refusals
from stoker.service.request_state import (
    BODIES,
    ENGINE,
    LANES,
    Bodies,
    Lanes,
    RequestState,
    set_state,
    state_of,
)
from stoker.service.settings import ServiceSettings

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# After the drain: what has come on a kept connection meanwhile may take so long.
_CUT_OFF_S = 0.5
_OPEN_PATHS = frozenset({"/livez", "/readyz", "/metrics", "/openapi.json"})


def make_app(engine: Engine, settings: ServiceSettings) -> web.Application:
    """Build the application around an engine; the caller closes the engine."""
    refusals = Refusals(engine.metrics, retry_after_s=settings.retry_after_s)
    under_way = RequestsUnderWay()
    app = web.Application(
        middlewares=[_make_edge(engine, settings, refusals, under_way), _make_gate(settings)]
    )
    app[UNDER_WAY] = under_way
    app[ENGINE] = engine
    app[REFUSALS] = refusals
    app[CONNECTIONS] = OpenConnections(settings.connections_max)
    app[BODIES] = Bodies(
        search=BodyBudget("search", bytes_max=settings.bodies_bytes_max),
        write=BodyBudget("write", bytes_max=settings.bodies_bytes_max),
    )
    app.cleanup_ctx.extend((_error_log, _lanes))
    for routes in (
        routes_search,
        routes_documents,
        routes_events,
        routes_warmup,
        routes_logging,
        routes_placement,
        routes_health,
    ):
        routes.add_routes(app)
    return app


async def _error_log(_app: web.Application) -> AsyncIterator[None]:
    # Taken away again: what the logging module holds, and all that it refers to, outlives us.
    server_log, ours = logging.getLogger("aiohttp.server"), OurFaults()
    server_log.addFilter(ours)
    yield
    server_log.removeFilter(ours)


def search_thread_count(settings: ServiceSettings) -> int:
    """Return how many threads search, after the setting and this process's CPUs."""
    if settings.search_threads:
        return settings.search_threads
    return min(32, 2 * len(os.sched_getaffinity(0)))


async def _lanes(app: web.Application) -> AsyncIterator[None]:
    settings = app[ENGINE].config.service
    lanes = Lanes(
        search=Lane(
            "search",
            threads=search_thread_count(settings),
            queued_max=settings.searches_queued_max,
        ),
        # Commits of callers that arrive together are shared, so a few writers are quicker than one.
        write=Lane("write", threads=4, queued_max=settings.writes_queued_max),
        warm=Lane("warm", threads=2, queued_max=8),
    )
    app[LANES] = lanes
    yield
    lanes.close()


def _make_edge(
    engine: Engine, settings: ServiceSettings, refusals: Refusals, under_way: RequestsUnderWay
) -> Any:
    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        id_given = _REQUEST_ID.fullmatch(given) is not None
        request_id = given if id_given else uuid.uuid4().hex
        state = RequestState(id=request_id, started=time.monotonic(), id_given=id_given)
        set_state(request, state)
        with under_way, _callers(engine, request):
            try:
                response = await handler(request)
            except Exception as error:
                response = refusals.answer(error, request, request_id)
            finally:
                state.release_body()
            refusals.count(request, response.status, time.monotonic() - state.started)
            response.headers["X-Request-Id"] = request_id
            if engine.draining or connection_is_old(request, settings.connection_age_s):
                response.force_close()
            await _send(request, response, settings.connection_idle_s)
        return response

    return edge


def _callers(engine: Engine, request: web.Request) -> AbstractContextManager[None]:
    """Return what counts the request's caller while it waits for an answer.

    One that asks for a warm-up waits for just that, and one that asks how it goes can wait.
    """
    if request.path in _OPEN_PATHS or request.path == routes_warmup.PATH:
        return contextlib.nullcontext()
    return engine.callers


async def _send(request: web.Request, response: web.StreamResponse, wait_s: float) -> None:
    """Send the answer; a client that does not take it loses its connection.

    Else a client that stops reading would hold the answer's megabytes for as long as it likes.
    """
    try:
        async with asyncio.timeout(wait_s):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client has gone; the library, which looks next, closes its end


def _make_gate(settings: ServiceSettings) -> Any:
    """Find out whose request it is, before its body is read."""
    # Found by digest, so that the time of a comparison tells nothing about a key.
    owners = {_digest(key): tenant for tenant, key in settings.api_keys.items()}
    operator = _digest(settings.operator_key) if settings.operator_key else None

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        state = state_of(request)
        state.operator = not settings.keys_required
        if settings.keys_required and request.path not in _OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not key.strip():
                raise KeyMissing("the request carries no bearer key", where="Authorization")
            given = _digest(key.strip())
            tenant = owners.get(given)
            is_operator = operator is not None and hmac.compare_digest(operator, given)
            if tenant is None and not is_operator:
                raise KeyMissing("the bearer key belongs to no tenant", where="Authorization")
            state.tenant = tenant
            state.operator = is_operator
        return await handler(request)

    return gate


def _digest(key: str) -> bytes:
    # A header may hold any bytes; those that are no UTF-8 come as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def serve(
    engine: Engine,
    settings: ServiceSettings,
    *,
    listening: Callable[[str, int], None],
    stop: asyncio.Event | None = None,
) -> bool:
    """Start the engine and serve until SIGTERM, SIGINT or SIGHUP (or ``stop``), then drain it.

    A terminal that closes sends SIGHUP: it ends a server as orderly as the others, and not at all
    where it is ignored from the start.

    Args:
        listening: Called once with the host and the real port, when the port is open.

    Returns:
        Whether every request had ended. If not, threads are still inside one, on a device that
        hangs perhaps, and the interpreter would wait for them at its exit.

    Raises:
        UnavailableError: the address cannot be listened on; names it and the settings.
    """
    stop = asyncio.Event() if stop is None else stop
    finished = True
    loop = asyncio.get_running_loop()
    app = make_app(engine, settings)
    app[CONNECTIONS].count_max = connections_possible(settings.connections_max)
    loop.set_exception_handler(AcceptFaults())
    runner = ProblemRunner(
        app, shutdown_timeout=_CUT_OFF_S, keepalive_timeout=settings.connection_idle_s
    )
    try:
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            raise _not_listening(settings, error) from error
        engine.start()  # after the port is ours: a server that cannot listen has nothing to warm
        ending = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            ending.append(signal.SIGHUP)
        for signal_number in ending:
            loop.add_signal_handler(signal_number, stop.set)
        listening(settings.host, _port_of(runner))
        await stop.wait()
        finished = await _drain(engine, app, site, settings)
    finally:
        await runner.cleanup()
        await asyncio.to_thread(engine.close, idle=finished)
    return finished


def _not_listening(settings: ServiceSettings, error: OSError) -> UnavailableError:
    # asyncio's own text names the address only; a name that cannot be resolved has no errno's text.
    if error.errno is not None and error.errno in errno.errorcode:
        reason = os.strerror(error.errno)
    else:
        reason = error.strerror or str(error)
    return UnavailableError(
        f"cannot listen on {settings.host}, port {settings.port}: {reason}; stop what uses it, or "
        "set service.host and service.port (0 takes a free port) to others"
    )


async def _notice(settings: ServiceSettings) -> None:
    """Go on as before, while balancers learn from /readyz to look away."""
    await asyncio.sleep(settings.drain_notice_s)


async def _drain(
    engine: Engine, app: web.Application, site: web.TCPSite, settings: ServiceSettings
) -> bool:
    started = time.monotonic()
    lanes, under_way = app[LANES], app[UNDER_WAY]
    engine.draining = True
    log.info("service.drain_started", pending=lanes.pending, drain_s=settings.drain_s)
    await _notice(settings)
    await site.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.drain_s):
            while lanes.pending or under_way.count:
                await lanes.drained()
                # Those too whose body is still on its way, or whose answer is being taken.
                await under_way.drained()
    log.info(
        "service.drain_finished",
        finished=not (lanes.pending or under_way.count),
        pending=lanes.pending,
        unanswered=under_way.count,
        seconds=round(time.monotonic() - started, 3),
    )
    return not lanes.pending


def _port_of(runner: web.AppRunner) -> int:
    with contextlib.suppress(IndexError, TypeError):
        return int(runner.addresses[0][1])
    return 0
