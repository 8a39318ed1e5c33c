"""Prefix blocks against LRU on recorded prompts: share of prompt blocks that need no computing.

Run by hand for the canonical size: ``python tests/bench/bench_kvcache_prefix.py --full``. As a
test it takes the first requests only, prints what it found and never fails on time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest

from stoker.kvcache.block_names import root_hash
from stoker.kvcache.prefix_blocks import PrefixBlocks

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import last_line

SHARES = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5)


def prompts_of(path: Path, limit: int | None) -> list[list[int]]:
    """Return each request's chained 512-token block numbers; one stands for one block here."""
    prompts = []
    with path.open() as file:
        for line in file:
            prompts.append(json.loads(line)["hash_ids"])
            if limit is not None and len(prompts) == limit:
                break
    return prompts


def lru_share(prompts: list[list[int]], blocks: int) -> float:
    """Least recently used, the deepest block of a prompt going first: what engines do."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for prompt in prompts:
        asked += len(prompt)
        for block in prompt:
            if block not in cached:
                break
            hits += 1
        for block in reversed(prompt):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > blocks:
            cached.popitem(last=False)
    return hits / asked


def ours_share(prompts: list[list[int]], blocks: int) -> float:
    """Run the same prompts through `PrefixBlocks`."""
    cache = PrefixBlocks(block_tokens=1, host_blocks_max=blocks)
    root = root_hash(model_id="m", tenant="t", block_tokens=1)
    hits = asked = 0
    for prompt in prompts:
        asked += len(prompt)
        identity, reused = cache.begin(root, prompt)
        hits += reused
        cache.extend(identity, prompt[reused:])
        cache.end(identity)
    return hits / asked


def compare(folder: Path, *, limit: int | None) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in ("conversation", "synthetic"):
        prompts = prompts_of(folder / f"{name}_trace.jsonl", limit)
        footprint = len({block for prompt in prompts for block in prompt})
        longest = max(len(prompt) for prompt in prompts)
        for share in SHARES:
            blocks = int(share * footprint)
            if blocks < longest:
                continue  # one prompt alone would not fit
            started = time.perf_counter()
            rows.append({
                "trace": name, "requests": len(prompts), "cache_share": share, "blocks": blocks,
                "lru": round(lru_share(prompts, blocks), 4),
                "ours": round(ours_share(prompts, blocks), 4),
                "seconds": round(time.perf_counter() - started, 2),
            })  # fmt: skip
    return rows


def report(rows: list[dict[str, object]], command: str) -> str:
    figures = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    lines = [json.dumps(row) for row in rows]
    return "\n".join([*lines, last_line(figures, command)])


@pytest.mark.data
def test_blocks_beat_lru_on_recorded_prompts(shared_data: Path) -> None:
    rows = compare(shared_data / "mooncake", limit=800)
    print(report(rows, "pytest tests/bench/bench_kvcache_prefix.py"))
    assert len(rows) >= 8
    for row in rows:
        assert float(str(row["ours"])) >= float(str(row["lru"])) - 0.002, row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared/data")
    parser.add_argument("--full", action="store_true", help="all requests: about 5 minutes")
    chosen = parser.parse_args()
    found = compare(chosen.data / "mooncake", limit=None if chosen.full else 1_500)
    print(report(found, "python tests/bench/bench_kvcache_prefix.py" + " --full" * chosen.full))
