"""Read and check request bodies: JSON in, typed requests out, refusals that name the field.

`where` in a refusal is a JSON pointer into the body. An unknown member is refused with the nearest
known one: a filter that is spelled wrong must not silently search everything.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.index.document_values import DOCUMENT_ID_BYTES_MAX, TENANT_BYTES_MAX
from stoker.prefetch.events import (
    NAME_LENGTH_MAX,
    QUERY_LENGTH_MAX,
    Event,
    EventError,
    from_envelope,
)
from stoker.service.logging import LEVELS, Level
from stoker.service.problems import BodyTooLarge, RequestError
from stoker.service.settings import ServiceSettings
from stoker.service.warmup import STEERING

DIMENSION_MAX = 65_536
TEXT_LENGTH_MAX = 1 << 20


@dataclass(frozen=True)
class SearchRequest:
    """A checked search. Exactly one of ``text`` and ``vector`` is set.

    Attributes:
        vector: float32, shape (dim,), finite; whether dim fits the index is checked there.
        filters: As `stoker.index.filters` takes them; checked there.
        deadline_ms: From the request's arrival on.
    """

    text: str | None
    vector: NDArray[np.float32] | None
    k: int
    filters: Mapping[str, Any] | None
    tenant: str | None
    recall_target: float | None
    deadline_ms: int
    session: str | None
    route: str | None
    include_text: bool
    include_metadata: bool


@dataclass(frozen=True)
class DocumentRow:
    """A checked document of an upsert. ``vector`` is None where the server has to embed."""

    id: str
    text: str | None
    vector: NDArray[np.float32] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WarmupRequest:
    """A checked request to warm up; None takes the setting."""

    budget_bytes: int | None
    deadline_s: float | None
    everything: bool
    wait: bool


def parse_json(raw: bytes) -> Any:
    """Parse a body. Raises RequestError that says where the JSON breaks off."""
    if not raw:
        raise RequestError("the body is empty; expected JSON", where="body")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", where="body") from error


def parse_search(raw: bytes, settings: ServiceSettings) -> SearchRequest:
    """Read the body of POST /v1/search. Raises RequestError that names the member."""
    members = _Members(parse_json(raw), "")
    request = SearchRequest(
        text=members.text("text", QUERY_LENGTH_MAX),
        vector=members.vector("vector"),
        k=members.integer("k", 1, settings.k_max, 10),
        filters=members.mapping("filters"),
        tenant=members.name("tenant", TENANT_BYTES_MAX),
        recall_target=members.number("recall_target", 0.0, 1.0),
        # A client that would wait longer than we let it is not wrong: it is answered sooner.
        deadline_ms=min(
            members.integer("deadline_ms", 1, 1 << 31, settings.deadline_ms_default),
            settings.deadline_ms_max,
        ),
        session=members.text("session", NAME_LENGTH_MAX, empty=False),
        route=members.text("route", NAME_LENGTH_MAX, empty=False),
        include_text=members.boolean("include_text", True),
        include_metadata=members.boolean("include_metadata", True),
    )
    members.close()  # first: a `vectr` is the better explanation of a missing vector
    if (request.text is None) == (request.vector is None):
        found = "neither" if request.text is None else "both"
        raise RequestError(f"expected exactly one of text and vector, found {found}", where="/text")
    if request.text is not None and not request.text.strip():
        raise RequestError("expected a text that is not blank", where="/text")
    return request


def parse_documents(
    raw: bytes, settings: ServiceSettings
) -> tuple[str | None, tuple[DocumentRow, ...]]:
    """Read the body of POST /v1/documents: the tenant it names, and its documents.

    Raises:
        RequestError: names the member; an id that stands twice is refused, because which of the
            two would win is a guess.
        BodyTooLarge: more documents than one request may carry.
    """
    members = _Members(parse_json(raw), "")
    tenant = members.name("tenant", TENANT_BYTES_MAX)
    rows = members.rows("documents", settings.batch_max)
    members.close()
    documents = tuple(_document(_Members(row, f"/documents/{i}")) for i, row in enumerate(rows))
    seen: dict[str, int] = {}
    for i, document in enumerate(documents):
        first = seen.setdefault(document.id, i)
        if first != i:
            raise RequestError(
                f"id {document.id!r} stands twice, first in document {first}",
                where=f"/documents/{i}/id",
            )
    return tenant, documents


def _document(members: _Members) -> DocumentRow:
    document_id = members.name("id", DOCUMENT_ID_BYTES_MAX)
    text = members.text("text", TEXT_LENGTH_MAX)
    vector = members.vector("vector")
    metadata = members.mapping("metadata") or {}
    members.close()
    if document_id is None:
        raise RequestError("id is missing", where=f"{members.pointer}/id")
    if vector is None and (text is None or not text.strip()):
        raise RequestError(
            "expected a vector, or a text to make one from", where=f"{members.pointer}/text"
        )
    return DocumentRow(document_id, text, vector, metadata)


def parse_tenant(query: Mapping[str, str]) -> str | None:
    """Read the query of a path that names one document: the tenant whose it is.

    A parameter that is spelled wrong is refused, or another tenant's document would be deleted.
    """
    members = _Members(dict(query), "")
    if len(query) > len(set(query)):
        raise RequestError("expected each parameter once, found one twice", where="query")
    tenant = members.name("tenant", TENANT_BYTES_MAX)
    members.close()
    return tenant


def parse_events(raw: bytes, settings: ServiceSettings, *, tenant: str) -> tuple[Event, ...]:
    """Read the body of POST /v1/events: one CloudEvent, or an array of them.

    Args:
        tenant: Whose events they are where they do not say.

    Raises:
        RequestError: names the event and its field; nothing of the batch is taken.
        BodyTooLarge: more events than one request may carry.
    """
    data = parse_json(raw)
    batch = data if isinstance(data, list) else [data]
    if not batch:
        raise RequestError("expected at least one event, found an empty array", where="")
    if len(batch) > settings.batch_max:
        raise BodyTooLarge(
            f"{len(batch)} events; service.batch_max allows {settings.batch_max}", where=""
        )
    events = []
    for i, row in enumerate(batch):
        if isinstance(row, dict) and isinstance(row.get("data"), dict):
            row["data"].setdefault("tenant", tenant)
        at = f"/{i}" if isinstance(data, list) else ""
        try:
            event = from_envelope(row)
        except EventError as error:
            place = error.field.replace(".", "/").replace("[", "/").replace("]", "")
            where = "" if place == "$" else "/" + place
            raise RequestError(str(error), where=at + where) from error
        # Of a tenant that no document can have, its heat would be kept for nothing.
        check_name(event.tenant, "data.tenant", TENANT_BYTES_MAX, where=f"{at}/data/tenant")
        events.append(event)
    return tuple(events)


def parse_warmup(raw: bytes) -> WarmupRequest:
    """Read the body of POST /v1/warmup; an empty one takes every setting."""
    members = _Members(parse_json(raw) if raw else {}, "")
    request = WarmupRequest(
        budget_bytes=members.optional_integer("budget_bytes", 1, 1 << 60),
        deadline_s=members.number("deadline_s", 0.0, 86_400.0),
        everything=members.boolean("everything", False),
        wait=members.boolean("wait", False),
    )
    members.close()
    return request


def parse_steering(raw: bytes) -> str:
    """Read the body of PATCH /v1/warmup: what is asked of the running warm-up."""
    members = _Members(parse_json(raw), "")
    action = members.choice("action", STEERING)
    members.close()
    return action


def parse_log_level(raw: bytes) -> Level:
    """Read the body of PUT /v1/log-level."""
    members = _Members(parse_json(raw), "")
    level = members.choice("level", LEVELS)
    members.close()
    return cast(Level, level)


def check_name(value: str, what: str, bytes_max: int, *, where: str) -> str:
    """Return an id or a tenant as it is. Raises RequestError where an index could not keep it.

    The index checks again, without knowing the member's place.
    """
    size = len(value.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= bytes_max:
        raise RequestError(
            f"{what}: expected 1 to {bytes_max} bytes of UTF-8, found {size}", where=where
        )
    if "\0" in value or "\x1f" in value:
        raise RequestError(
            f"{what}: expected neither NUL nor unit separator, found {value!r}", where=where
        )
    return value


class _Members:
    """The members of one JSON object, taken out one by one; what is left over is unknown."""

    def __init__(self, data: Any, pointer: str) -> None:
        if not isinstance(data, dict):
            raise RequestError(f"expected an object, found {_named(data)}", where=pointer)
        self.pointer = pointer
        self._data = data
        self._known: list[str] = []

    def _take(self, name: str) -> Any:
        self._known.append(name)
        return self._data.get(name)

    def _refuse(self, name: str, expected: str, found: Any) -> RequestError:
        return RequestError(
            f"{name}: expected {expected}, found {found}", where=f"{self.pointer}/{name}"
        )

    def text(self, name: str, length_max: int, *, empty: bool = True) -> str | None:
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._refuse(name, "text", _named(value))
        if len(value) > length_max or not (value or empty):
            least = 0 if empty else 1
            raise self._refuse(name, f"{least} to {length_max} characters", len(value))
        return value

    def name(self, name: str, bytes_max: int) -> str | None:
        value = self.text(name, bytes_max, empty=False)
        if value is not None:
            check_name(value, name, bytes_max, where=f"{self.pointer}/{name}")
        return value

    def choice(self, name: str, known: Sequence[str]) -> str:
        value = self._take(name)
        if value not in known:
            found = "nothing" if value is None else repr(value)[:40]
            raise self._refuse(name, f"one of {', '.join(known)}", found)
        return str(value)

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        value = self.optional_integer(name, low, high)
        return default if value is None else value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        value = self._take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refuse(name, "a whole number", _named(value))
        if not low <= value <= high:
            raise self._refuse(name, f"{low} to {high}", value)
        return value

    def number(self, name: str, above: float, high: float) -> float | None:
        value = self._take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._refuse(name, "a number", _named(value))
        if not above < value <= high or not math.isfinite(value):
            raise self._refuse(name, f"above {above:g}, at most {high:g}", value)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refuse(name, "true or false", _named(value))
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._take(name)
        if value is not None and not isinstance(value, dict):
            raise self._refuse(name, "an object", _named(value))
        return value

    def rows(self, name: str, count_max: int) -> Sequence[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self._refuse(name, "an array", _named(value))
        if not value:
            raise self._refuse(name, "at least one item", "an empty array")
        if len(value) > count_max:
            raise BodyTooLarge(
                f"{name} has {len(value)} items; service.batch_max allows {count_max}",
                where=f"{self.pointer}/{name}",
            )
        return value

    def vector(self, name: str) -> NDArray[np.float32] | None:
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not 1 <= len(value) <= DIMENSION_MAX:
            found = f"{len(value)}" if isinstance(value, list) else _named(value)
            raise self._refuse(name, f"an array of 1 to {DIMENSION_MAX} numbers", found)
        if not all(type(item) is float or type(item) is int for item in value):
            raise self._refuse(name, "numbers only", "something else among them")
        with np.errstate(over="ignore"):
            try:
                vector = np.array(value, dtype=np.float32)
            except OverflowError as error:
                raise self._refuse(name, "numbers within float32", "one beyond") from error
        if not np.isfinite(vector).all():
            raise self._refuse(name, "numbers within float32", "one beyond")
        return vector

    def close(self) -> None:
        unknown = [name for name in self._data if name not in self._known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self._known)}"
            pointer = unknown[0].replace("~", "~0").replace("/", "~1")
            raise RequestError(
                f"unknown member {unknown[0]!r}; {hint}", where=f"{self.pointer}/{pointer}"
            )


def _named(value: Any) -> str:
    words = {
        type(None): "nothing", bool: "a boolean", str: "text", list: "an array", dict: "an object",
        int: "a number", float: "a number",
    }  # fmt: skip
    return words.get(type(value), type(value).__name__)
