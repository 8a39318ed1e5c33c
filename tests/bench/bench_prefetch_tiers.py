"""Q-learning over three tiers beside what can be known at all, on made traces that drift.

    python tests/bench/bench_prefetch_tiers.py
    python tests/bench/bench_prefetch_tiers.py --made jobs:1 --accesses 40000

The oracle knows every coming access, which nobody can. Two rows more say how much of its gain over
LRU is within reach of a policy that decides from the past:

* told the law: at each access it is told the probabilities that the trace is really drawn from, and
  with "and the job" also where the job stands in its list. It keeps what has the most expected
  accesses per access of room, over the stretch of time that suits the key best.
* counted: the same, but it has to count how popular keys are (decayed, the half-life that does best
  of those given). All else it is still told.

They are strong heuristics, not proven bounds. Rooms are 100 and 400 keys; the first fifth of the
accesses is not measured. Each informed row takes about half a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.prefetch.drifting import KINDS, REPEAT_WINDOW, DriftingTrace, drifting_trace
from stoker.prefetch.qlearning import GPU, HOST, NVME, TierCosts
from stoker.prefetch.simulation import measured_mask
from stoker.prefetch.tier_simulation import simulate_tiers

Floats = NDArray[np.float64]

MADE = ("drift:1", "jobs:1")
# Accesses over which an expectation is taken; a key is worth its best one.
SPANS = (8.0, 24.0, 64.0, 200.0, 600.0, 1500.0, 4000.0, 12000.0, 40000.0)
HALF_LIVES = (2_000.0, 5_000.0)


class Informed:
    """Three tiers, filled on demand by what is told about the trace."""

    def __init__(
        self,
        made: DriftingTrace,
        gpu_room: int,
        host_room: int,
        *,
        job_known: bool,
        half_life: float | None = None,
    ) -> None:
        """Start empty; ``half_life`` in accesses makes it count popularity, None tells it."""
        self._made = made
        self._room = (gpu_room, host_room)
        self._job_known = job_known
        self._keys = made.trace.keys
        count = made.trace.footprint
        self._tier = np.full(count, NVME, dtype=np.int8)
        self._law = -1
        self._places: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)
        self._decay = None if half_life is None else 0.5 ** (1.0 / half_life)
        self._counts = np.zeros(count)
        self._grown = 1.0

    def run(self) -> NDArray[np.int8]:
        """Return the tier that each access found its key in, shape (n,)."""
        found = np.empty(len(self._keys), dtype=np.int8)
        for at, key in enumerate(self._keys.tolist()):
            laws = self._made.laws
            if self._law + 1 < len(laws) and at == laws[self._law + 1].start:
                self._law += 1
                self._note_places(laws[self._law].job)
            if self._decay is not None:
                self._grown /= self._decay
                self._counts[key] += self._grown
                if self._grown > 1e200:
                    self._counts /= self._grown
                    self._grown = 1.0
            found[at] = self._tier[key]
            if found[at] != GPU:
                self._place(at, key)
        return found

    def _note_places(self, job: NDArray[np.int64]) -> None:
        """Note up to three places of each key in the job's list, -1 for none."""
        self._places = np.full((self._made.trace.footprint, 3), -1, dtype=np.int64)
        for place, key in enumerate(job.tolist()):
            row = self._places[key]
            free = np.flatnonzero(row < 0)
            if len(free):
                row[free[0]] = place

    def _worth(self, at: int, among: NDArray[np.int64]) -> Floats:
        """Return expected accesses per access of room, the best over `SPANS`, shape (n,)."""
        made, law = self._made, self._made.laws[self._law]
        if self._decay is None:
            popular = law.popular[among]
        else:
            popular = self._counts[among] / self._counts.sum()
        steady = (1.0 - made.session_ratio - made.job_ratio) * popular
        places, length = self._places[among], len(law.job)
        if not self._job_known:
            steady = steady + made.job_ratio / length * (places >= 0).sum(axis=1)
        ahead = np.where(places >= 0, (places - made.walked[at]) % length, 1 << 40)
        recent = self._keys[max(0, at + 1 - REPEAT_WINDOW) : at + 1]
        left = REPEAT_WINDOW - np.arange(len(recent), dtype=np.float64)[::-1]
        best = np.zeros(len(among))
        for span in SPANS:
            again = made.session_ratio / REPEAT_WINDOW * np.minimum(left, span)
            repeats = np.bincount(recent, weights=again, minlength=made.trace.footprint)
            hits = steady * span + repeats[among]
            if self._job_known:
                hits = hits + (ahead < made.job_ratio * span).sum(axis=1)
            best = np.maximum(best, hits / span)
        return best

    def _place(self, at: int, key: int) -> None:
        """Let a key contest the GPU and then the host; what it displaces contests the next."""
        tier = self._tier
        tier[key] = NVME
        inside = np.flatnonzero(tier != NVME)
        among = np.append(inside, key)
        worth = dict(zip(among.tolist(), self._worth(at, among).tolist(), strict=True))
        for level in (GPU, HOST):
            held = np.flatnonzero(tier == level).tolist()
            if len(held) < self._room[level]:
                tier[key] = level
                return
            least = min(held, key=worth.__getitem__)
            if worth[least] < worth[key]:
                tier[key], tier[least] = level, NVME
                key = least


