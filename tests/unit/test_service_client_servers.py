"""Whose turn it is of a client's servers, and which failures are taken to the next one."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import InputError
from stoker.service.async_client import AsyncClient
from stoker.service.client import Client
from stoker.service.client_servers import ClientServers
from stoker.service.problems import (
    DeadlinePassed,
    FeatureOff,
    NotReady,
    Problem,
    RequestError,
    ServerFault,
    ServerUnreachable,
    ServiceError,
    TooManyRequests,
)
from stoker.service.wire import Attempts, RetryPolicy, ready_call, text_call, upsert_call

URLS = ["http://a:1", "http://b:1/", "http://c:1/prefix/"]
POLICY = RetryPolicy(retries_max=1, backoff_s=1.0, backoff_s_max=4.0)
WRITE = upsert_call([], None)
METRICS = text_call("/metrics")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def servers(clock: Clock) -> ClientServers:
    return ClientServers(URLS, POLICY, clock=clock)


def names(order: Any) -> str:
    return "".join(server.parts.hostname for server in order)


def test_calls_go_round() -> None:
    several = servers(Clock())
    assert [names(several.order("")) for _ in range(4)] == ["abc", "bca", "cab", "abc"]
    assert [server.prefix for server in several.all] == ["", "", "/prefix"]


def test_one_that_was_away_comes_last_for_a_while_that_grows() -> None:
    clock = Clock()
    several = servers(clock)
    a = several.all[0]
    for away_s in (2.0, 4.0, 4.0):
        several.failed(a)
        assert all(names(several.order(""))[-1] == "a" for _ in range(3))
        clock.now += away_s
        assert {names(several.order(""))[0] for _ in range(3)} == set("abc")
    several.failed(a)
    several.answered(a, "")
    assert {names(several.order(""))[0] for _ in range(3)} == set("abc")
    for one in several.all:
        several.failed(one)
    assert sorted(names(several.order(""))) == list("abc"), "where all are away, all are asked"


def test_what_one_has_is_asked_of_it_first_unless_it_is_away() -> None:
    several = servers(Clock())
    several.answered(several.all[1], "writes")
    assert {names(several.order("writes"))[0] for _ in range(3)} == {"b"}
    assert {names(several.order(""))[0] for _ in range(3)} == set("abc")
    several.failed(several.all[1])
    assert {names(several.order("writes"))[-1] for _ in range(3)} == {"b"}


def test_one_call_asks_each_once_a_round() -> None:
    several = servers(Clock())
    turn = several.turn(WRITE)
    asked = []
    for more in (True, True, False) * 2:
        asked.append(turn.server.parts.hostname)
        assert turn.share_s(6.0) == pytest.approx(6.0 / (3 - (len(asked) - 1) % 3))
        assert turn.failed(TooManyRequests("full")) is more
    assert sorted(asked[:3]) == sorted(asked[3:]) == list("abc")


def problem(status: int, *, retriable: bool = False) -> Problem:
    return Problem.from_dict({"detail": "x", "status": status, "retriable": retriable}, status)


def attempts(*, idempotent: bool = True, retries_max: int = 1) -> Attempts:
    return Attempts(
        RetryPolicy(retries_max=retries_max, backoff_s=1.0, backoff_s_max=4.0),
        idempotent=idempotent,
        deadline_s=100.0,
        clock=Clock(),
        uniform=lambda low, high: high,
    )


FULL = TooManyRequests("full", problem=problem(429))
AWAY = ServerUnreachable("gone")
STARTING = NotReady("not yet", problem=problem(503))
OFF = FeatureOff("reads only", problem=problem(501))
FAULT = ServerFault("ours", problem=problem(500))
LATE = DeadlinePassed("too late", problem=problem(504))
WRONG = RequestError("wrong", problem=problem(400))


@pytest.mark.parametrize(
    ("error", "sent", "idempotent", "goes_on"),
    [
        (AWAY, False, False, True),
        (AWAY, True, True, True),
        (AWAY, True, False, False),
        (FULL, True, False, True),
        (STARTING, True, False, True),
        (OFF, True, False, True),
        (FAULT, True, True, True),
        (FAULT, True, False, False),
        (LATE, True, True, False),
        (WRONG, True, True, False),
    ],
)
def test_only_what_may_be_done_again_goes_to_the_next_server(
    error: ServiceError, sent: bool, idempotent: bool, goes_on: bool
) -> None:
    tries = attempts(idempotent=idempotent)
    if goes_on:
        assert tries.wait_s(error, sent=sent, retry_after_s=9.0, elsewhere=True) == 0.0
        assert tries.failed == 0, "a round is one try"
    else:
        with pytest.raises(type(error)):
            tries.wait_s(error, sent=sent, elsewhere=True)


@pytest.mark.parametrize("last", [OFF, FAULT])
def test_a_server_that_was_away_is_asked_again_though_another_cannot(last: ServiceError) -> None:
    """The one that writes restarts: that the others only read says nothing of it."""
    tries = attempts()
    assert tries.wait_s(AWAY, sent=False, elsewhere=True) == 0.0
    assert tries.wait_s(last, sent=True) == 1.0
    assert tries.wait_s(AWAY, sent=False, elsewhere=True) == 0.0
    with pytest.raises(ServerUnreachable):
        tries.wait_s(last, sent=True)


@pytest.mark.parametrize("error", [WRONG, LATE])
def test_what_the_last_server_refuses_is_said_though_another_was_away(error: ServiceError) -> None:
    tries = attempts(retries_max=9)
    assert tries.wait_s(AWAY, sent=False, elsewhere=True) == 0.0
    with pytest.raises(type(error)):
        tries.wait_s(error, sent=True)


def test_what_may_not_be_done_twice_is_not_tried_again_after_the_last_server_either() -> None:
    tries = attempts(idempotent=False, retries_max=9)
    assert tries.wait_s(FULL, sent=True, elsewhere=True) == 0.0
    with pytest.raises(ServerUnreachable):
        tries.wait_s(AWAY, sent=True)


@pytest.mark.parametrize("order", [(FAULT, OFF), (OFF, FAULT)])
def test_what_failed_is_said_though_the_others_only_read(order: tuple[ServiceError, ...]) -> None:
    """Not that they only read: the operator would look for the fault in the wrong server."""
    tries = attempts()
    assert tries.wait_s(order[0], sent=True, elsewhere=True) == 0.0
    with pytest.raises(ServerFault):
        tries.wait_s(order[1], sent=True)


def test_a_new_round_waits_as_long_as_any_server_asked_for() -> None:
    tries = attempts(retries_max=2)
    assert tries.wait_s(FULL, sent=True, retry_after_s=7.0, elsewhere=True) == 0.0
    assert tries.wait_s(AWAY, sent=False) == 7.0
    assert tries.wait_s(AWAY, sent=False) == 2.0


def test_what_all_servers_lack_is_said_after_one_round() -> None:
    tries = attempts()
    assert tries.wait_s(OFF, sent=True, elsewhere=True) == 0.0
    with pytest.raises(FeatureOff):
        tries.wait_s(OFF, sent=True)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "urls", [[], ["http://a", "http://a/"], ["http://a", "ftp://b"], ["http://a", 5], (5,), 5, None]
)
def test_urls_that_cannot_be_asked_are_refused(kind: type[Client | AsyncClient], urls: Any) -> None:
    with pytest.raises(InputError, match="url"):
        kind(urls)


def test_a_password_in_a_url_is_not_shown() -> None:
    for scheme in ("http", "ftp"):
        with pytest.raises(InputError, match="expected no user") as caught:
            Client(f"{scheme}://user:secret@host")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("call", [ready_call(), METRICS])
def test_what_is_about_one_server_is_not_asked_of_several(call: Any) -> None:
    with pytest.raises(InputError, match="about one server, and this client has 3"):
        servers(Clock()).turn(call)
    assert ClientServers(URLS[0], POLICY).turn(call).server.url == URLS[0]
    assert Client(URLS).url == "http://a:1, http://b:1, http://c:1/prefix"
