"""How many events per second go through decode and heat: from memory, the embedded log, Kafka.

    python tests/bench/bench_streams.py
    python tests/bench/bench_streams.py --events 300000 --kafka HOST:PORT

Each source is measured as raw bytes first (its own ceiling), then through the consumer loop into
the heat graph. Rates are given per second of wall clock and per second of CPU time of this process
(all its threads); on a busy machine the latter is the steadier one. Last, the heat is published to
a compacted topic, and a new replica starts from it. Without --kafka the script
starts Apache Kafka as the tests do, on this machine, where it takes CPU time of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import random
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.kernels._core import EventBatch
from stoker.prefetch.event_batch import decode_batch
from stoker.prefetch.events import (
    RESULT_USED,
    SEARCH_PERFORMED,
    Event,
    decode,
    encode,
    new_event,
    partition_key,
)
from stoker.prefetch.heat import HeatGraph
from stoker.service.consume import ConsumeLoop, ConsumeOptions, Sink
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.heat_topic import HeatPublisher, read_heat
from stoker.service.kafka_options import KafkaOptions
from stoker.service.streams import EventLog, TopicSpec

BATCH = 2_000
CHUNKS = 10
Entry = tuple[bytes, bytes]


@dataclasses.dataclass
class Row:
    """One measurement."""

    name: str
    events: int
    wall_s: float
    cpu_s: float

    def line(self) -> str:
        return (
            f"{self.name:<58}{self.events / self.wall_s:>12,.0f}{self.events / self.cpu_s:>14,.0f}"
        )


class Bench:
    """Collects rows."""

    def __init__(self, events: int, seed: int) -> None:
        self.entries = make_entries(events, seed)
        self.rows: list[Row] = []
        self.digests: list[str] = []
        self.starts: list[dict[str, Any]] = []

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        took_s, used_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        self.rows.append(Row(name, len(self.entries), took_s, max(used_s, 1e-9)))

    def memory(self) -> None:
        payloads = [payload for _, payload in self.entries]
        with self.measured("memory: decode, an object per event"):
            for payload in payloads:
                decode(payload)
        with self.measured("memory: decode, columns"):
            for at in range(0, len(payloads), BATCH):
                decode_batch(payloads[at : at + BATCH])
        graph = HeatGraph()
        with self.measured("memory: decode, heat"):
            for at in range(0, len(payloads), BATCH):
                batch, _ = decode_batch(payloads[at : at + BATCH])
                graph.apply_batch(batch)
        self.digests.append(hashlib.sha256(graph.to_snapshot()).hexdigest())

    def log(self, name: str, log: EventLog, topic: str, folder: Path) -> None:
        """Measure append, poll, and the whole loop on one log."""
        log.ensure_topic(TopicSpec(topic, partition_count=1, retention_s=None))
        with self.measured(f"{name}: append, durable, batches of {BATCH}"):
            for at in range(0, len(self.entries), BATCH):
                log.append_batch(topic, self.entries[at : at + BATCH])
        consumer = log.consumer(topic, f"raw-{uuid.uuid4().hex[:6]}")
        first = consumer.poll(1, 30.0)
        with self.measured(f"{name}: poll, raw bytes"):
            count = len(first)
            while count < len(self.entries):
                count += len(consumer.poll(BATCH, 30.0))
        consumer.close()
        self.loop(f"{name}: poll, decode, deduplicate", log, topic, folder, Nothing())
        graph = HeatGraph()
        saved = self.loop(f"{name}: poll, decode, deduplicate, heat", log, topic, folder, graph)
        self.digests.append(hashlib.sha256(graph.to_snapshot()).hexdigest())
        self.start(name, log, topic, saved, graph)

    def start(self, name: str, log: EventLog, topic: str, saved: Path, graph: HeatGraph) -> None:
        """Publish the heat to a compacted topic, and start a new replica from it."""
        heat_topic = f"{topic}.heat"
        publisher = HeatPublisher(
            log, topic=heat_topic, publisher="bench", snapshot_path=saved, every_s=0.0
        )
        began_s = time.perf_counter()
        while not publisher.step(0.5):
            pass
        published_s = time.perf_counter()
        publisher.close()
        took_s, used_s = time.perf_counter(), time.process_time()
        found = read_heat(log, heat_topic, event_topic=topic)
        assert found is not None
        replica = HeatGraph.from_snapshot(found[1])
        self.starts.append(
            {
                "name": name,
                "keys": replica.key_count,
                "bytes": len(found[1]),
                "publish_s": published_s - began_s,
                "start_s": time.perf_counter() - took_s,
                "start_cpu_s": time.process_time() - used_s,
            }
        )
        assert replica.to_snapshot() == graph.to_snapshot()

    def loop(self, name: str, log: EventLog, topic: str, folder: Path, sink: Sink) -> Path:
        """Measure the consumer loop with one sink; returns its snapshot's path."""
        group = f"loop-{uuid.uuid4().hex[:6]}"
        loop = ConsumeLoop(
            log,
            topic,
            group,
            open_sink=lambda _: sink,
            snapshot_path=folder / group,
            options=ConsumeOptions(batch_events_max=BATCH, snapshot_s=1e9, snapshot_events=10**9),
        )
        while loop.step(5.0) == 0:
            pass
        before = loop.stats().events
        with self.measured(name):
            while loop.stats().events < len(self.entries):
                loop.step(30.0)
        self.rows[-1].events -= before
        loop.close()
        return folder / group

    def kafka_ceilings(self, bootstrap: str, client: str, topic: str) -> None:
        """Measure what the client itself does with raw bytes, with settings like ours."""
        produce, consume = (
            (confluent_produce, confluent_consume)
            if client == "confluent"
            else (python_produce, python_consume)
        )
        with self.measured(f"{client} alone: produce, raw bytes"):
            produce(bootstrap, topic, self.entries)
        with self.measured(f"{client} alone: consume, raw bytes"):
            consume(bootstrap, topic, len(self.entries))


