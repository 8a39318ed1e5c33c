"""What a question says, as facts that can be compared: the input of every reuse guard.

Embeddings place "delete the topic" and "do not delete the topic" side by side; the facts taken
here are the ones that embeddings blur: negation, quantities, names, dates, order, language.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import unicodedata
from fractions import Fraction

from stoker.kvcache.amounts import (
    DATE_TOKEN,
    DIGITS_MAX,
    MONTHS,
    ORDINAL_TOKEN,
    ORDINALS,
    WEEKDAYS,
    amount_text,
    spelled_plainly,
)
from stoker.kvcache.denials import (
    ASKING,
    AUXILIARIES,
    Denial,
    denials_of,
    is_negation,
    is_restriction,
)
from stoker.kvcache.language import language_of
from stoker.kvcache.units import plain_word, readings_of, rounded, unit_of
from stoker.kvcache.word_lists import set_of

# Words that carry no topic. Kept small: a word missing here only makes a guard stricter.
STOPWORDS = set_of(
    "a an the this that these those it its is are was were be been being am do does did done "
    "have has had i me my mine we us our you your he she they them their of to in on at by for "
    "with from into onto as and or but if then so than too very can could shall should will "
    "would may might must please just there here what which who whom whose when where why how "
    "about any some all get got make made use using used want need way like also tell know "
    "hi hello hey thanks thank help s t re ve ll d m im ive id"
)
# "first" and its like are orders, not amounts: kept apart so that "the 2nd" is not "2".
ORDINAL = "ordinal"
_WEEKDAYS = frozenset(WEEKDAYS)
_RELATIVE_DAYS = set_of("today yesterday tomorrow tonight weekend weekday")
# A letter's marks belong to its word: Indic vowels, Thai tones, Arabic points.
_LETTER = r"[\w\u0300-\u036f\u064b-\u065f\u0900-\u0dff\u0e31-\u0e4e]"
_TOKEN = re.compile(
    r"https?://\S+|[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+"  # addresses: 64 is what RFC 5321 allows
    r"|\d{1,2}(?::\d{2})?\s?(?:[aApP]\.[mM]\.|[aApP][mM]\b)|\d{1,2}:\d{2}(?![\d:])"  # times
    r"|\d{1,4}[-/.]\d{1,2}[-/.]\d{2,4}(?!\d)"  # dates
    r"|v?\d+(?:\.\d+){2,}\w*|v\d+(?:\.\d+)*\w*"  # versions
    r"|(?:(?<![^\s(])[-−])?[$€£¥₹]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:%|[a-zA-Zµ°]+\b)?"  # amounts, a unit
    r"|--?[a-zA-Z][\w-]*"  # flags
    r"|星期[一二三四五六日天]|周[一二三四五六日]|[月火水木金土日]曜日?"  # days
    r"|ません|ない|なし|なく|[\u3040-\u309f\u3400-\u9fff]|[\u30a0-\u30ff]+"  # no spaces there
    rf"|[^\W\d_]{_LETTER}*(?:(?:[.:/\-+]+|::|->)[\w]+)*(?:\(\)|\+\+|#)?(?:['’][^\W\d_]+)?"
    r"|[$€£%]|[<>!=]=|<>|\S",
)
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u9fff]+)")
_AMOUNT = re.compile(r"^([-−]?)([$€£¥₹]?)(\d[\d,]*(?:\.\d+)?)(%|[a-zA-Zµ°]*)$")
_DATE = re.compile(r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{2,4}$")
_VERSION = re.compile(r"^v\d+(?:\.\d+)*\w*$|^v?\d+(?:\.\d+){2,}\w*$", re.IGNORECASE)
_DECADE = re.compile(r"^\d{3}0s$")
_IDENTIFIER = re.compile(
    r"[_@#]|::|->|\(\)$|\+\+$|[a-z][A-Z]|[A-Za-z]\d|\d[A-Za-z]|[A-Za-z][./][A-Za-z]|^--?[a-zA-Z]"
    r"|[A-Za-z]-\d"
)
_ABBREVIATED = re.compile(r"^(?:[A-Za-z]\.)+[A-Za-z]\b")
# Letters that stand for themselves ("vitamin c", "plan b"); the others are words somewhere.
_LETTERS_ALONE = frozenset("bcfghjklpqvx")
# Of those, what may stand for itself by its place ("vitamin a", "replace a with b"). What is left
# of contractions ("what s"), of chat ("r u"), or joins words in other languages does not.
_LETTERS_PLACED = frozenset("adeiwz")
_AFTER_THINGS = set_of(
    "with by to from for into in on at of and or nor than then is are as if vs versus minus plus "
    "times over under between"
)
# In capitals these are names, in lower case mostly not.
ACRONYMS = frozenset(("us", "it", "who"))
_POWER = re.compile("(?<=\\w)([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)")
COMPARISONS = frozenset(("<", ">", "=", "≤", "≥", "≠", "<=", ">=", "==", "!=", "<>"))
_OPERATORS = COMPARISONS | frozenset("+-*/^~±×÷")
_SPACE = re.compile(r"\s+")
_BEING = set_of("is are was were be been being get got gets")
_ROLE_WORDS = set_of("from to into onto than before after by over under between via about")


Amount = tuple[Fraction, str]  # in the base unit, and that


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """The comparable facts of one question.

    Attributes:
        text: As asked.
        normal: Casefolded, NFKC, single spaces, amounts in base units, end punctuation dropped.
        fingerprint: 64-bit BLAKE2b of ``normal``; equal texts have it equal, never the other way.
        words: Content words in order, casefolded, plural endings dropped.
        word_set: The same as a set, with every token casefolded: for "is it mentioned at all".
        stems: ``word_set`` without common endings.
        negations: Each negation with what it denies, in order.
        amounts: (value in base unit, unit), sorted.
        readings: What each of ``amounts`` may stand for as well, itself first: pounds are money or
            a weight.
        dates: Dates, months, weekdays, relative days, sorted.
        versions: Version numbers, sorted; decimals without a unit, too: 3.1 is not 3.10.
        names: Names and identifiers, casefolded.
        symbols: Operators and pictures ("<", "+", a smile), in order.
        roles: Preposition -> content word that follows it: who to whom, from where to where.
        goes_by: What it goes by: a criterion, a means, who did it ("sort by date", "pay by card").
        done_by: Who did it, where a passive says so ("was killed by Booth"); empty elsewhere.
        asks: The first question word ("how", "when"); empty where there is none.
        language: Guessed language or script; empty when the text is too short to say.
    """

    text: str
    normal: str
    fingerprint: int
    words: tuple[str, ...]
    word_set: frozenset[str]
    stems: frozenset[str]
    negations: tuple[Denial, ...]
    amounts: tuple[Amount, ...]
    readings: tuple[tuple[Amount, ...], ...]
    dates: tuple[str, ...]
    versions: tuple[str, ...]
    names: frozenset[str]
    symbols: tuple[str, ...]
    roles: tuple[tuple[str, str], ...]
    goes_by: frozenset[str]
    done_by: str
    asks: str
    language: str


def encoded(text: str) -> bytes:
    """Return a text as bytes, also where half of a surrogate pair is left of a character."""
    return text.encode(errors="surrogatepass")


def fingerprint_of(normal: str) -> int:
    """Hash a normalised text to 64 bits, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(encoded(normal), digest_size=8).digest(), "little")


