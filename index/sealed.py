"""One sealed segment as a collection sees it: documents instead of row names, filters, its lock.

A segment itself knows rows and opaque ids. Here a row is a document (tenant, id), may be dead, and
can be picked by a filter. The folder is locked, shared, as long as it is open: the writer removes a
segment only once no process holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import structlog
from numpy.typing import NDArray
from pyroaring import BitMap

from stoker.errors import CorruptError
from stoker.index.delta import Key
from stoker.index.document_values import DEFAULT_TENANT, SEPARATOR
from stoker.index.documents import DocumentStore
from stoker.index.exact import Metric
from stoker.index.filter_index import FilterIndex
from stoker.index.filters import Equal, Fields, Filter, flatten, parse_filter
from stoker.index.generation import FILTERS_NAME, IdKind, Naming, SegmentEntry, VectorDtype
from stoker.index.residency import Residency
from stoker.index.settings import IndexSettings

if TYPE_CHECKING:
    from stoker.index.direct import DirectSearch
    from stoker.index.segment import SegmentHits
    from stoker.index.segment_pages import LoadCounts, PageUnits

_SELECTIONS_KEPT_MAX: Final = 64
_ROWS_STEP: Final = 4_096
# Below it a build is over before a new process has started. 1,000 rows built in the serving process
# kept the interpreter's lock from searches often enough to make their p99 2.7 times as long, and
# were sealed no sooner (0.5 s) than in a process of their own (1.35 times).
APART_ROWS_MIN: Final = 256

_DEFAULT_TENANT_ONLY: Final = cast(Equal, parse_filter({"tenant": DEFAULT_TENANT}))

log = structlog.get_logger(__name__)


class OpenSegment(Protocol):
    """What a collection needs of an open segment; `stoker.index.segment.Segment` is one."""

    @property
    def count(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        *,
        ef: int | None,
        recall_target: float | None,
        deadline_s: float | None,
        allow: NDArray[np.uint8] | None,
    ) -> SegmentHits: ...
    def direct(self) -> DirectSearch | None: ...
    def ids_at(self, rows: NDArray[np.int64]) -> NDArray[Any]: ...
    def rows_of(self, ids: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]: ...
    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]: ...
    def unit_batches(
        self, heat_by_row: NDArray[np.float32] | None, *, rest: Callable[[], None] = ...
    ) -> list[PageUnits]: ...
    def load_units(
        self,
        kind: str,
        units: NDArray[np.uint32],
        *,
        sticky: bool,
        deadline_s: float | None,
    ) -> LoadCounts: ...
    def resident_count(self, kind: str, units: NDArray[np.uint32]) -> int: ...
    def expected_recall(self, coverage: Mapping[str, float]) -> float | None: ...
    def page_counts(self) -> tuple[int, int]: ...
    def pool_stats(self) -> dict[str, int]: ...
    def resident(self) -> Residency: ...
    def close(self) -> None: ...


class SegmentEngine(Protocol):
    """Opens and builds segments; tests put a brute-force one in the native one's place."""

    def open(
        self, path: Path, *, memory_bytes: int | None, settings: IndexSettings
    ) -> OpenSegment: ...

    def build(
        self,
        path: Path,
        vectors: NDArray[Any],
        ids: NDArray[Any],
        *,
        metric: Metric,
        m: int,
        ef_construction: int,
        heat: Mapping[Any, float] | None,
        threads: int | None,
        progress: Any,
        graph_of: Path | None = None,
    ) -> None:
        """Build and seal a segment at ``path``; see `stoker.index.build.build_segment`."""
        ...

    def stored_vectors(self, path: Path, segment: OpenSegment) -> NDArray[Any]:
        """Return all rows' vectors, shape (count, dim), without going through the page pool."""
        ...


