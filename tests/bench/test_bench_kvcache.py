"""The KV benchmarks' own parts at a tiny size: pairs of every shape, and what a read costs."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def bench(name: str) -> Any:
    path = Path(__file__).with_name(f"bench_kvcache_{name}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(path.stem, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.mark.data
@pytest.mark.parametrize("shape", ["templates", "claims", "turns", "random"])
def test_pairs_of_every_shape_are_mixed_and_repeatable(shape: str, shared_data: Path) -> None:
    shapes = bench("reuse_shapes")
    makers = {
        "templates": lambda rng: shapes.templates(rng, 300),
        "claims": lambda rng: shapes.claims(rng, shared_data),
        "turns": lambda rng: shapes.turns(rng, shared_data),
        "random": lambda rng: shapes.at_random(rng, shared_data, 300),
    }
    pairs = makers[shape](random.Random(5))
    assert pairs == makers[shape](random.Random(5))
    assert pairs != makers[shape](random.Random(6))
    same = sum(truth for _, _, truth in pairs)
    assert 0.3 * len(pairs) < same < 0.9 * len(pairs)
    assert all(a.strip() and b.strip() for a, b, _ in pairs)


def test_the_area_under_the_curve_counts_ties_half() -> None:
    attention = bench("attention")
    same = np.array([True, True, False, False])
    assert attention.area(np.array([4.0, 3.0, 2.0, 1.0]), same) == 1.0
    assert attention.area(np.array([1.0, 2.0, 3.0, 4.0]), same) == 0.0
    assert attention.area(np.ones(4), same) == 0.5


def test_every_way_of_reading_is_measured() -> None:
    rows = bench("hot_keys").measure(200)
    assert len(rows) == 6
    assert all(row["reads_per_s"] > 0 for row in rows.values())
    assert "writes_per_s" in rows["snapshot_beside_writer"], "it writes at least once"
