"""Blocks that outlive a process: names, budget, damage, and files of other hands."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.language_model import Kv

pytest.importorskip("safetensors")
SIZE = 4


def kv_of(token_ids: list[int], seed: int = 0) -> Kv:
    rng = np.random.default_rng((83, seed))
    shape = (2, 1, len(token_ids), 8)
    return Kv(
        np.asarray(token_ids, np.int32),
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )


def opened(folder: Path, bytes_max: int | None = None) -> EngineBlocks:
    return EngineBlocks(folder, model_id="m", block_tokens=SIZE, bytes_max=bytes_max)


def test_what_one_process_wrote_another_reads(tmp_path: Path) -> None:
    tokens = [*range(10)]
    kv = kv_of(tokens)
    writer = opened(tmp_path)
    assert writer.put(writer.root("acme"), kv, tenant="acme") == 2
    assert writer.put(writer.root("acme"), kv, tenant="acme") == 0, "they are there"
    reader = opened(tmp_path)
    root = reader.root("acme")
    assert reader.matched(root, tokens) == 8
    assert reader.matched(root, [0, 1, 2, 3, 9, 9, 9, 9]) == 4
    assert reader.matched(reader.root("other"), tokens) == 0
    assert reader.matched(reader.root("acme", "adapter"), tokens) == 0
    found = reader.get(root, tokens[:8])
    assert found is not None
    np.testing.assert_array_equal(found.keys, kv.keys[:, :, :8])
    np.testing.assert_array_equal(found.values, kv.values[:, :, :8])
    assert reader.get(root, [9, 9, 9, 9]) is None
    with pytest.raises(InputError, match="full blocks"):
        reader.get(root, tokens)
    with pytest.raises(InputError, match="position 0"):
        writer.put(root, Kv(kv.token_ids, kv.keys, kv.values, 3), tenant="acme")


def test_a_file_under_a_wrong_name_is_a_miss_and_goes(tmp_path: Path) -> None:
    blocks = opened(tmp_path)
    root = blocks.root("acme")
    blocks.put(root, kv_of([1, 2, 3, 4]), tenant="acme")
    (right,) = tmp_path.glob("*.safetensors")
    blocks.put(root, kv_of([5, 6, 7, 8]), tenant="acme")
    (wrong,) = set(tmp_path.glob("*.safetensors")) - {right}
    shutil.copy(right, wrong)
    assert blocks.get(root, [5, 6, 7, 8]) is None
    assert not wrong.exists()
    assert blocks.get(root, [1, 2, 3, 4]) is not None


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    blocks = opened(tmp_path)
    root = blocks.root("t")
    for number in range(4):
        blocks.put(root, kv_of([number] * SIZE, number), tenant="t")
    one = blocks.bytes() // 4
    for age, number in enumerate((2, 0, 1, 3)):
        blocks_of = blocks._names(root, [number] * SIZE)
        os.utime(blocks._path(blocks_of[0]), (1_000 + age, 1_000 + age))
    small = opened(tmp_path, bytes_max=3 * one + one // 2)
    small.put(root, kv_of([9] * SIZE), tenant="t")
    left = [number for number in (0, 1, 2, 3, 9) if small.matched(root, [number] * SIZE)]
    assert left == [1, 3, 9]
    assert small.bytes() <= 3 * one + one // 2


def test_senseless_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="block_tokens"):
        EngineBlocks(tmp_path, model_id="m", block_tokens=0)