class SealedSegment:
    """An open segment of a collection, counted by those who use it.

    Invariants:
        * whoever may touch ``segment`` holds a reference; the first is the opener's;
        * the folder's shared lock is held from open to close.
    """

    def __init__(self, path: Path, entry: SegmentEntry, segment: OpenSegment, lock: int) -> None:
        self.path = path
        self.entry = entry
        self.segment = segment
        self._references = 1
        self._references_lock = threading.Lock()
        self._lock = lock
        self._filters: FilterIndex | None = None
        self._filters_lock = threading.Lock()
        self._selections: OrderedDict[Filter, BitMap] = OrderedDict()
        self._masks: OrderedDict[Filter, tuple[BitMap, NDArray[np.uint8], int]] = OrderedDict()

    @classmethod
    def open(
        cls,
        path: Path,
        entry: SegmentEntry,
        *,
        engine: SegmentEngine,
        memory_bytes: int | None,
        settings: IndexSettings,
    ) -> SealedSegment:
        """Lock the folder against removal and open the segment in it.

        Raises:
            FileNotFoundError: the folder is gone: a newer generation stands in CURRENT.
            CorruptError: damaged, or not the segment that the generation names.
        """
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            segment = engine.open(path, memory_bytes=memory_bytes, settings=settings)
            if segment.count != entry.count:
                segment.close()
                raise CorruptError(
                    f"{path}: expected {entry.count} rows, found {segment.count}: another segment"
                )
        except BaseException:
            os.close(lock)
            raise
        return cls(path, entry, segment, lock)

    def acquire(self) -> None:
        """Take one more reference; only for who can be sure that one is held."""
        with self._references_lock:
            assert self._references > 0
            self._references += 1

    def release(self) -> bool:
        """Give a reference back; True when it was the last one and the segment is now closed."""
        with self._references_lock:
            self._references -= 1
            if self._references > 0:
                return False
        self._close()
        return True

    def _close(self) -> None:
        self.segment.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- documents and rows ----------------------------------------------------------------

    def rows_of(self, keys: Sequence[Key]) -> NDArray[np.int64]:
        """Return the row of each document, -1 where it has none here."""
        naming = self.entry.naming
        names = [segment_id(key, naming) for key in keys]
        if None not in names:
            return self.segment.rows_of(names)
        rows = np.full(len(keys), -1, dtype=np.int64)
        named = [at for at, name in enumerate(names) if name is not None]
        if named:
            rows[named] = self.segment.rows_of([names[at] for at in named])
        return rows

    def keys_at(self, rows: NDArray[np.int64], id_kind: IdKind) -> list[Key]:
        """Return the document of each row."""
        return [
            document_key(name, self.entry.naming, id_kind) for name in self.segment.ids_at(rows)
        ]

    def ids_at(self, rows: NDArray[np.int64], id_kind: IdKind) -> NDArray[Any]:
        """Return the id of each row; int64, or str in an object array."""
        names = self.segment.ids_at(rows)
        if self.entry.naming == "plain":
            return names
        missing = -1 if id_kind == "int" else None
        found = np.full(rows.shape, missing, dtype=np.int64 if id_kind == "int" else object)
        for at in np.ndindex(rows.shape):
            if rows[at] >= 0:
                found[at] = document_key(names[at], "tenant", id_kind)[1]
        return found

    # -- filters ---------------------------------------------------------------------------

    def decided(self, node: Filter) -> bool | None:
        """Say whether every row passes ``node``, or none does; None where it depends on the row.

        Every served search carries a filter of its tenant. In a segment of plain names all rows
        are the default tenant's, so that one needs no filter index: building it would read every
        document before a cold replica's first answer.
        """
        if self.entry.naming == "plain" and isinstance(node, Equal):
            if node == _DEFAULT_TENANT_ONLY:
                return True
            if node.field == _DEFAULT_TENANT_ONLY.field:
                return ("s", DEFAULT_TENANT) in node.values
        return None

    def mask(
        self, node: Filter, dead: BitMap, store: DocumentStore | None, id_kind: IdKind
    ) -> tuple[NDArray[np.uint8], int]:
        """Return the rows that ``node`` lets through and that live: packed bits, and how many."""
        with self._filters_lock:
            known = self._masks.get(node)
            if known is not None and known[0] is dead:
                self._masks.move_to_end(node)
                return known[1], known[2]
            if self._filters is None:
                self._filters = self._load_filters(store, id_kind)
            selected = self._selections.get(node)
            if selected is None:
                selected = self._filters.select(node)
                self._selections[node] = selected
            allowed = selected - dead
            found = pack(allowed, self.entry.count), len(allowed)
            self._masks[node] = (dead, *found)
            for kept in (self._selections, self._masks):
                while len(kept) > _SELECTIONS_KEPT_MAX:
                    kept.popitem(last=False)
            return found

    def _load_filters(self, store: DocumentStore | None, id_kind: IdKind) -> FilterIndex:
        path = self.path.parent.parent / FILTERS_NAME / self.entry.name
        try:
            index = FilterIndex.from_bytes(path.read_bytes(), str(path))
            if index.count == self.entry.count:
                return index
            reason = f"expected {self.entry.count} rows, found {index.count}"
        except FileNotFoundError:
            reason = "missing"
        except (OSError, CorruptError) as error:
            reason = str(error)
        # It only repeats what the documents say, so it is made anew instead of failing.
        log.warning("index.filters_rebuilt", segment=self.entry.name, reason=reason)
        return build_filters(self, store, id_kind)


def segment_id(key: Key, naming: Naming) -> int | str | None:
    """Return what a segment calls a document, None where it cannot hold it."""
    tenant, document_id = key
    if naming == "tenant":
        return f"{tenant}{SEPARATOR}{document_id}"
    return document_id if tenant == DEFAULT_TENANT else None


