"""The room's tiers as its settings open them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stoker.errors import ConfigError
from stoker.kvcache.block_names import root_hash
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tiers import open_passages, open_prefix_blocks, open_slab


def test_prefix_blocks_take_their_sizes_from_the_settings(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        KvcacheSettings(), kv_bytes_max=10_000, kv_disk_bytes_max=20_000, kv_block_tokens=16
    )
    blocks = open_prefix_blocks(tmp_path, model_id="m", token_bytes=100, settings=settings)
    root = root_hash(model_id="m", tenant="t", block_tokens=16)
    for number in range(40):
        identity, _ = blocks.begin(root, [])
        blocks.extend(identity, [number] * 16)
        blocks.end(identity)
        blocks.check()
    assert (blocks.counts().host, blocks.counts().nvme) == (5, 12)
    small = dataclasses.replace(settings, kv_bytes_max=1_000)
    with pytest.raises(ConfigError, match="kv_bytes_max"):
        open_prefix_blocks(tmp_path, model_id="m", token_bytes=100, settings=small)


def test_passages_open_empty(tmp_path: Path) -> None:
    store = open_passages(tmp_path, model_id="m", settings=KvcacheSettings())
    assert store.counts().entries == 0
    assert store.total_bytes() == 0


@pytest.mark.models
def test_slab_is_no_larger_than_what_it_holds() -> None:
    pytest.importorskip("torch")
    settings = dataclasses.replace(KvcacheSettings(), device="cpu", slab_pages_max=8)
    slab = open_slab(page_bytes=64, pages=3, settings=settings)
    assert slab.frames_max == 3
    for page in range(3):
        assert slab.load(page, bytes([page]) * 64)
    slab.check()
    assert slab.counts().resident == 3
