"""/livez, /readyz, /metrics and /openapi.json."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path

import orjson
import yaml
from aiohttp import web

from stoker.service.connections import CONNECTIONS
from stoker.service.metrics import CONTENT_TYPE
from stoker.service.request_state import BODIES, ENGINE, LANES, encode, json_response


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_get("/livez", _live)
    app.router.add_get("/readyz", _ready)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/openapi.json", _openapi)


@lru_cache(maxsize=1)
def openapi_json() -> bytes:
    """Return the API's description as JSON; its source is `openapi.yaml` beside this file."""
    text = Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8")
    return orjson.dumps(yaml.safe_load(text))


async def _live(request: web.Request) -> web.StreamResponse:
    # Answered by the event loop itself: if the loop is stuck, no answer comes, and that is true.
    return json_response(b'{"live":true}')


async def _ready(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    readiness = engine.readiness()
    response = json_response(encode(readiness), 200 if readiness.ready else 503)
    if not readiness.ready:
        response.headers["Retry-After"] = str(engine.config.service.retry_after_s)
    return response


async def _metrics(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    for lane in request.app[LANES].each():
        engine.metrics.pending.labels(lane.name).set(lane.pending)
    engine.metrics.connections.set(request.app[CONNECTIONS].count)
    for budget in request.app[BODIES].each():
        engine.metrics.body_bytes.labels(budget.name).set(budget.held_bytes)
    # In a thread: what is resident is counted in the page pool, under its lock.
    page = await asyncio.to_thread(engine.metrics_page)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})


async def _openapi(request: web.Request) -> web.StreamResponse:
    return json_response(await asyncio.to_thread(openapi_json))
