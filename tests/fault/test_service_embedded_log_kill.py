"""kill -9 on writers of the embedded log: everything acknowledged is there, in order, once."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.service.embedded_log import EmbeddedLog
from stoker.service.streams import TopicSpec

CHILD = Path(__file__).with_name("child_append.py")
NAMES = ("a", "b")


def start(folder: Path, name: str, batch: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(folder), name, str(batch)],
        stdout=subprocess.PIPE,
        text=True,
    )


def numbers_of(folder: Path, name: str) -> list[int]:
    """The numbers that a writer's records carry, in the order of the log."""
    log = EmbeddedLog(folder)
    log.check()
    topic = log.topic("t")
    partition = topic.partition_of(name.encode())
    records = [r for r in topic.scan(partition) if r.key == name.encode()]
    offsets = [r.offset for r in topic.scan(partition)]
    assert offsets == list(range(len(offsets)))
    log.close()
    values = [(r.value or b"").split() for r in records]
    assert all(len(v[2]) == 300 for v in values), "a torn record"
    return [int(v[1]) for v in values]


@pytest.mark.parametrize("seed", range(4))
def test_two_writers_killed_at_random_points_lose_nothing_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    log = EmbeddedLog(tmp_path)
    log.ensure_topic(TopicSpec("t", partition_count=2))
    log.close()
    batch = chance.choice([1, 7, 60])
    children = {name: start(tmp_path, name, batch) for name in NAMES}
    acknowledged = dict.fromkeys(NAMES, 0)
    try:
        for name, child in children.items():
            # Killed while it writes: after a random number of acknowledgements.
            assert child.stdout is not None
            for _ in range(chance.randint(1, 25)):
                acknowledged[name] = int(child.stdout.readline())
            child.kill()
            # What it printed before it died counts as well.
            for line in child.stdout.read().splitlines(keepends=True):
                if line.endswith("\n"):
                    acknowledged[name] = int(line)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    for name in NAMES:
        numbers = numbers_of(tmp_path, name)
        assert numbers == list(range(len(numbers))), "out of order, twice, or with a gap"
        assert len(numbers) >= acknowledged[name]
        assert len(numbers) % batch == 0, "a batch is there in part"


def test_a_torn_tail_is_cut_and_the_rest_stands(tmp_path: Path) -> None:
    """The files as a power cut could leave them: the last writes torn at every length."""
    source = tmp_path / "source"
    log = EmbeddedLog(source)
    log.ensure_topic(TopicSpec("t", partition_count=1))
    for i in range(20):
        log.append("t", b"k", [b"k %d %s" % (i, b"." * 300)])
    wal = (source / "t.sqlite-wal").read_bytes()
    assert len(wal) > 20 * 300
    seen = set()
    for step, cut in enumerate(range(len(wal), 0, -len(wal) // 40)):
        copy = tmp_path / f"copy{step}"
        copy.mkdir()
        shutil.copy(source / "t.sqlite", copy / "t.sqlite")
        garbage = random.Random(step).randbytes(700) if step % 2 else b""
        (copy / "t.sqlite-wal").write_bytes(wal[:cut] + garbage)
        numbers = numbers_of_single(copy)
        assert numbers == list(range(len(numbers)))
        seen.add(len(numbers))
    assert 20 in seen
    assert min(seen) < 20
    log.close()


def numbers_of_single(folder: Path) -> list[int]:
    log = EmbeddedLog(folder)
    log.check()
    values = [(r.value or b"").split() for r in log.topic("t").scan(0)]
    log.append("t", b"k", [b"k %d %s" % (len(values), b"." * 300)])  # it can be written again
    log.check()
    log.close()
    return [int(v[1]) for v in values]


def test_a_full_disk_refuses_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    script = Path(__file__).with_name("child_full_disk.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(400_000)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    acknowledged, failure = done.stdout.splitlines()
    assert failure.startswith(("LogFull", "LogUnavailable"))
    assert "t.sqlite" in failure
    log = EmbeddedLog(tmp_path)
    log.check()
    numbers = [int((r.value or b"").split()[0]) for r in log.topic("t").scan(0)]
    log.close()
    assert numbers == list(range(int(acknowledged)))
    assert len(numbers) > 10
