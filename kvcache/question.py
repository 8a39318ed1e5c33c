"""What a question says, as facts that can be compared: the input of every reuse guard.

Embeddings place "delete the topic" and "do not delete the topic" side by side; the facts taken
here are the ones that embeddings blur: negation, quantities, names, dates, order, language.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import unicodedata
from fractions import Fraction
from typing import Any


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


NEGATIONS = _set_of(
    "not no never none nobody nothing neither nor without cannot cant dont doesnt didnt wont "
    "isnt arent wasnt werent havent hasnt hadnt shouldnt wouldnt couldnt aint unable except "
    "nicht kein keine keinen keiner nie ohne ne pas jamais sans sin nunca senza non nao "
    "não nunca jamás"
)
# Words that carry no topic. Kept small: a word missing here only makes a guard stricter.
STOPWORDS = _set_of(
    "a an the this that these those it its is are was were be been being am do does did done "
    "have has had i me my mine we us our you your he she they them their of to in on at by for "
    "with from into onto as and or but if then so than too very can could shall should will "
    "would may might must please just there here what which who whom whose when where why how "
    "about any some all get got make made use using used want need way like also tell know "
    "hi hello hey thanks thank help s t re ve ll d m im ive id"
)
_LANGUAGE_WORDS: dict[str, frozenset[str]] = {
    "en": _set_of("the is are how what do does can my i to of in for and why when with"),
    "de": _set_of("der die das ist sind wie was ich und mein nicht mit für den ein eine"),
    "fr": _set_of("le la les est sont comment que je et mon ne pas avec pour un une des"),
    "es": _set_of("el la los es son cómo como qué que yo y mi no con para un una por"),
    "it": _set_of("il lo gli è sono come che io e mio non con per un una di della"),
    "pt": _set_of("o os é são como que eu e meu não com para um uma do da"),
    "nl": _set_of("de het is zijn hoe wat ik en mijn niet met voor een van"),
}
_SCRIPTS = (
    ("CJK", "han"), ("HIRAGANA", "kana"), ("KATAKANA", "kana"), ("HANGUL", "hangul"),
    ("CYRILLIC", "cyrillic"), ("ARABIC", "arabic"), ("HEBREW", "hebrew"), ("GREEK", "greek"),
    ("DEVANAGARI", "devanagari"), ("THAI", "thai"),
)  # fmt: skip
_NUMBER_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "fifteen": 15, "twenty": 20,
    "thirty": 30, "forty": 40, "fifty": 50, "hundred": 100, "thousand": 1000, "million": 10**6,
    "dozen": 12, "half": Fraction(1, 2), "twice": 2, "once": 1, "double": 2, "triple": 3,
}  # fmt: skip
# "A new one", "at once": amounts only before a unit.
_NUMBER_PRONOUNS = _set_of("one once half double")
# "first" and its like are orders, not amounts: kept apart so that "the 2nd" is not "2".
ORDINAL = "ordinal"
_ORDINALS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "last": -1}
# What pint would read as something else (kb: kilobarn), and what it does not know (money).
_UNITS_OURS: dict[str, tuple[str, Fraction]] = {
    "%": ("percent", Fraction(1)), "percent": ("percent", Fraction(1)),
    "$": ("usd", Fraction(1)), "usd": ("usd", Fraction(1)), "dollar": ("usd", Fraction(1)),
    "dollars": ("usd", Fraction(1)), "bucks": ("usd", Fraction(1)),
    "€": ("eur", Fraction(1)), "eur": ("eur", Fraction(1)), "euro": ("eur", Fraction(1)),
    "euros": ("eur", Fraction(1)), "£": ("gbp", Fraction(1)), "gbp": ("gbp", Fraction(1)),
    "pound": ("gbp", Fraction(1)), "pounds": ("gbp", Fraction(1)),
    "b": ("byte", Fraction(1)), "byte": ("byte", Fraction(1)), "bytes": ("byte", Fraction(1)),
    "kb": ("byte", Fraction(10**3)), "mb": ("byte", Fraction(10**6)),
    "gb": ("byte", Fraction(10**9)), "tb": ("byte", Fraction(10**12)),
    "kib": ("byte", Fraction(2**10)), "mib": ("byte", Fraction(2**20)),
    "gib": ("byte", Fraction(2**30)), "tib": ("byte", Fraction(2**40)),
    "k": ("", Fraction(1000)), "bit": ("bit", Fraction(1)), "bits": ("bit", Fraction(1)),
}  # fmt: skip
# Words after a number that pint takes for units ("5 in each", "2 a day") but rarely are.
_UNITS_NEVER = _set_of(
    "a an are as at in is it to of on or and the do be by per me my us we u t h i if for so "
    "days_ago nor no not than then times time"
)
_MONTH_NAMES = (
    "jan january", "feb february", "mar march", "apr april", "may", "jun june", "jul july",
    "aug august", "sep sept september", "oct october", "nov november", "dec december",
)  # fmt: skip
_MONTHS = {
    name: number for number, names in enumerate(_MONTH_NAMES, start=1) for name in names.split()
}
_WEEKDAYS = _set_of("monday tuesday wednesday thursday friday saturday sunday")
_RELATIVE_DAYS = _set_of(
    "today yesterday tomorrow tonight weekend weekday weekly daily monthly yearly annually "
    "quarterly hourly"
)
_TOKEN = re.compile(
    r"https?://\S+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"  # addresses
    r"|\d{1,4}[-/.]\d{1,2}[-/.]\d{2,4}(?!\d)"  # dates
    r"|v?\d+(?:\.\d+){2,}\w*|v\d+(?:\.\d+)*\w*"  # versions
    r"|[$€£]?\d[\d,]*(?:\.\d+)?(?:%|[a-zA-Zµ°]+\b)?"  # amounts, perhaps with a unit attached
    r"|--?[a-zA-Z][\w-]*"  # flags
    r"|[^\W\d_][\w]*(?:(?:[.:/\-+]+|::|->)[\w]+)*(?:\(\)|\+\+|#)?(?:['’][^\W\d_]+)?"
    r"|[$€£%]|\S",
)
_AMOUNT = re.compile(r"^([$€£]?)(\d[\d,]*(?:\.\d+)?)(%|[a-zA-Zµ°]*)$")
_DATE = re.compile(r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{2,4}$")
_VERSION = re.compile(r"^v\d+(?:\.\d+)*\w*$|^v?\d+(?:\.\d+){2,}\w*$", re.IGNORECASE)
_IDENTIFIER = re.compile(
    r"[_@#]|::|->|\(\)$|\+\+$|[a-z][A-Z]|[A-Za-z]\d|\d[A-Za-z]|[A-Za-z][./][A-Za-z]|^--?[a-zA-Z]"
)
_SPACE = re.compile(r"\s+")
_ASKING = _set_of("what which who whom whose when where why how")
_ROLE_WORDS = _set_of("from to into onto than before after by over under between via")


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
        negations: Count of negations, with the content word that each one governs.
        amounts: (value in base unit, unit), sorted.
        dates: Dates, months, weekdays, relative days, sorted.
        versions: Version numbers, sorted.
        names: Names and identifiers, casefolded.
        roles: Preposition -> content word that follows it: who to whom, from where to where.
        asks: The first question word ("how", "when"); empty where there is none.
        language: Guessed language or script; empty when the text is too short to say.
    """

    text: str
    normal: str
    fingerprint: int
    words: tuple[str, ...]
    word_set: frozenset[str]
    stems: frozenset[str]
    negations: tuple[str, ...]
    amounts: tuple[tuple[Fraction, str], ...]
    dates: tuple[str, ...]
    versions: tuple[str, ...]
    names: frozenset[str]
    roles: tuple[tuple[str, str], ...]
    asks: str
    language: str


