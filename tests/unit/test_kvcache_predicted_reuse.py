"""Predicted reuse: from the heat of passages to blocks, their file, and who goes first by it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from stoker.kvcache.block_names import root_hash
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.language_model import Kv
from stoker.kvcache.predicted_reuse import (
    FILE_NAME,
    block_weights,
    read_predicted,
    write_predicted,
)
from stoker.kvcache.prefix_blocks import PrefixBlocks

SIZE = 4
ROOT = root_hash(model_id="m", tenant="t", block_tokens=SIZE)
BEFORE = [7, 7, 7, 7]


def sequence(number: int) -> list[int]:
    return BEFORE + [number] * SIZE


def kv_of(token_ids: list[int]) -> Kv:
    values = np.zeros((1, 1, len(token_ids), 4), np.float32)
    return Kv(np.asarray(token_ids, np.int32), values, values)


def test_what_many_passages_begin_with_is_expected_as_often_as_all_of_them() -> None:
    found = block_weights(
        [(sequence(1), 3.0), ([*sequence(2), 5], 2.0), (sequence(3), 0.0), (sequence(4), math.nan)],
        root=ROOT, block_tokens=SIZE,
    )  # fmt: skip
    blocks = PrefixBlocks(block_tokens=SIZE, host_blocks_max=1)
    shared, one = blocks.hashes_of(ROOT, sequence(1))
    _, two = blocks.hashes_of(ROOT, sequence(2))
    assert found == {shared: 5.0, one: 3.0, two: 2.0}, "and what fills no block has no name"


def test_a_prediction_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    assert read_predicted(tmp_path) == {}
    weights = block_weights([(sequence(1), 0.25)], root=ROOT, block_tokens=SIZE)
    write_predicted(tmp_path, weights)
    assert read_predicted(tmp_path) == weights
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    for text in (
        "", "[]", "{}", "[" * 100_000, '{"version": 2, "weights": {}}',
        '{"version": 1, "weights": {"zz": 1}}', '{"version": 1, "weights": {"00": []}}',
    ):  # fmt: skip
        (tmp_path / FILE_NAME).write_text(text)
        assert read_predicted(tmp_path) == {}


def cached(blocks: PrefixBlocks, token_ids: list[int]) -> None:
    identity, reused = blocks.begin(ROOT, token_ids)
    blocks.extend(identity, token_ids[reused:])
    blocks.end(identity)


@pytest.mark.parametrize("expected", [1, 2, 3])
def test_prefix_blocks_keep_what_the_file_says(tmp_path: Path, expected: int) -> None:
    blocks = PrefixBlocks(block_tokens=SIZE, host_blocks_max=4)
    for number in (1, 2, 3):
        cached(blocks, sequence(number))
    write_predicted(
        tmp_path, block_weights([(sequence(expected), 3.0)], root=ROOT, block_tokens=SIZE)
    )
    blocks.predict(read_predicted(tmp_path))
    cached(blocks, sequence(8))
    cached(blocks, sequence(9))
    held = [n for n in (1, 2, 3) if blocks.match(ROOT, sequence(n)).tokens == 2 * SIZE]
    assert held == [expected]
    blocks.predict({})
    for number in (4, 5, 6):
        cached(blocks, sequence(number))
    assert blocks.match(ROOT, sequence(expected)).tokens == SIZE, "expected no longer"
    blocks.check()


@pytest.mark.parametrize("expected", [1, 2, 3])
def test_files_of_an_engine_are_kept_by_what_is_expected(tmp_path: Path, expected: int) -> None:
    pytest.importorskip("safetensors")
    now = [1_000.0]

    def opened(bytes_max: int | None) -> EngineBlocks:
        return EngineBlocks(
            tmp_path, model_id="m", block_tokens=SIZE, bytes_max=bytes_max, wall=lambda: now[0]
        )

    writer = opened(None)
    root = writer.root("t")
    for number in (1, 2, 3):
        now[0] += 10
        writer.put(root, kv_of(sequence(number)), tenant="t")
    one = writer.bytes() // 4
    keeper = opened(2 * one + one // 2)
    keeper.predict(block_weights([(sequence(expected), 2.0)], root=root, block_tokens=SIZE))
    assert keeper.keep_budget() == 2
    assert keeper.keep_budget() == 0
    held = [n for n in (1, 2, 3) if keeper.matched(root, sequence(n)) == 2 * SIZE]
    assert held == [expected]


def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path: Path) -> None:
    """With its first block gone, nothing of a prefix can be found, and the rest is a waste."""
    pytest.importorskip("safetensors")
    blocks = EngineBlocks(tmp_path, model_id="m", block_tokens=SIZE)
    root = blocks.root("t")
    long = [*range(20)]
    blocks.put(root, kv_of(long), tenant="t")
    one = blocks.bytes() // 5
    blocks.put(root, kv_of([9] * SIZE), tenant="t")
    assert blocks.get(root, long) is not None
    keeper = EngineBlocks(tmp_path, model_id="m", block_tokens=SIZE, bytes_max=3 * one + one // 2)
    assert keeper.keep_budget() == 3
    assert keeper.matched(root, long) == 3 * SIZE


def test_a_prompt_computed_again_is_a_use_of_the_blocks_that_it_begins_with(
    tmp_path: Path,
) -> None:
    pytest.importorskip("safetensors")
    now = [1_000.0]
    blocks = EngineBlocks(
        tmp_path, model_id="m", block_tokens=SIZE, bytes_max=10**9, wall=lambda: now[0]
    )
    root = blocks.root("t")
    for number in (1, 2):
        now[0] += 10
        blocks.put(root, kv_of([number] * SIZE), tenant="t")
    now[0] += 10
    blocks.put(root, kv_of([1] * SIZE), tenant="t")
    one = blocks.bytes() // 2
    keeper = EngineBlocks(tmp_path, model_id="m", block_tokens=SIZE, bytes_max=one)
    keeper.keep_budget()
    assert keeper.matched(root, [1] * SIZE) == SIZE
