"""One member of a consumer group in a process of its own; prints the ids that it applied.

Usage: kafka_member.py CLIENT BOOTSTRAP TOPIC. Prints "ready" once it holds partitions; when a line
comes on standard input, reads on until nothing is left in its partitions, and leaves.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import orjson
import structlog

from stoker.prefetch.events import Event
from stoker.service.consume import ConsumeLoop, ConsumeOptions
from stoker.service.kafka_options import KafkaOptions

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class Keep:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        self.ids += [event.id for event in events]

    def to_snapshot(self) -> bytes:
        return orjson.dumps(self.ids)


def main() -> None:
    client, bootstrap, topic = sys.argv[1:]
    if client == "confluent":
        from stoker.service.confluent_log import ConfluentLog as Log
    else:
        from stoker.service.kafka_log import KafkaLog as Log
    log = Log(KafkaOptions(bootstrap, session_timeout_s=6.0))
    sink = Keep()
    # Shared: what the other member read is in its state, not in ours.
    options = ConsumeOptions(shared=True, snapshot_events=100, batch_events_max=50)
    loop = ConsumeLoop(
        log, topic, "shared", open_sink=lambda _: sink, snapshot_path=None, options=options
    )
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    ready = False
    quiet = 0
    end_s = time.monotonic() + 50.0
    while quiet < 5 and time.monotonic() < end_s:
        count = loop.step(0.2)
        if not ready and 0 < len(loop.partitions) < 6:
            ready = True
            print("ready", flush=True)
        quiet = quiet + 1 if told.is_set() and count == 0 else 0
    loop.close()
    log.close()
    print(orjson.dumps(sink.ids).decode(), flush=True)


main()
