"""Replay: sources, the virtual clock, determinism, and the command."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError, InputError
from stoker.prefetch.events import (
    EVENT_BYTES_MAX,
    RESULT_USED,
    SEARCH_PERFORMED,
    Event,
    encode,
    new_event,
    partition_key,
)
from stoker.prefetch.heat import HeatGraph
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.traces import read_trace
from stoker.service.cli import main
from stoker.service.coldstart.workload import read_requests
from stoker.service.commands.replay import parse_speed, parse_until
from stoker.service.consume import ConsumeLoop
from stoker.service.embedded_log import EmbeddedLog
from stoker.service.embedded_topic import EmbeddedOptions
from stoker.service.replay import ReplayReport, VirtualClock, replay
from stoker.service.replay_http import replay_http
from stoker.service.replay_source import RAGPULSE_START_S, Occurrence, Refusals, read_source
from stoker.service.streams import TopicSpec

START_S = 1.7e9


def event(number: int, *, at_s: float | None = None, query: str | None = None) -> Event:
    return new_event(
        SEARCH_PERFORMED if number % 3 else RESULT_USED,
        tenant="t",
        session=f"s{number % 5}",
        query=query,
        chunk_ids=[f"c{number % 7}", f"c{number % 4}"],
        time_s=START_S + (number if at_s is None else at_s),
        event_id=f"e{number}",
    )


def write_lines(path: Path, events: Sequence[Event], *extra: bytes) -> Path:
    path.write_bytes(b"\n".join([*map(encode, events), *extra]) + b"\n")
    return path


def source(path: Path, **options: Any) -> list[Occurrence]:
    return list(read_source(path, event_bytes_max=EVENT_BYTES_MAX, **options))


def run(path: Path, folder: Path, **options: Any) -> tuple[ReplayReport, HeatGraph]:
    clock = options.pop("clock", None) or VirtualClock()
    log = EmbeddedLog(folder, EmbeddedOptions(clock=clock.now))
    graph = HeatGraph()
    seed = options.get("seed", 0)
    report = replay(
        iter(source(path, seed=seed)), log, graph, clock=clock, topic="replay", **options
    )
    log.close()
    return report, graph


class Sleeper:
    """Real time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_two_replays_give_the_same_bytes(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "log.jsonl", [event(i) for i in range(300)], b"poison", encode(event(5))
    )
    first, graph = run(path, tmp_path / "a", tick_s=50.0)
    second, _ = run(path, tmp_path / "b", tick_s=50.0, batch_events_max=7)
    assert first.state_sha256 == second.state_sha256
    assert (first.published, first.events, first.duplicates, first.refused) == (302, 300, 1, 1)
    assert (first.sessions, first.chunks) == (5, 7)
    assert (first.first_s, first.last_s) == (START_S, START_S + 299)
    assert first.ticks == second.ticks == 6
    assert graph.events_applied == 300


def test_until_and_sample_choose_what_is_replayed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.jsonl", [event(i) for i in range(100)])
    assert run(path, tmp_path / "a", until_s=START_S + 9.5)[0].published == 10
    sampled = [
        run(path, tmp_path / f"s{i}", sample_ratio=0.5, seed=seed)[0]
        for i, seed in enumerate((1, 1, 2, 3, 4))
    ]
    assert sampled[0].state_sha256 == sampled[1].state_sha256
    assert len({report.sessions for report in sampled} | {0, 5}) > 2
    assert all(report.published == 20 * report.sessions for report in sampled)
    with pytest.raises(ConfigError, match="sample"):
        run(path, tmp_path / "x", sample_ratio=0.0)


def test_the_clock_runs_at_the_speed_and_never_back(tmp_path: Path) -> None:
    sleeper = Sleeper()
    clock = VirtualClock(speed=60.0, monotonic=sleeper.monotonic, sleep=sleeper.sleep)
    events = [event(i, at_s=at) for i, at in enumerate([0, 60, 30, 180, 180.5])]
    path = write_lines(tmp_path / "log.jsonl", events)
    report, _ = run(path, tmp_path / "a", clock=clock)
    assert report.events == 5
    assert clock.now() == START_S + 180.5
    assert sum(sleeper.slept) == pytest.approx(180.5 / 60)
    with pytest.raises(ConfigError):
        VirtualClock(speed=0.0)


