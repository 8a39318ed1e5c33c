"""POST /v1/events: CloudEvents, one or a batch; what is acknowledged is durable."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from stoker.service.answers import EventsAnswer
from stoker.service.bodies import parse_events
from stoker.service.problems import TenantForbidden
from stoker.service.request_state import (
    BODIES,
    ENGINE,
    JSON_TYPES,
    LANES,
    encode,
    json_response,
    parse_aside,
    read_body,
    state_of,
)

_TYPES = JSON_TYPES | {"application/cloudevents+json", "application/cloudevents-batch+json"}


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_post("/v1/events", _append)


async def _append(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    settings = engine.config.service
    state = state_of(request)
    raw = await read_body(request, request.app[BODIES].write, _TYPES)
    tenant = state.tenant or settings.tenant_default
    events = await parse_aside(raw, partial(parse_events, settings=settings, tenant=tenant))
    for i, event in enumerate(events):
        if state.tenant is not None and event.tenant != state.tenant:
            raise TenantForbidden(
                f"the key belongs to tenant {state.tenant!r}, event {i} names another",
                where=f"/{i}/data/tenant",
            )
    await request.app[LANES].write.run(
        settings.write_deadline_s, lambda _left_s: engine.append_events(events)
    )
    return json_response(encode(EventsAnswer(accepted=len(events), request_id=state.id)), 202)