class Nothing:
    """A sink that does nothing: what is left is the stream's own cost."""

    def apply(
        self, events: Sequence[Event], /, *, arrived_s: Sequence[float] | None = None
    ) -> None:
        pass

    def apply_batch(
        self, batch: EventBatch, /, *, arrived_s: NDArray[np.float64] | None = None
    ) -> None:
        pass

    def to_snapshot(self) -> bytes:
        return b""


def make_entries(count: int, seed: int) -> list[Entry]:
    """Make sessions over 50,000 chunks of skewed popularity: four searches, then a used result."""
    chance = random.Random(seed)
    entries = []
    for i in range(count):
        used = i % 5 == 4
        event: Event = new_event(
            RESULT_USED if used else SEARCH_PERFORMED,
            tenant="acme",
            session=f"s{i // 5}",
            query=None if used else "how do I open a zip file that has a password?",
            chunk_ids=[
                f"zipfile.ZipFile#{int(50_000 ** chance.random())}"
                for _ in range(1 if used else CHUNKS)
            ],
            time_s=1.7e9 + i * 0.01,
            event_id=f"{i:032x}",
        )
        entries.append((partition_key(event), encode(event)))
    return entries


def python_produce(bootstrap: str, topic: str, entries: Sequence[Entry]) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap, acks="all", compression_type="lz4", linger_ms=5,
        batch_size=256 << 10,
    )  # fmt: skip
    for key, value in entries:
        producer.send(topic, value=value, key=key)
    producer.flush()
    producer.close()


def python_consume(bootstrap: str, topic: str, count: int) -> None:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest",
        max_partition_fetch_bytes=8 << 20, fetch_max_wait_ms=100,
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, 0)])
    while count > 0:
        batches = consumer.poll(timeout_ms=30_000, max_records=BATCH)
        count -= sum(len(batch) for batch in batches.values())
    consumer.close()


def confluent_produce(bootstrap: str, topic: str, entries: Sequence[Entry]) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": bootstrap, "acks": "all", "compression.type": "lz4", "linger.ms": 5}
    )
    for key, value in entries:
        while True:
            try:
                producer.produce(topic, value=value, key=key)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def confluent_consume(bootstrap: str, topic: str, count: int) -> None:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    while count > 0:
        count -= len(consumer.consume(1, 30.0)) + len(consumer.consume(BATCH - 1, 0))
    consumer.close()