@pytest.mark.parametrize(
    ("years", "at", "count"),
    [(80.0, 0, 1), (80.0, 30, 1), (0.001, 30, 6), (5000.0, 59, 1), (1.0, 60, 1)],
)
def test_a_clock_that_runs_ahead_holds_up_no_replay(
    tmp_path: Path, years: float, at: int, count: int
) -> None:
    """Few events of a broken clock: nothing waits for them, ends at them, or ages by them."""
    events = [event(i, at_s=10.0 * i) for i in range(60)]
    wrong = [event(1000 + i, at_s=10.0 * at + years * 365 * 86_400) for i in range(count)]
    path = write_lines(tmp_path / "log.jsonl", [*events[:at], *wrong, *events[at:]])
    sleeper = Sleeper()
    clock = VirtualClock(speed=60.0, monotonic=sleeper.monotonic, sleep=sleeper.sleep)
    report, graph = run(path, tmp_path / "a", clock=clock, tick_s=100.0)
    assert report.published == 60 + count
    assert clock.now() == graph.watermark_s == START_S + 590
    assert sum(sleeper.slept) == pytest.approx(590 / 60)
    assert report.ticks == 6
    for folder, batch in (("b", 7), ("c", 1_000)):
        again, _ = run(path, tmp_path / folder, tick_s=100.0, batch_events_max=batch)
        assert (again.state_sha256, again.ticks) == (report.state_sha256, 6)
    half = run(path, tmp_path / "d", until_s=START_S + 450)[0].published
    assert half == 46 + (count if at <= 46 else 0)


