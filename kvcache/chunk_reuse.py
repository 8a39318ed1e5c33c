"""Chunk KV: a passage's KV stored once and placed anywhere in a prompt, some tokens computed again.

Keys are moved by rotation, which is exact; what they attended to is not, since other text now
stands before them. So a bounded share of each chunk's tokens is computed again, in one pass
together with the question. What remains is an approximation, and `chunk_gate` measures it.

Source: the choice by deviation is that of CacheBlend (Yao et al., EuroSys 2025), the choice of
first tokens that of EPIC (Hu et al., ICML 2025). Ours encodes chunks behind the system prefix, and
can weigh a token's deviation by the attention that the question pays to it: what nobody looks at
may be wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.language_model import Forward, Kv, LanguageModel
from stoker.kvcache.rotation import moved, rotary_frequencies, window_of

CHOICES = ("attended", "deviation", "first", "random", "none")
# "attended" loses less, and costs one more pass of the question: see BENCHMARKS.md.
DEFAULT_CHOICE = "deviation"
# The end of a longer question says what is asked; each token of it costs as much again.
_ATTENDING_TOKENS_MAX = 64
_EXACT = 1e-6  # a deviation that is rounding


def encode_chunk(model: LanguageModel, prefix: Kv, token_ids: Sequence[int]) -> Kv:
    """Compute a chunk's KV behind the system prefix, to be stored and moved.

    Behind the prefix rather than alone: a first token draws attention that a middle one does not.
    """
    count = len(prefix.token_ids)
    if not count:
        return model.prefill(token_ids)
    cache = model.forward(token_ids, cache=model.cache_of(prefix)).cache
    whole = model.kv_of(cache, [*prefix.token_ids.tolist(), *token_ids])
    return Kv(whole.token_ids[count:], whole.keys[:, :, count:], whole.values[:, :, count:], count)


@dataclasses.dataclass(frozen=True)
class PlacedPrompt:
    """A prompt whose context was put together from stored KV.

    Attributes:
        context: Prefix and chunks at their places; keys of chunks rotated there.
        question_ids: Tokens that are computed in any case.
        recomputed: Positions within the context that are computed again, rising.
    """

    context: Kv
    question_ids: tuple[int, ...]
    recomputed: NDArray[np.int64]


def place_chunks(
    model: LanguageModel,
    prefix: Kv,
    chunks: Sequence[Kv],
    question_ids: Sequence[int],
    *,
    recompute_ratio: float,
    choice: str = DEFAULT_CHOICE,
    known: int | None = None,
    rng: random.Random | None = None,
) -> PlacedPrompt:
    """Put chunks behind a prefix, in order, and choose the tokens to compute again.

    Args:
        model: The model that computed them all.
        prefix: The system prompt's KV from position 0; may be empty of tokens.
        chunks: From `encode_chunk`, in the order of the prompt.
        question_ids: What follows; at least one token.
        recompute_ratio: Most chunk tokens that are computed again, as a share, in [0, 1].
        choice: ``deviation``: those whose second-layer KV differs most from what it would be here;
            ``attended``: the same, weighed by the question's attention; ``first``: each chunk's
            first; ``random``; ``none``.
        known: How many tokens of ``question_ids`` may be looked at for the choice; None for all.
            A measurement whose "question" is text to be foretold shows a part of it only.
        rng: For ``random``.

    Raises:
        InputError: a ratio outside [0, 1], an unknown choice, no question, no context, KV of
            another model, or a model whose keys cannot be moved.
    """
    if not 0.0 <= recompute_ratio <= 1.0 or choice not in CHOICES:
        raise InputError(
            f"expected a ratio in [0, 1] and one of {', '.join(CHOICES)}, found "
            f"{recompute_ratio} and {choice!r}"
        )
    if not question_ids:
        raise InputError("question_ids: expected at least one token")
    frequencies = rotary_frequencies(model)
    parts, start = [prefix] if len(prefix.token_ids) else [], len(prefix.token_ids)
    for chunk in chunks:
        parts.append(moved(chunk, start, frequencies))
        start += len(chunk.token_ids)
    shapes = {(*part.keys.shape[:2], part.keys.shape[3]) for part in parts}
    if len(shapes) != 1:
        raise InputError(f"expected a context of one model's KV, found shapes {sorted(shapes)}")
    context = Kv(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.keys for part in parts], axis=2),
        np.concatenate([part.values for part in parts], axis=2),
    )
    # A first chunk that stands where it was computed is exact: it needs nothing.
    exact = len(prefix.token_ids)
    if chunks and chunks[0].start == exact:
        exact += len(chunks[0].token_ids)
    deviation = None
    if recompute_ratio and choice in ("deviation", "attended"):
        deviation = second_layer_deviation(model, context)
        before = deviation[len(prefix.token_ids) : exact]
        if len(before) and before.max() > _EXACT:  # it was computed behind something else
            exact = len(prefix.token_ids)
    count = math.floor(recompute_ratio * (start - exact))
    recomputed: NDArray[np.int64] = np.zeros(0, np.int64)
    if count and choice == "random":
        recomputed = np.array((rng or random.Random(0)).sample(range(exact, start), count))
    elif count and choice == "first":
        recomputed = _first_positions(chunks, len(prefix.token_ids), exact, count)
    elif count and deviation is not None:
        worth = deviation
        if choice == "attended":
            worth = worth * question_attention(model, context, question_ids[:known])
        recomputed = exact + np.argsort(-worth[exact:], kind="stable")[:count]
    return PlacedPrompt(context, tuple(question_ids), np.sort(recomputed))


def _first_positions(chunks: Sequence[Kv], start: int, exact: int, count: int) -> NDArray[np.int64]:
    """Take every inexact chunk's first token, then every second one, until there are enough."""
    places: list[tuple[int, int]] = []
    for chunk in chunks:
        places.extend((rank, start + rank) for rank in range(len(chunk.token_ids)))
        start += len(chunk.token_ids)
    inexact = sorted((rank, place) for rank, place in places if place >= exact)
    return np.array([place for _, place in inexact[:count]], np.int64)


