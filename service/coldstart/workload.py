"""What `stoker bench coldstart` asks, and when: arrivals, requests, and the vectors they are near.

Three things make a load, each from a recording or generated:

* *arrivals*: when a request comes, whatever became of the ones before it (open loop);
* *requests*: which passage each one is about, in which session, in the recording's order, so that
  popularity, its drift and what follows what inside a session are the recording's;
* *vectors*: real passages' embeddings, continued by generated near neighbours up to a stated size.

A recording's passage number i is vector i. A query's vector is its passage's, moved towards that of
a random other one and by noise, so that no two queries are the same.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.prefetch.events import EVENT_BYTES_MAX
from stoker.service.replay_source import read_source

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]

GENERATED = "generated"
_MOVED = 0.35
_NOISE = 0.15
# The generated trace: sessions of some turns, each about a passage drawn by rank.
_TURNS_MEAN = 3.0
_THINK_S = 40.0
_SESSIONS_S = 0.05
_ZIPF = 0.9
_STAYS = 0.3
# Generated vectors: topics of passages that differ in a few directions of their own.
_TOPIC_ROWS = 40
_TOPIC_DIRECTIONS = 12
_TOPIC_SPREAD = 0.7


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests in the order of their times.

    Attributes:
        times_s: float64, shape (n,), rising, Unix seconds.
        sessions: n names.
        passages: int64, shape (n,): the row of the vector that each is about.
        origin: What it is, for a reader.
    """

    times_s: Floats
    sessions: list[str]
    passages: NDArray[np.int64]
    origin: str

    def __len__(self) -> int:
        return len(self.sessions)

    def part(self, start: int, stop: int) -> Requests:
        """Return the requests ``start`` to ``stop``, the last one left out."""
        return Requests(
            self.times_s[start:stop],
            self.sessions[start:stop],
            self.passages[start:stop],
            self.origin,
        )


def read_requests(path: Path, real_count: int) -> Requests:
    """Read a recording of searches: events, an embedded log's folder or a RAGPulse trace.

    A request is about the first passage that it retrieved. A chunk id that is a number below
    ``real_count`` is that row; any other name is given a row by its hash.

    Raises:
        InputError: nothing of that kind at ``path``, or no searches in it.
    """
    found: list[tuple[float, str, int]] = []
    for occurrence in read_source(path, event_bytes_max=EVENT_BYTES_MAX):
        event = occurrence.event
        if event is None or not event.chunk_ids:
            continue
        name = event.chunk_ids[0]
        row = int(name) if name.isdecimal() else zlib.crc32(name.encode())
        found.append((event.time_s, event.session or event.id, row % real_count))
    if not found:
        raise InputError(f"{path}: no searches found in it")
    found.sort(key=lambda request: request[0])
    return Requests(
        np.array([request[0] for request in found]),
        [request[1] for request in found],
        np.array([request[2] for request in found], dtype=np.int64),
        f"{path.name}, {len(found):,} requests",
    )


def generated_requests(count: int, real_count: int, *, seed: int) -> Requests:
    """Make requests where there is no recording: sessions over passages of Zipf popularity.

    Sessions begin as a Poisson process; a session has 3 turns in the mean (geometric), 40 s apart
    (exponential); a turn stays near the last one's passage with probability 0.3.
    """
    rng = np.random.default_rng(seed)
    rank = rng.permutation(real_count)
    weights = 1.0 / np.arange(1, real_count + 1) ** _ZIPF
    weights /= weights.sum()
    rows: list[tuple[float, str, int]] = []
    begins, number = 0.0, 0
    # Sessions overlap: what comes later in time may belong to an earlier session.
    while len(rows) < 2 * count:
        begins += rng.exponential(1.0 / _SESSIONS_S)
        when, passage = begins, int(rank[rng.choice(real_count, p=weights)])
        for turn in range(int(rng.geometric(1.0 / _TURNS_MEAN))):
            if turn:
                when += rng.exponential(_THINK_S)
                stays = rng.random() < _STAYS
                drawn = int(rank[rng.choice(real_count, p=weights)])
                passage = (passage + 1) % real_count if stays else drawn
            rows.append((when, f"s{number}", passage))
        number += 1
    rows.sort(key=lambda row: row[0])
    rows = rows[:count]
    start_s = 1_758_081_600.0  # any fixed time
    return Requests(
        start_s + np.array([row[0] for row in rows]),
        [row[1] for row in rows],
        np.array([row[2] for row in rows], dtype=np.int64),
        f"{GENERATED}: {count:,} requests, Zipf {_ZIPF} over {real_count:,} passages",
    )


