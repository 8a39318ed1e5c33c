"""What both SDK clients share: requests as values, retry decisions, and answers read back.

Nothing here does I/O, so the retry rules are tested with a clock and a random source passed in.

Retry rules: a connection that was never made, and 429 or "not ready", may always be tried again,
because the server did nothing. A lost answer or another 5xx is tried again only where doing the
work twice equals doing it once: searches, upserts, deletes, and events (readers count an event id
once, and all tries of a search carry one id). Waits double from ``backoff_s``, with full jitter,
never below Retry-After, and never past the call's deadline. Of several servers the next is asked
without a wait, and what one has not (it only reads, say) or fails at may be had of another.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

import orjson

from stoker.errors import InputError, StokerError
from stoker.service.answers import (
    EventsAnswer,
    Readiness,
    SearchAnswer,
    WarmupStatus,
    WriteAnswer,
)
from stoker.service.problems import (
    AnswerTooLarge,
    DeadlinePassed,
    FeatureOff,
    NotReady,
    Problem,
    ServerUnreachable,
    ServiceError,
    TooManyRequests,
    error_of,
)

T = TypeVar("T")

# Beyond some weeks the system's own timers overflow, and nobody means it.
DEADLINE_S_MAX = 7 * 86_400.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Document:
    """A document to upsert. ``vector`` is needed where the server has no embedding model."""

    id: str
    text: str | None = None
    vector: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One HTTP answer, as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Body:
    """The body of an answer while it comes in, of at most so many bytes.

    Else whoever answers decides how much memory its callers need, and one that sends without end
    takes all there is before a deadline passes.
    """

    def __init__(self, bytes_max: int, *, stated: int | None, where: str) -> None:
        """Begin.

        Args:
            stated: Bytes that the answer says it has; None where it does not say.
            where: The server, for the error.

        Raises:
            AnswerTooLarge: it says that it has more; nothing was read.
        """
        self._bytes_max = bytes_max
        self._where = where
        self._parts: list[bytes] = []
        self._bytes = 0
        if stated is not None and stated > bytes_max:
            raise self._too_large(f"has {stated} bytes")

    def add(self, part: bytes) -> None:
        """Take the next bytes. Raises AnswerTooLarge where they are too many."""
        self._bytes += len(part)
        if self._bytes > self._bytes_max:
            raise self._too_large("goes on")
        self._parts.append(part)

    def whole(self) -> bytes:
        """Return all of it."""
        return b"".join(self._parts)

    def _too_large(self, what: str) -> AnswerTooLarge:
        self._parts.clear()
        return AnswerTooLarge(
            f"{self._where}: the answer {what}, at most {self._bytes_max} bytes are read",
            where="answer_bytes_max",
            action="ask for fewer results or without their texts, or give the client a higher "
            "answer_bytes_max",
        )


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request to make, and how to read its answer.

    Attributes:
        id: Sent as X-Request-Id with every try, so that the server counts a search that it answers
            twice as one.
        needs: What only some servers have, "" for what all have.
        one_server: Whether it is about the server that answers, and no other can do it instead.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    body: bytes | None = None
    content_type: str = "application/json"
    idempotent: bool = True
    needs: str = ""
    one_server: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class RetryPolicy:
    """How a client retries.

    Attributes:
        retries_max: Tries after the first; 0 turns retries off. Of several servers a try asks each
            in turn until one can do it.
        backoff_s: Longest wait before the first retry; doubles with every further one.
        backoff_s_max: Longest wait of all.
    """

    retries_max: int = 4
    backoff_s: float = 0.1
    backoff_s_max: float = 5.0

    def __post_init__(self) -> None:
        if self.retries_max < 0 or self.backoff_s < 0 or self.backoff_s_max < self.backoff_s:
            raise InputError(
                "retries_max and backoff_s must be at least 0, and backoff_s_max at least "
                f"backoff_s; found {self.retries_max}, {self.backoff_s}, {self.backoff_s_max}"
            )


class Attempts:
    """The tries of one call: how long each may take, and whether there is a next one."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        idempotent: bool,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        check_deadline(deadline_s, "deadline_s")
        self._policy = policy
        self._idempotent = idempotent
        self._deadline_s = deadline_s
        self._clock = clock
        self._uniform = uniform
        self._end = clock() + deadline_s
        self._reason: ServiceError | None = None
        self._hopeful = False
        self._retry_after_s = 0.0
        self.failed = 0

    def left_s(self) -> float:
        """Return the seconds that the next try has. Raises DeadlinePassed when none are left."""
        left = self._end - self._clock()
        if left <= 0:
            raise DeadlinePassed(
                f"no answer within {self._deadline_s:g} s ({self.failed} tries)",
                where="deadline_s",
                action="raise the client's deadline_s, or see whether the server is overloaded",
            )
        return left

    def wait_s(
        self,
        error: ServiceError,
        *,
        sent: bool,
        retry_after_s: float = 0.0,
        elsewhere: bool = False,
    ) -> float:
        """Return how long to wait before the next try, or raise ``error`` if there is none.

        Args:
            sent: Whether the server may have done the work.
            retry_after_s: The server's Retry-After; 0 where it sent none.
            elsewhere: Whether there is another server that this try has not asked.

        Raises:
            DeadlinePassed: the time was up while the server was waited for.
            ServiceError: of all servers that this try has asked, what may be over soon; else what
                failed; that a server lacks what is wanted only where it says nothing of the others.
        """
        if isinstance(error.__cause__, TimeoutError):
            self.left_s()
        untouched = not sent or isinstance(error, (TooManyRequests, NotReady))
        retriable = error.problem.retriable if error.problem else error.retriable
        hopeful = untouched or (self._idempotent and retriable)
        lacking = isinstance(error, FeatureOff)
        if not (hopeful or lacking or self._fault_of_one(error)):
            raise error
        # Servers that lack what is wanted do not speak for the one that has it, and failed.
        if self._reason is None or hopeful or not (self._hopeful or lacking):
            self._reason = error
        self._hopeful |= hopeful
        self._retry_after_s = max(self._retry_after_s, retry_after_s)
        if elsewhere:
            return 0.0
        reason, hopeful, retry_after_s = self._reason, self._hopeful, self._retry_after_s
        self._reason, self._hopeful, self._retry_after_s = None, False, 0.0
        self.failed += 1
        if self.failed > self._policy.retries_max or not hopeful:
            raise reason
        ceiling = min(self._policy.backoff_s_max, self._policy.backoff_s * 2.0 ** (self.failed - 1))
        wait = max(retry_after_s, self._uniform(0.0, ceiling))
        if self._clock() + wait >= self._end:
            raise reason
        return wait

    def _fault_of_one(self, error: ServiceError) -> bool:
        """Tell whether another server may well do what this one failed at, and may be asked."""
        status = error.problem.status if error.problem else 0
        return self._idempotent and status >= 500 and not isinstance(error, DeadlinePassed)


