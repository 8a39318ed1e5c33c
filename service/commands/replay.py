"""`stoker replay`: recorded events through the live path, or against a running server."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import ConfigError, InputError
from stoker.service.configuration import add_config_flags, config_from_args

if TYPE_CHECKING:
    from stoker.prefetch.heat import HeatGraph
    from stoker.service.replay_source import Occurrence
    from stoker.service.streams import EventLog

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PROGRESS_EVERY = 20_000


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "replay",
        help="replay recorded events into a heat graph, or against a server",
        description="Feeds a recording through the same code that runs live: an event log, the "
        "consumer loop, the heat graph, all on a virtual clock that shows the recording's time. "
        "With --kafka the log is a Kafka topic; with --url the recorded searches are sent to a "
        "running server instead, at their recorded times.",
        epilog="examples: stoker replay events.jsonl.gz; "
        "stoker replay state/events --until 2h --json; "
        "stoker replay ragpulse/ --speed 3600x --url http://127.0.0.1:8080",
    )
    parser.add_argument(
        "log",
        metavar="LOG",
        type=Path,
        help="JSONL file of events (.gz and .xz too), folder of an embedded log, or a RAGPulse "
        "trace (its folder or file)",
    )
    parser.add_argument(
        "--speed",
        default="max",
        metavar="N[x]|max",
        help="times faster than recorded, e.g. 60x; max does not wait at all (default: max)",
    )
    parser.add_argument(
        "--until",
        metavar="T",
        help="stop there: a time (2026-01-31T12:00:00Z), or a span since the first event (90s, "
        "30m, 2h, 1d)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="chooses the sample, and the ids of events that have none (default: 0)",
    )
    parser.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="RATIO",
        help="share of the sessions to replay, above 0 up to 1 (default: 1, all)",
    )
    parser.add_argument(
        "--tick",
        type=float,
        default=600.0,
        metavar="S",
        help="recorded seconds between two updates of PageRank (default: 600)",
    )
    parser.add_argument(
        "--format",
        choices=["events", "ragpulse"],
        help="what LOG is (default: told by what is there)",
    )
    parser.add_argument(
        "--chunk-ids",
        metavar="FILE",
        type=Path,
        help="for RAGPulse: line i holds the chunk id of passage i (default: the number itself)",
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="replay through this Kafka cluster")
    parser.add_argument(
        "--topic",
        metavar="NAME",
        help="topic to replay through (default: a new one, removed with the local log; kept in "
        "Kafka)",
    )
    parser.add_argument("--url", help="send searches to the server at this URL")
    parser.add_argument(
        "--key",
        help="bearer key for --url, where the server asks for one (default: STOKER_CLIENT_KEY, "
        "which other users of the machine do not see)",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="hottest chunks to show (default: 10)"
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Replay and print the report.

    Raises:
        InputError: LOG is not there, or is not of that kind.
        ConfigError: a flag's value cannot be used.
        LogUnavailable: the Kafka cluster does not answer.
    """
    from stoker.service.logging import configure_logging
    from stoker.service.replay_source import read_source

    if args.url and args.kafka:
        raise ConfigError("--url and --kafka exclude each other: a server has a log of its own")
    if not args.tick > 0:
        raise ConfigError(f"--tick: expected more than 0 seconds, found {args.tick}")
    if args.top < 0:
        raise ConfigError(f"--top: expected 0 or more, found {args.top}")
    speed = parse_speed(args.speed)
    config = config_from_args(args).config
    configure_logging("warning", config.service.log_format)
    occurrences = read_source(
        args.log,
        source_format=args.format,
        seed=args.seed,
        chunk_ids=None if args.chunk_ids is None else _read_chunk_ids(args.chunk_ids),
        event_bytes_max=_event_bytes_max(config.service),
        settings=config.prefetch,
    )
    occurrences, until_s = _until(occurrences, args.until)
    if args.url:
        report = _run_http(args, occurrences, until_s, speed)
    else:
        report = _run_heat(args, occurrences, until_s, speed, config)
    if not report["searches" if args.url else "published"] and not report["events"]:
        what = f"--until {args.until}" if args.until else f"--sample {args.sample:g}"
        raise InputError(f"{args.log}: nothing was replayed: {what} leaves no event of it")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 1 if args.url and report["failed"] else 0


def parse_speed(text: str) -> float | None:
    """Read "60x", "60" or "max" (None).

    Raises:
        ConfigError: it is none of these, or not above 0.
    """
    if text == "max":
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)x?", text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--speed: expected a number above 0 as 60x, or max, found {text!r}")
    return float(match[1])


def parse_until(text: str, first_s: float) -> float:
    """Read a time, or a span since `first_s`, as Unix seconds.

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is not None:
        return first_s + float(match[1]) * _UNITS[match[2]]
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"--until: expected a time as 2026-01-31T12:00:00Z, or a span as 2h, found {text!r}"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()


def _until(
    occurrences: Iterator[Occurrence], text: str | None
) -> tuple[Iterator[Occurrence], float | None]:
    """Turn --until into Unix seconds; a span needs the first event's time."""
    if text is None:
        return occurrences, None
    before: list[Occurrence] = []
    first_s = 0.0
    for occurrence in occurrences:
        before.append(occurrence)
        if occurrence.time_s is not None:
            first_s = occurrence.time_s
            break

    def again() -> Iterator[Occurrence]:
        yield from before
        yield from occurrences

    return again(), parse_until(text, first_s)


