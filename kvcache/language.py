"""Guess what language or script a question is in, by its letters and its commonest words."""

from __future__ import annotations

import unicodedata

from stoker.kvcache.word_lists import set_of

_LANGUAGE_WORDS: dict[str, frozenset[str]] = {
    "en": set_of("the is are how what do does can my i to of in for and why when with"),
    "de": set_of("der die das ist sind wie was ich und mein nicht mit für den ein eine"),
    "fr": set_of("le la les est sont comment que je et mon ne pas avec pour un une des"),
    "es": set_of("el la los es son cómo como qué que yo y mi no con para un una por"),
    "it": set_of("il lo gli è sono come che io e mio non con per un una di della"),
    "pt": set_of("o os é são como que eu e meu não com para um uma do da"),
    "nl": set_of("de het is zijn hoe wat ik en mijn niet met voor een van"),
}
_SCRIPTS = (
    ("CJK", "han"), ("HIRAGANA", "kana"), ("KATAKANA", "kana"), ("HANGUL", "hangul"),
    ("CYRILLIC", "cyrillic"), ("ARABIC", "arabic"), ("HEBREW", "hebrew"), ("GREEK", "greek"),
    ("DEVANAGARI", "devanagari"), ("THAI", "thai"),
)  # fmt: skip


def _script_of(text: str) -> str:
    for character in text:
        if character.isalpha() and ord(character) > 0x2FF:
            name = unicodedata.name(character, "")
            for prefix, script in _SCRIPTS:
                if name.startswith(prefix):
                    return script
    return ""


def language_of(text: str, lowered: list[str]) -> str:
    """Return the script of letters that are not Latin, else a code such as "de"; "" if unsure."""
    script = _script_of(text)
    if script:
        return script
    present = set(lowered)
    counts = {name: len(present & words) for name, words in _LANGUAGE_WORDS.items()}
    best = max(counts, key=lambda name: counts[name])
    others = max(count for name, count in counts.items() if name != best)
    # Two function words more than any rival: short questions are left undecided on purpose.
    return best if counts[best] >= others + 2 else ""