def document_key(name: Any, naming: Naming, id_kind: IdKind) -> Key:
    """Return the document behind a segment's id; the inverse of `segment_id`."""
    if naming == "plain":
        return DEFAULT_TENANT, int(name) if id_kind == "int" else str(name)
    tenant, separator, text = str(name).partition(SEPARATOR)
    if not separator:
        raise CorruptError(f"a segment names a row {name!r}: expected a tenant and an id")
    try:
        return tenant, int(text) if id_kind == "int" else text
    except ValueError as error:
        raise CorruptError(f"a segment names a row {name!r}: expected an integer id") from error


def build_filters(
    sealed: SealedSegment, store: DocumentStore | None, id_kind: IdKind
) -> FilterIndex:
    """Build a segment's filter index from the documents of its rows."""
    return FilterIndex.build(_row_fields(sealed, store, id_kind), sealed.entry.count)


def _row_fields(
    sealed: SealedSegment, store: DocumentStore | None, id_kind: IdKind
) -> Iterator[tuple[int, Fields]]:
    for start in range(0, sealed.entry.count, _ROWS_STEP):
        rows = np.arange(start, min(start + _ROWS_STEP, sealed.entry.count))
        by_tenant: dict[str, dict[int | str, int]] = {}
        for row, (tenant, document_id) in zip(
            rows.tolist(), sealed.keys_at(rows, id_kind), strict=True
        ):
            by_tenant.setdefault(tenant, {})[document_id] = row
        for tenant, row_of in by_tenant.items():
            found: Mapping[Any, Mapping[str, Any]] = {}
            if store is not None:
                found = dict(store.metadata(tenant, list(row_of)))
            for document_id, at in row_of.items():
                yield at, flatten(tenant, found.get(document_id, {}))


def pack(rows: BitMap, count: int) -> NDArray[np.uint8]:
    """Return ``rows`` as bits, little-endian within a byte; uint8, shape (ceil(count / 8),)."""
    bits = np.zeros(count, dtype=np.bool_)
    bits[np.frombuffer(rows.to_array(), dtype=np.uint32)] = True
    return np.packbits(bits, bitorder="little")


@contextlib.contextmanager
def removable(path: Path) -> Iterator[bool]:
    """Tell whether no process has the segment in ``path`` open; holds off new ones meanwhile."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(lock)


class NativeEngine:
    """Segments of `stoker.index.segment`, built by `stoker.index.build`."""

    def __init__(self, *, apart: bool = False) -> None:
        """With ``apart``, build larger segments in a process of their own; see `build_child`."""
        self._apart = apart

    def open(self, path: Path, *, memory_bytes: int | None, settings: IndexSettings) -> OpenSegment:
        """Open the segment in ``path``."""
        from stoker.index.segment import Segment

        return Segment.open(path, memory_bytes=memory_bytes, settings=settings)

    def build(
        self,
        path: Path,
        vectors: NDArray[Any],
        ids: NDArray[Any],
        *,
        metric: Metric,
        m: int,
        ef_construction: int,
        heat: Mapping[Any, float] | None,
        threads: int | None,
        progress: Any,
        graph_of: Path | None = None,
    ) -> None:
        """Build and seal a segment at ``path``."""
        if self._apart and isinstance(vectors, np.memmap) and len(vectors) >= APART_ROWS_MIN:
            from stoker.index.build_child import build_apart

            try:
                build_apart(
                    path,
                    vectors,
                    ids,
                    metric=metric,
                    m=m,
                    ef_construction=ef_construction,
                    heat=heat,
                    threads=threads,
                    progress=progress,
                    graph_of=graph_of,
                )
                return
            except OSError as error:
                # No second process here: slower for searches, and as right.
                log.warning("index.build_process_unavailable", error=str(error))
        from stoker.index.build import build_segment

        build_segment(
            path,
            vectors,
            ids,
            metric=metric,
            m=m,
            ef_construction=ef_construction,
            heat=heat,
            threads=threads,
            progress=progress,
            graph_of=graph_of,
        )

    def stored_vectors(self, path: Path, segment: OpenSegment) -> NDArray[Any]:
        """Map the vectors' file and check every page of it.

        A merge that read through the page pool would push out what searches need.

        Raises:
            CorruptError: a page fails its checksum.
        """
        from stoker.index.manifest import Manifest
        from stoker.index.salvage import stored_vectors

        manifest = Manifest.read(path)
        vectors, whole = stored_vectors(
            path, manifest.count, manifest.dim, cast(VectorDtype, manifest.vector_dtype)
        )
        if vectors is None or not whole.all():
            lost = manifest.count - int(np.count_nonzero(whole))
            raise CorruptError(
                f"{path}: {lost} of {manifest.count} vectors are damaged; run `stoker verify`, "
                "then `stoker repair`"
            )
        return vectors
