"""Whatever a client sends is either taken whole or refused by name; retries keep their deadline."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.service.bodies import parse_documents, parse_events, parse_search, parse_warmup
from stoker.service.problems import (
    BodyTooLarge,
    NotReady,
    Problem,
    RequestError,
    ServerUnreachable,
    ServiceError,
    TooManyRequests,
    error_of,
    problem_of,
)
from stoker.service.settings import ServiceSettings
from stoker.service.wire import Attempts, RetryPolicy

SETTINGS = ServiceSettings(batch_max=5)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
VECTORS = st.lists(st.floats(-1e40, 1e40) | st.integers(-3, 3), min_size=0, max_size=4)
NAMES = {
    "text": st.text(max_size=10) | JSON,
    "vector": VECTORS | JSON,
    "k": st.integers(-2, 2000) | JSON,
    "filters": JSON,
    "tenant": st.text(max_size=140) | JSON,
    "recall_target": st.floats(-1, 2) | JSON,
    "deadline_ms": st.integers(-5, 10**12) | JSON,
    "session": JSON,
    "include_text": JSON,
    "id": st.text(max_size=400) | JSON,
    "metadata": JSON,
    "budget_bytes": JSON,
    "wait": JSON,
    "odd": JSON,
}


def bodies(*names: str) -> Any:
    members = st.fixed_dictionaries({}, optional={name: NAMES[name] for name in names})
    return members | JSON


def sent(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def refused(error: ServiceError) -> None:
    assert str(error)
    assert error.where in ("", "body") or error.where.startswith("/")
    assert problem_of(error).status in (400, 413)


@given(bodies("text", "vector", "k", "filters", "tenant", "recall_target", "deadline_ms",
              "session", "include_text", "odd"))  # fmt: skip
def test_a_search_is_taken_whole_or_refused_by_name(body: Any) -> None:
    try:
        request = parse_search(sent(body), SETTINGS)
    except RequestError as error:
        refused(error)
        return
    assert (request.text is None) != (request.vector is None)
    assert 1 <= request.k <= SETTINGS.k_max
    assert 1 <= request.deadline_ms <= SETTINGS.deadline_ms_max
    if request.vector is not None:
        assert request.vector.dtype == np.float32
        assert np.isfinite(request.vector).all()
        assert request.vector.ndim == 1
    assert "odd" not in body


@given(
    st.fixed_dictionaries(
        {"documents": st.lists(bodies("id", "text", "vector", "metadata", "odd"), max_size=6)},
        optional={"tenant": NAMES["tenant"]},
    )
)
def test_documents_are_taken_whole_or_refused_by_name(body: Any) -> None:
    try:
        _, documents = parse_documents(sent(body), SETTINGS)
    except (RequestError, BodyTooLarge) as error:
        refused(error)
        return
    assert [document.id for document in documents] == [row["id"] for row in body["documents"]]
    for document in documents:
        assert document.vector is not None or (document.text or "").strip()


@given(JSON | st.lists(st.fixed_dictionaries({"data": JSON, "id": JSON}), max_size=3))
def test_events_are_refused_by_name(body: Any) -> None:
    with pytest.raises((RequestError, BodyTooLarge)) as caught:
        parse_events(sent(body), SETTINGS, tenant="t")
    refused(caught.value)


@given(bodies("budget_bytes", "wait", "odd"))
def test_a_warm_up_is_taken_whole_or_refused_by_name(body: Any) -> None:
    try:
        request = parse_warmup(sent(body))
    except RequestError as error:
        refused(error)
        return
    assert request.budget_bytes is None or request.budget_bytes >= 1


@given(st.binary(max_size=40))
def test_random_bytes_are_refused(raw: bytes) -> None:
    for parse in (
        lambda: parse_search(raw, SETTINGS),
        lambda: parse_documents(raw, SETTINGS),
        lambda: parse_events(raw, SETTINGS, tenant="t"),
    ):
        with pytest.raises(RequestError):
            parse()


@given(
    failures=st.lists(
        st.tuples(
            st.sampled_from([ServerUnreachable("x"), TooManyRequests("x"), NotReady("x")]),
            st.booleans(),
            st.floats(0, 5),
            st.floats(0, 3),
            st.floats(0, 1),
        ),
        max_size=12,
    ),
    idempotent=st.booleans(),
    deadline_s=st.floats(0.01, 20),
    retries_max=st.integers(0, 8),
)
def test_retries_keep_the_deadline_and_the_count(
    failures: list[tuple[ServiceError, bool, float, float, float]],
    idempotent: bool,
    deadline_s: float,
    retries_max: int,
) -> None:
    now = [0.0]
    share = [0.0]
    attempts = Attempts(
        RetryPolicy(retries_max=retries_max),
        idempotent=idempotent,
        deadline_s=deadline_s,
        clock=lambda: now[0],
        uniform=lambda low, high: low + (high - low) * share[0],
    )
    tries = 0
    for error, was_sent, took_s, retry_after_s, share[0] in failures:
        try:
            assert attempts.left_s() <= deadline_s
            tries += 1
            now[0] += min(took_s, attempts.left_s())
            wait_s = attempts.wait_s(error, sent=was_sent, retry_after_s=retry_after_s)
        except ServiceError:
            break
        assert wait_s >= retry_after_s
        now[0] += wait_s
        assert now[0] < deadline_s
        assert not was_sent or idempotent or not isinstance(error, ServerUnreachable)
    assert tries <= retries_max + 1
    assert now[0] <= deadline_s


@given(
    data=st.dictionaries(
        st.sampled_from(["type", "title", "detail", "where", "action", "retriable", "request_id"]),
        JSON,
    ),
    status=st.integers(400, 599),
)
def test_any_document_becomes_an_error(data: dict[str, Any], status: int) -> None:
    error = error_of(Problem.from_dict(data, status))
    assert isinstance(error, ServiceError)
    assert str(error)
