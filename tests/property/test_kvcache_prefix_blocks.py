"""The block tree against a list of token lists: what matches, what is shared, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker.errors import InputError
from stoker.kvcache.block_names import BlockHash, block_hash, root_hash
from stoker.kvcache.block_tree import BlocksFull
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.language_model import Kv
from stoker.kvcache.prefix_blocks import PrefixBlocks, SequenceId
from stoker.kvcache.prefix_tier import FileTier

BLOCK = 2
TOKENS = st.lists(st.integers(0, 2), max_size=9)


def kv_of(token_ids: list[int], start: int) -> Kv:
    """KV whose numbers say which token stands where, so that a wrong slice is seen."""
    count = len(token_ids)
    line = np.array(token_ids, np.float32) + 10 * np.arange(start, start + count)
    keys = np.broadcast_to(line[None, None, :, None], (2, 1, count, 4)).astype(np.float32)
    return Kv(np.array(token_ids, np.int32), keys, -keys, start)


class DictTier:
    """A tier below that loses a block now and then; while it is broken it fails altogether."""

    def __init__(self) -> None:
        self.kept: dict[BlockHash, Kv] = {}
        self.gets = self.puts = 0
        self.broken = False

    def put(self, found: BlockHash, kv: Kv) -> None:
        if self.broken:
            self.puts += 1
            raise OSError(28, "no space left") if self.puts % 2 else InputError("keys: not finite")
        self.kept[found] = kv

    def get(self, found: BlockHash) -> Kv | None:
        if self.broken:
            raise OSError(5, "input/output error")
        self.gets += 1
        return None if self.gets % 5 == 0 else self.kept[found]

    def drop(self, found: BlockHash) -> None:
        if self.broken:
            raise OSError(30, "read-only file system")
        del self.kept[found]


class PrefixMachine(RuleBasedStateMachine):
    """Sequences of two tenants begin, grow, fork and end, in a cache of a few blocks."""

    @initialize(host=st.sampled_from([3, 6, 200]), nvme=st.sampled_from([0, 4]))
    def start(self, host: int, nvme: int) -> None:
        self.lower = DictTier()
        self.cache = PrefixBlocks(
            block_tokens=BLOCK, host_blocks_max=host, nvme_blocks_max=nvme, lower=self.lower
        )
        self.host = host
        self.roots = [
            root_hash(model_id="m", tenant=tenant, block_tokens=BLOCK) for tenant in ("a", "b")
        ]
        self.open: dict[SequenceId, tuple[int, list[int]]] = {}
        self.stored: set[tuple[int, tuple[int, ...]]] = set()  # whole-block prefixes ever stored

    def note(self, tenant: int, tokens: list[int]) -> None:
        for stop in range(BLOCK, len(tokens) + 1, BLOCK):
            self.stored.add((tenant, tuple(tokens[:stop])))

    @rule(tenant=st.integers(0, 1), tokens=TOKENS)
    def begin(self, tenant: int, tokens: list[int]) -> None:
        match = self.cache.match(self.roots[tenant], tokens)
        assert (tenant, tuple(tokens[: match.tokens])) in self.stored or match.tokens == 0
        if self.host == 200:  # nothing is ever evicted: the longest stored prefix must match
            longest = max(
                n for n in range(0, len(tokens) + 1, BLOCK)
                 if n == 0 or (tenant, tuple(tokens[:n])) in self.stored
            )  # fmt: skip
            assert match.tokens == longest
        try:
            identity, reused = self.cache.begin(self.roots[tenant], tokens)
        except OSError:  # what it had taken hold of by then is let go: `holds` counts references
            assert self.lower.broken
            return
        assert reused <= match.tokens + match.partial_tokens
        assert self.cache.token_ids_of(identity) == tokens[:reused]
        self.open[identity] = (tenant, tokens[:reused])
        self.grow(identity, tokens[reused:])

    def grow(self, identity: SequenceId, tokens: list[int]) -> None:
        tenant, held = self.open[identity]
        try:
            self.cache.extend(identity, tokens, kv_of(tokens, len(held)))
        except BlocksFull:  # it goes on from its last whole block, or from where it was
            whole = self.cache.token_ids_of(identity)
            assert whole == (held + tokens)[: len(whole)]
            assert whole == held or (len(whole) > len(held) and len(whole) % BLOCK == 0)
            self.open[identity] = (tenant, whole)
            self.note(tenant, whole)
            return
        self.open[identity] = (tenant, held + tokens)
        self.note(tenant, held + tokens)

    @rule(pick=st.integers(0, 50), tokens=TOKENS)
    def extend(self, pick: int, tokens: list[int]) -> None:
        if self.open:
            self.grow(list(self.open)[pick % len(self.open)], tokens)

    @rule(pick=st.integers(0, 50))
    def fork(self, pick: int) -> None:
        if self.open:
            identity = list(self.open)[pick % len(self.open)]
            self.open[self.cache.fork(identity)] = self.open[identity]

    @rule(pick=st.integers(0, 50))
    def end_one(self, pick: int) -> None:
        if self.open:
            self.end(list(self.open)[pick % len(self.open)])

    def end(self, identity: SequenceId) -> None:
        self.cache.end(identity)
        del self.open[identity]
        with pytest.raises(InputError):
            self.cache.end(identity)

    @rule(broken=st.booleans())
    def break_lower(self, broken: bool) -> None:
        self.lower.broken = broken

    @rule(weight=st.floats(0, 10), tenant=st.integers(0, 1))
    def predict(self, weight: float, tenant: int) -> None:
        self.cache.predict({block_hash(self.roots[tenant], [0, 0]): weight})

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for identity, (_, tokens) in self.open.items():
            assert self.cache.token_ids_of(identity) == tokens
            kv = self.cache.kv_of(identity)
            if tokens and kv is not None:
                expected = kv_of(tokens, 0)
                np.testing.assert_array_equal(kv.keys, expected.keys)
                np.testing.assert_array_equal(kv.values, expected.values)
            else:
                assert not tokens


PrefixMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPrefixBlocks = PrefixMachine.TestCase


def test_tenants_models_and_adapters_never_share() -> None:
    parts = itertools.product(("m", "n"), ("a", "b"), ("", "x"))
    roots = {root_hash(model_id=m, tenant=t, adapter=x, block_tokens=BLOCK) for m, t, x in parts}
    assert len(roots) == 8
    assert root_hash(model_id="ab", tenant="c", block_tokens=2) != root_hash(
        model_id="a", tenant="bc", block_tokens=2
    )
    cache = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=50)
    one, other = (root_hash(model_id="m", tenant=t, block_tokens=BLOCK) for t in ("a", "b"))
    identity, _ = cache.begin(one, [])
    cache.extend(identity, [1, 2, 3, 4])
    assert cache.match(other, [1, 2, 3, 4]).tokens == 0
    assert cache.match(other, [1, 2, 3, 4]).partial_tokens == 0
    assert cache.match(one, [1, 2, 3, 9]).partial_tokens == 1


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**70])
def test_a_token_that_no_tokenizer_has_is_refused_by_name(token: int, tmp_path: Path) -> None:
    cache = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=4)
    root = root_hash(model_id="m", tenant="a", block_tokens=BLOCK)
    for call in (
        lambda: cache.match(root, [1, token]),
        lambda: cache.begin(root, [1, token]),
        lambda: EngineBlocks(tmp_path, model_id="m", block_tokens=BLOCK).get(root, [1, token]),
    ):
        with pytest.raises(InputError, match="token_ids"):
            call()
    cache.check()
    assert not cache._sequences


class CountedToken(int):
    """A token that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedToken.compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        CountedToken.compared += 1
        return int(self) != other

    def __lt__(self, other: int) -> bool:
        CountedToken.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        CountedToken.compared += 1
        return int(self) > int(other)

    __hash__ = int.__hash__


