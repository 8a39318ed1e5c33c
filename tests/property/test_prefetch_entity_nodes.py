"""Entities of any text: folded once and for all, bounded, and the same whatever came before."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from stoker.prefetch.entities import NAME_LENGTH_MAX, Entities, entity_name
from stoker.prefetch.events import SEARCH_PERFORMED, Event
from stoker.prefetch.query_topics import QueryTopics
from stoker.prefetch.settings import PrefetchSettings

# Any string that Python holds: lone surrogates, controls, marks, and folds that compose.
TEXTS = st.text(
    st.one_of(
        st.characters(),
        st.characters(categories=["Cs", "Cc", "Cf", "Mn", "Zs"]),
        st.sampled_from("İıſßΣς ﬃ\u0345\u0130\u1e9e\u0307#+.-"),
    ),
    max_size=200,
)


class Words:
    """Every word is an entity: the most that a finder can say."""

    def find(self, text: str, /) -> list[str]:
        return text.split(" ")


@given(TEXTS)
@example("a" * 79 + "-b")  # cut where it must not end
@example("a" * 79 + "\ufdfa")
def test_a_name_is_folded_once_and_for_all(text: str) -> None:
    name = entity_name(text)
    assert entity_name(name) == name
    assert len(name) <= NAME_LENGTH_MAX
    assert name == name.strip()
    assert name.isprintable()
    name.encode("utf-8")
    assert not name or any(character.isalpha() for character in name)
    assert entity_name(f"\t({name}) \n") == name


@given(st.lists(TEXTS, max_size=6), st.integers(1, 4), st.integers(1, 60))
def test_a_text_gives_the_same_nodes_whatever_came_before(
    texts: list[str], per_text_max: int, length_max: int
) -> None:
    seasoned = Entities(Words(), per_text_max=per_text_max, text_length_max=length_max)
    for text in [*texts, *texts]:
        fresh = Entities(Words(), per_text_max=per_text_max, text_length_max=length_max)
        nodes = seasoned.of(text)
        assert nodes == fresh.of(text) == seasoned.of(text)
        assert len(set(nodes)) == len(nodes) <= per_text_max
        assert all(kind == "entity" and name for kind, name in nodes)
        assert (
            seasoned.of(text[:length_max] + "A tail that is not read")
            == seasoned.of(text[:length_max] + "another one")
            or len(text) < length_max
        )


@given(
    st.lists(
        st.tuples(
            TEXTS,
            st.sampled_from(["t1", "t2"]),
            st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=4),
            st.floats(0.0, 1e9),
        ),
        max_size=40,
    )
)
def test_topics_stay_within_bounds_and_tenants(
    rows: list[tuple[str, str, list[str], float]],
) -> None:
    settings = PrefetchSettings(topics_nodes_max=5, topics_edges_per_node_max=2)
    topics = QueryTopics(settings, finder=Words())
    events = [
        Event(f"e{i}", SEARCH_PERFORMED, time_s, tenant, None, None, text, tuple(chunks), {})
        for i, (text, tenant, chunks, time_s) in enumerate(rows)
    ]
    topics.observe(events)
    topics.check()
    assert len(topics) <= 5
    for now_s in (0.0, 1e9, 1e11):
        lift = topics.lift(now_s)
        assert all(value >= 0.0 for value in lift.values())
        # A mention is one access at most: nodes of a text come at most eight.
        assert sum(lift.values()) <= 8 * len(rows) + 1e-6
    before = topics.to_bytes()
    for text, tenant, _, _ in rows:
        expected = topics.expected(text, tenant, 1e9)
        assert {owner for owner, _ in expected} <= {tenant}
        assert sum(expected.values()) <= 8 + 1e-6
    # Asking changes nothing, and what is saved comes back.
    assert topics.to_bytes() == before
    again = QueryTopics(settings, finder=Words())
    again.restore(before)
    assert again.to_bytes() == before
    for taker in (topics, again):
        taker.observe(events)
    assert again.to_bytes() == topics.to_bytes()
