"""What a process under open-loop load is told, and what it reports: JSON and arrays, both ways."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What is loaded before, or while, the traffic comes. All but `none` and `all` within one budget.
LOAD_NONE = "none"
LOAD_LIST = "list"
LOAD_ALL = "all"
LOAD_HEAT = "heat"
LOADS = (LOAD_NONE, LOAD_LIST, LOAD_ALL, LOAD_HEAT)

# Kinds of pages by the number that page lists have for them.
KINDS = ("upper", "links", "codes", "refine", "vectors")


@dataclasses.dataclass(frozen=True)
class LoadJob:
    """One start of one replica under load.

    Attributes:
        load: One of `LOADS`.
        index_path: Folder of the index.
        queries_path: `.npz` with "queries" (float32, shape (n, dim)) and "arrivals_s" (float64,
            shape (n,), rising): query i arrives at arrivals_s[i] seconds of traffic.
        result_path: `.npz` that the answers and times are written to.
        list_path: For `list`: `.npz` with "kinds" (uint8, into `KINDS`) and "units" (uint32), in
            load order.
        state_path: For `heat`: the replica's state folder, with the event log and, where it is the
            same replica that comes back, the heat's snapshot. Changed by the run.
        now_s: Unix seconds at which heat is read; recordings live in the past.
        budget_bytes: Bytes that `list` and `heat` may load.
        k, ef, recall_target: As a search takes them.
        threads: Threads that answer.
        gated: Whether the traffic begins when the replica is ready, as behind a balancer that asks
            /readyz; else as soon as the index is open.
        procs_path: The control group to join before anything is read; empty for none.
        started_ns: CLOCK_MONOTONIC just before the process was started.
    """

    load: str
    index_path: str
    queries_path: str
    result_path: str
    list_path: str = ""
    state_path: str = ""
    now_s: float = 0.0
    budget_bytes: int = 0
    k: int = 10
    ef: int = 0
    recall_target: float = 0.0
    threads: int = 4
    gated: bool = True
    procs_path: str = ""
    started_ns: int = 0

    def to_json(self) -> str:
        """Write the job as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> LoadJob:
        """Read what `to_json` wrote."""
        return LoadJob(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class LoadRecord:
    """What one replica saw. Times are seconds since its process was started.

    Attributes:
        opened_s: The index is open.
        begins_s: The traffic begins: request i is due ``arrivals_s[i]`` later.
        heat_s: The heat is there, rebuilt from the log where it had to be; 0 without heat.
        ready_s: Its loading has ended; where nothing is loaded, as opened.
        load_bytes: Bytes that the loading read, by the page pool's count.
        load_pages: Pages that the loading found wanting and read.
        index_bytes: Bytes of all pages of the index.
        priority: What was done to put the process ahead of other programs.
        heat_keys: Chunks with heat.
        receipt: The warm-up's receipt; None where there was no plan.
        page_hits, page_misses: How often searches after ready found a record's page in memory, and
            how often not.
        read_latency_s: Median time of one page's read from the device, before anything else was
            read: what "cold" means on this machine. -1 where it could not be measured.
        done_s: float64, shape (n,): when each answer was there.
        begun_s: float64, shape (n,): when a thread took each request up.
        completeness: float32, shape (n,), as each answer said.
        pages_read: int64, shape (n,): pages that each query read.
        ids: n lists of what was found; empty strings where there was nothing.
        sample_s: float64, shape (m,): moments at which the bytes were counted.
        sample_bytes: int64, shape (m,): read from devices for the process by then, by the
            kernel's count; all -1 where it does not say.
    """

    opened_s: float
    begins_s: float
    heat_s: float
    ready_s: float
    load_bytes: int
    load_pages: int
    index_bytes: int
    priority: str
    heat_keys: int
    receipt: dict[str, Any] | None
    page_hits: int
    page_misses: int
    read_latency_s: float
    done_s: NDArray[np.float64]
    begun_s: NDArray[np.float64]
    completeness: NDArray[np.float32]
    pages_read: NDArray[np.int64]
    ids: NDArray[np.str_]
    sample_s: NDArray[np.float64]
    sample_bytes: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write all of it into one `.npz` file, whole or not at all."""
        names = [field.name for field in dataclasses.fields(self)]
        arrays = {n: v for n in names if isinstance(v := getattr(self, n), np.ndarray)}
        facts = {n: getattr(self, n) for n in names if n not in arrays}
        temporary = path.with_name(f".{path.name}.part.npz")
        np.savez(temporary, **arrays, facts=np.array(json.dumps(facts)))  # type: ignore[arg-type]
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> LoadRecord:
        """Read what `save` wrote."""
        with np.load(path) as data:
            facts = json.loads(str(data["facts"]))
            arrays = {name: data[name] for name in data.files if name != "facts"}
        return LoadRecord(**facts, **arrays)

    def bytes_at(self, moment_s: float) -> int:
        """Return the bytes read from devices by then; -1 where that is not known."""
        if len(self.sample_s) == 0 or int(self.sample_bytes[-1]) < 0:
            return -1
        at = int(np.searchsorted(self.sample_s, moment_s))
        return int(self.sample_bytes[min(at, len(self.sample_bytes) - 1)])