def stem_of(word: str) -> str:
    """Drop the commonest English endings, so that "topics" is "topic" and "deleting" "delet"."""
    if word.endswith("'s") or word.endswith("’s"):
        word = word[:-2]
    for ending, rest_min in (("ies", 3), ("ing", 4), ("ed", 4), ("es", 4), ("s", 3), ("e", 4)):
        if word.endswith(ending) and len(word) - len(ending) >= rest_min:
            if ending == "s" and word.endswith("ss"):
                return word
            root = word[: -len(ending)]
            if ending == "ies":
                return root + "y"
            if ending in ("ing", "ed") and len(root) > 3 and root[-1] == root[-2] != "l":
                root = root[:-1]
            return root
    return word


def _is_unit(word: str) -> bool:
    return (len(word) == 1 or word.casefold() not in STOPWORDS) and unit_of(word) is not None


def _amounts_of(sign: str, digits: str, unit_word: str, *, minus: bool) -> tuple[Amount, ...]:
    """Return what a number and a unit may stand for, the likeliest first; () for neither."""
    if len(digits) > DIGITS_MAX:
        return ()
    value = Fraction(digits.replace(",", "")) * (-1 if minus else 1)
    word = sign or unit_word
    if not word:
        return ((value, ""),)
    return tuple(
        (rounded(value * factor + offset), name) for name, factor, offset in readings_of(word)
    )


