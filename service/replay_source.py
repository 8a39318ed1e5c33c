"""What can be replayed: a file of events, an embedded log's folder, a RAGPulse trace.

Each source yields what happened in the order in which it was recorded, as payload and time.
"""

from __future__ import annotations

import collections
import hashlib
import heapq
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import orjson

from stoker.errors import InputError
from stoker.prefetch.events import SEARCH_PERFORMED, Event, EventError, decode, encode, new_event
from stoker.prefetch.settings import PrefetchSettings
from stoker.prefetch.traces import opened
from stoker.service.embedded_log import EmbeddedLog

Format = Literal["events", "ragpulse"]

# The first request of the trace, a September noon: any fixed time would do, but it must be fixed.
RAGPULSE_START_S: Final = 1_758_081_600.0
RAGPULSE_TENANT: Final = "ragpulse"
_REASONS_MAX: Final = 16  # what a person reads; all of them are counted
_PLACE: Final = re.compile(r"\[\d+\]")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Occurrence(NamedTuple):
    """One recorded thing.

    Attributes:
        payload: The bytes.
        event: What they say; None where they are no event.
        time_s: When it is replayed, Unix seconds: the event's own time, but for a lone clock that
            ran ahead (`steadied`). None where there is no event.
        refused: Why the bytes are no event: where in them, and what was expected there; empty for
            an event.
    """

    payload: bytes
    event: Event | None
    time_s: float | None
    refused: str = ""


