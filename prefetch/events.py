"""Event schema v1: what happened, as CloudEvents 1.0 JSON envelopes, and the strict decoder of it.

Four types exist; `schemas/` holds a JSON Schema for each and the AsyncAPI document of the topics.
The decoder is hand-written because a refusal must name the field, what was expected and what was
found. Tests hold the decoder and the schema files to the same language, both ways. Streams decode
by the thousand (`event_batch`): that is the same language, and every refusal comes from here.

Fields that this version does not know are kept in `Event.raw` and written back by `encode`.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import orjson

from stoker.errors import InputError

SEARCH_PERFORMED: Final = "stoker.search.performed.v1"
RESULT_USED: Final = "stoker.result.used.v1"
DOCUMENT_UPSERTED: Final = "stoker.document.upserted.v1"
DOCUMENT_DELETED: Final = "stoker.document.deleted.v1"
EVENT_TYPES: Final = (SEARCH_PERFORMED, RESULT_USED, DOCUMENT_UPSERTED, DOCUMENT_DELETED)

# Bounds of the schema, in characters (JSON Schema's `maxLength` counts code points, as `len` does).
ID_LENGTH_MAX: Final = 256
SOURCE_LENGTH_MAX: Final = 1024
NAME_LENGTH_MAX: Final = 256  # tenant, session, route
CHUNK_ID_LENGTH_MAX: Final = 512
QUERY_LENGTH_MAX: Final = 65_536
CHUNK_IDS_MAX: Final = 10_000
# Fewest chunks that an event names: a search may find nothing.
CHUNKS_MIN: Final = {
    SEARCH_PERFORMED: 0,
    RESULT_USED: 1,
    DOCUMENT_UPSERTED: 1,
    DOCUMENT_DELETED: 1,
}
# One event, encoded. Apache Kafka takes about this much by default (`message.max.bytes`).
EVENT_BYTES_MAX: Final = 1 << 20

CONTENT_TYPES: Final = ("application/json", "application/json; charset=utf-8")
DEFAULT_SOURCE: Final = "/stoker"

# RFC 3339 with a capital T and Z, from 1970 on, without leap seconds (no clock we read shows them).
# The end is `(?![\s\S])` and not `$`, which in Python also matches before a last line feed.
TIME_PATTERN: Final = (
    r"^(19[7-9][0-9]|[2-9][0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
    r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])(?![\s\S])"
)
_time_match = re.compile(TIME_PATTERN).match
_parse_time = datetime.datetime.fromisoformat
_loads = orjson.loads

_FOUND_LENGTH_MAX: Final = 80


class EventError(InputError):
    """An event is refused: it is not the JSON, or not the shape, that the schema says.

    Attributes:
        field: Where, as a path from the envelope: `data.chunk_ids[3]`; `$` is the whole payload.
        expected: What the schema wants there.
        found: What was there, shortened.
    """

    def __init__(self, field: str, *, expected: str, found: str) -> None:
        super().__init__(f"event refused: {field}: expected {expected}, found {found}")
        self.field = field
        self.expected = expected
        self.found = found


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One decoded event.

    Attributes:
        id: The envelope's id; two events with one id are one event.
        type: One of `EVENT_TYPES`.
        time_s: When it happened (not when it was read), in Unix seconds.
        tenant: Whose it is; never empty.
        session: The user's session, or None where the caller has none.
        route: The caller's name for the kind of request, or None.
        query: The question's text, or None: a search by vector, or not a search.
        chunk_ids: Retrieved (search), used (result) or changed (document), best first.
        raw: The whole envelope, unknown fields included. Not to be changed.
    """

    id: str
    type: str
    time_s: float
    tenant: str
    session: str | None
    route: str | None
    query: str | None
    chunk_ids: tuple[str, ...]
    raw: dict[str, Any]


