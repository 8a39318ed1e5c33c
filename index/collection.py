"""A collection: documents that can be searched, changed and merged while they serve.

Folder layout:

    CURRENT            the generation that serves: one line of JSON, one line of CRC-32
    segments/NAME/     sealed segments, immutable
    filters/NAME       metadata postings of a segment; made anew from the documents when lost
    dead/GEN-NAME      rows of a segment outdated at that generation; made anew from the log
    documents.db       documents and the change log
    writer.lock        held by the one process that writes

A change is durable in documents.db when the call returns and shows in searches at once, through the
delta. A merge seals the delta into a new segment and publishes a new CURRENT; what is not named
there is removed when nobody reads it any more, at the latest on the next open for writing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import structlog
from numpy.typing import NDArray
from pyroaring import BitMap

from stoker.errors import CapacityError, CorruptError, InputError, StokerError, UnavailableError
from stoker.index.answer import Question, answer
from stoker.index.collection_build import generation_of_segment, is_bare_segment
from stoker.index.delta import Delta, Key
from stoker.index.document_values import (
    DEFAULT_TENANT,
    Change,
    Document,
    DocumentId,
    check_id,
    check_tenant,
    check_text,
    encode_metadata,
)
from stoker.index.documents import DocumentStore
from stoker.index.exact import Metric
from stoker.index.failpoint import failpoint
from stoker.index.filters import parse_filter
from stoker.index.generation import (
    DEAD_NAME,
    DOCUMENTS_NAME,
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    IdKind,
    read_current,
    storage_error,
    write_current,
)
from stoker.index.hits import Hits
from stoker.index.merge import MergeCancelled, MergeReport, build_merged, choose, has_work
from stoker.index.residency import Residency
from stoker.index.sealed import NativeEngine, SealedSegment, SegmentEngine, removable
from stoker.index.settings import IndexSettings
from stoker.index.view import SegmentView, View, memory_shares, open_view, write_dead
from stoker.index.warming import IndexUnits, UnitNumbers, merged_residency

if TYPE_CHECKING:
    from stoker.index.segment import LoadCounts

Mode = Literal["r", "rw"]
K_MAX: Final = 1_000
_LOCK_NAME: Final = "writer.lock"
_OPEN_TRIES: Final = 10

log = structlog.get_logger(__name__)


class CollectionClosed(UnavailableError):
    """The collection was closed; open it again."""


class WriterBusy(UnavailableError):
    """Another process has the collection open for writing; one may."""


class DeltaFull(CapacityError):
    """Changes arrive faster than merges seal them; wait for the merge and try again."""


class Collection:
    """One collection, open in this process. Any thread may call anything.

    Invariants, held by `check`:
        * each document is live in exactly one place: one row of one segment, or of the delta;
        * the view only moves forward in changes and generations;
        * CURRENT names only segments that are on disk, whole.
    """

    def __init__(
        self,
        path: Path | str,
        mode: Mode = "r",
        *,
        memory_bytes: int | None = None,
        settings: IndexSettings | None = None,
        engine: SegmentEngine | None = None,
    ) -> None:
        """Open a collection, or for reading a bare segment's folder.

        Args:
            path: The folder, as `create` or `build` made it.
            mode: "r" reads, from any number of processes; "rw" also writes, from one.
            memory_bytes: Budget of the segments' pages together; None means the setting.
            settings: The room's settings.
            engine: Opens and builds segments; the native one unless a test says otherwise.

        Raises:
            InputError: no such folder, or a bare segment opened for writing.
            WriterBusy: another process writes.
            CorruptError: CURRENT, a segment or documents.db is damaged; names file and place.
        """
        self.path = Path(path)
        self.mode: Mode = mode
        self.heat_source: Callable[[], Mapping[Any, float]] | None = None
        self._settings = settings or IndexSettings()
        self._memory_bytes = memory_bytes
        self._engine: SegmentEngine = engine or NativeEngine()
        # Guards `_view` and the count of its users; never held over I/O.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._users = 0
        self._merge_lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._closed = False
        self._writer_lock = -1
        self._store: DocumentStore | None = None
        self._units = UnitNumbers()
        self._wake = threading.Event()
        self._worker: threading.Thread | None = None
        self.merges_failed = 0
        if mode not in ("r", "rw"):
            raise InputError(f"mode: expected 'r' or 'rw', found {mode!r}")
        if not self.path.is_dir():
            raise InputError(f"{self.path}: no such folder; `stoker index` builds one")
        self._bare = is_bare_segment(self.path)
        try:
            self._view = self._open_bare() if self._bare else self._open()
        except BaseException:
            self._abandon()
            raise
        self._id_kind = self._view.generation.id_kind or self._stored_id_kind()
        if mode == "rw":
            self._worker = threading.Thread(
                target=self._work, name="stoker-collection", daemon=True
            )
            self._worker.start()

    # -- opening ---------------------------------------------------------------------------

    def _open_bare(self) -> View:
        """Serve a segment's folder as a collection of it alone."""
        if self.mode == "rw":
            raise InputError(
                f"{self.path}: a bare segment cannot be changed; `build_collection` and "
                "`stoker index` make collections, which can"
            )
        generation = generation_of_segment(self.path)
        sealed = SealedSegment.open(
            self.path,
            generation.segments[0],
            engine=self._engine,
            memory_bytes=self._memory_bytes,
            settings=self._settings,
        )
        delta = Delta(generation.dim, generation.metric)
        segment = SegmentView(sealed, BitMap(), None)
        return View(generation, (segment,), delta, delta.view(), 0)

    def _open(self) -> View:
        if self.mode == "rw":
            self._lock_for_writing()
            self._remove_orphans(read_current(self.path))
        for _ in range(_OPEN_TRIES):
            generation = read_current(self.path)
            try:
                self._open_store(generation)
                view = self._load(generation, {})
            except (OSError, CorruptError) as error:
                # A writer may have moved on and removed what this generation named.
                if read_current(self.path).number != generation.number:
                    self._close_store()
                    continue
                if isinstance(error, OSError):
                    raise CorruptError(
                        f"{self.path}: generation {generation.number} names what is not there: "
                        f"{error}"
                    ) from error
                raise
            if self.mode == "rw" or read_current(self.path).number == generation.number:
                return view
            # Deletes that the newer generation has sealed may be forgotten by now.
            self._drop(view)
            self._close_store()
        raise UnavailableError(f"{self.path}: generations changed {_OPEN_TRIES} times during open")

    def _load(self, generation: Generation, reuse: Mapping[str, SealedSegment]) -> View:
        return open_view(
            self.path,
            generation,
            self._store,
            engine=self._engine,
            memory_bytes=self._memory_bytes,
            settings=self._settings,
            reuse=reuse,
        )

    def _open_store(self, generation: Generation) -> None:
        path = self.path / DOCUMENTS_NAME
        self._store = DocumentStore.open(
            path,
            dim=generation.dim,
            writable=self.mode == "rw",
            on_commit=self._committed if self.mode == "rw" else None,
        )
        if self._store.change_offset < generation.change_offset:
            raise CorruptError(
                f"{path}: expected changes up to {generation.change_offset} at least, which "
                f"generation {generation.number} has sealed; found {self._store.change_offset}"
            )

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _stored_id_kind(self) -> IdKind | None:
        kind = self._store.id_kind() if self._store is not None else None
        return None if kind is None else ("int" if kind is int else "str")

    def _lock_for_writing(self) -> None:
        self._writer_lock = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._writer_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WriterBusy(f"{self.path}: another process has it open for writing") from error

    # -- searching -------------------------------------------------------------------------

    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        ef: int | None = None,
        recall_target: float | None = None,
        deadline_ms: float | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> Hits:
        """Find the ``k`` nearest live documents of one query or of each in a batch.

        Args:
            queries: float32, shape (dim,) or (nq, dim), finite.
            k: 1 to 1,000.
            ef: Width of the walk; None takes what the target needs.
            recall_target: Recall@k aimed at; None means the setting.
            deadline_ms: Time for the call; past it nothing more is read and the answer says how
                complete it is.
            filter: See `stoker.index.filters`.

        Returns:
            Hits with 1-d arrays for one query, 2-d for a batch.

        Raises:
            InputError: a wrong shape or range, a query that is not finite, an unknown filter.
            CollectionClosed: after `close`.
        """
        array = np.asarray(queries)
        single = array.ndim == 1
        checked = self._checked_vectors(array[None] if single else array, "queries")
        if not isinstance(k, int | np.integer) or not 1 <= k <= K_MAX:
            raise InputError(f"k: expected 1 to {K_MAX}, found {k!r}")
        if deadline_ms is not None and not deadline_ms >= 0:
            raise InputError(f"deadline_ms: expected 0 or more, found {deadline_ms}")
        question = Question(
            queries=checked,
            k=int(k),
            ef=ef,
            recall_target=recall_target,
            deadline_s=None if deadline_ms is None else deadline_ms / 1000,
            node=None if filter is None else parse_filter(filter),
        )
        with self._taken() as view:
            hits = answer(view, question, self._store, self._id_kind or "int")
        return hits.first() if single else hits

    def _checked_vectors(self, array: NDArray[Any], what: str) -> NDArray[np.float32]:
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise InputError(f"{what}: expected shape (n, {self.dim}), found {array.shape}")
        if array.dtype.kind not in "fiu":
            raise InputError(f"{what}: expected float32, found {array.dtype}")
        with np.errstate(over="ignore"):
            checked = np.ascontiguousarray(array, dtype=np.float32)
        finite = np.isfinite(checked).all(axis=1)
        if not finite.all():
            raise InputError(f"{what}: row {int(np.argmin(finite))} is not finite")
        return checked

    @contextlib.contextmanager
    def _taken(self) -> Iterator[View]:
        """Hold the view of this moment: its segments stay open until the block ends."""
        with self._lock:
            if self._closed:
                raise CollectionClosed(f"{self.path}: closed; open it again")
            view = self._view
            self._users += 1
            for segment in view.segments:
                segment.sealed.acquire()
        try:
            yield view
        finally:
            self._drop(view)
            with self._lock:
                self._users -= 1
                self._idle.notify_all()

    def _drop(self, view: View) -> None:
        for segment in view.segments:
            self._release(segment.sealed)

    def _release(self, sealed: SealedSegment) -> None:
        """Give a reference back; the last user of a retired segment removes it."""
        if not sealed.release() or self.mode != "rw" or self._closed:
            return
        failpoint("merge.before_remove")
        _remove_segment(self.path, sealed.entry.name)

    def documents(
        self, ids: Sequence[DocumentId], tenant: str = DEFAULT_TENANT
    ) -> list[Document | None]:
        """Return text and metadata of each id; None where no document was stored under it."""
        checked = [check_id(document_id, f"ids[{i}]") for i, document_id in enumerate(ids)]
        with self._taken():
            if self._store is None:
                return [None] * len(checked)
            return self._store.documents(check_tenant(tenant), checked)

    def contains(
        self, ids: Sequence[DocumentId], tenant: str = DEFAULT_TENANT
    ) -> NDArray[np.bool_]:
        """Return bool, shape (n,): which ids are live, with or without a stored document."""
        keys: list[Key] = [(tenant, check_id(value, f"ids[{i}]")) for i, value in enumerate(ids)]
        found = np.zeros(len(keys), dtype=np.bool_)
        with self._taken() as view:
            alive = {view.rows.keys[row] for row in np.flatnonzero(view.rows.alive).tolist()}
            found |= np.array([key in alive for key in keys], dtype=np.bool_)
            for segment in view.segments:
                rows = segment.sealed.rows_of(keys).tolist()
                live = [row >= 0 and row not in segment.dead for row in rows]
                found |= np.array(live, dtype=np.bool_)
        return found

    # -- changing --------------------------------------------------------------------------

    def upsert(
        self,
        ids: Sequence[DocumentId] | NDArray[Any],
        vectors: Any,
        *,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> int:
        """Add or replace documents; durable, all of them, when this returns.

        A document is replaced whole: text and metadata that are not given are gone. Of an id that
        is given twice the last one counts.

        Args:
            ids: int or str, of one kind in the whole collection.
            vectors: float32, shape (n, dim), finite.
            texts: One for each id, or None.
            metadata: One JSON object for each id, or None.
            tenant: Whose documents they are.

        Returns:
            The change offset up to which the log now holds them.

        Raises:
            InputError: see above; names the row.
            DeltaFull: too many changes wait for a merge; nothing was written.
            StokerError: as `DocumentStore.write`.
        """
        store = self._writable()
        check_tenant(tenant)
        array = self._checked_vectors(np.asarray(vectors), "vectors")
        checked = self._checked_ids(ids)
        for name, given in (("vectors", array), ("texts", texts), ("metadata", metadata)):
            if given is not None and len(given) != len(checked):
                raise InputError(f"{name}: expected {len(checked)}, one per id, found {len(given)}")
        if not checked:
            return store.change_offset
        changes = []
        for i, document_id in enumerate(checked):
            text = texts[i] if texts is not None else None
            values = (metadata[i] if metadata is not None else None) or {}
            check_text(text, f"texts[{i}]")
            encode_metadata(values, tenant, f"metadata[{i}]")
            changes.append(Change(0, tenant, document_id, False, text, values, array[i]))
        waiting = self._view.delta.row_count
        if waiting + len(changes) > self._settings.delta_rows_max:
            self._wake.set()
            raise DeltaFull(
                f"{self.path}: {waiting} changed rows wait for a merge, the bound is "
                f"{self._settings.delta_rows_max}"
            )
        return self._write(store, changes)

    def delete(self, ids: Sequence[DocumentId] | NDArray[Any], tenant: str = DEFAULT_TENANT) -> int:
        """Delete documents; durable when this returns. Ids that are not there are no error.

        Returns:
            The change offset up to which the log now holds the deletes.
        """
        store = self._writable()
        check_tenant(tenant)
        checked = self._checked_ids(ids)
        if not checked:
            return store.change_offset
        return self._write(
            store, [Change(0, tenant, value, True, None, {}, None) for value in checked]
        )

    def _write(self, store: DocumentStore, changes: Sequence[Change]) -> int:
        offset = store.write(changes)
        delta = self._view.delta
        if self._merge_is_due(delta.row_count) or delta.block_is_due:
            self._wake.set()
        return offset

    def _merge_is_due(self, rows: int) -> bool:
        return 0 < self._settings.merge_rows <= rows

    def _writable(self) -> DocumentStore:
        if self._closed:
            raise CollectionClosed(f"{self.path}: closed; open it again")
        if self.mode != "rw" or self._store is None:
            raise InputError(
                f"{self.path}: opened for reading; open it with mode 'rw' to change it"
            )
        return self._store

    def _checked_ids(self, ids: Sequence[DocumentId] | NDArray[Any]) -> list[DocumentId]:
        values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        checked = [check_id(value, f"ids[{i}]") for i, value in enumerate(values)]
        with self._lock:
            for i, value in enumerate(checked):
                kind: IdKind = "int" if isinstance(value, int) else "str"
                if self._id_kind is None:
                    self._id_kind = kind
                if kind != self._id_kind:
                    raise InputError(
                        f"ids[{i}]: expected {self._id_kind}, as all ids of this collection, "
                        f"found {value!r}"
                    )
        return checked

    def _committed(self, changes: Sequence[Change]) -> None:
        """Show committed changes; called in order, one group at a time, by the document store."""
        view = self._view.after(changes)
        with self._lock:
            self._view = view

    # -- merging ---------------------------------------------------------------------------

    def merge(
        self,
        *,
        full: bool = False,
        heat: Mapping[Any, float] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
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
        """
        store = self._writable()
        started = time.monotonic()

        def step(what: str, done: int, total: int) -> None:
            if self._closed:
                raise MergeCancelled(f"{self.path}: closed while merging")
            if progress is not None:
                progress(what, done, total)

        with self._merge_lock, self._taken() as view:
            chosen = choose(view, full=full, settings=self._settings)
            if not has_work(view, chosen):
                return MergeReport(view.generation.number, merged=False)
            if heat is None and self.heat_source is not None:
                heat = self.heat_source()
            sealed, bytes_written = build_merged(
                self.path,
                view,
                chosen,
                store,
                id_kind=self._id_kind or "int",
                engine=self._engine,
                settings=self._settings,
                memory_bytes=self._new_share(view, chosen),
                heat=heat,
                progress=step,
            )
            switch_started = time.monotonic()
            try:
                generation = self._switch(store, view, chosen, sealed)
            except BaseException as error:
                if sealed is not None:
                    sealed.release()
                    if read_current(self.path).number == view.generation.number:
                        _remove_segment(self.path, sealed.entry.name)
                if isinstance(error, OSError):
                    raise storage_error(self.path, error) from error
                raise
            ended = time.monotonic()
        self._clean_after_merge(store, generation)
        report = MergeReport(
            generation=generation.number,
            merged=True,
            rows=sealed.entry.count if sealed is not None else 0,
            rows_from_delta=int(np.count_nonzero(view.rows.alive)),
            segments_in=len(chosen),
            bytes_written=bytes_written,
            seconds=ended - started,
            switch_s=ended - switch_started,
        )
        log.info("index.generation_merged", path=str(self.path), **report.to_json())
        return report

    def _new_share(self, view: View, chosen: Sequence[SegmentView]) -> int | None:
        """Budget of the segment to come: what its sources had, or all if nothing else stays."""
        budget = self._settings.memory_bytes if self._memory_bytes is None else self._memory_bytes
        if not budget:
            return 0
        shares = memory_shares(
            self.path, view.generation.segments, self._memory_bytes, self._settings
        )
        gone = {segment.sealed.entry.name for segment in chosen}
        kept_rows = sum(s.live_count for s in view.segments if s.sealed.entry.name not in gone)
        if kept_rows == 0:
            return budget
        new_rows = view.live_count - kept_rows
        by_rows = budget * new_rows // max(1, view.live_count)
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
            now = self._view
            if fresh is not None:
                fresh = fresh.without(now.delta.changed_after(frozen))
            kept = [s for s in now.segments if s.sealed.entry.name not in gone]
            segments = (*kept, fresh) if fresh is not None else tuple(kept)
            number = view.generation.number + 1
            entries = tuple(write_dead(self.path, number, segment) for segment in segments)
            generation = dataclasses.replace(
                view.generation,
                number=number,
                change_offset=frozen,
                id_kind=self._id_kind,
                segments=entries,
            )
            failpoint("merge.before_current")
            write_current(self.path, generation)
            delta = now.delta.without(frozen)
            switched = View(generation, segments, delta, delta.view(), now.change_offset)
            with self._lock:
                self._view = switched
        for segment in chosen:
            self._release(segment.sealed)  # The generation's own reference.
        return generation

    def _clean_after_merge(self, store: DocumentStore, generation: Generation) -> None:
        """Forget what the new generation made needless; failing here loses nothing."""
        failpoint("merge.before_purge")
        try:
            with self._merge_lock:
                if len(generation.segments) <= 1:
                    store.purge_deleted(generation.change_offset)
                if not self._settings.sealed_vectors_kept:
                    store.forget_vectors(generation.change_offset)
                self._remove_orphans(generation)
        except (OSError, StokerError) as error:
            log.warning("index.clean_up_failed", path=str(self.path), error=str(error))

    def _remove_orphans(self, generation: Generation) -> None:
        """Remove what no generation names and nobody reads: left by a crash or by late readers."""
        names = {entry.name for entry in generation.segments}
        for path in (self.path / SEGMENTS_NAME).iterdir():
            if path.name not in names:
                _remove_segment(self.path, path.name)
        dead = {f"{generation.number}-{name}" for name in names}
        for folder, kept in ((FILTERS_NAME, names), (DEAD_NAME, dead)):
            for path in (self.path / folder).iterdir():
                if path.name not in kept:
                    path.unlink(missing_ok=True)
        for path in self.path.glob(".*.new"):
            path.unlink(missing_ok=True)

    def _work(self) -> None:
        """Link full blocks of the delta and merge, when woken, until the collection closes."""
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            try:
                if self._merge_is_due(self._view.rows.count):
                    self.merge()
                else:
                    self._link_block()
            except MergeCancelled:
                return
            except Exception as error:
                # The next change wakes this thread again; the delta's bound holds meanwhile.
                self.merges_failed += 1
                log.error("index.merge_failed", path=str(self.path), error=str(error))

    def _link_block(self) -> None:
        view = self._view
        if view.delta.build_block(view.rows) and self._store is not None:
            with self._store.writes_paused(), self._lock:
                self._view = dataclasses.replace(self._view, rows=self._view.delta.view())

    # -- following another process ---------------------------------------------------------

    def refresh(self) -> bool:
        """Show what a writing process has changed since; True when anything had.

        For readers: the writer always sees its own changes.
        """
        if self.mode == "rw" or self._bare:
            return False
        with self._refresh_lock, self._taken() as before:
            assert self._store is not None
            view = before
            if self._store.stored_offset() > view.change_offset:
                changes = list(self._store.changes(view.change_offset))
                view = view.after(changes) if changes else view
                with self._lock:
                    self._view = view
            if read_current(self.path).number != view.generation.number:
                self._reload(view)
            self._id_kind = self._id_kind or self._stored_id_kind()
            return self._view is not before

    def _reload(self, view: View) -> None:
        """Move on to the generation in CURRENT, keeping segments that serve on."""
        open_segments = {s.sealed.entry.name: s.sealed for s in view.segments}
        for _ in range(_OPEN_TRIES):
            generation = read_current(self.path)
            try:
                fresh = self._load(generation, open_segments)
            except (OSError, CorruptError):
                if read_current(self.path).number == generation.number:
                    raise
                continue
            if read_current(self.path).number != generation.number:
                self._drop(fresh)
                continue
            with self._lock:
                self._view = fresh
            self._drop(view)
            return
        raise UnavailableError(f"{self.path}: generations changed {_OPEN_TRIES} times")

    # -- facts -----------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Dimensions."""
        return self._view.generation.dim

    @property
    def metric(self) -> Metric:
        """ "ip", "cosine" or "l2"."""
        return self._view.generation.metric

    @property
    def count(self) -> int:
        """Live documents."""
        return self._view.live_count

    @property
    def generation(self) -> int:
        """Number of the generation that serves; with `change_offset`, the fence."""
        return self._view.generation.number

    @property
    def change_offset(self) -> int:
        """The newest change that searches show."""
        return self._view.change_offset

    @property
    def delta_rows(self) -> int:
        """Changed rows in memory."""
        return self._view.rows.count

    @property
    def segment_names(self) -> tuple[str, ...]:
        """Folders of the segments that serve."""
        return tuple(entry.name for entry in self._view.generation.segments)

    # -- warming ---------------------------------------------------------------------------

    def unit_batches(self, heat: Mapping[Any, float]) -> list[IndexUnits]:
        """Return every page of every segment by kind, the most useful first.

        Args:
            heat: Weight (>= 0) by (tenant, chunk id), or by id alone for the default tenant;
                empty when nothing is known.
        """
        with self._taken() as view:
            return self._units.batches(view, heat, self._id_kind or "int")

    def load_units(
        self,
        kind: str,
        units: NDArray[np.uint32],
        *,
        sticky: bool = False,
        deadline_s: float | None = None,
    ) -> LoadCounts:
        """Load pages that `unit_batches` named, at a priority under demand; blocks until done.

        Pages of a segment that a merge has replaced since count as not reached.
        """
        with self._taken() as view:
            return self._units.load(view, kind, units, sticky=sticky, deadline_s=deadline_s)

    def resident(self) -> Residency:
        """Return what is in memory now, over all segments, from their page pools."""
        with self._taken() as view:
            return merged_residency(view)

    def total_bytes(self) -> int:
        """Return the bytes of all pages that could be made resident."""
        return self.resident().total_bytes

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant; reads every id."""
        with self._taken() as view:
            view.delta.check()
            seen: set[Key] = {view.rows.keys[row] for row in np.flatnonzero(view.rows.alive).tolist()}
            for segment in view.segments:
                rows = range(segment.sealed.entry.count)
                alive = [row for row in rows if row not in segment.dead]
                keys = segment.sealed.keys_at(np.array(alive, np.int64), self._id_kind or "int")
                assert len(set(keys)) == len(keys)
                assert not seen & set(keys), f"live in two places: {seen & set(keys)}"
                seen |= set(keys)
            assert len(seen) == view.live_count
            on_disk = read_current(self.path)
            assert on_disk.number >= view.generation.number

    # -- closing ---------------------------------------------------------------------------

    def close(self) -> None:
        """Close; searches that are under way end first. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.set()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()
        with self._lock:
            self._idle.wait_for(lambda: self._users == 0)
        self._abandon()

    def _abandon(self) -> None:
        view = getattr(self, "_view", None)
        if view is not None:
            self._drop(view)
        self._close_store()
        if self._writer_lock >= 0:
            os.close(self._writer_lock)
            self._writer_lock = -1

    def __enter__(self) -> Collection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _remove_segment(folder: Path, name: str) -> None:
    """Remove a segment that no generation names, unless a process still reads it."""
    path = folder / SEGMENTS_NAME / name
    if path.is_dir():
        with removable(path) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    if not path.exists():
        (folder / FILTERS_NAME / name).unlink(missing_ok=True)
