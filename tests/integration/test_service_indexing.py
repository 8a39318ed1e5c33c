"""`stoker index`, from files to an index that answers, and what it says when it cannot."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.errors import InputError, UnavailableError
from stoker.index.collection import Collection
from stoker.service.cli import main
from stoker.service.indexing import IndexPlan, _scratch_beside, build_index

DIM = 16


class HashEmbedder:
    """A vector from a text's hash: the same text, the same vector."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.texts.extend(texts)
        return np.stack([vector_of(text) for text in texts])


def vector_of(text: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    raw = np.random.default_rng(seed).normal(size=DIM).astype(np.float32)
    return raw / np.linalg.norm(raw)


def rows(path: Path, count: int, *, vectors: bool) -> Path:
    lines = []
    for place in range(count):
        row = {"id": f"c{place}", "text": f"text {place}", "metadata": {"place": place}}
        if vectors:
            row["vector"] = vector_of(f"text {place}").tolist()
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


def refused() -> HashEmbedder:
    raise AssertionError("nothing was to be embedded")


def test_text_is_embedded_built_and_found_with_its_documents(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", 60, vectors=False)
    embedder = HashEmbedder()
    report = build_index(IndexPlan((path,), tmp_path / "index"), embedder=lambda: embedder)
    assert report.embedded == len(embedder.texts) == report.build.count == 60
    with stoker.open(tmp_path / "index") as index:
        hits = index.search(vector_of("text 7"), 3)
        assert hits.ids[0] == "c7"
        (document,) = index.documents(["c7"])
        assert document is not None
        assert document.text == "text 7"
        assert document.metadata["place"] == 7
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".index")] == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path,
) -> None:
    """It may be as large as the index, and nothing else would ever look at it."""
    left = tmp_path / ".index.input.killed"
    left.mkdir()
    (left / "vectors").write_bytes(b"x")
    another = tmp_path / ".index2.input.killed"  # of another output
    another.mkdir()
    living, held = _scratch_beside(tmp_path / "index")
    assert not left.exists()
    path = rows(tmp_path / "a.jsonl", 20, vectors=True)
    build_index(IndexPlan((path,), tmp_path / "index"), embedder=refused)
    assert living.exists()
    assert another.exists()
    os.close(held)
    build_index(IndexPlan((path,), tmp_path / "index[2]"), embedder=refused)
    with pytest.raises(InputError, match="exists already"):
        build_index(IndexPlan((path,), tmp_path / "index"), embedder=refused)
    shutil.rmtree(tmp_path / "index")
    build_index(IndexPlan((path,), tmp_path / "index"), embedder=refused)
    names = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("."))
    assert names == [another.name]


@pytest.mark.parametrize("output", ["a.jsonl/index", "a.jsonl/deep/index"])
def test_an_output_that_cannot_be_made_is_said_before_anything_is_read(
    tmp_path: Path, output: str
) -> None:
    path = rows(tmp_path / "a.jsonl", 3, vectors=False)
    with pytest.raises(UnavailableError, match=r"a\.jsonl.*name an output in a folder"):
        build_index(IndexPlan((path,), tmp_path / output), embedder=refused)


def test_a_full_merge_with_heat_moves_hot_rows_though_nothing_changed(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", 60, vectors=True)
    build_index(IndexPlan((path,), tmp_path / "index"), embedder=refused)
    with Collection(tmp_path / "index", "rw") as collection:
        assert not collection.merge(full=True).merged
        report = collection.merge(full=True, heat={"c7": 3.0})
        assert report.merged
        assert collection.search(vector_of("text 7"), 1).ids[0] == "c7"
        (document,) = collection.documents(["c7"])
        assert document is not None
        assert document.text == "text 7"


def test_rows_with_vectors_need_no_model(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", 30, vectors=True)
    report = build_index(IndexPlan((path,), tmp_path / "index"), embedder=refused)
    assert report.embedded == 0
    with stoker.open(tmp_path / "index") as index:
        assert index.search(vector_of("text 3"), 1).ids[0] == "c3"


def test_ready_vectors_are_taken_by_id(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", 20, vectors=False)
    order = [f"c{place}" for place in reversed(range(25))]
    matrix = np.stack([vector_of(f"text {name[1:]}") for name in order]).astype(np.float16)
    np.save(tmp_path / "v.npy", matrix)
    (tmp_path / "ids.txt").write_text("\n".join(order) + "\n")
    plan = IndexPlan((path,), tmp_path / "index", vectors_path=tmp_path / "v.npy")
    report = build_index(plan, embedder=refused)
    assert report.unused_vectors == 5
    with stoker.open(tmp_path / "index") as index:
        assert index.search(vector_of("text 11"), 1).ids[0] == "c11"
    (tmp_path / "ids.txt").write_text("\n".join(f"x{n}" for n in order) + "\n")
    again = IndexPlan((path,), tmp_path / "other", vectors_path=tmp_path / "v.npy")
    with pytest.raises(InputError, match=r"a\.jsonl:1: .*no vector of id 'c0'"):
        build_index(again, embedder=refused)
    assert not (tmp_path / "other").exists()


def test_the_command_says_what_it_made_and_refuses_to_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "a.jsonl", 30, vectors=True)
    output = tmp_path / "index"
    assert main(["index", str(path), "-o", str(output), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["build"]["count"] == 30
    assert document["read"]["passage_count"] == 30
    assert document["model"] is None
    assert main(["index", str(path), "-o", str(output)]) == 3
    assert "exists already" in capsys.readouterr().err
    assert main(["index", str(path), "-o", str(tmp_path / "two"), "--metric", "l2"]) == 0
    shown = capsys.readouterr().out
    assert "30 vectors of 16 dimensions, l2" in shown
    assert f"next: stoker serve {tmp_path / 'two'}" in shown


def test_the_command_names_file_and_line_and_can_skip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "a.jsonl", 5, vectors=True)
    path.write_text(path.read_text() + "\n{broken\n")
    assert main(["index", str(path), "-o", str(tmp_path / "index")]) == 3
    assert "a.jsonl:6: not valid JSON" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()
    assert main(["index", str(path), "-o", str(tmp_path / "index"), "--skip-bad-rows"]) == 0
    assert "a.jsonl:6: not valid JSON" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra", [["--words", "0"], ["--threads", "0"], ["--vector-ids", "x"], ["--metric", "hamming"]]
)
def test_wrong_flags_are_usage_errors(tmp_path: Path, extra: list[str]) -> None:
    path = rows(tmp_path / "a.jsonl", 3, vectors=True)
    assert main(["index", str(path), "-o", str(tmp_path / "index"), *extra]) == 2
