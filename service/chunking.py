"""Cuts documents into passages on headings and paragraphs, to a target number of words.

A passage never crosses a heading of level 1 or 2 above it, keeps whole paragraphs where it can,
then whole sentences, and only then cuts between words. Small leftovers join their neighbour, so
that a page does not end in a passage of five words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from stoker.errors import InputError

# An overlong "word" (base64, minified script) is cut too: it would otherwise be one huge passage.
_WORD_LETTERS_MAX = 400
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(`])")
_PARAGRAPH_GAP = re.compile(r"\n[ \t]*\n\s*")
_SHORT_RATIO = 0.25
_JOINED_RATIO = 1.34


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A stretch of a document under one heading.

    Attributes:
        headings: The titles from the document's top down to this section; may be empty.
        paragraphs: In reading order; white space inside is not significant.
    """

    headings: tuple[str, ...]
    paragraphs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A cut passage and the headings that it stands under."""

    headings: tuple[str, ...]
    text: str


def chunk_sections(sections: Sequence[Section], *, words: int) -> list[Chunk]:
    """Cut ``sections`` into chunks of about ``words`` words; each starts with its last heading.

    Sections far below the target are packed together while they share their parent headings.
    """
    chunks: list[Chunk] = []
    for group in _packed(sections, words):
        lead = group[0].headings
        paragraphs = list(group[0].paragraphs)
        for section in group[1:]:
            title = section.headings[-1] if section.headings else ""
            paragraphs.append(f"{title}. {section.paragraphs[0]}" if title else "")
            paragraphs.extend(section.paragraphs[1:] if title else section.paragraphs)
        for piece in pack_paragraphs(paragraphs, words=words):
            text = f"{lead[-1]}\n{piece}" if lead else piece
            chunks.append(Chunk(lead, text))
    return chunks


def _packed(sections: Sequence[Section], words: int) -> Iterator[list[Section]]:
    group: list[Section] = []
    size = 0
    for section in sections:
        kept = tuple(text for text in section.paragraphs if text.strip())
        if not kept:
            continue
        section = dataclasses.replace(section, paragraphs=kept)
        length = sum(len(text.split()) for text in kept)
        fits = size + length <= words and length < words // 2
        if group and not (fits and section.headings[:-1] == group[0].headings[:-1]):
            yield group
            group, size = [], 0
        group.append(section)
        size += length
    if group:
        yield group


def split_words(text: str, *, words: int) -> list[str]:
    """Cut plain text into pieces of about ``words`` words, on blank lines where possible."""
    return pack_paragraphs(_PARAGRAPH_GAP.split(text), words=words)


def pack_paragraphs(paragraphs: Sequence[str], *, words: int) -> list[str]:
    """Pack paragraphs into pieces of about ``words`` words; white space is collapsed.

    Returns:
        Pieces in order, none empty, none above 1.34 × ``words`` words.
    """
    if words < 1:
        raise InputError(f"words: expected at least 1, found {words}")
    pieces: list[str] = []
    held: list[str] = []
    for unit in _units(paragraphs, words):
        if held and len(held) + len(unit) > words:
            pieces.append(" ".join(held))
            held = []
        held.extend(unit)
    if held:
        short = len(held) < words * _SHORT_RATIO
        if short and pieces and len(pieces[-1].split()) + len(held) <= words * _JOINED_RATIO:
            pieces[-1] = f"{pieces[-1]} {' '.join(held)}"
        else:
            pieces.append(" ".join(held))
    return pieces


def _units(paragraphs: Sequence[str], words: int) -> Iterator[list[str]]:
    """Yield runs of at most ``words`` words: paragraphs, else sentences, else cuts."""
    for paragraph in paragraphs:
        whole = _words(paragraph)
        if not whole:
            continue
        if len(whole) <= words:
            yield whole
            continue
        for sentence in _SENTENCE_END.split(paragraph):
            run = _words(sentence)
            for start in range(0, len(run), words):
                yield run[start : start + words]


def _words(text: str) -> list[str]:
    out: list[str] = []
    for word in text.split():
        if len(word) <= _WORD_LETTERS_MAX:
            out.append(word)
        else:
            cut = range(0, len(word), _WORD_LETTERS_MAX)
            out.extend(word[start : start + _WORD_LETTERS_MAX] for start in cut)
    return out
