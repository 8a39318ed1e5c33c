"""The measured replica: opens the index, takes traffic by schedule, loads in the background.

Run as ``python -m stoker.service.coldstart.load_child JOB``; `load_run` starts it. Its clock begins
before the interpreter does. The traffic is open-loop: a request's latency counts from the moment at
which it was due, so what waits because earlier ones are slow shows.
"""

from __future__ import annotations

import collections
import importlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stoker.service.coldstart.ahead import standing
from stoker.service.coldstart.load_job import (
    KINDS,
    LOAD_ALL,
    LOAD_HEAT,
    LOAD_LIST,
    LOAD_NONE,
    LoadJob,
    LoadRecord,
)
from stoker.service.coldstart.process_io import device_bytes, ids_bytes
from stoker.service.turns import Callers

_SAMPLE_S = 0.02
_PROBES = 9
_WAIT_S = 600.0


def main(argv: list[str]) -> int:
    """Do one job; the record is written last, so a record means that all of it worked."""
    job = LoadJob.from_json(Path(argv[0]).read_text(encoding="utf-8"))
    if job.procs_path:
        Path(job.procs_path).write_text(str(os.getpid()), encoding="utf-8")
    run_job(job).save(Path(job.result_path))
    return 0


def run_job(job: LoadJob) -> LoadRecord:
    """Open, take the traffic, load meanwhile, and count. See `LoadRecord`."""
    import numpy as np

    # All that a server imports before it opens: the same for every load.
    importlib.import_module("stoker.service.engine_opening")
    from stoker.index.collection import Collection
    from stoker.service.collection_index import CollectionIndex

    with np.load(job.queries_path) as data:
        queries, arrivals = data["queries"], data["arrivals_s"]
    probe_began = time.monotonic_ns()
    latency_s = _read_latency(Path(job.index_path))
    # The probe is ours and not the replica's: its time does not count.
    started_ns = job.started_ns + time.monotonic_ns() - probe_began
    before = device_bytes()
    index = CollectionIndex(Collection(Path(job.index_path), "r", memory_bytes=None))
    clock = _Clock(started_ns)
    callers = Callers()
    loader = _Loader(job, index, clock, callers)
    loader.open()
    opened_s = clock.now()
    sampler = _Sampler(clock, before)
    if job.gated:
        loader.run()
    begins_s = clock.now() if job.gated else opened_s
    traffic = _Traffic(job, index, queries, arrivals, clock, begins_s, callers)
    counted = index.page_counts()
    traffic.start()
    if not job.gated:
        loader.run()
        counted = index.page_counts()
    traffic.wait()
    loader.measure(traffic.begun_after(loader.ready_s))
    hits, misses = index.page_counts()
    loader.close()
    samples = sampler.stop()
    record = LoadRecord(
        opened_s=opened_s,
        begins_s=begins_s,
        heat_s=loader.heat_s,
        ready_s=loader.ready_s or opened_s,
        load_bytes=loader.bytes_read,
        load_pages=loader.pages,
        index_bytes=index.total_bytes(),
        priority=standing(),
        heat_keys=loader.heat_keys,
        receipt=loader.receipt,
        page_hits=hits - counted[0],
        page_misses=misses - counted[1],
        read_latency_s=latency_s,
        done_s=traffic.done_s,
        begun_s=traffic.begun_s,
        completeness=traffic.completeness,
        pages_read=traffic.pages_read,
        ids=np.array(traffic.ids, dtype=np.str_),
        sample_s=np.array([moment for moment, _ in samples]),
        sample_bytes=np.array([count for _, count in samples], dtype=np.int64),
    )
    index.close()
    return record


class _Clock:
    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns

    def now(self) -> float:
        return (time.monotonic_ns() - self._started_ns) / 1e9


class _Sampler:
    """Notes every so often how much the kernel has read from devices for this process."""

    def __init__(self, clock: _Clock, before: int) -> None:
        self._clock = clock
        self._before = before
        self._rows: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._note()

    def _note(self) -> None:
        now = device_bytes()
        self._rows.append((self._clock.now(), -1 if now < 0 else now - self._before))

    def stop(self) -> list[tuple[float, int]]:
        self._stop.set()
        self._thread.join()
        self._note()
        return self._rows


