"""Units: pint's own verdict at a bounded price, words of several meanings, sizes of any order."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import pint
import pytest

from stoker.kvcache import units
from stoker.kvcache.guards import Guard, first_conflict
from stoker.kvcache.question import read_question
from stoker.kvcache.units import readings_of, rounded, unit_of


def conflict_of(one: str, other: str) -> Guard | None:
    conflict = first_conflict(read_question(one), read_question(other))
    assert (conflict is None) == (
        first_conflict(read_question(other), read_question(one)) is None
    ), "one way round is as the other"
    return conflict.guard if conflict else None


def letters(names: Any) -> list[str]:
    return sorted(name for name in names if name.isalpha() and len(name) < 12)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call of pint's that walks through its prefixes or its parser."""
    calls: list[str] = []
    registry = units._registry()
    for name in ("parse_unit_name", "parse_units"):
        real = getattr(registry, name)

        def counted(word: str, *rest: Any, real: Any = real) -> Any:
            calls.append(word)
            return real(word, *rest)

        monkeypatch.setattr(registry, name, counted)
    units._pint_unit.cache_clear()
    return calls


def test_pint_is_asked_once_for_a_unit_and_all_that_grows_from_it(asked: list[str]) -> None:
    """Each took 0.2 ms, and a text may hold as many as it has words."""
    words = [f"{prefix}{unit}s" for prefix in ("kilo", "nano", "mega") for unit in
             ("meter", "furlong", "gram", "parsec")]  # fmt: skip
    text = " ".join(f"{number} {word}" for number, word in enumerate(words * 20, 2))
    first, again = read_question(text), read_question(text)
    assert {unit for _, unit in first.amounts} == {"meter", "kilogram"}
    assert first == again
    assert len(asked) <= 3 * 4  # a unit's own parser may ask for its name


def test_pint_is_not_asked_for_what_is_no_unit(asked: list[str]) -> None:
    pairs = enumerate(itertools.product("abcdefgh", "zyxwv"), 2)
    read_question(" ".join(f"{number} flurb{one}{other}" for number, (one, other) in pairs))
    assert asked == []


def test_a_unit_is_what_pint_says() -> None:
    registry = units._registry()
    assert list(units._PREFIXES) == [name for name in registry._prefixes if name], "and their order"
    rng = random.Random(7)
    known, prefixes = letters(registry), list(units._PREFIXES)
    words = [rng.choice(prefixes) + rng.choice(known) + rng.choice(("", "s")) for _ in range(250)]
    words += [rng.choice(known) + rng.choice(("", "s")) for _ in range(250)]
    words += ["".join(rng.choices("aegikmnoprst", k=rng.randint(2, 4))) for _ in range(250)]
    ours = {*units._OURS, *map(str.casefold, units._SPELLED), *units._NEVER}
    for word in words:
        if word.casefold() in ours:
            continue
        found = unit_of(word)
        for spelling in dict.fromkeys((units._PINT_NAMES.get(word, word), word.casefold())):
            try:
                unit = registry.parse_units(spelling)
                zero = registry.Quantity(0.0, unit).to_base_units()
                one = registry.Quantity(1.0, unit).to_base_units()
            except (pint.PintError, AttributeError, ValueError, ArithmeticError):
                continue
            if unit.dimensionless:
                assert found is None, word
            else:
                assert found is not None, word
                assert found[0] == str(one.units), word
                size = one.magnitude - zero.magnitude
                assert float(found[1]) == pytest.approx(size, rel=1e-9, abs=0), word
            break
        else:
            assert found is None, word


SAME = """
6 lbs|6 pounds
6 pounds of flour|6 lb of flour
£6 fee|6 pounds fee
6 pounds and 3 lbs|6 lbs and 3 pounds
3B rows|3 billion rows
300 K|300 kelvin
10 K rows|10000 rows
200 calories|200 kcal
2 tons|2 tonnes
8 oz|8 ounces
below -5 degrees|below -5 C
turn by 90 degrees|turn by 90
10 mb speed|10 Mb speed
10 mb speed|10 MB speed
5m rows|5 million rows
5m long|5 meters long
5 ns|0.005 µs
212 F|100 C
1 lb|0.45359237 kg
1 mile|1609.344 m
"""
OTHER = """
£6|6 lbs
6 pounds|6 kg
6 pounds|7 lbs
6 pounds and £3|6 lbs and 3 lbs
6 pounds and 6 pounds|6 pounds and £3
10 Mb speed|10 MB speed
300 K|300 C
5 ns|7 ns
5 fs|7 fs
5 ns|5 ps
1234.567 m|1234.568 m
5000001 bytes|5000000 bytes
"""


@pytest.mark.parametrize("row", SAME.split("\n")[1:-1])
def test_amounts_that_may_be_the_same_are_not_refused(row: str) -> None:
    one, _, other = row.partition("|")
    assert conflict_of(one, other) is None


@pytest.mark.parametrize("row", OTHER.split("\n")[1:-1])
def test_amounts_that_cannot_be_the_same_are_refused(row: str) -> None:
    one, _, other = row.partition("|")
    assert conflict_of(one, other) in (Guard.NUMBER, Guard.UNIT)
    assert read_question(one).normal != read_question(other).normal


def test_no_meaning_is_chosen_in_a_normal_form() -> None:
    """A changed document keeps its cache where the normal form is the same."""
    assert read_question("a fee of 6 pounds").normal != read_question("a fee of £6").normal
    assert read_question("1,000 pounds").normal == read_question("1000 pound").normal
    assert read_question("-5 degrees").normal != read_question("5 degrees").normal


def test_readings_begin_with_the_likeliest() -> None:
    for word in units._MEANINGS:
        found = readings_of(word)
        assert found[0] == unit_of(word)
        assert len(set(found)) == len(found) > 1
    assert readings_of("km") == (unit_of("km"),)
    assert readings_of("flurb") == ()


@pytest.mark.parametrize("power", [-40, -9, -1, 0, 1, 9, 40])
def test_rounding_keeps_ten_digits_of_any_size(power: int) -> None:
    size = Fraction(10) ** power
    assert rounded(Fraction(1, 3) * size) == Fraction(3333333333, 10**10) * size
    assert rounded(-Fraction(1, 3) * size) == -rounded(Fraction(1, 3) * size)
    assert rounded(Fraction(10**12 + 1)) == 10**12 + 1
    assert rounded(Fraction(0)) == 0
