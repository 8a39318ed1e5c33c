"""The tier below host memory for prefix blocks: one checksummed file a block."""

from __future__ import annotations

import contextlib
from pathlib import Path

import structlog

from stoker.kvcache.block_names import BlockHash
from stoker.kvcache.kv_file import KvCorrupt, read_header, read_kv, write_kv
from stoker.kvcache.language_model import Kv

log = structlog.get_logger(__name__)


class FileTier:
    """Blocks as files named by their hash; a damaged one counts as lost.

    The folder is cleared when opened: blocks are found through a tree in memory, so what an
    earlier process left can never be asked for again. Passages that must outlive a process are
    kept by `passages.PassageStore`.

    Args:
        folder: Where the files are; made if missing, and of this tier alone.
        model_id: Whose KV it is.
        storage: How numbers are kept, as in `kv_file`.
    """

    def __init__(self, folder: Path, *, model_id: str, storage: str = "float32") -> None:
        self._folder = folder
        self._model_id = model_id
        self._storage = storage
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.suffix == ".safetensors" or path.name.startswith(".tmp-"):
                path.unlink(missing_ok=True)

    def _path(self, block_hash: BlockHash) -> Path:
        return self._folder / f"{block_hash.hex()}.safetensors"

    def put(self, block_hash: BlockHash, kv: Kv) -> None:
        """Write a block."""
        from_zero = Kv(kv.token_ids, kv.keys, kv.values)
        write_kv(
            self._path(block_hash), from_zero, tenant="", chunk_id=str(kv.start),
            model_id=self._model_id, storage=self._storage,
        )  # fmt: skip

    def get(self, block_hash: BlockHash) -> Kv | None:
        """Read a block; None if it is gone or damaged."""
        path = self._path(block_hash)
        try:
            start = int(read_header(path).chunk_id)
            kv = read_kv(path)
        except FileNotFoundError:
            return None
        except (KvCorrupt, ValueError, OSError) as error:  # a disk that cannot read it has lost it
            log.warning("kvcache.block_lost", file=path.name, reason=str(error))
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return Kv(kv.token_ids, kv.keys, kv.values, start)

    def drop(self, block_hash: BlockHash) -> None:
        """Remove a block's file."""
        self._path(block_hash).unlink(missing_ok=True)
