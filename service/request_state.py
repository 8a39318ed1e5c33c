"""What a request carries from the edge of the server to its route, and what all routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import orjson
from aiohttp import web

from stoker.service.admission import Lane
from stoker.service.body_budget import BodyBudget, BodyHold
from stoker.service.engine import Engine
from stoker.service.problems import (
    BodyTooLarge,
    MediaTypeUnsupported,
    RequestError,
    TenantForbidden,
)
from stoker.service.refusals import encoding_unsupported
from stoker.service.settings import ServiceSettings

T = TypeVar("T")

JSON_TYPES = frozenset({"application/json", "application/octet-stream"})
# What the HTTP library unpacks, the last two with a package that is not always there.
_ENCODINGS = frozenset({"identity", "gzip", "deflate", "br", "zstd"})
_LOOP_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class Lanes:
    """The thread pools of the server, each with its bounded queue."""

    search: Lane
    write: Lane
    warm: Lane

    def each(self) -> tuple[Lane, ...]:
        """Return all lanes."""
        return (self.search, self.write, self.warm)

    @property
    def pending(self) -> int:
        """How many calls run or wait, in all lanes."""
        return sum(lane.pending for lane in self.each())

    async def drained(self) -> None:
        """Wait until no lane runs anything."""
        while self.pending:
            for lane in self.each():
                await lane.drained()

    def close(self) -> None:
        """Let all threads go."""
        for lane in self.each():
            lane.close()


@dataclass(frozen=True)
class Bodies:
    """What bodies may take in memory. Writes cannot take the room of searches."""

    search: BodyBudget
    write: BodyBudget

    def each(self) -> tuple[BodyBudget, ...]:
        """Return all budgets."""
        return (self.search, self.write)


ENGINE: web.AppKey[Engine] = web.AppKey("engine", Engine)
LANES: web.AppKey[Lanes] = web.AppKey("lanes", Lanes)
BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)


@dataclass
class RequestState:
    """What the edge found out about a request.

    Attributes:
        id: The request's id, as in the log and the answer.
        id_given: Whether the client gave it: then a search of the same id and body is another try.
        started: When it arrived, `time.monotonic()` seconds.
        tenant: The tenant that its key belongs to; None where it carries none, or the operator's.
        operator: Whether it may act for every tenant.
        body: What its body takes of the budget; None while none is read.
    """

    id: str
    started: float
    id_given: bool = False
    tenant: str | None = None
    operator: bool = False
    body: BodyHold | None = None

    def release_body(self) -> None:
        """Give the room of its body back: the work is done, or given up.

        What a thread still does after its deadline is bounded by the number of threads.
        """
        if self.body is not None:
            self.body.release()


_STATE: web.RequestKey[RequestState] = web.RequestKey("state", RequestState)


def set_state(request: web.Request, state: RequestState) -> None:
    """Attach the edge's findings to a request."""
    request[_STATE] = state


def state_of(request: web.Request) -> RequestState:
    """Return what the edge found out about a request."""
    return request[_STATE]


async def read_body(
    request: web.Request, budget: BodyBudget, types: frozenset[str] = JSON_TYPES
) -> bytes:
    """Read a request's body within the write deadline; the edge gives its room back.

    Args:
        budget: What such bodies may take together.

    Raises:
        MediaTypeUnsupported: its type is not one of ``types``, or it is packed in another way.
        BodyTooLarge: it is longer than `service.body_bytes_max`.
        BodiesFull: it does not fit beside those that are being worked on.
        RequestError: it did not arrive in time, breaks off, or is not what its headers say; or
            there are parameters in the path, which none of the paths with a body has.
    """
    if request.body_exists and request.content_type not in types:
        raise MediaTypeUnsupported(
            f"expected one of {', '.join(sorted(types))}, found {request.content_type}",
            where="Content-Type",
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in _ENCODINGS:  # it would come here as it is
        raise encoding_unsupported(encoding)
    for name in request.query:
        # Not passed over: whoever names a tenant here would be answered for another one.
        raise RequestError(
            f"unknown parameter {name[:40]!r}; this path takes its members in the body",
            where="query",
        )
    settings = request.app[ENGINE].config.service
    announced = request.content_length or 0
    _check_size(announced, settings)
    hold = state_of(request).body = budget.hold(announced)
    body = bytearray()
    seconds = settings.write_deadline_s
    try:
        async with asyncio.timeout(seconds):
            # Unpacked where it came packed, so this counts what it takes here.
            while part := await request.content.readany():
                hold.add(len(part))
                body += part
                _check_size(len(body), settings)
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {seconds:g} s", where="body") from error
    except web.RequestPayloadError as error:
        reason = str(error).rpartition("\n")[2].strip()  # its first lines repeat the status
        raise RequestError(f"the body cannot be read: {reason}", where="body") from error
    except ConnectionError as error:
        raise RequestError("the connection broke off within the body", where="body") from error
    return bytes(body)


def _check_size(size: int, settings: ServiceSettings) -> None:
    if size > settings.body_bytes_max:
        raise BodyTooLarge(
            f"the body is above {settings.body_bytes_max} bytes (service.body_bytes_max)",
            where="body",
        )


async def parse_aside(raw: bytes, parse: Callable[[bytes], T]) -> T:
    """Parse a body: a small one here, a large one in a thread, so that the loop goes on."""
    if len(raw) <= _LOOP_BYTES_MAX:
        return parse(raw)
    return await asyncio.to_thread(parse, raw)


def tenant_of(request: web.Request, named: str | None) -> str:
    """Return whose request it is.

    Args:
        named: The tenant in the body or query; None where it names none.

    Raises:
        TenantForbidden: the key belongs to another tenant than the one named.
    """
    owner = state_of(request).tenant
    if owner is not None:
        if named is not None and named != owner:
            raise TenantForbidden(
                f"the key belongs to tenant {owner!r}, the request names another", where="tenant"
            )
        return owner
    return named or request.app[ENGINE].config.service.tenant_default


def json_response(body: bytes, status: int = 200) -> web.Response:
    """Answer with JSON that is already encoded."""
    return web.Response(body=body, status=status, content_type="application/json")


def encode(answer: object) -> bytes:
    """Encode an answer record; dataclasses become objects of their fields."""
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def require_operator(request: web.Request, what: str) -> None:
    """Return if the request is the operator's: what all tenants share is not one tenant's to set.

    Raises:
        TenantForbidden: its key belongs to a tenant.
    """
    if not state_of(request).operator:
        raise TenantForbidden(
            f"{what} is for the operator; the key belongs to a tenant",
            where="Authorization",
            action="use the key of service.operator_key",
        )
