"""The view that serves, who uses it, and what stands behind it on disk.

One `Serving` is one open collection folder: it finds the generation in CURRENT, opens its segments
and the change log, and swaps in newer views while searches go on with the one that they took.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import structlog
from pyroaring import BitMap

from stoker.errors import CorruptError, InputError, UnavailableError
from stoker.index.collection_build import MANIFEST_NAME, generation_of_segment, is_bare_segment
from stoker.index.delta import Delta
from stoker.index.document_values import Change
from stoker.index.documents import DocumentStore
from stoker.index.failpoint import failpoint
from stoker.index.generation import (
    DEAD_NAME,
    DOCUMENTS_NAME,
    FILTERS_NAME,
    SEGMENTS_NAME,
    Generation,
    IdKind,
    file_identity,
    read_current,
    refuse_unread,
    remove_stray,
    require_index,
    storage_error,
)
from stoker.index.read_ahead import announce_segments, announce_whole
from stoker.index.sealed import SealedSegment, SegmentEngine, removable
from stoker.index.settings import IndexSettings
from stoker.index.view import SegmentView, View, open_view

if TYPE_CHECKING:
    from stoker.index.direct import DirectSearch

Mode = Literal["r", "rw"]
LOCK_NAME: Final = "writer.lock"
_OPEN_TRIES: Final = 10

log = structlog.get_logger(__name__)


class CollectionClosed(UnavailableError):
    """The collection was closed; open it again."""


class WriterBusy(UnavailableError):
    """Another process has the collection open for writing; one may."""


class Serving:
    """See the module.

    Invariants:
        * ``view`` only moves forward, in changes and in generations;
        * a segment stays open, and on disk, while any view that was taken has it;
        * with mode "rw" the writer's lock is held until `close`.
    """

    def __init__(
        self,
        path: Path,
        mode: Mode,
        *,
        engine: SegmentEngine,
        memory_bytes: int,
        settings: IndexSettings,
    ) -> None:
        """Open the folder; see `stoker.index.collection.Collection`."""
        self.path = path
        self.mode: Mode = mode
        self.engine = engine
        self.memory_bytes = memory_bytes
        self.settings = settings
        self.store: DocumentStore | None = None
        self.closed = False
        # Guards `view`, `id_kind` and the count of users; never held over I/O.
        self._lock = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._users = 0
        self._refresh_lock = threading.Lock()
        self._writer_lock = -1
        self._view: View | None = None
        # Into the newest view, while it is that simple; read without the lock.
        self.direct: DirectSearch | None = None
        self._id_kind: IdKind | None = None
        self._bare = is_bare_segment(path)
        # What stays the same file as long as it is the same index.
        self._mark = path / (MANIFEST_NAME if self._bare else DOCUMENTS_NAME)
        self._marked = file_identity(self._mark)
        if not self._bare:
            require_index(path)
        try:
            self._view = self._open_bare() if self._bare else self._open()
            self.direct = self._view.direct()
            self._id_kind = self._view.generation.id_kind or self._stored_id_kind()
        except BaseException:
            self._free()
            raise

    # -- opening ---------------------------------------------------------------------------

    def _open_bare(self) -> View:
        """Serve a segment's folder as a collection of it alone."""
        if self.mode == "rw":
            raise InputError(
                f"{self.path}: a bare segment cannot be changed; `build_collection` and "
                "`stoker index` make collections, which can"
            )
        announce_segments([self.path])
        generation = generation_of_segment(self.path)
        sealed = SealedSegment.open(
            self.path,
            generation.segments[0],
            engine=self.engine,
            memory_bytes=self.memory_bytes,
            settings=self.settings,
        )
        delta = Delta(generation.dim, generation.metric)
        segment = SegmentView(sealed, BitMap(), None)
        return View(generation, (segment,), delta, delta.view(), 0)

    def _open(self) -> View:
        if self.mode == "rw":
            self._lock_for_writing()
            self.remove_orphans(read_current(self.path))
        for _ in range(_OPEN_TRIES):
            generation = read_current(self.path)
            announce_whole(self.path / DOCUMENTS_NAME)
            names = [entry.name for entry in generation.segments]
            announce_segments(self.path / SEGMENTS_NAME / name for name in names)
            try:
                self._open_store(generation)
                view = self._load(generation, {})
            except (OSError, CorruptError) as error:
                # A writer may have moved on and removed what this generation named.
                refuse_unread(self.path, error)
                if read_current(self.path).number != generation.number:
                    self._close_store()
                    continue
                if isinstance(error, OSError):
                    raise CorruptError(
                        f"{self.path}: generation {generation.number} names what is not there: "
                        f"{error}"
                    ) from error
                raise
            if self.mode == "rw" or self._still_newest(view):
                return view
            # Deletes that the newer generation has sealed may be forgotten by now.
            self.drop(view)
            self._close_store()
        raise UnavailableError(f"{self.path}: generations changed {_OPEN_TRIES} times during open")

    def _still_newest(self, view: View) -> bool:
        """Tell whether CURRENT names the generation of a view that nobody has seen yet.

        Where that cannot be read the view is dropped: its locks would keep a writer from removing
        the segments for as long as this process lives.
        """
        try:
            return read_current(self.path).number == view.generation.number
        except BaseException:
            self.drop(view)
            raise

    def _load(self, generation: Generation, reuse: Mapping[str, SealedSegment]) -> View:
        return open_view(
            self.path,
            generation,
            self.store,
            engine=self.engine,
            memory_bytes=self.memory_bytes,
            settings=self.settings,
            reuse=reuse,
        )

    def _open_store(self, generation: Generation) -> None:
        path = self.path / DOCUMENTS_NAME
        self.store = DocumentStore.open(
            path,
            dim=generation.dim,
            writable=self.mode == "rw",
            on_commit=self._committed if self.mode == "rw" else None,
        )
        if self.store.change_offset < generation.change_offset:
            raise CorruptError(
                f"{path}: expected changes up to {generation.change_offset} at least, which "
                f"generation {generation.number} has sealed; found {self.store.change_offset}"
            )

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _stored_id_kind(self) -> IdKind | None:
        kind = self.store.id_kind() if self.store is not None else None
        return None if kind is None else ("int" if kind is int else "str")

    def _lock_for_writing(self) -> None:
        lock = self.path / LOCK_NAME
        try:
            self._writer_lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise storage_error(lock, error) from error
        try:
            fcntl.flock(self._writer_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WriterBusy(f"{self.path}: another process has it open for writing") from error

    # -- taking ----------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The newest view. Its segments may close any moment; to search it, `take` it."""
        assert self._view is not None
        return self._view

    @property
    def id_kind(self) -> IdKind:
        """Type of the ids; "int" while there is none."""
        return self._id_kind or "int"

    @property
    def settled_id_kind(self) -> IdKind | None:
        """Type of the ids; None while there was never one."""
        return self._id_kind

    def claim_id_kind(self, kind: IdKind) -> IdKind:
        """Settle the type of ids with the first one; return the settled type."""
        with self._lock:
            if self._id_kind is None:
                self._id_kind = kind
            return self._id_kind

    def take(self) -> View:
        """Hold the view of this moment: its segments stay open until it is given to `give_back`.

        Raises:
            CollectionClosed: after `close`.
        """
        with self._lock:
            if self.closed:
                raise CollectionClosed(f"{self.path}: closed; open it again")
            view = self.view
            self._users += 1
            for segment in view.segments:
                segment.sealed.acquire()
        return view

    def give_back(self, view: View) -> None:
        """Let go of a view that `take` gave."""
        try:
            self.drop(view)
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._unused.notify_all()

    @contextlib.contextmanager
    def taken(self) -> Iterator[View]:
        """Hold the view of this moment until the block ends."""
        view = self.take()
        try:
            yield view
        finally:
            self.give_back(view)

    def drop(self, view: View) -> None:
        """Give up a view: one reference to each of its segments."""
        for segment in view.segments:
            self.release(segment.sealed)

    def release(self, sealed: SealedSegment) -> None:
        """Give a reference back; the last user of a segment that was replaced removes it."""
        if not sealed.release() or self.mode != "rw" or self.closed:
            return
        failpoint("merge.before_remove")
        if self.store is not None and not self.store.in_place:
            return  # what has its name there now is another index's
        try:
            remove_segment(self.path, sealed.entry.name)
        except OSError as error:
            # No fault of the search that happened to be the last; the next open tries again.
            log.warning("index.clean_up_failed", path=str(self.path), error=str(error))

    def publish(self, view: View) -> None:
        """Serve ``view`` from now on."""
        with self._lock:
            self._view = view
            if not self.closed:
                self.direct = view.direct()

    def in_place(self) -> bool:
        """Tell whether the index that was opened still lies at its path; looks at the disk.

        Raises:
            OSError: the disk does not say: nothing is known of what lies there.
        """
        try:
            found = os.stat(self._mark)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == self._marked

    def _committed(self, changes: Sequence[Change]) -> None:
        """Show committed changes; called in order, one group at a time, by the document store."""
        self.publish(self.view.after(changes))

    # -- following another process ---------------------------------------------------------

    def refresh(self) -> bool:
        """Show what a writing process has changed since; True when anything had.

        For readers: the writer always sees its own changes.

        Raises:
            UnavailableError: another index lies at the path now; what was opened goes on serving.
        """
        if self.mode == "rw" or self._bare:
            return False
        with self._refresh_lock, self.taken() as before:
            assert self.store is not None
            self.store.check_in_place()
            view = before
            if self.store.stored_offset() > view.change_offset:
                changes = list(self.store.changes(view.change_offset))
                view = view.after(changes) if changes else view
                self.publish(view)
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
            except (OSError, CorruptError) as error:
                refuse_unread(self.path, error)
                if read_current(self.path).number == generation.number:
                    raise
                continue
            if not self._still_newest(fresh):
                self.drop(fresh)
                continue
            self.publish(fresh)
            self.drop(view)
            return
        raise UnavailableError(f"{self.path}: generations changed {_OPEN_TRIES} times")

    # -- closing ---------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new users, wait for those there are, then free everything."""
        with self._lock:
            self.closed, self.direct = True, None
            self._unused.wait_for(lambda: self._users == 0)
        self._free()

    def refuse(self) -> bool:
        """Refuse new users from now on; False when that was so already."""
        with self._lock:
            was_open, self.closed = not self.closed, True
            self.direct = None
            return was_open

    def _free(self) -> None:
        if self._view is not None:
            self.drop(self._view)
        self._close_store()
        if self._writer_lock >= 0:
            os.close(self._writer_lock)
            self._writer_lock = -1

    def remove_orphans(self, generation: Generation) -> None:
        """Remove what no generation names and nobody reads: left by a crash or by late readers."""
        names = {entry.name for entry in generation.segments}
        for name in (SEGMENTS_NAME, FILTERS_NAME, DEAD_NAME):
            (self.path / name).mkdir(exist_ok=True)  # A copy may have left empty folders out.
        for path in (self.path / SEGMENTS_NAME).iterdir():
            if path.name not in names:
                remove_segment(self.path, path.name)
        dead = {f"{generation.number}-{name}" for name in names}
        for folder, kept in ((FILTERS_NAME, names), (DEAD_NAME, dead)):
            for path in (self.path / folder).iterdir():
                if path.name not in kept:
                    remove_stray(path)
        for path in self.path.glob(".*.new"):
            remove_stray(path)


def remove_segment(folder: Path, name: str) -> None:
    """Remove a segment that no generation names, unless a process still reads it."""
    path = folder / SEGMENTS_NAME / name
    if path.is_dir():
        with removable(path) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    if not path.exists():
        remove_stray(folder / FILTERS_NAME / name)
