"""Worth: recency, with a credit for every doubling of uses, in bounded memory."""

from __future__ import annotations

import pytest

from stoker.errors import InputError
from stoker.kvcache.worth import KINDS_MAX, Worth


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


def test_of_what_was_used_once_the_kind_that_seldom_comes_again_goes_first() -> None:
    worth = Worth(credit=10)
    for number in range(40):
        worth.use(("passage", number), kind="passage")
        worth.use(("passage", number), kind="passage")
        worth.use(("turn", number), kind="turn")
    worth.use("passage", kind="passage")
    worth.use("turn", kind="turn")
    assert worth.of("passage") > worth.of("turn"), "though it was used before it"
    worth.use("turn")
    worth.use("passage", kind="turn")  # a key keeps its first kind
    assert worth.of("turn") == worth.of("passage") - 1, "twice is twice, whatever the kind"


def test_one_kind_alone_changes_nothing() -> None:
    plain, named = Worth(credit=10), Worth(credit=10)
    for number in (1, 2, 3, 1, 4, 1, 2, 5):
        plain.use(number)
        named.use(number, kind="passage")
    assert [plain.of(n) for n in range(6)] == [named.of(n) for n in range(6)]


def test_kinds_without_end_are_counted_as_one() -> None:
    worth = Worth()
    for number in range(1_000):
        worth.use(number, kind=f"kind{number}")
    assert len(worth._kinds) <= KINDS_MAX + 1


def test_what_is_expected_outweighs_as_many_uses_and_only_until_told_otherwise() -> None:
    worth = Worth(credit=10)
    worth.use("expected")
    for number in range(15):
        worth.use(number)
    assert worth.of("expected") < worth.of(0)
    worth.predict({"expected": 3.0, "new": 1.0})
    assert worth.of("expected") == pytest.approx(1 + 2 * 10)
    assert worth.of("new") == 10.0, "never used, and expected"
    worth.predict({})
    assert worth.of("expected") < worth.of(0)


def test_asking_in_vain_and_then_keeping_is_one_use() -> None:
    worth = Worth(credit=10)
    worth.use("asked")
    worth.meet("asked")
    worth.meet("kept")
    assert worth.of("asked") == 1.0
    assert worth.of("kept") == 2.0
