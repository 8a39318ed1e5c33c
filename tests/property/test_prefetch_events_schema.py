"""The schema files and the decoder accept the same events, tried from both sides."""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.prefetch import events
from stoker.prefetch.events import EVENT_TYPES, EventError, from_envelope
from stoker.service.dead_letters import dead_letter
from stoker.service.streams import DEAD_LETTERS_TOPIC, EVENTS_TOPIC, Record

SCHEMAS = Path(__file__).resolve().parents[2] / "prefetch" / "schemas"
FORMATS = jsonschema.FormatChecker(formats=())


@FORMATS.checks("date-time", raises=ValueError)
def _is_time(value: object) -> bool:
    if isinstance(value, str):
        datetime.datetime.fromisoformat(value)
    return True


def _validators() -> dict[str, jsonschema.Draft202012Validator]:
    found = {}
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        event_type = schema["properties"]["type"]["const"]
        found[event_type] = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return found


VALIDATORS = _validators()


def schema_accepts(envelope: Any) -> bool:
    event_type = envelope.get("type") if isinstance(envelope, dict) else None
    validator = VALIDATORS.get(event_type) if isinstance(event_type, str) else None
    return event_type in EVENT_TYPES and validator is not None and validator.is_valid(envelope)


def decoder_accepts(envelope: Any) -> bool:
    try:
        events.decode(orjson.dumps(envelope))
    except EventError:
        return False
    return True


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
times = st.datetimes(
    datetime.datetime(1970, 1, 2), datetime.datetime(9999, 12, 30), timezones=st.just(datetime.UTC)
).map(lambda t: t.isoformat().replace("+00:00", "Z")) | st.sampled_from(
    [
        "2026-01-31T12:00:00+05:30",
        "2026-01-31T12:00:00.123456789Z",
        "2024-02-29T00:00:00Z",
        "2026-02-29T00:00:00Z",
        "1969-12-31T00:00:00Z",
        "2026-01-31t12:00:00z",
        "20260131T120000Z",
        "2026-01-31T24:00:00Z",
        "2026-01-31T12:00:00+24:00",
        "2026-01-31T12:00:00-00:00",
        "٢٠٢٦-01-31T12:00:00Z",
    ]
)
good = st.fixed_dictionaries(
    {
        "specversion": st.just("1.0"),
        "id": names,
        "source": names,
        "type": st.sampled_from(EVENT_TYPES),
        "time": times,
        "data": st.fixed_dictionaries(
            {"tenant": names, "chunk_ids": st.lists(names, max_size=4)},
            optional={
                "session": names | st.none(),
                "route": names | st.none(),
                "query": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
                "more": json_values,
            },
        ),
    },
    optional={
        "datacontenttype": st.sampled_from(events.CONTENT_TYPES),
        "subject": json_values,
    },
)
FIELDS = [
    *("specversion", "id", "source", "type", "time", "datacontenttype", "data"),
    *("data.tenant", "data.session", "data.route", "data.query", "data.chunk_ids"),
]
odd = json_values | st.sampled_from(
    [
        *("", "x" * 256, "x" * 257, "y" * 512, "y" * 513, "z" * 1024, "z" * 1025),
        *("q" * 65_536, "q" * 65_537, ["a"] * 10_000, ["a"] * 10_001),
        *(["y" * 512], ["y" * 513], ["a", None], "1.0", 1.0, "2026-01-01T00:00Z"),
        *EVENT_TYPES,
        *("application/json", "application/json; charset=utf-8", "text/json"),
    ]
)


@settings(max_examples=300)
@given(envelope=good)
def test_what_is_made_to_fit_is_accepted_by_both_or_neither(envelope: Any) -> None:
    assert schema_accepts(envelope) == decoder_accepts(envelope)


@settings(max_examples=600)
@given(envelope=good, field=st.sampled_from(FIELDS), value=odd, remove=st.booleans())
def test_one_odd_field_is_judged_alike(envelope: Any, field: str, value: Any, remove: bool) -> None:
    envelope = copy.deepcopy(envelope)
    *parents, last = field.split(".")
    at = envelope
    for name in parents:
        at = at[name]
    if remove:
        at.pop(last, None)
    else:
        at[last] = value
    assert schema_accepts(envelope) == decoder_accepts(envelope)


@settings(max_examples=200)
@given(value=json_values)
def test_any_json_is_judged_alike(value: Any) -> None:
    assert schema_accepts(value) == decoder_accepts(value)


@settings(max_examples=200)
@given(envelope=good)
def test_an_accepted_event_survives_a_round_trip(envelope: Any) -> None:
    if decoder_accepts(envelope):
        event = from_envelope(envelope)
        assert events.decode(events.encode(event)) == event


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_the_examples_in_the_schemas_are_events(event_type: str) -> None:
    for example in VALIDATORS[event_type].schema["examples"]:
        assert schema_accepts(example)
        assert decoder_accepts(example)


def test_dead_letters_fit_their_schema() -> None:
    validator = VALIDATORS["stoker.event.refused.v1"]
    for example in validator.schema["examples"]:
        validator.validate(example)
    reason = EventError("$", expected="UTF-8 JSON", found="not JSON")
    record = Record("t", 3, 9, b"\xff", b"\x00" * 50, 1.0)
    for origin in (None, record):
        letter = dead_letter(
            b"\x00" * 50, reason, time_s=1.7e9, origin=origin, payload_bytes_max=10
        )
        validator.validate(orjson.loads(letter))


def test_the_asyncapi_document_names_every_type_topic_and_schema() -> None:
    document = yaml.safe_load((SCHEMAS / "asyncapi.yaml").read_text(encoding="utf-8"))
    assert document["asyncapi"].startswith("3.")
    channels = document["channels"]
    assert channels["events"]["address"] == EVENTS_TOPIC
    assert channels["deadLetters"]["address"] == DEAD_LETTERS_TOPIC
    messages = document["components"]["messages"]
    assert {m["name"] for m in messages.values()} == set(VALIDATORS)
    for message in messages.values():
        schema = json.loads((SCHEMAS / message["payload"]["$ref"]).read_text(encoding="utf-8"))
        assert schema["properties"]["type"]["const"] == message["name"]
    for operation in document["operations"].values():
        assert operation["channel"]["$ref"].rpartition("/")[2] in channels
    for channel in channels.values():
        for reference in channel["messages"].values():
            assert reference["$ref"].rpartition("/")[2] in messages
