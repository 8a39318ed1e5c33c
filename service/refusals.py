"""Answer errors as problem documents, and note each: a metric, a line in the log.

What the client did wrong is a line at debug level; what we could not do is a warning; only a fault
of ours brings a traceback.
"""

from __future__ import annotations

import uuid
from http import HTTPStatus

import orjson
import structlog
from aiohttp import http_exceptions, web

from stoker.errors import StokerError
from stoker.service.metrics import Metrics
from stoker.service.problems import (
    CONTENT_TYPE,
    MediaTypeUnsupported,
    MethodNotAllowed,
    NotFound,
    RequestError,
    WarmupIdle,
    problem_of,
)

log = structlog.get_logger(__name__)

_UNMATCHED = "unmatched"
_UNREADABLE = {
    http_exceptions.LineTooLong: "the request's first line or one of its headers is too long",
    http_exceptions.BadStatusLine: "the request's first line cannot be read",
    http_exceptions.InvalidURLError: "the request's path cannot be read",
    http_exceptions.InvalidHeader: "one of the request's headers cannot be read",
    http_exceptions.TransferEncodingError: "the parts of the body cannot be told apart",
}


class Refusals:
    """Makes the answers of a server that are problem documents."""

    def __init__(self, metrics: Metrics, *, retry_after_s: int) -> None:
        self._metrics = metrics
        self._retry_after_s = retry_after_s

    def answer(self, error: BaseException, request: web.Request, request_id: str) -> web.Response:
        """Return the problem document of an error, and note it."""
        return self._answer(_as_ours(error, request), request_id, route_of(request))

    def answer_outside(self, error: BaseException, request: web.BaseRequest) -> web.Response:
        """Answer what never came to a route, or came back from there in an unforeseen way."""
        request_id = uuid.uuid4().hex
        response = self._answer(_as_ours(error, request), request_id, _UNMATCHED)
        response.headers["X-Request-Id"] = request_id
        self._count(request, _UNMATCHED, response.status, 0.0)
        return response

    def bare_answer(self, error: StokerError) -> bytes:
        """Return the whole answer, as it goes over the wire, for a connection that has no request.

        Nothing is logged: where there are too many connections, a line for each is a flood.
        """
        problem = problem_of(error, uuid.uuid4().hex)
        self._metrics.refused.labels(problem.kind).inc()
        self._metrics.requests.labels(_UNMATCHED, "other", str(problem.status)).inc()
        body = orjson.dumps(problem.to_dict())
        head = (
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n"
            f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            f"Retry-After: {self._retry_after_s}\r\nX-Request-Id: {problem.request_id}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body

    def count(self, request: web.Request, status: int, seconds: float) -> None:
        """Count a request that is answered."""
        self._count(request, route_of(request), status, seconds)

    def _count(self, request: web.BaseRequest, route: str, status: int, seconds: float) -> None:
        self._metrics.requests.labels(route, _method_of(request), str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)

    def _answer(self, error: BaseException, request_id: str, route: str) -> web.Response:
        self._note(error, request_id, route)
        return self._response(error, request_id)

    def _note(self, error: BaseException, request_id: str, route: str) -> None:
        problem = problem_of(error)
        self._metrics.refused.labels(problem.kind).inc()
        if isinstance(error, StokerError) and problem.status < 500:
            log.debug(
                "service.request_refused", request_id=request_id, route=route, reason=problem.kind
            )
        elif isinstance(error, StokerError):
            log.warning(
                "service.request_failed",
                request_id=request_id,
                route=route,
                reason=problem.kind,
                detail=str(error),
            )
        else:
            log.error("service.request_broken", request_id=request_id, route=route, exc_info=error)

    def _response(self, error: BaseException, request_id: str) -> web.Response:
        problem = problem_of(error, request_id)
        headers = {}
        if problem.status in (409, 429, 503) and not isinstance(error, WarmupIdle):
            headers["Retry-After"] = str(self._retry_after_s)
        if problem.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="stoker"'
        if isinstance(error, MethodNotAllowed) and error.where:
            headers["Allow"] = error.where
        return web.Response(
            status=problem.status,
            body=orjson.dumps(problem.to_dict()),
            content_type=CONTENT_TYPE,
            headers=headers,
        )


def _as_ours(error: BaseException, request: web.BaseRequest) -> BaseException:
    """Turn aiohttp's own refusals into ours, so that every error is a problem document."""
    if isinstance(error, http_exceptions.ContentEncodingError):
        # Only its text has the name: the request that it came with is not there any more.
        found = error.message.partition("content-encoding: ")[2].partition(".")[0]
        return encoding_unsupported(found or "another")
    if isinstance(error, http_exceptions.HttpProcessingError):
        return _unreadable(error)
    if not isinstance(error, web.HTTPException):
        return error
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(
            f"{request.path} takes {allowed}, found {request.method}", where=allowed
        )
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"nothing is served under {request.path}", where=request.path)
    if isinstance(error, web.HTTPExpectationFailed):
        found = request.headers.get("Expect", "")[:40]
        return RequestError(f"Expect: expected 100-continue, found {found!r}", where="Expect")
    return RequestError(f"{error.status} {error.reason}", where=request.path)


def encoding_unsupported(found: str) -> MediaTypeUnsupported:
    """Return the refusal of a body that is packed in a way that is not read here."""
    return MediaTypeUnsupported(
        f"expected a body that is plain or packed by gzip or deflate, found {found[:40]}",
        where="Content-Encoding",
        action="send it plain, or with Content-Encoding: gzip",
    )


def _unreadable(error: http_exceptions.HttpProcessingError) -> RequestError:
    log.debug("service.request_malformed", reason=type(error).__name__)
    # From its second line on the library's text quotes what was sent, maybe half of a key.
    said = error.message.partition("\n")[0].rstrip(":")[:80]
    reason = next(
        (text for kind, text in _UNREADABLE.items() if isinstance(error, kind)),
        f"the request cannot be read ({said})",
    )
    return RequestError(
        f"{reason}; expected HTTP/1.1",
        where="request",
        action="send HTTP/1.1 with a first line and headers of at most 8190 bytes each; "
        "this connection is closed",
    )


def route_of(request: web.Request) -> str:
    """Return the path template of a request: a label is of a closed set."""
    resource = request.match_info.route.resource
    return _UNMATCHED if resource is None else resource.canonical


def _method_of(request: web.BaseRequest) -> str:
    # A label is of a closed set; anybody may send any word as a method.
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    return request.method if request.method in known else "other"
