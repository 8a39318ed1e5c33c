"""Negations: which words deny, and what each of them denies.

"Why doesn't my card work" and "why does my card not work" deny one thing, though the word after the
negation is another: where the verb comes before its subject, all of the clause is looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stoker.kvcache.word_lists import set_of

_CONTRACTED = set_of(
    "cannot cant dont doesnt didnt wont isnt arent wasnt werent havent hasnt hadnt shouldnt "
    "wouldnt couldnt aint"
)
_NEGATIONS = _CONTRACTED | set_of(
    "not no never none nobody nothing neither nor without unable except "
    "nicht nichts kein keine keinen keiner keinem nie niemals ohne ne pas jamais sans aucun aucune "
    "rien sin nunca jamás ningún ninguna nada tampoco senza non nessun nessuno mai niente nao não "
    "sem nem nenhum nenhuma niet geen zonder nooit inte ikke ej utan uden uten aldrig aldri nie "
    "bez nigdy nu fără nem nincs ei ilman değil yok không chưa tidak bukan tanpa jangan не нет "
    "нельзя ни без никогда δεν δε μην όχι χωρίς لا ليس لم لن غير بدون دون לא אין בלי ללא "
    "नहीं मत बिना 不 没 沒 無 无 勿 ない ません なし なく 안 못 않는 없이 없는 ไม่"
)
# What holds for some and not for the rest: as telling as a negation where only one says it.
_RESTRICTIONS = set_of(
    "only solely exclusively merely unless besides instead hardly barely scarcely rarely seldom"
)
# Deeds that are denied: "fails to load", "lack of sleep".
_DENIED_DEEDS = set_of(
    "fail fails failed failing refuse refuses refused refusing lack lacks lacking absence unwilling"
)
AUXILIARIES = set_of(
    "do does did is are was were am can could will would shall should may might must have has had"
)
ASKING = set_of("what which who whom whose when where why how")
_CLAUSES_BEGIN = ASKING | set_of(
    "and but or nor if because while unless although though since until till before after that so "
    "than then instead"
)
_SUBJECTS = set_of("that who which what")
_PAIRS_BEGIN = set_of("between both")  # "between a and b": that "and" begins nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Denial:
    """One negation.

    Attributes:
        word: The content word that follows it; "" at the end of a text.
        also: Other content words that it may be about: of the whole clause where its verb comes
            later ("doesn't the card work"), the verb before a "no" ("shows no data").
        of_clause: It denies what its clause says ("does not work", "never works", "shows no data"),
            rather than a part of it ("without a card", "cash, not cards").
    """

    word: str
    also: frozenset[str]
    of_clause: bool

    def is_like(self, other: Denial) -> bool:
        """Return whether both may deny the same."""
        if self.word == other.word:
            return True
        if not (self.of_clause and other.of_clause):
            return False
        mine, theirs = {self.word, *self.also}, {other.word, *other.also}
        both = self.word in theirs and other.word in mine
        return both or mine <= theirs or theirs <= mine


def is_restriction(bare: str, following: str) -> bool:
    """Return whether a word denies in part or by its meaning: "only", "fails to"."""
    return bare in _RESTRICTIONS or (bare in _DENIED_DEEDS and following in ("to", "of"))


def is_negation(low: str) -> bool:
    """Return whether a word denies, in any of the languages that are known here."""
    return low.replace("'", "") in _NEGATIONS or _is_contracted(low)


def _is_contracted(low: str) -> bool:
    bare = low.replace("'", "")
    return bare in _CONTRACTED or (bare.endswith("nt") and "'" in low)


def denials_of(
    lowered: Sequence[str], places: Sequence[int], words: Sequence[str], counts: Sequence[int]
) -> tuple[Denial, ...]:
    """Say what each negation of a text denies, in time that grows with the text alone.

    Args:
        lowered: The text's tokens, casefolded.
        places: Of the negations, rising.
        words: Its content words.
        counts: How many content words stand before each token; one more at the end.
    """
    found: list[Denial] = []
    begin, end, helped = 0, 0, -1  # of the clause around a place; its last auxiliary so far
    seen = 0
    for place in places:
        for passed in range(seen, place):
            if _begins_clause(lowered, passed):
                begin = passed + 1
            if lowered[passed] in AUXILIARIES:
                helped = passed
        seen = place
        if end <= place:
            end = place + 1
            while end < len(lowered) and not _begins_clause(lowered, end):
                end += 1
        # All of it matters only where it begins with the verb: twice a clause, so that one clause
        # of a thousand negations is not copied a thousand times.
        clause = words[counts[begin] : counts[end]] if place - 1 <= begin else ()
        found.append(_denial_at(lowered, place, begin, words, counts, clause, helped >= begin))
    return tuple(found)


def _denial_at(
    lowered: Sequence[str],
    place: int,
    begin: int,
    words: Sequence[str],
    counts: Sequence[int],
    clause: Sequence[str],
    helped: bool,
) -> Denial:
    governed = words[counts[place]] if counts[place] < len(words) else ""
    low, before = lowered[place], lowered[place - 1] if place else ""
    after = lowered[place + 1] if place + 1 < len(lowered) else ""
    if low == "no":
        # "Shows no data": the verb stands before it; after a preposition there is none.
        is_after_word = place > begin and counts[place] > counts[place - 1]
        verb = {words[counts[place] - 1]} if is_after_word else set()
        return Denial(governed, frozenset(verb), bool(verb))
    verb_at = place if _is_contracted(low) else place - 1
    if not _is_contracted(low) and before not in AUXILIARIES:
        of_clause = low == "never" or (low == "not" and helped and "to" not in (before, after))
        return Denial(governed, frozenset(), of_clause)
    # "Why doesn't the card work"; in "which doesn't work" the subject stands before the verb.
    turned = verb_at == begin and not (begin and lowered[begin - 1] in _SUBJECTS)
    return Denial(governed, frozenset(clause) - {governed} if turned else frozenset(), True)


def _begins_clause(lowered: Sequence[str], place: int) -> bool:
    low = lowered[place]
    if low == "and" and not _PAIRS_BEGIN.isdisjoint(lowered[max(0, place - 4) : place]):
        return False
    return low in _CLAUSES_BEGIN or not any(character.isalnum() for character in low)
