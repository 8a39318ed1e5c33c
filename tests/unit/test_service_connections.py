"""How many connections there can be, and what is said where none can be accepted."""

from __future__ import annotations

import errno
import itertools
import resource
from typing import Any

import pytest
from structlog.testing import capture_logs

from stoker.service import connections
from stoker.service.connections import AcceptFaults, age_factor, connections_possible

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "possible", "raised_to"),
    [
        ((4_096, 4_096), 1_000, None),
        ((1_024, 4_096), 1_000, 1_256),
        ((1_024, UNLIMITED), 1_000, 1_256),
        ((1_024, 1_024), 768, 1_024),
        ((256, 300), 44, 300),
        ((100, 100), 16, 100),
        ((UNLIMITED, UNLIMITED), 1_000, None),
    ],
)
def test_as_many_as_the_files_allow(
    limits: tuple[int, int],
    possible: int,
    raised_to: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without files left no page could be read: connections are what can be refused."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: given.append(both))
    with capture_logs() as lines:
        assert connections_possible(1_000) == possible
    assert given == ([] if raised_to is None else [(raised_to, limits[1])])
    lowered = [line["possible"] for line in lines if line["event"].endswith("connections_lowered")]
    assert lowered == ([] if possible == 1_000 else [possible])


class Loop:
    def __init__(self) -> None:
        self.handled: list[dict[str, Any]] = []

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.handled.append(context)


def test_running_out_of_files_is_said_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop tries again each second, with a traceback for each place in its backlog."""
    clock = [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: clock[0])
    loop: Any = Loop()
    faults = AcceptFaults()
    files = OSError(errno.EMFILE, "Too many open files")
    full = {"message": "socket.accept() out of system resource", "exception": files}
    with capture_logs() as lines:
        for clock[0] in (0.0, 0.0, 30.0, 61.0):
            faults(loop, full)
    assert [line["event"] for line in lines] == ["service.connections_unaccepted"] * 2
    assert lines[0]["reason"] == "Too many open files"
    assert loop.handled == []
    others: list[dict[str, Any]] = [
        {"message": "x"},
        {"message": "a task's", "exception": files},
        full | {"exception": OSError(errno.EIO, "x")},
    ]
    for context in others:
        faults(loop, context)
    assert loop.handled == others


@pytest.mark.parametrize("count", [8, 100, 1_000])
def test_connections_made_together_do_not_end_together(count: int) -> None:
    factors = sorted(age_factor(number) for number in range(5_000, 5_000 + count))
    assert 0.9 <= factors[0] <= factors[-1] <= 1.1
    gaps = [after - before for before, after in itertools.pairwise(factors)]
    # Evenly would be 0.2 / count, each.
    assert 0.05 / count < min(gaps) <= max(gaps) < 0.6 / count
