"""Worth: recency, with a credit for every doubling of uses, in bounded memory."""

from __future__ import annotations

import pytest

from stoker.errors import InputError
from stoker.kvcache.worth import Worth


def test_equal_uses_are_ordered_by_recency() -> None:
    worth = Worth(credit=10)
    for key in "abc":
        worth.use(key)
    assert worth.of("a") < worth.of("b") < worth.of("c")
    assert worth.of("never") == 0.0


def test_a_doubling_outweighs_as_many_other_uses_as_the_credit() -> None:
    worth = Worth(credit=10)
    worth.use("twice")
    worth.use("twice")
    for number in range(9):
        worth.use(number)
    assert worth.of("twice") > worth.of(8)
    for number in range(9, 12):
        worth.use(number)
    assert worth.of("twice") < worth.of(11)


def test_what_was_used_longest_ago_is_forgotten() -> None:
    worth = Worth(remembered_max=3)
    for number in range(10):
        worth.use("kept")
        worth.use(number)
    assert worth.of("kept") > 0
    assert worth.of(0) == 0.0
    assert worth.of(9) > 0


def test_senseless_bounds_are_refused() -> None:
    with pytest.raises(InputError):
        Worth(credit=-1)
    with pytest.raises(InputError):
        Worth(remembered_max=0)
