"""Changed documents: nothing that says something else keeps its cache; the rest does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.field_rollback import Reason, compare_fields, rolled_back

BEFORE = {
    "title": "Retention of records",
    "body": "Records are kept for 7 days. They are not compacted.",
    "limit": "At most 5 km of cable",
    "note": "See the handbook for more about this.",
    "author": "written by the storage people",
    "old": "gone soon",
}
# What changed in a field, and whether answers from its old text would be wrong.
CHANGES = [
    ("title", "retention of  records", False),
    ("title", "Retention of Records!", False),
    ("body", "Records are kept for 14 days. They are not compacted.", True),
    ("body", "Records are kept for 7 days. They are compacted.", True),
    ("body", "Records are kept for 168 hours. They are not compacted.", False),
    ("limit", "At most 5000 m of cable", False),
    ("limit", "At most 5 miles of cable", True),
    ("limit", "At most 5 km of fibre", True),
    ("author", "written by the network people", True),
]


def embed(texts: Sequence[str]) -> NDArray[np.float64]:
    """A model that finds all texts alike: the worst judge of what differs."""
    return np.ones((len(texts), 4)) + 1e-3 * np.arange(len(texts))[:, None]


@pytest.mark.parametrize(("name", "text", "wrong"), CHANGES)
def test_what_differs_in_meaning_is_rolled_back(name: str, text: str, wrong: bool) -> None:
    after = {**BEFORE, name: text}
    for judge in (None, embed):
        found = rolled_back(compare_fields(BEFORE, after, embed=judge))
        assert found == ([name] if wrong else [])


def test_table_beside_full_invalidation() -> None:
    """Of all changes above: no wrong answer, and far fewer fields rolled back."""
    fields = wrong_answers = ours = 0
    for name, text, wrong in CHANGES:
        found = rolled_back(compare_fields(BEFORE, {**BEFORE, name: text}))
        fields += len(BEFORE)
        ours += len(found)
        wrong_answers += wrong and name not in found
    print(f"rolled back: full invalidation {fields}, by field {ours}; wrong answers 0, "
          f"{wrong_answers}")  # fmt: skip
    assert wrong_answers == 0
    assert ours == 5


def test_unimportant_fields_may_differ_a_little_but_never_in_a_fact() -> None:
    weights = {"note": 0.2, "body": 0.2}
    after = {**BEFORE, "note": "Consult the handbook for more about this."}
    verdicts = {v.name: v for v in compare_fields(BEFORE, after, weights=weights, embed=embed)}
    assert verdicts["note"].reason is Reason.UNIMPORTANT
    assert verdicts["note"].kept
    assert rolled_back(compare_fields(BEFORE, after, weights=weights)) == ["note"], "no judge"
    fact = {**BEFORE, "body": "Records are kept for 9 days. They are not compacted."}
    (body,) = [
        v for v in compare_fields(BEFORE, fact, weights=weights, embed=embed) if v.name == "body"
    ]
    assert body.reason is Reason.CONFLICT
    assert "number" in body.detail


def test_added_and_removed_fields_are_rolled_back() -> None:
    after = {**BEFORE, "new": "text"}
    del after["old"]
    verdicts = compare_fields(BEFORE, after)
    assert [v.name for v in verdicts] == sorted({*BEFORE, "new"})
    assert rolled_back(verdicts) == ["new", "old"]
    assert rolled_back(compare_fields({"a": "?"}, {"a": "!"})) == ["a"]


def test_senseless_input_is_the_callers() -> None:
    with pytest.raises(InputError, match="weight"):
        compare_fields(BEFORE, BEFORE, weights={"body": 1.5})
    with pytest.raises(InputError, match="expected 2 vectors"):
        compare_fields(
            {"a": "one thing"}, {"a": "some thing"}, weights={"a": 0.1},
            embed=lambda texts: np.ones((1, 3)),
        )  # fmt: skip
