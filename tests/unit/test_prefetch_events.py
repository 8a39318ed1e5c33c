"""The event decoder: what it takes, what it refuses, and that a refusal says exactly why."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest

from stoker.errors import InputError
from stoker.prefetch.events import (
    CHUNK_IDS_MAX,
    DOCUMENT_DELETED,
    DOCUMENT_UPSERTED,
    EVENT_BYTES_MAX,
    EVENT_TYPES,
    RESULT_USED,
    SEARCH_PERFORMED,
    EventError,
    decode,
    encode,
    format_time,
    new_event,
    partition_key,
)

GOOD: dict[str, Any] = {
    "specversion": "1.0",
    "id": "e1",
    "source": "/app",
    "type": SEARCH_PERFORMED,
    "time": "2026-01-31T12:00:00.25Z",
    "data": {"tenant": "acme", "session": "s", "query": "why?", "chunk_ids": ["a#0", "b#1"]},
}


def changed(path: str, value: Any) -> bytes:
    """The good envelope with one field set, or taken away where `value` is `...`."""
    envelope = copy.deepcopy(GOOD)
    at: Any = envelope
    *parents, last = path.split(".")
    for name in parents:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return orjson.dumps(envelope)


def test_a_good_event_is_decoded_and_unknown_fields_are_kept() -> None:
    envelope = copy.deepcopy(GOOD)
    envelope["traceparent"] = "00-a-b-01"
    envelope["data"]["user_agent"] = {"name": "x"}
    event = decode(orjson.dumps(envelope))
    assert event.id == "e1"
    assert event.time_s == 1769860800.25
    assert (event.tenant, event.session, event.route) == ("acme", "s", None)
    assert (event.query, event.chunk_ids) == ("why?", ("a#0", "b#1"))
    assert orjson.loads(encode(event)) == envelope


@pytest.mark.parametrize(
    ("path", "value", "expected", "found"),
    [
        ("specversion", "0.3", '"1.0"', "'0.3'"),
        ("specversion", ..., '"1.0"', "nothing"),
        ("id", "", "a string of 1 to 256 characters", "''"),
        ("id", 7, "a string of 1 to 256 characters", "7"),
        ("id", "x" * 257, "a string of 1 to 256 characters", "of 257 characters"),
        ("source", None, "a string of 1 to 1024 characters", "null"),
        ("type", "stoker.search.performed.v2", "one of stoker.search.performed.v1", ".v2"),
        ("type", ["a"], "one of stoker.search.performed.v1", "a list of 1"),
        ("time", ..., "an RFC 3339 time", "nothing"),
        ("time", "2026-01-31 12:00:00Z", "an RFC 3339 time", "2026-01-31 12"),
        ("time", "2026-01-31T12:00:00", "an RFC 3339 time", "12:00:00'"),
        ("time", "2026-01-31T12:00:00Z\n", "an RFC 3339 time", "\\n"),
        ("time", "2026-01-31T23:59:60Z", "an RFC 3339 time", ":60Z"),
        ("time", "1969-12-31T23:59:59Z", "from 1970 on", "1969"),
        ("time", "2026-02-30T12:00:00Z", "a day that exists", "02-30"),
        ("time", 1769860800, "an RFC 3339 time", "1769860800"),
        ("datacontenttype", "text/plain", "application/json", "text/plain"),
        ("datacontenttype", None, "application/json", "null"),
        ("data", ..., "an object", "nothing"),
        ("data", [], "an object", "a list of 0"),
        ("data.tenant", ..., "a string of 1 to 256 characters", "nothing"),
        ("data.tenant", "", "a string of 1 to 256 characters", "''"),
        ("data.session", "", "1 to 256 characters, or null", "''"),
        ("data.session", True, "1 to 256 characters, or null", "true"),
        ("data.route", 1.5, "1 to 256 characters, or null", "1.5"),
        ("data.query", {"a": 1}, "or null", "an object of 1 fields"),
        ("data.query", "q" * 65_537, "at most 65536 characters", "of 65537 characters"),
        ("data.chunk_ids", ..., "a list of chunk ids", "nothing"),
        ("data.chunk_ids", "a", "a list of chunk ids", "'a'"),
        ("data.chunk_ids", ["a"] * (CHUNK_IDS_MAX + 1), "0 to 10000 chunk ids", "10001"),
    ],
)
def test_a_refusal_names_field_expected_and_found(
    path: str, value: Any, expected: str, found: str
) -> None:
    with pytest.raises(EventError) as caught:
        decode(changed(path, value))
    error = caught.value
    assert isinstance(error, InputError)
    assert error.field == path
    assert expected in error.expected
    assert found in error.found
    assert str(error) == f"event refused: {path}: expected {error.expected}, found {error.found}"
    assert len(str(error)) < 500


def test_a_refused_chunk_id_is_named_by_its_position() -> None:
    with pytest.raises(EventError) as caught:
        decode(changed("data.chunk_ids", ["a", "b", ""]))
    assert caught.value.field == "data.chunk_ids[2]"


@pytest.mark.parametrize("event_type", [RESULT_USED, DOCUMENT_UPSERTED, DOCUMENT_DELETED])
def test_only_a_search_may_have_no_chunks(event_type: str) -> None:
    assert decode(changed("data.chunk_ids", [])).chunk_ids == ()
    with pytest.raises(EventError, match="1 to 10000 chunk ids"):
        new_event(event_type, tenant="t", chunk_ids=[], time_s=0)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff\xfe", b'{"a":NaN}', b'"\\ud800"', b"[" * 100_000, b"{}" * 2, b"1", b"null"],
)
def test_what_is_no_json_object_is_refused_whole(payload: bytes) -> None:
    with pytest.raises(EventError) as caught:
        decode(payload)
    assert caught.value.field == "$"


def test_a_payload_over_the_bound_is_refused_before_it_is_parsed() -> None:
    big = changed("data.blob", "x" * EVENT_BYTES_MAX)
    with pytest.raises(
        EventError, match=f"at most {EVENT_BYTES_MAX} bytes, found {len(big)} bytes"
    ):
        decode(big)
    assert decode(big, bytes_max=2 * EVENT_BYTES_MAX).id == "e1"


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_a_made_event_is_what_its_bytes_decode_to(event_type: str) -> None:
    event = new_event(
        event_type,
        tenant="ténant",
        session="s",
        route="r",
        query="q",
        chunk_ids=("a", "b"),
        time_s=1.7e9 + 0.123456,
        extra={"k": 5, "tenant": "not this"},
    )
    assert decode(encode(event)) == event
    assert event.time_s == 1.7e9 + 0.123456
    assert event.raw["data"]["k"] == 5
    assert event.tenant == "ténant"
    assert new_event(event_type, tenant="t", chunk_ids=["a"], time_s=0).id != event.id


def test_a_made_event_obeys_the_schema() -> None:
    with pytest.raises(EventError, match=r"data\.tenant"):
        new_event(SEARCH_PERFORMED, tenant="", chunk_ids=[], time_s=0)
    for time_s in (-1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(EventError, match="Unix seconds"):
            format_time(time_s)
    assert format_time(0.0) == "1970-01-01T00:00:00.000000Z"


def test_a_session_has_one_key_and_a_chunk_has_one_key() -> None:
    def key(**fields: Any) -> bytes:
        return partition_key(new_event(SEARCH_PERFORMED, time_s=0, **fields))

    assert key(tenant="t", session="s", chunk_ids=["a"]) == key(
        tenant="t", session="s", chunk_ids=["b"]
    )
    assert key(tenant="t", chunk_ids=["a"]) == key(tenant="t", chunk_ids=["a", "b"])
    assert key(tenant="t", session="s", chunk_ids=[]) != key(tenant="u", session="s", chunk_ids=[])
    assert key(tenant="t", chunk_ids=[]) == b"t\0"
