"""Each guard on its own, both ways round, and the paraphrases that none may refuse."""

from __future__ import annotations

import pint
import pytest

from stoker.kvcache import units
from stoker.kvcache.guards import Guard, first_conflict
from stoker.kvcache.question import fingerprint_of, read_question
from stoker.kvcache.units import unit_of

CONFLICTS = [
    ("How do I delete a topic?", "How do I not delete a topic?", Guard.NEGATION),
    ("Why can't I log in?", "Why can I log in?", Guard.NEGATION),
    ("pods with no limits", "pods and their limits", Guard.NEGATION),
    ("Warum startet der Dienst nicht", "Warum startet der Dienst", Guard.NEGATION),
    ("enable ssl", "disable ssl", Guard.ANTONYM),
    ("is the certificate valid", "is the certificate invalid", Guard.ANTONYM),
    ("first offset of a partition", "newest offset of a partition", Guard.NUMBER),
    ("sort rows in ascending order", "sort rows in descending order", Guard.ANTONYM),
    ("scale to 3 replicas", "scale to 5 replicas", Guard.NUMBER),
    ("wait 60 seconds", "wait 60 minutes", Guard.NUMBER),
    ("limit of 10 MB", "limit of 10 requests", Guard.UNIT),
    ("pay $5 by card", "pay €5 by card", Guard.UNIT),
    ("how to use asyncio.gather", "how to use asyncio.wait", Guard.NAME),
    ("install Kafka on Ubuntu", "install Kafka on Debian", Guard.NAME),
    ("what does max_poll_records do", "what does max_poll_interval_ms do", Guard.NAME),
    ("revenue on 2024-05-01", "revenue on 2024-05-02", Guard.DATE),
    ("what happened in May this year", "what happened in June this year", Guard.DATE),
    ("logs of yesterday", "logs of today", Guard.DATE),
    ("upgrade to v1.2.3", "upgrade to v1.2.4", Guard.VERSION),
    ("changes in 3.11.2", "changes in 3.12.0", Guard.VERSION),
    ("does the dog bite the man", "does the man bite the dog", Guard.WORD_ORDER),
    ("transfer usd from savings", "transfer savings from usd", Guard.WORD_ORDER),
    (
        "Wie lösche ich das Thema und was ist der Grund",
        "How do I delete the topic and what is the reason",
        Guard.LANGUAGE,
    ),
    ("как удалить тему", "how do i delete the topic", Guard.LANGUAGE),
]
PARAPHRASES = [
    ("How do I delete a Kafka topic?", "how do i delete a kafka topic"),
    ("How do I delete a topic?", "How can I remove topics?"),
    ("convert 5 km to miles", "convert 5000 m to miles"),
    ("wait 60 seconds", "wait 1 minute"),
    ("a limit of 10 MB", "a limit of 10,000,000 bytes"),
    ("set it to 10%", "set it to 10 percent"),
    ("pay $5", "pay 5 dollars"),
    ("How many days in one week", "How many days in 1 week"),
    ("I'm not sure why my card was declined", "Why was my card declined?"),
    ("If the broker is down, will the consumer retry polling", "will the consumer retry polling "
     "if the broker is down"),
    ("WHY IS MY CARD DECLINED", "why is my card declined"),
    ("I need a new one for my account", "I need another for my account"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "guard"), CONFLICTS)
def test_guard_speaks_both_ways_round(one: str, other: str, guard: Guard) -> None:
    for asked, earlier in ((one, other), (other, one)):
        conflict = first_conflict(read_question(asked), read_question(earlier))
        assert conflict is not None
        assert conflict.guard is guard, conflict


@pytest.mark.parametrize(("one", "other"), PARAPHRASES)
def test_guards_are_silent_on_paraphrases(one: str, other: str) -> None:
    for asked, earlier in ((one, other), (other, one)):
        assert first_conflict(read_question(asked), read_question(earlier)) is None


@pytest.mark.parametrize("text", [text for pair in CONFLICTS for text in pair[:2]])
def test_no_guard_refuses_a_question_itself(text: str) -> None:
    assert first_conflict(read_question(text), read_question(f"  {text} ")) is None


def test_normal_form_holds_units_in_base_units() -> None:
    assert read_question("Wait  60 Seconds!").normal == read_question("wait 1 minute").normal
    assert read_question("5 km").fingerprint == read_question("5000 m").fingerprint
    assert read_question("5 km").fingerprint != read_question("5 kg").fingerprint


def test_fingerprint_is_the_same_everywhere() -> None:
    assert fingerprint_of("wait 60 second") == 0x9A7D12B0310175F4
    assert fingerprint_of("a") != fingerprint_of("b")
    assert 0 <= fingerprint_of("a") < 2**64


@pytest.mark.parametrize("word", ["", "a", "in", "m**9999", "__import__", "x" * 100, "(", "may"])
def test_words_that_are_no_units(word: str) -> None:
    assert unit_of(word) is None


@pytest.mark.parametrize("word", ["km", "Km", "μm", "°C", "tonnes", "flurb", "Flurb", "rdB", "KWH"])
def test_a_word_is_a_unit_where_pint_says_so(word: str) -> None:
    """What is looked up first decides as pint's own error would."""
    registry = units._registry()

    def known(spelling: str) -> bool:
        try:
            registry.Quantity(1.0, registry.parse_units(spelling)).to_base_units()
        except (pint.PintError, AttributeError):
            return False
        return True

    assert (unit_of(word) is not None) == (known(word) or known(word.casefold()))


def test_a_word_that_is_no_unit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text may hold hundreds after numbers; to parse each takes four times as long."""
    parsed: list[str] = []
    registry = units._registry()
    monkeypatch.setattr(registry, "parse_units", parsed.append)
    read_question(" ".join(f"{number} flurb{chr(97 + number)}" for number in range(9)))
    assert parsed == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "?!",
        "\x00",
        "🙂",
        "a" * 10_000,
        "5/0/1",
        "1,,2 %",
        "9" * 400 + ".5 km",
        "9" * 350 + ".5 million",
        "-" + "9" * 400 + ".25 C",
        "1/0 cup",
    ],
)
def test_any_text_can_be_read(text: str) -> None:
    question = read_question(text)
    assert first_conflict(question, question) is None
    first_conflict(question, read_question("5 km"))  # says what differs, however large