def open_client(client: str, bootstrap: str) -> EventLog:
    if client == "confluent":
        from stoker.service.confluent_log import ConfluentLog

        return ConfluentLog(KafkaOptions(bootstrap))
    from stoker.service.kafka_log import KafkaLog

    return KafkaLog(KafkaOptions(bootstrap))


@contextmanager
def running_broker(given: str | None, folder: Path) -> Iterator[tuple[str, str] | None]:
    """Yield (name, bootstrap) of the cluster, or None where there can be none."""
    if given:
        yield f"the cluster at {given}", given
        return
    path = Path(__file__).resolve().parents[1] / "kafka_broker.py"
    spec = importlib.util.spec_from_file_location("kafka_broker", path)
    assert spec is not None
    assert spec.loader is not None
    harness: Any = sys.modules.setdefault("kafka_broker", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(harness)
    try:
        broker = harness.start_broker(folder, in_ci=False)
    except harness.BrokerUnavailable as error:
        print(f"no broker, so no rates of Kafka: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield broker.name, broker.bootstrap
    finally:
        broker.stop()


def run(events: int, *, seed: int, kafka: str | None, with_kafka: bool) -> dict[str, Any]:
    """Measure everything; the report holds the rows and what they were measured on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    bench = Bench(events, seed)
    broker_name = None
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        bench.memory()
        log = EmbeddedLog(folder / "log")
        bench.log("embedded log", log, "bench", folder)
        log.close()
        if with_kafka:
            with running_broker(kafka, folder) as broker:
                if broker is not None:
                    broker_name, bootstrap = broker
                    for client in clients():
                        topic = f"bench.{uuid.uuid4().hex[:8]}"
                        kafka_log = open_client(client, bootstrap)
                        bench.log(f"Kafka by {client}", kafka_log, topic, folder)
                        spec = TopicSpec(f"{topic}.raw", partition_count=1, retention_s=None)
                        kafka_log.ensure_topic(spec)
                        kafka_log.close()
                        bench.kafka_ceilings(bootstrap, client, f"{topic}.raw")
    assert len(set(bench.digests)) == 1, "the heat differs by where the events came from"
    return {
        "events": events,
        "seed": seed,
        "bytes_mean": sum(len(value) for _, value in bench.entries) / events,
        "broker": broker_name,
        "rows": [dataclasses.asdict(row) for row in bench.rows],
        "lines": [row.line() for row in bench.rows],
        "starts": bench.starts,
        "state_sha256": bench.digests[0],
    }


def clients() -> list[str]:
    """Return the clients that are installed."""
    found = ["kafka-python"]
    if importlib.util.find_spec("confluent_kafka") is not None:
        found.append("confluent")
    return found


def render(report: dict[str, Any]) -> str:
    """Write the report for people."""
    head = f"{'':<58}{'per second':>12}{'per CPU s':>14}"
    return "\n".join(
        [
            f"{report['events']:,} events of {report['bytes_mean']:.0f} bytes: four searches with "
            f"{CHUNKS} chunks, then a used result",
            f"machine: {platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, "
            f"Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}",
            f"broker: {report['broker'] or 'none'}",
            f"command: {shlex.join(sys.argv)}",
            head,
            *report["lines"],
            *(
                f"{start['name']}: heat topic published in {start['publish_s']:.2f} s (with "
                f"joining its group), a new replica starts from it in {start['start_s']:.2f} s "
                f"({start['start_cpu_s']:.2f} of CPU): {start['keys']:,} keys, "
                f"{start['bytes'] / (1 << 20):.0f} MiB"
                for start in report["starts"]
            ),
            f"state sha256 {report['state_sha256'][:16]}, the same from every source",
        ]
    )


def main(show: Callable[[str], None] = print) -> None:
    """Parse the flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="use this cluster")
    parser.add_argument("--no-kafka", action="store_true", help="only memory and embedded log")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    report = run(args.events, seed=args.seed, kafka=args.kafka, with_kafka=not args.no_kafka)
    show(json.dumps(report, indent=2) if args.json else render(report))


if __name__ == "__main__":
    main()
