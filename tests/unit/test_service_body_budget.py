"""The bytes that request bodies may take together."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from stoker.service.body_budget import BodyBudget
from stoker.service.problems import BodiesFull


def test_what_arrives_counts_and_what_is_announced_does_not() -> None:
    budget = BodyBudget("write", bytes_max=10)
    slow, other = budget.hold(8), budget.hold(8)
    assert budget.held_bytes == 0
    slow.add(2)
    other.add(8)
    assert budget.held_bytes == 10
    with pytest.raises(BodiesFull):
        slow.add(1)
    other.release()
    other.release()
    assert budget.held_bytes == 2
    slow.add(6)
    slow.release()
    assert budget.held_bytes == 0


def test_what_cannot_fit_is_refused_before_it_is_sent() -> None:
    budget = BodyBudget("write", bytes_max=10)
    budget.hold(10).add(3)
    with pytest.raises(BodiesFull) as caught:
        budget.hold(8)
    assert "3 bytes" in str(caught.value)
    assert "8 more" in str(caught.value)
    assert "service.bodies_bytes_max" in str(caught.value)
    assert caught.value.retriable
    assert budget.held_bytes == 3
    budget.hold(7).add(7)


def test_refusing_is_said_once_until_half_is_free() -> None:
    budget = BodyBudget("search", bytes_max=10)
    first, second = budget.hold(0), budget.hold(0)
    first.add(4)
    second.add(6)

    def refuse() -> None:
        with pytest.raises(BodiesFull):
            budget.hold(9)

    with capture_logs() as lines:
        refuse()
        refuse()
        first.release()
        refuse()
        assert len(lines) == 1
        second.release()
        budget.hold(0).add(5)
        refuse()
    assert [line["event"] for line in lines] == ["service.bodies_refused"] * 2
    assert lines[0]["lane"] == "search"
    assert (lines[0]["held_bytes"], lines[0]["bytes_max"]) == (10, 10)
