"""Can one tenant tell by time what another has asked? Ten thousand tries, and a rank test.

The attacker looks up texts that the other tenant has asked, and texts that nobody has, in random
order, and compares the times by the Mann-Whitney test (two-sided, normal approximation). An area
under the curve of 0.5 is a coin; by hand: ``python tests/bench/bench_kvcache_isolation.py``.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import numpy as np

from stoker.kvcache.lookup import LookupReuse, Refusal
from stoker.kvcache.tenant_lookups import Fence

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kvcache_bench import last_line, made_word

DIM = 64
FENCE = Fence(1, 1)


def rank_test(one: list[float], other: list[float]) -> tuple[float, float]:
    """Return the area under the curve and the two-sided p-value of the Mann-Whitney test."""
    values = np.array(one + other)
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):  # ties share their mean rank
        tied = values == value
        ranks[tied] = ranks[tied].mean()
    count, rest = len(one), len(other)
    area = (ranks[:count].sum() - count * (count + 1) / 2) / (count * rest)
    deviation = math.sqrt((count + rest + 1) / (12 * count * rest))
    return float(area), math.erfc(abs(area - 0.5) / deviation / math.sqrt(2))


def measure(tries: int) -> dict[str, object]:
    rng = np.random.default_rng(3)
    texts = [f"what is said of {made_word(number)} in the notes" for number in range(1_000)]
    vectors = rng.standard_normal((1_000, DIM)).astype(np.float32)
    own = rng.standard_normal((50, DIM)).astype(np.float32)
    # Two worlds: the victim asked each text in one of them, so that no text's own time counts.
    worlds = []
    for world in range(2):
        reuse = LookupReuse(rng=random.Random(3))
        for number in range(world, 1_000, 2):
            reuse.store("victim", texts[number], vectors[number], ["secret"], [1.0], FENCE)
        for number in range(50):  # the attacker has questions of its own
            text = f"own question {made_word(number)}"
            reuse.store("attacker", text, own[number], ["own"], [1.0], FENCE)
        worlds.append(reuse)
    taken: dict[bool, list[float]] = {True: [], False: []}
    answers = set()
    for number in rng.permutation(tries).tolist():
        place, world = number // 2 % 1_000, number % 2
        started = time.perf_counter_ns()
        decision = worlds[world].lookup("attacker", texts[place], vectors[place], FENCE)
        taken[place % 2 == world].append(float(time.perf_counter_ns() - started))
        assert isinstance(decision, Refusal), "another tenant's entry was seen"
        answers.add(str(decision.guard))
    area, chance = rank_test(taken[True], taken[False])
    return {"tries": tries, "area": round(area, 4), "p_value": round(chance, 4),
            "answers": sorted(answers)}  # fmt: skip


def report(row: dict[str, object], command: str) -> str:
    return f"{row}\n{last_line(row['answers'], command)}"


def test_no_answer_tells_of_another_tenant() -> None:
    print(report(measure(400), "pytest tests/bench/bench_kvcache_isolation.py"))


def test_rank_test_finds_a_difference_and_none() -> None:
    rng = np.random.default_rng(5)
    same = rng.normal(size=(2, 2_000))
    area, chance = rank_test(same[0].tolist(), same[1].tolist())
    assert abs(area - 0.5) < 0.03
    assert chance > 0.01
    area, chance = rank_test((same[0] + 0.2).tolist(), same[1].tolist())
    assert area > 0.53
    assert chance < 1e-3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=10_000)
    chosen = parser.parse_args()
    print(report(measure(chosen.tries), "python tests/bench/bench_kvcache_isolation.py"))