def fingerprint_of(normal: str) -> int:
    """Hash a normalised text to 64 bits, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(normal.encode(), digest_size=8).digest(), "little")


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


_UNITS_KNOWN: dict[str, tuple[str, Fraction, Fraction]] = {}
_UNITS_KNOWN_MAX = 2048


@functools.cache
def _registry() -> Any:
    import pint  # 0.2 s to load: only once a question holds a unit that we do not list

    return pint.UnitRegistry(cache_folder=None)


def unit_of(word: str) -> tuple[str, Fraction, Fraction] | None:
    """Return (base unit, factor, offset) of a unit word, or None where it is none.

    Money, bytes and percent are ours; the rest is what ``pint`` knows ("km", "minutes", "°C").
    """
    lowered = word.casefold()
    if lowered in _UNITS_OURS:
        name, factor = _UNITS_OURS[lowered]
        return name, factor, Fraction(0)
    # Letters only: pint would evaluate anything else as an expression.
    if lowered in _UNITS_NEVER or not word.strip("°").isalpha() or len(word) > 24:
        return None
    if (len(lowered) > 1 and lowered in STOPWORDS) or lowered in _MONTHS:
        return None
    # Only words that are units are remembered: they are no secret of whoever used them.
    known = _UNITS_KNOWN.get(word)
    if known is None:
        known = _ask_pint(word)
        if known is not None and len(_UNITS_KNOWN) < _UNITS_KNOWN_MAX:
            _UNITS_KNOWN[word] = known
    return known


def _ask_pint(word: str) -> tuple[str, Fraction, Fraction] | None:
    import pint

    registry = _registry()
    # The plural is pint's business; a capital is not ours to keep where lower case is a unit too.
    for spelling in dict.fromkeys((word, word.casefold())):
        try:
            unit = registry.parse_units(spelling)
            zero = registry.Quantity(0.0, unit).to_base_units()
            one = registry.Quantity(1.0, unit).to_base_units()
        except (pint.PintError, AttributeError, ValueError, TypeError, ArithmeticError):
            continue
        if unit.dimensionless:
            return None
        offset = Fraction(zero.magnitude).limit_denominator(10**6)
        factor = Fraction(one.magnitude - zero.magnitude).limit_denominator(10**12)
        return str(one.units), factor, offset
    return None


def _script_of(text: str) -> str:
    for character in text:
        if character.isalpha() and ord(character) > 0x2FF:
            name = unicodedata.name(character, "")
            for prefix, script in _SCRIPTS:
                if name.startswith(prefix):
                    return script
    return ""


def _language_of(text: str, lowered: list[str]) -> str:
    script = _script_of(text)
    if script:
        return script
    present = set(lowered)
    counts = {name: len(present & words) for name, words in _LANGUAGE_WORDS.items()}
    best = max(counts, key=lambda name: counts[name])
    others = max(count for name, count in counts.items() if name != best)
    # Two function words more than any rival: short questions are left undecided on purpose.
    return best if counts[best] >= others + 2 else ""


def _amount_of(sign: str, digits: str, unit_word: str) -> tuple[Fraction, str] | None:
    value = Fraction(digits.replace(",", ""))
    word = sign or unit_word
    if not word:
        return value, ""
    unit = unit_of(word)
    if unit is None:
        return None
    name, factor, offset = unit
    return (value * factor + offset).limit_denominator(10**6), name


def _shown(amount: tuple[Fraction, str]) -> str:
    value, unit = amount
    number = str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
    return f"{number} {unit}" if unit else number


def _date_of(token: str) -> str:
    parts = [int(part) for part in re.split(r"[-/.]", token)]
    return "-".join(str(part) for part in (parts if parts[0] > 31 else reversed(parts)))


def _is_idiom(low: str, *, before: str, after: str) -> bool:
    """Return whether a negation is about the asker's own doubt ("I don't know why ...")."""
    if after in ("sure", "idea", "clue"):
        return True
    return after in ("know", "understand") and (before in ("i", "we") or low == "cannot")


