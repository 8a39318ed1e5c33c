"""The demo's traffic: searches, their events through the log, and the heat that comes of them.

The events take the real way: encoded, appended durably to the embedded log or to Kafka, read back
by the consumer loop that a server runs, applied to the heat graph, saved with their offsets.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UnavailableError
from stoker.kernels._core import EventBatch
from stoker.prefetch.event_batch import ROW_READY
from stoker.prefetch.events import Event
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.consume import ConsumeLoop
from stoker.service.dead_letters import DeadLetters
from stoker.service.demo.options import DemoOptions
from stoker.service.demo.prepare import Prepared
from stoker.service.demo.screen import Report
from stoker.service.event_wiring import consumer_group, open_event_log
from stoker.service.heat_sink import HeatSink
from stoker.service.padding import exact_top
from stoker.service.publisher import Publisher
from stoker.service.settings import ServiceSettings
from stoker.service.traffic import Questions, Traffic

K = 10
# How sure of its ranking a search must be before it answers without reading more. Measured on this
# corpus, reads below 0.96 change no answer: recall@10 is the same from 0.80 to 0.95, the default.
RECALL_TARGET = 0.95
_RECALL_AIM = 0.985
KAFKA_TOPIC = "stoker.demo.events.v1"
_EFS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768)
_EF_QUERIES = 200
_PUBLISH_VISITS = 50
_CATCH_UP_S = 60.0
_HEAT_NAME = "heat.snapshot"


@dataclasses.dataclass(frozen=True)
class Driven:
    """What the traffic left behind.

    Attributes:
        heat_path: The snapshot: heat and offsets as one.
        demand: Chunk id to decayed demand.
        used: Events of used results among ``events``.
    """

    heat_path: Path
    searches: int
    events: int
    used: int
    distinct_chunks: int
    log: str
    demand: dict[str, float]


def choose_ef(index: Any, traffic: Traffic, prepared: Prepared) -> tuple[int, float]:
    """Choose the search width: the narrowest that finds 0.985 of the exact top 10.

    Measured on a fully loaded index, with questions of another seed than the measured ones. An
    index calibrates itself on its own rows; questions lie further from the documents than those,
    and need a wider walk.

    Returns:
        (ef, recall@10 of that sample); the widest where none reaches the aim.
    """
    queries = traffic.vectors(traffic.draw(_EF_QUERIES), prepared.wordings)
    truth = exact_top(prepared.vectors, queries, K)
    recall = 0.0
    for ef in _EFS:
        found = index.search(queries, K, ef=ef, recall_target=RECALL_TARGET).ids
        shares = [
            len(set(got.tolist()) & {prepared.ids[row] for row in rows}) / K
            for got, rows in zip(found, truth, strict=True)
        ]
        recall = float(np.mean(shares))
        if recall >= _RECALL_AIM:
            return ef, recall
    return _EFS[-1], recall


def drive(
    index: Any,
    traffic: Traffic,
    questions: Questions,
    wordings: NDArray[np.float32],
    options: DemoOptions,
    *,
    ef: int,
    state_dir: Path,
    progress: Report,
) -> Driven:
    """Run the traffic against an open index and bring its events into the heat.

    Args:
        state_dir: Emptied first: the demo's heat is this run's traffic and nothing older.

    Raises:
        UnavailableError: the log is away, or the events did not come back in time.
        ConfigError: a broker's topic does not fit.
    """
    shutil.rmtree(state_dir, ignore_errors=True)
    state_dir.mkdir(parents=True)
    settings = ServiceSettings()
    if options.kafka:
        settings = ServiceSettings(
            event_log="kafka", kafka_bootstrap=options.kafka, event_topic=KAFKA_TOPIC
        )
    run = uuid.uuid4().hex[:8]
    visits = traffic.draw(options.searches)
    vectors = traffic.vectors(visits, wordings)
    texts = questions.texts
    log = open_event_log(settings, state_dir)
    try:
        publisher = Publisher(log, topic=settings.event_topic, threads=False)
        start_s = time.time() - traffic.settings.span_s
        count = used = 0
        chunks: set[str] = set()
        waiting: list[Event] = []
        for place, (visit, vector) in enumerate(zip(visits, vectors, strict=True)):
            hits = index.search(vector, K, ef=ef, recall_target=RECALL_TARGET)
            found = hits.ids.tolist()
            chunks.update(found)
            made = traffic.events(
                visit,
                found,
                text=texts[visit.wording],
                start_s=start_s,
                window=len(visits),
                run=run,
            )
            used += len(made) - 1
            count += len(made)
            waiting += made
            if (place + 1) % _PUBLISH_VISITS == 0 or place + 1 == len(visits):
                publisher.publish(waiting)
                waiting = []
                progress(place + 1, len(visits))
        publisher.close()
        loop = ConsumeLoop(
            log,
            settings.event_topic,
            consumer_group(settings, state_dir),
            open_sink=lambda snapshot: _CountingSink(_graph(snapshot), run),
            snapshot_path=state_dir / _HEAT_NAME,
            dead_letters=DeadLetters(log),
        )
        sink = _catch_up(loop, count)
    finally:
        log.close()
    now = time.time()
    return Driven(
        heat_path=state_dir / _HEAT_NAME,
        searches=len(visits),
        events=count,
        used=used,
        distinct_chunks=len(chunks),
        log=f"Kafka at {options.kafka}" if options.kafka else "the embedded log",
        demand={key[1]: weight for key, weight in sink.demand(now).items()},
    )


class _CountingSink(HeatSink):
    """The heat, with a count of this run's events: a broker may hold those of earlier runs."""

    def __init__(self, graph: HeatGraph, run: str) -> None:
        super().__init__(graph)
        self._run = run
        self.own_count = 0

    def apply_batch(
        self, batch: EventBatch, /, *, arrived_s: NDArray[np.float64] | None = None
    ) -> None:
        super().apply_batch(batch, arrived_s=arrived_s)
        rows = np.flatnonzero(batch.states() == ROW_READY).tolist()
        self.own_count += sum(batch.values(row)[2].startswith(self._run) for row in rows)


def _graph(snapshot: bytes | None) -> HeatGraph:
    settings = PrefetchSettings()
    return HeatGraph(settings) if snapshot is None else HeatGraph.from_snapshot(snapshot, settings)


def _catch_up(loop: ConsumeLoop, count: int) -> _CountingSink:
    """Read until all of this run's events have reached the heat; saves heat and offsets."""
    sink = loop.sink
    assert isinstance(sink, _CountingSink)
    end_s = time.monotonic() + _CATCH_UP_S
    try:
        while sink.own_count < count:
            loop.step(0.2)
            if time.monotonic() > end_s:
                raise UnavailableError(
                    f"{sink.own_count} of {count} events came back from the log within"
                    f" {_CATCH_UP_S:.0f} s; the broker is slow or the topic is not readable"
                )
        sink.tick(time.time())
        loop.save()
    finally:
        loop.close()
    return sink
