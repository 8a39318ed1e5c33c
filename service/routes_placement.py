"""GET /v1/placement/{id}: why live placement would keep a passage, or not."""

from __future__ import annotations

from aiohttp import web

from stoker.index.document_values import DOCUMENT_ID_BYTES_MAX
from stoker.service.bodies import check_name, parse_tenant
from stoker.service.request_state import ENGINE, LANES, encode, json_response, state_of, tenant_of


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_get("/v1/placement/{id}", _explain)


async def _explain(request: web.Request) -> web.StreamResponse:
    name = check_name(request.match_info["id"], "id", DOCUMENT_ID_BYTES_MAX, where="id")
    tenant = tenant_of(request, parse_tenant(request.query))
    engine = request.app[ENGINE]
    # In a thread: a tick of the placement may hold its lock for some milliseconds. Not among the
    # warm-ups, which are waited for as long as they take.
    why = await request.app[LANES].search.run(
        engine.config.service.deadline_ms_default / 1e3,
        lambda _left_s: engine.explain_placement(tenant, name),
    )
    answer = {"id": name, "tenant": tenant, **why, "request_id": state_of(request).id}
    return json_response(encode(answer))
