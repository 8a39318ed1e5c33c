"""Prefix blocks that outlive a process: what an inference engine loads ahead of a prompt.

`prefix_blocks` shares blocks between the prompts of one process. Engines are other processes: they
find a block by name, which is the chained hash of all tokens up to its end, and read it themselves.
One checksummed file a block, published by rename, so that several processes may read and write the
same folder without a lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog

from stoker.errors import InputError
from stoker.kvcache.kv_file import KvCorrupt, read_kv, write_kv
from stoker.kvcache.language_model import Kv
from stoker.kvcache.prefix_blocks import BlockHash, block_hash, joined, root_hash

log = structlog.get_logger(__name__)

_SUFFIX = ".safetensors"


class EngineBlocks:
    """Files of prefix blocks in one folder, bounded in bytes. Safe for several processes.

    Two tenants, models or adapters never share a name: all three are in the first block's parent.
    A block that is damaged, or holds other tokens than its name says, is removed and is a miss.

    Args:
        folder: Where the files are; made if missing.
        model_id: Whose KV it is.
        block_tokens: Tokens per block.
        bytes_max: Budget of the files; the longest unused go first. None sets no budget: where
            several processes write, one of them keeps it.
        storage: How numbers are kept, as in `kv_file`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_id: str,
        block_tokens: int,
        bytes_max: int | None = None,
        storage: str = "float32",
    ) -> None:
        if block_tokens < 1:
            raise InputError(f"block_tokens: expected at least 1, found {block_tokens}")
        self.folder = folder
        self.block_tokens = block_tokens
        self._model_id = model_id
        self._bytes_max = bytes_max
        self._storage = storage
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def root(self, tenant: str, adapter: str = "") -> BlockHash:
        """Return the parent of a tenant's first blocks."""
        return root_hash(
            model_id=self._model_id, tenant=tenant, adapter=adapter, block_tokens=self.block_tokens
        )

    def _names(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        size, names, parent = self.block_tokens, [], root
        for start in range(0, len(token_ids) - size + 1, size):
            parent = block_hash(parent, token_ids[start : start + size])
            names.append(parent)
        return names

    def _path(self, name: BlockHash) -> Path:
        return self.folder / f"{name.hex()}{_SUFFIX}"

    def matched(self, root: BlockHash, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens have their blocks here; looks at names only."""
        count = 0
        for name in self._names(root, token_ids):
            if not self._path(name).is_file():
                break
            count += self.block_tokens
        return count

    def put(self, root: BlockHash, kv: Kv, *, tenant: str) -> int:
        """Write the full blocks of a prompt's KV that are not here yet; returns how many.

        Args:
            root: From `root`.
            kv: Of the prompt from position 0; what does not fill a block is left out.
            tenant: Kept in the files, for whoever looks at one.

        Raises:
            InputError: the KV does not start at position 0.
            OSError: the disk is full or fails; what was written so far is whole.
        """
        if kv.start:
            raise InputError(f"expected KV from position 0, found it from {kv.start}")
        size, written = self.block_tokens, 0
        for index, name in enumerate(self._names(root, kv.token_ids.tolist())):
            path = self._path(name)
            if path.is_file():
                continue
            start, stop = index * size, (index + 1) * size
            part = Kv(
                kv.token_ids[start:stop], kv.keys[:, :, start:stop], kv.values[:, :, start:stop]
            )
            write_kv(
                path, part, tenant=tenant, chunk_id=str(start), model_id=self._model_id,
                storage=self._storage,
            )  # fmt: skip
            written += 1
        if written:
            self._keep_budget()
        return written

    def get(self, root: BlockHash, token_ids: Sequence[int]) -> Kv | None:
        """Read the KV of tokens that fill whole blocks; None if a block is gone or damaged.

        Raises:
            InputError: the tokens do not fill whole blocks, or are none.
        """
        if not token_ids or len(token_ids) % self.block_tokens:
            raise InputError(f"expected full blocks of {self.block_tokens}, found {len(token_ids)}")
        parts: list[Kv | None] = []
        wanted = np.asarray(token_ids, np.int32)
        for index, name in enumerate(self._names(root, token_ids)):
            start = index * self.block_tokens
            part = self._read(self._path(name), wanted[start : start + self.block_tokens])
            if part is None:
                return None
            parts.append(part)
        whole = joined(parts)
        assert whole is not None
        return whole

    def _read(self, path: Path, wanted: np.ndarray) -> Kv | None:
        try:
            kv = read_kv(path)
            if not np.array_equal(kv.token_ids, wanted):
                raise KvCorrupt(f"{path.name}: expected the tokens of its name, found others")
        except FileNotFoundError:
            return None
        except KvCorrupt as error:
            log.warning("kvcache.block_lost", file=path.name, reason=str(error))
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # a read-only folder, or another process was quicker
            os.utime(path)
        return kv

    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    found.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        return found

    def _keep_budget(self) -> None:
        if self._bytes_max is None:
            return
        with self._lock:
            files = sorted(self._files(), key=lambda file: (file[0], file[2].name))
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= self._bytes_max:
                    return
                path.unlink(missing_ok=True)
                total -= size
