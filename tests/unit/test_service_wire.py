"""The SDK's retry rules and its reading of answers, with a clock that is passed in."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, StokerError
from stoker.service.problems import (
    DeadlinePassed,
    NotReady,
    Problem,
    RequestError,
    ServerFault,
    ServerUnavailable,
    ServerUnreachable,
    ServiceError,
    TooManyRequests,
)
from stoker.service.wire import (
    Attempts,
    Document,
    Reply,
    RetryPolicy,
    delete_call,
    dumps,
    events_call,
    failure_of,
    ready_call,
    search_call,
    text_call,
    upsert_call,
    used_event,
    warmup_call,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(
    clock: Clock, *, idempotent: bool = True, deadline_s: float = 10.0, retries_max: int = 3
) -> Attempts:
    policy = RetryPolicy(retries_max=retries_max, backoff_s=0.1, backoff_s_max=0.3)
    return Attempts(
        policy,
        idempotent=idempotent,
        deadline_s=deadline_s,
        clock=clock,
        uniform=lambda low, high: high,
    )


def busy() -> ServiceError:
    return TooManyRequests("busy")


def lost() -> ServiceError:
    return ServerUnreachable("lost")


def test_waits_double_up_to_their_bound_and_end() -> None:
    tries = attempts(Clock(), retries_max=4)
    waits = [tries.wait_s(lost(), sent=True) for _ in range(4)]
    assert waits == [0.1, 0.2, 0.3, 0.3]
    with pytest.raises(ServerUnreachable):
        tries.wait_s(lost(), sent=True)


def test_a_wait_is_never_below_retry_after() -> None:
    tries = attempts(Clock())
    assert tries.wait_s(busy(), sent=True, retry_after_s=2.0) == 2.0


def test_no_wait_goes_past_the_deadline() -> None:
    clock = Clock()
    tries = attempts(clock, deadline_s=1.0)
    with pytest.raises(TooManyRequests):
        tries.wait_s(busy(), sent=True, retry_after_s=1.0)
    clock.now += 0.95
    with pytest.raises(ServerUnreachable):
        attempts(clock, deadline_s=0.05).wait_s(lost(), sent=False)


def test_the_deadline_is_for_all_tries_together() -> None:
    clock = Clock()
    tries = attempts(clock, deadline_s=1.0)
    assert tries.left_s() == 1.0
    clock.now += 0.6
    assert tries.left_s() == pytest.approx(0.4)
    clock.now += 0.4
    with pytest.raises(DeadlinePassed, match="0 tries"):
        tries.left_s()


@pytest.mark.parametrize(
    ("error", "sent", "idempotent", "retried"),
    [
        (lost(), False, False, True),  # never sent
        (lost(), True, True, True),
        (lost(), True, False, False),  # may have been done
        (busy(), True, False, True),  # the server says that it did nothing
        (NotReady("x"), True, False, True),
        (ServerUnavailable("x"), True, True, True),
        (ServerUnavailable("x"), True, False, False),
        (RequestError("x"), True, True, False),
        (ServerFault("x"), True, True, False),
    ],
)
def test_what_is_tried_again(
    error: ServiceError, sent: bool, idempotent: bool, retried: bool
) -> None:
    tries = attempts(Clock(), idempotent=idempotent)
    if retried:
        assert tries.wait_s(error, sent=sent) > 0
        return
    with pytest.raises(type(error)):
        tries.wait_s(error, sent=sent)


def test_retries_can_be_turned_off() -> None:
    with pytest.raises(TooManyRequests):
        attempts(Clock(), retries_max=0).wait_s(busy(), sent=True)
    with pytest.raises(InputError):
        RetryPolicy(retries_max=-1)


def reply(status: int, body: Any, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status, headers, raw)


def test_a_problem_becomes_its_error_with_retry_after() -> None:
    document = Problem("too-many-requests", "t", 429, "full", retriable=True).to_dict()
    error, wait_s = failure_of(reply(429, document, **{"retry-after": "3"}))
    assert isinstance(error, TooManyRequests)
    assert (str(error), wait_s) == ("full", 3.0)


def test_an_answer_of_something_else_is_unreachable() -> None:
    error, wait_s = failure_of(
        reply(502, b"<html>bad gateway", **{"retry-after": "Fri, 31 Dec 2027 23:59:59 GMT"})
    )
    assert isinstance(error, ServerUnreachable)
    assert wait_s == 0.0
    assert "bad gateway" in str(error)
    with pytest.raises(ServerUnreachable, match="not Stoker's"):
        warmup_call().read(reply(200, b"<html>"))
    with pytest.raises(ServerUnreachable, match="not Stoker's"):
        warmup_call().read(reply(200, {"hello": 1}))
    error, _ = failure_of(reply(404, b"nothing"))
    assert isinstance(error, InputError)


ANSWER: dict[str, Any] = dict(
    results=[], completeness={}, reuse={}, pages_read=0, bytes_read=0, timings={},
    generation=1, tenant="t", request_id="r", prompt_order=[],
)  # fmt: skip
STRANGE: tuple[Any, ...] = (
    None, True, 5, 1e300, "x", "", [], [1], [[]], [{}], {}, {"ready": "false"},
    {"ready": True, "parts": "abc"}, {"ready": True, "parts": [1], "waiting_for": 5},
    *({**ANSWER, name: value} for name in ANSWER for value in (None, 5, "x", [1], [[]], {})),
)  # fmt: skip


@pytest.mark.parametrize("status", [199, 200, 202, 204, 302, 307, 404, 429, 500, 503, 999])
def test_whatever_a_server_answers_ends_in_a_record_or_in_an_error_of_ours(status: int) -> None:
    calls = [
        search_call(
            tenant=None, deadline_ms=1, text="a", vector=None, k=1, filters=None,
            recall_target=None, session=None, route=None, include_text=True, include_metadata=True,
        ),
        upsert_call([], None), delete_call("a", None), events_call([]), warmup_call(),
        ready_call(), text_call("/metrics"),
    ]  # fmt: skip
    raws = [json.dumps(body).encode() for body in STRANGE]
    for raw in (*raws, b"", b"\xff", b"{", b"[" * 10_000, b"NaN", b"<html>"):
        for call in calls:
            answer = Reply(status, {"retry-after": "nan", "location": "http://elsewhere/"}, raw)
            try:
                call.read(answer)
            except StokerError:
                continue
            assert status in (200, 202) or (status, call.path) == (503, "/readyz"), (raw, call.path)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, 1e10, 10**400, "10", None, True])
def test_a_deadline_that_no_timer_takes_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(InputError, match="deadline_s"):
        attempts(Clock(), deadline_s=bad)


def search(**changes: Any) -> dict[str, Any]:
    members: dict[str, Any] = dict(
        tenant=None, deadline_ms=100, text="a", vector=None, k=3, filters=None,
        recall_target=None, session=None, route=None, include_text=True, include_metadata=False,
    )  # fmt: skip
    call = search_call(**(members | changes))
    assert call.idempotent
    assert call.body is not None
    body: dict[str, Any] = json.loads(call.body)
    return body


def test_a_search_is_written_without_what_was_left_out() -> None:
    assert search() == {
        "text": "a",
        "k": 3,
        "deadline_ms": 100,
        "include_text": True,
        "include_metadata": False,
    }
    assert search(text=None, vector=np.array([1.5, 2], np.float32))["vector"] == [1.5, 2.0]
    # Not contiguous: orjson leaves it to us.
    assert search(text=None, vector=np.arange(6.0)[::2])["vector"] == [0.0, 2.0, 4.0]
    with pytest.raises(InputError):
        search(vector=[1.0])
    with pytest.raises(InputError):
        search(text=None)


def test_documents_are_written_from_records_and_mappings() -> None:
    call = upsert_call(
        [Document("a", "x", metadata={"n": 1}), {"id": "b", "vector": (1, 2)}], tenant="t"
    )
    assert call.body is not None
    assert json.loads(call.body) == {
        "tenant": "t",
        "documents": [
            {"id": "a", "text": "x", "metadata": {"n": 1}},
            {"id": "b", "vector": [1, 2]},
        ],
    }
    with pytest.raises(InputError, match="JSON"):
        dumps({"a": object()})


def test_one_thing_is_no_list_of_them() -> None:
    """A text is a sequence of texts: the letters of an id would have been marked as used."""
    odd: Any
    for odd in ("abc", b"abc", {"id": "x"}, 7, None):
        with pytest.raises(InputError, match="chunk_ids: expected a list of ids"):
            used_event(odd, tenant=None, session=None, route=None)
        with pytest.raises(InputError, match="events: expected a list of"):
            events_call(odd)
        with pytest.raises(InputError, match="documents: expected a list of"):
            upsert_call(odd, None)
    for odd in (["x"], [7]):
        with pytest.raises(InputError, match="/documents/0: expected a mapping"):
            upsert_call(odd, None)
        with pytest.raises(InputError, match="/0: expected a mapping"):
            events_call(odd)
    for odd in (5, "", None, b"x"):
        with pytest.raises(InputError, match="document_id: expected text"):
            delete_call(odd, None)


def test_an_id_is_escaped_in_a_path() -> None:
    call = delete_call("a/b c?%", tenant="t&u")
    assert call.path == "/v1/documents/a%2Fb%20c%3F%25?tenant=t%26u"
    with pytest.raises(InputError):
        delete_call("", None)


def test_events_are_given_an_id_once_so_that_a_retry_counts_once() -> None:
    call = events_call([{"type": "t", "data": {}}, {"id": "mine", "type": "t", "data": {}}])
    assert call.idempotent
    assert call.body is not None
    first, second = json.loads(call.body)
    assert first["id"]
    assert first["time"].endswith("Z")
    assert second["id"] == "mine"


def test_not_ready_is_an_answer() -> None:
    body = {"ready": False, "waiting_for": ["warm-up"], "parts": {"text": "off"}, "new": 1}
    readiness = ready_call().read(reply(503, body))
    assert not readiness.ready
    assert readiness.waiting_for == ("warm-up",)
    with pytest.raises(InputError):
        ready_call().read(reply(404, {}))
