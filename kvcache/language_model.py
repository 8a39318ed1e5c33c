"""An adapter for `transformers` causal models: KV out as plain arrays, KV in as a prefix.

Keys are taken as the model caches them, after rotation, at positions 0, 1, 2, ...: as a prefix
they are exact. Pinned to transformers 5.24, whose cache argument is called ``cache``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError, UnavailableError

_UNBOUNDED = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Kv:
    """Keys and values of consecutive tokens of one model.

    Attributes:
        token_ids: int32, shape (tokens,).
        keys: float32, shape (layers, kv_heads, tokens, head_dim), after rotation at ``start``.
        values: Same shape.
        start: Position of the first token.
    """

    token_ids: NDArray[np.int32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.token_ids.nbytes + self.keys.nbytes + self.values.nbytes)

    def first(self, tokens: int) -> Kv:
        """Return the first tokens, as views."""
        return Kv(
            self.token_ids[:tokens], self.keys[:, :, :tokens], self.values[:, :, :tokens],
            self.start,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """What one pass gave.

    Attributes:
        logits: float32, shape (kept, vocabulary): of the last positions.
        cache: The `transformers` cache with all tokens so far; the next pass changes it.
    """

    logits: NDArray[np.float32]
    cache: Any


def model_libraries(folder: Path) -> tuple[Any, Any]:
    """Return torch and transformers, which are to load the model in ``folder`` and fetch nothing.

    Raises:
        UnavailableError: one of them is not installed, or the folder has no model.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch

        # Its names come from a list of every model there is, which costs type checkers a minute.
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UnavailableError(
            "expected torch and transformers, found none: install stoker[models]"
        ) from error
    if not (folder / "config.json").is_file():
        raise UnavailableError(f"{folder}: expected a model folder, found no config.json")
    return torch, transformers


