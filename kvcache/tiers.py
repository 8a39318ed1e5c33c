"""Opens the room's tiers from its settings: passages, prefix blocks, the GPU slab."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import ConfigError
from stoker.kvcache.chunk_gate import ChunkGate
from stoker.kvcache.passages import PassageStore
from stoker.kvcache.prefix_blocks import PrefixBlocks
from stoker.kvcache.prefix_tier import FileTier
from stoker.kvcache.settings import KvcacheSettings

if TYPE_CHECKING:
    from stoker.kernels.slab import PageSlab


def open_passages(folder: Path, *, model_id: str, settings: KvcacheSettings) -> PassageStore:
    """Open the store of passages' KV under a folder."""
    return PassageStore(
        folder / "passages",
        model_id=model_id,
        memory_bytes_max=settings.kv_bytes_max,
        disk_bytes_max=settings.kv_disk_bytes_max,
        storage=settings.kv_storage,
    )


def open_gate(folder: Path, *, settings: KvcacheSettings) -> ChunkGate:
    """Open the gates of the models whose passages are under a folder."""
    return ChunkGate(folder / "gates", settings=settings)


def open_prefix_blocks(
    folder: Path, *, model_id: str, token_bytes: int, settings: KvcacheSettings
) -> PrefixBlocks:
    """Open prefix blocks of a model, with files below them.

    Args:
        folder: Where blocks go under pressure.
        model_id: Whose KV it is.
        token_bytes: Bytes of one token's keys and values.
        settings: Budgets, block size and pressure.

    Raises:
        ConfigError: not one block fits the memory budget.
    """
    block_bytes = token_bytes * settings.kv_block_tokens
    host = settings.kv_bytes_max // block_bytes
    if host < 1:
        raise ConfigError(
            f"kv_bytes_max: expected at least one block of {block_bytes} bytes, found "
            f"{settings.kv_bytes_max}"
        )
    return PrefixBlocks(
        block_tokens=settings.kv_block_tokens,
        host_blocks_max=host,
        nvme_blocks_max=settings.kv_disk_bytes_max // block_bytes,
        lower=FileTier(folder / "blocks", model_id=model_id, storage=settings.kv_storage),
        pressure_ratio=settings.kv_pressure_ratio,
    )


def open_slab(*, page_bytes: int, pages: int, settings: KvcacheSettings) -> PageSlab:
    """Open the slab of pages on the configured device; torch is imported here.

    Raises:
        DeviceUnavailable: torch or the device is not there.
    """
    from stoker.kernels.device import Device
    from stoker.kernels.slab import PageSlab

    frames = min(settings.slab_pages_max, pages)
    return PageSlab(Device(settings.device), page_bytes=page_bytes, frames_max=frames, pages=pages)
