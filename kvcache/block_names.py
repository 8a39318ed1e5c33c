"""Names of prefix blocks: a block's hash covers its tokens and all before it.

Whoever knows a prompt's tokens can name its blocks, whether it keeps any or not: the tree in
memory, the files that engines load, and what foresees which of them will be needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NewType

import numpy as np

from stoker.errors import InputError

BlockHash = NewType("BlockHash", bytes)


def root_hash(*, model_id: str, tenant: str, adapter: str = "", block_tokens: int) -> BlockHash:
    """Return the parent of a first block: equal texts of two tenants or models never meet."""
    digest = hashlib.blake2b(digest_size=16, person=b"stoker-kv-root")
    for part in (model_id, tenant, adapter, str(block_tokens)):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Chain a block's hash to its parent's.

    Raises:
        InputError: a token id that no 32-bit integer holds: no tokenizer has one.
    """
    digest = hashlib.blake2b(parent, digest_size=16, person=b"stoker-kv-block")
    try:
        digest.update(np.asarray(token_ids, "<i4").tobytes())
    except OverflowError as error:
        raise InputError(f"token_ids: expected 32-bit integers: {error}") from error
    return BlockHash(digest.digest())


def hashes_of(root: BlockHash, token_ids: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Return the hashes of a prompt's whole blocks."""
    found, parent = [], root
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_hash(parent, token_ids[start : start + block_tokens])
        found.append(parent)
    return found
