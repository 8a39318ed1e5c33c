"""Prefix blocks: KV in blocks of fixed token count, found by a chained hash, shared and bounded.

A block's hash covers its tokens and all before it, so a prompt's longest cached prefix is found by
one table look-up a block, and what agrees with the rest of it by one search among sorted tokens
(`block_names` has the hashes). The words are those of the engines' KV events (`BlockStored`, ...).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NewType

from stoker.errors import InputError
from stoker.kvcache.block_names import BlockHash, hashes_of
from stoker.kvcache.block_tree import TIER_HOST, BlockTree, LowerTier
from stoker.kvcache.kv_slices import joined, part_of
from stoker.kvcache.language_model import Kv

SequenceId = NewType("SequenceId", int)


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


class PrefixBlocks:
    """Sequences of tokens over shared blocks, which are copied when a sequence would write to one.

    `BlockTree` says which blocks stay. Not thread-safe: one scheduler drives it.

    Invariants (`check`): those of the tree; the references to a block are exactly those of the open
    sequences, all of whose blocks are in host memory; a tail has exactly as many owners.

    Args:
        block_tokens: Tokens per block.
        host_blocks_max: Blocks in host memory.
        nvme_blocks_max: Blocks in the tier below; 0 for none.
        lower: That tier; needed if ``nvme_blocks_max`` is above 0 and blocks carry KV.
        pressure_ratio: Share of the host tier above which blocks move down.
    """

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
        self._tree = BlockTree(
            host_blocks_max=host_blocks_max,
            nvme_blocks_max=nvme_blocks_max,
            lower=lower,
            pressure_ratio=pressure_ratio,
        )
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next = 0
        self._copied = 0

    def hashes_of(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        """Return the hashes of a prompt's whole blocks."""
        return hashes_of(root, token_ids, self.block_tokens)

    def match(self, root: BlockHash, token_ids: Sequence[int]) -> PrefixMatch:
        """Find a prompt's longest cached prefix, to the token; changes nothing."""
        blocks: list[BlockHash] = []
        parent = root
        for found in self.hashes_of(root, token_ids):
            if found not in self._tree.blocks:
                break
            blocks.append(found)
            parent = found
        tokens = len(blocks) * self.block_tokens
        rest = tuple(token_ids[tokens : tokens + self.block_tokens])
        agree, partial = self._tree.agreeing(parent, rest)
        return PrefixMatch(tuple(blocks), tokens, partial, agree)

    def begin(self, root: BlockHash, token_ids: Sequence[int]) -> tuple[SequenceId, int]:
        """Open a sequence on a prompt's cached prefix.

        The whole blocks are shared; of a partly agreeing block the agreeing tokens are copied.

        Returns:
            The sequence, and how many of its tokens need not be computed. The caller computes the
            rest and gives it to `extend`.
        """
        self._tree.tick()
        match = self.match(root, token_ids)
        sequence = _Sequence(root, [], _Tail())
        identity = SequenceId(self._next)
        self._next += 1
        self._sequences[identity] = sequence
        for found in match.blocks:  # all held first: making room must not take one away again
            self._hold(sequence, found)
        try:
            whole = sum(1 for _ in itertools.takewhile(self._tree.load, sequence.blocks))
        except BaseException:  # nobody would know its name, and its blocks would be held for ever
            self.end(identity)
            raise
        if whole < len(match.blocks):
            while len(sequence.blocks) > whole:
                self._tree.release(sequence.blocks.pop(), used=False)
            return identity, whole * self.block_tokens
        # Loading may have pushed it down, or away.
        name = match.partial_block
        partial = None if name is None else self._tree.blocks.get(name)
        if partial is not None and partial.tier == TIER_HOST:
            kept = match.partial_tokens
            sequence.tail = _Tail(partial.token_ids[:kept], part_of(partial.kv, 0, kept))
            self._copied += 1
        return identity, len(sequence.blocks) * self.block_tokens + len(sequence.tail.token_ids)

    def _hold(self, sequence: _Sequence, found: BlockHash) -> None:
        self._tree.hold(found)
        sequence.blocks.append(found)

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
            parent = sequence.blocks[-1] if sequence.blocks else sequence.root
            filled = part_of(both, start, stop)
            sequence.blocks.append(self._tree.hold_stored(parent, held[start:stop], filled))
            start = stop
            tail.token_ids, tail.kv = (), None
        tail.token_ids, tail.kv = held[start:], part_of(both, start, len(held))

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
            self._tree.release(found, used=True)

    def _sequence(self, identity: SequenceId) -> _Sequence:
        sequence = self._sequences.get(identity)
        if sequence is None:
            raise InputError(f"sequence: expected an open one, found {identity}")
        return sequence

    def token_ids_of(self, identity: SequenceId) -> list[int]:
        """Return a sequence's tokens."""
        sequence = self._sequence(identity)
        whole = [token for found in sequence.blocks for token in self._tree.blocks[found].token_ids]
        return whole + list(sequence.tail.token_ids)

    def kv_of(self, identity: SequenceId) -> Kv | None:
        """Return a sequence's KV as one, or None where it holds none."""
        sequence = self._sequence(identity)
        parts = [self._tree.blocks[found].kv for found in sequence.blocks]
        if sequence.tail.token_ids:
            parts.append(sequence.tail.kv)
        return joined(parts)

    def predict(self, weights: Mapping[BlockHash, float]) -> None:
        """Take the heat plan's view: requests expected per block, soon. It replaces the last.

        `predicted_reuse` makes it of the heat, and reads the one that a server leaves beside an
        engine's blocks.
        """
        self._tree.predict(weights)

    def counts(self) -> PrefixCounts:
        """Return what is cached and what happened so far."""
        tree = self._tree
        referenced = sum(block.references > 0 for block in tree.blocks.values())
        return PrefixCounts(
            tree.host, tree.nvme, referenced, tree.stored, tree.removed, tree.demoted,
            tree.promoted, self._copied,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        references: dict[BlockHash, int] = {}
        owners: dict[int, int] = {}
        for sequence in self._sequences.values():
            owners[id(sequence.tail)] = owners.get(id(sequence.tail), 0) + 1
            assert len(sequence.tail.token_ids) < self.block_tokens
            parent = sequence.root
            for found in sequence.blocks:
                references[found] = references.get(found, 0) + 1
                assert self._tree.blocks[found].parent == parent
                assert self._tree.blocks[found].tier == TIER_HOST
                parent = found
        for sequence in self._sequences.values():
            assert sequence.tail.owners == owners[id(sequence.tail)]
        self._tree.check(references)
