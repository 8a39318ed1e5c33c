"""A real RAG service's prompts (ragpulse): how much of them need not be computed, by tokens.

Ids and lengths only: what is measured is reuse, not answers. Three ways: as a prefix in the order
as it came, as a prefix with passages arranged, and piece by piece (chunks at any place). The
unbounded figures come first, then caches of a share of the footprint: ours beside LRU.

``--quality`` measures what another order costs: the small model's next-token loss on the text that
follows the best passage, with the passages as ranked, as `PromptOrder` arranges them after an
earlier prompt that held half of them, and shuffled.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from stoker.kvcache.prompt_order import PromptOrder
from stoker.kvcache.worth import Worth

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import last_line

KINDS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
FILES = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
Prompt = dict[str, list[int]]


def load(folder: Path, limit: int | None) -> tuple[list[Prompt], dict[int, int]]:
    """Return each request's pieces by kind, and the tokens of each piece."""
    lengths: dict[int, int] = {}
    for name in FILES:
        with (folder / f"{name}.jsonl").open() as file:
            for line in file:
                if line.strip():
                    row = json.loads(line)
                    identity = next(value for key, value in row.items() if key.endswith("id"))
                    lengths[identity] = row["token_length"]
    with (folder / "0_trace_days1-4.jsonl").open() as file:
        prompts = [json.loads(line)["hash_ids"] for line in file if line.strip()]
    return prompts[:limit], lengths


def pieces(prompt: Prompt) -> list[int]:
    return [piece for kind in KINDS for piece in prompt[kind]]


def prefix_share(prompts: list[list[Hashable]], lengths: dict[int, int]) -> float:
    """Tokens in prefixes seen before, with an unbounded cache."""
    seen: set[bytes] = set()
    hits = total = 0
    for prompt in prompts:
        digest, whole, matching = hashlib.blake2b(digest_size=12), [], True
        for piece in prompt:
            digest.update(f"{piece},".encode())
            key = digest.digest()
            whole.append(key)
            tokens = lengths[int(str(piece))]
            total += tokens
            matching = matching and key in seen
            hits += tokens * matching
        seen.update(whole)
    return hits / total


def arranged(
    prompts: list[Prompt], lengths: dict[int, int], *, head_pieces: int | None
) -> list[list[Hashable]]:
    """Arrange passages behind the system prompt, or behind its first pieces only.

    The last piece of this service's system prompt is another one in most requests: passages behind
    it can share nothing.
    """
    order = PromptOrder()
    found: list[list[Hashable]] = []
    for prompt in prompts:
        head = tuple(prompt["sys_prompt"][:head_pieces])
        distinct = list(dict.fromkeys(prompt["passages_ids"]))
        passages = order.arrange(distinct, head=head, tokens=dict(lengths))
        rest = [piece for kind in KINDS[2:] for piece in prompt[kind]]
        found.append([*head, *passages, *prompt["sys_prompt"][len(head) :], *rest])
    return found


def chunk_share(
    prompts: list[list[int]],
    lengths: dict[int, int],
    *,
    tokens_max: float,
    policy: str,
    kinds: Mapping[int, str] = MappingProxyType({}),
) -> float:
    """Tokens of pieces found in a cache of ``tokens_max`` tokens; "best" knows what comes."""
    coming: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts if policy == "best" else ()):
        for piece in prompt:
            coming.setdefault(piece, []).append(place)
    for places in coming.values():
        places.reverse()
    worth = Worth()
    cached: OrderedDict[int, None] = OrderedDict()
    held = hits = total = 0
    for place, prompt in enumerate(prompts):
        for piece in prompt:
            total += lengths[piece]
            worth.use(piece, kind=kinds.get(piece, ""))
            if piece in cached:
                hits += lengths[piece]
                cached.move_to_end(piece)
            else:
                cached[piece] = None
                held += lengths[piece]
        if held <= tokens_max:
            continue
        if policy == "best":
            for piece in cached:
                while coming[piece] and coming[piece][-1] <= place:
                    coming[piece].pop()
            order = sorted(cached, key=lambda piece: -(coming[piece] or [len(prompts)])[-1])
        else:
            order = list(cached) if policy == "lru" else sorted(cached, key=worth.of)
        for victim in order:
            if held <= tokens_max:
                break
            del cached[victim]
            held -= lengths[victim]
    return hits / total


