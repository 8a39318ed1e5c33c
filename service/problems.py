"""Turn errors into RFC 9457 problem documents, and problem documents back into errors.

One table (`PROBLEMS`) decides the HTTP answer of every error class; nothing else in the service
picks a status. A document says what is wrong (`detail`), where (`where`), and what to do
(`action`). The client reads the same table the other way, so that `except InputError` means the
same thing on both sides of the wire.

Source: RFC 9457. Ours adds `where`, `action`, `retriable` and `request_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stoker.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    InputError,
    StokerError,
    UnavailableError,
)

CONTENT_TYPE = "application/problem+json"
_TYPE_PREFIX = "urn:stoker:problem:"


@dataclass(frozen=True)
class Problem:
    """One problem document.

    Attributes:
        kind: The last part of the document's `type`, e.g. "bad-input".
        title: What this kind of problem is; the same for every occurrence.
        status: HTTP status.
        detail: What is wrong this time: expected, found.
        where: The field, header, document or file that it is about; empty where it is the whole.
        action: What the caller can do.
        retriable: Whether the same request may succeed later.
        request_id: The request, as in the server's log.
    """

    kind: str
    title: str
    status: int
    detail: str
    where: str = ""
    action: str = ""
    retriable: bool = False
    request_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON members."""
        return {
            "type": _TYPE_PREFIX + self.kind,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "where": self.where,
            "action": self.action,
            "retriable": self.retriable,
            "request_id": self.request_id,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any], status: int) -> Problem:
        """Read a document leniently: a proxy's answer may lack any member."""
        kind = str(data.get("type", "about:blank"))
        return Problem(
            kind=kind.removeprefix(_TYPE_PREFIX),
            title=str(data.get("title", "")),
            status=status,
            detail=str(data.get("detail", "")),
            where=str(data.get("where", "")),
            action=str(data.get("action", "")),
            retriable=bool(data.get("retriable", status in (429, 502, 503, 504))),
            request_id=str(data.get("request_id", "")),
        )


class ServiceError(StokerError):
    """A StokerError that knows where it happened and what to do about it.

    Attributes:
        where: The field, header, document or file; may be empty.
        action: What the caller can do; empty takes the table's.
        problem: The document that the server sent, where the error came over HTTP; else None.
    """

    def __init__(
        self, message: str, *, where: str = "", action: str = "", problem: Problem | None = None
    ) -> None:
        super().__init__(message)
        self.where = where
        self.action = action
        self.problem = problem


class RequestError(ServiceError, InputError):
    """A request cannot be taken as it is: a field is missing, malformed or out of range."""


class KeyMissing(ServiceError, InputError):
    """A request carries no bearer key, or one that belongs to nobody."""


class TenantForbidden(ServiceError, InputError):
    """A request names a tenant that its key does not belong to."""


class NotFound(ServiceError, InputError):
    """There is nothing under this path or id."""


class MethodNotAllowed(ServiceError, InputError):
    """The path exists, but not with this method."""


class BodyTooLarge(ServiceError, InputError):
    """A body or a batch is above the server's limit."""


class MediaTypeUnsupported(ServiceError, InputError):
    """A body is not of a media type that this path takes."""


class TooManyRequests(ServiceError, CapacityError):
    """The queue of waiting requests is full."""


class BodiesFull(TooManyRequests):
    """The bodies of the requests that are being worked on leave no room for this one."""


class WarmupRunning(ServiceError, CapacityError):
    """A warm-up runs already; only one runs at a time."""


class WarmupIdle(ServiceError, InputError):
    """No warm-up runs that could be steered."""


class StorageFull(ServiceError, CapacityError):
    """The disk has no room for a write; nothing of it was acknowledged."""


class DeadlinePassed(ServiceError, UnavailableError):
    """The request's deadline passed before there was an answer."""


class NotReady(ServiceError, UnavailableError):
    """The server is starting, warming or draining."""


class FeatureOff(ServiceError, UnavailableError):
    """The request needs an optional part that is not installed or not configured."""

    retriable: ClassVar[bool] = False


class ServerUnreachable(ServiceError, UnavailableError):
    """No answer came: connection refused or lost, or the answer is not Stoker's."""


class AnswerTooLarge(ServiceError, CapacityError):
    """An answer is longer than this client takes; what was read of it is let go."""

    retriable: ClassVar[bool] = False


class ServerConfigError(ServiceError, ConfigError):
    """The server answered that its settings are wrong."""


class ServerCapacityError(ServiceError, CapacityError):
    """The server answered that a bound is reached."""


class ServerUnavailable(ServiceError, UnavailableError):
    """The server answered that something it needs is not there now."""


class ServerCorruptError(ServiceError, CorruptError):
    """The server answered that stored bytes are damaged."""


class ServerFault(ServiceError, UnavailableError):
    """The server answered 500: a mistake in Stoker, logged there under the request id."""

    retriable: ClassVar[bool] = False


@dataclass(frozen=True)
class ProblemRow:
    """One line of the table: an error class, its HTTP answer, and the client's error class."""

    error: type[BaseException]
    kind: str
    status: int
    title: str
    action: str
    client: type[ServiceError]


