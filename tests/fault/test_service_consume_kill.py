"""kill -9 on the consumer loop: the heat equals that of a run that was never stopped."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from stoker.prefetch.events import (
    DOCUMENT_DELETED,
    RESULT_USED,
    SEARCH_PERFORMED,
    encode,
    new_event,
)
from stoker.prefetch.events import partition_key as key_of
from stoker.prefetch.snapshot import unpack
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.snapshot_file import read_snapshot
from stoker.service.streams import TopicSpec

SUPERVISOR = Path(__file__).with_name("supervise_consume.py")


def make_log(path: Path, seed: int) -> tuple[int, int]:
    """Write a log with duplicates and poison; returns (distinct events, poisoned records)."""
    chance = random.Random(seed)
    entries: list[tuple[bytes, bytes | None]] = []
    count = 2500
    for i in range(count):
        kind = chance.choices([SEARCH_PERFORMED, RESULT_USED, DOCUMENT_DELETED], [8, 3, 1])[0]
        event = new_event(
            kind,
            tenant=f"t{chance.randrange(2)}",
            session=f"s{chance.randrange(12)}",
            chunk_ids=[f"c{chance.randrange(60)}" for _ in range(chance.randint(1, 5))],
            time_s=1.7e9 - 5000 + i + chance.uniform(-20, 0),
            event_id=f"e{i}",
        )
        entries.append((key_of(event), encode(event)))
        if chance.random() < 0.1:
            entries.append(chance.choice(entries))
    poisoned = 0
    for at in sorted(chance.sample(range(len(entries)), 15), reverse=True):
        entries.insert(at, (b"bad", b"poison %d" % at))
        poisoned += 1
    log = EmbeddedLog(path)
    log.ensure_topic(TopicSpec("t", partition_count=4, retention_s=None))
    log.ensure_topic(TopicSpec("dead", partition_count=1, retention_s=None))
    log.append_batch("t", entries)
    log.close()
    return count, poisoned


def consume(path: Path, snapshot: Path, seed: int, kills: int) -> int:
    done = subprocess.run(
        [sys.executable, str(SUPERVISOR), str(path), str(snapshot), str(seed), str(kills)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def ids_of(header: dict[str, Any]) -> list[int]:
    _, arrays = unpack("event ids 1", header["seen"])
    found: list[int] = arrays["fingerprints"].tolist()
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_state_after_random_kills_equals_an_uninterrupted_run(tmp_path: Path, seed: int) -> None:
    results = []
    for kills in (0, 25):
        path = tmp_path / f"log{kills}"
        count, poisoned = make_log(path, seed)
        snapshot = tmp_path / f"heat{kills}"
        killed = consume(path, snapshot, seed, kills)
        assert killed >= kills * 0.3, "the failpoints were hardly reached"
        found = read_snapshot(snapshot)
        assert found is not None
        results.append(found)
        log = EmbeddedLog(path)
        log.check()
        letters = [orjson.loads(r.value or b"") for r in log.topic("dead").scan(0)]
        # Written at least once, and the same record always under the same id.
        assert len({letter["id"] for letter in letters}) == poisoned
        log.close()
        assert len(ids_of(found[0])) == count
    (header, heat_bytes), (header_killed, heat_bytes_killed) = results
    assert heat_bytes_killed == heat_bytes, "the heat is not the same, byte for byte"
    assert header_killed["offsets"] == header["offsets"]
    assert sorted(ids_of(header_killed)) == sorted(ids_of(header))
