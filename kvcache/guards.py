"""Guards: what makes two near-identical questions ask for different things.

Each guard is one small function over two questions' facts and can be tested alone. A guard that
speaks refuses the reuse; it never allows one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from stoker.kvcache.amounts import amount_text
from stoker.kvcache.denials import Denial
from stoker.kvcache.opposites import denial_of, loose_of, opposites_of, turned_of
from stoker.kvcache.question import ACRONYMS, COMPARISONS, ORDINAL, STOPWORDS, Question, stem_of


class Guard(enum.StrEnum):
    """Who refused a reuse; the values are the closed label set of logs and metrics."""

    DISABLED = "disabled"
    EMPTY = "empty"
    NO_CANDIDATE = "no_candidate"
    FENCE = "fence"
    FEWER_RESULTS = "fewer_results"
    SIMILARITY = "similarity"
    LANGUAGE = "language"
    NEGATION = "negation"
    ANTONYM = "antonym"
    NUMBER = "number"
    UNIT = "unit"
    NAME = "name"
    DATE = "date"
    VERSION = "version"
    WORD_ORDER = "word_order"
    EVIDENCE = "evidence"


_DENIALS_MAX = 16
_READINGS_MAX = 32

OPPOSITES = opposites_of(stem_of)
_LOOSE = loose_of(stem_of)
# "From Rome" is not "to Rome", and a book by someone not one about them.
_OTHER_PLACES = (("from", "to"), ("to", "from"), ("by", "about"), ("about", "by"))
# Nobody chooses between these: "by mistake" is "by accident".
_UNMEANT = frozenset(map(stem_of, ("mistake", "accident", "error", "chance")))


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """One guard's reason: what the new question has, and what the earlier one has."""

    guard: Guard
    asked: str
    earlier: str


def language_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where both languages are known and differ; too short to tell is no conflict."""
    if asked.language and earlier.language and asked.language != earlier.language:
        return Conflict(Guard.LANGUAGE, asked.language, earlier.language)
    return None


def _wording_is_close(asked: Question, earlier: Question) -> bool:
    """Return whether half of all content words are shared: a missing word then says something."""
    one, other = set(asked.words), set(earlier.words)
    return 2 * len(one & other) >= len(one | other)


def negation_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where one denies what the other says.

    That is: a negation that only one has governs a word that both have, or the wording is close.
    "Does not work" and "is broken" are no conflict: what is denied is not said by the other.
    """
    if len(asked.negations) != len(earlier.negations):
        more, less = sorted((asked, earlier), key=lambda q: -len(q.negations))
        extra = {one.word for one in more.negations} - {one.word for one in less.negations}
        denied = {word for word in extra if word and word in less.word_set}
        if denied or _wording_is_close(asked, earlier):
            return Conflict(Guard.NEGATION, _denied_text(asked), _denied_text(earlier))
        return None
    unlike: list[Denial] = []
    others = list(earlier.negations)
    for one in asked.negations:
        # Long texts deny a hundred things: each then looks among the nearest. Those taken are gone
        # from ``others``, so that the next in order stands behind as many as nothing was like.
        start = max(0, len(unlike) - _DENIALS_MAX)
        near = range(start, min(start + 2 * _DENIALS_MAX, len(others)))
        like = next((at for at in near if one.is_like(others[at])), None)
        if like is None:
            unlike.append(one)
        else:
            del others[like]
    for one, other in zip(unlike, others, strict=True):
        if one.word in earlier.word_set and other.word in asked.word_set:
            return Conflict(Guard.NEGATION, one.word, other.word)
    return None


def _denied_text(question: Question) -> str:
    return " ".join(denial.word for denial in question.negations)