class ReadyWait:
    """Waiting until a server is ready: how long is left, and what it was last heard to wait for."""

    def __init__(
        self, timeout_s: float, *, where: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._where = where
        self._clock = clock
        self._end = clock() + timeout_s
        self._reason = "no answer"

    def left_s(self) -> float:
        """Return the seconds that are left. Raises NotReady when none are; says what is missing."""
        left = self._end - self._clock()
        if left <= 0:
            raise NotReady(
                f"not ready after {self._timeout_s:g} s: {self._reason}", where=self._where
            )
        return left

    def ends_with(self, readiness: Readiness) -> bool:
        """Take an answer; tells whether it is what was waited for."""
        self.note(f"waiting for {', '.join(readiness.waiting_for)}")
        return readiness.ready

    def note(self, reason: str) -> None:
        """Keep why the server is not ready, for the error at the end."""
        self._reason = reason

    def pause_s(self) -> float:
        """Return how long to wait before the server is asked again."""
        return min(_POLL_S, max(0.0, self._end - self._clock()))


def check_deadline(seconds: Any, name: str) -> None:
    """Return if these seconds can be waited for. Raises InputError that names the argument."""
    known = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not known or not 0 < cast(float, seconds) <= DEADLINE_S_MAX:
        raise InputError(
            f"{name} must be above 0 and at most {DEADLINE_S_MAX:.0f} s, found {seconds!r:.40}"
        )


def failure_of(reply: Reply) -> tuple[ServiceError, float]:
    """Return the error of an answer with status 400 or above, and its Retry-After in seconds."""
    data: Any = None
    with contextlib.suppress(orjson.JSONDecodeError):
        data = orjson.loads(reply.body)
    if not isinstance(data, dict):
        text = reply.body[:200].decode("utf-8", "replace").strip()
        data = {"detail": f"HTTP status {reply.status}, not a problem document: {text}"}
        if reply.status in (502, 503, 504):
            problem = Problem.from_dict(data, reply.status)
            return ServerUnreachable(problem.detail, problem=problem), _retry_after(reply)
    return error_of(Problem.from_dict(data, reply.status)), _retry_after(reply)


def _retry_after(reply: Reply) -> float:
    try:
        return max(0.0, float(reply.headers.get("retry-after", "0")))
    except ValueError:  # an HTTP date; our server never sends one
        return 0.0


def search_call(
    *,
    tenant: str | None,
    deadline_ms: int,
    text: str | None,
    vector: Any,
    k: int,
    filters: Mapping[str, Any] | None,
    recall_target: float | None,
    session: str | None,
    route: str | None,
    include_text: bool,
    include_metadata: bool,
) -> Call[SearchAnswer]:
    """Make a search's request. Raises InputError unless it has exactly one of text and vector."""
    if (text is None) == (vector is None):
        raise InputError("a search needs text or vector, exactly one of them")
    members: dict[str, Any] = {
        "text": text,
        "vector": vector,
        "filters": filters,
        "tenant": tenant,
        "recall_target": recall_target,
        "session": session,
        "route": route,
    }
    body = {name: value for name, value in members.items() if value is not None}
    body |= {
        "k": k,
        "deadline_ms": deadline_ms,
        "include_text": include_text,
        "include_metadata": include_metadata,
    }
    return Call("POST", "/v1/search", _reader(SearchAnswer), dumps(body))


def upsert_call(
    documents: Sequence[Document | Mapping[str, Any]], tenant: str | None
) -> Call[WriteAnswer]:
    """Make an upsert's request. Raises InputError for what is no list of documents."""
    rows = []
    for document in _listed(documents, "documents", "documents"):
        if isinstance(document, Document):
            row: dict[str, Any] = {"id": document.id}
            for name in ("text", "vector"):
                if getattr(document, name) is not None:
                    row[name] = getattr(document, name)
            if document.metadata:
                row["metadata"] = dict(document.metadata)
            rows.append(row)
        else:
            rows.append(dict(_mapping(document, f"/documents/{len(rows)}")))
    body: dict[str, Any] = {"documents": rows}
    if tenant is not None:
        body["tenant"] = tenant
    return Call("POST", "/v1/documents", _reader(WriteAnswer), dumps(body), needs="writes")


def delete_call(document_id: str, tenant: str | None) -> Call[WriteAnswer]:
    """Make a delete's request. Raises InputError for an id that is empty or no text."""
    if not isinstance(document_id, str) or not document_id:
        raise InputError(f"document_id: expected text that is not empty, found {document_id!r:.40}")
    path = f"/v1/documents/{quote(document_id, safe='')}"
    if tenant is not None:
        path += f"?tenant={quote(tenant, safe='')}"
    return Call("DELETE", path, _reader(WriteAnswer), needs="writes")


def events_call(events: Sequence[Mapping[str, Any]]) -> Call[EventsAnswer]:
    """Make the request for CloudEvents; one without an id or time is given them.

    Raises InputError for what is no list of events.
    """
    batch: list[dict[str, Any]] = []
    for event in _listed(events, "events", "events"):
        row = {"specversion": "1.0", "source": "/stoker/sdk", **_mapping(event, f"/{len(batch)}")}
        row.setdefault("id", uuid.uuid4().hex)
        row.setdefault("time", datetime.now(UTC).isoformat().replace("+00:00", "Z"))
        batch.append(row)
    return Call(
        "POST",
        "/v1/events",
        _reader(EventsAnswer),
        dumps(batch),
        content_type="application/cloudevents-batch+json",
    )


def used_event(
    chunk_ids: Sequence[str], *, tenant: str | None, session: str | None, route: str | None
) -> dict[str, Any]:
    """Make the event that says which results were used. Raises InputError for one id alone."""
    data: dict[str, Any] = {"chunk_ids": list(_listed(chunk_ids, "chunk_ids", "ids"))}
    if tenant is not None:
        data["tenant"] = tenant
    if session is not None:
        data["session"] = session
    if route is not None:
        data["route"] = route
    return {"type": "stoker.result.used.v1", "data": data}


def warmup_call() -> Call[WarmupStatus]:
    """Make the request for the state of the warm-up."""
    return Call("GET", "/v1/warmup", _reader(WarmupStatus), one_server=True)


def start_warmup_call(
    budget_bytes: int | None, deadline_s: float | None, *, everything: bool, wait: bool
) -> Call[WarmupStatus]:
    """Make the request that starts a warm-up."""
    body: dict[str, Any] = {"wait": wait, "everything": everything}
    if budget_bytes is not None:
        body["budget_bytes"] = budget_bytes
    if deadline_s is not None:
        body["deadline_s"] = deadline_s
    return Call(
        "POST",
        "/v1/warmup",
        _reader(WarmupStatus),
        dumps(body),
        idempotent=False,
        one_server=True,
    )


def steer_warmup_call(action: str) -> Call[WarmupStatus]:
    """Make the request that steers a running warm-up."""
    body = dumps({"action": action})
    return Call("PATCH", "/v1/warmup", _reader(WarmupStatus), body, one_server=True)


def ready_call() -> Call[Readiness]:
    """Make the request for readiness. Not ready is an answer here, not an error."""
    return Call("GET", "/readyz", _read_readiness, one_server=True)


def text_call(path: str) -> Call[str]:
    """Make the request for a page of text."""
    return Call("GET", path, _read_text, one_server=True)


def dumps(value: Any) -> bytes:
    """Write JSON; numpy arrays become lists of numbers.

    Raises:
        InputError: something has no JSON form, or is not-a-number or infinite: as JSON that would
            be null, which means "not given".
    """
    try:
        text = orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InputError(f"cannot be written as JSON: {error}") from error
    _check_finite(value, "")
    return text


def _check_finite(value: Any, place: str) -> None:
    """Refuse what is not finite, by its place. The writer has bounded how deep ``value`` is."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{place}: expected a finite number, found {value}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _check_finite(item, f"{place}/{name}")
    elif isinstance(value, (list, tuple)):
        if not _all_finite(value):
            for i, item in enumerate(value):
                _check_finite(item, f"{place}/{i}")
    elif hasattr(value, "tolist"):
        _check_finite(value.tolist(), place)


def _all_finite(items: Sequence[Any]) -> bool:
    """Tell whether these are finite numbers and nothing else: the quick way through a vector."""
    try:
        return all(map(math.isfinite, items))
    except (TypeError, ValueError, OverflowError):
        return False


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array that orjson does not take: not contiguous, or no numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _listed(items: Iterable[T], name: str, of: str) -> Iterable[T]:
    """Return ``items``, unless they are one text or mapping: its letters or keys would be taken."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise InputError(f"{name}: expected a list of {of}, found one {type(items).__name__}")
    return items


def _mapping(item: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise InputError(f"{where}: expected a mapping, found {type(item).__name__}")
    return item


def _reader(answer: Any) -> Callable[[Reply], Any]:
    def read(reply: Reply) -> Any:
        data = _json(_checked(reply))
        try:
            return answer.from_dict(data)
        except (KeyError, TypeError, ValueError) as error:
            raise _strange(reply) from error

    return read


def _read_readiness(reply: Reply) -> Readiness:
    if reply.status != 503:
        _checked(reply)
    try:
        return Readiness.from_dict(_json(reply))
    except (KeyError, TypeError, ValueError) as error:
        raise _strange(reply) from error


def _read_text(reply: Reply) -> str:
    try:
        return _checked(reply).body.decode()
    except UnicodeDecodeError as error:
        raise _strange(reply) from error


def _json(reply: Reply) -> Any:
    try:
        return orjson.loads(reply.body)
    except orjson.JSONDecodeError as error:
        raise _strange(reply) from error


def _checked(reply: Reply) -> Reply:
    """Return an answer that is one: not a refusal, nor a proxy's word to look elsewhere."""
    if reply.status >= 400:
        raise failure_of(reply)[0]
    if reply.status not in (200, 202):
        raise _strange(reply)
    return reply


def _strange(reply: Reply) -> StokerError:
    # Not followed: a redirected POST arrives as a GET, and the key would go to whom nobody named.
    where = reply.headers.get("location", "") if 300 <= reply.status < 400 else ""
    pointed = f"; it points to {where[:200]!r}" if where else ""
    return ServerUnreachable(
        f"the answer (HTTP status {reply.status}) is not Stoker's{pointed}",
        action="check that the URL is that of a Stoker server",
    )
