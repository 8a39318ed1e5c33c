"""Lists of words as they are written down in code: one text, a space between two words."""

from __future__ import annotations


def words_of(text: str) -> list[str]:
    """Return the words in order."""
    return text.split()


def set_of(text: str) -> frozenset[str]:
    """Return the words, whatever their order."""
    return frozenset(text.split())