def antonym_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where one says a word and the other what cannot be meant with it.

    Its opposite ("enable", "disable"), another of its class ("north", "west"; "he", "she"), or
    itself with another prefix ("valid", "invalid"; "prewar", "postwar"). Where all else is the
    same, also what it goes by: "sort by date", "sort by name".
    """
    gone_by = _gone_by_others(asked, earlier)
    if gone_by is not None:
        return gone_by
    only_asked = set(asked.stems - earlier.stems)
    only_earlier = set(earlier.stems - asked.stems)
    # "in" and "out" stand in any two long texts; they are opposites where the rest is the same.
    alike = 4 * len(set(asked.words) & set(earlier.words)) >= 3 * (
        max(len(set(asked.words)), len(set(earlier.words))) - 1
    )
    for word in sorted(only_asked):
        opposites = OPPOSITES.get(word, frozenset()) & only_earlier
        if not alike:
            opposites = frozenset() if word in _LOOSE else opposites - _LOOSE
        other = min(opposites, default="") or denial_of(word, only_earlier)
        other = other or turned_of(word, only_earlier)
        if other:
            return Conflict(Guard.ANTONYM, word, other)
    return None


def _gone_by_others(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where only what it goes by differs, in all of its words.

    Of other prepositions' objects this is not held: "with a cheque" and "with a check", "to your
    funds" and "to your money" are the same as often as not.
    """
    one, other = set(asked.words) - set(earlier.words), set(earlier.words) - set(asked.words)
    if not one or not other or (asked.goes_by | earlier.goes_by) <= _UNMEANT:
        return None
    if one == asked.goes_by and other == earlier.goes_by:
        return Conflict(
            Guard.ANTONYM, "by " + " ".join(sorted(one)), "by " + " ".join(sorted(other))
        )
    return None


def number_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where the amounts differ once both are in base units (5 km is 5000 m).

    An ordinal that only one has ("my first card") counts where the wording is close. A unit of
    several meanings is what the other question makes of it: 6 pounds are 6 lbs, and are £6.
    """
    amounts = [[pair for pair in q.amounts if pair[1] != ORDINAL] for q in (asked, earlier)]
    if amounts[0] == amounts[1]:
        ordinals = [
            [value for value, unit in q.amounts if unit == ORDINAL] for q in (asked, earlier)
        ]
        either = ordinals[0] != ordinals[1] and (all(ordinals) or _wording_is_close(asked, earlier))
        if either:
            return Conflict(Guard.NUMBER, _amounts_text(asked), _amounts_text(earlier))
        return None
    if _may_be_the_same(asked, earlier):
        return None
    values = [Counter(value for value, _ in q) for q in amounts]
    units = [Counter(unit for _, unit in q) for q in amounts]
    guard = Guard.UNIT if values[0] == values[1] or units[0] != units[1] else Guard.NUMBER
    if len(amounts[0]) != len(amounts[1]):
        guard = Guard.NUMBER
    return Conflict(guard, _amounts_text(asked), _amounts_text(earlier))


def _may_be_the_same(asked: Question, earlier: Question) -> bool:
    """Return whether each amount has one of its own in the other that it may stand for."""
    one, other = Counter(asked.readings), Counter(earlier.readings)
    if one.total() != other.total():
        return False
    # What is the same as it stands is taken first. Of the rest each takes what fits, if anything.
    rest, others = list((one - other).elements()), list((other - one).elements())
    if len(rest) > _READINGS_MAX:
        return False
    for found in rest:
        fitting = next((there for there in others if not set(there).isdisjoint(found)), None)
        if fitting is None:
            return False
        others.remove(fitting)
    return True


def _amounts_text(question: Question) -> str:
    return ", ".join(amount_text(value, unit) for value, unit in question.amounts)


def date_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where dates, months, weekdays or relative days differ."""
    if asked.dates == earlier.dates:
        return None
    return Conflict(Guard.DATE, ", ".join(asked.dates), ", ".join(earlier.dates))


