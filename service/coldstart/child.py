"""The measured process: opens the index as a restarted service would, answers its first queries.

Run as ``python -m stoker.service.coldstart.child JOB RECORD``; `measure` starts it. Its clock
begins before the interpreter does, so imports are part of every figure. Only what is needed is
imported, and only when it is.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from stoker.service.coldstart.job import MODE_ALL, MODE_STOKER, ColdJob, ColdRecord
from stoker.service.coldstart.process_io import device_bytes, ids_bytes

_BUDGET_SHARE = 0.99
_ALWAYS_PLANNED = ("upper", "links", "codes")


def main(argv: list[str]) -> int:
    """Do one job; the record is written last, so a record means that all of it worked."""
    job = ColdJob.from_json(Path(argv[0]).read_text(encoding="utf-8"))
    if job.procs_path:
        Path(job.procs_path).write_text(str(os.getpid()), encoding="utf-8")
    record, answers = run_job(job)
    Path(job.answers_path).write_text(json.dumps(answers), encoding="utf-8")
    Path(argv[1]).write_text(record.to_json(), encoding="utf-8")
    return 0


def run_job(job: ColdJob) -> tuple[ColdRecord, list[list[Any]]]:
    """Open, warm up as the mode says, answer, and count. See `ColdRecord`."""
    import numpy as np

    module, _, name = job.opener.partition(":")
    opener = getattr(importlib.import_module(module), name)
    queries = np.load(job.queries_path)
    device_before = device_bytes()
    index = opener(job.index_path, memory_bytes=job.memory_bytes or None)
    log = _AnswerLog(job, index)
    opened_s = _since(job)
    receipt: Any = None
    asked = 0
    if job.mode == MODE_STOKER:
        # A query that waits at the door is answered before the warm-up: by what it reads itself, or
        # as well as can be in the time given, and then it says how complete it is. The others come
        # once it is ready.
        log.answer(queries[0], deadline_ms=job.first_deadline_ms or None)
        asked = 1
        receipt = index.warm(_heat(job), budget_bytes=_budget_left(job, index, device_before))
    elif job.mode == MODE_ALL:
        receipt = index.warm()
    ready_s = _since(job)
    ready_bytes = _difference(device_before, device_bytes())
    counted = _page_counts(index)
    for query in queries[asked:]:
        log.answer(query)
    hits, misses = _page_counts(index)
    if receipt is not None and hasattr(index, "warm_served"):
        receipt = _measured(receipt, index, log.ids[asked:])
    residency = index.resident()
    record = ColdRecord(
        mode=job.mode,
        opened_s=opened_s,
        ready_s=ready_s,
        first_answer_s=log.answered_s[0],
        first_completeness=log.completeness[0],
        answered_s=log.answered_s,
        latency_s=log.latency_s,
        completeness=log.completeness,
        pages_read=log.pages_read,
        bytes_read=log.bytes_read,
        ready_device_bytes=ready_bytes,
        total_device_bytes=_difference(device_before, device_bytes()),
        warm_bytes=receipt.bytes_read if receipt is not None else 0,
        resident_bytes=residency.resident_bytes,
        index_bytes=residency.total_bytes,
        page_hits=hits - counted[0] if hits >= 0 else -1,
        page_misses=misses - counted[1] if misses >= 0 else -1,
        receipt=None if receipt is None else receipt.to_dict(),
    )
    index.close()
    return record, log.ids


class _AnswerLog:
    """Asks one query at a time and notes what each answer cost."""

    def __init__(self, job: ColdJob, index: Any) -> None:
        self._job = job
        self._index = index
        self.ids: list[list[Any]] = []
        self.answered_s: list[float] = []
        self.latency_s: list[float] = []
        self.completeness: list[float] = []
        self.pages_read: list[int] = []
        self.bytes_read: list[int] = []

    def answer(self, query: Any, *, deadline_ms: float | None = None) -> None:
        start = time.perf_counter()
        hits = self._index.search(
            query,
            self._job.k,
            ef=self._job.ef or None,
            recall_target=self._job.recall_target or None,
            deadline_ms=deadline_ms,
        )
        self.latency_s.append(time.perf_counter() - start)
        self.answered_s.append(_since(self._job))
        self.ids.append(hits.ids.tolist())
        self.completeness.append(float(hits.completeness))
        self.pages_read.append(int(hits.pages_read))
        self.bytes_read.append(int(hits.bytes_read))


def _since(job: ColdJob) -> float:
    return (time.monotonic_ns() - job.started_ns) / 1e9


def _budget_left(job: ColdJob, index: Any, device_before: int) -> int | None:
    """Return what may be resident after the warm-up, so that the bytes read keep to the budget.

    What was read until now counts, but pages that came in by it need not be read again: those of
    the navigation set, which every plan has. Others that a query brought may be in no plan. A
    little is left for reads of the first answer that are still under way.
    """
    if not job.budget_bytes:
        return None
    spent = max(0, _difference(device_before, device_bytes()))
    residency = index.resident()
    kinds = getattr(residency, "kinds", None)  # a stand-in index may have no kinds of pages
    if kinds is None:
        came = int(residency.resident_bytes)
    else:
        came = sum(kind.resident_bytes for kind in kinds if kind.kind in _ALWAYS_PLANNED)
    there = min(came, spent)
    limit = int(job.budget_bytes * _BUDGET_SHARE) - ids_bytes(Path(job.index_path))
    return max(1, limit - spent + there)


def _heat(job: ColdJob) -> dict[str, float]:
    """Read the heat that the last process left: chunk id -> decayed demand."""
    from stoker.prefetch.heat import HeatGraph
    from stoker.service.snapshot_file import read_snapshot

    found = read_snapshot(Path(job.heat_path)) if job.heat_path else None
    if found is None:
        return {}
    graph = HeatGraph.from_snapshot(found[1])
    now_s = job.now_s or time.time()
    return {key[1]: weight for key, weight in graph.demand(now_s, job.tenant).items()}


def _measured(receipt: Any, index: Any, answers: list[list[Any]]) -> Any:
    """Return the receipt with what the warm-up served of the answers that came after it."""
    accesses = collections.Counter(name for found in answers for name in found)
    served = index.warm_served(accesses)
    return receipt if served is None else receipt.with_measured(served, accesses=accesses.total())


def _difference(before: int, after: int) -> int:
    return -1 if before < 0 or after < 0 else after - before


def _page_counts(index: Any) -> tuple[int, int]:
    """Return (demand hits, demand misses) of the page pool so far; (-1, -1): it does not count."""
    counts = getattr(index, "page_counts", None)
    if counts is None:
        return -1, -1
    hits, misses = counts()
    return int(hits), int(misses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