def _is_name(token: str, *, starts_sentence: bool, all_capitals: bool) -> bool:
    if _IDENTIFIER.search(token):
        return True
    if all_capitals:
        return False  # someone shouts: capitals say nothing
    if len(token) > 1 and token.isupper() and token.isalpha():
        return True
    return token[:1].isupper() and not starts_sentence and len(token) > 1


def read_question(text: str) -> Question:
    """Take the facts out of a question.

    Pure, about 60 µs for ten words. Not cached: one tenant could tell by the time it takes whether
    another has asked the same.

    Args:
        text: The question as asked, any language, any length.

    Returns:
        Its facts; a text without words has an empty ``normal``.
    """
    plain = unicodedata.normalize("NFKC", text).replace("’", "'").strip()
    tokens = _TOKEN.findall(plain)
    lowered = [token.casefold() for token in tokens]
    letters = [character for character in plain if character.isalpha()]
    all_capitals = len(letters) > 3 and all(character.isupper() for character in letters)

    normal: list[str] = []
    words: list[str] = []
    negations: list[int] = []
    amounts: list[tuple[Fraction, str]] = []
    dates: list[str] = []
    versions: list[str] = []
    names: set[str] = set()
    roles: list[tuple[str, str]] = []
    role_open: str | None = None
    starts_sentence = True
    skip_next = False
    for position, (token, low) in enumerate(zip(tokens, lowered, strict=True)):
        if skip_next:
            skip_next = False
            continue
        if not any(character.isalnum() for character in token) and token not in "$€£%":
            starts_sentence = starts_sentence or token in ".?!:"
            continue
        following = tokens[position + 1] if position + 1 < len(tokens) else ""
        content = ""
        bare = low.replace("'", "")
        if _DATE.match(token):
            dates.append(_date_of(token))
            content = dates[-1]
        elif _VERSION.match(token):
            versions.append(low.removeprefix("v"))
            content = versions[-1]
        elif (match := _AMOUNT.match(token)) or (
            low in _NUMBER_WORDS and (low not in _NUMBER_PRONOUNS or unit_of(following))
        ):
            if match:
                sign, digits, attached = match.groups()
            else:
                sign, digits, attached = "", str(_NUMBER_WORDS[low]), ""
            if digits == "1/2":
                amount: tuple[Fraction, str] | None = (Fraction(1, 2), "")
            elif not sign and not attached and following.isalpha() and unit_of(following):
                amount = _amount_of("", digits, following)
                skip_next = True
            elif not sign and not attached and following in ("%", "$", "€", "£"):
                amount = _amount_of(following, digits, "")
                skip_next = True
            else:
                amount = _amount_of(sign, digits, attached)
            if amount is None:  # "3rd", "2x", "10am": an identifier in its own right
                names.add(low)
                content = low
            else:
                amounts.append(amount)
                content = _shown(amount)
        elif bare in NEGATIONS or (bare.endswith("nt") and "'" in low):
            normal.append("not")
            before = lowered[position - 1] if position else ""
            if not _is_idiom(low, before=before, after=following.casefold()):
                negations.append(len(words))
            starts_sentence = False
            continue
        elif low in _ORDINALS:
            amounts.append((Fraction(_ORDINALS[low]), ORDINAL))
            content = low
        elif low in _WEEKDAYS or low in _RELATIVE_DAYS or (low in _MONTHS and low != "may"):
            dates.append(f"m{_MONTHS[low]}" if low in _MONTHS else low)
            content = low
        elif token == "May" and not starts_sentence and not all_capitals:
            dates.append("m5")
            content = low
        if not content:
            content = low
            if low.partition("'")[0] not in STOPWORDS and _is_name(
                token, starts_sentence=starts_sentence, all_capitals=all_capitals
            ):
                names.add(low.removesuffix("'s"))
        normal.append(content)
        starts_sentence = False
        if low in _ROLE_WORDS:
            role_open = low
        contraction = "'" in low and low.partition("'")[0] in STOPWORDS
        if low not in STOPWORDS and low not in _ROLE_WORDS and not contraction:
            word = content if content != low else stem_of(low)
            words.append(word)
            if role_open is not None:
                roles.append((role_open, word))
                role_open = None
    joined = _SPACE.sub(" ", " ".join(normal))
    word_set = frozenset(lowered) | frozenset(words)
    governed = tuple(words[index] if index < len(words) else "" for index in negations)
    return Question(
        text=text,
        normal=joined,
        fingerprint=fingerprint_of(joined),
        words=tuple(words),
        word_set=word_set,
        stems=frozenset(map(stem_of, word_set)),
        negations=governed,
        amounts=tuple(sorted(amounts)),
        dates=tuple(sorted(dates)),
        versions=tuple(sorted(versions)),
        names=frozenset(names),
        roles=tuple(roles),
        asks=next((word for word in lowered if word in _ASKING), ""),
        language=_language_of(plain, lowered),
    )
