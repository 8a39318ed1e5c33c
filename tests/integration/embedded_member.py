"""One member of a consumer group of the embedded log, in a process of its own.

Usage: embedded_member.py FOLDER SNAPSHOT LEASE_S. Prints "ready" once it holds some but not all
partitions, then the ids that it applies, one batch a line, before it commits them; when a line
comes on standard input it reads on until nothing is left, and leaves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import orjson
import structlog

from stoker.prefetch.events import Event
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class Tell:
    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        sys.stdout.write(orjson.dumps([event.id for event in events]).decode() + "\n")
        sys.stdout.flush()

    def to_snapshot(self) -> bytes:
        return b""


def main() -> None:
    log = EmbeddedLog(sys.argv[1], EmbeddedOptions(lease_s=float(sys.argv[3]), heartbeat_s=0.1))
    loop = ConsumeLoop(
        log,
        "t",
        "g",
        open_sink=lambda _: Tell(),
        snapshot_path=Path(sys.argv[2]),
        options=ConsumeOptions(shared=True, batch_events_max=20, snapshot_events=60),
    )
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    ready = False
    quiet = 0
    while quiet < 30:
        count = loop.step(0.1)
        if not ready and 0 < len(loop.partitions) < 6:
            ready = True
            print("ready", flush=True)
        quiet = quiet + 1 if told.is_set() and count == 0 else 0
    loop.close()
    log.close()


main()
