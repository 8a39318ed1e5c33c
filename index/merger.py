"""Runs merges: seals what changed beside what serves, then switches to the new generation."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import structlog
from pyroaring import BitMap

from stoker.errors import StokerError
from stoker.index.documents import DocumentStore
from stoker.index.failed_write import let_go
from stoker.index.failpoint import failpoint
from stoker.index.generation import (
    Generation,
    IdKind,
    read_current,
    storage_error,
    write_current,
)
from stoker.index.merge import (
    MergeCancelled,
    MergeReport,
    Progress,
    build_merged,
    choose,
    has_work,
    heat_of,
)
from stoker.index.sealed import SealedSegment
from stoker.index.serving import Serving, remove_segment
from stoker.index.view import SegmentView, View, memory_shares, write_dead

# Searches outweigh it three to one; lower still, a busy machine would starve merges until the delta
# is full.
NICENESS: Final = 5
_NAVIGATION_STAGE: Final = 1

log = structlog.get_logger(__name__)


class Merger:
    """Merges one collection, one merge at a time, when asked or in the background.

    Attributes:
        heat_source: Called for the newest heat when a merge was given none.
        failures: Background merges that failed; each was logged.
    """

    def __init__(self, serving: Serving, store: DocumentStore) -> None:
        """Start the background threads: one merges, one links blocks of the delta meanwhile."""
        self.heat_source: Callable[[], Mapping[Any, float]] | None = None
        self.failures = 0
        self._serving = serving
        self._store = store
        self._settings = serving.settings
        self._lock = threading.Lock()
        self._merge_due = threading.Event()
        self._block_due = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(due, step), name=f"stoker-{name}", daemon=True)
            for name, due, step in (
                ("merge", self._merge_due, self._merge_if_due),
                ("delta", self._block_due, self._link_blocks),
            )
        ]
        for thread in self._threads:
            thread.start()

    def notice_changes(self) -> None:
        """Wake the background threads if what changed is worth their while."""
        delta = self._serving.view.delta
        if self._is_due(delta.row_count):
            self._merge_due.set()
        if delta.block_is_due:
            self._block_due.set()

    def wake(self) -> None:
        """Have the background look for a merge now."""
        self._merge_due.set()

    def stop(self) -> None:
        """Wait for the background threads to end; the collection refuses work already."""
        for due in (self._merge_due, self._block_due):
            due.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _is_due(self, rows: int) -> bool:
        return 0 < self._settings.merge_rows <= rows

    def merge(
        self,
        *,
        full: bool = False,
        heat: Mapping[Any, float] | None = None,
        progress: Progress | None = None,
    ) -> MergeReport:
        """Seal what changed into a new generation and switch to it; blocks until done.

        Searches and changes go on meanwhile; changes wait only for the switch itself.

        Args:
            full: Rewrite every segment, not only those worth it.
            heat: Weight by (tenant, chunk id) or by id: hot rows are sealed side by side. None
                asks ``heat_source``, where there is one.
            progress: Called with (what, done, total).

        Raises:
            NoRoom: the disk is full; the old generation goes on.
            MergeCancelled: closed meanwhile.
            UnavailableError: another index was put in this one's place; it is left alone.
        """
        store = self._store
        started = time.monotonic()

        def step(what: str, done: int, total: int) -> None:
            if self._serving.closed:
                raise MergeCancelled(f"{self._serving.path}: closed while merging")
            if progress is not None:
                progress(what, done, total)

        with self._lock:
            with self._serving.taken() as view:
                chosen = choose(view, full=full, settings=self._settings)
                # Rewriting with newer heat moves pages, even where no row has changed.
                if not has_work(view, chosen) and not (full and heat and chosen):
                    return MergeReport(view.generation.number, merged=False)
                store.check_in_place()
                if heat is None:
                    heat = self._newest_heat()
                sealed, bytes_written = self._built(view, chosen, heat, step)
                switch_started = time.monotonic()
                try:
                    generation = self._switch(store, view, chosen, sealed)
                except BaseException as error:
                    if sealed is not None:
                        sealed.release()
                        if store.in_place and (
                            read_current(self._serving.path).number == view.generation.number
                        ):
                            remove_segment(self._serving.path, sealed.entry.name)
                        sealed = None
                    let_go(error)
                    if isinstance(error, OSError):
                        raise storage_error(self._serving.path, error) from error
                    raise
                ended = time.monotonic()
            self._clean(store, generation)
        report = MergeReport(
            generation=generation.number,
            merged=True,
            rows=sealed.entry.count if sealed is not None else 0,
            rows_from_delta=view.rows.live_count,
            segments_in=len(chosen),
            bytes_written=bytes_written,
            seconds=ended - started,
            switch_s=ended - switch_started,
        )
        log.info("index.generation_merged", path=str(self._serving.path), **report.to_json())
        return report

    def _newest_heat(self) -> Mapping[Any, float] | None:
        if self.heat_source is None:
            return None
        try:
            return self.heat_source()
        except Exception as error:
            # Heat only orders rows: without it the merge is as right, and its warm set larger.
            log.warning("index.heat_unavailable", error=str(error))
            return None

    def _built(
        self,
        view: View,
        chosen: Sequence[SegmentView],
        heat: Mapping[Any, float] | None,
        progress: Progress,
    ) -> tuple[SealedSegment | None, int]:
        """Build the new segment and load what its first searches need, at the lowest priority.

        On a thread of its own: priority, once lowered, cannot be raised again, and the caller's
        thread may be one that serves.
        """
        made: list[tuple[SealedSegment | None, int]] = []
        failed: list[BaseException] = []

        def build() -> None:
            try:
                _lower_priority()
                sealed, size = build_merged(
                    self._serving.path,
                    view,
                    chosen,
                    self._store,
                    id_kind=self._serving.id_kind,
                    engine=self._serving.engine,
                    settings=self._settings,
                    memory_bytes=self._new_share(view, chosen),
                    heat=heat,
                    progress=progress,
                )
                made.append((sealed, size))
                if sealed is not None:
                    _load_navigation(sealed, heat, self._serving.id_kind)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=build, name="stoker-merge-build", daemon=True)
        thread.start()
        thread.join()
        if failed and not made:
            raise failed.pop()  # An error in a variable of its own traceback would be a cycle.
        if failed:
            # The segment is sound and only cold.
            log.warning("index.new_segment_cold", error=str(failed[0]))
        return made[0]

    def _new_share(self, view: View, chosen: Sequence[SegmentView]) -> int:
        """Budget of the segment to come: what its sources had, or all if nothing else stays."""
        budget = self._serving.memory_bytes
        if not budget:
            return 0
        shares = memory_shares(self._serving.path, view.generation.segments, budget)
        gone = {segment.sealed.entry.name for segment in chosen}
        kept_rows = sum(s.live_count for s in view.segments if s.sealed.entry.name not in gone)
        if kept_rows == 0:
            return budget
        by_rows = budget * (view.live_count - kept_rows) // max(1, view.live_count)
        return max(1, by_rows, sum(shares[name] for name in gone))

    def _switch(
        self,
        store: DocumentStore,
        view: View,
        chosen: Sequence[SegmentView],
        sealed: SealedSegment | None,
    ) -> Generation:
        """Publish the generation after ``view`` and serve it; changes wait meanwhile."""
        frozen = view.change_offset
        fresh = None if sealed is None else SegmentView(sealed, BitMap(), None)
        if fresh is not None:
            # Most of what changed since is marked before anybody has to wait.
            fresh = fresh.without(view.delta.changed_after(frozen))
        gone = {segment.sealed.entry.name for segment in chosen}
        with store.writes_paused():
            store.check_in_place()
            now = self._serving.view
            if fresh is not None:
                fresh = fresh.without(now.delta.changed_after(frozen))
            kept = [s for s in now.segments if s.sealed.entry.name not in gone]
            segments = (*kept, fresh) if fresh is not None else tuple(kept)
            number = view.generation.number + 1
            entries = tuple(write_dead(self._serving.path, number, segment) for segment in segments)
            generation = dataclasses.replace(
                view.generation,
                number=number,
                change_offset=frozen,
                id_kind=self._serving.settled_id_kind,
                segments=entries,
            )
            failpoint("merge.before_current")
            write_current(self._serving.path, generation)
            delta = now.delta.without(frozen)
            switched = View(generation, segments, delta, delta.view(), now.change_offset)
            self._serving.publish(switched)
        for segment in chosen:
            self._serving.release(segment.sealed)  # The generation's own reference.
        return generation

    def _clean(self, store: DocumentStore, generation: Generation) -> None:
        """Forget what the new generation made needless; failing here loses nothing."""
        failpoint("merge.before_purge")
        try:
            # A segment's dead rows are those that changed after it was sealed: these deletes are
            # what its file of dead rows is made anew from.
            store.check_in_place()
            sealed = [entry.sealed_offset for entry in generation.segments]
            store.purge_deleted(min(sealed, default=generation.change_offset))
            if not self._settings.sealed_vectors_kept:
                store.forget_vectors(generation.change_offset)
            self._serving.remove_orphans(generation)
        except (OSError, StokerError) as error:
            log.warning("index.clean_up_failed", path=str(self._serving.path), error=str(error))

    def _run(self, due: threading.Event, step: Callable[[], None]) -> None:
        """Do ``step`` whenever ``due`` is set, until the collection closes."""
        _lower_priority()
        while True:
            due.wait()
            due.clear()
            if self._serving.closed:
                return
            try:
                step()
            except MergeCancelled:
                return
            except Exception as error:
                # The next change wakes this thread again; the delta's bound holds meanwhile.
                self.failures += 1
                log.error("index.merge_failed", path=str(self._serving.path), error=str(error))

    def _merge_if_due(self) -> None:
        if self._is_due(self._serving.view.rows.count):
            self.merge()

    def _link_blocks(self) -> None:
        while True:
            view = self._serving.view
            if not view.delta.build_block(view.rows, go_on=lambda: not self._serving.closed):
                return
            with self._store.writes_paused():
                now = self._serving.view
                self._serving.publish(dataclasses.replace(now, rows=now.delta.view()))


def _lower_priority() -> None:
    """Let searches go before this thread, and before those that it starts."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _load_navigation(sealed: SealedSegment, heat: Mapping[Any, float] | None, kind: IdKind) -> None:
    """Load upper layers, links and codes, the hottest first, as far as the segment's budget goes.

    Without it the switch would send every search to a cold segment at once.
    """
    by_row = None
    if heat:
        keys = sealed.keys_at(np.arange(sealed.entry.count), kind)
        by_row = np.array([heat_of(heat, key) for key in keys], dtype=np.float32)
    for batch in sorted(sealed.segment.unit_batches(by_row), key=lambda batch: batch.stage):
        if batch.stage <= _NAVIGATION_STAGE:
            sealed.segment.load_units(batch.kind, batch.units, sticky=False, deadline_s=None)
