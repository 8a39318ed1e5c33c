"""KV of a run of tokens: put together from parts, cut into them, copied out of a larger whole."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stoker.kvcache.language_model import Kv


def joined(parts: Iterable[Kv | None]) -> Kv | None:
    """Put KV of consecutive tokens together; None if any part has none."""
    whole = list(parts)
    known = [part for part in whole if part is not None]
    if len(known) != len(whole) or not known:
        return None
    if len(known) == 1:
        return known[0]
    return Kv(
        np.concatenate([part.token_ids for part in known]),
        np.concatenate([part.keys for part in known], axis=2),
        np.concatenate([part.values for part in known], axis=2),
        known[0].start,
    )


def part_of(kv: Kv | None, start: int, stop: int) -> Kv | None:
    """Return a view of the tokens from ``start`` to ``stop``; None of none."""
    if kv is None:
        return None
    return Kv(
        kv.token_ids[start:stop], kv.keys[:, :, start:stop], kv.values[:, :, start:stop],
        kv.start + start,
    )  # fmt: skip


def owned(kv: Kv | None) -> Kv | None:
    """Copy a part out of a larger array, or the whole of it would stay in memory."""
    if kv is None:
        return None
    return Kv(kv.token_ids.copy(), kv.keys.copy(), kv.values.copy(), kv.start)