def compare(name: str, *, accesses: int, gpu_room: int, host_room: int) -> list[dict[str, Any]]:
    """Run everything on one made trace ("KIND:SEED"); one row a policy."""
    kind, _, seed = name.partition(":")
    options: dict[str, Any] = KINDS[kind]
    made = drifting_trace(seed=int(seed), accesses=accesses, **options)
    measured = measured_mask(made.trace, "20%")
    outcomes = {
        outcome.policy: outcome
        for outcome in simulate_tiers(
            made.trace,
            policies=["lru", "frequency", "qlearning", "oracle"],
            gpu_room=gpu_room,
            host_room=host_room,
            measured=measured,
        )
    }
    rows = [
        {"policy": o.policy, "read_us": o.read_us, "share": o.oracle_share}
        for o in outcomes.values()
    ]
    read = np.array(TierCosts().read_us)
    worst, best = outcomes["lru"].read_us, outcomes["oracle"].read_us
    variants: list[tuple[str, bool, float | None]] = [
        *(("counted", False, half_life) for half_life in HALF_LIVES),
        ("told the law", False, None),
        ("told the law and the job", True, None),
    ]
    for label, job_known, half_life in variants:
        informed = Informed(made, gpu_room, host_room, job_known=job_known, half_life=half_life)
        mean = float(read[informed.run()[measured]].mean())
        rows.append({"policy": label, "read_us": mean, "share": (worst - mean) / (worst - best)})
    counted = [row for row in rows if row["policy"] == "counted"]
    worse = max(counted, key=lambda row: row["read_us"])
    return [row for row in rows if row is not worse]


def render(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    out = [f"{name}", "", "| policy | µs a read | share of the oracle's gain |", "|---|---:|---:|"]
    out += [f"| {r['policy']} | {r['read_us']:.1f} | {r['share']:.2f} |" for r in rows]
    return "\n".join(out) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--made", action="append", metavar="KIND:SEED", help="only these")
    parser.add_argument("--accesses", type=int, default=120_000)
    args = parser.parse_args(argv)
    results = {}
    for name in args.made or MADE:
        results[name] = compare(name, accesses=args.accesses, gpu_room=100, host_room=400)
        print(render(name, results[name]), flush=True)
    digest = hashlib.blake2b(json.dumps(results).encode(), digest_size=6).hexdigest()
    print(
        f"{platform.platform()}, Python {platform.python_version()}; "
        f"python {' '.join(sys.argv)}; result {digest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
