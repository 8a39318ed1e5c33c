"""Vector pages and passages' KV under one budget: what serves more per byte comes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.index.collection import Collection
from stoker.kvcache.language_model import Kv
from stoker.kvcache.passages import PassageStore
from stoker.prefetch.protocols import WarmSource
from stoker.prefetch.warm import run_warm
from stoker.service.collection_index import CollectionIndex
from stoker.service.passage_source import PassageSource

pytest.importorskip("safetensors")
pytestmark = pytest.mark.models

CHUNKS = 2_000
HOT = 20


def kv_of(tokens: int, seed: int) -> Kv:
    rng = np.random.default_rng((5, seed))
    shape = (2, 2, tokens, 32)
    return Kv(
        rng.integers(0, 50_000, tokens).astype(np.int32),
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )


@pytest.fixture
def sources(tmp_path: Path) -> tuple[CollectionIndex, PassageSource]:
    rng = np.random.default_rng(4)
    ids = [f"c{i}" for i in range(CHUNKS)]
    vectors = rng.standard_normal((CHUNKS, 64)).astype(np.float32)
    stoker.build(tmp_path / "index", vectors, ids, metric="cosine", ef_construction=40)
    store = PassageStore(
        tmp_path / "kv", model_id="m1", memory_bytes_max=1 << 24, disk_bytes_max=1 << 24
    )
    for i in range(2 * HOT):
        store.put("default", f"c{i}", kv_of(56, i))
    # A process that starts anew: everything is on disk.
    again = PassageStore(
        tmp_path / "kv", model_id="m1", memory_bytes_max=1 << 24, disk_bytes_max=1 << 24
    )
    return CollectionIndex(Collection(tmp_path / "index")), PassageSource(again)


def test_one_budget_holds_hot_pages_and_hot_passages(
    sources: tuple[CollectionIndex, PassageSource],
) -> None:
    index, passages = sources
    heat = {("default", f"c{i}"): 10.0 for i in range(HOT)}
    everything = index.total_bytes() + passages.total_bytes()
    budget = everything * 2 // 3
    receipt = run_warm([index, passages], heat, budget_bytes=budget)
    by_source = {(line.source, line.kind): line for line in receipt.lines}
    assert receipt.resident_bytes <= budget
    # The hot passages came in, the cold ones did not, and the walk's pages are there too.
    assert by_source["kvcache", "kv_block"].resident == HOT
    assert by_source["index", "codes"].resident == by_source["index", "codes"].offered
    assert 0 < index.resident().resident_bytes < index.total_bytes()
    index.close()


def test_a_budget_too_small_for_both_takes_the_walk_first(
    sources: tuple[CollectionIndex, PassageSource],
) -> None:
    index, passages = sources
    heat = {("default", f"c{i}"): 10.0 for i in range(HOT)}
    assert isinstance(passages, PassageSource)
    source: WarmSource = passages
    assert source.total_bytes() > 0
    receipt = run_warm([index, source], heat, budget_bytes=64 << 10)
    by_source = {(line.source, line.kind): line for line in receipt.lines}
    assert by_source["kvcache", "kv_block"].resident == 0
    assert by_source["index", "upper"].resident == by_source["index", "upper"].offered
    assert receipt.resident_bytes <= 64 << 10
    index.close()


@pytest.mark.parametrize(("weight", "block_wins"), [(1_000.0, True), (2.0, False)])
def test_benefit_per_byte_decides_between_a_block_and_pages(
    sources: tuple[CollectionIndex, PassageSource], weight: float, block_wins: bool
) -> None:
    """Behind what every search needs there is room for one block, or for as many bytes of pages.

    A page of vectors serves 16 documents that are asked for alike; a block serves one, in 16 times
    the bytes. So the block is worth more where its passage is asked for far more often.
    """
    index, passages = sources
    heat = {("default", f"c{i}"): 1.0 for i in range(CHUNKS)}
    heat["default", "c0"] = weight
    batches = {batch.kind: batch for batch in index.unit_batches(heat)}
    (block,) = passages.unit_batches(heat)
    page_bytes = batches["vectors"].unit_bytes
    shared = sum(
        len(batch.units) * batch.unit_bytes for kind, batch in batches.items() if kind != "vectors"
    )
    per_byte = float(block.benefit[0]) / block.unit_bytes
    cold = float(batches["vectors"].benefit[-1]) / page_bytes
    assert (per_byte > cold) == block_wins, "the case is what its name says"
    receipt = run_warm([index, passages], heat, budget_bytes=shared + page_bytes + block.unit_bytes)
    lines = {line.kind: line for line in receipt.lines}
    assert lines["refine"].resident == lines["refine"].offered
    assert lines["kv_block"].resident == int(block_wins)
    pages = 1 if block_wins else 1 + block.unit_bytes // page_bytes
    assert lines["vectors"].resident == pages
    if block_wins:
        assert passages.resident_count("kv_block", block.units[:1]) == 1, "and it is the hot one"
    index.close()
