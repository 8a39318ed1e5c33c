"""vLLM's KV connector: prefix blocks that Stoker keeps on disk, loaded into the engine's pages.

vLLM imports this module by name and asks it for `StokerConnector`:

    KVTransferConfig(kv_connector="StokerConnector", kv_role="kv_both",
                     kv_connector_module_path="stoker.service.kv_vllm_connector",
                     kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"folder": "...", "model_id": "...", "tenant": ""})

vLLM's own policy is "fail": a request whose block is gone or damaged would end with an error.

Written against vLLM 0.32 (`KVConnectorBase_V1`, which its authors call experimental): the cache of
a layer is ``[blocks, kv_heads, block_size, 2 x head_dim]``, keys before values, keys after
rotation. Prefixes only. vLLM is never imported but by the process that has it: the classes are
made when they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import ConfigError, InputError, StokerError
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.language_model import Kv

log = structlog.get_logger(__name__)

VLLM_TESTED = "0.32.0"


@dataclasses.dataclass
class Transfer:
    """One request's prefix and where its tokens lie in the engine's pages.

    Attributes:
        token_ids: Of the prefix, from position 0, whole blocks.
        start: Tokens that the engine holds already.
        slots: int64, shape (len(token_ids),): page x block_size + offset of each token.
        load: Read into the pages; else taken out of them.
    """

    token_ids: list[int]
    start: int
    slots: NDArray[np.int64]
    load: bool


def slots_of(block_ids: Sequence[int], block_size: int, tokens: int) -> NDArray[np.int64]:
    """Return where the first tokens of a request lie, given its pages in order."""
    pages = np.asarray(block_ids, np.int64)[:, None] * block_size
    return (pages + np.arange(block_size)).reshape(-1)[:tokens]


class LayerLoads:
    """Prefixes on their way into the engine's pages: files are read beside the computation.

    A thread reads; each layer waits for the file and then copies its own part, so that the first
    layer starts before the last request's file is read.
    """

    def __init__(self, blocks: EngineBlocks, tenant: str) -> None:
        self._blocks = blocks
        self._root = blocks.root(tenant)
        self._threads: list[threading.Thread] = []
        self._read: list[tuple[Transfer, threading.Event, list[Kv | None]]] = []

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Start reading."""
        for transfer in transfers:
            box: list[Kv | None] = [None]
            done = threading.Event()
            self._read.append((transfer, done, box))

        def read_all(jobs: list[tuple[Transfer, threading.Event, list[Kv | None]]]) -> None:
            for transfer, done, box in jobs:
                try:
                    box[0] = self._blocks.get(self._root, transfer.token_ids)
                except (StokerError, OSError) as error:
                    log.warning("service.kv_load_failed", reason=str(error))
                finally:
                    done.set()

        if self._read:
            thread = threading.Thread(target=read_all, args=(list(self._read),), daemon=True)
            thread.start()
            self._threads.append(thread)

    def into_layer(self, layer: int, pages: Any, block_size: int) -> NDArray[np.int64]:
        """Copy every prefix's part of one layer into its pages.

        Args:
            layer: Its number.
            pages: The layer's tensor, ``[blocks, kv_heads, block_size, 2 x head_dim]``.

        Returns:
            int64: pages that were to be filled and could not be; the engine computes those anew.
        """
        import torch

        failed: list[NDArray[np.int64]] = []
        for transfer, done, box in self._read:
            done.wait()
            slots = transfer.slots[transfer.start :]
            kv = box[0]
            if kv is None:
                failed.append(np.unique(slots // block_size))
                continue
            both = np.concatenate([kv.keys[layer], kv.values[layer]], axis=-1)[:, transfer.start :]
            rows = torch.from_numpy(np.ascontiguousarray(both.transpose(1, 0, 2)))
            index = torch.from_numpy(slots)
            pages[index // block_size, :, index % block_size] = rows.to(pages.device, pages.dtype)
        return np.concatenate(failed) if failed else np.zeros(0, np.int64)

    def end(self) -> None:
        """Forget the loads of this step."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._read.clear()


class LayerSaves:
    """Prefixes taken out of the engine's pages layer by layer, and written once all are there."""

    def __init__(self, blocks: EngineBlocks, tenant: str) -> None:
        self._blocks = blocks
        self._tenant = tenant
        self._root = blocks.root(tenant)
        self._taken: dict[int, list[NDArray[np.float32]]] = {}

    def take(self, layer: int, pages: Any, block_size: int, transfers: Sequence[Transfer]) -> None:
        """Copy one layer's part of each prefix out of the pages."""
        import torch

        rows = []
        for transfer in transfers:
            index = torch.from_numpy(transfer.slots)
            found = pages[index // block_size, :, index % block_size]
            rows.append(found.detach().to("cpu", torch.float32).numpy().copy())
        self._taken[layer] = rows

    def write(self, transfers: Sequence[Transfer]) -> int:
        """Write what was taken as blocks; returns how many are new. A full disk is logged."""
        layers = [self._taken[layer] for layer in sorted(self._taken)]
        self._taken = {}
        written = 0
        for place, transfer in enumerate(transfers if layers else ()):
            whole = np.stack([rows[place] for rows in layers]).transpose(0, 2, 1, 3)
            keys, values = np.split(np.ascontiguousarray(whole), 2, axis=-1)
            kv = Kv(np.asarray(transfer.token_ids, np.int32), keys, values)
            try:
                written += self._blocks.put(self._root, kv, tenant=self._tenant)
            except (InputError, OSError) as error:  # numbers that are not finite, a full disk
                log.warning("service.kv_save_failed", reason=str(error))
        return written


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


class _Connector:
    """What the connector does, over the base that vLLM gives: see `connector_classes`.

    That base keeps the transfer's configuration and the metadata of the running step.
    """

    metadata_type: type[Any]
    _kv_transfer_config: Any
    _get_connector_metadata: Callable[[], Any]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        base: Any = super()  # vLLM's, known once `connector_classes` has joined the two
        base.__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        folder, model_id = extra("folder", ""), extra("model_id", "")
        if not folder or not model_id:
            raise ConfigError("kv_connector_extra_config: expected folder and model_id")
        policy = self._kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy: expected 'recompute', found {policy!r}, with which "
                "a damaged block ends its request"
            )
        self._block_size = int(vllm_config.cache_config.block_size)
        self._tenant = str(extra("tenant", ""))
        budget = extra("bytes_max", None)
        self._blocks = EngineBlocks(
            Path(folder),
            model_id=str(model_id),
            block_tokens=self._block_size,
            bytes_max=None if budget is None else int(budget),
        )
        self._root = self._blocks.root(self._tenant)
        self._wanted: dict[str, tuple[list[int], int]] = {}
        self._loads = LayerLoads(self._blocks, self._tenant)
        self._saves = LayerSaves(self._blocks, self._tenant)
        self._failed: set[int] = set()
        self._layers: dict[str, Any] = {}
        if role.name == "WORKER":
            log.info("service.kv_connector_ready", folder=str(folder), vllm=VLLM_TESTED)

    # -- scheduler -------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        token_ids = self._reusable(request.prompt_token_ids, request)
        matched = self._blocks.matched(self._root, token_ids)
        return max(0, matched - num_computed_tokens), False

    def _reusable(self, token_ids: Sequence[int] | None, request: Any) -> list[int]:
        # Images and adapters are not in our hash; and one token must be computed.
        if token_ids is None or request.mm_features or getattr(request, "lora_request", None):
            return []
        whole = (len(token_ids) - 1) // self._block_size * self._block_size
        return list(token_ids[:whole])

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            token_ids = self._reusable(request.prompt_token_ids, request)
            matched = self._blocks.matched(self._root, token_ids)
            self._wanted[request.request_id] = (token_ids[:matched], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = self.metadata_type()
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._wanted:
                self._add_load(meta, new.req_id, new.block_ids[0])
                continue
            # A prompt that is computed in several steps has not all its KV after the first;
            # and one that is loaded is not saved: what failed to load would be under its name.
            ready = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            token_ids = self._reusable(new.prompt_token_ids, new)
            if token_ids and ready >= len(token_ids):
                slots = slots_of(new.block_ids[0], self._block_size, len(token_ids))
                meta.transfers.append(Transfer(token_ids, 0, slots, load=False))
        cached = scheduler_output.scheduled_cached_reqs
        for place, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids and req_id in self._wanted:
                self._add_load(meta, req_id, cached.new_block_ids[place][0])
        self._wanted.clear()
        return meta

    def _add_load(self, meta: Any, req_id: str, block_ids: Sequence[int]) -> None:
        token_ids, count = self._wanted[req_id]
        slots = slots_of(block_ids, self._block_size, len(token_ids))
        start = len(token_ids) - count
        meta.transfers.append(Transfer(token_ids, start, slots, load=True))

    # -- worker ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = dict(kv_caches)

    def _transfers(self, *, load: bool) -> list[Transfer]:
        meta = self._get_connector_metadata()
        return [transfer for transfer in meta.transfers if transfer.load is load]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._layers:
            self._layers = {
                name: layer.kv_cache
                for name, layer in forward_context.no_compile_layers.items()
                if getattr(layer, "kv_cache", None) is not None
            }
        self._loads.begin(self._transfers(load=True))

    def wait_for_layer_load(self, layer_name: str) -> None:
        pages = self._layers[layer_name]
        number = _layer_number(layer_name)
        self._failed |= set(self._loads.into_layer(number, pages, self._block_size).tolist())

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        saves = self._transfers(load=False)
        if saves:
            self._saves.take(_layer_number(layer_name), kv_layer, self._block_size, saves)

    def wait_for_save(self) -> None:
        self._loads.end()
        self._saves.write(self._transfers(load=False))

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        self._loads.end()


@functools.cache
def connector_classes() -> dict[str, type[Any]]:
    """Make the connector's class and that of its metadata, by name; needs vLLM.

    Raises:
        ImportError: vLLM is not installed in this process.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )

    @dataclasses.dataclass
    class StokerConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
        """What the scheduler tells the workers of one step, in other processes or not."""

        transfers: list[Transfer] = dataclasses.field(default_factory=list)

    class StokerConnector(_Connector, KVConnectorBase_V1):  # type: ignore[misc]
        """Stoker's blocks for vLLM; see the module."""

        metadata_type = StokerConnectorMetadata

    classes: tuple[type[Any], ...] = (StokerConnector, StokerConnectorMetadata)
    for made in classes:
        made.__qualname__ = made.__name__  # pickle looks for it in this module
    return {made.__name__: made for made in classes}


def __getattr__(name: str) -> Any:
    if name in ("StokerConnector", "StokerConnectorMetadata"):
        return connector_classes()[name]
    raise AttributeError(name)
