"""Documents and the durable change log, in one SQLite file.

Each document (tenant, id) has one row; its key is the offset of the change that wrote it. Offsets
rise by one per change and are never used again, so the table read in key order *is* the change log,
compacted: the newest change of every document, deletes included until nothing sealed needs them.

Durability: a change is acknowledged after its transaction's fsync (WAL, synchronous=FULL). Callers
that arrive while one commit is under way share the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from stoker.errors import CapacityError, CorruptError, InputError, StokerError, UnavailableError
from stoker.index.document_values import Change, Document, DocumentId, encode_metadata, row_crc
from stoker.index.failpoint import failpoint
from stoker.index.generation import REPLACED, NewerFormat, file_identity, fsync_folder

_APPLICATION_ID: Final = 0x53544B52
_VERSION: Final = 1
_GROUP_CHANGES_MAX: Final = 8_192  # Bounds one transaction, and so the wait of who shares it.
_BUSY_MS: Final = 10_000
_PART: Final = 1_024
_SINGLE_STEPS: Final = 256
_IDLE_READERS_MAX: Final = 8
_IDS_PART: Final = 500  # Parameters of one statement, below every build's limit.

_SCHEMA: Final = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE documents(change_offset INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id NOT NULL,"
    " deleted INTEGER NOT NULL, text TEXT, metadata TEXT, crc INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX documents_by_id ON documents(tenant, id)",
    "CREATE TABLE vectors(change_offset INTEGER PRIMARY KEY, vector BLOB NOT NULL,"
    " crc INTEGER NOT NULL)",
)

log = structlog.get_logger(__name__)


class DocumentsCorrupt(CorruptError):
    """documents.db is not what was written; `stoker repair` takes what can still be read."""


class StorageFull(CapacityError):
    """No room to write; nothing of the call was kept. Free space and call again."""


class StorageUnavailable(UnavailableError):
    """The file cannot be reached now: locked, unreadable or a failing device."""


@dataclasses.dataclass(slots=True, eq=False)
class _Ticket:
    """One caller's changes, waiting for the commit that takes them."""

    changes: Sequence[Change]
    offset: int = 0
    error: StokerError | None = None
    done: bool = False


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(path, error) from error


def _translate(path: Path, error: sqlite3.Error) -> StokerError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"{path}: the disk is full, or the file at its bound")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageUnavailable(f"{path}: locked by another process for over {_BUSY_MS} ms")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return StorageUnavailable(f"{path}: {error}")
    return DocumentsCorrupt(f"{path}: expected a Stoker document store: {error}")


