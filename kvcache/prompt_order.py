"""The order of passages in a prompt, chosen so that it shares the longest prefix with earlier ones.

Opt-in: a model reads passages in another order than the ranking, and what that costs in quality is
the caller's to measure. The set of passages is never changed.

Source: the idea is CacheWeaver's (see also the prefix trees of RAGCache). Ours walks a bounded tree
of recent orders greedily and appends the rest by popularity, so that later prompts can share it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from stoker.errors import InputError


@dataclasses.dataclass(slots=True)
class _Node:
    children: dict[Hashable, _Node] = dataclasses.field(default_factory=dict)
    uses: int = 0


class PromptOrder:
    """Recent orders of passages behind each kind of prompt head. Not thread-safe.

    Args:
        nodes_max: Places in remembered orders; when full the tree starts afresh.
        passages_max: Passages whose uses are counted; those used longest ago go first.
    """

    def __init__(self, *, nodes_max: int = 200_000, passages_max: int = 65_536) -> None:
        if nodes_max < 1 or passages_max < 1:
            raise InputError(f"expected bounds of at least 1, found {nodes_max}, {passages_max}")
        self._nodes_max = nodes_max
        self._passages_max = passages_max
        self._roots: dict[Hashable, _Node] = {}
        self._nodes = 0
        self._uses: OrderedDict[Hashable, int] = OrderedDict()

    def arrange(
        self,
        passages: Sequence[Hashable],
        *,
        head: Hashable = None,
        tokens: Mapping[Hashable, int] | None = None,
    ) -> list[Hashable]:
        """Return the passages in the order to use, and remember it.

        Args:
            passages: Distinct, best first; that order decides where nothing else does.
            head: What stands before them (system prompt): only orders behind the same one count.
            tokens: Length of each; a longer shared prefix is worth more. 1 each by default.

        Raises:
            InputError: a passage appears twice.
        """
        if len(set(passages)) != len(passages):
            raise InputError(f"passages: expected distinct ones, found {list(passages)!r}")
        lengths = tokens or {}
        rank = {passage: place for place, passage in enumerate(passages)}
        left = set(passages)
        ordered: list[Hashable] = []
        node = self._roots.get(head)
        while node is not None and left:
            ahead = {
                child: self._reach(node.children[child], left - {child}, lengths)
                + lengths.get(child, 1)
                for child in node.children
                if child in left
            }
            if not ahead:
                break
            best = max(ahead, key=lambda child: (ahead[child], -rank[child]))
            ordered.append(best)
            left.discard(best)
            node = node.children[best]
        # The most used first: that is the prefix which later prompts are likeliest to want.
        ordered += sorted(left, key=lambda passage: (-self._uses.get(passage, 0), rank[passage]))
        self._remember(ordered, head)
        return ordered

    def _reach(self, node: _Node, left: set[Hashable], lengths: Mapping[Hashable, int]) -> int:
        """Return the tokens of the longest path of remaining passages below a node."""
        best = 0
        for child, below in node.children.items():
            if child in left:
                here = lengths.get(child, 1) + self._reach(below, left - {child}, lengths)
                best = max(best, here)
        return best

    def _remember(self, ordered: Sequence[Hashable], head: Hashable) -> None:
        if self._nodes + len(ordered) + 1 > self._nodes_max:
            self._roots.clear()
            self._nodes = 0
        if head not in self._roots:
            self._roots[head] = _Node()
            self._nodes += 1
        node = self._roots[head]
        for passage in ordered:
            below = node.children.get(passage)
            if below is None:
                below = node.children[passage] = _Node()
                self._nodes += 1
            below.uses += 1
            node = below
            self._uses[passage] = self._uses.pop(passage, 0) + 1
        while len(self._uses) > self._passages_max:
            self._uses.popitem(last=False)