def _date_of(token: str) -> str:
    parts = [int(part) for part in re.split(r"[-/.]", token)]
    return "-".join(str(part) for part in (parts if parts[0] > 31 else reversed(parts)))


def _is_idiom(low: str, *, before: str, after: str) -> bool:
    """Return whether a negation is about the asker's own doubt ("I don't know why ...")."""
    if after in ("sure", "idea", "clue"):
        return True
    return after in ("know", "understand") and (before in ("i", "we") or low == "cannot")


def _is_name(token: str, *, starts_sentence: bool, all_capitals: bool) -> bool:
    if _IDENTIFIER.search(token) or token in _LETTERS_ALONE:
        return True
    if all_capitals:
        return False  # someone shouts: capitals say nothing
    if len(token) > 1 and token.isupper() and token.isalpha():
        return True
    return token[:1].isupper() and not starts_sentence


def _is_letter(lowered: list[str], place: int, *, among_letters: bool) -> bool:
    """Return whether a lone letter that is a word elsewhere stands for itself, by its place.

    What follows an article is a thing; what follows "a" in "replace a with b" is not.
    """
    low = lowered[place]
    if low not in _LETTERS_PLACED:
        return False
    before = lowered[place - 1] if place else ""
    after = lowered[place + 1] if place + 1 < len(lowered) else ""
    ends_thing = not after.isalnum() or after in _AFTER_THINGS
    if low == "a":  # "is a smaller than b"
        return ends_thing or (among_letters and before in AUXILIARIES)
    if low == "i":  # "can i with this card"
        return ends_thing and among_letters
    if not before or before in STOPWORDS:  # "i d like"
        return False
    return ends_thing or low != "w"  # "vitamin d deficiency"; "pizza w cheese"


def _name_of(token: str, low: str) -> str:
    """Return a name as it is compared: a short flag keeps its case, "U.S." has no points."""
    if len(token) == 2 and token[0] == "-":
        return token
    return low.replace(".", "") if _ABBREVIATED.match(token) else low.removesuffix("'s")


def _done_by(lowered: list[str], roles: dict[str, str]) -> str:
    """Return whom a passive names: a form of "to be", a participle, "by"."""
    if "by" not in roles:
        return ""
    place = lowered.index("by")
    deed = lowered[place - 1] if place else ""
    told = deed.endswith(
        ("ed", "en", "wn", "ght", "ade", "uilt", "ent", "ung", "ound", "eft", "id")
    )
    return roles["by"] if told and _BEING & set(lowered[max(0, place - 5) : place]) else ""


