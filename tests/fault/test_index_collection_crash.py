"""``kill -9`` while a collection is changed and merged: what was answered is there, once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from stoker.index.collection import Collection
from stoker.index.collection_build import _published, build_collection, create_collection
from stoker.index.failpoint import FAILPOINTS
from stoker.index.generation import read_current

HERE = Path(__file__).resolve().parent
WRITER = HERE / "collection_writer.py"
STEPS = 60
PARTS = {
    *("CURRENT", "documents.db", "documents.db-wal", "documents.db-shm", "writer.lock"),
    *("segments", "filters", "dead"),
}


def _writer_module() -> Any:
    spec = importlib.util.spec_from_file_location("collection_writer", WRITER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = _writer_module()


def start(path: Path, seed: int, *, engine: str, writers: int, failpoint: str = "") -> Any:
    environment = {**os.environ, "STOKER_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(WRITER), str(path), str(seed), str(STEPS), engine, str(writers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )


def kill_after(process: Any, lines: int) -> list[str]:
    """Read that many lines, kill the process at once, return all that it said."""
    said: list[str] = []
    for line in process.stdout:
        said.append(line.strip())
        if len(said) == lines:
            process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return said


def model_after(seed: int, count: int) -> dict[int, tuple[list[float], str]]:
    held: dict[int, tuple[list[float], str]] = {}
    for kind, ids, vectors in writer.steps(seed, STEPS)[:count]:
        for i, document in enumerate(ids):
            if kind == "upsert":
                held[document] = (vectors[i], str(vectors[i]))
            else:
                held.pop(document, None)
    return held


def contents(collection: Collection) -> dict[int, tuple[list[float], str]]:
    """Return every live document by searching for all of them, with its text and vector."""
    hits = collection.search(np.ones(writer.DIM), 1000)
    ids = hits.ids[~np.isnan(hits.scores)].tolist()
    assert len(set(ids)) == len(ids)
    found = {}
    for document, value in zip(collection.documents(ids), ids, strict=True):
        assert document is not None
        assert document.metadata == {"n": value}
        assert document.text is not None
        found[value] = ([float(x) for x in document.text.strip("[]").split(",")], document.text)
    return found


def check_reopened(path: Path, engine: str) -> Collection:
    """Open again as the next process would, and look for what a crash could leave behind."""
    collection: Collection = writer.opened(str(path), engine)
    collection.check()
    named = {entry.name for entry in read_current(path).segments}
    assert {entry.name for entry in (path / "segments").iterdir()} == named
    assert {entry.name for entry in (path / "filters").iterdir()} <= named
    number = read_current(path).number
    assert {entry.name for entry in (path / "dead").iterdir()} <= {f"{number}-{n}" for n in named}
    assert {entry.name for entry in path.iterdir()} <= PARTS
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return collection


def test_what_a_killed_build_left_goes_with_the_next_one(tmp_path: Path) -> None:
    lines = (
        "import os, signal, sys, numpy as np",
        "from pathlib import Path",
        "from stoker.index.collection_build import build_collection",
        "def die(what, done, total):",
        "    if what == 'calibrate': os.kill(os.getpid(), signal.SIGKILL)",
        "build_collection(Path(sys.argv[1]), np.eye(90, dtype=np.float32), progress=die)",
    )
    target = tmp_path / "docs[1]"
    killed = subprocess.run([sys.executable, "-c", "\n".join(lines), str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".new")
    with _published(target) as living:  # another build of the same name, under way
        other = living.with_name(f".{target.name}.1.new")
        os.rename(living, other)
        assert sorted(tmp_path.iterdir()) == [other]
        build_collection(target, np.eye(70, dtype=np.float32))
        assert sorted(tmp_path.iterdir()) == sorted([other, target])
        shutil.rmtree(target)
        os.rename(other, living)
    assert list(tmp_path.iterdir()) == [target]


def check_steps(path: Path, seed: int, said: list[str], engine: str) -> None:
    started = sum(1 for line in said if line.startswith("start"))
    done = sum(1 for line in said if line.startswith("done"))
    collection = check_reopened(path, engine)
    found = contents(collection)
    # The step that was under way may have been committed or not, but never in part.
    assert found in (model_after(seed, done), model_after(seed, started))
    collection.merge(full=True)
    assert contents(collection) == found
    assert collection.count == len(found)
    scores = collection.search(np.zeros(writer.DIM) + 1, 1000)
    if engine != "brute":  # Its scores may come from codes; who is there was compared above.
        collection.close()
        return
    for value, score in zip(scores.ids.tolist(), scores.scores.tolist(), strict=True):
        if not np.isnan(score):
            assert score == pytest.approx(((np.array(found[value][0]) - 1) ** 2).sum(), rel=1e-3)
    collection.close()


@pytest.mark.parametrize("name", FAILPOINTS)
@pytest.mark.parametrize("times", [1, 3])
def test_death_at_each_named_place_loses_and_doubles_nothing(
    tmp_path: Path, name: str, times: int
) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=writer.DIM, metric="l2")
    seed = 100 + times
    process = start(path, seed, engine="brute", writers=1, failpoint=f"{name}:{times}")
    said = kill_after(process, lines=-1)
    assert process.returncode == -signal.SIGKILL, f"the writer never came to {name}"
    check_steps(path, seed, said, "brute")


@pytest.mark.parametrize("seed", range(6))
def test_death_at_a_random_moment_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=writer.DIM, metric="l2")
    lines = int(np.random.default_rng(seed).integers(2, 2 * STEPS))
    process = start(path, seed, engine="brute", writers=1)
    check_steps(path, seed, kill_after(process, lines), "brute")


@pytest.mark.parametrize("seed", range(3))
def test_death_among_writers_that_share_commits(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=writer.DIM, metric="l2")
    lines = int(np.random.default_rng(seed).integers(20, 3 * STEPS))
    process = start(path, seed, engine="brute", writers=4)
    said = kill_after(process, lines)
    answered = {int(line.split()[1]) for line in said if line.startswith("done")}
    assert len(answered) >= lines - 1
    collection = check_reopened(path, "brute")
    hits = collection.search(np.ones(writer.DIM), 1000)
    ids = hits.ids[~np.isnan(hits.scores)].tolist()
    assert len(set(ids)) == len(ids) == collection.count
    assert answered <= set(ids)
    # Each of the four may have had one more commit whose answer nobody heard.
    assert len(ids) <= len(answered) + 4
    collection.close()


def test_death_with_native_segments(tmp_path: Path) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=writer.DIM, metric="l2")
    process = start(path, 7, engine="native", writers=1, failpoint="merge.before_current:4")
    said = kill_after(process, lines=-1)
    assert process.returncode == -signal.SIGKILL
    check_steps(path, 7, said, "native")


@pytest.mark.parametrize("lines", [9, 30])
def test_a_building_process_does_not_outlive_its_writer(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "c"
    create_collection(path, dim=writer.DIM, metric="l2")
    process = start(path, 11, engine="apart", writers=1)
    said: list[str] = []
    children: set[psutil.Process] = set()
    for line in process.stdout:
        said.append(line.strip())
        children.update(psutil.Process(process.pid).children() if len(said) <= lines else ())
        if len(said) == lines:
            process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    check_steps(path, 11, said, "apart")
