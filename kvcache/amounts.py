"""Amounts, ordinals, dates and times, however they are written: "two dozen", "5th of May", "5 pm".

`spelled_plainly` rewrites the tokens of a text so that one thing has one spelling; `units` says
what a unit word is in base units.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from stoker.kvcache.units import unit_of
from stoker.kvcache.word_lists import set_of, words_of

_MONTH_NAMES = (
    "jan january", "feb february", "mar march", "apr april", "may", "jun june", "jul july",
    "aug august", "sep sept september", "oct october", "nov november", "dec december",
)  # fmt: skip
MONTHS = {
    name: number for number, names in enumerate(_MONTH_NAMES, start=1) for name in names.split()
}
_DAYS_SHORT = {
    short: day
    for day, shorts in (
        ("monday", "mon"), ("tuesday", "tue tues"), ("wednesday", "wed weds"),
        ("thursday", "thu thur thurs"), ("friday", "fri"), ("saturday", "sat"), ("sunday", "sun"),
    )
    for short in shorts.split()
}  # fmt: skip
_DAYS_PLAIN = set_of("tue tues thu thur thurs fri weds")  # no English words
# What stands before "Sun" the day, and seldom before the Sun.
_BEFORE_DAYS = set_of("on by until till next last this every each through thru before after since")
_OF = frozenset(("of", "de", "."))  # "5th of May", "5 de mayo", "5. Mai"
_BETWEEN_DAYS = set_of("to and or - – /")
# Weekdays and months of other languages that are no English words, from Monday and January on.
_DAYS_ELSEWHERE = (
    "montag dienstag mittwoch donnerstag freitag samstag/sonnabend sonntag",
    "lundi mardi mercredi jeudi vendredi samedi dimanche",
    "lunes martes miércoles jueves viernes sábado domingo",
    "lunedì martedì mercoledì giovedì venerdì sabato domenica",
    "segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo",
    "maandag dinsdag woensdag donderdag vrijdag zaterdag zondag",
    "poniedziałek wtorek środa czwartek piątek sobota niedziela",
    "понедельник вторник среда/среду четверг пятница/пятницу суббота/субботу воскресенье",
    "måndag tisdag onsdag torsdag fredag lördag söndag",
    "月曜日/月曜 火曜日/火曜 水曜日/水曜 木曜日/木曜 金曜日/金曜 土曜日/土曜 日曜日/日曜",
    "星期一/周一 星期二/周二 星期三/周三 星期四/周四 星期五/周五 星期六/周六 星期日/星期天/周日",
)
_MONTHS_ELSEWHERE = (
    "januar/jänner februar märz - - juni juli - - oktober - dezember",
    "janvier février - avril - juin juillet août septembre octobre novembre décembre",
    "enero febrero marzo abril - junio julio - septiembre octubre noviembre diciembre",
    "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre - dicembre",
    "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
    "januari februari maart - mei juni juli augustus - oktober - -",
    "январь/января/январе февраль/февраля/феврале март/марта/марте апрель/апреля/апреле мая/мае "
    "июнь/июня/июне июль/июля/июле август/августа/августе сентябрь/сентября/сентябре "
    "октябрь/октября/октябре ноябрь/ноября/ноябре декабрь/декабря/декабре",
)
# These are English words or names as well: months after a preposition of their own language.
_MONTHS_AFTER = {"mars": 3, "mayo": 5, "mai": 5, "agosto": 8}
_BEFORE_MONTHS = set_of("en im de du em début fin ab seit bis vom anfang ende mitte")


def _numbered(lists: Sequence[str]) -> dict[str, int]:
    return {
        name: number
        for names in lists
        for number, group in enumerate(names.split(), start=1)
        for name in group.split("/")
        if name != "-"
    }


WEEKDAYS = words_of("monday tuesday wednesday thursday friday saturday sunday")
_FOREIGN_DAYS = {name: WEEKDAYS[number - 1] for name, number in _numbered(_DAYS_ELSEWHERE).items()}
_FOREIGN_MONTHS = _numbered(_MONTHS_ELSEWHERE)
# How often: "daily", "per day" and "every day" are one thing.
_PERIODS = {
    word: unit
    for unit, words in (
        ("hour", "hourly"), ("day", "daily"), ("night", "nightly"), ("week", "weekly"),
        ("month", "monthly"), ("quarter", "quarterly"), ("year", "yearly annually annual"),
    )
    for word in words.split()
}  # fmt: skip
_PERIOD_UNITS = frozenset(_PERIODS.values()) | {"minute", "second"}
_BEFORE_PERIODS = set_of("per every each")
_OFTEN = set_of("once twice thrice times time")
_BELOW_TWENTY = words_of(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS = words_of("twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL = {word: number for number, word in enumerate(_BELOW_TWENTY)} | {
    word: 10 * number for number, word in enumerate(_TENS, start=2)
}
_SCALES = {
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
_MULTIPLES = {
    "half": Fraction(1, 2), "once": Fraction(1), "twice": Fraction(2), "double": Fraction(2),
    "triple": Fraction(3), "thrice": Fraction(3),
}  # fmt: skip
# "A new one", "at once": amounts only before a unit.
_NUMBER_PRONOUNS = frozenset(("one", "once", "half", "double"))
_ORDINAL_WORDS = words_of(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
)
ORDINALS = {word: number for number, word in enumerate(_ORDINAL_WORDS, start=1)} | {"last": -1}
_ROMAN = {
    numeral: str(number)
    for number, numeral in enumerate(
        words_of("i ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi xvii xviii xix xx"), start=1
    )
}
_ROMAN_WORDS = frozenset(("i", "v", "x", "vi", "xi", "xv", "xx"))  # words or names, too
_FRACTION = frozenset(("1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8"))
# No number is longer, and Python turns no more than 4,300 digits into one.
DIGITS_MAX = 600
_DIGITS = re.compile(r"^\d[\d,]{,300}(?:\.\d{1,200})?$")
_DAY = re.compile(r"^(\d{1,2})(?:st|nd|rd|th)?$", re.IGNORECASE)
_ORDINAL = re.compile(r"^(\d{1,300})(?:st|nd|rd|th)$", re.IGNORECASE)
_MILLIONS = re.compile(r"^([-−]?[$€£¥₹]?\d[\d,]{,300}(?:\.\d{1,200})?)(M|bn|mn)$")
_TIME = re.compile(r"^(\d{1,2})(?::(\d{2}))?\s?(?:([ap])\.?m\.?)?$", re.IGNORECASE)
# What a word of letters alone must be for any of it to be rewritten.
_REWRITTEN = frozenset((
    *MONTHS, *_DAYS_SHORT, *_SMALL, *_SCALES, *_MULTIPLES, *_ROMAN, "hundred", "per", "pct",
    *_FOREIGN_DAYS, *_FOREIGN_MONTHS, *_MONTHS_AFTER, *_PERIODS, *_BEFORE_PERIODS, "by", "a", "an",
    "this",
))  # fmt: skip
ORDINAL_TOKEN = re.compile(r"^(-?\d{1,300})th$")
DATE_TOKEN = re.compile(r"^(?:m\d\d?-\d\d?|\d\d?:\d\d|per:[a-z]+)$")


def spelled_plainly(tokens: Sequence[str]) -> list[str]:
    """Rewrite tokens so that numbers, ordinals, dates and times have one spelling each.

    "twenty-five" is "25", "3M" and "3 million" are "3000000", "2nd" is "2th" as "second" is not
    (it may be a unit), "5th of May 2024" is "2024-05-05", "May 5" is "m5-5", "5 pm" is "17:00",
    "non-smoking" is "not smoking", "sugar-free" is "without sugar". Others stay as they are.
    """
    plain: list[str] = []
    place = 0
    while place < len(tokens):
        if tokens[place].isalpha() and tokens[place].casefold() not in _REWRITTEN:
            plain.append(tokens[place])
            place += 1
            continue
        for read in (_day_at, _period_at, _number_at, _other_at):
            found = read(tokens, place)
            if found is not None:
                words, place = found
                plain.extend(words)
                break
        else:
            plain.append(tokens[place])
            place += 1
    return plain


def _low(tokens: Sequence[str], place: int) -> str:
    return tokens[place].casefold() if 0 <= place < len(tokens) else ""


def _day_at(tokens: Sequence[str], place: int) -> tuple[list[str], int] | None:
    """Read "May 5", "5th of May" and the like, with a year or without one."""
    after = place
    if _low(tokens, place) in MONTHS:
        month, day = MONTHS[_low(tokens, place)], _DAY.match(_low(tokens, place + 1))
        after = place + 2
    else:
        day = _DAY.match(tokens[place])
        after = place + 1 + (_low(tokens, place + 1) in _OF)
        named = _low(tokens, after)
        month = MONTHS.get(named) or _FOREIGN_MONTHS.get(named) or _MONTHS_AFTER.get(named, 0)
        after += 1
    if day is None or not month or not 1 <= int(day[1]) <= 31:
        return None
    year = after + (_low(tokens, after) in (",", "de"))
    if len(_low(tokens, year)) == 4 and tokens[year].isdecimal():
        return [f"{int(tokens[year])}-{month:02}-{int(day[1]):02}"], year + 1
    return [f"m{month}-{int(day[1])}"], after


def _period_at(tokens: Sequence[str], place: int) -> tuple[list[str], int] | None:
    """Read how often: "daily", "per day", "every day", "by the day", "twice a day"."""
    low = _low(tokens, place)
    if low in _PERIODS:
        return [f"per:{_PERIODS[low]}"], place + 1
    unit = place + 1
    if low == "by" and _low(tokens, unit) == "the":
        unit += 1
    elif low in ("a", "an"):
        if _low(tokens, place - 1) not in _OFTEN:
            return None
    elif low not in _BEFORE_PERIODS:
        return None
    if _low(tokens, unit) not in _PERIOD_UNITS:
        return None
    return [f"per:{_low(tokens, unit)}"], unit + 1


def _is_day(tokens: Sequence[str], place: int) -> bool:
    """Return whether a word with a capital that is a day's short form is one, by its place."""
    before, following = _low(tokens, place - 1), _low(tokens, place + 1)
    for between, other in ((before, place - 2), (following, place + 2)):
        if between in _BETWEEN_DAYS and _names_day(_low(tokens, other)):
            return True
    timed = following.isdecimal() or following in MONTHS or _TIME.match(following) is not None
    return before in _BEFORE_DAYS or before in _DAYS_SHORT or timed


