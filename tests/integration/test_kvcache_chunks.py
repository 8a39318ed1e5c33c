"""Chunks placed anywhere, with the real small model: moved keys, recomputed tokens, the gate."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache import chunk_reuse, small_model
from stoker.kvcache.chunk_gate import (
    ChunkGate,
    GatePrompt,
    GateReport,
    measure_gate,
    read_gate_prompts,
)
from stoker.kvcache.chunk_reuse import (
    PlacedPrompt,
    encode_chunk,
    moved,
    place_chunks,
    question_attention,
    rotary_frequencies,
    run_placed,
)
from stoker.kvcache.gate_keeper import GateKeeper, run_chunks
from stoker.kvcache.language_model import Kv, LanguageModel
from stoker.kvcache.settings import KvcacheSettings

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        not small_model.small_model_installed(), reason=f"no small model: {small_model.INSTALL}"
    ),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SYSTEM = "Answer from these passages.\n\n"
CHUNKS = (
    "A partition is an ordered log; each record in it has an offset.\n\n",
    "A consumer group shares the partitions of a topic among its members.\n\n",
    "The broker keeps records for the retention time, read or not.\n\n",
)
QUESTION = "Question: How long are records kept?\nAnswer: for the retention time, read or not."


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(small_model.prepared_small_model())


@pytest.fixture(scope="module")
def encoded(model: LanguageModel) -> tuple[Kv, list[Kv], list[int]]:
    prefix = model.prefill(model.encode(SYSTEM))
    chunks = [encode_chunk(model, prefix, model.encode(text)) for text in CHUNKS]
    return prefix, chunks, model.encode(QUESTION)


def full_logits(model: LanguageModel, prompt: PlacedPrompt) -> np.ndarray:
    ids = [*prompt.context.token_ids.tolist(), *prompt.question_ids]
    return model.forward(ids, keep=len(prompt.question_ids)).logits


def test_moved_keys_are_those_computed_there(
    model: LanguageModel, encoded: tuple[Kv, list[Kv], list[int]]
) -> None:
    prefix, chunks, question = encoded
    order = [chunks[2], chunks[0]]
    placed = place_chunks(model, prefix, order, question, recompute_ratio=0, choice="none")
    whole = model.prefill(placed.context.token_ids.tolist())
    # The first layer sees tokens and places only: there moving is exact.
    np.testing.assert_allclose(placed.context.keys[0], whole.keys[0], atol=2e-5)
    np.testing.assert_allclose(placed.context.values[0], whole.values[0], atol=2e-5)
    # The first chunk stands where it was computed: exact in every layer.
    first = len(prefix.token_ids) + len(order[0].token_ids)
    np.testing.assert_allclose(
        placed.context.keys[:, :, :first], whole.keys[:, :, :first], atol=2e-4
    )
    frequencies = rotary_frequencies(model)
    far = moved(moved(chunks[0], 8_000, frequencies), chunks[0].start, frequencies)
    np.testing.assert_allclose(far.keys, chunks[0].keys, atol=2e-5)


def test_all_recomputed_is_the_full_run_and_goes_on_like_it(
    model: LanguageModel, encoded: tuple[Kv, list[Kv], list[int]]
) -> None:
    prefix, chunks, question = encoded
    placed = place_chunks(
        model, prefix, [chunks[1], chunks[0], chunks[2]], question, recompute_ratio=1.0
    )
    count = sum(len(chunk.token_ids) for chunk in chunks) - len(chunks[1].token_ids) * (
        chunks[1].start == len(prefix.token_ids)
    )
    assert len(placed.recomputed) == count
    step = run_placed(model, placed)
    np.testing.assert_allclose(step.logits, full_logits(model, placed), atol=5e-4)
    ids = [*placed.context.token_ids.tolist(), *placed.question_ids]
    expected = model.generate(ids, tokens=6)
    first = int(np.argmax(step.logits[-1]))
    found = [first, *model.generate([first], tokens=5, cache=step.cache)]
    assert found[: len(expected)] == expected


def test_choice_comes_nearer_than_chance(
    model: LanguageModel, encoded: tuple[Kv, list[Kv], list[int]]
) -> None:
    prefix, chunks, question = encoded
    order = [chunks[1], chunks[2], chunks[0]]
    gaps: dict[str, float] = {}
    for choice in ("none", "random", "first", "deviation", "attended"):
        runs = []
        for seed in range(3 if choice == "random" else 1):
            placed = place_chunks(
                model, prefix, order, question, recompute_ratio=0.3, choice=choice,
                rng=random.Random(seed),
            )  # fmt: skip
            wanted = (
                0
                if choice == "none"
                else int(0.3 * sum(len(chunk.token_ids) for chunk in order[1:]))
            )
            assert len(placed.recomputed) == wanted
            gap = run_placed(model, placed).logits - full_logits(model, placed)
            runs.append(float(np.sqrt(np.mean(gap**2))))
        gaps[choice] = float(np.mean(runs))
    assert gaps["deviation"] < gaps["random"]
    assert gaps["deviation"] < gaps["none"]
    assert gaps["attended"] < gaps["deviation"]


def test_attention_is_that_of_the_whole_prompt(
    model: LanguageModel, encoded: tuple[Kv, list[Kv], list[int]]
) -> None:
    """Where the KV is exact, what the question pays a context and itself is one for each head."""
    prefix, _, question = encoded
    ids = [*prefix.token_ids.tolist(), *question]
    context = model.prefill(ids[:-1])
    paid = question_attention(model, context, ids[-1:])
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    assert paid.shape == (len(ids) - 1,)
    assert 0.5 * heads < paid.sum() < heads
    assert model.config._attn_implementation == "sdpa", "as it was"
    again = model.forward(ids[-1:], cache=model.cache_of(context))
    np.testing.assert_allclose(again.logits, model.forward(ids).logits, atol=5e-4)


def test_a_choice_looks_at_no_more_of_the_question_than_is_known(
    model: LanguageModel,
    encoded: tuple[Kv, list[Kv], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix, chunks, question = encoded
    looked_at: list[list[int]] = []

    def looks(model: LanguageModel, context: Kv, asked: list[int]) -> np.ndarray:
        looked_at.append(list(asked))
        return np.ones(len(context.token_ids))

    monkeypatch.setattr(chunk_reuse, "question_attention", looks)
    for known in (2, None):
        place_chunks(
            model, prefix, chunks, question, recompute_ratio=0.2, choice="attended", known=known
        )
    assert looked_at == [question[:2], question]


def test_gate_measures_and_remembers(model: LanguageModel, tmp_path: Path) -> None:
    prompts = [GatePrompt(SYSTEM, CHUNKS[::-1], QUESTION)]
    report = measure_gate(model, prompts)
    assert report.positions == len(model.encode(QUESTION))
    assert 0.0 <= report.kl_mean < 1.0
    assert report.loss_full > 0
    assert abs(report.loss_gain_ratio) < 0.5
    strict = dataclasses.replace(KvcacheSettings(), kv_gate_kl_max=1e-9)
    assert not measure_gate(model, prompts, settings=strict).allowed
    gate = ChunkGate(tmp_path)
    assert not gate.allows(model.model_id), "off until it was measured"
    gate.keep(dataclasses.replace(report, allowed=True))
    assert ChunkGate(tmp_path).allows(model.model_id)
    gate.keep(dataclasses.replace(report, allowed=True, choice="random"))
    assert not gate.allows(model.model_id), "a verdict on another choice"
    gate.keep(dataclasses.replace(report, allowed=False))
    assert not ChunkGate(tmp_path).allows(model.model_id)
    (path,) = tmp_path.iterdir()
    path.write_text('{"model_id": 3}')
    assert gate.report_of(model.model_id) is None
    other = dataclasses.replace(report, model_id="abc", allowed=True)
    gate.keep(other)
    assert isinstance(gate.report_of("abc"), GateReport)
    with pytest.raises(InputError):
        gate.allows("../abc")


def test_the_gate_decides_what_a_prompt_costs(
    model: LanguageModel, encoded: tuple[Kv, list[Kv], list[int]], tmp_path: Path
) -> None:
    """Closed, the answer is the full run's; its thread's measurement opens it; a bar closes it."""
    prefix, chunks, question = encoded
    order = [chunks[2], chunks[0]]
    prompts = tmp_path / "prompts.jsonl"
    stored = {"system": SYSTEM, "chunks": CHUNKS[::-1], "continuation": QUESTION}
    prompts.write_text(json.dumps(stored) + "\n")
    now = [1_000.0]
    settings = KvcacheSettings(
        kv_gate_kl_max=10.0, kv_gate_agreement_min=0.01, kv_gate_loss_gain_max=10.0
    )

    def keeper_of(bar: KvcacheSettings) -> GateKeeper:
        return GateKeeper(
            ChunkGate(tmp_path / "gates", settings=bar, wall=lambda: now[0]),
            model_id=model.model_id,
            measure=lambda: measure_gate(model, read_gate_prompts(prompts), settings=bar),
            settings=bar, wall=lambda: now[0],
        )  # fmt: skip

    keeper = keeper_of(settings)
    placed = place_chunks(
        model, prefix, order, question, recompute_ratio=settings.kv_recompute_ratio
    )
    full, reused = full_logits(model, placed), run_placed(model, placed).logits
    assert float(np.abs(full - reused).max()) > 5e-3, "else nothing below could tell them apart"
    closed = run_chunks(keeper, model, prefix, order, question, settings=settings)
    np.testing.assert_allclose(closed.logits, full, atol=5e-4)
    assert int(closed.cache.get_seq_length()) == len(placed.context.token_ids) + len(question)
    assert keeper.measure_if_due() == "first"
    opened = run_chunks(keeper, model, prefix, order, question, settings=settings)
    np.testing.assert_allclose(opened.logits, reused, atol=1e-5)
    # A day later the bar is one that no approximation meets.
    now[0] += settings.kv_gate_every_s
    strict = keeper_of(dataclasses.replace(settings, kv_gate_kl_max=1e-9))
    assert strict.measure_if_due() == "time"
    again = run_chunks(strict, model, prefix, order, question, settings=settings)
    np.testing.assert_allclose(again.logits, full, atol=5e-4)
    record = ChunkGate(tmp_path / "gates").record_of(model.model_id)
    assert (record.allowed, record.refused, record.measured_at_s) == (1, 1, now[0])
    for wrong in ({"model_id": "0"}, {"model_id": model.model_id, "question": []}):
        other = GateKeeper(
            ChunkGate(tmp_path), model_id=str(wrong["model_id"]),
            measure=lambda: measure_gate(model, []),
        )  # fmt: skip
        with pytest.raises(InputError):
            run_chunks(other, model, prefix, order, [] if "question" in wrong else question)


def test_wrong_prompts_are_the_callers(
    model: LanguageModel, encoded: tuple[Kv, list[Kv], list[int]]
) -> None:
    prefix, chunks, question = encoded
    for ratio, choice, asked in (
        (1.5, "first", question),
        (0.1, "best", question),
        (0.1, "first", []),
    ):
        with pytest.raises(InputError):
            place_chunks(model, prefix, chunks, asked, recompute_ratio=ratio, choice=choice)
    with pytest.raises(InputError):
        measure_gate(model, [])
    with pytest.raises(InputError):
        measure_gate(model, [GatePrompt(SYSTEM, (), QUESTION)])
