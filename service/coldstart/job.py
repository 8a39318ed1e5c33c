"""What a measured process is told, and what it reports: plain data, one JSON file each way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

MODE_NONE = "none"
MODE_ALL = "all"
MODE_STOKER = "stoker"
MODES = (MODE_NONE, MODE_ALL, MODE_STOKER)
MODE_LABELS = {
    MODE_NONE: "no warm-up",
    MODE_ALL: "load everything",
    MODE_STOKER: "Stoker",
}


@dataclasses.dataclass(frozen=True)
class ColdJob:
    """One cold start of one process.

    Attributes:
        mode: One of `MODES`.
        index_path: Folder of the index.
        queries_path: `.npy`, float32, shape (n, dim); asked one after the other.
        answers_path: Where the ids found are written, as JSON: a list of n lists.
        k: Hits per query.
        heat_path: Snapshot of the heat graph; read by Stoker only.
        tenant: Whose heat.
        now_s: Unix seconds at which the heat is read; 0 means now. Replays live in the past.
        budget_bytes: What Stoker's warm-up may load; 0 means no limit.
        memory_bytes: The page pool's budget; 0 means room for the whole index, for every mode.
        first_deadline_ms: Longest first answer of Stoker's, before its warm-up; 0 means none.
        ef: Search width; 0 leaves it to the index.
        recall_target: How settled an answer must be; 0 leaves it to the index.
        procs_path: The control group to join before anything is read; empty for none.
        opener: ``module:function`` that opens an index; tests put a stand-in here.
        started_ns: CLOCK_MONOTONIC just before the process was started.
    """

    mode: str
    index_path: str
    queries_path: str
    answers_path: str
    k: int = 10
    heat_path: str = ""
    tenant: str = "default"
    now_s: float = 0.0
    budget_bytes: int = 0
    memory_bytes: int = 0
    first_deadline_ms: float = 0.0
    ef: int = 0
    recall_target: float = 0.0
    procs_path: str = ""
    opener: str = "stoker.service.embedded:open"
    started_ns: int = 0

    def to_json(self) -> str:
        """Write the job as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ColdJob:
        """Read what `to_json` wrote."""
        return ColdJob(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class ColdRecord:
    """What one measured process saw. Times are seconds since it was started.

    Attributes:
        opened_s: The index is open.
        ready_s: It says that it is ready: at once, or when its warm-up is done.
        first_answer_s: The first answer is there.
        first_completeness: How complete that first answer said it was.
        answered_s: When each answer was there.
        latency_s: How long each took.
        completeness: Per query, as the answer said.
        pages_read: Pages read from the device, per query.
        bytes_read: Bytes read from the device, per query.
        ready_device_bytes: Bytes that the kernel read from the device for this process from the
            index's opening until ready; -1 where the kernel does not say.
        total_device_bytes: The same until the last answer.
        warm_bytes: Bytes that the warm-up read, by the page pool's count.
        resident_bytes: In the page pool after the last answer.
        index_bytes: Bytes of all pages of the index.
        page_hits: Page accesses after ready that found their page resident; -1: not counted.
        page_misses: Those that did not.
        receipt: The warm-up's receipt, or None without one.
    """

    mode: str
    opened_s: float
    ready_s: float
    first_answer_s: float
    first_completeness: float
    answered_s: list[float]
    latency_s: list[float]
    completeness: list[float]
    pages_read: list[int]
    bytes_read: list[int]
    ready_device_bytes: int
    total_device_bytes: int
    warm_bytes: int
    resident_bytes: int
    index_bytes: int
    page_hits: int
    page_misses: int
    receipt: dict[str, Any] | None

    def to_json(self) -> str:
        """Write the record as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ColdRecord:
        """Read what `to_json` wrote."""
        return ColdRecord(**json.loads(text))


def read_answers(path: Path) -> list[list[Any]]:
    """Read the ids that a measured process found."""
    answers: list[list[Any]] = json.loads(path.read_text(encoding="utf-8"))
    return answers
