"""vLLM's connector against its interface as recorded from vLLM 0.32.0, with real pages and files.

`vllm` itself is not installed where these tests run: what its scheduler and workers call, in the
order in which they call it, is repeated here over torch tensors of its layout.
"""

from __future__ import annotations

import enum
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.service import kv_vllm_connector

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

LAYERS, HEADS, DIM, SIZE, PAGES = 3, 2, 8, 4, 16


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """`KVConnectorBase_V1` of vLLM 0.32: what a subclass is given."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._role = role
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._metadata is not None
        return self._metadata


@pytest.fixture(autouse=True)
def recorded_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    base: Any = sys.modules[name]
    base.KVConnectorBase_V1 = Base
    base.KVConnectorMetadata = type("KVConnectorMetadata", (), {})
    base.KVConnectorRole = Role
    kv_vllm_connector.connector_classes.cache_clear()
    yield
    kv_vllm_connector.connector_classes.cache_clear()


class Engine:
    """One process of vLLM: a scheduler's connector, a worker's, and pages per layer."""

    def __init__(self, folder: Path, *, tenant: str = "acme", seed: int = 0) -> None:
        extra = {"folder": str(folder), "model_id": "m1", "tenant": tenant}
        transfer = types.SimpleNamespace(
            get_from_extra_config=lambda key, default: extra.get(key, default),
            kv_load_failure_policy="recompute",
        )
        config = types.SimpleNamespace(
            kv_transfer_config=transfer, cache_config=types.SimpleNamespace(block_size=SIZE)
        )
        connector: Any = kv_vllm_connector.StokerConnector
        self.scheduler = connector(config, Role.SCHEDULER, None)
        self.worker = connector(config, Role.WORKER, None)
        generator = torch.Generator().manual_seed(seed)
        self.pages = {
            f"model.layers.{layer}.self_attn.attn": torch.randn(
                PAGES, HEADS, SIZE, 2 * DIM, generator=generator
            )
            for layer in range(LAYERS)
        }
        self.worker.register_kv_caches(self.pages)

    def step(
        self, name: str, token_ids: list[int], block_ids: list[int], *, scheduled: int | None = None
    ) -> int:
        """Schedule and run one new request; returns the tokens that came from outside."""
        request = types.SimpleNamespace(
            request_id=name, prompt_token_ids=token_ids, mm_features=[], lora_request=None
        )
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not is_async
        self.scheduler.update_state_after_alloc(request, None, found)
        new = types.SimpleNamespace(
            req_id=name,
            prompt_token_ids=token_ids,
            mm_features=[],
            block_ids=(block_ids,),
            num_computed_tokens=found,
        )
        cached = types.SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
        meta = self.scheduler.build_connector_meta(
            types.SimpleNamespace(
                scheduled_new_reqs=[new],
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={
                    name: len(token_ids) - found if scheduled is None else scheduled
                },
            )
        )
        # Workers are other processes where vLLM has more than one, as its CPU build always has.
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
        self.worker.start_load_kv(types.SimpleNamespace(no_compile_layers={}))
        for layer, pages in self.pages.items():
            self.worker.wait_for_layer_load(layer)
            self.worker.save_kv_layer(layer, pages, None)
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()
        return int(found)

    def rows(self, block_ids: list[int], tokens: int) -> list[Any]:
        """Return each layer's KV of the first tokens of a request."""
        index = torch.from_numpy(kv_vllm_connector.slots_of(block_ids, SIZE, tokens))
        return [pages[index // SIZE, :, index % SIZE] for pages in self.pages.values()]


PROMPT = [*range(100, 114)]  # 14 tokens: three full blocks can be reused, one token is computed


def test_a_second_process_loads_what_the_first_computed(tmp_path: Path) -> None:
    first = Engine(tmp_path, seed=1)
    assert first.step("a", PROMPT, [5, 2, 9, 1]) == 0
    second = Engine(tmp_path, seed=2)
    assert second.step("b", [*PROMPT[:12], 7, 7, 7], [3, 8, 0, 4]) == 12
    for mine, theirs in zip(first.rows([5, 2, 9], 12), second.rows([3, 8, 0], 12), strict=True):
        assert torch.equal(mine, theirs)
    assert second.worker.get_block_ids_with_load_errors() == set()


def test_only_the_shared_prefix_is_loaded(tmp_path: Path) -> None:
    first = Engine(tmp_path, seed=1)
    first.step("a", PROMPT, [5, 2, 9, 1])
    second = Engine(tmp_path, seed=2)
    before = [rows.clone() for rows in second.rows([3, 8, 0], 12)]
    assert second.step("b", [*PROMPT[:8], 1, 2, 3, 4, 5], [3, 8, 0, 4]) == 8
    for was, now in zip(before, second.rows([3, 8, 0], 12), strict=True):
        assert torch.equal(was[8:], now[8:]), "what follows the prefix is left alone"
        assert not torch.equal(was[:8], now[:8])


def test_a_prompt_computed_in_several_steps_is_not_saved_half(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.step("a", PROMPT, [5, 2, 9, 1], scheduled=8)
    assert list(tmp_path.glob("*.safetensors")) == []
    engine.step("b", PROMPT, [5, 2, 9, 1], scheduled=12)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_tenants_share_nothing(tmp_path: Path) -> None:
    Engine(tmp_path, tenant="acme", seed=1).step("a", PROMPT, [5, 2, 9, 1])
    assert Engine(tmp_path, tenant="other", seed=2).step("b", PROMPT, [5, 2, 9, 1]) == 0


def test_a_damaged_block_is_computed_anew(tmp_path: Path) -> None:
    first = Engine(tmp_path, seed=1)
    first.step("a", PROMPT, [5, 2, 9, 1])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    raw = bytearray(files[0].read_bytes())
    raw[-1] ^= 1
    files[0].write_bytes(raw)
    second = Engine(tmp_path, seed=2)
    assert second.step("b", PROMPT, [3, 8, 0, 4]) == 12, "names are all that the scheduler sees"
    assert second.worker.get_block_ids_with_load_errors() == {3, 8, 0}
    assert second.worker.get_block_ids_with_load_errors() == set()
    assert Engine(tmp_path, seed=3).step("c", PROMPT, [3, 8, 0, 4]) < 12


def test_short_prompts_images_and_adapters_take_no_part(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert engine.step("a", PROMPT[:4], [1]) == 0
    assert list(tmp_path.glob("*.safetensors")) == []
    engine.step("b", PROMPT, [5, 2, 9, 1])
    for field, value in (("mm_features", ["image"]), ("lora_request", "adapter")):
        request = types.SimpleNamespace(
            request_id="c", prompt_token_ids=PROMPT, mm_features=[], lora_request=None
        )
        setattr(request, field, value)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_it_names_what_its_settings_lack(tmp_path: Path) -> None:
    transfer = types.SimpleNamespace(get_from_extra_config=lambda key, default: default)
    config = types.SimpleNamespace(
        kv_transfer_config=transfer, cache_config=types.SimpleNamespace(block_size=SIZE)
    )
    with pytest.raises(ConfigError, match="folder and model_id"):
        kv_vllm_connector.StokerConnector(config, Role.WORKER, None)


def test_a_damaged_block_may_not_end_a_request(tmp_path: Path) -> None:
    """vLLM's own default is to fail the request whose blocks could not be loaded."""
    extra = {"folder": str(tmp_path), "model_id": "m1"}
    transfer = types.SimpleNamespace(
        get_from_extra_config=lambda key, default: extra.get(key, default),
        kv_load_failure_policy="fail",
    )
    config = types.SimpleNamespace(
        kv_transfer_config=transfer, cache_config=types.SimpleNamespace(block_size=SIZE)
    )
    with pytest.raises(ConfigError, match="kv_load_failure_policy: expected 'recompute'"):
        kv_vllm_connector.StokerConnector(config, Role.SCHEDULER, None)


def test_slots_follow_the_pages() -> None:
    assert kv_vllm_connector.slots_of([3, 0], 4, 6).tolist() == [12, 13, 14, 15, 0, 1]
    assert kv_vllm_connector.slots_of([3, 0], 4, 6).dtype == np.int64