def second_layer_deviation(model: LanguageModel, context: Kv) -> NDArray[np.float64]:
    """Say how much each token's second-layer KV differs from what it would be in this context.

    The first layer's stored KV is exact at any place, so one layer is run in full: a thirtieth of
    a small model's work, and the deviation there foretells that of the deeper ones.

    Returns:
        float64, shape (tokens,): squared difference of keys and values over their squared size.
    """
    layers = len(context.keys)
    if layers < 2:
        return np.zeros(len(context.token_ids))
    torch: Any = model.torch
    cache = _second_layer_cache(layers)
    with torch.inference_mode(), contextlib.suppress(_SecondLayer):
        ids = torch.from_numpy(context.token_ids.astype(np.int64))[None]
        model.model.base_model(input_ids=ids, cache=cache, use_cache=True)
    found = cache.layers[1]
    deviation = np.zeros(len(context.token_ids))
    for fresh, stored in ((found.keys, context.keys[1]), (found.values, context.values[1])):
        fresh_array = fresh[0].numpy().astype(np.float64)
        gap = ((fresh_array - stored) ** 2).sum(axis=(0, 2))
        deviation += gap / np.maximum((fresh_array**2).sum(axis=(0, 2)), 1e-30)
    return deviation


class _SecondLayer(Exception):
    """The second layer's keys and values are there: the rest of the pass is not needed."""


