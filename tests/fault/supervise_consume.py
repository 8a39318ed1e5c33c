"""Run the consumer loop to the end of a log, killed at a failpoint again and again.

Usage: supervise_consume.py LOG SNAPSHOT SEED KILLS. Each attempt is a forked process that dies by
SIGKILL at the n-th of the failpoints that it passes, n drawn by the seed; after KILLS attempts one
runs to the end. Prints the number of attempts that were killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from stoker.prefetch.heat import HeatGraph
from stoker.service import consume, whole_file
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.dead_letters import DeadLetters
from stoker.service.embedded_group import EmbeddedConsumer
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions

structlog.configure(logger_factory=structlog.ReturnLoggerFactory())


def die_at(count: int) -> None:
    """Die before or after the count-th of the steps that change what is on the disk."""
    left = count

    def passing() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            passing()
            result = function(*args, **kwargs)
            passing()
            return result

        return wrapped

    whole_file.os = _Os(around(os.fsync), around(os.replace))  # type: ignore[assignment]
    consume.write_snapshot = around(consume.write_snapshot)
    EmbeddedConsumer.commit = around(EmbeddedConsumer.commit)  # type: ignore[method-assign]
    DeadLetters.flush = around(DeadLetters.flush)  # type: ignore[method-assign]
    HeatGraph.apply_batch = around(HeatGraph.apply_batch)  # type: ignore[method-assign]


class _Os:
    """The `os` that the snapshot file sees."""

    def __init__(self, fsync: Callable[..., Any], replace: Callable[..., Any]) -> None:
        self.fsync = fsync
        self.replace = replace

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def run(log_path: Path, snapshot: Path, attempt: int) -> None:
    # Each attempt comes after the last one's lease has run out.
    log = EmbeddedLog(log_path, EmbeddedOptions(monotonic=lambda: 1e6 + 100.0 * attempt))
    loop = ConsumeLoop(
        log,
        "t",
        "g",
        open_sink=lambda body: HeatGraph() if body is None else HeatGraph.from_snapshot(body),
        snapshot_path=snapshot,
        dead_letters=DeadLetters(log, topic="dead", clock=lambda: 1.7e9),
        options=ConsumeOptions(batch_events_max=40, snapshot_events=100, dedup_seed=7),
        clock=lambda: 1.7e9,
    )
    while loop.step(0.0):
        pass
    loop.close()
    log.close()


def main() -> None:
    log_path, snapshot = Path(sys.argv[1]), Path(sys.argv[2])
    seed, kills = int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    killed = 0
    for attempt in range(kills + 1):
        count = chance.randint(1, 35)
        child = os.fork()
        if child == 0:
            if attempt < kills:
                die_at(count)
            run(log_path, snapshot, attempt)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status):
            sys.exit(1)
    print(killed)


main()