class CountedTable(dict[Any, Any]):
    """A table that counts look-ups, and forbids to be walked."""

    looked_up = 0

    def __contains__(self, key: object) -> bool:
        self.looked_up += 1
        return super().__contains__(key)

    def __getitem__(self, key: object) -> Any:
        self.looked_up += 1
        return super().__getitem__(key)

    def get(self, key: object, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a lookup walked the table")

    keys = values = items = __iter__  # type: ignore[assignment]


def steps_of_a_match(cached: int, prompt: list[int]) -> tuple[int, int, int]:
    """Return table look-ups, comparisons of tokens, and tokens found, among so many prompts."""
    cache = PrefixBlocks(block_tokens=4, host_blocks_max=10 * cached + 100)
    root = root_hash(model_id="m", tenant="a", block_tokens=4)
    for number in range(cached):  # half share the first block, half only its first token
        first = [5, 5, 5, 5] if number % 2 else [5, 9, number, number]
        identity, _ = cache.begin(root, [])
        cache.extend(identity, [*first, 7, number, number, 1])
        cache.end(identity)
    table = CountedTable(cache._tree.blocks)
    cache._tree.blocks = table
    CountedToken.compared = 0
    match = cache.match(root, [CountedToken(token) for token in prompt])
    return table.looked_up, CountedToken.compared, match.tokens + match.partial_tokens


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([5, 5, 5, 5, 7, 101, 101, 1, 8, 8, 8, 8], 8),
        ([5, 5, 5, 5, 7, 101, 101, 3], 7),
        ([5, 9, 100, 7, 0, 0, 0, 0], 3),
        ([5, 9, 77, 7], 2),
        ([6, 6, 6, 6], 0),
    ],
)
def test_a_lookup_takes_as_many_steps_among_many_prompts_as_among_few(
    prompt: list[int], found: int
) -> None:
    few, many = steps_of_a_match(128, prompt), steps_of_a_match(4_096, prompt)
    assert few[2] == many[2] == found
    assert few[0] == many[0] <= len(prompt) // 4 + 2, "one look-up a block"
    # One search of a sorted list: five halvings more for 32 times as many, four tokens at each.
    assert many[1] <= few[1] + 2 * 4 * 5


