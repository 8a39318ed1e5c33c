"""Chunking loses no word, keeps the order, and keeps to its bound."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from stoker.service.chunking import Section, chunk_sections, pack_paragraphs, split_words

WORDS = st.text(alphabet=string.ascii_letters + "éß字", min_size=1, max_size=12)
PARAGRAPHS = st.lists(
    st.lists(st.tuples(WORDS, st.sampled_from(["", ".", "!"])), max_size=60).map(
        lambda pairs: " ".join(word + end for word, end in pairs)
    ),
    max_size=12,
)


@given(PARAGRAPHS, st.integers(1, 40))
def test_every_word_is_kept_in_order_within_the_bound(paragraphs: list[str], words: int) -> None:
    pieces = pack_paragraphs(paragraphs, words=words)
    assert " ".join(pieces).split() == " ".join(paragraphs).split()
    assert all(piece for piece in pieces)
    assert all(len(piece.split()) <= words * 1.34 for piece in pieces)


@given(st.text(max_size=400), st.integers(1, 20))
def test_any_text_is_cut_without_loss(text: str, words: int) -> None:
    assert "".join("".join(split_words(text, words=words)).split()) == "".join(text.split())


@given(st.lists(st.tuples(st.sampled_from(["A", "B", "C"]), PARAGRAPHS), max_size=8))
def test_sections_keep_every_word_of_their_paragraphs(raw: list[tuple[str, list[str]]]) -> None:
    sections = [Section(("Top", title), tuple(paragraphs)) for title, paragraphs in raw]
    chunks = chunk_sections(sections, words=20)
    kept = " ".join(chunk.text for chunk in chunks).split()
    for section in sections:
        for word in " ".join(section.paragraphs).split():
            assert word in kept
    assert all(chunk.headings[0] == "Top" for chunk in chunks)


def test_an_overlong_word_is_cut() -> None:
    pieces = split_words("x" * 1_000, words=1)
    assert [len(piece) for piece in pieces] == [400, 400, 200]


def test_a_small_leftover_joins_its_neighbour_and_a_large_one_does_not() -> None:
    assert pack_paragraphs(["a " * 10, "b"], words=10) == [" ".join(["a"] * 10 + ["b"])]
    assert len(pack_paragraphs(["a " * 10, "b " * 5], words=10)) == 2


def test_short_neighbouring_sections_share_a_chunk_and_keep_their_titles() -> None:
    sections = [Section(("T", f"s{i}"), (f"body {i}",)) for i in range(3)]
    (chunk,) = chunk_sections(sections, words=50)
    assert chunk.text == "s0\nbody 0 s1. body 1 s2. body 2"
    apart = [Section(("T", "s0"), ("body",)), Section(("U", "s1"), ("body",))]
    assert len(chunk_sections(apart, words=50)) == 2
