"""Which prefix blocks will be needed: the heat of passages, said in the names of blocks.

Heat is kept by content, blocks are named by their tokens and all before them. So a passage's heat
is that of every block of the sequence which it has in a prompt, and blocks that many passages begin
with (the instructions before them) add theirs up. Who keeps heat is seldom who keeps the blocks:
the weights travel in a file beside the blocks, as `PrefixBlocks.predict` and `EngineBlocks.predict`
take them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from stoker.kvcache.block_names import BlockHash, hashes_of

log = structlog.get_logger(__name__)

FILE_NAME = "predicted.json"
_VERSION = 1


def block_weights(
    sequences: Iterable[tuple[Sequence[int], float]], *, root: BlockHash, block_tokens: int
) -> dict[BlockHash, float]:
    """Return the uses expected per block.

    Args:
        sequences: (token_ids, uses expected) of each passage as prompts begin with it.
        root: The first blocks' parent.
        block_tokens: Tokens per block; what does not fill one has no block.
    """
    weights: dict[BlockHash, float] = {}
    for token_ids, weight in sequences:
        if weight > 0.0 and math.isfinite(weight):
            for name in hashes_of(root, token_ids, block_tokens):
                weights[name] = weights.get(name, 0.0) + weight
    return weights


def write_predicted(folder: Path, weights: Mapping[BlockHash, float]) -> None:
    """Replace a folder's prediction; whole or not at all, and not durable: it is soon made anew.

    Raises:
        OSError: the disk failed; the last prediction still stands.
    """
    rows = {name.hex(): weight for name, weight in weights.items()}
    scratch = folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        scratch.write_text(json.dumps({"version": _VERSION, "weights": rows}))
        scratch.replace(folder / FILE_NAME)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def read_predicted(folder: Path) -> dict[BlockHash, float]:
    """Return a folder's prediction; nothing where there is none that can be read."""
    try:
        document = json.loads((folder / FILE_NAME).read_text())
        rows = document["weights"].items() if document["version"] == _VERSION else ()
        return {BlockHash(bytes.fromhex(name)): float(weight) for name, weight in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("kvcache.prediction_unread", kind=type(error).__name__, reason=str(error))
        return {}
