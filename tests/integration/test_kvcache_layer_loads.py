"""Layers that arrive while others compute: equal to loading first, and none unchecked."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache import small_model
from stoker.kvcache.kv_file import KvCorrupt, write_kv
from stoker.kvcache.language_model import Kv, LanguageModel
from stoker.kvcache.layer_loads import LayerFile, LayerLoader, load_first, overlapped_cache

pytest.importorskip("safetensors")

LAYERS = 4


def kv_of(tokens: int, seed: int = 0) -> Kv:
    rng = np.random.default_rng((61, seed))
    shape = (LAYERS, 2, tokens, 32)
    return Kv(
        np.arange(tokens, dtype=np.int32),
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )


def written(path: Path, kv: Kv, storage: str = "float32") -> Path:
    write_kv(path, kv, tenant="t", chunk_id="c", model_id="m", storage=storage)
    return path


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "int4"])
def test_each_layer_is_what_was_written(tmp_path: Path, storage: str) -> None:
    kv = kv_of(5)
    loader = LayerLoader(LayerFile(written(tmp_path / "a.safetensors", kv, storage)))
    close = {"float32": 0.0, "float16": 2e-3, "int8": 0.03, "int4": 0.4}[storage]
    for number in range(LAYERS):
        keys, values = loader.take(number)
        np.testing.assert_allclose(keys, kv.keys[number], atol=close)
        np.testing.assert_allclose(values, kv.values[number], atol=close)
    assert loader.tokens == 5
    with pytest.raises(InputError, match="taken already"):
        loader.take(0)
    loader.close()


def test_a_damaged_layer_is_named_and_those_before_it_stand(tmp_path: Path) -> None:
    kv = kv_of(64)
    path = written(tmp_path / "a.safetensors", kv)
    raw = bytearray(path.read_bytes())
    sought = kv.values[2].tobytes()
    raw[raw.index(sought) + 100] ^= 1
    path.write_bytes(raw)
    loader = LayerLoader(LayerFile(path))
    for number in (0, 1):
        np.testing.assert_array_equal(loader.take(number)[0], kv.keys[number])
    for number in (2, 3):
        with pytest.raises(KvCorrupt, match="of layer 2"):
            loader.take(number)
    loader.close()


def test_a_layer_in_anothers_place_is_refused(tmp_path: Path) -> None:
    kv = kv_of(16)
    path = written(tmp_path / "a.safetensors", kv)
    raw = path.read_bytes()
    one, two = kv.keys[1].tobytes(), kv.keys[2].tobytes()
    path.write_bytes(raw.replace(one, b"\0" * len(one)).replace(two, one))
    file = LayerFile(path)
    with pytest.raises(KvCorrupt, match="of layer 1"):
        file.layer(1)
    file.close()


def test_files_without_checksums_of_layers_are_read_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", kv_of(4))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"layer_checksums"', b'"layer_chequered"'))
    with pytest.raises(KvCorrupt, match="checksums of layers"):
        LayerFile(path)


def test_closing_ends_the_reading(tmp_path: Path) -> None:
    before = threading.active_count()
    loader = LayerLoader(LayerFile(written(tmp_path / "a.safetensors", kv_of(8))))
    loader.close()
    assert threading.active_count() == before


@pytest.mark.models
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_models_answer_is_the_same_as_after_loading_first(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if not small_model.small_model_installed():
        pytest.skip(f"no small model: {small_model.INSTALL}")
    model = LanguageModel(small_model.prepared_small_model())
    prefix = model.encode("The page pool keeps fixed frames and a translation table. " * 6)
    question = model.encode("Question: what does the pool keep?\nAnswer:")
    path = tmp_path / "a.safetensors"
    written(path, model.prefill(prefix))
    first = model.forward(question, cache=load_first(model, LayerFile(path)), keep=3)
    loader = LayerLoader(LayerFile(path))
    cache = overlapped_cache(model, loader)
    step = model.forward(question, cache=cache, keep=3)
    np.testing.assert_array_equal(step.logits, first.logits)
    assert step.cache.get_seq_length() == len(prefix) + len(question)
    start = [int(np.argmax(step.logits[-1]))]
    assert start == model.generate(prefix + question, tokens=1)
    later = [model.generate(start, tokens=7, cache=pass_.cache) for pass_ in (step, first)]
    assert later[0] == later[1]
    raw = bytearray(path.read_bytes())
    raw[-5_000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(KvCorrupt):
        model.forward(question, cache=overlapped_cache(model, LayerLoader(LayerFile(path))))
