"""Prefix blocks: KV in blocks of fixed token count, found by a chained hash, shared and bounded.

A block's hash covers its tokens and all before it, so a prompt's longest cached prefix is found by
one table look-up a block, and what agrees with the rest of it by one search among sorted tokens
(`block_names` has the hashes). The words are those of the engines' KV events (`BlockStored`, ...).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NewType, Protocol

import numpy as np
import structlog

from stoker.errors import CapacityError, InputError
from stoker.kvcache.block_names import BlockHash, block_hash, hashes_of
from stoker.kvcache.language_model import Kv

log = structlog.get_logger(__name__)

SequenceId = NewType("SequenceId", int)

TIER_HOST, TIER_NVME = "host", "nvme"


class BlocksFull(CapacityError):
    """Every block is in use by a running sequence; end one or enlarge the cache."""


class LowerTier(Protocol):
    """Where blocks go under pressure. `prefix_tier.FileTier` keeps them as files."""

    def put(self, block_hash: BlockHash, kv: Kv) -> None:
        """Keep a block; returns when a later `get` would find it."""
        ...

    def get(self, block_hash: BlockHash) -> Kv | None:
        """Return a block, or None where it is lost."""
        ...

    def drop(self, block_hash: BlockHash) -> None:
        """Forget a block."""
        ...


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """What of a prompt is cached.

    Attributes:
        blocks: Whole blocks, from the first token.
        tokens: Tokens that they hold.
        partial_block: A block that agrees with the prompt's next tokens but not to its end.
        partial_tokens: How many tokens of it agree.
    """

    blocks: tuple[BlockHash, ...]
    tokens: int
    partial_block: BlockHash | None
    partial_tokens: int


@dataclasses.dataclass(frozen=True)
class PrefixCounts:
    """Blocks by tier, and what happened so far."""

    host: int
    nvme: int
    referenced: int
    stored: int
    removed: int
    demoted: int
    promoted: int
    copied: int


_Child = tuple[tuple[int, ...], BlockHash]  # its tokens, and its name; kept in that order


@dataclasses.dataclass(slots=True)
class _Block:
    hash: BlockHash
    parent: BlockHash
    token_ids: tuple[int, ...]
    kv: Kv | None
    tier: str = TIER_HOST
    references: int = 0
    children: list[_Child] = dataclasses.field(default_factory=list)
    sharers: int = 0
    used: int = 0
    priority: float = 0.0


@dataclasses.dataclass(slots=True)
class _Tail:
    """The tokens behind the last whole block: private, unless forks still share it."""

    token_ids: tuple[int, ...] = ()
    kv: Kv | None = None
    owners: int = 1


@dataclasses.dataclass(slots=True)
class _Sequence:
    root: BlockHash
    blocks: list[BlockHash]
    tail: _Tail


def joined(parts: Iterable[Kv | None]) -> Kv | None:
    """Put KV of consecutive tokens together; None if any part has none."""
    whole = list(parts)
    known = [part for part in whole if part is not None]
    if len(known) != len(whole) or not known:
        return None
    if len(known) == 1:
        return known[0]
    return Kv(
        np.concatenate([part.token_ids for part in known]),
        np.concatenate([part.keys for part in known], axis=2),
        np.concatenate([part.values for part in known], axis=2),
        known[0].start,
    )


def _part(kv: Kv | None, start: int, stop: int) -> Kv | None:
    if kv is None:
        return None
    return Kv(
        kv.token_ids[start:stop], kv.keys[:, :, start:stop], kv.values[:, :, start:stop],
        kv.start + start,
    )  # fmt: skip


class PrefixBlocks:
    """A tree of blocks with reference counts, copy on write and eviction of what is least worth.

    Worth is recency, counted in requests, plus a credit for every doubling of the requests that
    shared a block, plus what the heat plan predicts. The credit follows the cache's own residence
    time: a small cache must remember what is shared for longer than its blocks live.

    Not thread-safe: one scheduler drives it.

    Invariants (`check`): a block with references or cached children is never removed; the host tier
    never holds more than ``host_blocks_max`` blocks; references are exactly those of the open
    sequences; the children of a block are exactly the cached blocks that name it as parent.

    Args:
        block_tokens: Tokens per block.
        host_blocks_max: Blocks in host memory.
        nvme_blocks_max: Blocks in the tier below; 0 for none.
        lower: That tier; needed if ``nvme_blocks_max`` is above 0 and blocks carry KV.
        pressure_ratio: Share of the host tier above which blocks move down.
    """

    CREDIT_LEAST = 100.0  # requests per doubling of sharers, at least
    CREDIT_RESIDENCE = 0.2  # and this share of how long blocks live in the cache
    GHOSTS = 4  # removed blocks whose sharers are remembered, as a multiple of the cache

    def __init__(
        self,
        *,
        block_tokens: int,
        host_blocks_max: int,
        nvme_blocks_max: int = 0,
        lower: LowerTier | None = None,
        pressure_ratio: float = 0.9,
    ) -> None:
        if block_tokens < 1 or host_blocks_max < 1 or nvme_blocks_max < 0:
            raise InputError(
                f"expected sizes of at least 1, found {block_tokens}, {host_blocks_max}, "
                f"{nvme_blocks_max}"
            )
        self.block_tokens = block_tokens
        self._host_max = host_blocks_max
        self._nvme_max = nvme_blocks_max
        self._lower = lower
        # With no tier below there is nothing to move to: then the host tier may fill up.
        pressure = pressure_ratio if nvme_blocks_max else 1.0
        self._host_goal = max(1, int(host_blocks_max * pressure))
        self._blocks: dict[BlockHash, _Block] = {}
        self._children: dict[BlockHash, list[_Child]] = {}  # of roots
        self._host = self._nvme = 0
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next = 0
        self._clock = 0
        self._residence = 0.0
        self._predicted: dict[BlockHash, float] = {}
        self._ghosts: OrderedDict[BlockHash, int] = OrderedDict()
        # Lazy heaps of (priority, tie, hash): an entry counts only if it is up to date.
        self._leaves: list[tuple[float, int, BlockHash]] = []
        self._idle_host: list[tuple[float, int, BlockHash]] = []
        self._stored = self._removed = self._demoted = self._promoted = self._copied = 0

    def hashes_of(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        """Return the hashes of a prompt's whole blocks."""
        return hashes_of(root, token_ids, self.block_tokens)

    def match(self, root: BlockHash, token_ids: Sequence[int]) -> PrefixMatch:
        """Find a prompt's longest cached prefix, to the token; changes nothing."""
        blocks: list[BlockHash] = []
        parent = root
        for found in self.hashes_of(root, token_ids):
            if found not in self._blocks:
                break
            blocks.append(found)
            parent = found
        tokens = len(blocks) * self.block_tokens
        rest = tuple(token_ids[tokens : tokens + self.block_tokens])
        # Among sorted tokens, those that agree longest stand beside the place of the rest.
        children = self._children_of(parent)
        place = bisect.bisect_left(children, (rest,))
        near = children[max(0, place - 1) : place + 1]
        agree, best = max(((_common(held, rest), name) for held, name in near), default=(0, None))
        return PrefixMatch(tuple(blocks), tokens, best if agree else None, agree)

    def _children_of(self, parent: BlockHash) -> list[_Child]:
        block = self._blocks.get(parent)
        return block.children if block is not None else self._children.get(parent, [])

    def begin(self, root: BlockHash, token_ids: Sequence[int]) -> tuple[SequenceId, int]:
        """Open a sequence on a prompt's cached prefix.

        The whole blocks are shared; of a partly agreeing block the agreeing tokens are copied.

        Returns:
            The sequence, and how many of its tokens need not be computed. The caller computes the
            rest and gives it to `extend`.
        """
        self._clock += 1
        match = self.match(root, token_ids)
        sequence = _Sequence(root, [], _Tail())
        identity = SequenceId(self._next)
        self._next += 1
        self._sequences[identity] = sequence
        for found in match.blocks:  # all held first: making room must not take one away again
            self._hold(sequence, found)
        try:
            whole = sum(1 for _ in itertools.takewhile(self._load, self._held(sequence)))
        except BaseException:  # nobody would know its name, and its blocks would be held for ever
            self.end(identity)
            raise
        if whole < len(match.blocks):
            while len(sequence.blocks) > whole:
                self._unhold_last(sequence)
            return identity, whole * self.block_tokens
        if match.partial_block is not None and match.partial_block in self._blocks:
            partial = self._blocks[match.partial_block]
            if partial.tier == TIER_HOST:
                kept = match.partial_tokens
                sequence.tail = _Tail(partial.token_ids[:kept], _part(partial.kv, 0, kept))
                self._copied += 1
        return identity, len(sequence.blocks) * self.block_tokens + len(sequence.tail.token_ids)

    def _held(self, sequence: _Sequence) -> Iterator[_Block]:
        return (self._blocks[found] for found in sequence.blocks)

    def _hold(self, sequence: _Sequence, found: BlockHash) -> None:
        block = self._blocks[found]
        block.references += 1
        block.sharers += 1
        sequence.blocks.append(found)

    def _unhold_last(self, sequence: _Sequence) -> None:
        block = self._blocks[sequence.blocks.pop()]
        block.references -= 1
        self._settle(block)

    def _load(self, block: _Block) -> bool:
        """Bring a block up from the tier below; False if it is lost or there is no room."""
        if block.tier == TIER_HOST:
            return True
        kv: Kv | None = None
        if self._lower is not None:
            kv = self._lower.get(block.hash)
            if kv is None:
                return False
        try:
            self._make_room()
        except BlocksFull:
            return False
        block.kv, block.tier = kv, TIER_HOST
        self._nvme -= 1
        self._host += 1
        self._promoted += 1
        if self._lower is not None:
            self._lower.drop(block.hash)
        return True

    def extend(self, identity: SequenceId, token_ids: Sequence[int], kv: Kv | None = None) -> None:
        """Append tokens; every block that fills up is stored, or shared if it is there already.

        Args:
            identity: From `begin` or `fork`.
            token_ids: The next tokens.
            kv: Their keys and values, or None where only the bookkeeping is wanted.

        Raises:
            InputError: an unknown sequence, or KV of another number of tokens.
            BlocksFull: no block can be let go. The sequence then ends with the last block that was
                stored, or as it was where none was: `token_ids_of` says with what.
        """
        sequence = self._sequence(identity)
        if kv is not None and len(kv.token_ids) != len(token_ids):
            raise InputError(f"expected KV of {len(token_ids)} tokens, found {len(kv.token_ids)}")
        if not token_ids:
            return
        tail = sequence.tail
        if tail.owners > 1:  # a fork still reads it
            tail.owners -= 1
            tail = sequence.tail = _Tail(tail.token_ids, tail.kv)
            self._copied += 1
        held = tail.token_ids + tuple(int(token) for token in token_ids)
        both = joined([tail.kv, kv]) if tail.token_ids else kv
        start = 0
        while len(held) - start >= self.block_tokens:
            stop = start + self.block_tokens
            self._store(sequence, held[start:stop], _part(both, start, stop))
            start = stop
            tail.token_ids, tail.kv = (), None
        tail.token_ids, tail.kv = held[start:], _part(both, start, len(held))

    def _store(self, sequence: _Sequence, token_ids: tuple[int, ...], kv: Kv | None) -> None:
        parent = sequence.blocks[-1] if sequence.blocks else sequence.root
        found = block_hash(parent, token_ids)
        block = self._blocks.get(found)
        if block is None:
            self._make_room()
            block = _Block(found, parent, token_ids, _owned(kv))
            block.sharers = self._ghosts.pop(found, 0)
            self._blocks[found] = block
            bisect.insort(self._children_of_mutable(parent), (token_ids, found))
            self._host += 1
            self._stored += 1
        self._hold(sequence, found)  # before room is made, which might take this very one
        if block.tier == TIER_NVME:
            try:
                self._make_room()
            except BaseException:
                self._unhold_last(sequence)
                raise
            block.kv, block.tier = _owned(kv), TIER_HOST
            self._nvme -= 1
            self._host += 1
            if self._lower is not None:
                self._lower.drop(found)

    def _children_of_mutable(self, parent: BlockHash) -> list[_Child]:
        block = self._blocks.get(parent)
        return block.children if block is not None else self._children.setdefault(parent, [])

    def fork(self, identity: SequenceId) -> SequenceId:
        """Open a second sequence with the same tokens; copied only once one of them grows."""
        sequence = self._sequence(identity)
        copy = _Sequence(sequence.root, [], sequence.tail)
        sequence.tail.owners += 1
        for found in sequence.blocks:
            self._hold(copy, found)
        fresh = SequenceId(self._next)
        self._next += 1
        self._sequences[fresh] = copy
        return fresh

    def end(self, identity: SequenceId) -> None:
        """Close a sequence; its blocks stay cached until they are the least worth."""
        sequence = self._sequence(identity)
        del self._sequences[identity]
        sequence.tail.owners -= 1
        # The deepest first: of equal worth, what fewer prompts can reach goes earlier.
        for found in reversed(sequence.blocks):
            block = self._blocks[found]
            block.references -= 1
            block.used = self._clock
            self._settle(block)

    def _sequence(self, identity: SequenceId) -> _Sequence:
        sequence = self._sequences.get(identity)
        if sequence is None:
            raise InputError(f"sequence: expected an open one, found {identity}")
        return sequence

    def token_ids_of(self, identity: SequenceId) -> list[int]:
        """Return a sequence's tokens."""
        sequence = self._sequence(identity)
        whole = [token for found in sequence.blocks for token in self._blocks[found].token_ids]
        return whole + list(sequence.tail.token_ids)

    def kv_of(self, identity: SequenceId) -> Kv | None:
        """Return a sequence's KV as one, or None where it holds none."""
        sequence = self._sequence(identity)
        parts = [self._blocks[found].kv for found in sequence.blocks]
        if sequence.tail.token_ids:
            parts.append(sequence.tail.kv)
        return joined(parts)

    def predict(self, weights: Mapping[BlockHash, float]) -> None:
        """Take the heat plan's view: requests expected per block, soon. It replaces the last.

        `predicted_reuse` makes it of the heat, and reads the one that a server leaves beside an
        engine's blocks.
        """
        last = self._predicted
        self._predicted = {found: max(0.0, weight) for found, weight in weights.items()}
        for found in {**last, **self._predicted}:  # what is expected no longer counts for less
            block = self._blocks.get(found)
            if block is not None and not block.references:
                self._settle(block)

    def _settle(self, block: _Block) -> None:
        """Set what an idle block is worth and offer it for eviction."""
        credit = self.CREDIT_LEAST + self.CREDIT_RESIDENCE * self._residence
        worth = block.used + credit * math.log2(max(1, block.sharers))
        worth += credit * math.log2(1.0 + self._predicted.get(block.hash, 0.0))
        block.priority = worth
        self._offer(block)

    def _offer(self, block: _Block) -> None:
        if block.references:
            return
        entry = (block.priority, -len(block.children), block.hash)
        if not block.children:
            heapq.heappush(self._leaves, entry)
        if block.tier == TIER_HOST:
            heapq.heappush(self._idle_host, entry)
        for heap in (self._leaves, self._idle_host):
            if len(heap) > 64 + 8 * len(self._blocks):  # mostly out of date by now
                self._rebuild()
                return

    def _rebuild(self) -> None:
        idle = [block for block in self._blocks.values() if not block.references]
        self._leaves = [(b.priority, 0, b.hash) for b in idle if not b.children]
        self._idle_host = [(b.priority, 0, b.hash) for b in idle if b.tier == TIER_HOST]
        heapq.heapify(self._leaves)
        heapq.heapify(self._idle_host)

    def _make_room(self) -> None:
        """Leave room for one more block in the host tier."""
        if self._nvme_max:
            while self._host >= self._host_goal and self._demote_one():
                pass
        while self._host >= self._host_max:
            if not self._remove_one():
                raise BlocksFull(
                    f"expected a block to let go, found all {self._host} in use or in their way"
                )

    def _demote_one(self) -> bool:
        block = self._pop(self._idle_host, lambda b: b.tier == TIER_HOST)
        if block is None:
            return False
        while self._nvme >= self._nvme_max:
            if not self._remove_one(tier=TIER_NVME):
                heapq.heappush(self._idle_host, (block.priority, 0, block.hash))
                return False
        if block.hash not in self._blocks:  # it was the one that made room
            return True
        if self._lower is not None and block.kv is not None:
            try:
                self._lower.put(block.hash, block.kv)
            except OSError as error:  # a full disk: it stays where it is, until it must go
                log.warning("kvcache.block_not_moved", reason=str(error))
                heapq.heappush(self._idle_host, (block.priority, 0, block.hash))
                return False
        block.kv, block.tier = None, TIER_NVME
        self._host -= 1
        self._nvme += 1
        self._demoted += 1
        return True

    def _pop(self, heap: list[tuple[float, int, BlockHash]], fits: object) -> _Block | None:
        assert callable(fits)
        while heap:
            priority, _, found = heapq.heappop(heap)
            block = self._blocks.get(found)
            current = block is not None and block.priority == priority and not block.references
            if block is not None and current and fits(block):
                return block
        return None

    def _remove_one(self, *, tier: str | None = None) -> bool:
        """Remove the least worthy leaf, of one tier or any; what has children is in use by them."""
        aside: list[tuple[float, int, BlockHash]] = []
        victim: _Block | None = None
        while victim is None:
            block = self._pop(self._leaves, lambda b: not b.children)
            if block is None:
                break
            if tier is None or block.tier == tier:
                victim = block
            else:
                aside.append((block.priority, 0, block.hash))
        for entry in aside:
            heapq.heappush(self._leaves, entry)
        if victim is None:
            return False
        self._remove(victim)
        return True

    def _remove(self, block: _Block) -> None:
        del self._blocks[block.hash]
        if block.tier == TIER_HOST:
            self._host -= 1
        else:
            self._nvme -= 1
            if self._lower is not None:
                self._lower.drop(block.hash)
        self._removed += 1
        age = self._clock - block.used
        self._residence += 0.02 * (age - self._residence)
        self._ghosts[block.hash] = block.sharers
        while len(self._ghosts) > self.GHOSTS * (self._host_max + self._nvme_max):
            self._ghosts.popitem(last=False)
        siblings = self._children_of(block.parent)
        del siblings[bisect.bisect_left(siblings, (block.token_ids, block.hash))]
        parent = self._blocks.get(block.parent)
        if parent is None:
            if not siblings:
                self._children.pop(block.parent, None)
        elif not siblings:
            self._offer(parent)

    def counts(self) -> PrefixCounts:
        """Return what is cached and what happened so far."""
        referenced = sum(block.references > 0 for block in self._blocks.values())
        return PrefixCounts(
            self._host, self._nvme, referenced, self._stored, self._removed, self._demoted,
            self._promoted, self._copied,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        tiers = [block.tier for block in self._blocks.values()]
        assert (self._host, self._nvme) == (tiers.count(TIER_HOST), tiers.count(TIER_NVME))
        assert self._host <= self._host_max
        assert self._nvme <= self._nvme_max
        references: dict[BlockHash, int] = {}
        owners: dict[int, int] = {}
        for sequence in self._sequences.values():
            owners[id(sequence.tail)] = owners.get(id(sequence.tail), 0) + 1
            assert len(sequence.tail.token_ids) < self.block_tokens
            parent = sequence.root
            for found in sequence.blocks:
                references[found] = references.get(found, 0) + 1
                assert self._blocks[found].parent == parent
                assert self._blocks[found].tier == TIER_HOST
                parent = found
        for sequence in self._sequences.values():
            assert sequence.tail.owners == owners[id(sequence.tail)]
        children: dict[BlockHash, list[_Child]] = {}
        leaves = {entry[2] for entry in self._leaves if self._is_current(entry)}
        for found, block in self._blocks.items():
            assert block.hash == found == block_hash(block.parent, block.token_ids)
            assert block.references == references.get(found, 0)
            bisect.insort(children.setdefault(block.parent, []), (block.token_ids, found))
            if not block.references and not block.children:
                assert found in leaves, "an idle leaf must be offered for eviction"
        for found, block in self._blocks.items():
            assert block.children == children.pop(found, [])
        assert children == self._children
        assert not set(self._ghosts) & set(self._blocks)

    def _is_current(self, entry: tuple[float, int, BlockHash]) -> bool:
        block = self._blocks.get(entry[2])
        return block is not None and block.priority == entry[0]


def _owned(kv: Kv | None) -> Kv | None:
    """Copy a part out of a larger array, or the whole of it would stay in memory."""
    if kv is None:
        return None
    return Kv(kv.token_ids.copy(), kv.keys.copy(), kv.values.copy(), kv.start)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