def _names_day(low: str) -> bool:
    return low in _DAYS_SHORT or low.removesuffix("s") in WEEKDAYS


def _number_at(tokens: Sequence[str], place: int) -> tuple[list[str], int] | None:
    """Read a run of number words, a number with a scale, or a fraction."""
    low = _low(tokens, place)
    if low.isdecimal() and "".join(tokens[place : place + 3]) in _FRACTION:
        part = Fraction("".join(tokens[place : place + 3]))
        return [number_text(part)], place + 3
    millions = _MILLIONS.match(tokens[place])
    if millions:
        factor = 10**9 if millions[2] == "bn" else 10**6
        sign = millions[1].rstrip("0123456789.,")
        return [
            sign + number_text(factor * Fraction(millions[1][len(sign) :].replace(",", "")))
        ], place + 1
    first, after = _value_at(tokens, place)
    if first is None and _DIGITS.match(low) and _low(tokens, place + 1) == "and":
        first, after = Fraction(low.replace(",", "")), place + 1
        if [_low(tokens, after + step) for step in range(3)] != ["and", "a", "half"]:
            return None
    if first is None:
        return None
    if [_low(tokens, after + step) for step in range(3)] == ["and", "a", "half"]:
        first, after = first + Fraction(1, 2), after + 3
    alone = after == place + 1
    if alone and low in _NUMBER_PRONOUNS:
        unit = after + (low == "half" and _low(tokens, after) in ("a", "an"))
        if not (_low(tokens, unit).isalpha() and unit_of(tokens[unit])):
            return None
        after = unit
    if alone and low not in _SMALL and low not in _MULTIPLES and low not in _SCALES:
        return None if "-" not in low else ([number_text(first)], after)
    return [number_text(first)], after


