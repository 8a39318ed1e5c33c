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

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CapacityError, InputError
from stoker.index.answer import Question, answer
from stoker.index.arguments import (
    as_array,
    byte_count,
    listed,
    real_number,
    said,
    whole_number,
)
from stoker.index.delta import Key
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
from stoker.index.exact import Metric, refuse_unusable
from stoker.index.filters import parse_filter
from stoker.index.generation import IdKind, read_current
from stoker.index.hits import Hits
from stoker.index.merge import MergeReport, Progress
from stoker.index.merger import Merger
from stoker.index.residency import Residency
from stoker.index.sealed import NativeEngine, SegmentEngine
from stoker.index.search_plan import K_MAX
from stoker.index.serving import CollectionClosed, Mode, Serving
from stoker.index.settings import IndexSettings
from stoker.index.warming import IndexUnits, UnitNumbers, merged_residency

if TYPE_CHECKING:
    from stoker.index.segment_pages import LoadCounts


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
            memory_bytes: Budget of the segments' pages together; None means the setting. Ids,
                filters and what changed since the last merge are held beside it.
            settings: The room's settings.
            engine: Opens and builds segments; the native one unless a test says otherwise.

        Raises:
            InputError: no such folder, no index in it, or a bare segment opened for writing.
            WriterBusy: another process writes.
            CorruptError: CURRENT, a segment or documents.db is damaged; names file and place.
        """
        self.path = Path(path)
        self.mode: Mode = mode
        self._settings = settings or IndexSettings()
        if not isinstance(mode, str) or mode not in ("r", "rw"):
            raise InputError(f"mode: expected 'r' or 'rw', found {said(mode)}")
        if not self.path.is_dir():
            raise InputError(f"{self.path}: no such folder; `stoker index` builds one")
        self._serving = Serving(
            self.path,
            mode,
            engine=engine or NativeEngine(apart=True),
            memory_bytes=(
                self._settings.memory_bytes
                if memory_bytes is None
                else byte_count(memory_bytes, "memory_bytes")
            ),
            settings=self._settings,
        )
        self._units = UnitNumbers()
        self._merger: Merger | None = None
        if mode == "rw" and self._serving.store is not None:
            self._merger = Merger(self._serving, self._serving.store)

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
        # What equals a number that was asked for before need not be one: True, a width of 64.0.
        plain = type(k) is int and (ef is None or type(ef) is int) and recall_target is not True
        if plain and filter is None and deadline_ms is None:
            direct = self._serving.direct
            if direct is not None:
                found = direct.search(queries, k, ef, recall_target)
                if found is not None:
                    return found
        array = as_array(queries, "queries")
        single = array.ndim == 1
        checked = self._checked_vectors(array[None] if single else array, "queries")
        k = whole_number(k, "k")
        if not 1 <= k <= K_MAX:
            raise InputError(f"k: expected 1 to {K_MAX}, found {k}")
        deadline_s = None
        if deadline_ms is not None:
            deadline_s = real_number(deadline_ms, "deadline_ms") / 1000
            if deadline_s < 0:
                raise InputError(f"deadline_ms: expected 0 or more, found {deadline_ms}")
        question = Question(
            queries=checked,
            k=k,
            ef=None if ef is None else whole_number(ef, "ef"),
            recall_target=(
                None if recall_target is None else real_number(recall_target, "recall_target")
            ),
            deadline_s=deadline_s,
            node=None if filter is None else parse_filter(filter),
        )
        serving = self._serving
        view = serving.take()
        try:
            hits = answer(view, question, serving.store, serving.id_kind)
        finally:
            serving.give_back(view)
        return hits.first() if single else hits

    def _checked_vectors(self, array: NDArray[Any], what: str) -> NDArray[np.float32]:
        if array.ndim != 2 or array.shape[1] != self.dim:
            raise InputError(f"{what}: expected shape (n, {self.dim}), found {array.shape}")
        if array.dtype.kind not in "fiu":
            raise InputError(f"{what}: expected float32, found {array.dtype}")
        if array.dtype == np.float32:
            checked = np.ascontiguousarray(array)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                checked = np.ascontiguousarray(array, dtype=np.float32)
        refuse_unusable(checked, what=what)
        return checked

    def documents(
        self, ids: Sequence[DocumentId], tenant: str = DEFAULT_TENANT
    ) -> list[Document | None]:
        """Return text and metadata of each id; None where no document was stored under it."""
        named = enumerate(listed(ids, "ids"))
        checked = [check_id(document_id, f"ids[{i}]") for i, document_id in named]
        with self._serving.taken():
            if self._serving.store is None:
                return [None] * len(checked)
            return self._serving.store.documents(check_tenant(tenant), checked)

    def contains(
        self, ids: Sequence[DocumentId], tenant: str = DEFAULT_TENANT
    ) -> NDArray[np.bool_]:
        """Return bool, shape (n,): which ids are live, with or without a stored document."""
        named = enumerate(listed(ids, "ids"))
        keys: list[Key] = [(tenant, check_id(value, f"ids[{i}]")) for i, value in named]
        found = np.zeros(len(keys), dtype=np.bool_)
        with self._serving.taken() as view:
            found |= np.array([view.delta.row_of(key) is not None for key in keys], dtype=np.bool_)
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
        array = self._checked_vectors(as_array(vectors, "vectors"), "vectors")
        checked = self._checked_ids(listed(ids, "ids"))
        texts = None if texts is None else listed(texts, "texts")
        metadata = None if metadata is None else listed(metadata, "metadata")
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
        waiting = self._serving.view.delta.row_count
        if waiting + len(changes) > self._settings.delta_rows_max:
            if self._merger is not None:
                self._merger.wake()
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
        checked = self._checked_ids(listed(ids, "ids", ordered=False))
        if not checked:
            return store.change_offset
        return self._write(
            store, [Change(0, tenant, value, True, None, {}, None) for value in checked]
        )

    def _write(self, store: DocumentStore, changes: Sequence[Change]) -> int:
        # Only what is written settles the type of ids, not what was refused before.
        kind = _kind_of(changes[0].id)
        settled = self._serving.claim_id_kind(kind)
        if kind != settled:
            raise InputError(
                f"ids: expected {settled}, as all ids of this collection, found {changes[0].id!r}"
            )
        with self._serving.taken():  # Closing waits: what is written has to be shown.
            offset = store.write(changes)
        if self._merger is not None:
            self._merger.notice_changes()
        return offset

    def _writable(self) -> DocumentStore:
        if self._serving.closed:
            raise CollectionClosed(f"{self.path}: closed; open it again")
        if self._merger is None or self._serving.store is None:
            raise InputError(f"{self.path}: opened for reading; mode 'rw' can change it")
        return self._serving.store

    def _checked_ids(self, values: list[Any]) -> list[DocumentId]:
        checked = [check_id(value, f"ids[{i}]") for i, value in enumerate(values)]
        settled = self._serving.settled_id_kind
        for i, value in enumerate(checked):
            settled = settled or _kind_of(value)
            if _kind_of(value) != settled:
                raise InputError(
                    f"ids[{i}]: expected {settled}, as all ids of this collection, found {value!r}"
                )
        return checked

    # -- merging and following -------------------------------------------------------------

    def merge(
        self,
        *,
        full: bool = False,
        heat: Mapping[Any, float] | None = None,
        progress: Progress | None = None,
    ) -> MergeReport:
        """Seal what changed into a new generation and switch to it; see `Merger.merge`."""
        self._writable()
        assert self._merger is not None
        return self._merger.merge(full=full, heat=heat, progress=progress)

    @property
    def heat_source(self) -> Callable[[], Mapping[Any, float]] | None:
        """Asked for the newest heat by merges that were given none; ignored by readers."""
        return self._merger.heat_source if self._merger is not None else None

    @heat_source.setter
    def heat_source(self, source: Callable[[], Mapping[Any, float]] | None) -> None:
        if self._merger is not None:
            self._merger.heat_source = source

    @property
    def merges_failed(self) -> int:
        """Background merges that failed since the open; each was logged."""
        return self._merger.failures if self._merger is not None else 0

    def refresh(self) -> bool:
        """Show what a writing process has changed since; True when anything had.

        For readers, which see a writer's changes from one call to the next; the writer always sees
        its own.
        """
        return self._serving.refresh()

    def in_place(self) -> bool:
        """Tell whether the index that was opened still lies at its path; looks at the disk.

        Where another one was put into its place, or it was moved away, what is open goes on as far
        as it was read: to serve the other one, open the path again.

        Raises:
            OSError: the disk does not say.
        """
        return self._serving.in_place()

    # -- facts -----------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Dimensions."""
        return self._serving.view.generation.dim

    @property
    def metric(self) -> Metric:
        """ "ip", "cosine" or "l2"."""
        return self._serving.view.generation.metric

    @property
    def count(self) -> int:
        """Live documents."""
        return self._serving.view.live_count

    @property
    def generation(self) -> int:
        """Number of the generation that serves; with `change_offset`, the fence."""
        return self._serving.view.generation.number

    @property
    def change_offset(self) -> int:
        """The newest change that searches show."""
        return self._serving.view.change_offset

    @property
    def id_kind(self) -> IdKind | None:
        """Type of all ids; None while there was never one."""
        return self._serving.settled_id_kind

    @property
    def delta_rows(self) -> int:
        """Changed rows in memory."""
        return self._serving.view.rows.count

    @property
    def segment_names(self) -> tuple[str, ...]:
        """Folders of the segments that serve."""
        return tuple(entry.name for entry in self._serving.view.generation.segments)

    # -- warming ---------------------------------------------------------------------------

    def unit_batches(
        self, heat: Mapping[Any, float], *, rest: Callable[[], None] = lambda: None
    ) -> list[IndexUnits]:
        """Return every page of every segment by kind, the most useful first.

        Args:
            heat: Weight (>= 0) by (tenant, chunk id), or by id alone for the default tenant;
                empty when nothing is known.
            rest: Called after each millisecond of work or so; may wait, and lets others run.
        """
        with self._serving.taken() as view:
            return self._units.batches(view, heat, self._serving.id_kind, rest=rest)

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
        with self._serving.taken() as view:
            return self._units.load(view, kind, units, sticky=sticky, deadline_s=deadline_s)

    def expected_recall(self, coverage: Mapping[str, float]) -> float | None:
        """Mean recall@10 of answers from memory alone, by calibration; None where unknown.

        Args:
            coverage: Kind of page -> share of what demand looks at that is resident, in [0, 1].
        """
        with self._serving.taken() as view:
            return self._units.expected_recall(view, coverage)

    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int:
        """Return how many of the pages that `unit_batches` named are in memory now."""
        with self._serving.taken() as view:
            return self._units.resident_count(view, kind, units)

    def page_counts(self) -> tuple[int, int]:
        """Return how often searches found a record's page in memory, and how often not.

        Of the segments that serve now: after a merge the counts start anew for the merged ones.
        """
        with self._serving.taken() as view:
            counts = [segment.sealed.segment.page_counts() for segment in view.segments]
        return sum(hits for hits, _ in counts), sum(misses for _, misses in counts)

    def demand_wait_us(self) -> int:
        """Return how long searches have waited for reads so far, over all threads, microseconds.

        Of the segments that serve now: after a merge the count starts anew for the merged ones.
        """
        with self._serving.taken() as view:
            stats = [segment.sealed.segment.pool_stats() for segment in view.segments]
        return sum(counts.get("demand_wait_us", 0) for counts in stats)

    def resident(self) -> Residency:
        """Return what is in memory now, over all segments, from their page pools."""
        with self._serving.taken() as view:
            return merged_residency(view)

    def total_bytes(self) -> int:
        """Return the bytes of all pages that could be made resident."""
        return self.resident().total_bytes

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant; reads every id."""
        with self._serving.taken() as view:
            view.delta.check()
            seen: set[Key] = {
                view.rows.keys[row] for row in np.flatnonzero(view.rows.alive).tolist()
            }
            for segment in view.segments:
                rows = range(segment.sealed.entry.count)
                alive = [row for row in rows if row not in segment.dead]
                keys = segment.sealed.keys_at(np.array(alive, np.int64), self._serving.id_kind)
                assert len(set(keys)) == len(keys)
                assert not seen & set(keys), f"live in two places: {seen & set(keys)}"
                seen |= set(keys)
            assert len(seen) == view.live_count
            on_disk = read_current(self.path)
            assert on_disk.number >= view.generation.number

    # -- closing ---------------------------------------------------------------------------

    def close(self) -> None:
        """Close; searches that are under way end first. A second call does nothing.

        A merge that is under way is given up, at its next step; nothing is lost by that.
        """
        if self._serving.refuse():
            if self._merger is not None:
                self._merger.stop()
            self._serving.close()

    def __enter__(self) -> Collection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _kind_of(value: DocumentId) -> IdKind:
    return "int" if isinstance(value, int) else "str"