class _Traffic:
    """Threads that each take the next request, wait until it is due, and answer it."""

    def __init__(
        self,
        job: LoadJob,
        index: Any,
        queries: Any,
        arrivals: Any,
        clock: _Clock,
        begins_s: float,
        callers: Callers,
    ) -> None:
        import numpy as np

        self._job = job
        self._index = index
        self._queries = queries
        self._due = (arrivals + begins_s).tolist()
        self._clock = clock
        self._callers = callers
        self._lock = threading.Lock()
        self._next = 0
        self._error: BaseException | None = None
        count = len(queries)
        self.done_s = np.zeros(count)
        self.begun_s = np.zeros(count)
        self.completeness = np.zeros(count, np.float32)
        self.pages_read = np.zeros(count, np.int64)
        self.ids: list[list[str]] = [[]] * count
        self._threads = [
            threading.Thread(target=self._run, name=f"search-{n}", daemon=True)
            for n in range(job.threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait for the last answer.

        Raises:
            BaseException: what a search raised.
        """
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def begun_after(self, time_s: float) -> list[list[str]]:
        """Return what the requests found that were taken up after a time of the clock."""
        rows = (self.begun_s >= time_s).nonzero()[0].tolist()
        return [[name for name in self.ids[row] if name] for row in rows]

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    number = self._next
                    self._next += 1
                if number >= len(self._due) or self._error is not None:
                    return
                wait_s = self._due[number] - self._clock.now()
                if wait_s > 0:
                    time.sleep(wait_s)
                with self._callers:
                    self._answer(number)
        except BaseException as error:
            self._error = error

    def _answer(self, number: int) -> None:
        job = self._job
        self.begun_s[number] = self._clock.now()
        hits = self._index.search(
            self._queries[number],
            job.k,
            ef=job.ef or None,
            recall_target=job.recall_target or None,
        )
        found = [str(name) for name in hits.ids.tolist()]
        self.done_s[number] = self._clock.now()
        self.completeness[number] = float(hits.completeness)
        self.pages_read[number] = int(hits.pages_read)
        self.ids[number] = found + [""] * (job.k - len(found))


class _Loader:
    """Loads what the job says, in the calling thread, as a server's warm-up thread does."""

    def __init__(self, job: LoadJob, index: Any, clock: _Clock, callers: Callers) -> None:
        self._job = job
        self._callers = callers
        self._index = index
        self._clock = clock
        self._heat: Any = None
        self._closers: list[Any] = []
        self.heat_s = self.ready_s = 0.0
        self.bytes_read = self.pages = self.heat_keys = 0
        self.receipt: dict[str, Any] | None = None
        self._runner: Any = None
        self._asked: Any = None

    def open(self) -> None:
        """Restore the heat, which a server does before it takes traffic."""
        if self._job.load == LOAD_HEAT:
            self._heat = self._open_heat()

    def run(self) -> None:
        load = self._job.load
        if load == LOAD_NONE:
            return
        if load == LOAD_LIST:
            self._load_list()
        else:
            assert load in (LOAD_ALL, LOAD_HEAT), load
            self._warm(everything=load == LOAD_ALL)
        self.ready_s = self._clock.now()

    def measure(self, found: list[list[str]]) -> None:
        """Take the receipt, and add what the warm-up served of these answers, as a server does."""
        from stoker.errors import UnavailableError
        from stoker.index.document_values import DEFAULT_TENANT
        from stoker.prefetch.warm_set import Accesses

        if self._runner is None:
            return
        self._runner.wait(_WAIT_S)
        receipt = self._runner.receipt
        if receipt is None:
            raise UnavailableError(f"the warm-up failed: {self._runner.status().error}")
        self.bytes_read = receipt.bytes_read
        self.pages = sum(line.loaded for line in receipt.lines)
        counts = collections.Counter(name for names in found for name in names)
        self._asked = Accesses({(DEFAULT_TENANT, name): n for name, n in counts.items()})
        self._runner.measure(accesses_min=1)  # the traffic is over: more will not come
        self.receipt = self._runner.receipt.to_dict()

    def close(self) -> None:
        for closer in self._closers:
            closer()

    def _load_list(self) -> None:
        """Load the pages of the list in its order, in rounds as large as a plan's."""
        import numpy as np

        from stoker.prefetch.settings import PrefetchSettings

        with np.load(self._job.list_path) as data:
            kinds, units = data["kinds"], data["units"]
        unit_bytes = {batch.kind: batch.unit_bytes for batch in self._index.unit_batches({})}
        sizes = np.array([unit_bytes.get(kind, 0) for kind in KINDS])[kinds]
        ends = np.cumsum(sizes)
        kept = int(np.searchsorted(ends, self._job.budget_bytes, side="right"))
        rounds = (ends[:kept] - 1) // PrefetchSettings().plan_round_bytes
        for turn in np.unique(rounds):
            here = np.flatnonzero(rounds == turn)
            for kind in np.unique(kinds[here]):
                chosen = units[here][kinds[here] == kind]
                outcome = self._index.load_units(KINDS[kind], chosen, sticky=False, deadline_s=None)
                self.bytes_read += outcome.bytes_read
                self.pages += outcome.loaded

    def _warm(self, *, everything: bool) -> None:
        """Warm up as a server does: the same runner, the same source, the same heat."""
        from stoker.prefetch.coverage_curve import KNOWN
        from stoker.prefetch.settings import PrefetchSettings
        from stoker.service.warmup import WarmupRunner

        heat = self._heat
        now_s = self._job.now_s

        if heat is not None:
            heat.start()

        def demand() -> Any:
            if heat is None:
                return {}
            found = heat.demand_for_warmup(now_s, wait_s=_WAIT_S)
            self.heat_s, self.heat_keys = self._clock.now(), len(found)
            return found

        runner = WarmupRunner(
            self._index.warm_sources,
            demand,
            settings=PrefetchSettings(),
            receipt_path=None,
            coverage=lambda: KNOWN if heat is None else heat.coverage(now_s),
            held_back=lambda: () if heat is None else heat.sink.held_back(now_s),
            accesses_since=lambda since_s: self._asked,
            callers=self._callers,
        )
        self._runner = runner
        runner.start(
            budget_bytes=None if everything else self._budget(),
            deadline_s=None,
            everything=everything,
        )
        # A server is ready now: what the receipt predicts is worked out beside the traffic.
        runner.wait_loaded(_WAIT_S)

    def _budget(self) -> int:
        """Return what the pages may take, so that all that is read keeps to the budget."""
        return max(1, self._job.budget_bytes - ids_bytes(Path(self._job.index_path)))

    def _open_heat(self) -> Any:
        """Open the state folder as a server does; the log is followed from `_warm` on."""
        from stoker.prefetch.settings import PrefetchSettings
        from stoker.service.consume import ConsumeOptions
        from stoker.service.engine_opening import HEAT_NAME
        from stoker.service.event_wiring import consumer_group, open_event_log
        from stoker.service.heat_keeper import HeatKeeper
        from stoker.service.settings import ServiceSettings

        settings = ServiceSettings()
        state = Path(self._job.state_path)
        event_log = open_event_log(settings, state)
        keeper = HeatKeeper(
            event_log,
            topic=settings.event_topic,
            group=consumer_group(settings, state),
            snapshot_path=state / HEAT_NAME,
            options=ConsumeOptions(
                snapshot_s=settings.snapshot_s,
                dedup_bytes=settings.event_dedup_bytes,
                dedup_s=settings.event_dedup_s,
            ),
            settings=PrefetchSettings(),
        )
        self._closers += [lambda: keeper.stop(_WAIT_S), event_log.close]
        return keeper


def _read_latency(index_path: Path) -> float:
    """Return the median time of single-page reads at places far apart, past the OS cache."""
    import mmap
    import statistics

    files = sorted(index_path.rglob("vectors.stk"), key=lambda path: -path.stat().st_size)
    if not files:
        return -1.0
    try:
        file = os.open(files[0], os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return -1.0
    page = mmap.mmap(-1, mmap.PAGESIZE)
    pages = files[0].stat().st_size // mmap.PAGESIZE
    times = []
    try:
        for probe in range(_PROBES):
            place = (2 * probe + 1) * pages // (2 * _PROBES) * mmap.PAGESIZE
            began = time.perf_counter()
            os.preadv(file, [page], place)
            times.append(time.perf_counter() - began)
    except OSError:
        return -1.0
    finally:
        os.close(file)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