def decode(payload: bytes, *, bytes_max: int = EVENT_BYTES_MAX) -> Event:
    """Decode and check one envelope.

    Args:
        payload: The structured-mode JSON of one event, UTF-8.
        bytes_max: Longest payload taken; longer ones are refused before they are parsed.

    Raises:
        EventError: naming the field, what was expected and what was found; retrying cannot help,
            the producer has to be mended.

    Source: CloudEvents 1.0.2, JSON event format. Ours makes `time` required, bounds every length
    and takes four types only.
    """
    if len(payload) > bytes_max:
        raise EventError("$", expected=f"at most {bytes_max} bytes", found=f"{len(payload)} bytes")
    try:
        raw = _loads(payload)
    except orjson.JSONDecodeError as error:
        raise EventError("$", expected="UTF-8 JSON", found=f"not JSON: {error}") from error
    return from_envelope(raw)


def from_envelope(raw: Any) -> Event:
    """Check an envelope that is already parsed JSON; see `decode`."""
    if type(raw) is not dict:
        _refuse("$", "an object", raw)
    get = raw.get
    if get("specversion") != "1.0":
        _refuse("specversion", '"1.0"', get("specversion", _MISSING))
    event_id = get("id")
    if type(event_id) is not str or not 0 < len(event_id) <= ID_LENGTH_MAX:
        _refuse_string("id", get("id", _MISSING), ID_LENGTH_MAX)
    source = get("source")
    if type(source) is not str or not 0 < len(source) <= SOURCE_LENGTH_MAX:
        _refuse_string("source", get("source", _MISSING), SOURCE_LENGTH_MAX)
    event_type = get("type")
    if type(event_type) is not str or event_type not in CHUNKS_MIN:
        _refuse("type", "one of " + ", ".join(EVENT_TYPES), get("type", _MISSING))
    text = get("time")
    if type(text) is not str or _time_match(text) is None:
        _refuse(
            "time", "an RFC 3339 time from 1970 on, as 2026-01-31T12:00:00Z", get("time", _MISSING)
        )
    try:
        time_s = _parse_time(text).timestamp()
    except ValueError:
        _refuse("time", "a day that exists", text)
    if "datacontenttype" in raw and raw["datacontenttype"] not in CONTENT_TYPES:
        _refuse("datacontenttype", "application/json, or no such field", raw["datacontenttype"])

    data = get("data")
    if type(data) is not dict:
        _refuse("data", "an object", get("data", _MISSING))
    get = data.get
    tenant = get("tenant")
    if type(tenant) is not str or not 0 < len(tenant) <= NAME_LENGTH_MAX:
        _refuse_string("data.tenant", get("tenant", _MISSING), NAME_LENGTH_MAX)
    session = get("session")
    if session is not None and (
        type(session) is not str or not 0 < len(session) <= NAME_LENGTH_MAX
    ):
        _refuse_string("data.session", session, NAME_LENGTH_MAX, or_null=True)
    route = get("route")
    if route is not None and (type(route) is not str or not 0 < len(route) <= NAME_LENGTH_MAX):
        _refuse_string("data.route", route, NAME_LENGTH_MAX, or_null=True)
    query = get("query")
    if query is not None and (type(query) is not str or len(query) > QUERY_LENGTH_MAX):
        _refuse("data.query", f"at most {QUERY_LENGTH_MAX} characters, or null", query)
    chunk_ids = get("chunk_ids")
    if type(chunk_ids) is not list or not (
        CHUNKS_MIN[event_type] <= len(chunk_ids) <= CHUNK_IDS_MAX
    ):
        _refuse_chunks(event_type, get("chunk_ids", _MISSING))
    for chunk_id in chunk_ids:
        if type(chunk_id) is not str or not 0 < len(chunk_id) <= CHUNK_ID_LENGTH_MAX:
            _refuse_chunks(event_type, chunk_ids)
    return Event(event_id, event_type, time_s, tenant, session, route, query, tuple(chunk_ids), raw)


def encode(event: Event) -> bytes:
    """Write the event's whole envelope, unknown fields included, as UTF-8 JSON."""
    return orjson.dumps(event.raw)


