"""The demo, small: the whole way through with a model of hashes, twice, and by Kafka."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stoker.errors import ConfigError
from stoker.service.cli import main
from stoker.service.corpus_stdlib import stdlib_passages
from stoker.service.demo import prepare as preparing
from stoker.service.demo.options import DemoOptions
from stoker.service.demo.screen import Screen
from stoker.service.demo.story import DemoResult, run_demo
from stoker.service.passages import Passage

DIM = 32
CORPUS = 400


class WordNetwork:
    """Stands for a sentence-transformers model: the sum of its words' random vectors."""

    def __init__(self) -> None:
        self.count = 0

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        self.count += len(texts)
        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> np.ndarray:
        total = np.zeros(DIM)
        for word in set(text.lower().split()[:30]):
            digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
            total += np.random.default_rng(int.from_bytes(digest, "big")).normal(size=DIM)
        return total


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WordNetwork:
    made = WordNetwork()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("stoker.service.embedding.Embedder._load", lambda self: made)
    corpus: list[Passage] = []
    for passage in stdlib_passages():
        corpus.append(passage)
        if len(corpus) == CORPUS:
            break
    monkeypatch.setattr(preparing, "stdlib_passages", lambda *, words: iter(corpus))
    return made


@pytest.fixture
def demo(tmp_path: Path) -> Callable[..., tuple[DemoResult, str]]:
    def run(**changes: Any) -> tuple[DemoResult, str]:
        options = DemoOptions(
            **{
                "folder": tmp_path / "demo",
                "report_path": tmp_path / "report" / "index.html",
                "model": str(tmp_path / "model"),
                "padded_to": 3_000,
                "searches": 120,
                "queries": 20,
                "repeats": 1,
                "cloud": False,
                **changes,
            }
        )
        console = Console(record=True, width=110, quiet=True)
        console.quiet = False
        with open("/dev/null", "w", encoding="utf-8") as nowhere:
            console.file = nowhere
            result = run_demo(options, Screen(console))
        return result, console.export_text()

    return run


def test_the_whole_story_and_then_again_from_what_is_kept(
    demo: Callable[..., tuple[DemoResult, str]], network: WordNetwork
) -> None:
    result, shown = demo()
    document = result.document
    assert [row["mode"] for row in document["rows"]] == ["none", "all", "stoker"]
    assert len(document["checks"]) == 6
    assert len(document["sentences"]) == 1
    assert document["facts"]["documents"].startswith(f"{CORPUS} of")
    assert "2,600 of them are GENERATED" in shown
    assert "Stoker's receipt of the last warm-up" in shown
    assert "measured hit ratio" in document["receipt"] or document["receipt"]["measured_hit_ratio"]
    assert document["sentences"][0] in " ".join(shown.split())
    for run in document["runs"]:
        assert len(run["record"]["latency_s"]) == 21
        assert run["recall"] > 0.5
    ours = next(run["record"] for run in document["runs"] if run["record"]["mode"] == "stoker")
    assert ours["receipt"]["heat_keys"] > 10
    assert json.loads(result.json_path.read_text())["facts"] == document["facts"]
    assert "<svg" in result.report_path.read_text()
    embedded = network.count
    assert embedded >= CORPUS

    result, shown = demo()
    assert network.count == embedded
    assert "kept from the last run" in shown
    assert [row["mode"] for row in result.document["rows"]] == ["none", "all", "stoker"]


def test_without_padding_only_real_chunks_are_there(
    demo: Callable[..., tuple[DemoResult, str]], network: WordNetwork
) -> None:
    result, shown = demo(padded_to=0)
    assert result.document["facts"]["generated padding"] == "none"
    assert "GENERATED" not in shown


def test_an_interrupted_preparation_is_done_again(
    demo: Callable[..., tuple[DemoResult, str]], network: WordNetwork, tmp_path: Path
) -> None:
    demo()
    (tmp_path / "demo" / "prepared" / "prepared.json").unlink()
    (tmp_path / "demo" / "prepared" / "ids.json").write_text("[]")
    _, shown = demo()
    assert "kept from the last run" not in shown


@pytest.mark.kafka
def test_events_take_the_same_way_through_a_broker_twice(
    demo: Callable[..., tuple[DemoResult, str]], network: WordNetwork, broker: Any
) -> None:
    plain, _ = demo()
    for _ in range(2):  # the broker still holds the first run's events when the second starts
        result, shown = demo(kafka=broker.bootstrap)
        assert f"through Kafka at {broker.bootstrap}" in shown
        ours = [run["record"] for run in result.document["runs"]][-1]
        assert ours["mode"] == "stoker"
        assert ours["receipt"]["heat_keys"] >= _heat_keys(plain)


def _heat_keys(result: DemoResult) -> int:
    keys: int = result.document["runs"][-1]["record"]["receipt"]["heat_keys"]
    return keys


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "0"], "budget_ratio"),
        (["--repeats", "0"], "repeats"),
        (["--embed-seconds", "-1"], "embed_s"),
    ],
)
def test_wrong_flags_are_usage_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *flags]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError):
        DemoOptions(queries=1)
