"""The reuse policy on a known truth, over many seeds: how many runs exceed delta.

``python tests/bench/bench_kvcache_coverage.py --seeds 300`` (about a minute and a half of CPU). The
chance of an error falls with nearness and is known to the simulation alone; a run exceeds delta
where the chances of what it reused come to more than delta on average. At 95 % confidence that may
happen in one run of twenty. ``tests/property/test_kvcache_reuse_policy.py`` asserts the same with
fewer seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "property"))
from kvcache_bench import last_line
from test_kvcache_reuse_policy import ALPHA, DELTA, run


def measure(seeds: int, *, steps: int) -> dict[str, object]:
    """Run each seed and return what came out, all together."""
    broken, reused, worst = 0, 0, 0.0
    for seed in range(seeds):
        expected, reuses, _ = run(seed, steps=steps, drift_at=None)
        broken += expected > DELTA * reuses
        worst = max(worst, expected / reuses if reuses else 0.0)
        reused += reuses
    return {
        "seeds": seeds, "delta": DELTA, "allowed": int(ALPHA * seeds), "above_delta": broken,
        "worst_mean_chance": round(worst, 4), "reuses": reused,
    }  # fmt: skip


def test_coverage_at_a_small_size() -> None:
    row = measure(3, steps=1_200)
    print(row)
    assert row["above_delta"] == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    chosen = parser.parse_args()
    row = measure(chosen.seeds, steps=2_500)
    print(f"{row}\n{last_line(row, f'python {Path(__file__).name} --seeds {chosen.seeds}')}")