def version_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where version numbers differ."""
    if asked.versions == earlier.versions:
        return None
    return Conflict(Guard.VERSION, ", ".join(asked.versions), ", ".join(earlier.versions))


def _not_mentioned(names: frozenset[str], question: Question) -> set[str]:
    return {
        name
        for name in names
        if name not in question.word_set
        and stem_of(name) not in question.word_set
        and name.replace("-", "") not in question.word_set
    } | {
        name
        for name in names & ACRONYMS
        if name not in question.names and f"the {name}" not in question.normal
    }


def name_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where one names something that the other does not mention in any case.

    Operators and pictures are names of a kind: a comparison that only one has, or other signs.
    """
    if asked.symbols != earlier.symbols:
        compared = (COMPARISONS | {"^"}) & (set(asked.symbols) ^ set(earlier.symbols))
        if compared or (asked.symbols and earlier.symbols):
            return Conflict(Guard.NAME, " ".join(asked.symbols), " ".join(earlier.symbols))
    missing_earlier = _not_mentioned(asked.names, earlier)
    missing_asked = _not_mentioned(earlier.names, asked)
    if missing_earlier or missing_asked:
        return Conflict(
            Guard.NAME, ", ".join(sorted(missing_earlier)), ", ".join(sorted(missing_asked))
        )
    return None


def word_order_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Refuse where the same words stand in another order, or swap their prepositions.

    "Transfer from A to B" and "from B to A" have one embedding and two answers; so have "who
    killed A" and "who was killed by A".
    """
    roles_asked, roles_earlier = dict(asked.roles), dict(earlier.roles)
    for role in roles_asked.keys() & roles_earlier.keys():
        one, other = roles_asked[role], roles_earlier[role]
        if one != other and one in earlier.words and other in asked.words:
            return Conflict(Guard.WORD_ORDER, f"{role} {one}", f"{role} {other}")
    for one, other in _OTHER_PLACES:
        word = roles_asked.get(one)
        if word and word == roles_earlier.get(other) and roles_asked.get(other) != word:
            return Conflict(Guard.WORD_ORDER, f"{one} {word}", f"{other} {word}")
    # Where "daily" stands says nothing, and dates have a guard of their own.
    shared = (set(asked.words) & set(earlier.words)) - set(asked.dates)
    if len(shared) < 2:
        return None
    order_asked = [word for word in dict.fromkeys(asked.words) if word in shared]
    order_earlier = [word for word in dict.fromkeys(earlier.words) if word in shared]
    covers = 4 * len(shared) >= 3 * max(
        len(set(asked.words) - set(asked.dates)), len(set(earlier.words) - set(earlier.dates))
    )
    if covers and order_asked == order_earlier and asked.done_by != earlier.done_by:
        one, other = asked.done_by, earlier.done_by
        if "by" not in roles_earlier if one else "by" not in roles_asked:
            return Conflict(Guard.WORD_ORDER, f"by {one}", f"by {other}")
    if covers and order_asked != order_earlier and not _is_turned(order_asked, order_earlier):
        return Conflict(Guard.WORD_ORDER, " ".join(order_asked), " ".join(order_earlier))
    return None


def _is_turned(one: list[str], other: list[str]) -> bool:
    """Return whether two clauses changed places: "if A, B" and "B, if A" ask the same."""
    if len(one) < 3 or set(one) != set(other):
        return False
    start = other.index(one[0])
    return other[start:] + other[:start] == one


# The order is that of the report: the first to speak is named. Cheap ones first.
GUARDS = (
    language_conflict,
    negation_conflict,
    version_conflict,
    date_conflict,
    number_conflict,
    name_conflict,
    antonym_conflict,
    word_order_conflict,
)


def first_conflict(asked: Question, earlier: Question) -> Conflict | None:
    """Return the first guard's objection to answering ``asked`` with ``earlier``'s result."""
    if asked.text.strip() == earlier.text.strip():
        return None
    for guard in GUARDS:
        conflict = guard(asked, earlier)
        if conflict is not None:
            return conflict
    return None


def differing_words(asked: Question, earlier: Question) -> tuple[set[str], set[str]]:
    """Return the content words that only ``asked`` has, and those that only ``earlier`` has."""
    one, other = set(asked.words) - STOPWORDS, set(earlier.words) - STOPWORDS
    return one - other, other - one
