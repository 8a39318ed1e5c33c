"""Lookup reuse on real customer questions (banking77), with the embeddings of the bundled model.

How pairs are made: the questions arrive in a shuffled order; each is looked up against the
nearest earlier one, which is what a cache would offer; "same" means the same one of the 77 intents.
By hand for all 13,083: ``python tests/bench/bench_kvcache_reuse.py --full`` (some minutes to embed,
once). ``--write FILE`` keeps the pairs for ``stoker reuse evaluate``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.kvcache.reuse_evaluation import Pair, evaluate_reuse

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import banking77_rows, last_line


def questions_of(data: Path, limit: int | None, seed: int) -> list[tuple[str, str]]:
    """Return (text, intent) of the questions in a shuffled order."""
    rows = banking77_rows(data)
    order = np.random.default_rng(seed).permutation(len(rows))[:limit]
    return [rows[place] for place in order]


def stream_pairs(questions: list[tuple[str, str]], vectors: NDArray[np.float32]) -> list[Pair]:
    """Pair each question with its nearest earlier one."""
    pairs = []
    for place in range(1, len(questions)):
        nearest = int(np.argmax(vectors[:place] @ vectors[place]))
        (a, a_kind), (b, b_kind) = questions[nearest], questions[place]
        pairs.append(Pair(a, b, a_kind == b_kind, vectors[nearest], vectors[place]))
    return pairs


def build(data: Path, limit: int | None, seed: int) -> list[Pair]:
    from stoker.service.embedding import Embedder

    questions = questions_of(data, limit, seed)
    vectors = Embedder(thread_count=1, batch_size=64).embed([text for text, _ in questions])
    return stream_pairs(questions, vectors)


def report(pairs: list[Pair], delta: float, command: str) -> str:
    found = evaluate_reuse(pairs, delta=delta)
    figures = json.dumps(found.to_json(), indent=1)
    return f"{figures}\n{last_line(found.result_hash, command)}"


@pytest.mark.data
@pytest.mark.models
def test_reuse_at_a_small_size(shared_data: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pairs = build(shared_data, limit=250, seed=0)
    print(report(pairs, 0.01, "pytest tests/bench/bench_kvcache_reuse.py"))
    found = evaluate_reuse(pairs, delta=0.01)
    assert found.reused == 0, "nothing can be proved at 1 % from 249 lookups"
    assert found.true_pairs > 100


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared/data")
    parser.add_argument("--full", action="store_true", help="all questions")
    parser.add_argument("--seed", type=int, default=0, help="of the order of arrival")
    parser.add_argument("--delta", type=float, default=0.01)
    parser.add_argument("--write", type=Path, help="also write the pairs as JSONL")
    chosen = parser.parse_args()
    made = build(chosen.data, None if chosen.full else 2_000, chosen.seed)
    if chosen.write is not None:
        with chosen.write.open("w", encoding="utf-8") as out:
            for pair in made:
                line = {"a": pair.a, "b": pair.b, "same": pair.same}
                for key, vector in (("a_vec", pair.a_vector), ("b_vec", pair.b_vector)):
                    if vector is not None:
                        line |= {key: [round(float(value), 6) for value in vector]}
                out.write(json.dumps(line) + "\n")
    print(report(made, chosen.delta, "python tests/bench/bench_kvcache_reuse.py"))
