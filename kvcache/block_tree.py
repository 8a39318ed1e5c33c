"""The tree of cached blocks: who follows whom, in which tier each lies, and which goes first.

A block is found by its name, which stands for its tokens and all before it (`block_names`).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from stoker.errors import CapacityError, InputError
from stoker.kvcache.block_names import BlockHash, block_hash
from stoker.kvcache.kv_slices import owned
from stoker.kvcache.language_model import Kv

log = structlog.get_logger(__name__)

TIER_HOST, TIER_NVME = "host", "nvme"


class BlocksFull(CapacityError):
    """Every block is in use by a running sequence; end one or enlarge the cache."""


class LowerTier(Protocol):
    """Where blocks go under pressure. `prefix_tier.FileTier` keeps them as files."""

    def put(self, block_hash: BlockHash, kv: Kv) -> None:
        """Keep a block; returns when a later `get` would find it.

        Raises:
            OSError, InputError: it cannot be kept; the block stays in host memory.
        """
        ...

    def get(self, block_hash: BlockHash) -> Kv | None:
        """Return a block, or None where it is lost."""
        ...

    def drop(self, block_hash: BlockHash) -> None:
        """Forget a block.

        Raises:
            OSError: it stays; nobody asks for it again before the next `put`.
        """
        ...


_Child = tuple[tuple[int, ...], BlockHash]  # its tokens, and its name; kept in that order
_Offer = tuple[float, int, BlockHash]  # (priority, tie, hash)


@dataclasses.dataclass(slots=True)
class Block:
    """One cached block.

    Attributes:
        hash: Its name.
        parent: The name of the block before it, or of the root.
        token_ids: Its tokens.
        kv: Their keys and values; None in the tier below, or where only the bookkeeping is wanted.
        tier: `TIER_HOST` or `TIER_NVME`.
        references: Open sequences that hold it.
        children: Cached blocks that follow it.
        sharers: Sequences that ever held it, also before it was last removed.
        used: When a sequence last let go of it, counted in requests.
        priority: What it was worth when it was last offered for eviction.
    """

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


class BlockTree:
    """Cached blocks, of which those least worth go down a tier, and then away.

    Worth is recency, counted in requests, plus a credit for every doubling of the requests that
    shared a block, plus what the heat plan predicts. The credit follows the cache's own residence
    time: a small cache must remember what is shared for longer than its blocks live.

    Invariants (`check`): a block with references or cached children is never removed; the host tier
    never holds more than ``host_blocks_max`` blocks; the children of a block are exactly the cached
    blocks that name it as parent.

    Args:
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
        host_blocks_max: int,
        nvme_blocks_max: int,
        lower: LowerTier | None,
        pressure_ratio: float,
    ) -> None:
        self._host_max = host_blocks_max
        self._nvme_max = nvme_blocks_max
        self._lower = lower
        # With no tier below there is nothing to move to: then the host tier may fill up.
        pressure = pressure_ratio if nvme_blocks_max else 1.0
        self._host_goal = max(1, int(host_blocks_max * pressure))
        self.blocks: dict[BlockHash, Block] = {}
        self._children: dict[BlockHash, list[_Child]] = {}  # of roots
        self.host = self.nvme = 0
        self._clock = 0
        self._residence = 0.0
        self._predicted: dict[BlockHash, float] = {}
        self._ghosts: OrderedDict[BlockHash, int] = OrderedDict()
        # Lazy heaps: an entry counts only if it is up to date.
        self._leaves: list[_Offer] = []
        self._idle_host: list[_Offer] = []
        self.stored = self.removed = self.demoted = self.promoted = 0

    def tick(self) -> None:
        """Count one more request: the time by which blocks are old."""
        self._clock += 1

    def agreeing(self, parent: BlockHash, rest: tuple[int, ...]) -> tuple[int, BlockHash | None]:
        """Find the block behind ``parent`` that agrees longest with ``rest``, and by how much."""
        # Among sorted tokens, those that agree longest stand beside the place of the rest.
        children = self._children_of(parent)
        place = bisect.bisect_left(children, (rest,))
        near = children[max(0, place - 1) : place + 1]
        agree, best = max(((_common(held, rest), name) for held, name in near), default=(0, None))
        return agree, best if agree else None

    def _children_of(self, parent: BlockHash) -> list[_Child]:
        block = self.blocks.get(parent)
        return block.children if block is not None else self._children.get(parent, [])

    def _children_of_mutable(self, parent: BlockHash) -> list[_Child]:
        block = self.blocks.get(parent)
        return block.children if block is not None else self._children.setdefault(parent, [])

    def hold(self, found: BlockHash) -> None:
        """Count one more sequence that uses a cached block: it stays until `release`."""
        block = self.blocks[found]
        block.references += 1
        block.sharers += 1

    def release(self, found: BlockHash, *, used: bool) -> None:
        """Take a `hold` back; ``used`` says that a request has just ended that read it."""
        block = self.blocks[found]
        block.references -= 1
        if used:
            block.used = self._clock
        self._settle(block)

    def hold_stored(
        self, parent: BlockHash, token_ids: tuple[int, ...], kv: Kv | None
    ) -> BlockHash:
        """Hold the block of these tokens, in host memory; it is stored unless it is cached.

        Raises:
            BlocksFull: no block can be let go; nothing is held then.
        """
        found = block_hash(parent, token_ids)
        block = self.blocks.get(found)
        if block is None:
            self._make_room()
            block = Block(found, parent, token_ids, owned(kv))
            block.sharers = self._ghosts.pop(found, 0)
            self.blocks[found] = block
            bisect.insort(self._children_of_mutable(parent), (token_ids, found))
            self.host += 1
            self.stored += 1
        self.hold(found)  # before room is made, which might take this very one
        if block.tier == TIER_NVME:
            try:
                self._make_room()
            except BaseException:
                self.release(found, used=False)
                raise
            self._move_up(block, owned(kv))
        return found

    def load(self, found: BlockHash) -> bool:
        """Bring a block up from the tier below; False if it is lost or there is no room."""
        block = self.blocks[found]
        if block.tier == TIER_HOST:
            return True
        kv: Kv | None = None
        if self._lower is not None:
            kv = self._lower.get(found)
            if kv is None:
                return False
        try:
            self._make_room()
        except BlocksFull:
            return False
        self._move_up(block, kv)
        self.promoted += 1
        return True

    def _move_up(self, block: Block, kv: Kv | None) -> None:
        block.kv, block.tier = kv, TIER_HOST
        self.nvme -= 1
        self.host += 1
        self._drop_below(block)

    def _drop_below(self, block: Block) -> None:
        """Let the tier below forget a block; one that cannot wastes room there, and no more."""
        if self._lower is None:
            return
        try:
            self._lower.drop(block.hash)
        except OSError as error:
            log.warning("kvcache.block_not_dropped", reason=str(error))

    def predict(self, weights: Mapping[BlockHash, float]) -> None:
        """Take requests expected per block, soon; see `PrefixBlocks.predict`."""
        last = self._predicted
        self._predicted = {found: max(0.0, weight) for found, weight in weights.items()}
        for found in {**last, **self._predicted}:  # what is expected no longer counts for less
            block = self.blocks.get(found)
            if block is not None and not block.references:
                self._settle(block)

    def _settle(self, block: Block) -> None:
        """Set what an idle block is worth and offer it for eviction."""
        credit = self.CREDIT_LEAST + self.CREDIT_RESIDENCE * self._residence
        worth = block.used + credit * math.log2(max(1, block.sharers))
        worth += credit * math.log2(1.0 + self._predicted.get(block.hash, 0.0))
        block.priority = worth
        self._offer(block)

    def _offer(self, block: Block) -> None:
        if block.references:
            return
        entry = (block.priority, -len(block.children), block.hash)
        if not block.children:
            heapq.heappush(self._leaves, entry)
        if block.tier == TIER_HOST:
            heapq.heappush(self._idle_host, entry)
        for heap in (self._leaves, self._idle_host):
            if len(heap) > 64 + 8 * len(self.blocks):  # mostly out of date by now
                self._rebuild()
                return

    def _rebuild(self) -> None:
        idle = [block for block in self.blocks.values() if not block.references]
        self._leaves = [(b.priority, 0, b.hash) for b in idle if not b.children]
        self._idle_host = [(b.priority, 0, b.hash) for b in idle if b.tier == TIER_HOST]
        heapq.heapify(self._leaves)
        heapq.heapify(self._idle_host)

    def _make_room(self) -> None:
        """Leave room for one more block in the host tier."""
        if self._nvme_max:
            while self.host >= self._host_goal and self._demote_one():
                pass
        while self.host >= self._host_max:
            if not self._remove_one():
                raise BlocksFull(
                    f"expected a block to let go, found all {self.host} in use or in their way"
                )

    def _demote_one(self) -> bool:
        block = self._pop(self._idle_host, lambda b: b.tier == TIER_HOST)
        if block is None:
            return False
        while self.nvme >= self._nvme_max:
            if not self._remove_one(tier=TIER_NVME):
                heapq.heappush(self._idle_host, (block.priority, 0, block.hash))
                return False
        if self._lower is not None and block.kv is not None:
            try:
                self._lower.put(block.hash, block.kv)
            except (OSError, InputError) as error:
                # A full disk, or numbers that are none: it stays where it is, until it must go.
                log.warning("kvcache.block_not_moved", reason=str(error))
                heapq.heappush(self._idle_host, (block.priority, 0, block.hash))
                return False
        block.kv, block.tier = None, TIER_NVME
        self.host -= 1
        self.nvme += 1
        self.demoted += 1
        return True

    def _pop(self, heap: list[_Offer], fits: Callable[[Block], bool]) -> Block | None:
        """Take the least worthy block off a heap, past what is out of date or does not fit."""
        while heap:
            priority, _, found = heapq.heappop(heap)
            block = self.blocks.get(found)
            current = block is not None and block.priority == priority and not block.references
            if block is not None and current and fits(block):
                return block
        return None

    def _remove_one(self, *, tier: str | None = None) -> bool:
        """Remove the least worthy leaf, of one tier or any; what has children is in use by them."""
        aside: list[_Offer] = []
        victim: Block | None = None
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

    def _remove(self, block: Block) -> None:
        del self.blocks[block.hash]
        if block.tier == TIER_HOST:
            self.host -= 1
        else:
            self.nvme -= 1
            self._drop_below(block)
        self.removed += 1
        age = self._clock - block.used
        self._residence += 0.02 * (age - self._residence)
        self._ghosts[block.hash] = block.sharers
        while len(self._ghosts) > self.GHOSTS * (self._host_max + self._nvme_max):
            self._ghosts.popitem(last=False)
        siblings = self._children_of(block.parent)
        del siblings[bisect.bisect_left(siblings, (block.token_ids, block.hash))]
        parent = self.blocks.get(block.parent)
        if parent is None:
            if not siblings:
                self._children.pop(block.parent, None)
        elif not siblings:
            self._offer(parent)

    def check(self, references: Mapping[BlockHash, int]) -> None:
        """Raise AssertionError on the first broken invariant, or where others hold a block."""
        tiers = [block.tier for block in self.blocks.values()]
        assert (self.host, self.nvme) == (tiers.count(TIER_HOST), tiers.count(TIER_NVME))
        assert self.host <= self._host_max
        assert self.nvme <= self._nvme_max
        children: dict[BlockHash, list[_Child]] = {}
        leaves = {entry[2] for entry in self._leaves if self._is_current(entry)}
        for found, block in self.blocks.items():
            assert block.hash == found == block_hash(block.parent, block.token_ids)
            assert block.references == references.get(found, 0)
            bisect.insort(children.setdefault(block.parent, []), (block.token_ids, found))
            if not block.references and not block.children:
                assert found in leaves, "an idle leaf must be offered for eviction"
        for found, block in self.blocks.items():
            assert block.children == children.pop(found, [])
        assert children == self._children
        assert not set(self._ghosts) & set(self.blocks)

    def _is_current(self, entry: _Offer) -> bool:
        block = self.blocks.get(entry[2])
        return block is not None and block.priority == entry[0]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
