"""What one tenant can learn of another that it knows all about: by guessed keys, by error texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import StokerError
from stoker.kvcache.block_names import BlockHash, root_hash
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.language_model import Kv
from stoker.kvcache.lookup import LookupReuse, Refusal
from stoker.kvcache.passages import PassageStore
from stoker.kvcache.prefix_blocks import PrefixBlocks, SequenceId
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tenant_lookups import Fence
from stoker.kvcache.tenant_slots import TenantQuota, TenantSlots

pytest.importorskip("safetensors")

SIZE = 4
FENCE = Fence(1, 1)
SECRET_TOKENS = [70_001, 70_002, 70_003, 70_004]
SECRETS = ("victim", "dossier", "merger with", "70001", "70002", "70003", "70004")
VECTOR = np.array([0.6, 0.8, 0.0], np.float32)
TEXT = "what is the merger with initech worth"


def kv_of(token_ids: list[int], heads: int = 1) -> Kv:
    values = np.ones((1, heads, len(token_ids), 4), np.float32)
    return Kv(np.asarray(token_ids, np.int32), values, values)


class Stores:
    """Everything of the room that tenants share, full of one tenant's things."""

    def __init__(self, folder: Path) -> None:
        self.passages = PassageStore(
            folder / "p", model_id="m", memory_bytes_max=10**5, disk_bytes_max=10**4
        )
        self.passages.put("victim", "dossier", kv_of(SECRET_TOKENS))
        self.blocks = PrefixBlocks(block_tokens=SIZE, host_blocks_max=2)
        self.sequence, _ = self.blocks.begin(self.root("victim"), SECRET_TOKENS)
        self.blocks.extend(self.sequence, SECRET_TOKENS * 2)  # open: both blocks are in use
        self.engine = EngineBlocks(folder / "e", model_id="m", block_tokens=SIZE)
        self.engine.put(self.engine.root("victim"), kv_of(SECRET_TOKENS), tenant="victim")
        self.slots: TenantSlots[str] = TenantSlots(bytes_max=100, quota=TenantQuota(60))
        self.slots.put("victim", "dossier", "the merger with Initech", 50)
        self.reuse = LookupReuse(KvcacheSettings())
        self.reuse.store("victim", TEXT, VECTOR, ["dossier"], [1.0], FENCE)

    @staticmethod
    def root(tenant: str) -> BlockHash:
        return root_hash(model_id="m", tenant=tenant, block_tokens=SIZE)


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def guesses() -> Iterator[tuple[str, str]]:
    """Names that would meet the victim's where two parts of a key are only put together."""
    joins = ("", "\0", "/", "|", ":", "\x1f", "=", "-", "_")
    parts = ("victim", "dossier")
    yield from itertools.permutations((*parts, ""), 2)
    for join in joins:
        whole = join.join(parts)
        yield from ((whole, ""), ("", whole))
        yield from ((whole[:cut], whole[cut:]) for cut in range(1, len(whole)))
    for tenant in ("Victim", "victim ", " victim", "victim\0", "../victim", "*", "%", "victim/."):
        yield tenant, "dossier"
        yield tenant, f"../victim/{'dossier'}"


def test_no_guessed_key_meets_what_another_tenant_keeps(stores: Stores) -> None:
    tried = 0
    for tenant, name in guesses():
        if (tenant, name) == ("victim", "dossier"):
            continue
        tried += 1
        assert stores.passages.get(tenant, name, SECRET_TOKENS) is None, (tenant, name)
        assert not stores.passages.remove(tenant, name), (tenant, name)
        with stores.slots.use(tenant, name) as held:
            assert held is None, (tenant, name)
        if tenant == "victim":
            continue
        match = stores.blocks.match(stores.root(tenant), SECRET_TOKENS)
        assert (match.tokens, match.partial_tokens) == (0, 0), tenant
        assert stores.engine.matched(stores.engine.root(tenant), SECRET_TOKENS) == 0, tenant
        assert stores.engine.get(stores.engine.root(tenant), SECRET_TOKENS) is None, tenant
        assert isinstance(stores.reuse.lookup(tenant, TEXT, VECTOR, FENCE), Refusal), tenant
    assert tried > 150
    # And the owner still has all of it: the guesses removed nothing either.
    assert stores.passages.get("victim", "dossier", SECRET_TOKENS) is not None
    with stores.slots.use("victim", "dossier") as held:
        assert held is not None
    assert stores.engine.matched(stores.engine.root("victim"), SECRET_TOKENS) == SIZE
    assert not isinstance(stores.reuse.lookup("victim", TEXT, VECTOR, FENCE), Refusal)


def provocations(stores: Stores) -> list[Callable[[], object]]:
    """Every way for another tenant to be told that something is wrong."""
    root, mine = stores.root("mallory"), [1, 2, 3, 4]
    engine_root = stores.engine.root("mallory")
    large = kv_of([1] * 400, heads=4)

    def fill_blocks() -> None:
        identity, _ = stores.blocks.begin(root, mine)
        stores.blocks.extend(identity, mine)

    def fill_slots() -> None:
        with stores.slots.use("victim", "dossier"):
            stores.slots.put("mallory", "note", "x", 55)

    return [
        lambda: stores.passages.put("mallory", "note", large),
        fill_blocks,
        lambda: stores.blocks.extend(SequenceId(99), mine),
        lambda: stores.engine.get(engine_root, SECRET_TOKENS[:3]),
        fill_slots,
        lambda: stores.slots.put("mallory", "note", "x", 61),
        lambda: stores.slots.put("mallory", "note", "x", -1),
        lambda: stores.reuse.store("mallory", TEXT, VECTOR, ["a"], [1.0, 2.0], FENCE),
        lambda: stores.reuse.lookup("mallory", TEXT, np.zeros(3, np.float32), FENCE),
        lambda: stores.reuse.lookup("mallory", TEXT, np.ones((1, 2), np.float32), FENCE),
        lambda: stores.reuse.record_change(
            "mallory", FENCE, changed_ids=["dossier"], vectors=np.full((1, 3), np.nan, np.float32)
        ),
    ]


def test_no_error_text_or_log_line_says_anything_of_another_tenant(
    stores: Stores, capfd: pytest.CaptureFixture[str]
) -> None:
    told = []
    for provoke in provocations(stores):
        try:
            provoke()
        except StokerError as error:
            chain: BaseException | None = error
            while chain is not None:
                told.append(f"{chain} {chain.args}")
                chain = chain.__cause__ or chain.__context__
    assert len(told) >= 8, told
    told += capfd.readouterr()
    for text, secret in itertools.product(told, SECRETS):
        assert secret not in text.lower(), text


def test_a_dimension_that_another_tenant_uses_is_no_secret_told(stores: Stores) -> None:
    """Dimensions are checked against one's own earlier questions, never another tenant's."""
    other = np.array([1.0, 0.0], np.float32)
    assert isinstance(stores.reuse.lookup("mallory", TEXT, other, FENCE), Refusal)
    stores.reuse.store("mallory", TEXT, other, ["a"], [1.0], FENCE)
    assert not isinstance(stores.reuse.lookup("mallory", TEXT, other, FENCE), Refusal)
