"""Prepares what the scenarios need: indexes, the log of before, its heat, recordings, page lists.

Nothing is staged: the events go through the embedded log and a server's own heat keeper, the index
is sealed with that heat as a merge does, and what baselines load was recorded on the engine. The
vectors and the two graphs are kept for the next run of the same size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker
from stoker.errors import UnavailableError
from stoker.index.manifest import Manifest
from stoker.prefetch.events import SEARCH_PERFORMED, Event, new_event
from stoker.prefetch.settings import PrefetchSettings
from stoker.service.coldstart import page_lists, workload
from stoker.service.coldstart.bench_options import BenchOptions
from stoker.service.coldstart.load_job import KINDS
from stoker.service.coldstart.page_trace import (
    pages_of,
    record_pages,
    resident_at_stop,
    segment_folder,
)
from stoker.service.coldstart.workload import Requests, Schedule
from stoker.service.consume import ConsumeOptions
from stoker.service.demo import prepare as preparing
from stoker.service.demo.options import DemoOptions
from stoker.service.engine_opening import HEAT_NAME
from stoker.service.event_wiring import consumer_group, open_event_log
from stoker.service.heat_keeper import HeatKeeper
from stoker.service.padding import exact_top, pad_neighbours
from stoker.service.publisher import Publisher
from stoker.service.settings import ServiceSettings

Say = Callable[[str], None]
Keys = NDArray[np.int64]

TENANT = "default"
_EFS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_EF_QUERIES = 200
_ANSWER_EF = 128
_CATCH_UP_S = 600.0
_REBUILD_SEED = 9_001
_RECIPE = 1


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One of the four, ready to be measured.

    Attributes:
        index_path: The index of after the start.
        queries_path: Queries and arrivals, as `LoadJob` has it.
        judged: int64, numbers of the queries whose answers are judged.
        truth: For each of those, the ids that exact search finds.
        lists: Method to the file of its page list.
        state_path: The state folder that Stoker starts with; copied for each start.
    """

    name: str
    index_path: Path
    queries_path: Path
    judged: NDArray[np.int64]
    truth: list[list[str]]
    lists: Mapping[str, Path]
    state_path: Path


@dataclasses.dataclass(frozen=True)
class Scenes:
    """All that was prepared.

    Attributes:
        left_out: Methods that cannot be measured here, and why.
        facts: Name and value of what a reader must know.
    """

    scenarios: list[Scenario]
    schedule: Schedule
    index_bytes: int
    ef: int
    now_s: float
    left_out: dict[str, str]
    facts: dict[str, str]


def prepare_scenes(options: BenchOptions, say: Say) -> Scenes:
    """Prepare everything; blocks for the builds, which the next run of the same size is spared.

    Raises:
        InputError: a file that was given cannot be used.
    """
    return _Preparation(options, say).run()


