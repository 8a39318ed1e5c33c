"""Time to first token with a context's KV reused: as a prefix, and as shuffled chunks.

``--overlap`` compares loading a prefix's layers while earlier ones compute with loading all first;
``--novel`` runs a stream of repeated and never repeated contexts through the block store, and
compares the seconds saved with those of the repeated ones alone, and with plain LRU.

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
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.kvcache import small_model
from stoker.kvcache.chunk_reuse import encode_chunk, place_chunks, run_placed
from stoker.kvcache.first_token import measure_first_token
from stoker.kvcache.kv_file import write_kv
from stoker.kvcache.language_model import LanguageModel
from stoker.kvcache.layer_loads import LayerFile, LayerLoader, load_first, overlapped_cache

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


def measure_overlap(
    model: LanguageModel, data: Path, tokens: int, rounds: int
) -> dict[str, object]:
    """Compare loading layers ahead with loading all first, in turn, from files in page cache."""
    ids = model.encode("\n\n".join(text_of(data)))[:tokens]
    question = model.encode(QUESTION)
    taken: dict[str, list[float]] = {"first": [], "overlapped": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefix.safetensors"
        write_kv(path, model.prefill(ids), tenant="", chunk_id="", model_id="bench")
        for number in range(2 * rounds):
            way = ("first", "overlapped")[number % 2]
            started = time.perf_counter()
            if way == "first":
                cache = load_first(model, LayerFile(path))
            else:
                cache = overlapped_cache(model, LayerLoader(LayerFile(path)))
            model.forward(question, cache=cache, keep=1)
            taken[way].append(time.perf_counter() - started)
    first, overlapped = (float(np.median(taken[way])) for way in ("first", "overlapped"))
    return {
        "tokens": len(ids), "rounds": rounds, "load_first_s": round(first, 4),
        "overlapped_s": round(overlapped, 4), "gain": round(first / overlapped, 3),
        "best_gain": round(min(taken["first"]) / min(taken["overlapped"]), 3),
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
    parser.add_argument("--overlap", action="store_true", help="layers ahead against all first")
    chosen = parser.parse_args()
    loaded = LanguageModel(small_model.prepared_small_model())
    if chosen.overlap:
        print(json.dumps(measure_overlap(loaded, chosen.data, chosen.tokens, rounds=9), indent=1))
        raise SystemExit(0)
    print(report(
        measure(loaded, chosen.data, chosen.tokens),
        f"python tests/bench/bench_kvcache_first_token.py --tokens {chosen.tokens}",
    ))  # fmt: skip
