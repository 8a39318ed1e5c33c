"""Whether and how a model's keys can be moved to another place of a prompt.

Models that rotate their keys by position (RoPE) differ in how: by half of a head's dimensions or by
neighbours, all dimensions or some, all layers or some, by one law or by another for long prompts.
So it is measured: the same tokens at other positions must have the same values in every layer, and
keys that are the first ones, turned. What a model does not show is refused, with what was seen.

Source: Su et al., "RoFormer", 2021, for the rotation: only differences of positions count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.language_model import Kv, LanguageModel

_PROBE_TOKENS = 8
# Rounding gives 1e-4 at the end of a long context; a wrong turn of one layer gives about 1.
_GAP_MAX = 0.02


def rotary_frequencies(model: LanguageModel) -> NDArray[np.float64]:
    """Return a model's rotation per position and pair of dimensions, shape (rotated_dims / 2,).

    Measured at first, by three passes of a few tokens.

    Raises:
        InputError: its keys cannot be moved by this rotation; says why.
    """
    if model.frequencies is None:
        model.frequencies = _measured(model)
    return model.frequencies


def window_of(model: LanguageModel) -> int:
    """Return up to how many tokens every layer sees all of them; at least 1.

    Raises:
        InputError: the model has layers of a kind that is not known here.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window, limit = getattr(config, "sliding_window", None), model.tokens_max
    if not kinds and window:
        kinds = {"sliding_attention"}
    for kind in sorted(kinds - {"full_attention"}):
        if kind == "sliding_attention" and window:
            limit = min(limit, int(window))
        elif kind == "chunked_attention" and getattr(config, "attention_chunk_size", None):
            limit = min(limit, int(config.attention_chunk_size))
        else:
            raise InputError(f"expected layers with full attention, found {kind}")
    return limit


def moved(kv: Kv, start: int, frequencies: NDArray[np.float64]) -> Kv:
    """Move keys to begin at another position.

    The table is made in float64: in float32 it drifts by 2e-4 at position 100,000.

    Args:
        kv: Keys as rotated at ``kv.start``.
        start: The new position of the first token.
        frequencies: From `rotary_frequencies`. Dimensions beyond twice as many are not rotated.
    """
    shift = start - kv.start
    if shift == 0:
        return kv
    angles = shift * frequencies
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = len(frequencies)
    low, high, rest = np.split(kv.keys, (half, 2 * half), axis=-1)
    keys = np.concatenate([low * cosine - high * sine, high * cosine + low * sine, rest], axis=-1)
    return Kv(kv.token_ids, keys.astype(np.float32, copy=False), kv.values, start)


def _measured(model: LanguageModel) -> NDArray[np.float64]:
    kind = type(model.model).__name__
    rotary = getattr(model.model.base_model, "rotary_emb", None)
    inverse = getattr(rotary, "inv_freq", None)
    if inverse is None:
        raise InputError(f"expected one rotation of keys by position, found none in {kind}")
    if float(getattr(rotary, "attention_scaling", 1.0)) != 1.0:
        raise InputError("expected attention_scaling of 1, found another: keys cannot be moved")
    limit = window_of(model)
    count = max(1, min(_PROBE_TOKENS, limit // 2))
    frequencies = np.asarray(inverse.numpy(), np.float64)
    first = _keys_at(model, 0, count)
    if not 2 * len(frequencies) <= first.keys.shape[-1]:
        raise InputError(
            f"expected keys of at least {2 * len(frequencies)} dimensions, found "
            f"{first.keys.shape[-1]} in {kind}"
        )
    for start in sorted({min(3, limit - count), limit - count}):
        there = _keys_at(model, start, count)
        here = moved(first, start, frequencies)
        for name, ours, theirs in (
            ("keys", here.keys, there.keys), ("values", here.values, there.values)
        ):  # fmt: skip
            size = np.sqrt((theirs.astype(np.float64) ** 2).sum(axis=(1, 2, 3)))
            gap = np.sqrt(((ours.astype(np.float64) - theirs) ** 2).sum(axis=(1, 2, 3)))
            far = np.flatnonzero(~(gap <= _GAP_MAX * np.maximum(size, 1e-30)))
            if len(far):
                raise InputError(
                    f"expected {name} of {kind} to turn with their position, found others in "
                    f"{len(far)} of {len(gap)} layers, first in layer {far[0]}, at {start}"
                )
    return frequencies


def _keys_at(model: LanguageModel, start: int, count: int) -> Kv:
    """Compute keys and values of the same few tokens, at any position, with none before them."""
    torch: Any = model.torch
    ids = (np.arange(1, count + 1) * 7919 % int(model.config.vocab_size)).astype(np.int32)
    places = torch.arange(start, start + count)[None]
    seen = torch.tril(torch.ones((count, count), dtype=torch.bool))
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        output = model.model.base_model(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None], position_ids=places,
            attention_mask=mask[None, None], cache=model.empty_cache(), use_cache=True,
        )  # fmt: skip
    found = model.kv_of(output.cache, ids.tolist())
    return Kv(found.token_ids, found.keys, found.values, start)