class _Preparation:
    """The steps, in their order, with what they share."""

    def __init__(self, options: BenchOptions, say: Say) -> None:
        self._options = options
        self._say = say
        self._work = options.out / "work"
        self._demo = DemoOptions(threads=0)
        self._left_out: dict[str, str] = {}

    def run(self) -> Scenes:
        options, work = self._options, self._work
        work.mkdir(parents=True, exist_ok=True)
        for name in ("run", "states", "lists"):
            shutil.rmtree(work / name, ignore_errors=True)
            (work / name).mkdir()
        real, origin = self._embeddings()
        self._vectors, self._ids = self._padded(real, origin)
        history, coming = self._requests(len(real))
        plan = self._schedule(coming)
        now_s = float(history.times_s[-1])
        after = {
            "after": workload.query_vectors(coming.passages, real, seed=options.seed + 1),
            "drifted": workload.query_vectors(
                workload.drifted(
                    coming.passages,
                    history.passages,
                    len(real),
                    ratio=options.drift_ratio,
                    seed=options.seed + 2,
                ),
                real,
                seed=options.seed + 3,
            ),
        }
        before = workload.query_vectors(history.passages, real, seed=options.seed)
        demand = self._log_and_heat(history, before, now_s)
        indexes = self._indexes(demand)
        ef, recall = self._width(indexes["first"], before[-_EF_QUERIES:])
        with stoker.open(indexes["first"]) as index:
            index_bytes = index.total_bytes
        self._say(f"search width {ef}: recall@{options.k} {recall:.3f}, fully loaded")
        truth = {name: self._truth(queries) for name, queries in after.items()}
        for name, queries in after.items():
            np.savez(self._place(name), queries=queries, arrivals_s=plan.arrivals_s)
        lists = self._lists(indexes, before, after, ef, int(index_bytes * options.budget_ratio))
        scenarios = []
        for name in options.scenarios:
            traffic = "drifted" if name == "drift" else "after"
            scenarios.append(
                Scenario(
                    name=name,
                    index_path=indexes["rebuilt" if name == "rebuild" else "first"],
                    queries_path=self._place(traffic),
                    judged=truth[traffic][0],
                    truth=truth[traffic][1],
                    lists=lists["rebuild" if name == "rebuild" else traffic],
                    state_path=work / "states" / ("new" if name == "scale-out" else "back"),
                )
            )
        asked = np.isin(coming.passages, history.passages).mean()
        facts = {
            "vectors": f"{len(self._ids):,} of {real.shape[1]} dimensions: {origin}, and"
            f" {len(self._ids) - len(real):,} generated near neighbours",
            "requests": f"{coming.origin}; {len(history):,} before the stop, the next"
            f" {len(coming):,} measured, {asked:.0%} of them about a passage asked for before",
            "arrivals": f"{plan.origin}, {plan.speed:,.3g} times as fast as recorded:"
            f" {len(coming) / options.seconds:.1f} a second for {options.seconds:g} s",
            "drift": f"{options.drift_ratio:.0%} of the different passages of the measured requests"
            " are each exchanged for one that nobody asked for before",
            "rebuild": "rows permuted, another seed of the graph, sealed without heat",
            "search": f"k {options.k}, width {ef} (recall {recall:.3f} fully loaded), recall target"
            f" {options.recall_target}",
        }
        return Scenes(scenarios, plan, index_bytes, ef, now_s, self._left_out, facts)

    def _place(self, name: str) -> Path:
        return self._work / "run" / f"{name}.npz"

    # ---- vectors and traffic ---------------------------------------------------------------

    def _embeddings(self) -> tuple[workload.Vectors, str]:
        options = self._options
        if options.vectors_path is not None:
            real = workload.read_vectors(options.vectors_path)[: options.total]
            return real, f"{len(real):,} real ones ({options.vectors_path.name})"
        count = min(options.generated_count, options.total)
        real = workload.generated_vectors(count, options.generated_dim, seed=options.seed)
        return real, f"{count:,} GENERATED ones (no --vectors given)"

    def _padded(self, real: workload.Vectors, origin: str) -> tuple[workload.Vectors, list[str]]:
        """Return the vectors padded, and start afresh where kept files are of other ones."""
        options = self._options
        ids = [str(row) for row in range(len(real))]
        parts = (_RECIPE, real.shape, options.total, options.seed, preparing.M)
        key = hashlib.sha256(json.dumps(parts).encode() + real.tobytes()).hexdigest()
        kept, path = self._work / "key", self._work / "vectors.npy"
        if not (kept.exists() and kept.read_text(encoding="utf-8") == key):
            for name in ("first.hnsw", "rebuilt.hnsw", "key"):
                (self._work / name).unlink(missing_ok=True)
            self._say(f"vectors: {origin}, padded to {options.total:,}")
            padded, pads = pad_neighbours(real, options.total, seed=options.seed)
            np.save(path, padded)
            kept.write_text(key, encoding="utf-8")
        else:
            pads = [f"pad-{row}" for row in range(max(0, options.total - len(real)))]
        return np.load(path, mmap_mode="r"), ids + pads

    def _requests(self, real_count: int) -> tuple[Requests, Requests]:
        options = self._options
        if options.requests_path is not None:
            whole = workload.read_requests(options.requests_path, real_count)
        else:
            count = int(options.count / (1.0 - options.history_ratio)) + 1
            whole = workload.generated_requests(count, real_count, seed=options.seed)
        stop = int(len(whole) * options.history_ratio)
        coming = whole.part(stop, stop + options.count)
        if len(coming) < options.count:
            self._say(
                f"the recording has {len(coming):,} requests after the stop: the rate is"
                f" {len(coming) / options.seconds:.1f} a second, not {options.rate:g}"
            )
        return whole.part(max(0, stop - options.history_max), stop), coming

    def _schedule(self, coming: Requests) -> Schedule:
        options = self._options
        if options.arrivals_path is not None:
            times = workload.read_arrivals(options.arrivals_path)
            origin = f"{options.arrivals_path.name}, {len(times):,} arrivals"
        elif options.requests_path is not None:
            times, origin = coming.times_s, f"the requests' own times ({coming.origin})"
        else:
            times = workload.generated_arrivals(len(coming), seed=options.seed)
            origin = "GENERATED Poisson arrivals (no --arrivals given)"
        return workload.schedule(times, count=len(coming), seconds=options.seconds, origin=origin)

    # ---- before the stop -------------------------------------------------------------------

    def _log_and_heat(
        self, history: Requests, queries: workload.Vectors, now_s: float
    ) -> dict[str, float]:
        """Answer the requests of before, log their events, and keep the heat as a server does.

        Leaves two state folders: "new" has the log only, "back" the heat's snapshot too.
        """
        graph = self._graph("first", None)
        states = self._work / "states"
        settings = ServiceSettings()
        log = open_event_log(settings, _made(states / "new"))
        publisher = Publisher(log, topic=settings.event_topic, threads=False)
        publisher.publish(self._events(history, graph.knn_query(queries, k=self._options.k)[0]))
        publisher.close()
        log.close()
        shutil.copytree(states / "new", states / "back")
        log = open_event_log(settings, states / "back")
        keeper = HeatKeeper(
            log,
            topic=settings.event_topic,
            group=consumer_group(settings, states / "back"),
            snapshot_path=states / "back" / HEAT_NAME,
            options=ConsumeOptions(),
            settings=PrefetchSettings(),
        )
        keeper.start()
        if not keeper.wait_caught_up(_CATCH_UP_S) or not keeper.stop(_CATCH_UP_S):
            raise UnavailableError("the heat of the requests before the stop was not made in time")
        demand = {key[1]: weight for key, weight in keeper.demand(now_s).items()}
        log.close()
        self._say(f"{len(history):,} searches before the stop; heat of {len(demand):,} chunks")
        return demand

    def _events(self, history: Requests, answers: NDArray[Any]) -> list[Event]:
        return [
            new_event(
                SEARCH_PERFORMED,
                tenant=TENANT,
                session=session,
                chunk_ids=[self._ids[row] for row in rows],
                time_s=float(time_s),
                event_id=f"before-{number}",
            )
            for number, (time_s, session, rows) in enumerate(
                zip(history.times_s, history.sessions, answers.tolist(), strict=True)
            )
        ]

    # ---- indexes ---------------------------------------------------------------------------

    def _graph(self, name: str, rows: NDArray[np.int64] | None) -> Any:
        """Return hnswlib's graph over the vectors, in the order of ``rows``; kept as a file."""
        import hnswlib

        path = self._work / f"{name}.hnsw"
        vectors = self._vectors if rows is None else self._vectors[rows]
        if not path.exists():
            self._say(f"linking {len(vectors):,} vectors ({name}); kept for the next run")
            temporary = path.with_suffix(".part")
            preparing.link(
                vectors,
                temporary,
                self._demo,
                lambda *_: None,
                seed=_REBUILD_SEED if name == "rebuilt" else self._options.seed,
            )
            temporary.replace(path)
        graph = hnswlib.Index(space="ip", dim=vectors.shape[1])
        graph.load_index(str(path))
        graph.set_ef(_ANSWER_EF)
        return graph

    def _indexes(self, demand: Mapping[str, float]) -> dict[str, Path]:
        """Seal the index of before with its heat, and one rebuilt from other rows without."""
        found = {"first": self._work / "run" / "index"}
        heat = np.array([demand.get(name, 0.0) for name in self._ids], dtype=np.float32)
        self._seal("first", found["first"], np.arange(len(self._ids)), heat)
        if "rebuild" in self._options.scenarios:
            found["rebuilt"] = self._work / "run" / "rebuilt"
            rows = np.random.default_rng(_REBUILD_SEED).permutation(len(self._ids))
            self._graph("rebuilt", rows)
            self._seal("rebuilt", found["rebuilt"], rows, None)
        return found

    def _seal(
        self, name: str, path: Path, rows: NDArray[np.int64], heat: NDArray[np.float32] | None
    ) -> None:
        self._say(f"sealing the index ({name})")
        preparing.seal(
            path,
            self._work / f"{name}.hnsw",
            self._vectors[rows],
            [self._ids[row] for row in rows.tolist()],
            [],
            heat=heat,
            options=self._demo,
            progress=lambda *_: None,
        )

    def _width(self, path: Path, queries: workload.Vectors) -> tuple[int, float]:
        """Return the narrowest width that reaches the aim on requests of before, and its recall."""
        options = self._options
        rows = exact_top(self._vectors, queries, options.k)
        truth = [{self._ids[row] for row in part} for part in rows]
        recall = 0.0
        with stoker.open(path) as index:
            index.warm()
            for ef in _EFS:
                hits = index.search(queries, options.k, ef=ef, recall_target=options.recall_target)
                shares = [
                    len(set(found.tolist()) & right) / options.k
                    for found, right in zip(hits.ids, truth, strict=True)
                ]
                recall = float(np.mean(shares))
                if recall >= options.recall_aim:
                    return ef, recall
        return _EFS[-1], recall

    def _truth(self, queries: workload.Vectors) -> tuple[NDArray[np.int64], list[list[str]]]:
        options = self._options
        judged = np.unique(np.linspace(0, len(queries) - 1, options.judged).astype(np.int64))
        rows = exact_top(self._vectors, queries[judged], options.k)
        return judged, [[self._ids[row] for row in part] for part in rows]

    # ---- what baselines load ---------------------------------------------------------------

    def _lists(
        self,
        indexes: Mapping[str, Path],
        before: workload.Vectors,
        after: Mapping[str, workload.Vectors],
        ef: int,
        budget_bytes: int,
    ) -> dict[str, dict[str, Path]]:
        """Make the page lists of each index and traffic: method to file, by what they are for."""
        options = self._options
        how: dict[str, Any] = {"k": options.k, "ef": ef, "recall_target": options.recall_target}
        asked = before[-options.recorded :]
        self._say("recording the pages that queries need, before and after the stop")
        page_bytes = Manifest.read(segment_folder(indexes["first"])).page_bytes
        trace = record_pages(indexes["first"], asked, **how)
        known = {
            "last-blocks": resident_at_stop(
                indexes["first"], asked, memory_bytes=budget_bytes, **how
            ),
            "most-recent": page_lists.most_recent(trace),
        }
        try:
            known["w-tinylfu"] = page_lists.w_tinylfu_content(trace, budget_bytes // page_bytes)
        except UnavailableError as error:
            self._left_out["w-tinylfu"] = str(error)
        wanted = [("after", "first", "after")]
        if "drift" in options.scenarios:
            wanted.append(("drifted", "first", "drifted"))
        if "rebuild" in options.scenarios:
            wanted.append(("rebuild", "rebuilt", "after"))
        lists = {}
        for name, index, traffic in wanted:
            pages = _page_counts(indexes[index])
            made = dict(known)
            made["oracle"] = page_lists.most_needed(
                record_pages(indexes[index], after[traffic], **how)
            )
            made["sequential"] = page_lists.sequential(pages)
            made["level-order"] = self._level_order(indexes[index], pages)
            lists[name] = {
                method: self._save(f"{name}-{method}", keys, pages) for method, keys in made.items()
            }
        return lists

    def _level_order(self, path: Path, pages: Mapping[str, int]) -> Keys:
        from stoker.index.segment import Segment

        folder = segment_folder(path)
        with Segment.open(folder) as segment:
            rows = segment.rows_of(self._ids)
        return page_lists.level_order(Manifest.read(folder), rows, pages)

    def _save(self, name: str, keys: Keys, pages: Mapping[str, int]) -> Path:
        """Write a list; pages that this index does not have (of an older layout) are left out."""
        kinds, units = pages_of(keys)
        counts = np.array([pages.get(kind, 0) for kind in KINDS])
        there = units < counts[kinds]
        path = self._work / "lists" / f"{name}.npz"
        np.savez(path, kinds=kinds[there], units=units[there])
        return path


def _page_counts(path: Path) -> dict[str, int]:
    from stoker.index.segment import Segment

    with Segment.open(segment_folder(path)) as segment:
        return {entry.kind: entry.pages for entry in segment.resident().kinds}


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def ids_found(answers: NDArray[np.str_], judged: NDArray[np.int64]) -> Sequence[Sequence[str]]:
    """Return the ids of the judged queries as `recall_at_k` takes them."""
    found: Sequence[Sequence[str]] = answers[judged].tolist()
    return found
