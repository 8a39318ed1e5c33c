"""Models that place their tokens in other ways: prefixes are exact, chunks are moved or refused.

Small models of the real classes with random weights: nothing about them is likely but their shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.chunk_reuse import encode_chunk, place_chunks, run_placed
from stoker.kvcache.language_model import Kv, LanguageModel
from stoker.kvcache.rotation import rotary_frequencies

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WINDOW, LIMIT = 24, 128
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": LIMIT, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
MOVED, SHORT = "moved", "moved within the window"


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LONG = {
    "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# Class, its options, and what becomes of chunks: moved, or the reason for which they are not.
KINDS = {
    "one head of keys": ("Llama", {**SIZES, "num_key_value_heads": 1}, MOVED),
    "linear scaling": ("Llama", {**GROUPED, **rope("linear", factor=4.0)}, MOVED),
    "dynamic scaling": ("Llama", {**GROUPED, **rope("dynamic", factor=4.0)}, MOVED),
    "by frequency": (
        "Llama", {**GROUPED, **rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)}, MOVED,
    ),
    "half of a head": ("Phi", SIZES, MOVED),
    "one matrix for all": ("Phi3", GROUPED, MOVED),
    "keys normed": ("Qwen3", {**GROUPED, "head_dim": 8}, MOVED),
    "window": ("Mistral", {**GROUPED, "sliding_window": WINDOW}, SHORT),
    "attention scaled": (
        "Llama", {**GROUPED, **rope("yarn", factor=4.0, original_max_position_embeddings=32)},
        "attention_scaling",
    ),
    "another law when long": (
        "Llama", {**GROUPED, **rope("longrope", attention_factor=1.0, **LONG)}, "in 4 of 4 layers",
    ),
    "neighbours turned": ("Cohere", GROUPED, "in 4 of 4 layers"),
    "some layers turned": (
        "SmolLM3", {**GROUPED, "no_rope_layer_interval": 2}, "in 2 of 4 layers",
    ),
    "two rotations": (
        "Gemma3Text", {**GROUPED, "head_dim": 8, "sliding_window": WINDOW}, "one rotation",
    ),
    "places added": (
        "GPT2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LIMIT},
        "one rotation",
    ),
}  # fmt: skip


def made(name: str, options: dict[str, object]) -> LanguageModel:
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.3)
    return LanguageModel.of(model, model_id="tiny")


def logits_of(model: LanguageModel, ids: list[int], keep: int) -> np.ndarray:
    with torch.inference_mode():
        whole = model.model(input_ids=torch.tensor([ids]), use_cache=False).logits
    logits: np.ndarray = whole[0, -keep:].numpy()
    return logits


def placed(model: LanguageModel, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of a prompt of moved chunks, all computed again, and of the full run."""
    rng = np.random.default_rng(11)
    system, one, two, asked = (
        rng.integers(3, 97, count).tolist() for count in (size, size, size, 3)
    )
    prefix = model.prefill(system)
    chunks = [encode_chunk(model, prefix, ids) for ids in (one, two)]
    prompt = place_chunks(model, prefix, chunks, asked, recompute_ratio=1.0)
    return run_placed(model, prompt).logits, logits_of(model, system + one + two + asked, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_are_exact_and_chunks_are_moved_rightly_or_refused(kind: str) -> None:
    name, options, chunks = KINDS[kind]
    model = made(name, options)
    ids = np.random.default_rng(5).integers(3, 97, 70).tolist()
    full = logits_of(model, ids, 5)
    kv = model.prefill(ids[:-5])
    assert kv.keys.shape[2] == 65
    assert kv.nbytes == 65 * (model.token_bytes + 4)
    ours = model.forward(ids[-5:], cache=model.cache_of(kv), keep=5).logits
    np.testing.assert_allclose(ours, full, atol=5e-4 * np.abs(full).max())
    if chunks not in (MOVED, SHORT):
        with pytest.raises(InputError, match=chunks):
            placed(model, 6)
        return
    ours, full = placed(model, 6)
    np.testing.assert_allclose(ours, full, atol=5e-4 * np.abs(full).max())
    if chunks == SHORT:
        with pytest.raises(InputError, match=f"at most {WINDOW} tokens"):
            placed(model, 10)


def test_a_prefix_that_a_longer_prompt_would_turn_otherwise_is_refused() -> None:
    model = made("Llama", {**GROUPED, **rope("longrope", **LONG)})
    ids = np.random.default_rng(5).integers(3, 97, 40).tolist()
    with pytest.raises(InputError, match="at most 32 tokens, found 40"):
        model.forward(ids[20:], cache=model.cache_of(model.prefill(ids[:20])))


def test_a_model_without_keys_of_each_token_is_refused() -> None:
    with pytest.raises(UnavailableError, match="Mamba"):
        made("Mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2})


def test_what_stands_at_its_place_behind_another_text_is_not_taken_for_exact() -> None:
    model = made("Llama", GROUPED)
    first, second = model.prefill([5, 6, 7, 8]), model.prefill([40, 41, 42, 43])
    chunk = [encode_chunk(model, first, [9, 10, 11, 12, 13, 14])]
    same = place_chunks(model, first, chunk, [3], recompute_ratio=0.5)
    other = place_chunks(model, second, chunk, [3], recompute_ratio=0.5)
    assert len(same.recomputed) == 0
    assert len(other.recomputed) == 3


def test_kv_of_two_models_is_refused_in_one_prompt() -> None:
    model = made("Llama", GROUPED)
    prefix = model.prefill([5, 6, 7, 8])
    foreign = Kv(prefix.token_ids, prefix.keys[:2], prefix.values[:2])
    for chunks, before in (([foreign], prefix), ([], Kv(*model_parts(prefix)))):
        with pytest.raises(InputError, match="one model's KV"):
            place_chunks(model, before, chunks, [3], recompute_ratio=0.5)
    assert len(rotary_frequencies(model)) == 4


def model_parts(kv: Kv) -> tuple[Any, Any, Any]:
    """Return the arrays of no tokens."""
    return kv.token_ids[:0], kv.keys[:, :, :0], kv.values[:, :, :0]
