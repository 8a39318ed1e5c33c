"""The arena and the entropy in a real server: what its metrics say after real searches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.index.collection_build import build_collection
from stoker.service.client import Client

DIM = 16
COUNT = 600


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    raw = np.random.default_rng(1).standard_normal((COUNT, DIM)).astype(np.float32)
    return np.asarray(raw / np.linalg.norm(raw, axis=1, keepdims=True))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("placement") / "collection"
    build_collection(path, vectors, [f"c{i}" for i in range(COUNT)], metric="cosine", threads=1)
    return path


@pytest.fixture(params=["act", "off"])
def url(request: pytest.FixtureRequest, index: Path) -> Iterator[tuple[str, str]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
    options = {"STOKER_SERVICE_PLACEMENT": request.param, "STOKER_SERVICE_WARM": "none"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker", "serve", str(index), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=clean | options,
    )
    assert process.stdout is not None
    listening = next(
        line for line in map(json.loads, process.stdout) if line["event"] == "listening"
    )
    yield request.param, listening["url"]
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


def metric(url: str, name: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    rows = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", page, flags=re.MULTILINE)
    return {labels: float(value) for labels, value in rows}


def explained(url: str, name: str) -> dict[str, Any]:
    path = f"{url}/v1/placement/{urllib.parse.quote(name, safe='')}"
    with urllib.request.urlopen(path, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_live_searches_reach_the_arena_and_the_entropy(
    url: tuple[str, str], vectors: np.ndarray
) -> None:
    mode, address = url
    accesses = "stoker_prefetch_placement_accesses_total"
    with Client(address, deadline_s=60.0) as client:
        for i in range(60):
            client.search(vector=vectors[i % 6], k=5, session=f"s{i % 3}", route="faq")
        if mode == "off":
            assert metric(address, accesses) == {"": 0.0}
            assert metric(address, "stoker_prefetch_entropy_streams") == {}
            with pytest.raises(urllib.error.HTTPError, match="501"):
                explained(address, "c0")
            return
        seen = 0.0
        while seen < 300.0:  # the thread ticks by itself; the test's own limit ends this
            for i in range(6):
                client.search(vector=vectors[i], k=5, session=f"s{i % 3}", route="faq")
            seen = metric(address, accesses)[""]
    assert metric(address, "stoker_prefetch_placement_hits_total")[""] >= 250.0
    acting = metric(address, "stoker_prefetch_policy_acting_state")
    assert sum(acting.values()) == 1.0
    why = explained(address, "c0")
    assert acting[f'{{policy="{why["acting"]}"}}'] == 1.0
    assert all(isinstance(term, float) for term in why["forecast"].values())
    assert why["forecast"], "it was asked for over and over"
    never = explained(address, "never/asked for#1")
    assert (never["id"], never["forecast"]) == ("never/asked for#1", {})
    assert never["qlearning"] is None
    streams = metric(address, "stoker_prefetch_entropy_streams")
    assert sum(streams.values()) == 2.0  # the tenant, and its route
    bits = metric(address, "stoker_prefetch_entropy_bits")
    assert 4.0 < bits['{rank="median"}'] < 5.0  # thirty passages in turn
    assert metric(address, "stoker_prefetch_gpu_miss_ratio") == {"": -1.0}
    assert 0.0 <= metric(address, "stoker_prefetch_nvme_idle_ratio")[""] <= 1.0
    assert metric(address, "stoker_prefetch_cross_tier_state") == {"": 0.0}