def test_what_a_sequence_uses_is_never_let_go() -> None:
    """An idle block is offered for eviction, then used again: the old offer must not count."""
    cache = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=2)
    root = root_hash(model_id="m", tenant="a", block_tokens=BLOCK)
    first, _ = cache.begin(root, [])
    cache.extend(first, [0, 0])
    cache.end(first)
    again, reused = cache.begin(root, [0, 0])
    assert reused == 2
    for token in (1, 2):
        other, _ = cache.begin(root, [])
        cache.extend(other, [token, token])
        cache.end(other)
        cache.check()
    assert cache.token_ids_of(again) == [0, 0]
    held, _ = cache.begin(root, [2, 2])
    full, _ = cache.begin(root, [])
    with pytest.raises(BlocksFull):
        cache.extend(full, [3, 3])
    assert cache.token_ids_of(held) == [2, 2]
    cache.check()


def test_what_is_shared_or_predicted_outlives_what_is_recent() -> None:
    cache = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=6)
    root = root_hash(model_id="m", tenant="a", block_tokens=BLOCK)

    def ask(tokens: list[int]) -> int:
        identity, reused = cache.begin(root, tokens)
        cache.extend(identity, tokens[reused:])
        cache.end(identity)
        return reused

    for _ in range(4):
        ask([1, 1])
    ask([2, 2])
    cache.predict({block_hash(root, [2, 2]): 3.0})
    for number in range(3, 40):
        ask([number, number])
    assert ask([1, 1]) == 2
    assert ask([2, 2]) == 2
    assert ask([3, 3]) == 0


def test_blocks_move_down_under_pressure_and_come_back_equal(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    tier = FileTier(tmp_path, model_id="m")
    cache = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=4, nvme_blocks_max=20, lower=tier)
    root = root_hash(model_id="m", tenant="a", block_tokens=BLOCK)
    prompts = [[number, 1, number, 2] for number in range(6)]
    for tokens in prompts:
        identity, _ = cache.begin(root, tokens)
        cache.extend(identity, tokens, kv_of(tokens, 0))
        cache.end(identity)
        cache.check()
        assert cache.counts().host <= 4
    assert cache.counts().removed == 0
    assert cache.counts().nvme == 12 - cache.counts().host == len(list(tmp_path.iterdir()))
    for tokens in prompts:
        identity, reused = cache.begin(root, tokens)
        assert reused == 4
        kv = cache.kv_of(identity)
        assert kv is not None
        np.testing.assert_array_equal(kv.keys, kv_of(tokens, 0).keys)
        cache.end(identity)
        cache.check()
    for path in tmp_path.iterdir():
        path.write_bytes(b"damage")
    identity, reused = cache.begin(root, prompts[0])
    assert reused < 4
    assert cache.token_ids_of(identity) == prompts[0][:reused]
    assert not list((FileTier(tmp_path, model_id="m")._folder).iterdir())


def test_a_tier_that_fails_in_every_call_costs_only_what_it_held() -> None:
    lower = DictTier()
    cache = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=3, nvme_blocks_max=2, lower=lower)
    root = root_hash(model_id="m", tenant="a", block_tokens=BLOCK)

    def store(token: int) -> None:
        identity, reused = cache.begin(root, [token, 0])
        cache.extend(identity, [token, 0][reused:], kv_of([token, 0][reused:], reused))
        assert cache.token_ids_of(identity) == [token, 0]
        cache.end(identity)
        cache.check()

    for token in range(5):  # three in host memory at most, two below: both are full
        store(token)
    assert cache.counts().nvme == 2
    lower.broken = True
    for token in range(5, 12):
        store(token)
    assert cache.counts().host == 3
    lower.broken = False
    for token in range(12, 20):
        store(token)
    assert cache.counts().nvme == 2
