"""Request bodies: what is taken, and that a refusal names the member."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.index.document_values import (
    DOCUMENT_ID_BYTES_MAX,
    TENANT_BYTES_MAX,
    check_id,
    check_tenant,
)
from stoker.service.bodies import (
    parse_documents,
    parse_events,
    parse_search,
    parse_tenant,
    parse_warmup,
)
from stoker.service.problems import BodyTooLarge, RequestError
from stoker.service.settings import ServiceSettings

SETTINGS = ServiceSettings(batch_max=3, k_max=50, deadline_ms_max=5_000)
EVENT = {
    "specversion": "1.0",
    "id": "e-1",
    "source": "/test",
    "type": "stoker.result.used.v1",
    "time": "2026-01-31T12:00:00Z",
    "data": {"tenant": "t", "chunk_ids": ["a"]},
}


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_search_takes_its_defaults() -> None:
    request = parse_search(dumps({"text": "how"}), SETTINGS)
    assert (request.text, request.vector, request.k) == ("how", None, 10)
    assert request.deadline_ms == SETTINGS.deadline_ms_default
    assert request.include_text
    assert request.tenant is None


def test_a_search_by_vector_is_float32() -> None:
    request = parse_search(dumps({"vector": [1, 2.5], "k": 3, "filters": {"a": 1}}), SETTINGS)
    assert request.vector is not None
    assert request.vector.dtype == np.float32
    assert request.vector.tolist() == [1.0, 2.5]
    assert request.filters == {"a": 1}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "/text"),
        ({"text": "a", "vector": [1]}, "/text"),
        ({"text": "  "}, "/text"),
        ({"text": 3}, "/text"),
        ({"text": "a", "k": 0}, "/k"),
        ({"text": "a", "k": 51}, "/k"),
        ({"text": "a", "k": True}, "/k"),
        ({"text": "a", "k": 2.0}, "/k"),
        ({"text": "a", "deadline_ms": 0}, "/deadline_ms"),
        ({"text": "a", "deadline_ms": 1 << 40}, "/deadline_ms"),
        ({"text": "a", "recall_target": 0}, "/recall_target"),
        ({"text": "a", "recall_target": 1.1}, "/recall_target"),
        ({"text": "a", "filters": [1]}, "/filters"),
        ({"text": "a", "tenant": ""}, "/tenant"),
        ({"text": "a", "tenant": "a\0b"}, "/tenant"),
        ({"vectr": [1]}, "/vectr"),
        ({"text": "a", "session": "s" * 257}, "/session"),
        ({"text": "a", "include_text": 1}, "/include_text"),
        ({"text": "a", "filter": {}}, "/filter"),
        ({"text": "a", "x/y~": 1}, "/x~1y~0"),
        ({"vector": []}, "/vector"),
        ({"vector": [1, "2"]}, "/vector"),
        ({"vector": [1, None]}, "/vector"),
        ({"vector": [True]}, "/vector"),
        ({"vector": [[1]]}, "/vector"),
        ({"vector": [1e39]}, "/vector"),
        ({"vector": [10**400]}, "body"),
        ([], ""),
        ("text", ""),
    ],
)
def test_a_refused_search_names_the_member(body: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_search(dumps(body), SETTINGS)
    assert caught.value.where == where


def test_a_longer_deadline_than_the_server_allows_is_shortened() -> None:
    assert parse_search(dumps({"text": "a", "deadline_ms": 60_000}), SETTINGS).deadline_ms == 5_000


def test_an_unknown_member_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'filters'"):
        parse_search(dumps({"text": "a", "filter": {}}), SETTINGS)


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ({"tennant": "a"}, "/tennant"),
        ({"tenant": ""}, "/tenant"),
        ({"tenant": "é" * 65}, "/tenant"),
    ],
)
def test_a_delete_never_guesses_whose_document_is_meant(query: dict[str, str], where: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tenant(query)
    assert caught.value.where == where
    assert parse_tenant({"tenant": "a"}) == "a"
    assert parse_tenant({}) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"NaN", b'{"text": NaN}'])
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_search(raw, SETTINGS)
    assert caught.value.where == "body"


def test_documents() -> None:
    body = {"tenant": "t", "documents": [{"id": "a", "text": "x"}, {"id": "b", "vector": [1]}]}
    tenant, documents = parse_documents(dumps(body), SETTINGS)
    assert tenant == "t"
    assert [d.id for d in documents] == ["a", "b"]
    assert documents[0].vector is None
    assert documents[1].metadata == {}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "/documents"),
        ({"documents": []}, "/documents"),
        ({"documents": {"id": "a"}}, "/documents"),
        ({"documents": ["a"]}, "/documents/0"),
        ({"documents": [{"text": "x"}]}, "/documents/0/id"),
        ({"documents": [{"id": 1, "text": "x"}]}, "/documents/0/id"),
        ({"documents": [{"id": "a"}]}, "/documents/0/text"),
        ({"documents": [{"id": "a", "text": ""}]}, "/documents/0/text"),
        ({"documents": [{"id": "a", "text": "x", "metadata": 1}]}, "/documents/0/metadata"),
        ({"documents": [{"id": "a", "text": "x", "meta": {}}]}, "/documents/0/meta"),
        (
            {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]},
            "/documents/1/id",
        ),
    ],
)
def test_refused_documents_name_the_member(body: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_documents(dumps(body), SETTINGS)
    assert caught.value.where == where


def test_names_are_bounded_as_the_index_bounds_them() -> None:
    check_id("é" * (DOCUMENT_ID_BYTES_MAX // 2), "id")
    check_tenant("é" * (TENANT_BYTES_MAX // 2))
    with pytest.raises(InputError):
        check_id("x" * (DOCUMENT_ID_BYTES_MAX + 1), "id")
    with pytest.raises(InputError):
        check_tenant("x" * (TENANT_BYTES_MAX + 1))
    with pytest.raises(RequestError) as caught:
        parse_search(dumps({"text": "a", "tenant": "é" * 65}), SETTINGS)
    assert caught.value.where == "/tenant"
    body = {"documents": [{"id": "é" * 192, "text": "x"}]}
    with pytest.raises(RequestError) as caught:
        parse_documents(dumps(body), SETTINGS)
    assert caught.value.where == "/documents/0/id"


def test_a_batch_is_bounded() -> None:
    rows = [{"id": str(i), "text": "x"} for i in range(4)]
    with pytest.raises(BodyTooLarge, match=r"service\.batch_max"):
        parse_documents(dumps({"documents": rows}), SETTINGS)
    with pytest.raises(BodyTooLarge, match=r"service\.batch_max"):
        parse_events(dumps([EVENT] * 4), SETTINGS, tenant="t")


def test_events_come_alone_or_as_a_batch() -> None:
    assert len(parse_events(dumps(EVENT), SETTINGS, tenant="t")) == 1
    events = parse_events(dumps([EVENT, EVENT | {"id": "e-2"}]), SETTINGS, tenant="other")
    assert [(e.id, e.tenant) for e in events] == [("e-1", "t"), ("e-2", "t")]
    (event,) = parse_events(dumps(EVENT | {"data": {"chunk_ids": ["a"]}}), SETTINGS, tenant="other")
    assert event.tenant == "other"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (EVENT | {"type": "x"}, "/type"),
        ([EVENT, EVENT | {"data": {"tenant": "t"}}], "/1/data/chunk_ids"),
        ([EVENT | {"data": {"tenant": "t", "chunk_ids": ["a", ""]}}], "/0/data/chunk_ids/1"),
        (EVENT | {"data": {"tenant": "t" * 129, "chunk_ids": ["a"]}}, "/data/tenant"),
        ([EVENT | {"data": {"tenant": "é" * 65, "chunk_ids": ["a"]}}], "/0/data/tenant"),
        ([EVENT | {"data": {"tenant": "a\x1fb", "chunk_ids": ["a"]}}], "/0/data/tenant"),
        ([3], "/0"),
        (3, ""),
        ([], ""),
    ],
)
def test_a_refused_event_is_named(body: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_events(dumps(body), SETTINGS, tenant="t")
    assert caught.value.where == where


def test_warmup() -> None:
    assert parse_warmup(b"").budget_bytes is None
    request = parse_warmup(dumps({"budget_bytes": 5, "deadline_s": 1, "wait": True}))
    assert (request.budget_bytes, request.deadline_s, request.wait) == (5, 1.0, True)
    assert not request.everything
    for body in ({"budget_bytes": 0}, {"deadline_s": 0}, {"wait": "yes"}, {"budget": 1}):
        with pytest.raises(RequestError):
            parse_warmup(dumps(body))
