"""The area of passages that questions lead to, against a list that does the same the slow way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.prefetch.protocols import ContentKey
from stoker.prefetch.question_area import QuestionArea

KEYS = st.sampled_from([("t", f"c{i}") for i in range(8)])
STEPS = st.lists(
    st.tuples(
        st.lists(KEYS, max_size=3, unique=True),
        st.dictionaries(KEYS, st.sampled_from([0.5, 1.0, 2.0]), max_size=8),
    ),
    max_size=30,
)


@given(steps=STEPS, keys_max=st.integers(1, 5), per_question=st.integers(1, 4), kept=st.sets(KEYS))
def test_it_holds_the_newest_and_accounts_for_each(
    steps: list[tuple[list[ContentKey], dict[ContentKey, float]]],
    keys_max: int,
    per_question: int,
    kept: set[ContentKey],
) -> None:
    area = QuestionArea(keys_max, per_question_max=per_question)
    inside: list[ContentKey] = []
    useful = unused = 0
    for time_s, (retrieved, expected) in enumerate(steps):
        for key in retrieved:
            assert area.access(key, float(time_s)) == (key in inside)
            if key in inside:
                inside.remove(key)
                useful += 1
        new = [key for key in expected if key not in [*inside, *retrieved, *kept]]
        wanted = sorted(new, key=lambda key: (-expected[key], key))[: min(per_question, keys_max)]
        assert area.bring(expected, float(time_s), retrieved=retrieved, kept=kept) == wanted
        inside += wanted
        unused += max(0, len(inside) - keys_max)
        inside = inside[-keys_max:]
        area.check()
        assert [key for key in inside if key in area] == inside
        assert len(area) == len(inside)
    counts = area.account.to_dict()
    assert (counts["useful"], counts["unused"], counts["pending"]) == (useful, unused, len(inside))
    assert counts["polluting"] == counts["late"] == 0


def test_what_is_asked_for_as_it_comes_is_late() -> None:
    area = QuestionArea(2, per_question_max=1)
    area.bring({("t", "a"): 1.0}, 5.0, retrieved=(), kept=())
    assert not area.access(("t", "a"), 5.0)
    assert area.account.late == 1


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_an_area_without_room_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="per_question_max"):
        QuestionArea(bounds[0], per_question_max=bounds[1])