class _Reader:
    """Goes once through a question's tokens, and keeps the facts that they say.

    Plain words are most of a text, so they are tried against as little as possible.
    """

    def __init__(self, text: str) -> None:
        if not text.isascii():
            text = _POWER.sub(r"^\1", text)  # else "5²" would be "52"
        plain = unicodedata.normalize("NFKC", text).replace("’", "'").strip()
        if not plain.isascii():
            plain = _UNSPACED.sub(r" \1 ", plain)
        letters = [character for character in plain if character.isalpha()]
        self._text = text
        self._plain = plain
        self._tokens = spelled_plainly(_TOKEN.findall(plain))
        self._lowered = [token.casefold() for token in self._tokens]
        self._among_letters = not _LETTERS_ALONE.isdisjoint(self._lowered)
        self._all_capitals = len(letters) > 3 and all(map(str.isupper, letters))
        # Where the walk through the tokens stands.
        self._starts_sentence = True
        self._by_open = False
        self._role_open: str | None = None
        self._units_at: set[int] = set()  # tokens that were taken together with the one before
        # What was said so far.
        self._normal: list[str] = []
        self._words: list[str] = []
        self._negations: list[int] = []
        self._amounts: list[tuple[Amount, ...]] = []
        self._dates: list[str] = []
        self._versions: list[str] = []
        self._names: set[str] = set()
        self._symbols: list[str] = []
        self._roles: list[tuple[str, str]] = []
        self._goes_by: list[str] = []

    def read(self) -> Question:
        """Go through all tokens; call it once."""
        lowered = self._lowered
        words_before: list[int] = []  # content words in front of each token, and of the end
        for position, token in enumerate(self._tokens):
            words_before.append(len(self._words))
            if position in self._units_at:
                continue
            if token.isalnum() or token in "$€£%" or any(map(str.isalnum, token)):
                self._read_word(position)
            else:
                self._read_sign(position)
        words_before.append(len(self._words))
        normal = _SPACE.sub(" ", " ".join(self._normal))
        word_set = self._word_set()
        return Question(
            text=self._text,
            normal=normal,
            fingerprint=fingerprint_of(normal),
            words=tuple(self._words),
            word_set=word_set,
            stems=frozenset(map(stem_of, word_set)),
            negations=denials_of(lowered, self._negations, self._words, words_before),
            amounts=tuple(found[0] for found in sorted(self._amounts)),
            readings=tuple(sorted(self._amounts)),
            dates=tuple(sorted(self._dates)),
            versions=tuple(sorted(self._versions)),
            names=frozenset(self._names),
            symbols=tuple(self._symbols),
            roles=tuple(self._roles),
            goes_by=frozenset(self._goes_by),
            done_by=_done_by(lowered, dict(self._roles)),
            asks=next((word for word in lowered if word in ASKING), ""),
            language=language_of(self._plain, lowered),
        )

    def _word_set(self) -> frozenset[str]:
        """Everything that is mentioned at all; of what a hyphen joins, the parts and the whole."""
        said = {low for place, low in enumerate(self._lowered) if place not in self._units_at}
        for low in [low for low in said if "-" in low]:
            said.update(low.split("-"))
            said.add(low.replace("-", ""))
        return frozenset(said) | frozenset(self._words) | self._names

    def _following(self, position: int) -> str:
        return self._tokens[position + 1] if position + 1 < len(self._tokens) else ""

    def _read_sign(self, position: int) -> None:
        """Take punctuation, or an operator, or a picture."""
        token = self._tokens[position]
        self._starts_sentence = self._starts_sentence or token in ".?!:"
        self._by_open = False
        # Between two things: a sign at the end is punctuation.
        if position + 1 == len(self._tokens) and token in _OPERATORS:
            return
        if token in _OPERATORS or unicodedata.category(token[0]) in ("Sm", "So"):
            self._symbols.append(token)

    def _read_word(self, position: int) -> None:
        """Take a word or a figure: what it states, and its part in the sentence."""
        token, low = self._tokens[position], self._lowered[position]
        content = "" if token.isalpha() else self._figure(position)
        if not content and low in ORDINALS:
            self._amounts.append(((Fraction(ORDINALS[low]), ORDINAL),))
            content = f"{ORDINALS[low]}th"
        if not content and self._negation(position):
            self._starts_sentence = False
            return
        content = content or self._day(token, low)
        letter = not content and _is_letter(
            self._lowered, position, among_letters=self._among_letters
        )
        if letter:
            self._names.add(low)
        if not content:
            content = low
            if low.partition("'")[0] not in STOPWORDS and _is_name(
                token, starts_sentence=self._starts_sentence, all_capitals=self._all_capitals
            ):
                self._names.add(_name_of(token, low))
            elif low in ACRONYMS and token.isupper() and not self._all_capitals:
                self._names.add(low)
        self._normal.append(content)
        self._starts_sentence = False
        if low in _ROLE_WORDS:
            self._role_open = low
        if low in _AFTER_THINGS:
            self._by_open = low == "by"
        contraction = "'" in low and low.partition("'")[0] in STOPWORDS
        if letter or (low not in STOPWORDS and low not in _ROLE_WORDS and not contraction):
            self._add_content_word(content, low)

    def _add_content_word(self, content: str, low: str) -> None:
        word = content if content != low else stem_of(low)
        self._words.append(word)
        if self._by_open and content == low:  # dates and amounts have guards of their own
            self._goes_by.append(word)
        if self._role_open is not None:
            self._roles.append((self._role_open, word))
            self._role_open = None

    def _figure(self, position: int) -> str:
        """Take a token with digits or signs in it; returns how it is compared, or ""."""
        token, low = self._tokens[position], self._lowered[position]
        if _DATE.match(token):
            self._dates.append(_date_of(token))
            return self._dates[-1]
        if DATE_TOKEN.match(token) or _DECADE.match(token):
            self._dates.append(token)
            return token
        if _VERSION.match(token):
            self._versions.append(low.removeprefix("v"))
            return self._versions[-1]
        if ordinal := ORDINAL_TOKEN.match(low):
            self._amounts.append(((Fraction(ordinal[1]), ORDINAL),))
            return low
        if match := _AMOUNT.match(token):
            return self._amount(position, *match.groups())
        return ""

    def _amount(self, position: int, minus: str, sign: str, digits: str, attached: str) -> str:
        """Take a number, with the unit that follows it; returns how it is compared."""
        following = self._following(position)
        if not sign and not attached and following.isalpha() and _is_unit(following):
            attached = following
            self._units_at.add(position + 1)
        elif not sign and not attached and following in ("%", "$", "€", "£"):
            sign = following
            self._units_at.add(position + 1)
        if "." in digits and not sign and not attached:  # 3.1 is not 3.10
            self._versions.append(minus + digits)
            return self._versions[-1]
        found = _amounts_of(sign, digits, attached, minus=bool(minus))
        if not found:
            low = self._lowered[position]
            self._names.add(low)  # "2x", or too long: an identifier
            return low
        self._amounts.append(found)
        if unchosen := plain_word(sign or attached):  # "6 pounds" are not yet money
            value = Fraction(digits.replace(",", ""))
            return amount_text(-value if minus else value, unchosen)
        return amount_text(*found[0])

    def _negation(self, position: int) -> bool:
        """Take a word that denies or restricts; returns whether it is one."""
        low, after = self._lowered[position], self._following(position).casefold()
        restricts = is_restriction(low.replace("'", ""), after)
        if not restricts and not is_negation(low):
            return False
        self._normal.append(low if restricts else "not")
        before = self._lowered[position - 1] if position else ""
        asks_either = before == after and len(before) == 1  # "能不能": can one
        if not asks_either and not _is_idiom(low, before=before, after=after):
            self._negations.append(position)
        return True

    def _day(self, token: str, low: str) -> str:
        """Take a day or a month by its name; returns how it is compared, or ""."""
        day = low.removesuffix("'s")
        if day in _RELATIVE_DAYS or day.removesuffix("s") in _WEEKDAYS:
            self._dates.append(day.removesuffix("s") if day.endswith("days") else day)
            return self._dates[-1]
        # "may" is rarely the month.
        shows_month = token == "May" and not self._starts_sentence and not self._all_capitals
        if (low in MONTHS and low != "may") or shows_month:
            self._dates.append(f"m{MONTHS[low]}")
            return low
        return ""


def read_question(text: str) -> Question:
    """Take the facts out of a question.

    Pure, about 100 µs for ten words. Not cached: one tenant could tell by the time it takes whether
    another has asked the same.

    Args:
        text: The question as asked, any language, any length.

    Returns:
        Its facts; a text without words has an empty ``normal``.
    """
    return _Reader(text).read()
