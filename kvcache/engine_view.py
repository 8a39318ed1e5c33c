"""What an inference engine holds, as told by its KV events: which prefixes need no warming.

Events come at least once and may be lost. So what is applied twice changes nothing, and after a
loss that cannot be made good nothing is believed any more: the view starts empty.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

EngineHash = int | bytes


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one sequence were computed or loaded.

    Attributes:
        block_hashes: The engine's names of them, in order.
        parent_block_hash: The block before the first; None at the start of a sequence.
        token_ids: Of all these blocks, one after another.
        block_size: Tokens per block.
        medium: Where they are ("GPU", "CPU", "STORAGE"); empty where the engine does not say.
        lora_name: The adapter; empty for the plain model.
    """

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = ""
    lora_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left a medium."""

    block_hashes: tuple[EngineHash, ...]
    medium: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine dropped everything."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared
_Place = tuple[EngineHash | None, str, tuple[int, ...]]  # parent, adapter, tokens


@dataclasses.dataclass(slots=True)
class _Block:
    place: _Place
    media: set[str]


class EngineView:
    """The blocks of one engine, by its own names. Not thread-safe.

    Invariants (`check`): never more than ``blocks_max``; a place leads to one live block, and back.

    Args:
        blocks_max: Blocks remembered; the longest known go first. A forgotten block only costs a
            needless warm-up call.
    """

    def __init__(self, *, blocks_max: int = 200_000) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[EngineHash, _Block] = OrderedDict()
        self._by_place: dict[_Place, EngineHash] = {}
        self._sizes: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: EngineEvent) -> None:
        """Take one event; taking it again changes nothing."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                block = self._blocks.get(name)
                if block is not None:
                    # An engine that names no medium has one.
                    block.media.discard(event.medium)
                    if not block.media or not event.medium:
                        self._forget(name)
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        self._sizes.add(size)
        for index, name in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            known = self._blocks.get(name)
            if known is not None:
                known.media.add(event.medium)
                self._blocks.move_to_end(name)
            elif len(tokens) == size:
                place = (parent, event.lora_name, tokens)
                before = self._by_place.get(place)
                if before is not None:  # the same text under a new name: the old one is gone
                    self._forget(before)
                self._blocks[name] = _Block(place, {event.medium})
                self._by_place[place] = name
            parent = name
        while len(self._blocks) > self._blocks_max:
            self._forget(next(iter(self._blocks)))

    def _forget(self, name: EngineHash) -> None:
        block = self._blocks.pop(name)
        del self._by_place[block.place]

    def clear(self) -> None:
        """Believe nothing any more."""
        self._blocks.clear()
        self._by_place.clear()

    def matched(self, token_ids: Sequence[int], *, lora_name: str = "") -> int:
        """Return how many leading tokens the engine holds, as far as is known."""
        best = 0
        for size in self._sizes:
            parent: EngineHash | None = None
            count = 0
            while count + size <= len(token_ids):
                place = (parent, lora_name, tuple(token_ids[count : count + size]))
                found = self._by_place.get(place)
                if found is None:
                    break
                parent, count = found, count + size
            best = max(best, count)
        return best

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert len(self._blocks) <= self._blocks_max
        assert len(self._by_place) == len(self._blocks)
        for name, block in self._blocks.items():
            assert self._by_place[block.place] == name
            assert block.media