def read_arrivals(path: Path) -> Floats:
    """Read when requests came, in seconds from the first: float64, rising.

    Takes CSV with a column TIMESTAMP (the Azure LLM inference traces), recordings as
    `read_requests` does, and text with one number of seconds a line.

    Raises:
        InputError: none of these, or fewer than two arrivals.
    """
    if not path.exists():
        raise InputError(f"no arrivals at {path}: no such file or folder")
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(64)
    if head.startswith(b"TIMESTAMP"):
        times = _csv_times(path)
    elif head[:1].isdigit() and not path.suffix.startswith(".json"):
        try:
            times = [float(line) for line in path.read_text(encoding="utf-8").split()]
        except ValueError as error:
            raise InputError(f"{path}: expected a number of seconds a line: {error}") from error
    else:
        times = [
            occurrence.event.time_s
            for occurrence in read_source(path, event_bytes_max=EVENT_BYTES_MAX)
            if occurrence.event is not None
        ]
    if len(times) < 2:
        raise InputError(f"{path}: expected at least 2 arrivals, found {len(times)}")
    ordered = np.sort(np.array(times, dtype=np.float64))
    if not np.isfinite(ordered).all():
        raise InputError(f"{path}: an arrival is not a finite time")
    return np.asarray(ordered - ordered[0])


def _csv_times(path: Path) -> list[float]:
    times = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            text = row["TIMESTAMP"]
            try:
                # Seven digits of a second; the standard parser takes six.
                times.append(datetime.datetime.fromisoformat(text[:26]).timestamp())
            except (TypeError, ValueError) as error:
                raise InputError(f"{path}: line {number}: {text!r} is no time") from error
    return times


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When each measured request arrives.

    Attributes:
        arrivals_s: float64, shape (n,), rising, seconds from the first moment of traffic.
        speed: How many times faster than recorded.
        origin: What it is, for a reader.
    """

    arrivals_s: Floats
    speed: float
    origin: str


def schedule(times_s: Floats, *, count: int, seconds: float, origin: str) -> Schedule:
    """Bring the first ``count`` recorded arrivals into ``seconds``, bursts and lulls in proportion.

    Args:
        times_s: Rising seconds; repeated from the start where there are too few.
    """
    times = np.asarray(times_s, dtype=np.float64)
    span = float(times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
    rounds = -(-(count + 1) // len(times))
    whole = np.concatenate([times - times[0] + turn * span for turn in range(rounds)])
    recorded = float(whole[count])
    if recorded <= 0.0:
        raise InputError(f"{origin}: {count + 1} arrivals at one moment; nothing to speed up")
    return Schedule(whole[:count] * (seconds / recorded), recorded / seconds, origin)


def generated_arrivals(count: int, *, seed: int) -> Floats:
    """Return a Poisson process's arrivals: float64, shape (count + 1,), rising from 0."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, size=count)
    return np.concatenate([[0.0], np.cumsum(gaps)])


def generated_vectors(count: int, dim: int, *, seed: int) -> Vectors:
    """Make unit vectors in topics, where there are no embeddings: float32, shape (count, dim)."""
    rng = np.random.default_rng(seed)
    topics = max(1, count // _TOPIC_ROWS)
    centres = rng.normal(size=(topics, dim))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    directions = rng.normal(size=(topics, _TOPIC_DIRECTIONS, dim)) / np.sqrt(dim)
    of = rng.integers(topics, size=count)
    out = np.empty((count, dim), dtype=np.float32)
    for row in range(count):
        shares = rng.normal(size=_TOPIC_DIRECTIONS) * (_TOPIC_SPREAD / np.sqrt(_TOPIC_DIRECTIONS))
        vector = centres[of[row]] + shares @ directions[of[row]]
        out[row] = vector / np.linalg.norm(vector)
    return out


def read_vectors(path: Path) -> Vectors:
    """Read embeddings from `.npy` as float32 of unit length, shape (n, dim).

    Raises:
        InputError: no such file, or no table of at least two finite vectors.
    """
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"vectors {path}: cannot be read: {reason}") from error
    if found.ndim != 2 or len(found) < 2:
        raise InputError(f"{path}: expected at least 2 vectors, found shape {found.shape}")
    vectors = np.asarray(found, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        raise InputError(f"{path}: a vector is zero or not finite")
    return np.asarray(vectors / lengths)


def query_vectors(passages: NDArray[np.int64], real: Vectors, *, seed: int) -> Vectors:
    """Return one query for each passage, float32, unit length; see the module."""
    rng = np.random.default_rng(seed)
    rows = passages
    other = real[rng.integers(len(real), size=len(rows))]
    dim = real.shape[1]
    noise = rng.normal(size=(len(rows), dim)) * (_NOISE / np.sqrt(dim))
    made = real[rows] + _MOVED * (other - real[rows]) + noise
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return np.asarray(made, dtype=np.float32)


def drifted(
    passages: NDArray[np.int64],
    earlier: NDArray[np.int64],
    real_count: int,
    *,
    ratio: float,
    seed: int,
) -> NDArray[np.int64]:
    """Return the passages with a share of the different ones exchanged for others: a new hot set.

    Each passage is exchanged or not as a whole, so popularity keeps its shape and moves to passages
    that nobody asked for before.

    Args:
        passages: int64, shape (n,), of the traffic to change.
        earlier: Passages of the traffic before; none of them is exchanged in.
        ratio: Share of the different passages that is exchanged, in [0, 1].
    """
    rng = np.random.default_rng(seed)
    known = np.unique(passages)
    fresh = np.setdiff1d(np.arange(real_count), np.concatenate([known, earlier]))
    rng.shuffle(fresh)
    moved = known[rng.random(len(known)) < ratio][: len(fresh)]
    table = np.arange(real_count)
    table[moved] = fresh[: len(moved)]
    return table[passages]
