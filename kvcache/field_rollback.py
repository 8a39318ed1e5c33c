"""A changed document, field by field: what must be computed again, and what keeps its cache.

A document of ten fields in which one number changed need not lose all that was computed for it.
A field is kept only where it says the same for certain, or where it does not matter to answers and
hardly differs; everything else is rolled back.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.guards import first_conflict
from stoker.kvcache.question import read_question

Embed = Callable[[Sequence[str]], NDArray[Any]]


class Reason(enum.StrEnum):
    """Why a field was kept or rolled back."""

    UNCHANGED = "unchanged"
    SAME_NORMAL_FORM = "same_normal_form"  # case, space, units
    UNIMPORTANT = "unimportant"
    ADDED = "added"
    REMOVED = "removed"
    CONFLICT = "conflict"  # a guard spoke: negation, number, name, ...
    DIFFERENT = "different"


_KEPT = frozenset({Reason.UNCHANGED, Reason.SAME_NORMAL_FORM, Reason.UNIMPORTANT})


@dataclasses.dataclass(frozen=True, slots=True)
class FieldVerdict:
    """What happens to one field.

    Attributes:
        name: The field.
        reason: Why.
        detail: What differed, for people.
    """

    name: str
    reason: Reason
    detail: str = ""

    @property
    def kept(self) -> bool:
        """Whether what was computed for this field stays."""
        return self.reason in _KEPT


def compare_fields(
    before: Mapping[str, str],
    after: Mapping[str, str],
    *,
    weights: Mapping[str, float] | None = None,
    weight_min: float = 0.75,
    embed: Embed | None = None,
    similarity_min: float = 0.98,
) -> list[FieldVerdict]:
    """Decide for every field of either version whether its cache is rolled back.

    Args:
        before: Field texts of the version that was computed.
        after: Those of the version now.
        weights: How much a field matters to answers, in [0, 1], as from a model's attention; a
            field that is not named matters fully.
        weight_min: A field above this weight is kept only if its normal form is the same.
        embed: Texts to vectors, for fields at or below that weight; without it they, too, are kept
            only if their normal form is the same.
        similarity_min: Cosine from which such a field counts as hardly different.

    Returns:
        One verdict a field, sorted by name.

    Raises:
        InputError: a weight outside [0, 1], or vectors of another count than texts.
    """
    known = weights or {}
    for name, weight in known.items():
        if not 0.0 <= weight <= 1.0:
            raise InputError(f"{name}: expected a weight in [0, 1], found {weight}")
    verdicts: list[FieldVerdict] = []
    unsure: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            verdicts.append(FieldVerdict(name, Reason.ADDED))
        elif name not in after:
            verdicts.append(FieldVerdict(name, Reason.REMOVED))
        elif before[name] == after[name]:
            verdicts.append(FieldVerdict(name, Reason.UNCHANGED))
        else:
            verdict = _compare_changed(name, before[name], after[name])
            if verdict is not None:
                verdicts.append(verdict)
            elif embed is None or known.get(name, 1.0) > weight_min:
                verdicts.append(FieldVerdict(name, Reason.DIFFERENT))
            else:
                unsure.append(name)
    if unsure and embed is not None:
        vectors = np.asarray(embed([version[n] for n in unsure for version in (before, after)]))
        if vectors.ndim != 2 or len(vectors) != 2 * len(unsure):
            raise InputError(f"embed: expected {2 * len(unsure)} vectors, found {vectors.shape}")
        lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
        units = vectors / lengths
        for place, name in enumerate(unsure):
            cosine = float(units[2 * place] @ units[2 * place + 1])
            reason = Reason.UNIMPORTANT if cosine >= similarity_min else Reason.DIFFERENT
            verdicts.append(FieldVerdict(name, reason, f"cosine {cosine:.3f}"))
    return sorted(verdicts, key=lambda verdict: verdict.name)


def _compare_changed(name: str, before: str, after: str) -> FieldVerdict | None:
    """Judge by the text alone; None where it cannot say."""
    earlier, now = read_question(before), read_question(after)
    if earlier.normal == now.normal:
        # Punctuation is not in the normal form: where one has words and the other none, it differs.
        return FieldVerdict(name, Reason.SAME_NORMAL_FORM) if now.normal else None
    conflict = first_conflict(now, earlier)
    if conflict is None:
        return None
    detail = f"{conflict.guard}: {conflict.earlier!r} to {conflict.asked!r}"
    return FieldVerdict(name, Reason.CONFLICT, detail)


def rolled_back(verdicts: Sequence[FieldVerdict]) -> list[str]:
    """Return the fields whose cache must go."""
    return [verdict.name for verdict in verdicts if not verdict.kept]
