"""A second opinion on two questions: their tokens compared, weighted by a model's attention.

A sentence's one vector says what it is about and blurs who does what to which. Here every token of
one question looks for its best match in the other, and tokens that the model attends to count for
more. Optional: `bench_kvcache_attention.py` measures it against plain cosine, and nothing in the
lookup uses it unless that pays.

Source: the matching is ColBERT's late interaction (Khattab and Zaharia, 2020), without its
training; ours takes the weights from the attention of the first token in the last layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.language_model import model_libraries


@dataclasses.dataclass(frozen=True, slots=True)
class TokenView:
    """One text as a model's last layer sees it, special tokens left out.

    Attributes:
        vectors: float32, shape (tokens, dim), unit length.
        weights: float32, shape (tokens,), non-negative, sum 1.
    """

    vectors: NDArray[np.float32]
    weights: NDArray[np.float32]


def aligned_similarity(one: TokenView, other: TokenView) -> float:
    """Return how well the tokens of two texts match, in [-1, 1]; the worse of both directions.

    The worse one: a text that is part of another is not the same question.

    Raises:
        InputError: vectors of different dims, or a text without tokens.
    """
    if not len(one.weights) or not len(other.weights):
        raise InputError("expected texts with tokens, found none")
    if one.vectors.shape[1] != other.vectors.shape[1]:
        raise InputError(
            f"expected vectors of one dim, found {one.vectors.shape[1]} and "
            f"{other.vectors.shape[1]}"
        )
    cosines = one.vectors @ other.vectors.T
    return float(min(one.weights @ cosines.max(axis=1), other.weights @ cosines.max(axis=0)))


class AttentionReader:
    """Reads texts with a `transformers` encoder. Not thread-safe.

    Args:
        folder: A folder with an encoder and its tokenizer; nothing is fetched.

    Raises:
        UnavailableError: torch or transformers is not installed, or the folder has no model.
    """

    def __init__(self, folder: Path) -> None:
        torch, transformers = model_libraries(folder)
        self._torch = torch
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
        model: Any = transformers.AutoModel.from_pretrained(
            str(folder), attn_implementation="eager"
        )
        self._model = model.eval()

    def read(self, texts: Sequence[str]) -> list[TokenView]:
        """Return the token views of texts, in their order; one batch."""
        torch = self._torch
        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt",
            return_special_tokens_mask=True,
        )  # fmt: skip
        special = batch.pop("special_tokens_mask").bool() | ~batch["attention_mask"].bool()
        with torch.inference_mode():
            output = self._model(**batch, output_attentions=True)
        vectors = torch.nn.functional.normalize(output.last_hidden_state, dim=-1)
        attention = output.attentions[-1].mean(dim=1)[:, 0]
        views = []
        for place in range(len(texts)):
            kept = ~special[place]
            weights = attention[place][kept]
            weights = weights / weights.sum().clamp_min(1e-12)
            views.append(TokenView(vectors[place][kept].numpy(), weights.numpy()))
        return views
