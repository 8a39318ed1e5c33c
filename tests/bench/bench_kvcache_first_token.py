"""Time to first token with a context's KV reused: as a prefix, and as shuffled chunks.

``--overlap`` compares loading a prefix's layers while earlier ones compute with loading all first;
``--novel`` runs a stream of repeated and never repeated contexts through the block store, and
compares the seconds saved with those of the repeated ones alone, and with plain LRU; ``--gate``
measures what reuse of shuffled chunks costs in quality, with nothing and with 15 % recomputed,
chosen by deviation alone and as it is done; ``--prompts`` says of how many.

By hand for the canonical size: ``python tests/bench/bench_kvcache_first_token.py --tokens 2048``
(about two minutes on one core). Text is the Python documentation of the shared data.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import random
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stoker.kvcache import small_model
from stoker.kvcache.block_names import BlockHash, block_hash, root_hash
from stoker.kvcache.chunk_gate import GatePrompt, measure_gate
from stoker.kvcache.chunk_reuse import encode_chunk, place_chunks, run_placed
from stoker.kvcache.first_token import measure_first_token
from stoker.kvcache.kv_file import write_kv
from stoker.kvcache.kv_slices import joined
from stoker.kvcache.language_model import Kv, LanguageModel
from stoker.kvcache.layer_loads import LayerFile, LayerLoader, load_first, overlapped_cache
from stoker.kvcache.prefix_blocks import PrefixBlocks
from stoker.kvcache.settings import KvcacheSettings

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import last_line

Compute = Callable[[Kv | None, list[int]], Kv]

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
    for choice in ("none", "first", "deviation", "attended"):
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


class LruBlocks:
    """What engines do: blocks by least recent use, the deepest of a prompt first."""

    def __init__(self, *, block_tokens: int, blocks_max: int) -> None:
        self.block_tokens, self.blocks_max = block_tokens, blocks_max
        self.blocks: OrderedDict[BlockHash, Kv] = OrderedDict()

    def request(self, root: BlockHash, ids: list[int], compute: Compute) -> int:
        size, parent, names, held = self.block_tokens, root, [], []
        for start in range(0, len(ids) - size + 1, size):
            parent = block_hash(parent, ids[start : start + size])
            names.append(parent)
        for name in names:
            if name not in self.blocks:
                break
            held.append(self.blocks[name])
        kv = compute(joined(held), ids)
        for place, name in reversed(list(enumerate(names))):
            start, stop = place * size, (place + 1) * size
            part = Kv(
                kv.token_ids[start:stop], kv.keys[:, :, start:stop], kv.values[:, :, start:stop],
                start,
            )  # fmt: skip
            self.blocks[name] = part
            self.blocks.move_to_end(name)
        while len(self.blocks) > self.blocks_max:
            self.blocks.popitem(last=False)
        return len(held) * size


class OurBlocks:
    """The same through `PrefixBlocks`."""

    def __init__(self, *, block_tokens: int, blocks_max: int) -> None:
        self.cache = PrefixBlocks(block_tokens=block_tokens, host_blocks_max=blocks_max)

    def request(self, root: BlockHash, ids: list[int], compute: Compute) -> int:
        identity, reused = self.cache.begin(root, ids)
        held = self.cache.kv_of(identity) if reused else None
        kv = compute(held, ids)
        rest = Kv(kv.token_ids[reused:], kv.keys[:, :, reused:], kv.values[:, :, reused:], reused)
        self.cache.extend(identity, ids[reused:], rest)
        self.cache.end(identity)
        return reused


def measure_novel(
    model: LanguageModel, data: Path, *, tokens: int, contexts: int, rounds: int, novel_each: int
) -> dict[str, object]:
    """Compare the speed-up of returning contexts alone with that among contexts never seen again.

    CPU seconds of each returning request, computed with what the cache holds, against those of
    computing it whole. The cache has room for one and a half times the returning contexts. What is
    computed for the others is not what is measured: their KV is filler of the right shape.
    """
    ids = model.encode("\n\n".join(text_of(data)))
    size = 16
    returning = [ids[place * tokens : (place + 1) * tokens] for place in range(contexts)]
    question = model.encode(QUESTION)
    root = root_hash(model_id="bench", tenant="t", block_tokens=size)
    rng = np.random.default_rng(3)
    like = model.prefill(returning[0])

    def spent(prompt: list[int], held: Kv | None) -> tuple[float, Kv]:
        started = time.process_time()
        cache = None if held is None else model.cache_of(held)
        known = 0 if held is None else len(held.token_ids)
        step = model.forward([*prompt[known:], *question], cache=cache, keep=1)
        taken = time.process_time() - started
        return taken, model.kv_of(step.cache, prompt)

    whole = float(np.median([spent(prompt, None)[0] for prompt in returning for _ in range(2)]))

    def run(cache: LruBlocks | OurBlocks) -> dict[str, float]:
        taken: list[float] = []

        def compute(held: Kv | None, prompt: list[int]) -> Kv:
            seconds, kv = spent(prompt, held)
            taken.append(seconds)
            return kv

        def fill(held: Kv | None, prompt: list[int]) -> Kv:
            return Kv(np.asarray(prompt, np.int32), like.keys, like.values)

        for number in range(rounds + 1):
            if number == 1:
                taken.clear()  # the first time is computed whole
            for prompt in returning:
                cache.request(root, prompt, compute)
        burst = whole / float(np.mean(taken))
        taken.clear()
        for _ in range(rounds):
            for prompt in returning:
                for _ in range(novel_each):
                    novel = [int(token) for token in rng.integers(0, 40_000, tokens)]
                    cache.request(root, novel, fill)
                cache.request(root, prompt, compute)
        stream = whole / float(np.mean(taken))
        return {
            "burst_speedup": round(burst, 2), "stream_speedup": round(stream, 2),
            "kept": round(stream / burst, 3),
        }  # fmt: skip

    room = contexts * tokens // size * 3 // 2
    return {
        "tokens": tokens, "contexts": contexts, "novel_each": novel_each,
        "whole_s": round(whole, 3),
        "lru": run(LruBlocks(block_tokens=size, blocks_max=room)),
        "ours": run(OurBlocks(block_tokens=size, blocks_max=room)),
    }  # fmt: skip


def measure_quality(
    model: LanguageModel, data: Path, *, prompts: int
) -> dict[str, dict[str, object]]:
    """Run the gate's own measurement on three kinds of prompts, of four passages each.

    "apart": passages of different pages, shuffled, and then the text that follows one of them, as a
    retriever finds them. "adjacent": passages that follow each other, shuffled, and then the next:
    each says what the others do. Both are cut at 1,200 characters; "adjacent, whole" is not.
    """
    rng = random.Random(17)
    found: dict[str, dict[str, object]] = {}
    for kind, step, cut in (
        ("apart", 30, 1_200), ("adjacent", 1, 1_200), ("adjacent, whole", 1, None),
    ):  # fmt: skip
        made = []
        for number in range(prompts):
            texts = text_of(data, skip=200 + 300 * number)
            chunks = [texts[step * place][:cut] for place in range(CHUNKS)]
            follow = texts[1 if step > 1 else CHUNKS][:600]
            rng.shuffle(chunks)
            made.append(GatePrompt(SYSTEM, tuple(chunks), follow))
        found |= {f"{kind}, {name}": row for name, row in gate_rows(model, made).items()}
    return found


def gate_rows(model: LanguageModel, made: list[GatePrompt]) -> dict[str, dict[str, object]]:
    """Measure prompts with nothing and with 15 % of the tokens recomputed."""
    found: dict[str, dict[str, object]] = {}
    for choice in ("none", "deviation", "attended"):
        settings = dataclasses.replace(KvcacheSettings(), kv_recompute_ratio=0.15)
        gate = measure_gate(model, made, settings=settings, choice=choice)
        found[choice] = {
            "prompts": gate.prompts, "positions": gate.positions, "kl": round(gate.kl_mean, 4),
            "agreement": round(gate.agreement, 4), "loss_full": round(gate.loss_full, 4),
            "loss_gain": round(gate.loss_gain_ratio, 4), "allowed": gate.allowed,
        }  # fmt: skip
    return found


def report(row: dict[str, object], command: str) -> str:
    prefix = row["prefix"]
    assert isinstance(prefix, dict)
    same = (row["tokens"], prefix["same_answer"])
    return f"{json.dumps(row, indent=1)}\n{last_line(same, command)}"


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
    parser.add_argument("--gate", action="store_true", help="quality of shuffled chunks")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind, for --gate")
    parser.add_argument("--novel", action="store_true", help="returning among novel contexts")
    chosen = parser.parse_args()
    loaded = LanguageModel(small_model.prepared_small_model())
    if chosen.novel:
        kept = measure_novel(
            loaded, chosen.data, tokens=chosen.tokens, contexts=3, rounds=3, novel_each=4
        )
        print(json.dumps(kept, indent=1))
        raise SystemExit(0)
    if chosen.gate:
        print(json.dumps(measure_quality(loaded, chosen.data, prompts=chosen.prompts), indent=1))
        raise SystemExit(0)
    if chosen.overlap:
        print(json.dumps(measure_overlap(loaded, chosen.data, chosen.tokens, rounds=9), indent=1))
        raise SystemExit(0)
    print(report(
        measure(loaded, chosen.data, chosen.tokens),
        f"python tests/bench/bench_kvcache_first_token.py --tokens {chosen.tokens}",
    ))  # fmt: skip