class Refusals:
    """How many recorded things were no events, by reason.

    Invariant: the counts add up to `count`, however many reasons there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self.by_reason: dict[str, int] = {}

    def note(self, occurrence: Occurrence) -> None:
        """Count what is no event; anything else counts nothing."""
        if occurrence.event is None:
            reason = _PLACE.sub("[]", occurrence.refused)
            if reason not in self.by_reason and len(self.by_reason) >= _REASONS_MAX:
                reason = "other"
            self.count += 1
            self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def __str__(self) -> str:
        most = sorted(self.by_reason.items(), key=lambda item: (-item[1], item[0]))
        return "; ".join(f"{count:,} for {reason}" for reason, count in most)


def read_source(
    path: Path,
    *,
    source_format: Format | None = None,
    seed: int = 0,
    chunk_ids: Sequence[str] | None = None,
    event_bytes_max: int,
    settings: PrefetchSettings | None = None,
) -> Iterator[Occurrence]:
    """Read a recording, each event with the time at which it is replayed.

    Args:
        path: A JSONL file of envelopes (also in gzip or xz), the folder of an embedded log, or for
            RAGPulse its folder or trace file.
        source_format: None tells by what is there.
        seed: For traces that have no event ids: two seeds give two sets of ids, so that the second
            replay does not count as a duplicate of the first.
        chunk_ids: For traces that number passages: passage i is chunk `chunk_ids[i]`; None uses
            the number itself.
        settings: Say which clocks are believed, as for the heat; None takes the defaults.

    Raises:
        InputError: there is nothing of that kind at `path`; at the end, no event was in it, and
            then what was refused is counted, by reason.
    """
    if not path.exists():
        raise InputError(f"nothing to replay at {path}: no such file or folder")
    if source_format is None:
        source_format = guess_format(path)
    if source_format == "ragpulse":
        found = _read_ragpulse(path, seed=seed, chunk_ids=chunk_ids)
    elif path.is_dir():
        found = _read_log(path, event_bytes_max)
    else:
        found = _read_lines(path, event_bytes_max)
    settings = settings or PrefetchSettings()
    return steadied(
        _some(found, path),
        jump_s_max=settings.heat_jump_s_max,
        jump_events=settings.heat_jump_events,
    )


def _some(occurrences: Iterable[Occurrence], path: Path) -> Iterator[Occurrence]:
    """Pass all on; raise InputError at the end where no event was among them."""
    refusals, any_event = Refusals(), False
    for occurrence in occurrences:
        refusals.note(occurrence)
        any_event = any_event or occurrence.event is not None
        yield occurrence
    if not any_event:
        what = f"all {refusals.count:,} refused: {refusals}" if refusals.count else "it is empty"
        raise InputError(
            f"{path}: no event in it ({what}); expected CloudEvents in JSON, one a line, as "
            "`POST /v1/events` takes them"
        )


def steadied(
    occurrences: Iterable[Occurrence], *, jump_s_max: float, jump_events: int
) -> Iterator[Occurrence]:
    """Replay what a lone clock says is far ahead at the newest time before it.

    The heat does not believe such an event either (`prefetch.heat_clock`), but only a replay waits
    for it, ends at it, or is left behind by a clock that never goes back. What is recorded can be
    looked up beforehand: an event is believed where those that come right after it are as far
    ahead, so a night without events is as long as it was.

    Args:
        jump_s_max: An event this far ahead of all before it has to be believed.
        jump_events: It is, with so many in a row; with fewer only where the recording ends.
    """
    if jump_events <= 1:
        yield from occurrences
        return
    mark_s: float | None = None
    source = iter(occurrences)
    coming = collections.deque(itertools.islice(source, jump_events))
    while coming:
        first = coming.popleft()
        if first.time_s is not None:
            later = [other.time_s for other in coming if other.time_s is not None]
            before_s = min(later, default=first.time_s) if mark_s is None else mark_s
            bound_s = before_s + jump_s_max
            if first.time_s > bound_s and min(later, default=-math.inf) <= bound_s:
                first = first._replace(time_s=before_s)
            mark_s = max(first.time_s or 0.0, -math.inf if mark_s is None else mark_s)
        yield first
        coming.extend(itertools.islice(source, 1))


def guess_format(path: Path) -> Format:
    """Tell a RAGPulse trace from events by its file names or its first line."""
    if path.is_dir():
        return "ragpulse" if _ragpulse_files(path) else "events"
    with opened(path) as file:
        return "ragpulse" if b'"hash_ids"' in next(iter(file), b"") else "events"


def _read_lines(path: Path, event_bytes_max: int) -> Iterator[Occurrence]:
    with opened(path) as file:
        for number, line in enumerate(file):
            payload = line.strip()
            if number == 0:
                payload = payload.removeprefix(_BYTE_ORDER_MARK)
            if payload:
                yield _occurrence(payload, event_bytes_max)


def _read_log(path: Path, event_bytes_max: int) -> Iterator[Occurrence]:
    event_log = EmbeddedLog(path)
    try:
        names = [name for name in event_log.topics() if ".dead." not in name]
        if len(names) != 1:
            raise InputError(
                f"{path}: expected one topic of events, found {', '.join(names) or 'none'}"
            )
        topic = event_log.topic(names[0])
        partitions = [topic.scan(partition) for partition in range(topic.spec.partition_count)]
        order = operator.attrgetter("time_s", "partition", "offset")
        for record in heapq.merge(*partitions, key=order):
            if record.value is not None:
                yield _occurrence(record.value, event_bytes_max)
    finally:
        event_log.close()


def _read_ragpulse(
    path: Path, *, seed: int, chunk_ids: Sequence[str] | None
) -> Iterator[Occurrence]:
    files = _ragpulse_files(path) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: expected a RAGPulse trace (0_trace*.jsonl), found none")
    requests: list[tuple[float, str, list[int]]] = []
    for file_path in files:
        with opened(file_path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_ragpulse_request(line, f"{file_path}: line {number}"))
    # The published trace is not in time order.
    requests.sort(key=lambda request: request[0])
    for number, (time_s, session, passages) in enumerate(requests):
        if chunk_ids is not None and passages and max(passages) >= len(chunk_ids):
            raise InputError(
                f"{path}: passage {max(passages)} has no chunk: {len(chunk_ids)} chunk ids given"
            )
        event = new_event(
            SEARCH_PERFORMED,
            tenant=RAGPULSE_TENANT,
            session=session,
            chunk_ids=[str(p) if chunk_ids is None else chunk_ids[p] for p in passages],
            time_s=RAGPULSE_START_S + time_s,
            event_id=hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:32],
            source="/ragpulse",
        )
        yield Occurrence(encode(event), event, event.time_s)


def _ragpulse_request(line: bytes, place: str) -> tuple[float, str, list[int]]:
    try:
        row = orjson.loads(line)
        if not isinstance(row, dict):
            raise TypeError(f"expected an object, found {type(row).__name__}")
        passages = [int(passage) for passage in row["hash_ids"]["passages_ids"]]
        return float(row["timestamp"]), str(row["session_id"]), passages
    except KeyError as error:
        raise InputError(f"{place}: not a RAGPulse request: {error} is missing") from error
    except (TypeError, ValueError) as error:  # what is no JSON is a ValueError, too
        raise InputError(f"{place}: not a RAGPulse request: {error}") from error


def _ragpulse_files(path: Path) -> list[Path]:
    return sorted(path.glob("0_trace*.jsonl*"))


def _occurrence(payload: bytes, event_bytes_max: int) -> Occurrence:
    try:
        event = decode(payload, bytes_max=event_bytes_max)
    except EventError as error:
        return Occurrence(payload, None, None, f"{error.field}: expected {error.expected}")
    return Occurrence(payload, event, event.time_s)
