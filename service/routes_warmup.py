"""/v1/warmup: the receipt, a warm-up on request, and orders to the one that runs."""

from __future__ import annotations

import dataclasses
from typing import Final

from aiohttp import web

from stoker.service.bodies import parse_steering, parse_warmup
from stoker.service.request_state import (
    BODIES,
    ENGINE,
    LANES,
    encode,
    json_response,
    read_body,
    require_operator,
    state_of,
)

PATH: Final = "/v1/warmup"
_WAIT_GRACE_S = 60.0


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_get(PATH, _show)
    app.router.add_post(PATH, _start)
    app.router.add_patch(PATH, _steer)


async def _show(request: web.Request) -> web.StreamResponse:
    status = request.app[ENGINE].warm_status()
    return json_response(encode(dataclasses.replace(status, request_id=state_of(request).id)))


async def _start(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    state = state_of(request)
    require_operator(request, "a warm-up")
    wanted = parse_warmup(await read_body(request, request.app[BODIES].write))
    engine.start_warm(wanted)
    if wanted.wait:
        deadline_s = wanted.deadline_s or engine.config.service.warm_deadline_s
        await request.app[LANES].warm.run(deadline_s + _WAIT_GRACE_S, engine.wait_warm)
    status = dataclasses.replace(engine.warm_status(), request_id=state.id)
    return json_response(encode(status), 202 if status.state == "running" else 200)


async def _steer(request: web.Request) -> web.StreamResponse:
    require_operator(request, "a warm-up")
    engine = request.app[ENGINE]
    engine.steer_warm(parse_steering(await read_body(request, request.app[BODIES].write)))
    status = dataclasses.replace(engine.warm_status(), request_id=state_of(request).id)
    return json_response(encode(status))
