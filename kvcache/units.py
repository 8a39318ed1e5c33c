"""Units after numbers: what a word of them is in base units, and what else it may stand for.

Money, bytes and percent are ours; the rest is what ``pint`` knows. Pint is asked for each of its
units once: with prefixes (kilo, µ) and plurals a unit has hundreds of spellings, of which a text
may hold as many as it has words, and each would cost 0.2 ms.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

from stoker.kvcache.word_lists import set_of

Reading = tuple[str, Fraction, Fraction]  # base unit, factor, offset

_OURS: dict[str, tuple[str, Fraction]] = {
    name: (unit, Fraction(factor))
    for unit, factor, names in (
        ("percent", 1, "% percent"),
        ("usd", 1, "$ usd dollar dollars bucks"), ("eur", 1, "€ eur euro euros"),
        ("gbp", 1, "£ gbp pound pounds quid"), ("jpy", 1, "¥ jpy yen"),
        ("inr", 1, "₹ inr rupee rupees"),
        ("cny", 1, "yuan rmb cny"), ("chf", 1, "chf franc francs"),
        # What pint would read as something else (kb: kilobarn).
        ("byte", 1, "b byte bytes"), ("byte", 10**3, "kb"), ("byte", 10**6, "mb"),
        ("byte", 10**9, "gb"), ("byte", 10**12, "tb"), ("byte", 2**10, "kib"),
        ("byte", 2**20, "mib"), ("byte", 2**30, "gib"), ("byte", 2**40, "tib"),
        ("", 1000, "k"), ("bit", 1, "bit bits"), ("degree", 1, "degree degrees deg"),
    )
    for name in names.split()
}  # fmt: skip
# A capital tells these apart: a megabit from a megabyte, a degree from a farad.
_SPELLED = {
    "Kb": ("bit", Fraction(10**3)), "Mb": ("bit", Fraction(10**6)), "Gb": ("bit", Fraction(10**9)),
}  # fmt: skip
_PINT_NAMES = {
    "F": "degF", "C": "degC", "°F": "degF", "°C": "degC", "f": "degF", "c": "degC", "wk": "week",
    "wks": "week", "mos": "month", "min": "minute", "sec": "second",
}  # fmt: skip
# Words of more than one meaning: how it is written in a normal form ("": as its first meaning, that
# of `unit_of`), and the other meanings: (unit of ours, factor), or a name of pint's.
_MEANINGS: dict[str, tuple[str, tuple[tuple[str, int] | str, ...]]] = {
    word: (plain, others)
    for plain, words, others in (
        ("pound", "pound pounds", ("lb",)),
        ("ounce", "ounce ounces oz", ("fluid_ounce",)),
        ("ton", "ton tons", ("metric_ton", "long_ton")),
        ("calorie", "calorie calories cal", ("kilocalorie",)),
        ("degree", "degree degrees deg", ("degC", "degF", ("", 1))),
        ("", "m", (("", 10**6),)),
        ("b", "b", (("", 10**9),)),
        ("k", "k", ("kelvin",)),
        # In lower case nobody says whether it is bits or bytes.
        ("kb", "kb", (("bit", 10**3),)),
        ("mb", "mb", (("bit", 10**6),)),
        ("gb", "gb", (("bit", 10**9),)),
    )
    for word in words.split()
}  # fmt: skip
_CASE_TELLS = frozenset(("kb", "mb", "gb"))  # "MB" is megabytes
# Words after a number that pint takes for units ("5 in each", "2 a day") but rarely are.
_NEVER = set_of(
    "a an are as at in is it to of on or and the do be by per me my us we u t h i if for so "
    "days_ago nor no not than then times time st nd rd th am pm hi can may will has had did "
    "all any our your his her its about some get got use help "
    "jan january feb february mar march apr april jun june jul july aug august sep sept september "
    "oct october nov november dec december"
)
_LETTERS_MAX = 24
# As pint has them, in its order: of two that fit, the earlier is meant.
_PREFIXES: dict[str, Fraction] = {
    name: Fraction(base) ** power
    for base, power, names in (
        (10, -30, "quecto q"), (10, -27, "ronto r"), (10, -24, "yocto y"), (10, -21, "zepto z"),
        (10, -18, "atto a"), (10, -15, "femto f"), (10, -12, "pico p"), (10, -9, "nano n"),
        (10, -6, "micro µ μ u mu mc"), (10, -3, "milli m"), (10, -2, "centi c"),
        (10, -1, "deci d"), (10, 1, "deca da deka"), (10, 2, "hecto h"), (10, 3, "kilo k"),
        (10, 6, "mega M"), (10, 9, "giga G"), (10, 12, "tera T"), (10, 15, "peta P"),
        (10, 18, "exa E"), (10, 21, "zetta Z"), (10, 24, "yotta Y"), (10, 27, "ronna R"),
        (10, 30, "quetta Q"), (2, 10, "kibi Ki"), (2, 20, "mebi Mi"), (2, 30, "gibi Gi"),
        (2, 40, "tebi Ti"), (2, 50, "pebi Pi"), (2, 60, "exbi Ei"), (2, 70, "zebi Zi"),
        (2, 80, "yobi Yi"),
    )
    for name in names.split()
} | {"semi": Fraction(1, 2), "demi": Fraction(1, 2), "sesqui": Fraction(3, 2)}  # fmt: skip
_PREFIX_ORDER = {name: place for place, name in enumerate(_PREFIXES)}
_PREFIX_LETTERS_MAX = max(map(len, _PREFIXES))


@functools.cache
def _registry() -> Any:
    import pint  # 0.2 s to load: only once a question holds a unit that we do not list

    return pint.UnitRegistry(cache_folder=None)


@functools.cache
def _pint_names() -> frozenset[str]:
    return frozenset(_registry())


def unit_of(word: str) -> Reading | None:
    """Return (base unit, factor, offset) of a unit word, or None where it is none.

    Where the word has several meanings, the likeliest: see `readings_of`.
    """
    lowered = word.casefold()
    ours = _SPELLED.get(word) or _OURS.get(lowered)
    if ours is not None:
        return ours[0], ours[1], Fraction(0)
    # Letters only: pint would evaluate anything else as an expression.
    if lowered in _NEVER or not word.strip("°").isalpha() or len(word) > _LETTERS_MAX:
        return None
    # A capital is not ours to keep where lower case is a unit too.
    named = _PINT_NAMES.get(word) or _PINT_NAMES.get(lowered, word)
    for spelling in dict.fromkeys((named, lowered)):
        parts = _parts_of(spelling)
        found = None if parts is None else _pint_unit(parts[1])
        if parts is None or found is None:
            continue
        unit, factor, offset = found
        # "Kilocelsius" is nothing: what does not start at zero has no prefixes.
        if parts[0] and offset:
            continue
        return None if not unit else (unit, factor * _PREFIXES.get(parts[0], Fraction(1)), offset)
    return None


def readings_of(word: str) -> tuple[Reading, ...]:
    """Return everything that a unit word may stand for, the likeliest first; () for none.

    "6 pounds" is money or a weight, "8 oz" a weight or a volume, "3b" bytes or billions.
    """
    first = unit_of(word)
    if first is None:
        return ()
    return (first, *(_meant(other) for other in meanings_of(word)))


def meanings_of(word: str) -> tuple[tuple[str, int] | str, ...]:
    """Return what else a unit word stands for, as the table has it; () for most words."""
    lowered = word.casefold()
    if word == "M" or (lowered in _CASE_TELLS and word != lowered):
        return ()
    return _MEANINGS.get(lowered, ("", ()))[1]


def plain_word(word: str) -> str:
    """Return how a word of several meanings is written where none is chosen; "" for others."""
    return _MEANINGS[word.casefold()][0] if meanings_of(word) else ""


def _meant(other: tuple[str, int] | str) -> Reading:
    if not isinstance(other, str):
        return other[0], Fraction(other[1]), Fraction(0)
    parts = _parts_of(other)
    assert parts is not None
    found = _pint_unit(parts[1])
    assert found is not None
    return found[0], found[1] * _PREFIXES.get(parts[0], Fraction(1)), found[2]


def _parts_of(word: str) -> tuple[str, str] | None:
    """Split a word into a prefix, or "", and a unit that pint knows; a plural's "s" goes.

    Pint's own rule, without its walk through all prefixes: the word itself, else with a prefix,
    the earlier of two, else the same of the singular.
    """
    names = _pint_names()
    if word in names:
        return "", word
    for end in ("", "s"):
        if not word.endswith(end):
            continue
        rest = word.removesuffix(end) if end else word
        if end and rest in names and len(rest) > 1:
            return "", rest
        found = [
            rest[:cut]
            for cut in range(1, min(_PREFIX_LETTERS_MAX, len(rest) - 1) + 1)
            if rest[:cut] in _PREFIXES
            and rest[cut:] in names
            and not (end and len(rest) == cut + 1)
        ]
        if found:
            prefix = min(found, key=_PREFIX_ORDER.__getitem__)
            return prefix, rest[len(prefix) :]
    return None


# Bounded by the names that pint has, which are no secret of whoever used them.
@functools.lru_cache(maxsize=2048)
def _pint_unit(name: str) -> Reading | None:
    """Ask pint what one of its units is in base units; "" as the unit where it is a number.

    None where it has no size of its own.
    """
    import pint

    registry = _registry()
    try:
        unit = registry.parse_units(name)
        zero = registry.Quantity(0.0, unit).to_base_units()
        one = registry.Quantity(1.0, unit).to_base_units()
    except (pint.PintError, AttributeError, ValueError, TypeError, ArithmeticError):
        return None
    if unit.dimensionless:
        return "", Fraction(1), Fraction(0)
    offset = _meant_by(zero.magnitude)
    return str(one.units), _meant_by(one.magnitude - zero.magnitude), offset


def _meant_by(number: float) -> Fraction:
    """Return the fraction that a float stands for: 5/9, and 0.45359237, not their 53 bits."""
    exact = Fraction(number)
    if not number:
        return exact
    scale = _scale_of(exact)
    simple = (exact / scale).limit_denominator(10**5) * scale
    return simple if abs(simple - exact) <= abs(exact) / 10**12 else Fraction(f"{number:.15g}")


def _scale_of(value: Fraction) -> Fraction:
    """Return the power of ten above a number, or just below it."""
    size = abs(value)
    if size >= 1:
        return Fraction(10) ** len(str(size.numerator // size.denominator))
    return Fraction(10) ** (1 - len(str(size.denominator // size.numerator)))


def rounded(value: Fraction) -> Fraction:
    """Round to some ten digits, wherever they begin: 5 ns is neither 0 s nor 7 ns.

    One amount in two spellings is then one number, though pint counts in floats. Whole numbers
    stay as they are.
    """
    if value.denominator == 1:
        return value
    scale = _scale_of(value) / 10**10
    return round(value / scale) * scale
