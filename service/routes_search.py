"""POST /v1/search."""

from __future__ import annotations

import hashlib
import time
from functools import partial

from aiohttp import web

from stoker.service.bodies import SearchRequest, parse_search
from stoker.service.engine import Engine
from stoker.service.request_state import (
    BODIES,
    ENGINE,
    LANES,
    RequestState,
    encode,
    json_response,
    parse_aside,
    read_body,
    state_of,
    tenant_of,
)


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_post("/v1/search", _search)


async def _search(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    state = state_of(request)
    raw = await read_body(request, request.app[BODIES].search)
    search = await parse_aside(raw, partial(parse_search, settings=engine.config.service))
    tenant = tenant_of(request, search.tenant)
    left_s = search.deadline_ms / 1e3 - (time.monotonic() - state.started)
    body = await request.app[LANES].search.run(
        left_s, partial(_answer, engine, search, tenant, state, _event_id(state, raw))
    )
    return json_response(body)


def _answer(
    engine: Engine,
    search: SearchRequest,
    tenant: str,
    state: RequestState,
    event_id: str | None,
    left_s: float,
) -> bytes:
    # Encoded in the thread too: a thousand results with their texts are megabytes.
    return encode(
        engine.search(
            search,
            tenant=tenant,
            left_s=left_s,
            request_id=state.id,
            started=state.started,
            event_id=event_id,
        )
    )


def _event_id(state: RequestState, raw: bytes) -> str | None:
    """Return the identity of a search's event, the same for all its tries; None draws a new one.

    Of the id alone it would not do: a gateway may give one to all that it asks for one page.
    """
    if not state.id_given:
        return None
    return hashlib.blake2b(raw, key=state.id.encode(), digest_size=16).hexdigest()
