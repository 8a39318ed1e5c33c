"""What a negation denies: one thing in two wordings passes, two things are told apart."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.kvcache.denials import denials_of
from stoker.kvcache.guards import Guard, first_conflict, negation_conflict
from stoker.kvcache.question import read_question

# By kind: the verb before its subject and after it; "no" after a verb; "never"; each auxiliary.
ALIKE = """
why does my card not work|why doesn't my card work
why doesn't X work|why does X not work
why isn't the export working|why is the export not working
why does the csv export not work|why doesn't the csv export function
my notifications don't arrive, why|why don't my notifications arrive
why won't the server start|why will the server not start
why has the refund not arrived yet|why didn't the refund arrive
why can the user not delete files|why can't the user delete files
isn't the store open on sunday|is the store not open on sunday
doesn't this plan include roaming|does this plan not include roaming
why dont my emails arrive|why do my emails not arrive
why does search never find my files|why doesn't search ever find my files
why does the widget not show data|why doesn't the widget show any data
why does the widget show no data|why doesn't the widget show data
why does sync between phone and tv not work|why doesn't sync between phone and tv work
why does my card not work with wifi|why doesn't my card work with the wifi
"""
DIFFERENT = """
why doesn't my card work|why does my card work
why doesn't my card work|why doesn't my card not work
why does it work when not charging|why doesn't it work when charging
does the app work without wifi|does the app not work with wifi
do not delete users with cards|delete users with no cards
is it not possible to delete users|is it possible to not delete users
isn't it possible to delete users|is it possible not to delete users
do not delete the topic but create the partition|do not create the partition but delete the topic
don't delete the topic, create a user|delete the topic, don't create a user
users who do not have a card but have an account|users who have a card but do not have an account
the card that does not work was replaced|the card that works was not replaced
open but not paid invoices|paid but not open invoices
use cash, not a card|use a card, not cash
why don't users who have a card log in|why do users who do not have a card log in
"""


def pairs_of(lines: str) -> list[tuple[str, str]]:
    return [
        (one, other) for one, _, other in (row.partition("|") for row in lines.split("\n")[1:-1])
    ]


@pytest.mark.parametrize(("one", "other"), pairs_of(ALIKE))
def test_one_denial_in_two_wordings_is_not_refused(one: str, other: str) -> None:
    for asked, earlier in ((one, other), (other, one)):
        assert first_conflict(read_question(asked), read_question(earlier)) is None


@pytest.mark.parametrize(("one", "other"), pairs_of(DIFFERENT))
def test_two_denials_are_told_apart(one: str, other: str) -> None:
    for asked, earlier in ((one, other), (other, one)):
        conflict = first_conflict(read_question(asked), read_question(earlier))
        assert conflict is not None
        assert conflict.guard is Guard.NEGATION, conflict


@pytest.mark.parametrize("text", ["not", "no", "don't", "isn't and", "why not", "and no no", "n't"])
def test_a_negation_of_nothing_is_read(text: str) -> None:
    question = read_question(text)
    assert question.negations
    assert {denial.word for denial in question.negations} == {""}
    assert first_conflict(question, read_question(f" {text}")) is None


def test_long_texts_that_deny_the_same_in_the_same_order_are_not_refused() -> None:
    """Of sixty denials each is looked for among the nearest: where it stands, not further on."""
    denied = [f"never w{number}." for number in range(60)]
    one, other = read_question(" ".join(denied)), read_question(" ".join(["please", *denied]))
    assert negation_conflict(one, other) is None
    assert negation_conflict(other, one) is None
    # Where the first twenty are others, the rest are still found.
    changed = read_question(" ".join([f"never v{number}." for number in range(20)] + denied[20:]))
    assert negation_conflict(one, changed) is None
    moved = read_question(" ".join(reversed(denied)))
    assert negation_conflict(one, moved) is not None


def test_one_clause_of_many_negations_is_not_copied_for_each() -> None:
    class Counted(list[str]):
        copied = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            if isinstance(at, slice):
                self.copied += len(found)
            return found

    count = 400
    lowered = ["do", *(word for number in range(count) for word in ("not", f"w{number}"))]
    words = Counted(f"w{number}" for number in range(count))
    counts = [0, *(half for number in range(count) for half in (number, number)), count]
    found = denials_of(lowered, range(1, 2 * count, 2), words, counts)
    assert [denial.word for denial in found] == list(words)
    assert len(found[0].also) == count - 1
    assert words.copied <= 2 * count