def _value_at(tokens: Sequence[str], place: int) -> tuple[Fraction | None, int]:
    """Return the value of the number words from ``place`` on, and where they end."""
    low = _low(tokens, place)
    if low in _MULTIPLES:
        return _MULTIPLES[low], place + 1
    total, current = Fraction(0), None
    seen = False
    if _DIGITS.match(low) and _low(tokens, place + 1) in (*_SCALES, "hundred"):
        current, seen, place = Fraction(low.replace(",", "")), True, place + 1
    while place < len(tokens):
        low = _low(tokens, place)
        parts = low.split("-")
        if low == "and" and seen and (current is None or current % 100 == 0):
            if _low(tokens, place + 1).split("-")[0] not in _SMALL or current == 0:
                break
            place += 1
            continue
        if len(parts) == 2 and parts[0] in _TENS and parts[1] in _BELOW_TWENTY[1:10]:
            value = Fraction(_SMALL[parts[0]] + _SMALL[parts[1]])
        elif low in _SMALL:
            value = Fraction(_SMALL[low])
        elif low == "hundred" and (current is None or current < 10**12):
            current = (current or Fraction(1)) * 100
            seen, place = True, place + 1
            continue
        elif low in _SCALES:
            total += (current or Fraction(1)) * _SCALES[low]
            current, seen, place = None, True, place + 1
            continue
        else:
            break
        if current is None or (current % 100 == 0 and current >= 100):
            current = (current or Fraction(0)) + value
        elif current % 100 >= 20 and current % 10 == 0 and 0 < value < 10:
            current += value
        else:
            break
        seen, place = True, place + 1
    return (total + (current or Fraction(0)) if seen else None), place


