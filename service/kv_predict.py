"""Tell what keeps KV what will be needed: the heat of a running server, every few seconds.

Two parts evict KV by it: the store of passages, and the folder of prefix blocks that inference
engines load (`kv_vllm_connector`), whose budget this server keeps. The prediction also stays beside
those blocks in a file, for whoever keeps blocks of the same prompts in memory
(`kvcache.predicted_reuse.read_predicted`, `PrefixBlocks.predict`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence

import structlog

from stoker.kvcache.block_names import BlockHash
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.passages import PassageStore
from stoker.kvcache.predicted_reuse import block_weights, write_predicted
from stoker.service.rounds import Rounds, is_fault

log = structlog.get_logger(__name__)

ContentKey = tuple[str, str]
Heat = Callable[[], Mapping[ContentKey, float]]


@dataclasses.dataclass(frozen=True)
class PredictionCounts:
    """What the rounds did.

    Attributes:
        rounds: How many there were.
        blocks: Prefix blocks that the last one expects.
        bytes: Of the engine's blocks after it.
        removed: Blocks that all of them removed to keep the budget.
    """

    rounds: int = 0
    blocks: int = 0
    bytes: int = 0
    removed: int = 0


class ReusePrediction:
    """Runs rounds in a thread until closed. Each takes the heat as it is then.

    Args:
        heat: Uses expected per content key, decayed.
        passages: Told the heat itself; None where there are none.
        blocks: Told what the heat says of their names, and held to their budget; None where there
            are none.
        root: Parent of the engine's first blocks.
        tokens_of: The token sequence of a passage as prompts begin with it, or None.
        passages_max: The hottest passages that are looked at for blocks.
        every_s: Seconds between two rounds.
    """

    def __init__(
        self,
        heat: Heat,
        *,
        passages: PassageStore | None,
        blocks: EngineBlocks | None,
        root: BlockHash | None,
        tokens_of: Callable[[ContentKey], Sequence[int] | None],
        passages_max: int,
        every_s: float,
    ) -> None:
        self._heat = heat
        self._passages = passages
        self._blocks = blocks
        self._root = root
        self._tokens_of = tokens_of
        self._passages_max = passages_max
        self._counts = PredictionCounts()  # replaced as a whole, by the rounds alone
        self._rounds = Rounds(self._round, name="kv-predict", every_s=every_s, failed=self._failed)

    def start(self) -> None:
        """Begin; the first round runs at once."""
        self._rounds.start()

    def counts(self) -> PredictionCounts:
        """Return what was done so far."""
        return self._counts

    def wait_for(self, rounds: int, *, timeout_s: float) -> bool:
        """Wait until that many rounds are done in all; tells whether they are."""
        return self._rounds.wait_for(rounds, timeout_s=timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop; tells whether that was done in time."""
        return self._rounds.stop(timeout_s)

    def _round(self) -> None:
        self._counts = self.predict()

    @staticmethod
    def _failed(error: Exception, again: bool) -> None:
        log.warning("service.reuse_unpredicted", reason=str(error), exc_info=is_fault(error))

    def predict(self) -> PredictionCounts:
        """Do one round; returns the counts with it.

        Raises:
            OSError: the folder of blocks failed; what keeps KV goes by the last prediction.
        """
        heat = self._heat()
        if self._passages is not None:
            self._passages.predict(heat)
        before = self._counts
        if self._blocks is None or self._root is None:
            return dataclasses.replace(before, rounds=before.rounds + 1)
        hottest = heapq.nlargest(self._passages_max, heat.items(), key=lambda item: item[1])
        weights = block_weights(
            (
                (token_ids, weight)
                for key, weight in hottest
                if not self._rounds.stopping and (token_ids := self._tokens_of(key))
            ),
            root=self._root,
            block_tokens=self._blocks.block_tokens,
        )
        write_predicted(self._blocks.folder, weights)
        self._blocks.predict(weights)
        removed = self._blocks.keep_budget()
        return PredictionCounts(
            before.rounds + 1, len(weights), self._blocks.bytes(), before.removed + removed
        )