class DocumentStore:
    """The one document store of a collection. Any thread may call anything.

    Invariants:
        * offsets rise by one per change, in commit order, and ``on_commit`` sees that order;
        * a change is visible to ``on_commit`` only after it is durable;
        * one process writes (the collection holds the lock); any number read;
        * all connections are to the file that was opened, whatever lies at its path since.
    """

    def __init__(
        self,
        path: Path,
        *,
        dim: int,
        writer: sqlite3.Connection | None,
        on_commit: Callable[[Sequence[Change]], None] | None,
        reader: sqlite3.Connection | None = None,
    ) -> None:
        """Use `DocumentStore.open`; both connections are the store's from now on."""
        self._path = path
        self._dim = dim
        self._writer = writer
        self._on_commit = on_commit
        self._commit_lock = threading.Lock()
        self._queue_lock = threading.Lock()
        self._queue: list[_Ticket] = []
        self._idle: list[sqlite3.Connection] = [] if reader is None else [reader]
        self._busy_count = 0
        self._readers_changed = threading.Condition()
        self._closed = False
        self._broken = ""
        self._behind = False  # Whether memory is being brought up to what was committed.
        self._file = file_identity(path)
        self._offset = int(self._meta("change_offset") or 0)

    @classmethod
    def create(cls, path: Path, *, dim: int, change_offset: int = 0) -> None:
        """Make an empty store whose next change has offset ``change_offset`` + 1.

        Written beside and renamed, so a store is there whole or not at all.
        """
        temporary = path.with_name(path.name + ".new")
        for leftover in (temporary, Path(f"{temporary}-wal"), Path(f"{temporary}-shm")):
            leftover.unlink(missing_ok=True)
        with _translated(path), contextlib.closing(sqlite3.connect(temporary)) as connection:
            connection.isolation_level = None
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={_VERSION}")
            connection.execute("BEGIN")
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.executemany(
                "INSERT INTO meta VALUES(?, ?)", [("dim", dim), ("change_offset", change_offset)]
            )
            connection.execute("COMMIT")
        os.rename(temporary, path)
        fsync_folder(path.parent)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        dim: int,
        writable: bool,
        on_commit: Callable[[Sequence[Change]], None] | None = None,
    ) -> DocumentStore:
        """Open a store and check that it is one.

        Args:
            path: The file.
            dim: Dimensions of every vector.
            writable: Whether `write` may be called; at most one process at a time.
            on_commit: Called with each committed group, in offset order, on the thread that
                committed, before the callers return. Must not write to the store.

        Raises:
            DocumentsCorrupt: not a document store, or damaged.
            NewerFormat: a newer Stoker wrote it.
            StorageUnavailable: missing or unreadable.
        """
        if not path.is_file():
            raise StorageUnavailable(f"{path}: no such file")
        with _translated(path):
            connection = _connect(path, writable=writable)
        try:
            with _translated(path):
                _check_schema(path, connection, dim)
            # A reader keeps it: the first to open a log sets its shared memory up, and whoever is
            # the last to close takes that down again, which together take milliseconds.
            writer, reader = (connection, None) if writable else (None, connection)
            return cls(path, dim=dim, writer=writer, on_commit=on_commit, reader=reader)
        except BaseException:
            connection.close()
            raise

    # -- writing ---------------------------------------------------------------------------

    def write(self, changes: Sequence[Change]) -> int:
        """Commit ``changes`` as one unit and return the offset of the last one.

        Blocks for one fsync, or for the rest of one that is under way and one more. All of the
        changes are durable when it returns, none when it raises (after an I/O error of the
        commit itself: unknown, as with any store; the caller was not told yes).

        Raises:
            StorageFull: the disk is full; nothing was written.
            StorageUnavailable: closed, read-only, locked, or the device failed.
            InputError: no changes.
        """
        if not changes:
            raise InputError("expected at least one change, found none")
        ticket = _Ticket(changes)
        with self._queue_lock:
            self._queue.append(ticket)
        try:
            with self._commit_lock:
                if not ticket.done:
                    self._commit_group()
        finally:
            if not ticket.done:  # Interrupted while it waited: nobody is to write it later.
                with self._queue_lock, contextlib.suppress(ValueError):
                    self._queue.remove(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.offset

    def _commit_group(self) -> None:
        """Commit what is queued: the caller of `write` that holds the lock does it for the rest."""
        while True:
            with self._queue_lock:
                size, group = 0, list[_Ticket]()
                while self._queue and (not group or size < _GROUP_CHANGES_MAX):
                    group.append(self._queue.pop(0))
                    size += len(group[-1].changes)
            if not group:
                return
            try:
                written = self._commit(group)
                self._apply(written)
            except StokerError as error:
                for ticket in group:
                    ticket.error = error
            except BaseException as error:
                # One caller's interrupt is no answer for those whose changes it was committing.
                failure = self._interrupted(error)
                for ticket in group:
                    ticket.error = failure
                raise
            finally:
                for ticket in group:
                    ticket.done = True

    def _commit(self, group: Sequence[_Ticket]) -> list[Change]:
        if self._closed or self._broken or self._writer is None:
            reason = self._broken or ("closed" if self._closed else "opened for reading")
            raise StorageUnavailable(f"{self._path}: {reason}")
        self.check_in_place()
        writer, offset, written = self._writer, self._offset, []
        try:
            writer.execute("BEGIN IMMEDIATE")
            for ticket in group:
                rows = []
                for change in _newest_only(ticket.changes):
                    offset += 1
                    rows.append(dataclasses.replace(change, change_offset=offset))
                _insert(writer, rows)
                ticket.offset = offset
                written += rows
            writer.execute("UPDATE meta SET value = ? WHERE key = 'change_offset'", (offset,))
            failpoint("documents.before_commit")
            writer.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
            raise _translate(self._path, error) from error
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            raise
        failpoint("documents.after_commit")
        self._offset = offset
        return written

    def _interrupted(self, error: BaseException) -> StorageUnavailable:
        """Return what to tell who shared a commit that broke off; take no more unless it is sure.

        It is sure where the file holds no change that memory has not seen.
        """
        what = f"a commit broke off ({error!r})"
        try:
            unwritten = not self._behind and self.stored_offset() == self._offset
        except StokerError:
            unwritten = False
        if unwritten:
            return StorageUnavailable(f"{self._path}: {what}; nothing was written, call again")
        self._broken = f"{what}, written or not; open the collection again"
        return StorageUnavailable(f"{self._path}: {self._broken}")

    def _apply(self, written: Sequence[Change]) -> None:
        if self._on_commit is None:
            return
        self._behind = True
        try:
            self._on_commit(written)
            self._behind = False
        except Exception as error:
            # The changes are durable but memory no longer shows them: stop taking more.
            self._broken = f"memory fell behind the log ({error}); open the collection again"
            log.exception("index.changes_not_applied", path=str(self._path))
            raise StorageUnavailable(f"{self._path}: {self._broken}") from error

    @contextlib.contextmanager
    def writes_paused(self) -> Iterator[None]:
        """Hold back commits while the block runs; callers of `write` wait."""
        with self._commit_lock:
            yield

    def purge_deleted(self, upto: int) -> int:
        """Forget deletes up to offset ``upto``; only when every segment was sealed after it."""
        return self._maintain(
            "DELETE FROM documents WHERE deleted = 1 AND change_offset <= ?", upto
        )

    def forget_vectors(self, upto: int) -> int:
        """Drop the stored vectors up to offset ``upto``; the sealed segments hold them too."""
        return self._maintain("DELETE FROM vectors WHERE change_offset <= ?", upto)

    def _maintain(self, statement: str, upto: int) -> int:
        with self._commit_lock, _translated(self._path):
            if self._writer is None or self._closed:
                raise StorageUnavailable(f"{self._path}: closed or opened for reading")
            self.check_in_place()
            return int(self._writer.execute(statement, (upto,)).rowcount)

    @property
    def in_place(self) -> bool:
        """Whether the file that is open still lies at its path."""
        return file_identity(self._path) == self._file

    def check_in_place(self) -> None:
        """Return if the file that is open still lies at its path.

        Whoever puts another index into the folder's place leaves us on the old files: a change
        would be acknowledged and lost with them, a merge would take the new index's place, and a
        new connection would read texts of another index.

        Raises:
            StorageUnavailable: it does not.
        """
        if not self.in_place:
            raise StorageUnavailable(f"{self._path}: {REPLACED}")

    # -- reading ---------------------------------------------------------------------------

    @property
    def change_offset(self) -> int:
        """Offset of the newest change that this store has seen committed."""
        return self._offset

    def stored_offset(self) -> int:
        """Return the newest offset in the file, which another process may have written."""
        return int(self._meta("change_offset") or 0)

    def changes(
        self,
        after: int,
        upto: int | None = None,
        *,
        vectors: bool = True,
        bodies: bool = True,
        part: int | None = None,
    ) -> Iterator[Change]:
        """Yield the newest change of each document with ``after`` < offset <= ``upto``, rising.

        All of them as they stood when the first was read; `close` waits for the end.

        Args:
            after: Offset to start behind.
            upto: Offset to stop at; None means the newest.
            vectors: Whether to read vectors.
            bodies: Whether to read text and metadata; without, both come empty.
            part: Rows read at once, None for many; a damaged file gives up more of itself in
                single rows.

        Raises:
            DocumentsCorrupt: a row fails its checksum or cannot be what we wrote.
        """
        body = "d.text, d.metadata, d.crc" if bodies else "NULL, NULL, NULL"
        vector = "v.vector, v.crc" if vectors else "NULL, NULL"
        join = "LEFT JOIN vectors v ON v.change_offset = d.change_offset" if vectors else ""
        statement = (
            f"SELECT d.change_offset, d.tenant, d.id, d.deleted, {body}, {vector} FROM documents d"
            f" {join} WHERE d.change_offset > ? AND d.change_offset <= ?"
            f" ORDER BY d.change_offset LIMIT {part or _PART}"
        )
        last = upto if upto is not None else (1 << 63) - 1
        with self._borrowed() as connection:
            # One snapshot for all parts: a writer that commits in between is seen whole or not.
            with _translated(self._path):
                connection.execute("BEGIN")
            while True:
                with _translated(self._path):
                    rows = connection.execute(statement, (after, last)).fetchall()
                for row in rows:
                    change = self._decode(row, bodies)
                    after = change.change_offset
                    yield change
                if len(rows) < (part or _PART):
                    return

    def documents(self, tenant: str, ids: Sequence[DocumentId]) -> list[Document | None]:
        """Return each id's document, None where there is none."""
        found: dict[DocumentId, Document] = {}
        for start in range(0, len(ids), _IDS_PART):
            part = list(ids[start : start + _IDS_PART])
            marks = ", ".join("?" * len(part))
            rows = self._query(
                "SELECT change_offset, tenant, id, deleted, text, metadata, crc, NULL, NULL"
                f" FROM documents WHERE tenant = ? AND id IN ({marks}) AND deleted = 0",
                (tenant, *part),
            )
            for row in rows:
                change = self._decode(row, bodies=True)
                found[change.id] = Document(
                    change.tenant, change.id, change.text, change.metadata, change.change_offset
                )
        return [found.get(document_id) for document_id in ids]

    def metadata(
        self, tenant: str, ids: Sequence[DocumentId]
    ) -> Iterator[tuple[DocumentId, Mapping[str, Any]]]:
        """Yield the id and metadata of those ``ids`` that are there; no text is read."""
        for start in range(0, len(ids), _IDS_PART):
            part = list(ids[start : start + _IDS_PART])
            marks = ", ".join("?" * len(part))
            for found_id, encoded in self._query(
                f"SELECT id, metadata FROM documents WHERE tenant = ? AND id IN ({marks})"
                " AND deleted = 0",
                (tenant, *part),
            ):
                try:
                    parsed = orjson.loads(encoded) if encoded else {}
                except (ValueError, TypeError) as error:
                    raise DocumentsCorrupt(
                        f"{self._path}: metadata of {found_id!r}: {error}"
                    ) from error
                yield found_id, parsed if isinstance(parsed, dict) else {}

    def id_kind(self) -> type[int] | type[str] | None:
        """Return the type of the stored ids, None while there are none."""
        rows = self._query("SELECT id FROM documents LIMIT 1", ())
        return None if not rows else (int if isinstance(rows[0][0], int) else str)

    def damage(self) -> list[str]:
        """Check every page and every row; return one line for each thing found wrong."""
        found: list[str] = []
        try:
            for (line,) in self._query("PRAGMA integrity_check(100)", ()):
                if line != "ok":
                    found.append(f"{self._path}: {line}")
        except StokerError as error:
            found.append(str(error))
        after = 0
        while True:
            try:
                for change in self.changes(after):
                    after = change.change_offset
                return found
            except DocumentsCorrupt as error:
                found.append(str(error))
                skipped = getattr(error, "change_offset", None)
                if skipped is None or len(found) >= 1_000:
                    return found
                after = skipped

    def next_readable(self, after: int) -> int | None:
        """Return an offset behind ``after`` from which rows can be read again; None if none is.

        For repairs of a file whose pages are damaged. Looks row by row first, then in growing
        steps, which may pass over as many readable rows as the damage spans.
        """
        width = 1
        while after + width < self._offset:
            try:
                next(self.changes(after + width, part=1), None)
                return after + width
            except DocumentsCorrupt as error:
                if getattr(error, "change_offset", None) is not None:
                    return after + width
                width += 1 if width < _SINGLE_STEPS else width // 2
        return None

    def _decode(self, row: tuple[Any, ...], bodies: bool) -> Change:
        offset, tenant, document_id, deleted, text, metadata, crc, vector, vector_crc = row
        try:
            if not isinstance(tenant, str) or not isinstance(document_id, int | str):
                raise ValueError("expected a tenant and an id")
            if not isinstance(text, str | None) or not isinstance(metadata, str | None):
                raise ValueError("expected text and metadata as text")
            if bodies and crc != row_crc(tenant, document_id, text, metadata):
                raise ValueError("the row's checksum differs")
            parsed = orjson.loads(metadata) if metadata else {}
            if not isinstance(parsed, dict):
                raise ValueError("expected metadata to be an object")
            array: NDArray[np.float32] | None = None
            if vector is not None:
                if len(vector) != 4 * self._dim or zlib.crc32(vector) != vector_crc:
                    raise ValueError(
                        f"expected a vector of {4 * self._dim} bytes with its checksum, "
                        f"found {len(vector)}"
                    )
                array = np.frombuffer(vector, dtype="<f4")
        except (ValueError, TypeError) as error:
            failure = DocumentsCorrupt(f"{self._path}: change {offset}: {error}")
            failure.change_offset = offset  # type: ignore[attr-defined]
            raise failure from error
        return Change(offset, tenant, document_id, bool(deleted), text, parsed, array)

    def _meta(self, key: str) -> Any:
        rows = self._query("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def _query(self, statement: str, parameters: Sequence[Any]) -> list[Any]:
        """Run one read and return all rows."""
        with self._borrowed() as connection, _translated(self._path):
            return connection.execute(statement, parameters).fetchall()

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[sqlite3.Connection]:
        """Lend a reading connection; a transaction that was begun on it ends with the block."""
        with self._readers_changed:
            if self._closed:
                raise StorageUnavailable(f"{self._path}: closed")
            connection = self._idle.pop() if self._idle else None
            self._busy_count += 1
        try:
            if connection is None:
                connection = self._connected_reader()
            yield connection
        finally:
            keep = connection is not None and _ended(connection)
            with self._readers_changed:
                self._busy_count -= 1
                if connection is not None and keep and len(self._idle) < _IDLE_READERS_MAX:
                    self._idle.append(connection)
                elif connection is not None:
                    connection.close()
                self._readers_changed.notify_all()

    def _connected_reader(self) -> sqlite3.Connection:
        with _translated(self._path):
            connection = _connect(self._path, writable=False)
        try:
            self.check_in_place()
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close every connection; calls that are under way end first, later ones are refused."""
        with self._commit_lock:
            with self._readers_changed:
                self._closed = True
                self._readers_changed.wait_for(lambda: self._busy_count == 0)
                for connection in self._idle:
                    connection.close()
                self._idle.clear()
            if self._writer is not None:
                _end_log(self._writer)
                self._writer.close()
                self._writer = None


def _end_log(writer: sqlite3.Connection) -> None:
    """Leave the whole store in its one file, so that readers need none beside it.

    Who only reads a store with a log makes the log's two files and cannot remove them. Where a
    reader is connected it stays as it is, and so does what is in it.
    """
    with contextlib.suppress(sqlite3.Error):
        writer.execute("PRAGMA busy_timeout=0")
        writer.execute("PRAGMA journal_mode=DELETE")


def _ended(connection: sqlite3.Connection) -> bool:
    """End a read's transaction; False where the connection is no longer good for another."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        return False
    return True


def _newest_only(changes: Sequence[Change]) -> list[Change]:
    """Drop all but the last change of each document, keeping order."""
    newest = {(change.tenant, change.id): change for change in changes}
    return list(newest.values()) if len(newest) < len(changes) else list(changes)


def _insert(writer: sqlite3.Connection, rows: Sequence[Change]) -> None:
    keys = [(row.tenant, row.id) for row in rows]
    writer.executemany(
        "DELETE FROM vectors WHERE change_offset ="
        " (SELECT change_offset FROM documents WHERE tenant = ? AND id = ?)",
        keys,
    )
    writer.executemany("DELETE FROM documents WHERE tenant = ? AND id = ?", keys)
    bodies, vectors = [], []
    for row in rows:
        metadata = encode_metadata(row.metadata, row.tenant, "metadata") if row.metadata else None
        crc = row_crc(row.tenant, row.id, row.text, metadata)
        bodies.append(
            (row.change_offset, row.tenant, row.id, int(row.deleted), row.text, metadata, crc)
        )
        if row.vector is not None:
            blob = np.ascontiguousarray(row.vector, dtype="<f4").tobytes()
            vectors.append((row.change_offset, blob, zlib.crc32(blob)))
    writer.executemany("INSERT INTO documents VALUES(?, ?, ?, ?, ?, ?, ?)", bodies)
    writer.executemany("INSERT INTO vectors VALUES(?, ?, ?)", vectors)


def _connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    if writable:
        return _connected(path, "mode=rw")
    try:
        return _connected(path, "mode=ro")
    except sqlite3.OperationalError as error:
        # A log needs files beside it, which a read-only volume cannot have. Without a log the
        # store is whole in its one file, and nobody can change it there.
        code = error.sqlite_errorcode & 0xFF
        wal = Path(f"{path}-wal")
        if code not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or (
            wal.exists() and wal.stat().st_size
        ):
            raise
        return _connected(path, "mode=ro&immutable=1")


def _connected(path: Path, how: str) -> sqlite3.Connection:
    # The connection is used by one thread at a time, but not always by the same one.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=_BUSY_MS / 1000,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        # A hostile file must not run anything of its own through a view or a trigger.
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA cell_size_check=ON")
        check_version(path, connection)  # Before anything is set: a newer one stays as it is.
        if how == "mode=rw":
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA journal_size_limit=67108864")
        else:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def check_version(path: Path, connection: sqlite3.Connection) -> None:
    """Return if the file is a document store of a version that this Stoker reads.

    SQLite's header has no checksum, so a newer version is told by our mark beside it alone: to call
    a damaged one newer keeps all of it, and the other way round a repair would write it as older.

    Raises:
        NewerFormat: a newer Stoker wrote it.
        DocumentsCorrupt: it is no document store, or of a version that never was.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == _APPLICATION_ID and version > _VERSION:
        raise NewerFormat(path, version, f"version {_VERSION}")
    if application != _APPLICATION_ID or version != _VERSION:
        raise DocumentsCorrupt(
            f"{path}: expected a Stoker document store of version {_VERSION}, "
            f"found application {application:#x}, version {version}"
        )


def _check_schema(path: Path, connection: sqlite3.Connection, dim: int) -> None:
    found = connection.execute(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY sql"
    ).fetchall()
    if [row[0] for row in found] != sorted(_SCHEMA):
        raise DocumentsCorrupt(f"{path}: expected the tables of version {_VERSION}, found others")
    stored = connection.execute("SELECT value FROM meta WHERE key = 'dim'").fetchone()
    if stored is None or stored[0] != dim:
        raise DocumentsCorrupt(
            f"{path}: expected vectors of {dim} dimensions, found {stored and stored[0]}"
        )
