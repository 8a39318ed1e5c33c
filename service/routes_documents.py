"""POST /v1/documents and DELETE /v1/documents/{id}: what they answer is on disk."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from stoker.index.document_values import DOCUMENT_ID_BYTES_MAX
from stoker.service.answers import WriteAnswer
from stoker.service.bodies import (
    DocumentRow,
    check_name,
    parse_documents,
    parse_tenant,
)
from stoker.service.engine import Engine
from stoker.service.request_state import (
    BODIES,
    ENGINE,
    LANES,
    encode,
    json_response,
    parse_aside,
    read_body,
    state_of,
    tenant_of,
)


def add_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_post("/v1/documents", _upsert)
    app.router.add_delete("/v1/documents/{id}", _delete)


async def _upsert(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    settings = engine.config.service
    raw = await read_body(request, request.app[BODIES].write)
    named, documents = await parse_aside(raw, partial(parse_documents, settings=settings))
    tenant = tenant_of(request, named)
    count = await request.app[LANES].write.run(
        settings.write_deadline_s, partial(_write, engine, tenant, documents)
    )
    return _written(request, engine, tenant, count)


async def _delete(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    document_id = check_name(request.match_info["id"], "id", DOCUMENT_ID_BYTES_MAX, where="id")
    tenant = tenant_of(request, parse_tenant(request.query))
    count = await request.app[LANES].write.run(
        engine.config.service.write_deadline_s,
        lambda _left_s: engine.delete(tenant, document_id),
    )
    return _written(request, engine, tenant, count)


def _write(engine: Engine, tenant: str, documents: tuple[DocumentRow, ...], left_s: float) -> int:
    return engine.upsert(tenant, documents, left_s=left_s)


def _written(request: web.Request, engine: Engine, tenant: str, count: int) -> web.StreamResponse:
    answer = WriteAnswer(
        count=count,
        generation=engine.generation,
        tenant=tenant,
        request_id=state_of(request).id,
    )
    return json_response(encode(answer))
