"""/v1/log-level: how much a running server writes into its log, without a restart."""

from __future__ import annotations

from aiohttp import web

from stoker.service.bodies import parse_log_level
from stoker.service.logging import log_level, set_log_level
from stoker.service.request_state import (
    BODIES,
    encode,
    json_response,
    read_body,
    require_operator,
    state_of,
)


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_get("/v1/log-level", _show)
    app.router.add_put("/v1/log-level", _set)


async def _show(request: web.Request) -> web.StreamResponse:
    require_operator(request, "the log level")
    return _answer(request)


async def _set(request: web.Request) -> web.StreamResponse:
    require_operator(request, "the log level")
    set_log_level(parse_log_level(await read_body(request, request.app[BODIES].write)))
    return _answer(request)


def _answer(request: web.Request) -> web.StreamResponse:
    return json_response(encode({"level": log_level(), "request_id": state_of(request).id}))