def measure(folder: Path, limit: int | None) -> dict[str, object]:
    prompts, lengths = load(folder, limit)
    flat = [pieces(prompt) for prompt in prompts]
    kinds = {piece: kind for prompt in prompts for kind in KINDS for piece in prompt[kind]}
    footprint = sum(lengths[piece] for piece in {piece for prompt in flat for piece in prompt})
    row: dict[str, object] = {
        "requests": len(prompts), "footprint_tokens": footprint,
        "prefix_as_it_comes": round(prefix_share([list(p) for p in flat], lengths), 4),
        "prefix_arranged": round(
            prefix_share(arranged(prompts, lengths, head_pieces=None), lengths), 4
        ),
        "prefix_arranged_before_last_system_piece": round(
            prefix_share(arranged(prompts, lengths, head_pieces=2), lengths), 4
        ),
        "chunks_unbounded": round(
            chunk_share(flat, lengths, tokens_max=float("inf"), policy="lru"), 4
        ),
    }  # fmt: skip
    for share in (0.1, 0.25):
        tokens_max = share * footprint
        for policy in ("lru", "ours", "best"):
            found = chunk_share(flat, lengths, tokens_max=tokens_max, policy=policy)
            row[f"chunks_{share:.0%}_{policy}"] = round(found, 4)
        found = chunk_share(flat, lengths, tokens_max=tokens_max, policy="ours", kinds=kinds)
        row[f"chunks_{share:.0%}_ours_by_kind"] = round(found, 4)
    return row


def measure_quality(data: Path, *, prompts: int, tokens: int) -> dict[str, object]:
    """Return the mean loss, nats, of a continuation behind passages in three orders."""
    import numpy as np

    from stoker.kvcache.language_model import LanguageModel
    from stoker.kvcache.small_model import prepared_small_model

    model = LanguageModel(prepared_small_model())
    path = data / "docs_corpora" / "python311_chunks.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    system = model.encode("Passages of the Python documentation.\n\n")
    rng = np.random.default_rng(11)
    losses: dict[str, list[float]] = {"ranked": [], "arranged": [], "shuffled": []}
    moved = 0
    for number in range(prompts):
        place = 500 + 400 * number
        # The best passage is the one before the text to come; the others are of the same page.
        ranked = [place, place - 1, place - 2, place - 3]
        order = PromptOrder()
        order.arrange([place - 2, place, place + 50], head="s")
        arranged = [int(str(name)) for name in order.arrange(ranked, head="s")]
        moved += arranged != ranked
        coming = model.encode(texts[place + 1])[:48]
        for name, places in (
            ("ranked", ranked), ("arranged", arranged), ("shuffled", rng.permutation(ranked)),
        ):  # fmt: skip
            prompt = [*system]
            for passage in places:
                prompt += model.encode(texts[int(passage)])[:tokens]
            step = model.forward(prompt + coming, keep=len(coming) + 1)
            logits = step.logits[:-1].astype(np.float64)
            peak = logits.max(axis=1, keepdims=True)
            logs = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
            losses[name].append(float(-logs[np.arange(len(coming)), coming].mean()))
    means = {name: round(float(np.mean(found)), 4) for name, found in losses.items()}
    gaps = np.array(losses["arranged"]) - np.array(losses["ranked"])
    return {
        "prompts": prompts, "moved": moved, "loss": means,
        "arranged_over_ranked": round(means["arranged"] / means["ranked"] - 1.0, 4),
        "gap_standard_error": round(float(gaps.std(ddof=1) / len(gaps) ** 0.5), 4),
    }  # fmt: skip


def report(row: dict[str, object], command: str) -> str:
    return f"{json.dumps(row, indent=1)}\n{last_line(row, command)}"


@pytest.mark.data
def test_rag_prompts_at_a_small_size(shared_data: Path) -> None:
    row = measure(shared_data / "ragpulse", limit=600)
    print(report(row, "pytest tests/bench/bench_kvcache_rag.py"))
    assert float(str(row["prefix_arranged"])) >= float(str(row["prefix_as_it_comes"]))
    assert float(str(row["chunks_25%_ours_by_kind"])) >= float(str(row["chunks_25%_ours"])) - 0.002
    assert float(str(row["chunks_25%_ours"])) >= float(str(row["chunks_25%_lru"])) - 0.005


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared/data")
    parser.add_argument("--quality", action="store_true", help="the small model's loss by order")
    chosen = parser.parse_args()
    if chosen.quality:
        print(json.dumps(measure_quality(chosen.data, prompts=8, tokens=80), indent=1))
        raise SystemExit(0)
    print(report(
        measure(chosen.data / "ragpulse", None), "python tests/bench/bench_kvcache_rag.py"
    ))  # fmt: skip