def _run_heat(
    args: argparse.Namespace,
    occurrences: Iterator[Occurrence],
    until_s: float | None,
    speed: float | None,
    config: Any,
) -> dict[str, Any]:
    from stoker.prefetch.heat import HeatGraph
    from stoker.service.consume import ConsumeOptions
    from stoker.service.replay import VirtualClock, replay

    clock = VirtualClock(speed=speed)
    graph = HeatGraph(config.prefetch)
    topic = args.topic or f"stoker.replay.{uuid.uuid4().hex[:12]}"
    options = ConsumeOptions(event_bytes_max=_event_bytes_max(config.service), poll_s=0.2)
    with tempfile.TemporaryDirectory(prefix="stoker-replay-") as folder:
        event_log = _open_log(args, config.service, Path(folder), clock.now)
        try:
            report = replay(
                occurrences,
                event_log,
                graph,
                clock=clock,
                topic=topic,
                group=f"replay-{uuid.uuid4().hex[:12]}",
                until_s=until_s,
                sample_ratio=args.sample,
                seed=args.seed,
                tick_s=args.tick,
                options=options,
                progress=_progress(args),
            )
        finally:
            event_log.close()
    _end_progress(args)
    return {
        "log": str(args.log),
        "through": f"kafka {args.kafka}, topic {topic}" if args.kafka else "embedded log",
        "speed": args.speed,
        "seed": args.seed,
        **dataclasses.asdict(report),
        "events_per_s": round(report.events / report.wall_s, 1) if report.wall_s else 0.0,
        "hottest": _hottest(graph, clock.now(), args.top),
    }


def _run_http(
    args: argparse.Namespace,
    occurrences: Iterator[Occurrence],
    until_s: float | None,
    speed: float | None,
) -> dict[str, Any]:
    from stoker.service.client import Client
    from stoker.service.replay import VirtualClock, chosen
    from stoker.service.replay_http import replay_http

    key = args.key or os.environ.get("STOKER_CLIENT_KEY") or None

    def open_client(tenant: str) -> Client:
        return Client(args.url, key=key, tenant=None if key else tenant)

    with open_client("default") as client:
        client.ready()  # where nobody is, that is said once, at once, and not for each request
    report = replay_http(
        chosen(occurrences, until_s=until_s, sample_ratio=args.sample, seed=args.seed),
        open_client=open_client,
        clock=VirtualClock(speed=speed),
        progress=_progress(args),
    )
    _end_progress(args)
    return {
        "log": str(args.log),
        "through": args.url,
        "speed": args.speed,
        "seed": args.seed,
        **dataclasses.asdict(report),
    }


def _open_log(
    args: argparse.Namespace, service: Any, folder: Path, clock: Callable[[], float]
) -> EventLog:
    if args.kafka:
        from stoker.service.kafka_wiring import open_kafka

        return open_kafka(
            dataclasses.replace(service, event_log="kafka", kafka_bootstrap=args.kafka)
        )
    from stoker.service.embedded_log import EmbeddedLog
    from stoker.service.embedded_topic import EmbeddedOptions

    return EmbeddedLog(folder, EmbeddedOptions(clock=clock))


def _event_bytes_max(service: Any) -> int:
    from stoker.prefetch.events import EVENT_BYTES_MAX

    return int(getattr(service, "event_bytes_max", EVENT_BYTES_MAX))


def _read_chunk_ids(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chunk-ids {path}: {error}") from error


def _hottest(graph: HeatGraph, now_s: float, count: int) -> list[dict[str, Any]]:
    scores = graph.scores(now_s)
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [
        {"tenant": tenant, "chunk_id": chunk_id, "score": round(score, 6)}
        for (tenant, chunk_id), score in ranked
    ]


def _progress(args: argparse.Namespace) -> Callable[[int], None] | None:
    if args.json or not sys.stderr.isatty():
        return None
    shown = 0

    def show(count: int) -> None:
        nonlocal shown
        if count - shown >= _PROGRESS_EVERY or args.speed != "max":
            shown = count
            sys.stderr.write(f"\rreplayed {count} ")
            sys.stderr.flush()

    return show


def _end_progress(args: argparse.Namespace) -> None:
    if not args.json and sys.stderr.isatty():
        sys.stderr.write("\r\033[K")


def _print_report(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in report.items():
        if name == "hottest":
            continue
        if name in ("first_s", "last_s") and value is not None:
            value = datetime.datetime.fromtimestamp(value, tz=datetime.UTC).isoformat()
        if isinstance(value, float):
            value = f"{value:.3f}"
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    if report.get("hottest"):
        hottest = Table(box=box.SIMPLE, title="hottest chunks", title_justify="left")
        hottest.add_column("tenant")
        hottest.add_column("chunk", overflow="fold")
        hottest.add_column("score", justify="right")
        for row in report["hottest"]:
            hottest.add_row(row["tenant"], row["chunk_id"], f"{row['score']:.4f}")
        console.print(hottest)
