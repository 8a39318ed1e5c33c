"""Time to first token with a context's KV reused: as a prefix, and as shuffled chunks.

By hand for the canonical size: ``python tests/bench/bench_kvcache_first_token.py --tokens 2048``
(about two minutes on one core). Text is the Python documentation of the shared data.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.kvcache import small_model
from stoker.kvcache.chunk_reuse import encode_chunk, place_chunks, run_placed
from stoker.kvcache.first_token import measure_first_token
from stoker.kvcache.language_model import LanguageModel

SYSTEM = "You answer questions about the Python library from these passages.\n\n"
QUESTION = "\n\nQuestion: Which of these functions returns a new object?\nAnswer:"
CHUNKS = 4


def text_of(data: Path, skip: int = 200) -> list[str]:
    path = data / "docs_corpora" / "python311_chunks.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file][skip : skip + 200]


def measure(model: LanguageModel, data: Path, tokens: int) -> dict[str, object]:
    texts = text_of(data)
    whole = "\n\n".join(texts)
    prefix = measure_first_token(
        [whole], question=QUESTION, tokens_max=tokens, answer_tokens=4, model=model
    ).rows[0]
    each = tokens // CHUNKS
    ids = model.encode(whole)
    system, question = model.encode(SYSTEM), model.encode(QUESTION)
    chunk_ids = [ids[number * each : (number + 1) * each] for number in range(CHUNKS)]
    head = model.prefill(system)
    stored = [encode_chunk(model, head, chunk) for chunk in chunk_ids]
    order = [2, 0, 3, 1]
    prompt = system + [token for place in order for token in chunk_ids[place]] + question
    started = time.perf_counter()
    full = model.forward(prompt, keep=len(question))
    recompute_s = time.perf_counter() - started
    rows = {}
    for choice in ("none", "first", "deviation"):
        started = time.perf_counter()
        placed = place_chunks(
            model, head, [stored[place] for place in order], question,
            recompute_ratio=0.15, choice=choice,
        )  # fmt: skip
        step = run_placed(model, placed)
        taken = time.perf_counter() - started
        rows[choice] = {
            "first_token_s": round(taken, 3),
            "speedup": round(recompute_s / taken, 2),
            "same_first_token": int(np.argmax(step.logits[-1])) == int(np.argmax(full.logits[-1])),
        }
    return {
        "tokens": prefix.passage_tokens,
        "prefix": {
            "recompute_s": round(prefix.recompute_s, 3), "memory_s": round(prefix.memory_s, 3),
            "file_s": round(prefix.file_s, 3),
            "speedup_memory": round(prefix.recompute_s / prefix.memory_s, 2),
            "speedup_file": round(prefix.recompute_s / prefix.file_s, 2),
            "same_answer": prefix.same_answer,
        },
        "chunks": {"recompute_s": round(recompute_s, 3), **rows},
    }  # fmt: skip


def report(row: dict[str, object], command: str) -> str:
    prefix = row["prefix"]
    assert isinstance(prefix, dict)
    digest = hashlib.blake2b(
        f"{row['tokens']}{prefix['same_answer']}".encode(), digest_size=8
    ).hexdigest()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{json.dumps(row, indent=1)}\nresult {digest}; machine {machine}; command {command}"


@pytest.mark.data
@pytest.mark.models
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_first_token_at_a_small_size(shared_data: Path) -> None:
    pytest.importorskip("transformers")
    if not small_model.small_model_installed():
        pytest.skip(f"no small model: {small_model.INSTALL}")
    row = measure(LanguageModel(small_model.prepared_small_model()), shared_data, 96)
    print(report(row, "pytest tests/bench/bench_kvcache_first_token.py"))
    prefix = row["prefix"]
    assert isinstance(prefix, dict)
    assert prefix["same_answer"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared/data")
    parser.add_argument("--tokens", type=int, default=2_048)
    chosen = parser.parse_args()
    loaded = LanguageModel(small_model.prepared_small_model())
    print(report(
        measure(loaded, chosen.data, chosen.tokens),
        f"python tests/bench/bench_kvcache_first_token.py --tokens {chosen.tokens}",
    ))  # fmt: skip