PROBLEMS: tuple[ProblemRow, ...] = (
    # Precise classes stand before the classes they derive from: the first match wins.
    ProblemRow(
        KeyMissing, "key-missing", 401, "A bearer key is needed",
        "send `Authorization: Bearer KEY` with the key of your tenant", KeyMissing,
    ),
    ProblemRow(
        TenantForbidden, "tenant-forbidden", 403, "The key belongs to another tenant",
        "leave `tenant` out, or use that tenant's key", TenantForbidden,
    ),
    ProblemRow(
        NotFound, "not-found", 404, "There is nothing here",
        "check the path and the id; /openapi.json lists every path", NotFound,
    ),
    ProblemRow(
        MethodNotAllowed, "method-not-allowed", 405, "The path does not take this method",
        "/openapi.json lists the methods of every path", MethodNotAllowed,
    ),
    ProblemRow(
        BodyTooLarge, "body-too-large", 413, "The body is too large",
        "send it in smaller parts, or raise the limit that is named", BodyTooLarge,
    ),
    ProblemRow(
        MediaTypeUnsupported, "media-type", 415, "The body's media type is not taken here",
        "send application/json", MediaTypeUnsupported,
    ),
    ProblemRow(
        BodiesFull, "bodies-full", 429, "Too many bytes of requests at once",
        "retry after the seconds in Retry-After, or send smaller bodies", BodiesFull,
    ),
    ProblemRow(
        TooManyRequests, "too-many-requests", 429, "Too many requests at once",
        "retry after the seconds in Retry-After", TooManyRequests,
    ),
    ProblemRow(
        WarmupRunning, "warmup-running", 409, "A warm-up runs already",
        "GET /v1/warmup shows its progress; retry when it is done", WarmupRunning,
    ),
    ProblemRow(
        WarmupIdle, "warmup-idle", 409, "No warm-up runs",
        "start one with POST /v1/warmup; GET shows how the last one ended", WarmupIdle,
    ),
    ProblemRow(
        StorageFull, "storage-full", 507, "There is no room to store this",
        "free space on the server's disk, then retry", StorageFull,
    ),
    ProblemRow(
        DeadlinePassed, "deadline-passed", 504, "The deadline passed",
        "raise deadline_ms, or lower k or recall_target", DeadlinePassed,
    ),
    ProblemRow(
        NotReady, "not-ready", 503, "The server is not ready",
        "retry after the seconds in Retry-After; /readyz says what it waits for", NotReady,
    ),
    ProblemRow(
        FeatureOff, "feature-off", 501, "This needs an optional part that is off",
        "turn the part on in the server's settings; the detail names the setting", FeatureOff,
    ),
    ProblemRow(
        InputError, "bad-input", 400, "The request cannot be taken as it is",
        "correct the field that is named; /openapi.json has its schema", RequestError,
    ),
    ProblemRow(
        ConfigError, "config", 500, "The server's settings are wrong",
        "tell the operator; `stoker config show` prints the settings", ServerConfigError,
    ),
    ProblemRow(
        CapacityError, "capacity", 503, "A bound of the server is reached",
        "retry after the seconds in Retry-After, or ask the operator to raise the bound",
        ServerCapacityError,
    ),
    ProblemRow(
        UnavailableError, "unavailable", 503, "Something the server needs is not there now",
        "retry after the seconds in Retry-After", ServerUnavailable,
    ),
    ProblemRow(
        CorruptError, "corrupt", 500, "Stored bytes are damaged",
        "tell the operator; `stoker verify` names the file, page and offset", ServerCorruptError,
    ),
    ProblemRow(
        BaseException, "server-fault", 500, "The server made a mistake",
        "report it with the request id; a retry may or may not succeed", ServerFault,
    ),
)  # fmt: skip

_FAULT = PROBLEMS[-1]
_BY_KIND = {row.kind: row for row in PROBLEMS}


def problem_of(error: BaseException, request_id: str = "") -> Problem:
    """Return the problem document of ``error``.

    The text of an error that is not a `StokerError` stays in the log: it may hold paths or data
    that are none of the caller's business.
    """
    row = next(row for row in PROBLEMS if isinstance(error, row.error))
    detail = f"an unexpected {type(error).__name__} was logged under the request id"
    where = action = ""
    retriable = False
    if isinstance(error, StokerError):
        detail = str(error)
        where = str(getattr(error, "where", "") or getattr(error, "field", "") or "")
        action = str(getattr(error, "action", "") or "")
        retriable = error.retriable
    return Problem(
        kind=row.kind,
        title=row.title,
        status=row.status,
        detail=detail,
        where=where,
        action=action or row.action,
        retriable=retriable,
        request_id=request_id,
    )


def error_of(problem: Problem) -> ServiceError:
    """Return the client's error for a document; an unknown kind is judged by its status."""
    row = _BY_KIND.get(problem.kind) or next(
        (row for row in PROBLEMS if row.status == problem.status), None
    )
    if row is None:
        row = _BY_KIND["bad-input"] if 400 <= problem.status < 500 else _FAULT
    message = problem.detail or problem.title or f"HTTP status {problem.status}"
    return row.client(message, where=problem.where, action=problem.action, problem=problem)