def number_text(value: Fraction) -> str:
    """Return a number as digits: whole where it is whole or too large to tell, else 10 decimals."""
    if value.denominator == 1 or abs(value) >= 10**15:
        return str(round(value))
    return f"{float(value):.10f}".rstrip("0").removesuffix(".")


def amount_text(value: Fraction, unit: str) -> str:
    """Return an amount as text; two that differ have two texts."""
    whole = value.denominator == 1 or abs(value) >= 10**15
    number = str(round(value)) if whole else f"{float(value):.10g}"
    return f"{number} {unit}" if unit else number


def _other_at(tokens: Sequence[str], place: int) -> tuple[list[str], int] | None:
    """Read ordinals, times of day, short weekdays, roman numbers and denying compounds."""
    token, low = tokens[place], _low(tokens, place)
    if ordinal := _ORDINAL.match(token):
        return [f"{int(ordinal[1])}th"], place + 1
    clock = _TIME.match(token)
    if clock and (clock[2] or clock[3]):
        hour, minute = int(clock[1]), int(clock[2] or 0)
        half = (clock[3] or "").casefold()
        hour = hour % 12 + 12 * (half == "p") if half and hour <= 12 else hour
        return [f"{hour}:{minute:02}"], place + 1
    if low in ("per", "pct") and _low(tokens, place + (low == "per")) in ("cent", "pct"):
        return ["percent"], place + 1 + (low == "per")
    parts = low.split("-")
    if all(part in _DAYS_SHORT for part in parts) and (
        len(parts) > 1 or low in _DAYS_PLAIN or (token[:1].isupper() and _is_day(tokens, place))
    ):
        return [_DAYS_SHORT[part] for part in parts], place + 1
    if low in _FOREIGN_DAYS:
        return [_FOREIGN_DAYS[low]], place + 1
    if low in _FOREIGN_MONTHS:
        return [f"m{_FOREIGN_MONTHS[low]}-0"], place + 1
    if low in _MONTHS_AFTER and _low(tokens, place - 1) in _BEFORE_MONTHS:
        return [f"m{_MONTHS_AFTER[low]}-0"], place + 1
    if low == "this" and _low(tokens, place + 1) in ("evening", "night"):
        return ["tonight"], place + 2
    if low in _ROMAN and (low not in _ROMAN_WORDS or (len(low) > 1 and token.isupper())):
        return [_ROMAN[low]], place + 1
    if len(parts) == 2 and all(part.isalpha() for part in parts):
        if parts[0] in ("non", "no", "not"):
            return ["not", parts[1]], place + 1
        if parts[1] == "free":
            return ["without", parts[0]], place + 1
    return None
