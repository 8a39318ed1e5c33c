"""Vectors already computed, on disk, so that no text is embedded twice by the same model.

One SQLite file. The key is (model fingerprint, hash of the text), so a changed model or a changed
text misses. A cache may always be lost: an unreadable row counts as a miss, an unreadable file is
moved aside and a new one started. Rows are added in transactions, so a crash loses at most the
last batch and never leaves half a vector.

Safe for several processes at once; one object belongs to one thread.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import UnavailableError

_log = structlog.get_logger(__name__)

_SCHEMA_VERSION = 1
_BUSY_PAUSE_S = 0.01
_LOOKUP_KEYS_MAX = 500
_NORM_TOLERANCE = 1e-2


class EmbeddingCache:
    """A bounded, crash-safe map from (model, text) to a unit vector.

    Args:
        path: The SQLite file; its folder is made when missing.
        rows_max: Above this many rows the oldest go; 1,000,000 rows of 384 numbers are 1.6 GB.
        timeout_s: How long to wait for another process that is writing.

    Raises:
        UnavailableError: the file cannot be made or opened (folder, permission, disk).
    """

    def __init__(self, path: Path, *, rows_max: int = 1_000_000, timeout_s: float = 30.0) -> None:
        self._path = path
        self._rows_max = rows_max
        self._timeout_s = timeout_s
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._open()
        except (OSError, sqlite3.OperationalError) as error:
            raise UnavailableError(f"embedding cache {path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            for end in ("-wal", "-shm"):
                Path(f"{self._path}{end}").unlink(missing_ok=True)
            _log.warning(
                "service.embedding_cache_reset",
                path=str(self._path),
                moved_to=str(aside),
                reason=str(error),
            )
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None)
        try:
            self._turn_to_wal(db)
            db.execute("PRAGMA synchronous=NORMAL")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _SCHEMA_VERSION):
                raise UnavailableError(
                    f"embedding cache {self._path} has version {version}, this program writes "
                    f"{_SCHEMA_VERSION}; name another file or remove it"
                )
            db.execute(
                "CREATE TABLE IF NOT EXISTS vectors ("
                " place INTEGER PRIMARY KEY AUTOINCREMENT, model BLOB NOT NULL,"
                " text BLOB NOT NULL, vector BLOB NOT NULL, UNIQUE (model, text))"
            )
            db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def _turn_to_wal(self, db: sqlite3.Connection) -> None:
        """Have a log written ahead; waits for another process that does the same just now.

        SQLite does not wait by itself for this one change: two who make a new file at once would
        be told that it is locked.
        """
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                db.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() >= end_s:
                    raise
                time.sleep(_BUSY_PAUSE_S)

    def get(self, model: str, texts: Sequence[str]) -> list[NDArray[np.float32] | None]:
        """Return each text's stored unit vector, or None where there is none (or a bad one)."""
        key = _model_key(model)
        wanted = [_text_key(text) for text in texts]
        found: dict[bytes, NDArray[np.float32]] = {}
        for start in range(0, len(wanted), _LOOKUP_KEYS_MAX):
            part = wanted[start : start + _LOOKUP_KEYS_MAX]
            marks = ",".join("?" * len(part))
            query = f"SELECT text, vector FROM vectors WHERE model = ? AND text IN ({marks})"
            try:
                rows = self._db.execute(query, (key, *part)).fetchall()
            except sqlite3.DatabaseError as error:
                _log.warning("service.embedding_cache_unread", reason=str(error))
                continue
            for text, blob in rows:
                vector = _decode(blob)
                if vector is not None:
                    found[text] = vector
        return [found.get(text) for text in wanted]

    def put(self, model: str, texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        """Store one vector per text, in one transaction.

        Args:
            vectors: float32, shape (len(texts), dim), unit length.

        Raises:
            UnavailableError: the disk is full or the file is locked for longer than the timeout.
        """
        key = _model_key(model)
        plain = np.ascontiguousarray(vectors, dtype="<f4")
        rows = [(key, _text_key(t), v.tobytes()) for t, v in zip(texts, plain, strict=True)]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(
                    "INSERT OR REPLACE INTO vectors (model, text, vector) VALUES (?, ?, ?)", rows
                )
                (last,) = self._db.execute("SELECT MAX(place) FROM vectors").fetchone()
                if last is not None and last > self._rows_max:
                    self._db.execute(
                        "DELETE FROM vectors WHERE place <= ?", (last - self._rows_max,)
                    )
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise UnavailableError(f"embedding cache {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file; the object cannot be used afterwards."""
        self._db.close()

    def __enter__(self) -> EmbeddingCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _model_key(model: str) -> bytes:
    return hashlib.blake2b(model.encode(), digest_size=16).digest()


def _text_key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _decode(blob: object) -> NDArray[np.float32] | None:
    if not isinstance(blob, bytes) or not blob or len(blob) % 4:
        return None
    vector = np.frombuffer(blob, dtype="<f4").astype(np.float32)
    norm = float(np.linalg.norm(vector)) if np.isfinite(vector).all() else 0.0
    return vector if abs(norm - 1.0) <= _NORM_TOLERANCE else None
