"""What the readers hand on: one retrievable passage, where it came from, and what was left out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One chunk of text, or one ready vector, on its way into an index.

    Attributes:
        id: Unique in its index; 1 to 383 bytes of UTF-8 without control characters.
        text: What is embedded and shown; empty where only a vector was given.
        metadata: JSON values; always has ``source``.
        vector: float32, shape (dim,), finite; absent where the text is still to be embedded.
        origin: ``file``, ``file:line`` or ``file row n``: what an error about this passage names.
    """

    id: str
    text: str
    metadata: Mapping[str, Any]
    origin: str
    vector: NDArray[np.float32] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Something under a given folder that was not read, and why."""

    origin: str
    reason: str


@dataclasses.dataclass(slots=True)
class ReadReport:
    """Counts of one reading; filled while the passages are being drawn.

    Attributes:
        skipped: The first ``skipped_kept_max`` things left out; ``skipped_count`` counts all.
    """

    file_count: int = 0
    passage_count: int = 0
    skipped_count: int = 0
    skipped_kept_max: int = 1_000
    skipped: list[Skipped] = dataclasses.field(default_factory=list)

    def skip(self, origin: str, reason: str) -> None:
        """Count one thing left out, and keep its reason while there is room."""
        self.skipped_count += 1
        if len(self.skipped) < self.skipped_kept_max:
            self.skipped.append(Skipped(origin, reason))


def text_digest(text: str) -> str:
    """Return 16 hex digits that stand for ``text`` (BLAKE2b, 64 bits)."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
