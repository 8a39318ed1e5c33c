"""What the engine benchmark hands to a measured process; plain data, as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Job:
    """One measurement in one fresh process.

    Attributes:
        kind: What to measure: a function of engine_child.py, or of engine_stages.py.
        peer: Name of the engine.
        folder: Its index.
        mode: How it is opened; "resident" everywhere brings everything into memory.
        queries, truth: Files of queries and of the true ids; empty for none.
        efforts: Values of the engine's knob to try; empty for its own list.
        effort: The one value, where one is measured.
        target: Recall that the engine is told to aim at, where it can be told; 0 for none.
        targets: Several such.
        threads: For batches.
        repeats: Of each timing.
        memory_bytes: Budget; 0 for none.
        deadline_ms: For engines that know deadlines.
        heat: File of ids and weights learnt from earlier queries; empty for none.
        earlier: File of those earlier queries; empty for none.
        settle: First queries that are asked and not measured.
        seconds_max: No query begins later than this into the measured stretch.
        vectors: File of vectors to build from.
        groups: Control groups' process files to join before anything else.
        io_group: The one of them that counts reads.
        stated_iops, stated_bytes_s: The volume's limits, where the engine is told; 0 for not told.
        mapped_bytes_max: What the process may map in all; 0 for no limit.
        started: Monotonic clock when the process was started.
    """

    kind: str
    peer: str
    folder: str
    mode: str = "resident"
    queries: str = ""
    truth: str = ""
    efforts: list[int] = dataclasses.field(default_factory=list)
    effort: int = 0
    target: float = 0.0
    targets: list[float] = dataclasses.field(default_factory=list)
    threads: int = 1
    repeats: int = 1
    memory_bytes: int = 0
    deadline_ms: float = 0.0
    heat: str = ""
    earlier: str = ""
    settle: int = 0
    seconds_max: float = 600.0
    vectors: str = ""
    groups: list[str] = dataclasses.field(default_factory=list)
    io_group: str = ""
    stated_iops: int = 0
    stated_bytes_s: int = 0
    mapped_bytes_max: int = 0
    started: float = 0.0

    def write(self, path: Path) -> None:
        """Store as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Job:
        """The job that `write` stored."""
        return cls(**fields)
