"""Prefix blocks that outlive a process: what an inference engine loads ahead of a prompt.

`prefix_blocks` shares blocks between the prompts of one process. Engines are other processes: they
find a block by name, which is the chained hash of all tokens up to its end, and read it themselves.
One checksummed file a block, published by rename, so that several processes may read and write the
same folder without a lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import structlog

from stoker.errors import InputError
from stoker.kvcache.block_names import BlockHash, hashes_of, root_hash
from stoker.kvcache.kv_file import KvCorrupt, read_kv, write_kv
from stoker.kvcache.kv_slices import joined
from stoker.kvcache.language_model import Kv

log = structlog.get_logger(__name__)

_SUFFIX = ".safetensors"
_STEP_NS = 1_000  # between the last uses of two blocks of one prefix, deeper is earlier


class EngineBlocks:
    """Files of prefix blocks in one folder, bounded in bytes. Safe for several processes.

    Two tenants, models or adapters never share a name: all three are in the first block's parent.
    A block that is damaged, or holds other tokens than its name says, is removed and is a miss.

    Args:
        folder: Where the files are; made if missing.
        model_id: Whose KV it is.
        block_tokens: Tokens per block.
        bytes_max: Budget of the files; the least worth go first. None sets no budget: where
            several processes write, one of them keeps it.
        storage: How numbers are kept, as in `kv_file`.
        wall: Unix time, seconds: that of a file's last use is its modification time.

    Worth is the time of the last use plus a credit for every doubling of what the heat plan
    predicts (`predict`). The credit is the time that files live here at most: a block that is
    expected once is worth as much as one used just now. A block is never worth more than what it
    stands on: all before it was used when it was, and is expected when it is.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_id: str,
        block_tokens: int,
        bytes_max: int | None = None,
        storage: str = "float32",
        wall: Callable[[], float] = time.time,
    ) -> None:
        if block_tokens < 1:
            raise InputError(f"block_tokens: expected at least 1, found {block_tokens}")
        self.folder = folder
        self.block_tokens = block_tokens
        self._model_id = model_id
        self._bytes_max = bytes_max
        self._storage = storage
        self._wall = wall
        self._lock = threading.Lock()
        self._predicted: Mapping[BlockHash, float] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def root(self, tenant: str, adapter: str = "") -> BlockHash:
        """Return the parent of a tenant's first blocks."""
        return root_hash(
            model_id=self._model_id, tenant=tenant, adapter=adapter, block_tokens=self.block_tokens
        )

    def _names(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        return hashes_of(root, token_ids, self.block_tokens)

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
        names = self._names(root, kv.token_ids.tolist())
        for index, name in enumerate(names):
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
        self._used(names)
        if written:
            self.keep_budget()
        return written

    def get(self, root: BlockHash, token_ids: Sequence[int]) -> Kv | None:
        """Read the KV of tokens that fill whole blocks; None if a block is gone or damaged.

        Raises:
            InputError: the tokens do not fill whole blocks, or are none.
        """
        if not token_ids or len(token_ids) % self.block_tokens:
            raise InputError(f"expected full blocks of {self.block_tokens}, found {len(token_ids)}")
        parts: list[Kv] = []
        names = self._names(root, token_ids)
        wanted = np.asarray(token_ids, np.int32)
        for index, name in enumerate(names):
            start = index * self.block_tokens
            part = self._read(self._path(name), wanted[start : start + self.block_tokens])
            if part is None:
                return None
            parts.append(part)
        shapes = {(*part.keys.shape[:2], part.keys.shape[3]) for part in parts}
        if len(shapes) > 1:  # blocks of two models cannot be of one prompt
            return None
        self._used(names)
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
        except OSError as error:
            log.warning("kvcache.block_lost", file=path.name, reason=str(error))
            return None
        return kv

    def _used(self, names: Sequence[BlockHash]) -> None:
        """Note a use of a prefix. The deepest was used longest ago: without it the others serve."""
        now_ns = int(self._wall() * 1e9)
        for depth, name in enumerate(names):
            # A read-only folder, another process was quicker, or a disk was full.
            with contextlib.suppress(OSError):
                os.utime(self._path(name), ns=(now_ns, now_ns - depth * _STEP_NS))

    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def predict(self, weights: Mapping[BlockHash, float]) -> None:
        """Take the heat plan's view: requests expected per block, soon. It replaces the last."""
        self._predicted = weights

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns / 1e9, stat.st_size, Path(entry.path)))
        return found

    def keep_budget(self) -> int:
        """Remove the files that are worth least, down to the budget; returns how many."""
        if self._bytes_max is None:
            return 0
        removed = 0
        with self._lock:
            files = self._files()
            total = sum(size for _, size, _ in files)
            if total <= self._bytes_max:
                return 0
            credit_s = max(0.0, self._wall() - min(used_s for used_s, _, _ in files))
            expected = {f"{name.hex()}{_SUFFIX}": w for name, w in self._predicted.items()}

            def worth(file: tuple[float, int, Path]) -> tuple[float, str]:
                doublings = math.log2(1.0 + max(0.0, expected.get(file[2].name, 0.0)))
                return file[0] + credit_s * doublings, file[2].name

            for _, size, path in sorted(files, key=worth):
                if total <= self._bytes_max:
                    break
                path.unlink(missing_ok=True)
                total -= size
                removed += 1
        return removed