def new_event(
    event_type: str,
    *,
    tenant: str,
    chunk_ids: Sequence[str],
    time_s: float,
    session: str | None = None,
    route: str | None = None,
    query: str | None = None,
    event_id: str | None = None,
    source: str = DEFAULT_SOURCE,
    extra: Mapping[str, Any] | None = None,
) -> Event:
    """Make an event that `decode(encode(event))` gives back as it is.

    Args:
        event_type: One of `EVENT_TYPES`.
        chunk_ids: At most 10,000; at least one except for a search, which may find nothing.
        time_s: Unix seconds, from 1970 on; kept to the microsecond.
        event_id: Its identity; None draws a random one. A retry must send the same.
        extra: More fields for `data`, as JSON values; ours win over a same-named one.

    Raises:
        EventError: a value is outside the schema.
    """
    data: dict[str, Any] = dict(extra) if extra else {}
    data["tenant"] = tenant
    if session is not None:
        data["session"] = session
    if route is not None:
        data["route"] = route
    if query is not None:
        data["query"] = query
    data["chunk_ids"] = list(chunk_ids)
    return from_envelope(
        {
            "specversion": "1.0",
            "id": uuid.uuid4().hex if event_id is None else event_id,
            "source": source,
            "type": event_type,
            "time": format_time(time_s),
            "datacontenttype": "application/json",
            "data": data,
        }
    )


def partition_key(event: Event) -> bytes:
    """The bytes by which a log chooses the partition: one key's events keep their order.

    A session's events share a key; an event outside a session goes by its first chunk, so that the
    upserts and deletes of one chunk are never reordered.
    """
    if event.session is not None:
        within = event.session
    else:
        within = event.chunk_ids[0] if event.chunk_ids else ""
    return f"{event.tenant}\0{within}".encode()


def format_time(time_s: float) -> str:
    """Write Unix seconds as RFC 3339 in UTC, to the microsecond.

    Raises:
        EventError: the time is not finite, or outside 1970 to 9999.
    """
    if not math.isfinite(time_s) or not 0 <= time_s < 253_402_300_799:
        _refuse("time", "Unix seconds from 1970 to 9999", time_s)
    moment = datetime.datetime.fromtimestamp(time_s, tz=datetime.UTC)
    return moment.isoformat(timespec="microseconds")[:-6] + "Z"


_MISSING: Final = object()


def _refuse(field: str, expected: str, found: object) -> NoReturn:
    raise EventError(field, expected=expected, found=_describe(found))


def _refuse_string(
    field: str, found: object, length_max: int, *, or_null: bool = False
) -> NoReturn:
    expected = f"a string of 1 to {length_max} characters" + (", or null" if or_null else "")
    _refuse(field, expected, found)


def _refuse_chunks(event_type: str, found: object) -> NoReturn:
    least = CHUNKS_MIN[event_type]
    if not isinstance(found, list):
        _refuse("data.chunk_ids", "a list of chunk ids", found)
    if not least <= len(found) <= CHUNK_IDS_MAX:
        expected = f"{least} to {CHUNK_IDS_MAX} chunk ids"
        raise EventError("data.chunk_ids", expected=expected, found=str(len(found)))
    for position, chunk_id in enumerate(found):
        if not isinstance(chunk_id, str) or not 0 < len(chunk_id) <= CHUNK_ID_LENGTH_MAX:
            _refuse_string(f"data.chunk_ids[{position}]", chunk_id, CHUNK_ID_LENGTH_MAX)
    raise AssertionError("called for chunk ids that are well-formed")


def _describe(value: object) -> str:
    """Name a refused value without repeating megabytes of it."""
    if value is _MISSING:
        return "nothing"
    if isinstance(value, str):
        if len(value) > _FOUND_LENGTH_MAX:
            return f"{value[:_FOUND_LENGTH_MAX]!r}… of {len(value)} characters"
        return repr(value)
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)[:_FOUND_LENGTH_MAX]