class LanguageModel:
    """One loaded causal model. Not thread-safe; passes run under ``torch.inference_mode``.

    Args:
        folder: A folder that `transformers` can load without a network.

    Raises:
        UnavailableError: torch or transformers is not installed, or the folder has no model.
    """

    def __init__(self, folder: Path) -> None:
        torch, transformers = model_libraries(folder)
        self.torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32
        )
        self._take(model)
        seal = folder / "stoker.json"
        identity = seal.read_bytes() if seal.is_file() else str(folder.resolve()).encode()
        identity += (folder / "config.json").read_bytes()
        self.model_id = hashlib.blake2b(identity, digest_size=16).hexdigest()

    @classmethod
    def of(cls, model: Any, *, model_id: str, tokenizer: Any = None) -> LanguageModel:
        """Take a `transformers` model that is loaded already, in float32.

        Args:
            model: A causal model.
            model_id: Letters and digits; another for other weights.
            tokenizer: For `encode` and `decode`.

        Raises:
            UnavailableError: it keeps no keys and values of each token.
        """
        import torch

        self = cls.__new__(cls)
        self.torch, self.tokenizer, self.model_id = torch, tokenizer, model_id
        self._take(model)
        return self

    def _take(self, model: Any) -> None:
        if getattr(model, "_is_stateful", False):
            raise UnavailableError(
                f"expected a model with keys and values of each token, found {type(model).__name__}"
            )
        self.model = model.eval()
        self.config = self.model.config
        self._token_bytes = 0
        self.frequencies: NDArray[np.float64] | None = None  # see `rotation`: once it was measured

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one token takes in float32."""
        if not self._token_bytes:  # measured: heads and their sizes have many names
            kv = self.prefill([0])
            self._token_bytes = int(kv.keys.nbytes + kv.values.nbytes)
        return self._token_bytes

    @property
    def tokens_max(self) -> int:
        """Tokens that the model's context holds; a large number where it sets no bound."""
        return int(getattr(self.config, "max_position_embeddings", 0) or _UNBOUNDED)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode(list(token_ids)))

    def cache_of(self, kv: Kv) -> Any:
        """Build a fresh `transformers` cache that starts with ``kv``."""
        from transformers.cache_utils import DynamicCache

        torch = self.torch
        keys, values = tensor_of(torch, kv.keys), tensor_of(torch, kv.values)
        layers = [(keys[i : i + 1], values[i : i + 1]) for i in range(keys.shape[0])]
        return DynamicCache(layers)

    def forward(self, token_ids: Sequence[int], *, cache: Any = None, keep: int = 1) -> Forward:
        """Run tokens after whatever ``cache`` holds.

        Args:
            token_ids: At least one.
            cache: From `cache_of` or an earlier `Forward`; it is changed. None starts a new one.
            keep: Positions whose logits are wanted, counted from the end; 0 for all.

        Raises:
            InputError: no tokens, more than the model's context holds, or the model turns the keys
                of a prompt of this length in another way than those in the cache were.
        """
        torch = self.torch
        past = 0 if cache is None else int(cache.get_seq_length())
        total = past + len(token_ids)
        if not token_ids or total > self.tokens_max:
            raise InputError(f"expected 1 to {self.tokens_max} tokens in all, found {total}")
        turn = self._turn_changes_at
        if turn and 0 < past <= turn < total:
            raise InputError(
                f"expected at most {turn} tokens, found {total}: beyond, this model turns all keys "
                f"otherwise, and the first {past} are turned already"
            )
        if cache is None:
            cache = self.empty_cache()
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([list(token_ids)]),
                cache=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        return Forward(output.logits[0].numpy(), output.cache)

    def empty_cache(self) -> Any:
        """Return a cache that keeps every token, where the model's own keeps a window of some."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache()

    @property
    def _turn_changes_at(self) -> int:
        """Tokens from which on a model turns its keys by another law; 0 where it does not."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return 0
        before = rope.get("original_max_position_embeddings") or getattr(
            self.config, "original_max_position_embeddings", 0
        )
        return int(before or 0)

    def prefill(self, token_ids: Sequence[int]) -> Kv:
        """Compute the keys and values of a text from position 0.

        Raises:
            InputError: as `forward` and `kv_of`.
        """
        return self.kv_of(self.forward(token_ids).cache, token_ids)

    def kv_of(self, cache: Any, token_ids: Sequence[int]) -> Kv:
        """Copy a cache's first ``len(token_ids)`` positions out.

        Raises:
            InputError: its layers do not all keep so many, or not of one shape.
        """
        torch, count = self.torch, len(token_ids)
        shapes = {tuple(getattr(layer, "keys", torch.empty(0)).shape) for layer in cache.layers}
        shapes |= {tuple(getattr(layer, "values", torch.empty(0)).shape) for layer in cache.layers}
        shape = next(iter(shapes), ())
        if len(shapes) != 1 or len(shape) != 4 or shape[2] < count:
            raise InputError(
                f"expected keys and values of {count} tokens in every layer, found {sorted(shapes)}"
            )
        with torch.inference_mode():
            keys = torch.cat([layer.keys[:, :, :count] for layer in cache.layers])
            values = torch.cat([layer.values[:, :, :count] for layer in cache.layers])
        return Kv(np.asarray(token_ids, np.int32), keys.numpy(), values.numpy())

    def generate(self, token_ids: Sequence[int], *, tokens: int, cache: Any = None) -> list[int]:
        """Continue greedily, token by token; stops early at the end-of-text token."""
        step = self.forward(token_ids, cache=cache)
        found: list[int] = []
        while True:
            found.append(int(np.argmax(step.logits[-1])))
            if len(found) == tokens or found[-1] == self.config.eos_token_id:
                return found
            step = self.forward(found[-1:], cache=step.cache)


def tensor_of(torch: Any, array: NDArray[np.float32]) -> Any:
    """Return an array as a torch tensor that may be written to."""
    # Arrays read from a file are read-only, which torch warns of; the cache copies them anyway.
    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(np.ascontiguousarray(writable))
