"""What a receipt predicts against what a real server then measures, window by window.

    python tests/bench/bench_service_receipt.py --windows 6

Each window is a restart: `stoker serve` starts on the heat of the windows before it, warms up
within its budget, says a predicted hit ratio, answers searches by the same law as before, and says
the measured one. Corpora differ in size, in how skewed the questions are, and in the budget. Per
corpus: the mean error, its standard error over the windows, and the spread of the measured ratio
from window to window, which is what one measurement is uncertain by.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from served_process import Served

from stoker.index.collection_build import build_collection

DIM, FOUND = 64, 10
WAIT_S = 30.0

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A corpus of passages in topics, the power law of the questions over topics, and a budget."""

    rows: int
    topics: int
    skew: float
    budget: float

    @property
    def name(self) -> str:
        return f"{self.rows:,} passages, {self.topics:,} topics, skew {self.skew}"

    def corpus(self) -> Vectors:
        rng = np.random.default_rng(11)
        centres = rng.standard_normal((self.topics, DIM))
        noise = 0.5 * rng.standard_normal((self.rows, DIM))
        return np.asarray(centres[np.arange(self.rows) % self.topics] + noise, np.float32)

    def questions(self, vectors: Vectors, count: int, *, seed: int) -> Vectors:
        rng = np.random.default_rng(seed)
        law = 1.0 / np.arange(1, self.topics + 1) ** self.skew
        topic = rng.choice(self.topics, size=count, p=law / law.sum())
        row = topic + self.topics * rng.integers(0, self.rows // self.topics, size=count)
        return np.asarray(vectors[row] + 0.1 * rng.standard_normal((count, DIM)), np.float32)


CASES = (
    Case(4_000, 200, 1.5, 0.05),
    Case(4_000, 400, 1.0, 0.10),
    Case(12_000, 1_000, 0.8, 0.10),
    Case(12_000, 1_000, 1.2, 0.20),
)


def receipt_of(server: Served) -> dict[str, Any] | None:
    with urllib.request.urlopen(f"{server.url}/v1/warmup", timeout=60) as answer:
        found: dict[str, Any] | None = json.load(answer)["receipt"]
    return found


def waited(server: Served, field: str) -> dict[str, Any]:
    """Return the receipt once it has a field."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        receipt = receipt_of(server)
        if receipt is not None and receipt[field] is not None:
            return receipt
        time.sleep(0.1)
    raise SystemExit(f"no {field} within {WAIT_S:g} s")


def ask(server: Served, questions: Vectors) -> None:
    for at, question in enumerate(questions):
        server.client.search(vector=question, k=FOUND, session=f"s{at // 3}")


def run_case(case: Case, *, learnt: int, followed: int, windows: int) -> list[tuple[float, float]]:
    """Return (predicted, measured) of each window."""
    vectors, found = case.corpus(), []
    with tempfile.TemporaryDirectory() as folder:
        index, state = Path(folder) / "collection", Path(folder) / "state"
        build_collection(index, vectors, [f"d{row}" for row in range(case.rows)])
        server = Served(index, state, {"SERVICE_WARM": "none"})
        ask(server, case.questions(vectors, learnt, seed=1))
        server.stop()
        settings = {
            "PREFETCH_WARM_BUDGET_RATIO": str(case.budget),
            "PREFETCH_WARM_BUDGET_BYTES_MIN": "0",
        }
        for window in range(windows):
            server = Served(index, state, settings)
            try:
                predicted = float(waited(server, "predicted_hit_ratio")["predicted_hit_ratio"])
                ask(server, case.questions(vectors, followed, seed=100 + window))
                measured = float(waited(server, "measured_hit_ratio")["measured_hit_ratio"])
            finally:
                server.stop()
            found.append((predicted, measured))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--learnt", type=int, default=500, help="searches before the first window")
    parser.add_argument("--followed", type=int, default=150, help="searches in each window")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    print("| corpus | budget | predicted | measured | mean error | spread of the measured |")
    print("|---|---:|---|---|---:|---:|")
    errors = []
    for case in CASES:
        found = np.array(
            run_case(case, learnt=args.learnt, followed=args.followed, windows=args.windows)
        )
        predicted, measured = found.T
        error = measured - predicted
        errors += error.tolist()
        sem = error.std(ddof=1) / np.sqrt(len(error)) if len(error) > 1 else float("nan")
        spread = measured.std(ddof=1) if len(error) > 1 else float("nan")
        cells = (
            case.name,
            f"{case.budget:.0%}",
            ", ".join(f"{value:.3f}" for value in predicted),
            ", ".join(f"{value:.3f}" for value in measured),
            f"{error.mean():+.4f} ± {sem:.4f}",
            f"{spread:.4f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"largest error of {len(errors)} windows: {np.abs(errors).max():.4f}")
    command = " ".join(["python", *sys.argv])
    print(f"{platform.platform()}, Python {platform.python_version()}; {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
