"""How long a lookup takes, without the embedding, as a tenant's earlier questions grow.

By hand for the canonical size: ``python tests/bench/bench_kvcache_lookup.py --entries 100000``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import time
from collections import Counter

import numpy as np

from stoker.kvcache.lookup import Fence, LookupReuse, Reuse
from stoker.kvcache.settings import KvcacheSettings

DIM = 384
FENCE = Fence(1, 1)


def measure(entries: int, lookups: int) -> dict[str, object]:
    """Fill one tenant with near-duplicates around centres, then ask for more of them."""
    rng = np.random.default_rng(7)
    centres = rng.standard_normal((max(1, entries // 20), DIM)).astype(np.float32)
    reuse = LookupReuse(KvcacheSettings(reuse_entries_max=entries))

    def near(number: int) -> np.ndarray:
        noise = 0.3 * rng.standard_normal(DIM).astype(np.float32)
        return centres[number % len(centres)] + noise

    started = time.perf_counter()
    for number in range(entries):
        ids = [f"d{10 * (number % len(centres)) + rank}" for rank in range(10)]
        text = f"how do i set the option of {_word(number)} in {_word(number % 500)}"
        reuse.store("t", text, near(number), ids, np.ones(10), FENCE)
    store_ms = 1e3 * (time.perf_counter() - started) / entries
    taken, worked, outcomes = [], [], Counter[str]()
    for number in range(lookups):
        text, vector = f"please show how to set the option in {_word(number % 500)}", near(number)
        started, cpu_started = time.perf_counter(), time.thread_time()
        decision = reuse.lookup("t", text, vector, FENCE)
        worked.append(1e3 * (time.thread_time() - cpu_started))
        taken.append(1e3 * (time.perf_counter() - started))
        outcomes["reuse" if isinstance(decision, Reuse) else decision.guard.value] += 1
    reuse.check()
    p50, p95, p99 = np.percentile(taken, [50, 95, 99])
    cpu_p50, cpu_p99 = np.percentile(worked, [50, 99])
    return {
        "entries": entries, "lookups": lookups, "store_ms_mean": round(store_ms, 3),
        "lookup_ms_p50": round(float(p50), 3), "lookup_ms_p95": round(float(p95), 3),
        "lookup_ms_p99": round(float(p99), 3), "lookup_cpu_ms_p50": round(float(cpu_p50), 3),
        "lookup_cpu_ms_p99": round(float(cpu_p99), 3), "bytes": reuse.counts("t")["bytes"],
        "outcomes": dict(outcomes),
    }  # fmt: skip


def replay(questions: int, requests: int) -> dict[str, object]:
    """Replay skewed traffic with document changes: how many repeated needs skip the index.

    Popularity is Zipf's (1.0); a document changes every 50 requests, and the entries that held it
    or lie near its new vector are dropped.
    """
    rng = np.random.default_rng(9)
    vectors = rng.standard_normal((questions, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    weights = 1.0 / np.arange(1, questions + 1)
    asked = rng.choice(questions, requests, p=weights / weights.sum())
    reuse = LookupReuse()
    seen: set[int] = set()
    repeated = skipped = offset = 0
    for number, question in enumerate(asked.tolist()):
        fence = Fence(1, offset)
        text = f"what is known of {_word(question)}"
        decision = reuse.lookup("t", text, vectors[question], fence)
        repeated += question in seen
        if isinstance(decision, Reuse):
            skipped += 1
        else:
            ids = [f"d{question}-{rank}" for rank in range(10)]
            reuse.store(
                "t", text, vectors[question], ids, np.ones(10), fence, similarity_floor=0.5,
                after=decision,
            )  # fmt: skip
        seen.add(question)
        if number % 50 == 49:
            offset += 1
            changed = int(rng.integers(questions))
            vector = vectors[changed] + 0.5 * rng.standard_normal(DIM).astype(np.float32) / DIM**0.5
            reuse.record_change(
                "t", Fence(1, offset), changed_ids=[f"d{changed}-0"], vectors=vector[None, :]
            )
    reuse.check()
    return {"requests": requests, "repeated": repeated, "skipped": skipped,
            "share": round(skipped / repeated, 4)}  # fmt: skip


def _word(number: int) -> str:
    letters = ""
    while True:
        letters += "bcdfghjklmnpqrstvwxz"[number % 20]
        number //= 20
        if not number:
            return letters + "o"


def report(row: dict[str, object], command: str) -> str:
    digest = hashlib.blake2b(repr(row["outcomes"]).encode(), digest_size=8).hexdigest()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{row}\nresult {digest}; machine {machine}; command {command}"


def test_lookups_at_a_small_size() -> None:
    row = measure(entries=1_500, lookups=200)
    print(report(row, "pytest tests/bench/bench_kvcache_lookup.py"))
    outcomes = row["outcomes"]
    assert isinstance(outcomes, dict)
    assert sum(outcomes.values()) == 200


def test_repeated_needs_skip_the_index() -> None:
    row = replay(questions=400, requests=2_000)
    print(row)
    assert float(str(row["share"])) >= 0.7


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=5_000)
    chosen = parser.parse_args()
    print(report(
        measure(chosen.entries, chosen.lookups),
        f"python tests/bench/bench_kvcache_lookup.py --entries {chosen.entries}",
    ))  # fmt: skip
    print(replay(questions=5_000, requests=30_000))