def test_a_night_without_events_is_as_long_as_it_was(tmp_path: Path) -> None:
    times = [0.0, 30.0, 36_000.0, 36_010.0, 72_000.0, 72_001.0, 300_000.0, 300_001.0]
    path = write_lines(
        tmp_path / "log.jsonl", [event(i, at_s=at) for i, at in enumerate(times)], b"poison"
    )
    assert [o.time_s and o.time_s - START_S for o in source(path)] == [*times, None]
    believed = PrefetchSettings(heat_jump_events=1)
    path = write_lines(tmp_path / "two.jsonl", [event(0), event(1, at_s=1e6), event(2)])
    found = [o.time_s for o in source(path, settings=believed)]
    assert found == [START_S, START_S + 1e6, START_S + 2]
    assert [o.time_s for o in source(path)] == [START_S, START_S, START_S + 2]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_files_are_read_packed_or_not(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    data = b"\n\n".join(encode(event(i)) for i in range(5))
    pack = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.xz": lzma.compress}[suffix]
    path.write_bytes(pack(data))
    found = source(path)
    assert [o.event.id for o in found if o.event] == [f"e{i}" for i in range(5)]
    if suffix != ".jsonl":
        for cut in (pack(data)[:-20], pack(data)[:12]):
            path.write_bytes(cut)
            with pytest.raises(InputError, match="damaged compressed data"):
                source(path)
        path = tmp_path / "name-says-nothing"
        path.write_bytes(pack(data))
        assert len(source(path)) == 5


def test_a_log_folder_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    now = [START_S]
    log = EmbeddedLog(tmp_path / "log", EmbeddedOptions(clock=lambda: now[0]))
    log.ensure_topic(TopicSpec("stoker.events.v1", partition_count=3, retention_s=None))
    log.ensure_topic(TopicSpec("stoker.events.dead.v1", partition_count=1))
    for i in range(60):
        now[0] += 1
        log.append("stoker.events.v1", b"k%d" % i, [encode(event(i))])
    log.close()
    assert [o.event.id for o in source(tmp_path / "log") if o.event] == [f"e{i}" for i in range(60)]
    with pytest.raises(InputError, match="expected one topic of events, found none"):
        source(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        source(tmp_path / "nothing")


def test_a_replay_ends_with_the_demand_of_the_server_that_was_recorded(tmp_path: Path) -> None:
    """Same events, other partitions and batches: each chunk is asked for as much as live."""
    now = [START_S]
    log = EmbeddedLog(tmp_path / "log", EmbeddedOptions(clock=lambda: now[0]))
    log.ensure_topic(TopicSpec("stoker.events.v1", partition_count=4, retention_s=None))
    for i in range(66):
        now[0] = START_S + 30.0 * i
        one = event(i, at_s=30.0 * i - (900.0 if i % 7 == 0 else 0.0))  # some come late
        log.append("stoker.events.v1", partition_key(one), [encode(one)] * (1 + (i % 11 == 0)))
    live = HeatGraph()
    loop = ConsumeLoop(
        log, "stoker.events.v1", "live", open_sink=lambda _: live, snapshot_path=None,
        clock=lambda: now[0],
    )  # fmt: skip
    while loop.stats().records < 72:
        loop.step(0.2)
    loop.close()
    log.close()
    report, again = run(tmp_path / "log", tmp_path / "replayed", tick_s=600.0)
    assert (report.events, report.duplicates) == (live.events_applied, 6)
    assert again.watermark_s == live.watermark_s
    demand = live.demand(now[0])
    assert again.demand(now[0]) == pytest.approx(demand, rel=1e-12)
    assert len(demand) == 7


def ragpulse(path: Path) -> Path:
    rows = [(27, "b", [4, 5]), (0, "a", [1, 2, 3]), (64, "a", [])]
    path.write_text(
        "".join(
            json.dumps(
                {"timestamp": str(t), "session_id": s, "hash_ids": {"passages_ids": passages}}
            )
            + "\n"
            for t, s, passages in rows
        )
    )
    return path


def test_a_ragpulse_trace_becomes_searches_in_time_order(tmp_path: Path) -> None:
    path = ragpulse(tmp_path / "0_trace.jsonl")
    for place in (path, tmp_path):
        events = [o.event for o in source(place) if o.event]
        assert [e.chunk_ids for e in events] == [("1", "2", "3"), ("4", "5"), ()]
        assert [e.time_s - RAGPULSE_START_S for e in events] == [0, 27, 64]
        assert [e.session for e in events] == ["a", "b", "a"]
    one, again, other = (
        [o.event.id for o in source(path, seed=seed) if o.event] for seed in (1, 1, 2)
    )
    assert one == again
    assert not set(one) & set(other)
    mapped = [o.event for o in source(path, chunk_ids=[f"doc#{i}" for i in range(6)]) if o.event]
    assert mapped[1].chunk_ids == ("doc#4", "doc#5")
    with pytest.raises(InputError, match="passage 5 has no chunk: 5 chunk ids given"):
        source(path, chunk_ids=[str(i) for i in range(5)])
    for row, told in (
        ('{"hash_ids": {}, "timestamp": "x"}', "'passages_ids' is missing"),
        ("[1]", "expected an object, found list"),
        ("{", "end of data|not JSON"),
    ):
        path.write_text(row + "\n")
        with pytest.raises(InputError, match=f"line 1: not a RAGPulse request: .*({told})"):
            source(path, source_format="ragpulse")


@pytest.mark.data
def test_the_whole_ragpulse_trace_replays(shared_data: Path, tmp_path: Path) -> None:
    report, graph = run(shared_data / "ragpulse", tmp_path / "a", tick_s=1e6)
    assert (report.published, report.refused, report.duplicates) == (4354, 0, 0)
    assert report.chunks == 2737
    assert len(graph.scores(report.last_s or 0.0)) == 2737


def test_spellings_of_speed_and_until() -> None:
    assert parse_speed("max") is None
    assert parse_speed("60x") == parse_speed("60") == 60.0
    for bad in ("", "fast", "0x", "-1x", "1xx"):
        with pytest.raises(ConfigError, match="--speed"):
            parse_speed(bad)
    assert parse_until("90s", 10.0) == 100.0
    assert parse_until("1.5h", 0.0) == 5400.0
    assert parse_until("1970-01-02T00:00:00Z", 5.0) == 86_400.0
    assert parse_until("1970-01-02", 5.0) == 86_400.0
    with pytest.raises(ConfigError, match="--until"):
        parse_until("soon", 0.0)


def test_the_command_prints_a_report_and_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "log.jsonl", [event(i) for i in range(50)])
    assert main(["replay", str(path), "--json", "--until", "20s", "--top", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["events"] == 21
    assert len(report["hottest"]) == 2
    assert report["through"] == "embedded log"
    assert main(["replay", str(path), "--top", "1"]) == 0
    assert "hottest chunks" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "nothing"), "--json"]) == 3
    assert main(["replay", str(path), "--speed", "never"]) == 2
    assert main(["replay", str(path), "--top", "-1"]) == 2
    assert main(["replay", str(path), "--url", "http://x:1", "--kafka", "x:1"]) == 2
    assert main(["replay", str(path), "--kafka", "127.0.0.1:1", "--json"]) == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"\n\n \n", "it is empty"),
        (b"{\n", "all 1 refused: 1 for .*UTF-8 JSON"),
        (b"[]\n{}\nx\ny\n", "all 4 refused: 2 for .*UTF-8 JSON; 1 for .*object; 1 for specversion"),
        (bytes(range(256)) * 40, r"all \d+ refused: \d+ for .*UTF-8 JSON"),
        (gzip.compress(b"{}"), "all 1 refused"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--until", "1h"], ["--sample", "0.5"]])
def test_a_file_without_an_event_is_an_error_that_counts_what_was_refused(
    data: bytes, says: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    assert main(["replay", str(path), "--json", *flags]) == 3
    said = capsys.readouterr()
    assert not said.out
    problem = json.loads(said.err.splitlines()[-1])
    assert re.search(re.escape(str(path)) + r": no event in it \(" + says, problem["detail"])
    with pytest.raises(InputError, match="no event in it"):
        read_requests(path, real_count=5)


@pytest.mark.parametrize("flags", [["--until", "2020-01-01"], ["--sample", "0.0001"]])
def test_a_replay_of_nothing_is_an_error(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "log.jsonl", [event(i) for i in range(5)])
    assert main(["replay", str(path), *flags]) == 3
    assert f"{' '.join(flags)} leaves no event" in capsys.readouterr().err


def test_a_report_says_why_lines_were_refused(tmp_path: Path) -> None:
    long = [b'{"a": "%s"}' % (b"x" * EVENT_BYTES_MAX)]
    lines = [b"poison", b"[]", *long * 2, *(b"[%d" % i for i in range(40))]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([encode(event(0)), *lines]))
    report, _ = run(path, tmp_path / "a")
    assert (report.events, report.refused) == (1, 44)  # the byte order mark is none of them
    assert sum(report.refused_why.values()) == 44
    assert report.refused_why["$: expected UTF-8 JSON"] == 41
    sent: list[tuple[str, str, Any]] = []
    traffic = replay_http(
        source(path),
        open_client=lambda tenant: FakeClient(tenant, sent),  # type: ignore[arg-type,return-value]
        clock=VirtualClock(),
    )
    assert (traffic.refused, traffic.refused_why) == (44, report.refused_why)


@given(st.lists(st.sampled_from([f"data.x{i}: bad" for i in range(40)]), max_size=200))
def test_reasons_are_few_and_lose_no_refusal(reasons: list[str]) -> None:
    refusals = Refusals()
    for reason in reasons:
        refusals.note(Occurrence(b"", None, None, reason))
    assert refusals.count == sum(refusals.by_reason.values()) == len(reasons)
    assert len(refusals.by_reason) <= 17


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        for read in (source, lambda path: read_trace(path, "lines")):
            with pytest.raises(InputError, match="it is no file"):
                read(path)


class FakeClient:
    """A client that notes what it is asked, and fails when told to."""

    def __init__(self, tenant: str, sent: list[tuple[str, str, Any]]) -> None:
        self.tenant = tenant
        self.sent = sent

    def search(self, text: str, **options: Any) -> None:
        self.sent.append((self.tenant, "search", (text, options["k"], options["session"])))
        if text == "fail":
            raise InputError("refused")
        if text == "break":
            raise ZeroDivisionError("a fault of ours")

    def send_events(self, events: Sequence[Any]) -> None:
        self.sent.append((self.tenant, "events", events[0]["id"]))

    def close(self) -> None:
        self.sent.append((self.tenant, "close", None))


def test_no_request_that_fails_goes_uncounted() -> None:
    sent: list[tuple[str, str, Any]] = []
    events = [event(i, query=query) for i, query in enumerate(["break", "fail", "why?"], 1)]
    events.append(dataclasses.replace(event(4, query="why?"), tenant="nobody"))
    sleeper = Sleeper()

    def open_client(tenant: str) -> FakeClient:
        if tenant == "nobody":
            raise ValueError("no such tenant")
        return FakeClient(tenant, sent)

    with structlog.testing.capture_logs() as lines:
        report = replay_http(
            iter([Occurrence(encode(e), e, e.time_s) for e in events]),
            open_client=open_client,  # type: ignore[arg-type]
            clock=VirtualClock(monotonic=sleeper.monotonic, sleep=sleeper.sleep),
            monotonic=sleeper.monotonic,
        )
    assert report.failed == {"ZeroDivisionError": 1, "InputError": 1, "ValueError": 1}
    assert len(lines) == 3
    assert sent[-1] == ("t", "close", None)


def test_traffic_goes_to_the_server_as_it_was_recorded() -> None:
    sent: list[tuple[str, str, Any]] = []
    events = [
        event(1, query="why?"),
        event(2),  # a search without its text: sent as the event that it is
        event(3, query="used, not searched"),
        event(4, query="fail"),
    ]
    occurrences = [Occurrence(encode(e), e, e.time_s) for e in events]
    occurrences.append(Occurrence(b"poison", None, None))
    sleeper = Sleeper()
    report = replay_http(
        iter(occurrences),
        open_client=lambda tenant: FakeClient(tenant, sent),  # type: ignore[arg-type,return-value]
        clock=VirtualClock(speed=1.0, monotonic=sleeper.monotonic, sleep=sleeper.sleep),
        in_flight_max=1,
        monotonic=sleeper.monotonic,
    )
    assert (report.searches, report.events, report.refused) == (2, 2, 1)
    assert report.failed == {"InputError": 1}
    assert report.wall_s == pytest.approx(3.0)
    assert set(report.latency_ms) == {"p50", "p90", "p99", "max"}
    assert sent == [
        ("t", "search", ("why?", 2, "s1")),
        ("t", "events", "e2"),
        ("t", "events", "e3"),
        ("t", "search", ("fail", 2, "s4")),
        ("t", "close", None),
    ]
    assert orjson.loads(occurrences[0].payload)["id"] == "e1"
