"""Filters against a model that walks every row's JSON."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import CorruptError, InputError
from stoker.index.filter_index import FilterIndex
from stoker.index.filters import check_metadata, flatten, matches, parse_filter

FIELDS = ["lang", "year", "tags", "when", "flag", "deep.name"]
WORDS = st.sampled_from(["en", "de", "1", "true", "", "é", "2020-01-01"])
NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([0.5, 2.0, 2**53, 2**53 + 1, -(2**60), 1e300])
)
TIMES = st.sampled_from(
    ["2020-01-01", "2020-01-01T00:00:00Z", "2020-06-01T12:00:00+02:00", "2021-02-03T04:05:06"]
)
SCALARS = st.one_of(st.booleans(), NUMBERS, WORDS, TIMES, st.none())
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "lang": WORDS,
        "year": NUMBERS,
        "tags": st.lists(SCALARS, max_size=3),
        "when": TIMES,
        "flag": st.booleans(),
        "deep": st.fixed_dictionaries({}, optional={"name": SCALARS}),
    },
)
ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", "default"]), METADATA), max_size=12)
PLAIN = st.one_of(st.booleans(), NUMBERS, WORDS, TIMES)


def bounds() -> st.SearchStrategy[dict[str, Any]]:
    def of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        low = st.one_of(
            st.just({}),
            st.fixed_dictionaries({"gt": values}),
            st.fixed_dictionaries({"gte": values}),
        )
        high = st.one_of(
            st.fixed_dictionaries({"lt": values}), st.fixed_dictionaries({"lte": values})
        )
        return st.builds(lambda a, b: {**a, **b}, low, high)

    return st.one_of(of(NUMBERS), of(TIMES))


TERMS = st.one_of(
    st.builds(lambda t: {"tenant": t}, st.sampled_from(["a", "b", "c"])),
    st.builds(
        lambda field, operand: {field: operand},
        st.sampled_from(FIELDS),
        st.one_of(
            PLAIN,
            st.builds(lambda v: {"eq": v}, PLAIN),
            st.builds(lambda v: {"ne": v}, PLAIN),
            st.builds(lambda v: {"in": v}, st.lists(PLAIN, max_size=3)),
            st.builds(lambda v: {"exists": v}, st.booleans()),
            bounds(),
        ),
    ),
)
EXPRESSIONS = st.recursive(
    st.one_of(st.just({}), TERMS),
    lambda inner: st.one_of(
        st.builds(lambda v: {"and": v}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda v: {"or": v}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda v: {"not": v}, inner),
        st.builds(lambda a, b: {**a, **b}, TERMS, TERMS),
    ),
    max_leaves=6,
)


def seconds(value: Any) -> float | None:
    if not isinstance(value, str) or len(value) < 10 or value[4:5] != "-":
        return None
    when = datetime.datetime.fromisoformat(value)
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


def model(expression: dict[str, Any], tenant: str, metadata: dict[str, Any]) -> bool:
    return all(entry(key, value, tenant, metadata) for key, value in expression.items())


def entry(key: str, value: Any, tenant: str, metadata: dict[str, Any]) -> bool:
    if key == "and":
        return all(model(item, tenant, metadata) for item in value)
    if key == "or":
        return any(model(item, tenant, metadata) for item in value)
    if key == "not":
        return not model(value, tenant, metadata)
    held: Any = tenant if key == "tenant" else metadata
    for step in [] if key == "tenant" else key.split("."):
        held = held.get(step) if isinstance(held, dict) else None
    items = [item for item in (held if isinstance(held, list) else [held]) if item is not None]
    operators = value if isinstance(value, dict) else {"eq": value}
    ranges = {name: bound for name, bound in operators.items() if name[0] in "gl"}
    if ranges and not any(within(item, ranges) for item in items):
        return False
    for name, operand in operators.items():
        if name == "eq" and not any(same(item, operand) for item in items):
            return False
        if name == "ne" and any(same(item, operand) for item in items):
            return False
        if name == "in" and not any(same(item, o) for item in items for o in operand):
            return False
        if name == "exists" and bool(items) != operand:
            return False
    return True


def same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool) or isinstance(left, str):
        return type(left) is type(right) and left == right
    return not isinstance(right, str) and left == right


def within(item: Any, ranges: dict[str, Any]) -> bool:
    for name, bound in ranges.items():
        if isinstance(item, bool):
            return False
        value = seconds(item) if isinstance(bound, str) else item
        limit = seconds(bound) if isinstance(bound, str) else bound
        if value is None or isinstance(value, str):
            return False
        value, limit = float(value), float(limit)
        fine = {
            "gt": value > limit,
            "gte": value >= limit,
            "lt": value < limit,
            "lte": value <= limit,
        }
        if not fine[name]:
            return False
    return True


@settings(max_examples=400, deadline=None)
@given(rows=ROWS, expression=EXPRESSIONS)
def test_filters_agree_with_the_model(
    rows: list[tuple[str, dict[str, Any]]], expression: dict[str, Any]
) -> None:
    node = parse_filter(expression)
    flat = [flatten(tenant, metadata) for tenant, metadata in rows]
    wanted = [row for row, (tenant, data) in enumerate(rows) if model(expression, tenant, data)]
    assert [row for row, fields in enumerate(flat) if matches(node, fields)] == wanted
    index = FilterIndex.build(enumerate(flat), len(flat))
    assert list(index.select(node)) == wanted
    stored = FilterIndex.from_bytes(index.to_bytes(), "x")
    assert stored.count == len(rows)
    assert list(stored.select(node)) == wanted


def test_neighbors_beyond_exact_floats_stay_apart() -> None:
    wide = 2**53 + 1
    index = FilterIndex.build(
        ((row, flatten("a", {"n": n})) for row, n in enumerate((wide - 1, wide))), 2
    )
    assert list(index.select(parse_filter({"n": wide - 1}))) == [0]
    assert list(index.select(parse_filter({"n": wide}))) == [1]
    assert list(index.select(parse_filter({"n": {"gte": 1}}))) == [0, 1]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_filter_index_is_refused(data: st.DataObject) -> None:
    rows = [flatten("a", {"lang": "en", "year": year}) for year in range(4)]
    stored = bytearray(FilterIndex.build(enumerate(rows), len(rows)).to_bytes())
    if data.draw(st.booleans()):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del stored[data.draw(st.integers(0, len(stored) - 1)) :]
    with pytest.raises(CorruptError, match="somewhere"):
        FilterIndex.from_bytes(bytes(stored), "somewhere")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ([], "filter: expected an object, found list"),
        ({"year": {}}, "filter.year: expected an operator"),
        ({"year": {"near": 3}}, "filter.year.near: unknown operator"),
        ({"year": {"gte": True}}, "expected a number or an ISO 8601 time, found bool"),
        ({"year": {"gte": "soon"}}, "expected a number or an ISO 8601 time, found 'soon'"),
        ({"year": {"gte": 1, "lt": "2020-01-01"}}, "two numbers or two times"),
        ({"year": {"gte": 1, "gt": 2}}, "one lower and one upper bound"),
        ({"year": None}, "filter.year: expected text, a number or a boolean, found null"),
        ({"year": float("nan")}, "finite"),
        ({"year": {"in": "ab"}}, "filter.year.in: expected a list"),
        ({"year": {"in": list(range(20_000))}}, "more than 10000 values"),
        ({"year": {"exists": 1}}, "expected true or false"),
        ({"or": []}, "filter.or: expected a list of expressions"),
        ({"not": 3}, "filter.not: expected an object, found int"),
        ({3: 4}, "expected a field's name"),
        ({"year": 2**70}, "at most 64 bits"),
    ],
)
def test_what_is_no_filter_is_refused_with_its_place(expression: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_filter(expression)
    assert message in str(caught.value)


def test_a_filter_that_is_too_deep_is_refused() -> None:
    expression: dict[str, Any] = {"a": 1}
    for _ in range(20):
        expression = {"not": expression}
    with pytest.raises(InputError, match="nested more than 16 deep"):
        parse_filter(expression)


@pytest.mark.parametrize("key", ["tenant", "and", "or", "not", "", "\x00tenant"])
def test_metadata_cannot_pretend_to_be_a_tenant(key: str) -> None:
    with pytest.raises(InputError, match="cannot be used"):
        check_metadata({key: "a"}, "row 0")
