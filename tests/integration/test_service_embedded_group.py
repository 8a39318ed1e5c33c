"""Processes that share an embedded log: appenders, members of a group, and one that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson

from stoker.prefetch.events import RESULT_USED, encode, new_event
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.streams import TopicSpec

MEMBER = Path(__file__).with_name("embedded_member.py")
PARTITIONS = 6


def entries(start: int, stop: int) -> list[tuple[bytes, bytes]]:
    return [
        (
            b"k%d" % (i % 40),
            encode(
                new_event(
                    RESULT_USED,
                    tenant="t",
                    chunk_ids=["c"],
                    time_s=1.7e9,
                    event_id=f"e{i:05d}",
                )
            ),
        )
        for i in range(start, stop)
    ]


def member(folder: Path, name: str, lease_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(MEMBER), str(folder / "log"), str(folder / name), str(lease_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def until_ready(child: subprocess.Popen[str]) -> list[str]:
    """Read what it applies until it shares the partitions with another one."""
    assert child.stdout is not None
    seen: list[str] = []
    while (line := child.stdout.readline()) != "ready\n":
        assert line, "the member ended early"
        seen += orjson.loads(line)
    return seen


def rest_of(child: subprocess.Popen[str], text: str | None = None) -> str:
    """Say `text` to it, if any, and return what it still prints.

    Through the same reader as before: `communicate` would read past what that one holds already.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    if text is not None:
        child.stdin.write(text)
    child.stdin.close()
    with child.stdout:
        out = child.stdout.read()
    child.wait(60)
    return out


def ids_in(text: str) -> list[str]:
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("]\n")]
    return [event_id for line in lines for event_id in orjson.loads(line)]


def open_log(folder: Path) -> EmbeddedLog:
    log = EmbeddedLog(folder / "log")
    log.ensure_topic(TopicSpec("t", partition_count=PARTITIONS, retention_s=None))
    return log


def test_two_members_apply_everything_once(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append_batch("t", entries(0, 1000))
    # Longer than any stall of a busy machine: who loses its lease applies again what it had not
    # committed, as it should, and this test is of members that keep theirs.
    children = [member(tmp_path, name, 60.0) for name in ("one", "two")]
    try:
        seen = [until_ready(child) for child in children]
        log.append_batch("t", entries(1000, 2000))
        for ids, child in zip(seen, children, strict=True):
            ids += ids_in(rest_of(child, "stop\n"))
            assert child.returncode == 0
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    assert sorted(seen[0] + seen[1]) == [f"e{i:05d}" for i in range(2000)]
    assert all(seen)
    log.check()
    log.close()


def test_a_killed_member_s_partitions_go_to_the_other_and_nothing_is_missed(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append_batch("t", entries(0, 1000))
    children = [member(tmp_path, name, 2.0) for name in ("one", "two")]
    try:
        seen = [until_ready(child) for child in children]
        log.append_batch("t", entries(1000, 2000))
        victim, survivor = children
        assert victim.stdout is not None
        victim.kill()  # somewhere between applying and committing
        seen[0] += ids_in(rest_of(victim))
        seen[1] += ids_in(rest_of(survivor, "stop\n"))
        assert survivor.returncode == 0
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    # What the victim had applied and not saved died with it, and was read again by the other.
    assert set(seen[0]) | set(seen[1]) == {f"e{i:05d}" for i in range(2000)}
    assert len(seen[1]) == len(set(seen[1])), "the survivor applied an event twice"
    log.check()
    log.close()