def _second_layer_cache(layers: int) -> Any:
    """Return a cache that ends the pass as soon as the second layer gives its KV to it.

    So the model itself computes them, with whatever it does to embeddings, states and keys.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    base: Any = DynamicLayer

    class LastLayer(base):  # type: ignore[misc]
        """Keeps what it is given, and lets the pass go no further."""

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            self.keys, self.values = key_states, value_states
            raise _SecondLayer

    kinds = [base, LastLayer, *[base] * (layers - 2)]
    return Cache(layers=[kind() for kind in kinds])


def question_attention(
    model: LanguageModel, context: Kv, question_ids: Sequence[int]
) -> NDArray[np.float64]:
    """Say how much attention a question pays to each token of a context, as it is stored.

    One pass of the question's end, as of a reused prefix. Until it returns the model computes
    attention by the plain way, which gives the weights.

    Returns:
        float64, shape (tokens,): sum over layers, heads and the question's tokens.

    Raises:
        InputError: the model's layers do not say what they attend to.
    """
    torch: Any = model.torch
    count = len(context.token_ids)
    asked = question_ids[-_ATTENDING_TOKENS_MAX:]
    paid = torch.zeros(count, dtype=torch.float64)

    def take(module: Any, inputs: Any, output: Any) -> None:
        paid.add_(output[1][0, :, :, :count].sum(dim=(0, 1)).double())

    decoder = model.model.base_model
    layers = getattr(decoder, "layers", ())
    attending: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    if not attending or not all(attending):
        raise InputError(
            f"expected layers with self_attn, found none in {type(decoder).__name__}: its "
            "attention cannot be read"
        )
    hooks = [module.register_forward_hook(take) for module in attending]
    way = model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            places = torch.arange(count, count + len(asked))[None]
            seen = torch.arange(count + len(asked))[None, :] <= places[0][:, None]
            mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
            decoder(
                input_ids=torch.tensor([list(asked)]), position_ids=places,
                attention_mask=mask[None, None], cache=model.cache_of(context), use_cache=True,
            )  # fmt: skip
    finally:
        model.model.set_attn_implementation(way)
        for hook in hooks:
            hook.remove()
    attention: NDArray[np.float64] = paid.numpy()
    return attention


def run_placed(model: LanguageModel, prompt: PlacedPrompt) -> Forward:
    """Compute the chosen tokens again and the question after them, in one pass.

    Returns:
        Logits of all question positions, and a cache with the whole prompt, to generate from.
    """
    torch: Any = model.torch
    context, count = prompt.context, len(prompt.context.token_ids)
    again = prompt.recomputed
    ids = [*context.token_ids[again].tolist(), *prompt.question_ids]
    total = count + len(prompt.question_ids)
    if total > window_of(model):
        raise InputError(f"expected at most {window_of(model)} tokens, found {total}")
    places = np.concatenate([again, np.arange(count, total)]).astype(np.int64)
    cache = _placed_cache(model, context, places, total)
    with torch.inference_mode():
        position_ids = torch.from_numpy(places)[None]
        seen = torch.arange(total)[None, :] <= position_ids[0][:, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        output = model.model(
            input_ids=torch.tensor([ids]), position_ids=position_ids,
            attention_mask=mask[None, None], cache=cache, use_cache=True,
            logits_to_keep=len(prompt.question_ids),
        )  # fmt: skip
    return Forward(output.logits[0].numpy(), output.cache)


def _placed_cache(model: LanguageModel, context: Kv, places: NDArray[np.int64], total: int) -> Any:
    """Build a cache whose next update goes to given places, and later ones to the end."""
    from transformers.cache_utils import Cache, DynamicLayer

    torch: Any = model.torch
    index = torch.from_numpy(places)
    base: Any = DynamicLayer

    class PlacedLayer(base):  # type: ignore[misc]
        """One layer's KV with room for the question; the first update is scattered."""

        def __init__(self, keys: Any, values: Any) -> None:
            super().__init__()
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values
            self.waiting = True

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.waiting:
                return super().update(key_states, value_states, *args, **kwargs)
            self.waiting = False
            self.keys.index_copy_(2, index, key_states)
            self.values.index_copy_(2, index, value_states)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            if self.waiting:
                return total, 0
            sizes: tuple[int, int] = super().get_mask_sizes(query_length)
            return sizes

    layers: list[Any] = []
    with torch.inference_mode():
        for keys, values in zip(context.keys, context.values, strict=True):
            room = [
                torch.zeros((1, array.shape[0], total, array.shape[2])) for array in (keys, values)
            ]
            for target, array in zip(room, (keys, values), strict=True):
                target[0, :, : array.shape[1]] = torch.tensor(array)
            layers.append(PlacedLayer(*room))
    return Cache(layers=layers)
